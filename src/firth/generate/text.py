"""Texts in, texts out: prompts are framed, what is written becomes text again, piece by piece where that is wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from firth.core.errors import UserError
from firth.generate.config import GenerationConfig, make_generation_config
from firth.generate.decode_state import check_can_generate, require_tokenizer
from firth.generate.loop import GeneratedSequence, generate_sequences, iterate_decode_steps
from firth.models import EncoderDecoder, Model, make_sequence_template
from firth.tokens import TokenIds

Prompt = str | TokenIds  # a text, or ids in their frame
REPLACEMENT_CHAR = "\ufffd"  # what the first bytes of a character are shown as


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    generation_config: GenerationConfig | None = None,
    use_cache: bool = True,
    **options: Any,
) -> list[str]:
    """Texts that begin with the prompts (decoders), or answers to them (encoder-decoders).

    A prompt that is given as ids has its frame already, and what is written after it comes alone.
    How they are written is said by a `GenerationConfig` or by its fields: `generate(model, ["The"], temperature=0.8)`.
    """
    pages, written = generate_prompt_texts(
        model, prompts, make_generation_config(generation_config, options), use_cache, logprobs=False
    )
    return [page.full_text(new.tokens) for page, new in zip(pages, written, strict=True)]


def generate_results(
    model: Model,
    prompts: Sequence[Prompt],
    generation_config: GenerationConfig | None = None,
    use_cache: bool = True,
    **options: Any,
) -> list[dict[str, Any]]:
    """The same texts with all that is known about them, ready for JSON.

    `prompt` is the number of the prompt; `text` is what `generate` gives, `new_text` what was written of it; then `tokens`,
    their `logprobs`, the `score` (see `GeneratedSequence`), and whether the text is `finished`.
    """
    generation_config = make_generation_config(generation_config, options)
    pages, written = generate_prompt_texts(model, prompts, generation_config, use_cache, logprobs=True)
    return [
        {
            "prompt": i // generation_config.num_return_sequences,
            "text": page.full_text(new.tokens),
            "new": page.new_text(new.tokens),
            "tokens": new.tokens,
            "logprobs": new.logprobs,
            "score": new.score,
            "finished": new.finished,
        }
        for i, (page, new) in enumerate(zip(pages, written, strict=True))
    ]


def stream_text(
    model: Model,
    prompt: Prompt,
    generation_config: GenerationConfig | None = None,
    use_cache: bool = True,
    **options: Any,
) -> Iterator[str]:
    """What is written after a prompt, in pieces as it comes: whole characters, and nothing of a string to stop at."""
    generation_config = make_generation_config(generation_config, options)
    if generation_config.num_beams > 1 or generation_config.num_return_sequences > 1:
        raise UserError("A stream is one text as it is written: set num_beams=1 and num_return_sequences=1.")
    (page,) = make_prompt_texts(model, [prompt], generation_config)
    stops = (lambda _, ids: page.has_stop_string(ids)) if generation_config.stop else None
    shown, ids = "", []
    for draft in iterate_decode_steps(model, [page.input_ids], generation_config, use_cache, stops):
        ids = draft.token_ids(0)
        sure = page.stable_text(ids)
        if sure.startswith(shown) and sure != shown:
            yield sure[len(shown) :]
            shown = sure
    rest = page.new_text(ids)[len(shown) :]
    if rest:
        yield rest


def generate_prompt_texts(
    model: Model, prompts: Sequence[Prompt], generation_config: GenerationConfig, use_cache: bool, logprobs: bool
) -> tuple[list[PromptText], list[GeneratedSequence]]:
    pages = make_prompt_texts(model, prompts, generation_config)
    stops = (lambda i, ids: pages[i].has_stop_string(ids)) if generation_config.stop else None
    written = generate_sequences(
        model, [page.input_ids for page in pages], generation_config, use_cache, stops, logprobs
    )
    return [page for page in pages for _ in range(generation_config.num_return_sequences)], written


def make_prompt_texts(model: Model, prompts: Sequence[Prompt], generation_config: GenerationConfig) -> list[PromptText]:
    check_can_generate(model)
    read = iter(require_tokenizer(model).encode_batch([prompt for prompt in prompts if isinstance(prompt, str)]))
    return [
        PromptText(model, next(read), generation_config.stop)
        if isinstance(prompt, str)
        else PromptText(model, prompt, generation_config.stop, True)
        for prompt in prompts
    ]


class PromptText:
    """A prompt, and what tokens after it mean as text."""

    def __init__(self, model: Model, ids: TokenIds, stop: Sequence[str], has_special_tokens: bool = False) -> None:
        self.tokenizer, self.stop = require_tokenizer(model), stop
        frame, answers = make_sequence_template(model.config, self.tokenizer.vocab), isinstance(model, EncoderDecoder)
        self.input_ids = (
            ids if has_special_tokens else [*frame.prefix_ids, *ids, *([frame.eos_id] if answers else [])]
        )  # as in pretraining
        self.prompt_ids: TokenIds = [] if answers or has_special_tokens else ids
        self.prompt_text = self.tokenizer.decode(self.prompt_ids)

    def split_generated(self, ids: TokenIds) -> tuple[str, str]:
        """The prompt as far as it stays (some tokenizers close the gap before a comma), and what comes after it."""
        whole = self.tokenizer.decode([*self.prompt_ids, *ids])
        same = next(
            (i for i, (a, b) in enumerate(zip(self.prompt_text, whole, strict=False)) if a != b), len(self.prompt_text)
        )
        return whole[:same], whole[same:]

    def full_text(self, ids: TokenIds) -> str:
        """The text with its prompt where a decoder goes on with that, up to the first string to stop at."""
        given, new = self.split_generated(ids)
        return given + new[: self.stop_index(new)]

    def new_text(self, ids: TokenIds) -> str:
        _, new = self.split_generated(ids)
        return new[: self.stop_index(new)]

    def has_stop_string(self, ids: TokenIds) -> bool:
        _, new = self.split_generated(ids)
        return self.stop_index(new) < len(new)

    def stop_index(self, new: str) -> int:
        """Where the first string to stop at begins, or the length."""
        return min((at for at in map(new.find, self.stop) if at >= 0), default=len(new))

    def stable_text(self, ids: TokenIds) -> str:
        """What will stay as it is, whatever comes next: no half characters, no beginning of a string to stop at."""
        _, new = self.split_generated(ids)
        end = self.stop_index(new)
        if end < len(new):
            return new[:end]
        new = new.rstrip(REPLACEMENT_CHAR)
        if self.tokenizer.kind == "wordpiece":  # the gap before a token may close when the next one comes
            new = new[: new.rfind(" ") + 1].rstrip(" ")
        longest = max((n for text in self.stop for n in range(1, len(text)) if new.endswith(text[:n])), default=0)
        return new[: len(new) - longest]
