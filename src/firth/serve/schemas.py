"""The requests and answers of the server, as types. FastAPI checks requests by them and writes the OpenAPI page.

Numbers and flags are strict: "5" is not 5, and true is not 1. Unknown fields are refused, so that a misspelt one is
not ignored.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, create_model

from firth.generate.config import GENERATION_BOUNDS, GenerationConfig


def check_json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse settings of the library that follows the schema."""
    if "x-guidance" in schema:
        raise ValueError("x-guidance is not allowed in a request")
    return schema


Int = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Seed = Annotated[int, Strict(), Field(ge=-(2**53), le=2**53)]  # exact in every JSON reader
Text = Annotated[str, Field(min_length=1)]
Regex = Annotated[str, Field(min_length=1, max_length=10_000)]
JsonSchema = Annotated[dict[str, Any], AfterValidator(check_json_schema)]
StopStrings = Text | Annotated[list[Text], Field(max_length=16)]

MAX_CHOICES, MAX_TEXTS, MAX_GUESSES, MAX_NEW_TOKENS = 128, 2048, 1000, 2**20
# Fields of GenerationConfig that a request may set. None names a file: a schema is an object, choices are a list.
GENERATION_FIELDS = (
    *("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("no_repeat_ngram_size", "num_beams", "length_penalty", "early_stopping", "num_return_sequences", "stop", "seed"),
    *("json_schema", "regex", "choices"),
)


BOUNDS: dict[str, Any] = {name: {"ge": low, "le": high} for name, (low, high) in GENERATION_BOUNDS.items()}
SamplingTemperature = Annotated[Number, Field(**BOUNDS["temperature"])]
RepetitionPenalty = Annotated[Number, Field(**BOUNDS["repetition_penalty"])]
LengthPenalty = Annotated[Number, Field(**BOUNDS["length_penalty"])]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Answer(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(Answer):
    """Every answer other than 200."""

    error: ErrorDetail


# --- OpenAI's API


class SamplingFields(Request):
    """What completions and chat completions share. The last five fields are Firth's own."""

    model: Text
    temperature: SamplingTemperature | None = Field(
        default=None, description="0 takes the likeliest token. Default: 1."
    )
    top_p: Number | None = Field(default=None, gt=0, le=1)
    n: Int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: StopStrings | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    presence_penalty: Number | None = Field(default=None, ge=0, le=0, description="Not supported: 0 only.")
    frequency_penalty: Number | None = Field(default=None, ge=0, le=0, description="Not supported: 0 only.")
    user: str | None = Field(default=None, description="Ignored.")
    top_k: Int | None = Field(default=None, ge=0, le=2**31)
    min_p: Number | None = Field(default=None, ge=0, le=1)
    repetition_penalty: RepetitionPenalty | None = None
    no_repeat_ngram_size: Int | None = Field(default=None, ge=0, le=1000)
    min_new_tokens: Int | None = Field(default=None, ge=0, le=MAX_NEW_TOKENS)


class StreamOptions(Request):
    include_usage: Flag | None = None
    include_obfuscation: Flag | None = Field(default=None, description="Ignored.")


class CompletionRequest(SamplingFields):
    prompt: str | list[str] | list[Int] | list[list[Int]] = Field(
        description="A text, several, or token ids with their special tokens."
    )
    max_tokens: Int | None = Field(default=None, ge=1, le=MAX_NEW_TOKENS, description="Default: 16.")
    echo: Flag | None = Field(default=None, description="Return the prompt before the new text.")
    logprobs: Int | None = Field(
        default=None, ge=0, le=0, description="0 returns log-probabilities of the chosen tokens."
    )
    best_of: Int | None = Field(default=None, ge=1, le=1, description="Not supported: 1 only.")
    suffix: None = Field(default=None, description="Not supported.")


class TextPart(Request):
    type: Literal["text"]
    text: str


class Message(Request):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=16)]
    name: str | None = Field(default=None, description="Ignored.")


class TextFormat(Request):
    type: Literal["text"]


