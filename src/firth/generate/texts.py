"""Texts in, texts out: prompts are framed, what is written becomes text again, piece by piece where that is wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from firth.errors import UserError
from firth.generate.decoding import Decoding, decoding_of
from firth.generate.reading import Ids, check_writes, tokenizer_of
from firth.generate.write import Written, drafts, write
from firth.models import EncoderDecoder, Model, framing

Prompt = str | Ids  # a text, or ids in their frame
HALF = "\ufffd"  # what the first bytes of a character are shown as


def generate(
    model: Model, prompts: Sequence[Prompt], decoding: Decoding | None = None, cache: bool = True, **options: Any
) -> list[str]:
    """Texts that begin with the prompts (decoders), or answers to them (encoder-decoders).

    A prompt that is given as ids has its frame already, and what is written after it comes alone.
    How they are written is said by a `Decoding` or by its fields: `generate(model, ["The"], temperature=0.8)`.
    """
    pages, written = write_pages(model, prompts, decoding_of(decoding, options), cache, logprobs=False)
    return [page.whole(new.tokens) for page, new in zip(pages, written, strict=True)]


def generate_results(
    model: Model, prompts: Sequence[Prompt], decoding: Decoding | None = None, cache: bool = True, **options: Any
) -> list[dict[str, Any]]:
    """The same texts with all that is known about them, ready for JSON.

    `prompt` is the number of the prompt; `text` is what `generate` gives, `new` what was written of it; then `tokens`,
    their `logprobs`, the `score` (see `Written`), and whether the text is `finished`.
    """
    decoding = decoding_of(decoding, options)
    pages, written = write_pages(model, prompts, decoding, cache, logprobs=True)
    return [
        {
            "prompt": i // decoding.num_return_sequences,
            "text": page.whole(new.tokens),
            "new": page.new(new.tokens),
            "tokens": new.tokens,
            "logprobs": new.logprobs,
            "score": new.score,
            "finished": new.finished,
        }
        for i, (page, new) in enumerate(zip(pages, written, strict=True))
    ]


def stream(
    model: Model, prompt: Prompt, decoding: Decoding | None = None, cache: bool = True, **options: Any
) -> Iterator[str]:
    """What is written after a prompt, in pieces as it comes: whole characters, and nothing of a string to stop at."""
    decoding = decoding_of(decoding, options)
    if decoding.num_beams > 1 or decoding.num_return_sequences > 1:
        raise UserError("A stream is one text as it is written: set num_beams=1 and num_return_sequences=1.")
    (page,) = make_pages(model, [prompt], decoding)
    stops = (lambda _, ids: page.stops(ids)) if decoding.stop else None
    shown, ids = "", []
    for draft in drafts(model, [page.framed], decoding, cache, stops):
        ids = draft.ids(0)
        sure = page.sure(ids)
        if sure.startswith(shown) and sure != shown:
            yield sure[len(shown) :]
            shown = sure
    rest = page.new(ids)[len(shown) :]
    if rest:
        yield rest


def write_pages(
    model: Model, prompts: Sequence[Prompt], decoding: Decoding, cache: bool, logprobs: bool
) -> tuple[list[Page], list[Written]]:
    pages = make_pages(model, prompts, decoding)
    stops = (lambda i, ids: pages[i].stops(ids)) if decoding.stop else None
    written = write(model, [page.framed for page in pages], decoding, cache, stops, logprobs)
    return [page for page in pages for _ in range(decoding.num_return_sequences)], written


def make_pages(model: Model, prompts: Sequence[Prompt], decoding: Decoding) -> list[Page]:
    check_writes(model)
    read = iter(tokenizer_of(model).encode_batch([prompt for prompt in prompts if isinstance(prompt, str)]))
    return [
        Page(model, next(read), decoding.stop) if isinstance(prompt, str) else Page(model, prompt, decoding.stop, True)
        for prompt in prompts
    ]


class Page:
    """A prompt, and what tokens after it mean as text."""

    def __init__(self, model: Model, read: Ids, stop: Sequence[str], framed: bool = False) -> None:
        self.tokenizer, self.stop = tokenizer_of(model), stop
        frame, answers = framing(model.config, self.tokenizer.vocab), isinstance(model, EncoderDecoder)
        self.framed = read if framed else [*frame.before, *read, *([frame.end] if answers else [])]  # as in pretraining
        self.before: Ids = [] if answers or framed else read
        self.given = self.tokenizer.decode(self.before)

    def added(self, ids: Ids) -> tuple[str, str]:
        """The prompt as far as it stays (some tokenizers close the gap before a comma), and what comes after it."""
        whole = self.tokenizer.decode([*self.before, *ids])
        same = next((i for i, (a, b) in enumerate(zip(self.given, whole, strict=False)) if a != b), len(self.given))
        return whole[:same], whole[same:]

    def whole(self, ids: Ids) -> str:
        """The text with its prompt where a decoder goes on with that, up to the first string to stop at."""
        given, new = self.added(ids)
        return given + new[: self.end_of(new)]

    def new(self, ids: Ids) -> str:
        _, new = self.added(ids)
        return new[: self.end_of(new)]

    def stops(self, ids: Ids) -> bool:
        _, new = self.added(ids)
        return self.end_of(new) < len(new)

    def end_of(self, new: str) -> int:
        """Where the first string to stop at begins, or the length."""
        return min((at for at in map(new.find, self.stop) if at >= 0), default=len(new))

    def sure(self, ids: Ids) -> str:
        """What will stay as it is, whatever comes next: no half characters, no beginning of a string to stop at."""
        _, new = self.added(ids)
        end = self.end_of(new)
        if end < len(new):
            return new[:end]
        new = new.rstrip(HALF)
        if self.tokenizer.kind == "wordpiece":  # the gap before a token may close when the next one comes
            new = new[: new.rfind(" ") + 1].rstrip(" ")
        longest = max((n for text in self.stop for n in range(1, len(text)) if new.endswith(text[:n])), default=0)
        return new[: len(new) - longest]
