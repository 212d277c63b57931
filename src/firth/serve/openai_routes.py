"""OpenAI's API: completions, chat completions, embeddings and the list of models."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from firth.serve import schemas
from firth.serve.batching import Job
from firth.serve.errors import ApiError
from firth.serve.generation import Choice
from firth.serve.model_server import ModelServer
from firth.serve.served_model import ServedModel
from firth.tasks.conversation import DEFAULT_NEW_TOKENS

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
DEFAULT_TEMPERATURE = 1.0  # OpenAI's
V1_TAGS: Any = ["OpenAI"]
EVENT_SCHEMA = {"type": "object", "properties": {"data": {"type": "string"}}}  # one server-sent event
EVENT_STREAM: dict[str, Any] = {"content": {"text/event-stream": {"schema": EVENT_SCHEMA}}}
FIRTH_FIELDS = ("top_p", "top_k", "min_p", "repetition_penalty", "no_repeat_ngram_size", "min_new_tokens")
SAMPLING_ONLY_FIELDS = ("top_p", "top_k", "min_p")


def add_openai_routes(app: FastAPI, server: ModelServer) -> None:
    add_model_routes(app, server)
    add_completion_routes(app, server)
    add_embedding_route(app, server)


def add_model_routes(app: FastAPI, server: ModelServer) -> None:
    @app.get("/v1/models", tags=V1_TAGS, response_model=schemas.ModelList)
    async def list_models() -> Any:
        """List the models."""
        return {"object": "list", "data": [model.describe() for model in server.models.values()]}

    @app.get("/v1/models/{name}", tags=V1_TAGS, response_model=schemas.ModelAnswer)
    async def get_model(name: str) -> Any:
        """Describe one model."""
        return server.find(name, lambda _: True).describe()


def add_completion_routes(app: FastAPI, server: ModelServer) -> None:
    @app.post("/v1/completions", tags=V1_TAGS, response_model=schemas.CompletionAnswer, responses={200: EVENT_STREAM})
    async def complete(body: schemas.CompletionRequest, request: Request) -> Response:
        """Continue a prompt, or answer it. With `stream`, by server-sent events."""
        model = server.find(body.model, lambda _: True)
        prompts = list_prompts(body.prompt)
        settings = sampling_settings(body, body.max_tokens)

        def make_job() -> Job:
            texts = [text for text in prompts if isinstance(text, str)]
            encoded = iter(model.task_prompts(texts, chat=False))
            return model.make_generation_job(
                [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts],
                settings,
                DEFAULT_COMPLETION_TOKENS,
                is_streamed=bool(body.stream),
                seed=body.seed,
                logprobs=body.logprobs is not None,
            )

        return await CompletionWriter(model, "cmpl", "text_completion", body).answer(server, request, make_job)

    @app.post("/v1/chat/completions", tags=V1_TAGS, response_model=schemas.ChatAnswer, responses={200: EVENT_STREAM})
    async def chat(body: schemas.ChatRequest, request: Request) -> Response:
        """Answer a dialogue in the checkpoint's chat template. With `stream`, by server-sent events."""
        model = server.find(body.model, lambda _: True)
        messages = [read_message(message) for message in body.messages]
        settings = sampling_settings(body, body.max_completion_tokens or body.max_tokens)
        settings |= structure_settings(body.response_format)

        def make_job() -> Job:
            if not model.has_chat_template:
                message = f"The model {model.name} has no chat template: ask it by /v1/completions."
                raise ApiError(400, message, "no_chat_template", "model")
            return model.make_generation_job(
                [model.chat_prompt(messages)],
                settings,
                DEFAULT_NEW_TOKENS,
                is_streamed=bool(body.stream),
                seed=body.seed,
                logprobs=bool(body.logprobs),
            )

        return await ChatWriter(model, "chatcmpl", "chat.completion", body).answer(server, request, make_job)


