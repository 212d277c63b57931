"""Firth's own routes: generate, fill, classify, tag, answer, tokenize, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from firth.models import make_sequence_template
from firth.serve import schemas
from firth.serve.batching import Job
from firth.serve.config import TASK_KINDS
from firth.serve.generation import Choice
from firth.serve.model_server import ModelServer
from firth.serve.openai_routes import EVENT_STREAM
from firth.serve.served_model import ServedModel

TASK_TAGS: Any = ["Firth"]
WEIGHT_DIGITS = 4


def add_task_routes(app: FastAPI, server: ModelServer) -> None:
    add_text_routes(app, server)  # /generate, /fill
    add_prediction_routes(app, server)  # /classify, /tag, /answer
    add_token_routes(app, server)  # /tokenize, /attention


def add_text_routes(app: FastAPI, server: ModelServer) -> None:
    @app.post("/generate", tags=TASK_TAGS, response_model=schemas.GenerateAnswer, responses={200: EVENT_STREAM})
    async def generate(body: schemas.GenerateRequest, request: Request) -> Response:
        """Continue a prompt, or answer it, as `firth generate` does. With `stream`, by server-sent events."""
        model = server.find(body.model, lambda model: model.can_generate)
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        settings, seed = read_generation_settings(body)
        jobs: list[Job] = []

        def make_job() -> Job:
            encoded = model.task_prompts(prompts, body.chat)
            job = model.make_generation_job(
                encoded, model.generation_defaults() | settings, is_streamed=body.stream, seed=seed, logprobs=True
            )
            jobs.append(job)
            return job

        if body.stream:
            return await server.stream(
                request,
                model,
                make_job,
                lambda piece: {"index": piece.choice, "text": piece.text},
                lambda choices: [
                    {"index": i, "text": "", "finished": choice.sequence.finished, "tokens": choice.sequence.tokens}
                    for i, choice in enumerate(choices)
                ],
            )
        choices: list[Choice] = await server.result(request, model, make_job)
        results = describe_choices(choices, len(choices) // len(prompts))
        new, old = sum(len(choice.sequence.tokens) for choice in choices), jobs[0].inputs.num_prompt_tokens
        usage = {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new}
        return JSONResponse({"model": model.name, "results": results, "usage": usage})

    @app.post("/fill", tags=TASK_TAGS, response_model=schemas.FillAnswer)
    async def fill(body: schemas.FillRequest, request: Request) -> Any:
        """Predict the most likely words for the blanks of a text."""
        model = server.find(body.model, lambda model: model.can_fill)
        texts = [body.text] if isinstance(body.text, str) else body.text
        found = await server.result(request, model, lambda: model.make_fill_job(texts, body.top, body.compare))
        results = [
            {
                "text": text,
                "blanks": [
                    {"guesses": [{"text": guess.text, "probability": guess.probability} for guess in blank.guesses]}
                    for blank in blanks
                ],
            }
            for text, blanks in zip(texts, found, strict=True)
        ]
        return {"model": model.name, "results": results}


def add_prediction_routes(app: FastAPI, server: ModelServer) -> None:
    async def predict(
        body: Any, inputs: Sequence[Any], route: str, request: Request
    ) -> tuple[ServedModel, str, list[dict[str, Any]]]:
        kinds = TASK_KINDS[route]
        model = server.find(body.model, lambda model: any(kind in kinds for kind in model.tasks.values()))
        task = model.find_task(kinds, body.task)
        records = await server.result(request, model, lambda: model.make_prediction_job(inputs, task))
        return model, task, records

    @app.post("/classify", tags=TASK_TAGS, response_model=schemas.ClassifyAnswer, response_model_exclude_unset=True)
    async def classify(body: schemas.PredictionRequest, request: Request) -> Any:
        """Label texts or pairs, choose among endings, or score: what the model was fine-tuned for."""
        model, task, records = await predict(body, body.inputs, "/classify", request)
        return {"model": model.name, "task": task, "results": records}

    @app.post("/tag", tags=TASK_TAGS, response_model=schemas.TagAnswer, response_model_exclude_unset=True)
    async def tag(body: schemas.PredictionRequest, request: Request) -> Any:
        """Find spans, such as names, or tag each word."""
        model, task, records = await predict(body, body.inputs, "/tag", request)
        return {"model": model.name, "task": task, "results": records}

    @app.post("/answer", tags=TASK_TAGS, response_model=schemas.QuestionAnswer, response_model_exclude_unset=True)
    async def answer(body: schemas.QuestionRequest, request: Request) -> Any:
        """Find the answer to a question in a context."""
        model, _, records = await predict(body, [[body.question, body.context]], "/answer", request)
        return {"model": model.name, **records[0]}


def add_token_routes(app: FastAPI, server: ModelServer) -> None:
    @app.post("/tokenize", tags=TASK_TAGS, response_model=schemas.TokenizeAnswer)
    async def tokenize(body: schemas.TokenizeRequest) -> Any:
        """Split texts into tokens, with the characters of each."""
        model = server.find(body.model, lambda _: True)
        texts = [body.text] if isinstance(body.text, str) else body.text
        results = await server.read(tokenize_texts, model, texts, body.add_special_tokens)
        return {"model": model.name, "results": results}

    @app.post("/attention", tags=TASK_TAGS, response_model=schemas.AttentionAnswer)
    async def attention(body: schemas.AttentionRequest, request: Request) -> Response:
        """Return the attention weights of a text, by layer and head."""
        model = server.find(body.model, lambda model: model.has_attention)

        def make_job() -> Job:
            text: str | list[int] = model.task_prompts([body.text], None)[0] if body.is_prompt else body.text
            model.check_token_ids(body.new_tokens, "new_tokens")
            target = body.new_tokens or body.target
            window = (body.queries, body.keys)
            return model.make_attention_job(text, target, body.layers, body.heads, *window, body.permutation)

        found = await server.result(request, model, make_job)
        answer = {
            "model": model.name,
            "tokens": found.tokens,
            "target_tokens": found.target_tokens,
            "layers": found.layers,
            "heads": found.heads,
            "weights": {kind: found.matrices[kind].round(WEIGHT_DIGITS).tolist() for kind in found.matrices},
        }
        return JSONResponse(answer)


def read_generation_settings(body: schemas.GenerateRequest) -> tuple[dict[str, Any], int]:
    """Return the fields of GenerationConfig that a request sets, and its seed."""
    given = {name: getattr(body, name) for name in schemas.GENERATION_FIELDS}
    settings = {name: value for name, value in given.items() if value is not None}
    seed = settings.pop("seed", 0)
    if isinstance(settings.get("stop"), str):
        settings["stop"] = [settings["stop"]]
    return settings, seed


def describe_choices(choices: Sequence[Choice], per_prompt: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": i // per_prompt,
            "text": choice.full,
            "new": choice.new,
            "tokens": choice.sequence.tokens,
            "logprobs": choice.sequence.logprobs,
            "score": choice.sequence.score,
            "finished": choice.sequence.finished,
            **choice.facts,
        }
        for i, choice in enumerate(choices)
    ]


def tokenize_texts(model: ServedModel, texts: Sequence[str], add_special_tokens: bool) -> list[dict[str, Any]]:
    """Return ids, tokens and offsets of each text; special tokens have no offsets."""
    tokenizer = model.tokenizer
    template = make_sequence_template(model.model.config, tokenizer.vocab)
    prefix, suffix = (template.prefix_ids, template.suffix_ids) if add_special_tokens else ((), ())
    results = []
    for encoding in tokenizer.encode_with_offsets(texts):
        ids = [*prefix, *encoding.ids, *suffix]
        tokens = [str(tokenizer.backend.id_to_token(i)) for i in ids]
        offsets = [*[None] * len(prefix), *encoding.offsets, *[None] * len(suffix)]
        results.append({"ids": ids, "tokens": tokens, "offsets": offsets})
    return results
