"""How likely texts are to a model: the likelihood of a decoder, the pseudo-likelihood of the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from firth.console import count, progress, too_long
from firth.errors import UserError, nearest
from firth.evaluate.asking import BATCH_TOKENS, Answer, Query, ask
from firth.generate.reading import check_words, tokenizer_of
from firth.metrics import bits_per_byte
from firth.metrics import perplexity as as_perplexity
from firth.models import Model, ModelConfig, framing, load_model
from firth.models.config import ELMo
from firth.tokens.lexicon import OpenTokenizer
from firth.train import Training, choose_machine

TEXTS = 64  # texts that are tokenised at once
UNLIMITED = 512  # tokens that are read at once where neither the model nor the user says how many
LONGEST = 2048  # and where a model could read very many


class Likelihood(NamedTuple):
    """How likely a text is, and how much text that is: what was not scored is not counted."""

    logp: float  # nats
    tokens: int
    unknown: int  # tokens that stand for something that the tokenizer does not know
    words: int
    bytes: int


class Parts(NamedTuple):
    """The ids of a text in three: what comes before the stretch that is asked, that stretch, what comes after."""

    before: list[int]
    answer: list[int]
    after: list[int]


class Text(NamedTuple):
    """A text as tokens: their ids, which of them start a word, and the character at which each begins."""

    text: str
    ids: list[int]
    starts: np.ndarray
    begins: list[int]


def open_model(checkpoint: Model | str | Path) -> Model:
    """A model where this machine computes; a checkpoint is loaded."""
    model = checkpoint if isinstance(checkpoint, Model) else load_model(checkpoint)
    if model.tokenizer is None and not isinstance(checkpoint, Model):
        raise UserError(f"{checkpoint} has no tokenizer: put that of the model, with its tokenizer.json, into it.")
    tokenizer_of(model)
    return model.to(choose_machine(Training(bf16=False)).device)


def make_scorer(
    checkpoint: Model | str | Path,
    method: str = "auto",
    max_seq_length: int = 0,
    stride: int = 0,
    batch_tokens: int = BATCH_TOKENS,
) -> Scorer:
    """What asks this model for likelihoods.

    A decoder has one `method`, "left-to-right", and so has ELMo, its way forward. An encoder has "pseudo" (each token
    is hidden by itself, Salazar et al. 2020) and "within-word-l2r" (with the rest of its word, Kauf & Ivanova 2023). An
    encoder-decoder has "span" (each word is hidden by itself) and "continuation" (the encoder reads the first half, the
    second half is asked). "auto" takes the first of these. Texts longer than `max_seq_length` are read in windows that
    are `stride` tokens apart; 0 means what the model can read, and half of that.
    """
    model = open_model(checkpoint)
    name, kind = way_to_ask(model.config, method)
    return kind(model, name, max_seq_length, stride, batch_tokens)


def way_to_ask(config: ModelConfig, method: str = "auto") -> tuple[str, type[Scorer]]:
    """The method for a model and what asks in this way; a model that has no words, or no such method, is refused."""
    check_words(config)
    methods = SCORERS["decoder" if isinstance(config.recurrent, ELMo) else config.shape]
    if method != "auto" and method not in methods:
        others = [name for shape in SCORERS.values() for name in shape]
        known = f"This checkpoint is a model of shape {config.shape}, for which there is: {', '.join(methods)}."
        raise UserError(f"method {method!r}: " + (known if method in others else nearest(method, methods)))
    name = next(iter(methods)) if method == "auto" else method
    return name, methods[name]


class Scorer(ABC):
    """A model and a way to ask it; `said` has sentences about what had to be left out.

    It is `exact` when no token is seen before it is asked: only then do the answers add up to a probability.
    """

    exact = True

    def __init__(self, model: Model, method: str, max_seq_length: int, stride: int, batch_tokens: int) -> None:
        self.model, self.method, self.batch_tokens = model, method, batch_tokens
        self.tokenizer = tokenizer_of(model)
        self.vocab = self.tokenizer.vocab
        self.frame = framing(model.config, self.vocab)
        self.length = reading_length(model, max_seq_length)
        self.stride = stride or max(1, self.room // 2)
        if self.room < 1 or not 1 <= self.stride <= self.room:
            raise UserError(f"stride is {self.stride}, and must be from 1 to {self.room}, what is read at once.")
        self.cut = 0

    @property
    def room(self) -> int:
        """Tokens of text that are read at once."""
        return self.length - len(self.frame.before) - 1

    @property
    def said(self) -> list[str]:
        return too_long(self.cut, "context", self.length)

    # --- texts ---

    def texts(self, texts: Iterable[str]) -> Iterator[Likelihood]:
        """The likelihood of each text, in their order."""
        sizes: deque[tuple[int, int]] = deque()  # words and bytes of the texts that are on their way

        def queries() -> Iterator[Query]:
            for number, text in enumerate(self.tokenised(texts)):
                scored = self.scored(text)
                sizes.append((len(scored.split()), len(scored.encode())))
                yield from (query._replace(of=number) for query in self.whole(text))

        done = 0
        total = len(texts) if isinstance(texts, Sequence) else None
        with progress("scoring", "tokens" if total is None else "texts", total) as shown:
            for number, answers in groupby(ask(self.model, queries(), self.batch_tokens), lambda pair: pair[0].of):
                for _ in range(done, number):  # texts that have no token
                    yield Likelihood(0.0, 0, 0, *sizes.popleft())
                done = number + 1
                logp, tokens, unknown = 0.0, 0, 0
                for query, answer in answers:
                    logp += float(answer.logp.sum())
                    tokens += len(query.labels)
                    unknown += self.unknown(query.labels)
                    if total is None:
                        shown.advance(len(query.labels))
                if total is not None:
                    shown.advance()
                yield Likelihood(logp, tokens, unknown, *sizes.popleft())
        while sizes:
            yield Likelihood(0.0, 0, 0, *sizes.popleft())

    def tokenised(self, texts: Iterable[str]) -> Iterator[Text]:
        stream = iter(texts)
        while some := list(islice(stream, TEXTS)):
            for text, encoding in zip(some, self.tokenizer.encodings(some), strict=True):
                begins, starts = [begin for begin, _ in encoding.offsets], self.tokenizer.word_starts(encoding)
                way = -1 if self.tokenizer.backward else 1
                yield Text(text, encoding.ids[::way], starts[::way], begins[::way])

    def scored(self, text: Text) -> str:
        """The part of a text that is asked."""
        return text.text

    @abstractmethod
    def whole(self, text: Text) -> Iterator[Query]:
        """The queries whose answers add up to the likelihood of a text."""

    # --- stretches of a text ---

    def stretches(self, parts: Sequence[Parts], together: bool) -> Iterator[list[tuple[Query, Answer]]]:
        """The answers to one stretch of each text.

        `together` hides all its tokens at once, as when they are to be guessed; otherwise an encoder sees the rest of
        the stretch when it is asked for one token of it.
        """
        queries = [
            query._replace(of=number)
            for number, part in enumerate(parts)
            for query in ([self.blank(self.fit(part))] if together else self.given(self.fit(part)))
        ]
        with progress("scoring", "texts", len(parts)) as shown:
            for _, answers in groupby(ask(self.model, queries, self.batch_tokens), lambda pair: pair[0].of):
                yield list(answers)
                shown.advance()

    def split(self, text: str, begin: int, end: int, where: str) -> Parts:
        """The tokens of a text before, in and after a stretch of characters; one across an edge is in the stretch."""
        (encoding,) = self.tokenizer.encodings([text])
        first = next((i for i, (_, e) in enumerate(encoding.offsets) if e > begin), len(encoding.ids))
        last = next((i for i, (b, _) in enumerate(encoding.offsets) if b >= end), len(encoding.ids))
        if not 0 < last - first <= self.room:
            problem = f"has {last - first} tokens, and must have from 1 to {self.room}, which this model reads at once"
            raise UserError(f"{where}: {text[begin:end].strip()[:40]!r} {problem}.")
        return Parts(encoding.ids[:first], encoding.ids[first:last], encoding.ids[last:])

    def fit(self, parts: Parts) -> Parts:
        """Leave out what is furthest from the stretch, so that the model can read the rest."""
        before, answer, after = parts
        room = self.room - len(answer)
        self.cut += len(before) + len(after) > room
        right = min(len(after), max(room // 2, room - len(before)))
        left = min(len(before), room - right)
        return Parts(before[len(before) - left :], answer, after[:right])

    @abstractmethod
    def blank(self, parts: Parts) -> Query:
        """The stretch as a blank."""

    def given(self, parts: Parts) -> list[Query]:
        """The stretch as a text that is likely or not."""
        return [self.blank(parts)]

    def guessed(self, query: Query, answer: Answer) -> bool:
        """Whether the model, left to itself, would have filled the blank with just the answer."""
        return self.spelled(query) and bool((answer.best == query.labels).all())

    def spelled(self, query: Query) -> bool:
        """Whether the tokenizer can spell the answer: who writes an unknown token has not written it."""
        return not self.unknown(query.labels)

    def unknown(self, ids: Sequence[int]) -> int:
        """How many tokens stand for something that the tokenizer does not know."""
        return ids.count(self.vocab.unk) if self.vocab.unk is not None else 0

    def answer_logp(self, answer: Answer) -> float:
        """The log-probability of what stands in a blank."""
        return float(answer.logp.sum())


def reading_length(model: Model, wanted: int) -> int:
    """How many tokens are read at once."""
    limit = model.config.max_length
    if wanted < 0:
        raise UserError(f"max_seq_length is {wanted}, and must not be negative; 0 means what the model can read.")
    if wanted:
        model.check_length(wanted)
    trained: int = getattr(model.config.position, "length", None) or UNLIMITED
    return wanted or limit or min(trained, LONGEST)


class LeftToRight(Scorer):
    """A decoder: each token after all that came before, exactly."""

    def whole(self, text: Text) -> Iterator[Query]:
        ids = [*self.frame.before, *text.ids]
        first, step = len(self.frame.before), self.length  # the first window is scored whole
        while first < len(ids):
            end = min(first + step - 1, len(ids) - 1)
            begin = max(0, end - self.length)
            asked = list(range(first - 1 - begin, end - begin))
            yield Query(ids[begin:end], asked, self.in_vocabulary(ids[first : end + 1]))
            first, step = end + 1, self.stride

    def fit(self, parts: Parts) -> Parts:
        """What comes after is not seen: a decoder reads only what came before."""
        return super().fit(parts._replace(after=[]))

    def blank(self, parts: Parts) -> Query:
        read = [*self.frame.before, *parts.before, *parts.answer[:-1]]
        first = len(read) - len(parts.answer)
        return Query(read, list(range(first, len(read))), self.in_vocabulary(parts.answer))

    def in_vocabulary(self, ids: list[int]) -> list[int]:
        """A word that a model reads by its characters, and cannot say, is an unknown one where it is asked."""
        if not isinstance(self.tokenizer, OpenTokenizer):
            return ids
        assert self.vocab.unk is not None
        return [i if i < self.vocab.size else self.vocab.unk for i in ids]


class Hidden(Scorer):
    """An encoder: each token from all others, hidden behind the mask, or by the order of XLNet's query stream."""

    exact = False

    def __init__(self, model: Model, *settings: Any) -> None:
        super().__init__(model, *settings)
        self.by_order = model.config.extra("query") is not None
        if self.vocab.mask is None and not self.by_order:
            raise UserError("The tokenizer of this encoder has no mask token, so it cannot be asked for a hidden word.")

    def whole(self, text: Text) -> Iterator[Query]:
        for window in windows(len(text.ids), self.room, self.stride):
            ids, starts = text.ids[window.begin : window.end], text.starts[window.begin : window.end]
            ends = word_ends(starts)
            for i in range(window.first - window.begin, window.last - window.begin):
                end = ends[i] if self.method == "within-word-l2r" else i + 1
                yield self.hiding(ids, i, end, asked=1)

    def blank(self, parts: Parts) -> Query:
        first = len(parts.before)
        last = first + len(parts.answer)
        return self.hiding([*parts.before, *parts.answer, *parts.after], first, last, asked=last - first)

    def given(self, parts: Parts) -> list[Query]:
        first, ids = len(parts.before), [*parts.before, *parts.answer, *parts.after]
        return [self.hiding(ids, i, i + 1, asked=1) for i in range(first, first + len(parts.answer))]

    def hiding(self, ids: list[int], first: int, last: int, asked: int) -> Query:
        """Hide the tokens from `first` to `last`, and ask for some from `first` on."""
        before, end = list(self.frame.before), self.frame.end
        places, labels = [len(before) + first + k for k in range(asked)], ids[first : first + asked]
        if not self.by_order:
            assert self.vocab.mask is not None
            hidden = [self.vocab.mask] * (last - first)
            return Query([*before, *ids[:first], *hidden, *ids[last:], end], places, labels)
        # Nothing that is read freely (0) sees what is asked (1), and neither sees what is only hidden (2).
        hidden = [1] * asked + [2] * (last - first - asked)
        rank = [0] * (len(before) + first) + hidden + [0] * (len(ids) - last + 1)
        return Query([*before, *ids, end], places, labels, rank=rank)