def add_embedding_route(app: FastAPI, server: ModelServer) -> None:
    @app.post("/v1/embeddings", tags=V1_TAGS, response_model=schemas.EmbeddingAnswer)
    async def embed(body: schemas.EmbeddingRequest, request: Request) -> Response:
        """Embed texts as vectors, pooled as the checkpoint was fine-tuned, else by the mean."""
        model = server.find(body.model, lambda _: True)
        texts = [body.input] if isinstance(body.input, str) else body.input
        vectors, tokens = await server.result(request, model, lambda: model.make_embedding_job(texts))

        def encode(vector: Any) -> Any:
            as_base64 = body.encoding_format == "base64"
            return base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.tolist()

        data = [{"object": "embedding", "index": i, "embedding": encode(vector)} for i, vector in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": model.name, "usage": usage})


def list_prompts(prompt: Any) -> list[str | list[int]]:
    """Return the prompts of a request: a text, several, token ids, or several lists of them."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "There is no prompt.", "invalid_value", "prompt")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


def read_message(message: schemas.Message) -> tuple[str, str]:
    """Return role and text. OpenAI renamed the role system to developer."""
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return "system" if message.role == "developer" else message.role, text


def sampling_settings(body: schemas.SamplingFields, max_tokens: int | None) -> dict[str, Any]:
    """Return fields of GenerationConfig; those that only sampling reads are left out at temperature 0."""
    temperature = DEFAULT_TEMPERATURE if body.temperature is None else body.temperature
    given = {name: value for name in FIRTH_FIELDS if (value := getattr(body, name)) is not None}
    if temperature == 0:
        given = {name: value for name, value in given.items() if name not in SAMPLING_ONLY_FIELDS}
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    tokens = {} if max_tokens is None else {"max_new_tokens": max_tokens}
    return {**given, **tokens, "temperature": temperature, "num_return_sequences": body.n or 1, "stop": tuple(stop)}


def structure_settings(response_format: Any) -> dict[str, Any]:
    """Return the field of GenerationConfig that makes the text follow a response format."""
    if isinstance(response_format, schemas.JsonSchemaFormat):
        return {"json_schema": response_format.json_schema.json_schema}
    return {"json_schema": {"type": "object"}} if isinstance(response_format, schemas.JsonObjectFormat) else {}


class CompletionWriter:
    """Write the answer of a generation, whole or as a stream. `head` is what every part of it begins with."""

    chunk_object = "text_completion"

    def __init__(self, model: ServedModel, prefix: str, object: str, body: Any) -> None:
        self.model, self.body, self.object = model, body, object
        self.head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model.name}
        self.job: Job | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities are asked for: by true in a chat, by 0 in a completion."""
        return self.body.logprobs is not None and self.body.logprobs is not False

    def keep_job(self, make_job: Callable[[], Job]) -> Callable[[], Job]:
        def make() -> Job:
            self.job = make_job()
            return self.job

        return make

    def usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        assert self.job is not None
        new, prompt = sum(len(c.sequence.tokens) for c in choices), self.job.inputs.num_prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    async def answer(self, server: ModelServer, request: Request, make_job: Callable[[], Job]) -> Response:
        respond = self.stream if self.body.stream else self.send
        return await respond(server, request, make_job)

    async def send(self, server: ModelServer, request: Request, make_job: Callable[[], Job]) -> Response:
        choices = await server.result(request, self.model, self.keep_job(make_job))
        written = [self.describe_choice(index, choice) for index, choice in enumerate(choices)]
        return JSONResponse({**self.head, "object": self.object, "choices": written, "usage": self.usage(choices)})

    async def stream(self, server: ModelServer, request: Request, make_job: Callable[[], Job]) -> Response:
        if self.has_logprobs:
            raise ApiError(400, "Log-probabilities are not streamed.", "unsupported_value", "logprobs")
        if getattr(self.body, "echo", None):
            raise ApiError(400, "The prompt is not streamed.", "unsupported_value", "echo")
        wants_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        no_usage = {"usage": None} if wants_usage else {}

        def chunk(*choices: Mapping[str, Any], **more: Any) -> dict[str, Any]:
            return {**self.head, "object": self.chunk_object, "choices": list(choices), **no_usage, **more}

        def describe_end(choices: Sequence[Choice]) -> list[Mapping[str, Any]]:
            ends = [chunk(self.describe_piece(i, None, c.finish_reason)) for i, c in enumerate(choices)]
            return [*ends, *([chunk(usage=self.usage(choices))] if wants_usage else [])]

        return await server.stream(
            request,
            self.model,
            self.keep_job(make_job),
            lambda piece: chunk(self.describe_piece(piece.choice, piece.text)),
            describe_end,
            [chunk(opening) for opening in self.openings()],
        )

    def openings(self) -> list[dict[str, Any]]:
        return []

    def describe_piece(self, index: int, text: str | None, finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "text": text or "", "logprobs": None, "finish_reason": finish_reason}

    def describe_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = choice.full if self.body.echo else choice.new
        logprobs = None
        if self.has_logprobs:
            tokens = self.token_texts(choice)
            starts = [sum(map(len, tokens[:i])) + len(text) - len(choice.new) for i in range(len(tokens))]
            values = choice.sequence.logprobs[: len(tokens)]
            logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": starts}
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def token_texts(self, choice: Choice) -> list[str]:
        return [self.model.tokenizer.decode([i], skip_special_tokens=False) for i in choice.sequence.tokens]


class ChatWriter(CompletionWriter):
    chunk_object = "chat.completion.chunk"

    def openings(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(self.body.n or 1)]

    def describe_piece(self, index: int, text: str | None, finish_reason: str | None = None) -> dict[str, Any]:
        delta = {} if text is None else {"content": text}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def describe_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.new.strip(), "refusal": None}
        logprobs = None
        if self.has_logprobs:
            content = [
                {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
                for token, value in zip(self.token_texts(choice), choice.sequence.logprobs, strict=False)
            ]
            logprobs = {"content": content, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}