class JsonObjectFormat(Request):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Request):
    name: str = Field(description="Ignored.")
    description: str | None = Field(default=None, description="Ignored.")
    json_schema: JsonSchema = Field(alias="schema")
    strict: Flag | None = Field(default=None, description="Ignored: the text always follows the schema.")


class JsonSchemaFormat(Request):
    """JSON that a JSON schema allows."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class ChatRequest(SamplingFields):
    messages: list[Message] = Field(min_length=1, max_length=1000)
    max_tokens: Int | None = Field(default=None, ge=1, le=MAX_NEW_TOKENS)
    max_completion_tokens: Int | None = Field(
        default=None, ge=1, le=MAX_NEW_TOKENS, description="Default: 256, or what fits."
    )
    logprobs: Flag | None = Field(default=None, description="Return the log-probabilities of the chosen tokens.")
    top_logprobs: Int | None = Field(default=None, ge=0, le=0, description="Not supported: 0 only.")
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = Field(default=None, discriminator="type")


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None = None
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: CompletionLogprobs | None = None


class CompletionAnswer(Answer):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class AssistantMessage(Answer):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class TokenLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[Any] = []


class ChatLogprobs(Answer):
    content: list[TokenLogprob]
    refusal: None = None


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    finish_reason: Literal["stop", "length"]
    logprobs: ChatLogprobs | None = None


class ChatAnswer(Answer):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class EmbeddingRequest(Request):
    model: Text
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="base64: little-endian float32. Default: float."
    )
    dimensions: None = Field(default=None, description="Not supported.")
    user: str | None = Field(default=None, description="Ignored.")


class Embedding(Answer):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(Answer):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class ModelAnswer(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    architecture: str
    family: str
    max_length: int | None
    tasks: dict[str, str]
    has_chat_template: bool
    abilities: list[str] = Field(description="generate, fill, attention.")
    labels: dict[str, list[str]] = Field(description="Of each task.")
    parameters: int
    num_layers: int
    tokenizer: str
    vocab_size: int
    unknown_id: int | None = Field(description="The id of every piece that the tokenizer does not know.")


class ModelList(Answer):
    object: Literal["list"] = "list"
    data: list[ModelAnswer]


# --- Firth's own

ModelName = Annotated[
    Text | None, Field(description="A name of /v1/models. Default: the only model that can answer this request.")
]
PredictionInput = Annotated[
    Text | Annotated[list[Text], Field(min_length=1, max_length=100)] | dict[str, Any],
    Field(description="A text, several texts (a pair, or context and choices), or a record with the training columns."),
]
Inputs = Annotated[list[PredictionInput], Field(min_length=1, max_length=MAX_TEXTS)]
Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]


def generation_fields() -> dict[str, Any]:
    """Return the fields of GenerationConfig that a request may set, with their help texts; None keeps the default."""
    hints, kinds = get_type_hints(GenerationConfig), {int: Int, float: Number, bool: Flag}
    by_name = {f.name: f for f in fields(GenerationConfig)}
    special: dict[str, Any] = {"stop": StopStrings, "seed": Seed, "json_schema": JsonSchema, "regex": Regex}
    special["choices"] = Annotated[list[Text], Field(min_length=1, max_length=1000)]
    return {
        name: (
            (special.get(name) or kinds[hints[name]]) | None,
            Field(
                default=None,
                description=by_name[name].metadata["help"] + (f" Default: {shown}." if shown != "None" else ""),
                **BOUNDS.get(name, {}),
            ),
        )
        for name in GENERATION_FIELDS
        for shown in [by_name[name].metadata["default"]]
    }


class GenerateBase(Request):
    model: ModelName = None
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
    chat: Flag | None = Field(
        default=None, description="Read the prompt as a user's message. Default: true after fine-tuning on dialogues."
    )
    stream: Flag = False


GenerateRequest: Any = create_model("GenerateRequest", __base__=GenerateBase, **generation_fields())


class GeneratedText(Answer):
    prompt: int = Field(description="Index of the prompt.")
    text: str = Field(description="Prompt and new text; the answer alone where the model does not continue its prompt.")
    new: str
    tokens: list[int]
    logprobs: list[float]
    score: float
    finished: bool
    complete: bool | None = Field(default=None, description="With a schema, regex or choices: false if it was cut.")
    value: Any = Field(default=None, description="With a schema: the JSON value.")


class GenerateAnswer(Answer):
    model: str
    results: list[GeneratedText]
    usage: Usage


class FillRequest(Request):
    model: ModelName = None
    text: Texts = Field(description="A text with blanks, written [MASK] or ___, or several.")
    top: Int = Field(default=5, ge=1, le=MAX_GUESSES)
    compare: Flag = Field(
        default=False,
        description="Give each blank the candidates of the same blank in the other texts too (encoders).",
    )


class GuessAnswer(Answer):
    text: str
    probability: float


class BlankAnswer(Answer):
    guesses: list[GuessAnswer]


class FilledText(Answer):
    text: str
    blanks: list[BlankAnswer]


class FillAnswer(Answer):
    model: str
    results: list[FilledText]


class PredictionRequest(Request):
    model: ModelName = None
    task: Text | None = Field(default=None, description="One of the tasks of a model that learned several.")
    inputs: Inputs


class LabelResult(Answer):
    label: str
    probability: float
    probabilities: dict[str, float]


class ScoreResult(Answer):
    score: float


class ChoiceResult(Answer):
    choice: int
    text: str
    probability: float
    probabilities: list[float]


class ClassifyAnswer(Answer):
    model: str
    task: str
    results: list[LabelResult | ChoiceResult | ScoreResult]


class Span(Answer):
    type: str
    text: str
    start: int
    end: int
    probability: float | None = None


class SpansResult(Answer):
    spans: list[Span]


class WordTagsResult(Answer):
    words: list[str]
    tags: list[str]


class TagAnswer(Answer):
    model: str
    task: str
    results: list[SpansResult | WordTagsResult]


class QuestionRequest(Request):
    model: ModelName = None
    task: Text | None = None
    question: Text
    context: Text


class QuestionAnswer(Answer):
    model: str
    answer: str = Field(description="Empty if the context does not answer.")
    start: int = Field(description="The first character of the answer in the context, or -1.")
    end: int
    probability: float | None = None


class TokenizeRequest(Request):
    model: ModelName = None
    text: str | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
    add_special_tokens: Flag = False


class TokenizedText(Answer):
    ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int] | None] = Field(description="Characters [start, end) of a token; special ones: null.")


class TokenizeAnswer(Answer):
    model: str
    results: list[TokenizedText]


Window = tuple[Annotated[Int, Field(ge=0, le=2**20)], Annotated[Int, Field(ge=0, le=2**20)]]


Permutation = Annotated[
    Annotated[Int, Field(ge=0, le=2**31)] | None,
    Field(description="Attend in this random order, as in pretraining (XLNet). By default to all tokens."),
]


class AttentionRequest(Request):
    model: ModelName = None
    text: Text
    target: str = Field(default="", description="What the decoder of an encoder-decoder reads.")
    is_prompt: Flag = Field(
        default=False, description="Read the text as /generate does: with the prefix of the checkpoint's task."
    )
    new_tokens: Annotated[list[Int], Field(max_length=4096)] = Field(
        default=[], description="Ids of a generated text, in place of `target`."
    )
    layers: Annotated[list[Int], Field(min_length=1, max_length=1000)] | None = None
    heads: Annotated[list[Int], Field(min_length=1, max_length=1000)] | None = None
    queries: Window | None = Field(default=None, description="First position and the one after the last.")
    keys: Window | None = None
    permutation: Permutation = None


class AttentionAnswer(Answer):
    model: str
    tokens: list[str]
    target_tokens: list[str]
    layers: list[int]
    heads: list[int]
    weights: dict[str, list[list[list[list[float]]]]] = Field(
        description="encoder, decoder or cross: weight by layer, head, query and key."
    )


class Health(Answer):
    status: Literal["ok"] = "ok"
    models: list[str]
    has_runs: bool = Field(description="Whether /runs lists training runs.")
