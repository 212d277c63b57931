"""Read an input that exceeds the model's row in overlapping windows.

A text of a class or a score is cut into windows of as many tokens as fit. Of a pair the longer text is cut, and each
of its windows is read with the whole shorter text; of a choice the context is cut. The predictions of all windows are
averaged.

A window begins and ends at the beginning of a word, where one is near. It consists of ids of the whole text: the first
word of a window that is cut out as text and tokenized again may become other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from firth.tasks.choice import ChoiceTask
from firth.tasks.classify import ClassificationTask
from firth.tasks.head_task import EncodedExample, HeadTask
from firth.tasks.regress import RegressionTask
from firth.tasks.span_qa import STRIDE_TOKENS
from firth.text import Example

Offsets = Sequence[tuple[int, int]]
MIN_WINDOW_SHARE = 2  # a window has at least one in so many tokens of the row; the other texts are truncated for it


def has_windows(task: Any) -> bool:
    """Whether predictions of a task can be averaged over windows. Marked words have one place in the text."""
    kinds = isinstance(task, ClassificationTask | RegressionTask | ChoiceTask)
    return kinds and task.name not in ("relation", "word-in-context")


def encode_in_windows(task: HeadTask, examples: Sequence[Example]) -> list[list[EncodedExample]]:
    """Return the encoded windows of each example, one where it fits into a row. Each text is tokenized once."""
    assert isinstance(task, ClassificationTask | RegressionTask | ChoiceTask)
    max_tokens = [task.template.max_text_tokens(min(len(e.texts), 2)) for e in examples]
    # a token has at least one byte
    may_exceed = [num_bytes(e) > limit for e, limit in zip(examples, max_tokens, strict=True)]
    short = iter(task.encode([e for e, is_long in zip(examples, may_exceed, strict=True) if not is_long]))
    long = [e for e, is_long in zip(examples, may_exceed, strict=True) if is_long]
    encodings = iter(task.tokenizer.encode_with_offsets([text for e in long for text in e.texts]) if long else [])
    found = []
    for example, is_long, limit in zip(examples, may_exceed, max_tokens, strict=True):
        if is_long:
            found.append(encode_windows(task, example, [next(encodings) for _ in example.texts], limit))
        else:
            found.append([next(short)])
    return found


def num_bytes(example: Example) -> int:
    """Return the bytes of an example, of a choice those of the context and its longest candidate."""
    first, *others = (len(text.encode()) for text in example.texts)
    return first + max(others, default=0)


def encode_windows(
    task: ClassificationTask | RegressionTask | ChoiceTask, example: Example, encodings: Sequence[Any], max_tokens: int
) -> list[EncodedExample]:
    """Return the windows of one example, whose texts are tokenized."""
    sizes = [len(encoding.ids) for encoding in encodings]
    # of a pair the longer text is cut, of a choice the context
    cut = 1 if len(sizes) == 2 and not isinstance(task, ChoiceTask) and sizes[1] > sizes[0] else 0
    others = max((size for i, size in enumerate(sizes) if i != cut), default=0)
    window = max(max_tokens - others, -(-max_tokens // MIN_WINDOW_SHARE))
    task.template.num_truncated += others > max_tokens - window
    spans = split_at_words(example.texts[cut], encodings[cut].offsets, window)
    items = []
    for start, end in spans:
        ids = [e.ids[start:end] if i == cut else e.ids[: max_tokens - window] for i, e in enumerate(encodings)]
        items.append(task.build_item([own[::-1] if task.tokenizer.is_reversed else own for own in ids], example))
    return items


def split_at_words(text: str, offsets: Offsets, window_tokens: int, overlaps: bool = True) -> list[tuple[int, int]]:
    """Return the tokens [start, end) of each window.

    A window overlaps the next one by half, or by all but 128 tokens where it is longer. Its ends move back to the
    beginning of a word by up to half of the step between windows.

    >>> split_at_words("a bcd e", [(0, 1), (2, 3), (3, 4), (4, 5), (6, 7)], 8)
    [(0, 5)]
    >>> split_at_words("a bcd e", [(0, 1), (2, 3), (3, 4), (4, 5), (6, 7)], 4)
    [(0, 4), (1, 5)]
    """
    step = min(STRIDE_TOKENS, max(1, window_tokens // 2)) if overlaps else window_tokens
    windows: list[tuple[int, int]] = []
    start = 0
    while start + window_tokens < len(offsets):
        end = word_start_before(text, offsets, start + window_tokens, step // 2)
        windows.append((start, end))
        start = word_start_before(text, offsets, start + step, step // 2) if overlaps else end
    return [*windows, (start, len(offsets))]


def word_start_before(text: str, offsets: Offsets, index: int, max_back: int) -> int:
    """Return the last token up to `index` that begins a word, at most `max_back` before it; else `index`."""
    return next((i for i in range(index, index - max_back - 1, -1) if begins_word(text, offsets[i][0])), index)


def begins_word(text: str, at: int) -> bool:
    """Whether a word or a space begins at a character. Some tokens have no character: they begin behind the text.

    >>> [begins_word("ab, cd", at) for at in range(6)]
    [True, False, True, True, True, False]
    """
    return at == 0 or at >= len(text) or not (text[at].isalnum() and text[at - 1].isalnum())
