"""GenerationConfig: all options of generation, with the names of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from firth.core.errors import UserError, did_you_mean, quote, shorten

MIN_GENERATION_VALUES: dict[str, float] = {
    "max_new_tokens": 1,
    "min_new_tokens": 0,
    "top_k": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
}
INTEGER_GENERATION_FIELDS = (
    "max_new_tokens",
    "min_new_tokens",
    "top_k",
    "no_repeat_ngram_size",
    "num_beams",
    "num_return_sequences",
    "seed",
)
NUMERIC_GENERATION_FIELDS = (
    *INTEGER_GENERATION_FIELDS,
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "length_penalty",
)
# (least, most). Beyond these, scores leave the range of float32, in which Inf - Inf is NaN.
GENERATION_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "repetition_penalty": (0.01, 100),
    "length_penalty": (-10, 10),
}
MIN_SAMPLING_TEMPERATURE = 1e-6  # below it the likeliest token is certain, and logits / temperature may overflow


CONSTRAINTS = ("json_schema", "regex", "choices", "grammar")  # of which one at most can be set


def setting(default: Any, help: str, shown_default: str | None = None, metavar: str = "") -> Any:
    """A field with the text and, where it differs, the default that `firth generate --help` shows."""
    return field(default=default, metadata={"help": help, "default": shown_default or str(default), "metavar": metavar})


@dataclass(frozen=True)
class GenerationConfig:
    """Token choice, beam search and stopping criteria.

    Token choice: argmax at `temperature` 0 (greedy), otherwise a sample, which is a function of seed, row and step.
    A temperature below `MIN_SAMPLING_TEMPERATURE` is greedy too: its distribution has one token.
    `top_k` keeps the k likeliest tokens (0: all), `top_p` the smallest set with this probability (1: all), `min_p`
    tokens with at least this fraction of the highest probability (0: all). `sampling.py` explains them.

    Repetition: `repetition_penalty` above 1 lowers the scores of earlier tokens (CTRL, section 4.1; 1: off).
    `no_repeat_ngram_size` forbids repeated n-grams of this size (0: off).

    Beam search: `num_beams` above 1 (1: off). A sequence's score is its log-probability / length ** `length_penalty`.
    The search ends when no running beam can beat the finished ones, with `early_stopping` at `num_beams` finished.

    Stopping: at `max_new_tokens`, at EOS (not before `min_new_tokens`), or before the first of the `stop` strings.
    `num_return_sequences` texts are generated per prompt.

    Structured output: the text is JSON by `json_schema` (a dictionary, JSON text or a file), a match of `regex`, one of
    `choices`, or follows `grammar` (Lark or GBNF, text or a file). `constraint.py` explains it.
    """

    max_new_tokens: int = setting(50, "Generate at most this many tokens.", "50, or as fine-tuned")
    min_new_tokens: int = setting(0, "Do not end a text before this many tokens.")
    temperature: float = setting(0.0, "Divide the logits by this before sampling; 0 takes the most likely token.")
    top_k: int = setting(0, "Sample from the K most likely tokens; 0 from all.")
    top_p: float = setting(1.0, "Sample from the most likely tokens of this total probability; 1 from all.")
    min_p: float = setting(0.0, "Sample from tokens with this share of the highest probability; 0 from all.")
    repetition_penalty: float = setting(1.0, "Make repeated tokens less likely if above 1.")
    no_repeat_ngram_size: int = setting(0, "Never generate an n-gram of this size twice; 0 allows it.")
    num_beams: int = setting(
        1, "Search for the most likely text with this many beams; 1 is greedy.", "1, or as fine-tuned"
    )
    length_penalty: float = setting(
        1.0,
        "Score a beam by its log-probability / length ** this; a higher value favours longer texts.",
        "1, or as fine-tuned",
    )
    early_stopping: bool = setting(False, "End the search as soon as there are --num-beams finished texts.")
    num_return_sequences: int = setting(1, "Return this many texts for each prompt.")
    stop: Sequence[str] = setting((), "End before this text. Repeat it for more.")
    seed: int = setting(
        0,
        "Seed the sampling. In float32 a seed gives the same text in batches of any size; in bfloat16 another batch "
        "rounds differently, and a text may change.",
    )
    json_schema: str | Mapping[str, Any] | None = setting(None, "Write JSON that this JSON schema allows.", "", "FILE")
    regex: str | None = setting(None, "Write a text that matches this regular expression as a whole.", "", "REGEX")
    choices: str | Sequence[str] | None = setting(None, "Write one of these texts.", "", "A,B,C")
    grammar: str | None = setting(None, "Write a text of this grammar, in Lark's or llama.cpp's notation.", "", "FILE")

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for name in NUMERIC_GENERATION_FIELDS:
            check_generation_number(name, getattr(self, name))
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}, and must be above 0 and at most 1.")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p is {self.min_p}, and must be between 0 and 1.")
        if not isinstance(self.early_stopping, bool):
            raise UserError(f"early_stopping is {quote(self.early_stopping)}, and must be true or false.")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise UserError("stop must be a list of strings, none of them empty.")
        self.check_combinations()

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is chosen, without a draw."""
        return self.temperature < MIN_SAMPLING_TEMPERATURE

    @property
    def constraint(self) -> str | None:
        """The field that constrains the text, or None."""
        return next((name for name in CONSTRAINTS if getattr(self, name) is not None), None)

    def check_combinations(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"{given[0]} and {given[1]} are both given: a text can follow only one.")
        if given and self.stop:
            raise UserError(f"stop would cut a text that {given[0]} describes: leave one of them out.")
        if self.min_new_tokens > self.max_new_tokens:
            raise UserError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, which is {self.max_new_tokens}."
            )
        if self.num_beams > 1 and self.temperature > 0:
            raise UserError("Beam search and sampling exclude each other: set num_beams=1 or temperature=0.")
        if self.num_return_sequences > self.num_beams and self.temperature == 0:
            raise UserError(
                f"num_return_sequences is {self.num_return_sequences}: several texts per prompt need a temperature "
                f"above 0, or num_beams of at least {self.num_return_sequences}."
            )
        ignored = [
            name for name in ("top_k", "top_p", "min_p") if getattr(self, name) != getattr(GenerationConfig, name)
        ]
        if ignored and self.temperature == 0:
            raise UserError(f"{' and '.join(ignored)} apply to sampling only: set a temperature above 0 as well.")


