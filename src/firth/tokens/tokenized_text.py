"""A text as a tokenizer splits it: a list of tokens that a notebook shows as the text itself, coloured by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from firth.core.html import HtmlPage
from firth.core.notebook import PARTS, ResultList


class ShownToken(NamedTuple):
    """A token's part of the text, and its name in the vocabulary with its id."""

    text: str
    title: str


class TokenizedText(ResultList[str]):
    """The tokens of a text, as strings of the vocabulary; `ids` are their ids, `offsets` their characters."""

    text: str = ""
    ids: Sequence[int] = ()
    offsets: Sequence[tuple[int, int]] = ()

    def shown_tokens(self) -> Iterator[ShownToken]:
        """Yield the text of each token with the spaces before it.

        Bytes of one character are several tokens with the same characters: the first shows the character, the others
        their own names.
        """
        last = 0
        for token, number, (begin, end) in zip(self, self.ids, self.offsets, strict=True):
            text = self.text[last:end] if end > last else token
            yield ShownToken(text, f"{token}: id {number}, characters {begin} to {end}")
            last = max(last, end)

    def make_page(self) -> HtmlPage:
        words = len(self.text.split())
        page = HtmlPage(f"{len(self):,} tokens")
        caption = f"{len(self) / max(words, 1):.2f} tokens per word, {len(self.text.encode()) / max(len(self), 1):.1f} "
        page.add_fragment(PARTS, "pieces", list(self.shown_tokens()), caption + "bytes per token")
        return page