class Spans(Scorer):
    """An encoder-decoder: each word from the text around it, as it has learned to restore what was hidden."""

    exact = False

    def __init__(self, model: Model, *settings: Any) -> None:
        super().__init__(model, *settings)
        self.framed = model.config.framed
        if self.framed and self.vocab.mask is None:
            raise UserError("The tokenizer has no mask token: take the method 'continuation'.")
        if not self.framed and not self.vocab.sentinels:
            raise UserError("The tokenizer has no sentinels (<extra_id_0> ...): take the method 'continuation'.")

    def whole(self, text: Text) -> Iterator[Query]:
        for window in windows(len(text.ids), self.room, self.stride):
            ids = text.ids[window.begin : window.end]
            i, ends = window.first - window.begin, word_ends(text.starts[window.begin : window.end])
            while i < window.last - window.begin:
                end = min(ends[i], window.last - window.begin)
                query = self.blank(Parts(ids[:i], ids[i:end], ids[end:]))
                yield query._replace(asked=query.asked[: end - i], labels=query.labels[: end - i])
                i = end

    def blank(self, parts: Parts) -> Query:
        """The answer is followed by what ends a span: T5's next sentinel, or BART's next token."""
        before, answer, after = parts
        frame, end = list(self.frame.before), self.frame.end
        if self.framed:
            assert self.vocab.mask is not None
            read = [*frame, *before, self.vocab.mask, *after, end]
            written = [self.frame.start, *frame, *before, *answer]
            follows = after[0] if after else end
        else:
            hole, *others = self.vocab.sentinels
            read = [*frame, *before, hole, *after, end]
            written = [self.frame.start, hole, *answer]
            follows = others[0] if others else end
        first = len(written) - 1 - len(answer)
        return Query(read, list(range(first, len(written))), [*answer, follows], written)

    def given(self, parts: Parts) -> list[Query]:
        query = self.blank(parts)
        return [query._replace(asked=query.asked[:-1], labels=query.labels[:-1])]

    def guessed(self, query: Query, answer: Answer) -> bool:
        ends = {*self.vocab.special, query.labels[-1]}
        return (
            self.spelled(query) and bool((answer.best[:-1] == query.labels[:-1]).all()) and int(answer.best[-1]) in ends
        )

    def spelled(self, query: Query) -> bool:
        return not self.unknown(query.labels[:-1])

    def answer_logp(self, answer: Answer) -> float:
        return float(answer.logp[:-1].sum())


