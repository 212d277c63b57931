"""Requests and answers of the routes behind the playground, as types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from firth.serve.schemas import (
    Answer,
    BlankAnswer,
    Flag,
    Int,
    LengthPenalty,
    ModelName,
    Number,
    Permutation,
    PredictionInput,
    Request,
    Text,
)

MAX_TOP, MAX_TEMPERATURES, MAX_BEAMS, MAX_TREE_TOKENS, MAX_MAP_TEXTS = 1000, 64, 8, 40, 50
MAX_TOP_PS, MAX_TAKEN_TOKENS = 64, 4096
TokenId = Annotated[Int, Field(ge=0, le=2**31)]
TakenTokens = Annotated[list[TokenId], Field(max_length=MAX_TAKEN_TOKENS)]
TopP = Annotated[Number, Field(gt=0, le=1)]
Temperature = Annotated[Number, Field(ge=0.01, le=100)]
Position = Annotated[Int, Field(ge=0, le=2**20)]
Cells = Annotated[str, Field(description="Bytes in base64, row by row.")]


class NextRequest(Request):
    model: ModelName = None
    prompt: str
    chat: Flag | None = Field(default=None, description="Read the prompt as a user's message.")
    new_tokens: TakenTokens = Field(default=[], description="Ids of the tokens that were taken after the prompt.")
    top: Int = Field(default=50, ge=1, le=MAX_TOP)
    temperatures: Annotated[list[Temperature], Field(max_length=MAX_TEMPERATURES)] = Field(
        default=[1.0], description="Temperatures at which the other tokens are summed up."
    )
    top_ps: Annotated[list[TopP], Field(max_length=MAX_TOP_PS)] = Field(
        default=[], description="Values of top-p for which the other tokens that stay are summed up."
    )


class NextToken(Answer):
    id: int
    text: str = Field(description="Begins with a space where the token begins a word.")
    logprob: float
    is_end: bool = Field(description="It ends the text.")


class NextAnswer(Answer):
    model: str
    prompt_tokens: list[str]
    text: str = Field(description="The text of `new_tokens`.")
    tokens: list[NextToken]
    num_rest: int = Field(description="Tokens that are not listed.")
    rest_logsumexp: list[float | None] = Field(
        description="log(sum(exp(logprob / T))) over the tokens that are not listed, for each temperature T."
    )
    num_tied: int = Field(description="Of these, tokens that are exactly as likely as the last listed one.")
    nucleus: list[list[tuple[int, float | None]]] = Field(
        description="For each temperature and each top-p: how many tokens that are not listed stay, and "
        "log(sum(exp(logprob / T))) over them."
    )
    entropy: float = Field(description="In nats, at temperature 1.")


class BeamsRequest(Request):
    model: ModelName = None
    prompt: str
    chat: Flag | None = None
    new_tokens: TakenTokens = Field(default=[], description="Search after these tokens, which follow the prompt.")
    num_beams: Int = Field(default=3, ge=2, le=MAX_BEAMS)
    max_new_tokens: Int = Field(default=8, ge=1, le=MAX_TREE_TOKENS)
    length_penalty: LengthPenalty = 1.0
    early_stopping: Flag = False


class TreeNode(Answer):
    parent: int = Field(description="Index of the node that it extends; -1 for the root.")
    token: int
    text: str
    logprob: float
    score: float = Field(description="Sum of log-probabilities from the root.")
    fate: Literal["kept", "finished", "dropped"]


class TreeSequence(Answer):
    node: int = Field(description="The node in which it ends.")
    text: str = Field(description="Without the text of `new_tokens`.")
    score: float = Field(description="Divided by length ** length_penalty.")


class BeamsAnswer(Answer):
    model: str
    nodes: list[TreeNode]
    sequences: list[TreeSequence]


class HeadsRequest(Request):
    model: ModelName = None
    text: Text
    target: str = Field(default="", description="What the decoder of an encoder-decoder reads.")
    max_cells: Int = Field(default=24, ge=4, le=64, description="Rows and columns of a picture.")
    permutation: Permutation = None


class Head(Answer):
    name: str = Field(description="What it does: previous token, same word, separator ...; empty for no pattern.")
    share: float = Field(description="Share of its weight that this pattern has.")
    entropy: float
    distance: float | None


class Mask(Answer):
    name: str
    layers: list[int]
    rows: int
    columns: int
    cells: Cells


class HeadsOfKind(Answer):
    heads: list[list[Head]] = Field(description="By layer.")
    rows: int
    columns: int
    pictures: Cells = Field(description="By layer and head: the largest weight of each cell, from 0 to 255.")
    masks: list[Mask]


class HeadsAnswer(Answer):
    model: str
    tokens: list[str]
    target_tokens: list[str]
    kinds: dict[str, HeadsOfKind] = Field(description="encoder, decoder or cross.")


class VectorsRequest(Request):
    model: ModelName = None
    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_MAP_TEXTS)]
    words: Annotated[list[Text], Field(min_length=1, max_length=100)] | None = Field(
        default=None, description="Map only these words; by default all."
    )


class MappedWord(Answer):
    text: int
    word: str
    start: int
    end: int


class MapLayer(Answer):
    points: list[tuple[float, float]]
    shares: tuple[float, float] = Field(description="Share of the variance of each dimension.")
    neighbours: list[list[tuple[int, float]]] = Field(description="Index and cosine, the nearest first.")


class VectorsAnswer(Answer):
    model: str
    words: list[MappedWord]
    layers: list[MapLayer] = Field(description="0 is the embedding.")


class ObjectivesRequest(Request):
    model: ModelName = None
    text: Text = Field(max_length=20_000)
    objectives: Annotated[list[Text], Field(max_length=100)] = Field(default=[], description="By default all.")
    rate: Number | None = Field(default=None, gt=0, lt=1, description="Share of the text that is hidden.")
    draw: Int = Field(default=0, ge=0, le=2**31, description="Number of the random draw.")


class SeenToken(Answer):
    text: str
    kind: str
    original: str
    id: int
    is_target: bool


class SeenSequence(Answer):
    name: str
    tokens: list[SeenToken]


class ObjectiveAnswer(Answer):
    name: str
    description: str
    architectures: list[str]
    rate: float | None
    problem: str = Field(description="Why this text or tokenizer does not fit; empty if it does.")
    notes: list[str]
    sequences: list[SeenSequence]
    masks: list[Mask]
    rates: dict[str, float]


class ObjectivesAnswer(Answer):
    model: str
    kinds: dict[str, str] = Field(description="Meaning of the kinds of tokens.")
    objectives: list[ObjectiveAnswer]


class SalienceRequest(Request):
    model: ModelName = None
    task: Text | None = None
    input: PredictionInput
    label: Text | None = Field(
        default=None, description="A label, or the text of one of the choices. By default the likeliest."
    )


class SalienceAnswer(Answer):
    model: str
    task: str
    label: str
    logit: float
    tokens: list[str]
    values: list[float] = Field(description="Gradient times input of each token.")
    num_windows: int = Field(description="In which the text is read; the tokens are those of the first.")


# --- runs


class Run(Answer):
    name: str
    kind: str = Field(description="Family and objective, or the task.")
    state: Literal["running", "finished", "stopped"]
    step: int
    max_steps: int | None
    loss: float | None
    eval_loss: float | None
    tokens: int | None
    tokens_per_second: float | None = Field(
        description="While the run is watched, as measured; else that of timings.jsonl, of a finished run in all."
    )
    seconds_left: float | None
    memory_bytes: int | None = Field(description="Resident memory of the process that trains.")
    device_memory_share: float | None = Field(description="Share of a GPU's memory that the run takes at most.")
    changed_at: float = Field(description="Unix time of the last line of the log.")


class RunsAnswer(Answer):
    runs: list[Run] = Field(description="Running ones first, then those that changed last.")


class RunLogAnswer(Answer):
    name: str
    version: int = Field(description="Another one: the log began anew, and `rows` are all of it.")
    next_row: int = Field(description="Send it as `after`, with the version, to get what is new.")
    columns: list[str]
    rows: list[list[float | None]]
    run: Run
    references: dict[str, float] = Field(description="Losses to compare with, in nats per token.")


class Finding(Answer):
    rule: str
    level: Literal["error", "warning", "info"]
    title: str
    evidence: dict[str, Any] = Field(description="The numbers that make the rule speak.")
    cause: str
    command: str = Field(description="To try next.")


class NotesAnswer(Answer):
    name: str
    number: int = Field(description="How often the run was examined.")
    state: Literal["later", "examining", "examined", "failed"] = Field(
        description="later: when it has trained for longer, or has ended. examining: ask again; it has idle priority."
    )
    error: str = Field(description="Why the run cannot be examined.")
    findings: list[Finding] = Field(
        description="The worst first; of the last examination, and before the first one those of the run itself."
    )
    references: dict[str, float] = Field(description="Losses to compare with, in nats per token.")
    rules: int = Field(description="Rules that were examined.")
    not_examined: list[str]


class SamplesRequest(Request):
    run: Text
    text: str = Field(
        default="",
        max_length=2000,
        description="A text with blanks for a model that fills them, else a prompt. Default: one that suits the model.",
    )


class CheckpointSample(Answer):
    checkpoint: str
    step: int | None
    text: str = Field(description="What the checkpoint writes; empty where it fills blanks.")
    blanks: list[BlankAnswer]
    error: str = Field(description="Why this checkpoint has no sample.")


class SamplesAnswer(Answer):
    run: str
    state: Literal["sampling", "sampled"] = Field(description="sampling: ask again; it has idle priority.")
    samples: list[CheckpointSample]


class OwnSample(Answer):
    before: str
    answer: str = Field(default="", description="The hidden part of the sentence.")
    after: str = ""
    text: str = Field(default="", description="What the checkpoint writes after `before`.")
    guesses: list[tuple[str, float]] = Field(default=[], description="Words for the blank, with probabilities.")


class OwnSamples(Answer):
    step: int
    samples: list[OwnSample]


class OwnSamplesAnswer(Answer):
    run: str
    checkpoints: list[OwnSamples] = Field(description="The first and the last, and some between them.")