def check_generation_number(name: str, value: Any) -> None:
    is_integer = name in INTEGER_GENERATION_FIELDS
    if isinstance(value, bool) or not isinstance(value, int if is_integer else int | float) or value != value:
        raise UserError(f"{name} is {quote(value)}, and must be a {'whole ' if is_integer else ''}number.")
    if name in MIN_GENERATION_VALUES and value < MIN_GENERATION_VALUES[name]:
        zero = "; 0 means all" if name == "top_k" else ""
        least = f"at least {MIN_GENERATION_VALUES[name]}" if MIN_GENERATION_VALUES[name] else "at least 0"
        raise UserError(f"{name} is {value}, and must be {least}{zero}.")
    if name in GENERATION_BOUNDS:
        low, high = GENERATION_BOUNDS[name]
        if not low <= value <= high:
            off = {"repetition_penalty": "; 1 changes nothing", "temperature": "; 0 takes the likeliest token"}
            raise UserError(f"{name} is {shorten(value)}, and must be between {low} and {high}{off.get(name, '')}.")


def make_generation_config(generation_config: GenerationConfig | None, options: dict[str, Any]) -> GenerationConfig:
    """Return the config, or build one from its fields by name."""
    if generation_config is not None and options:
        raise UserError(f"Give a GenerationConfig or single options ({', '.join(options)}), not both.")
    names = [field.name for field in fields(GenerationConfig)]
    for name in options:
        if name not in names:
            raise UserError(f"Unknown generation option {quote(name)}. {did_you_mean(name, names)}")
    return generation_config or GenerationConfig(**options)