class Continuation(Scorer):
    """An encoder-decoder: the second half of a text after the first; of a long one, each stretch after the last."""

    def fit(self, parts: Parts) -> Parts:
        return super().fit(parts._replace(after=[]))

    def begin(self, text: Text) -> int:
        return min(len(text.ids) // 2, self.room)

    def scored(self, text: Text) -> str:
        first = self.begin(text)
        return text.text[text.begins[first] :] if first else text.text

    def whole(self, text: Text) -> Iterator[Query]:
        for first in range(self.begin(text), len(text.ids), self.room):
            read = text.ids[max(0, first - self.room) : first]
            yield self.blank(Parts(read, text.ids[first : first + self.room], []))

    def blank(self, parts: Parts) -> Query:
        frame = list(self.frame.before)
        written = [self.frame.start, *frame, *parts.answer[:-1]]
        asked = list(range(len(written) - len(parts.answer), len(written)))
        return Query([*frame, *parts.before, self.frame.end], asked, parts.answer, written)


SCORERS: dict[str, dict[str, type[Scorer]]] = {
    "decoder": {"left-to-right": LeftToRight},
    "encoder": {"pseudo": Hidden, "within-word-l2r": Hidden},
    "encoder-decoder": {"span": Spans, "continuation": Continuation},
}


class Window(NamedTuple):
    """Tokens `begin` to `end` are read, those from `first` to `last` are scored."""

    begin: int
    end: int
    first: int
    last: int


def windows(length: int, room: int, stride: int) -> Iterator[Window]:
    """Windows over a text in which each token is scored once, with as much text on both sides as there is room for.

    >>> [tuple(window) for window in windows(5, 4, 2)]
    [(0, 4, 0, 2), (1, 5, 2, 4), (1, 5, 4, 5)]
    """
    if length <= room:
        stride = max(length, 1)
    for first in range(0, length, stride):
        begin = min(max(0, first - (room - stride) // 2), max(0, length - room))
        yield Window(begin, min(begin + room, length), first, min(first + stride, length))


def word_ends(starts: np.ndarray) -> list[int]:
    """For each token the place after the last token of its word.

    >>> word_ends(np.array([True, True, False, False, True]))
    [1, 4, 4, 4, 5]
    """
    first = np.append(np.flatnonzero(starts), len(starts))
    return first[np.searchsorted(first, np.arange(len(starts)), side="right")].tolist()


def perplexity(checkpoint: Model | str | Path, texts: Iterable[str], **settings: Any) -> dict[str, Any]:
    """How well a model foresees texts: perplexity per token and per word, bits per byte. `settings`: `make_scorer`.

    Where tokens see both sides (an encoder, spans) it is a pseudo-perplexity, and there are no bits per byte.
    """
    scorer = make_scorer(checkpoint, **settings)
    metrics, facts = summed(scorer, list(scorer.texts(texts)))
    return metrics | facts


def likelihoods(checkpoint: Model | str | Path, texts: Iterable[str], **settings: Any) -> list[Likelihood]:
    """The (pseudo-)likelihood of each text. `settings`: those of `make_scorer`."""
    return list(make_scorer(checkpoint, **settings).texts(texts))


def about_unknown(unknown: int) -> list[str]:
    """What a person should be told about tokens that stand for any word."""
    some = count(unknown, "token stands", "tokens stand")
    return [f"{some} for text that the tokenizer does not know: easy to guess."] if unknown else []


def scores_of_texts(exact: bool) -> tuple[str, ...]:
    """The names of the scores of texts, of which less is better. Where tokens see both sides no code is so short."""
    return (
        ("perplexity", "word_perplexity", "bits_per_byte") if exact else ("pseudo_perplexity", "pseudo_word_perplexity")
    )


def summed(scorer: Any, found: Sequence[Likelihood]) -> tuple[dict[str, float], dict[str, Any]]:
    """The scores of all texts together, and what they are of."""
    nats, tokens = -sum(one.logp for one in found), sum(one.tokens for one in found)
    if not tokens:
        raise UserError("There is nothing to score: no text has a token.")
    words, num_bytes = sum(one.words for one in found), sum(one.bytes for one in found)
    each = [as_perplexity(nats, tokens), as_perplexity(nats, max(words, 1))]
    if scorer.exact:
        each.append(bits_per_byte(nats, num_bytes))
    return dict(zip(scores_of_texts(scorer.exact), each, strict=True)), {
        "method": scorer.method,
        "nats": nats,
        "texts": len(found),
        "tokens": tokens,
        "words": words,
        "bytes": num_bytes,
        "unknown": sum(one.unknown for one in found),
        "max_seq_length": scorer.length,
        "stride": scorer.stride,
    }
