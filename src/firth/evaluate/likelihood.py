"""How likely texts are to a model: the likelihood of a decoder, the pseudo-likelihood of the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from firth.core.console import format_count, progress, truncation_messages
from firth.core.errors import UserError, did_you_mean
from firth.evaluate.logprobs import EVAL_BATCH_TOKENS, LogprobQuery, TokenLogprobs, compute_logprobs
from firth.generate.decode_state import check_has_lm_head, require_tokenizer
from firth.metrics import bits_per_byte
from firth.metrics import perplexity as as_perplexity
from firth.models import Model, ModelConfig, load_model, make_sequence_template
from firth.models.config import ELMoConfig
from firth.tokens.lexicon import OpenVocabTokenizer
from firth.train import TrainingConfig, choose_compute

TOKENIZE_BATCH_TEXTS = 64  # texts that are tokenised at once
DEFAULT_LENGTH_TOKENS = 512  # tokens that are read at once where neither the model nor the user says how many
MAX_SCORING_LENGTH_TOKENS = 2048  # and where a model could read very many


class Likelihood(NamedTuple):
    """How likely a text is, and how much text that is: what was not scored is not counted."""

    logp: float  # nats
    tokens: int
    unknown_tokens: int  # tokens that stand for something that the tokenizer does not know
    words: int
    bytes: int


class SplitText(NamedTuple):
    """The ids of a text in three: what comes before the stretch that is asked, that stretch, what comes after."""

    before: list[int]
    answer: list[int]
    after: list[int]


class ScoringText(NamedTuple):
    """A text as tokens: their ids, which of them start a word, and the character at which each begins."""

    text: str
    ids: list[int]
    word_starts: np.ndarray
    char_offsets: list[int]


def open_model(checkpoint: Model | str | Path) -> Model:
    """A model where this machine computes; a checkpoint is loaded."""
    model = checkpoint if isinstance(checkpoint, Model) else load_model(checkpoint)
    if model.tokenizer is None and not isinstance(checkpoint, Model):
        raise UserError(f"{checkpoint} has no tokenizer: put that of the model, with its tokenizer.json, into it.")
    require_tokenizer(model)
    return model.to(choose_compute(TrainingConfig(bf16=False)).device)


def make_scorer(
    checkpoint: Model | str | Path,
    method: str = "auto",
    max_seq_length: int = 0,
    stride: int = 0,
    batch_tokens: int = EVAL_BATCH_TOKENS,
) -> Scorer:
    """What asks this model for likelihoods.

    A decoder has one `method`, "left-to-right", and so has ELMo, its way forward. An encoder has "pseudo" (each token
    is hidden by itself, Salazar et al. 2020) and "within-word-l2r" (with the rest of its word, Kauf & Ivanova 2023). An
    encoder-decoder has "span" (each word is hidden by itself) and "continuation" (the encoder reads the first half, the
    second half is asked). "auto" takes the first of these. Texts longer than `max_seq_length` are read in windows that
    are `stride` tokens apart; 0 means what the model can read, and half of that.
    """
    model = open_model(checkpoint)
    name, kind = choose_scoring_method(model.config, method)
    return kind(model, name, max_seq_length, stride, batch_tokens)


def choose_scoring_method(config: ModelConfig, method: str = "auto") -> tuple[str, type[Scorer]]:
    """The method for a model and what asks in this way; a model that has no words, or no such method, is refused."""
    check_has_lm_head(config)
    methods = SCORERS_BY_ARCHITECTURE["decoder" if isinstance(config.recurrent, ELMoConfig) else config.architecture]
    if method != "auto" and method not in methods:
        others = [name for shape in SCORERS_BY_ARCHITECTURE.values() for name in shape]
        known = f"This checkpoint is a model of shape {config.architecture}, for which there is: {', '.join(methods)}."
        raise UserError(f"method {method!r}: " + (known if method in others else did_you_mean(method, methods)))
    name = next(iter(methods)) if method == "auto" else method
    return name, methods[name]


class Scorer(ABC):
    """A model and a way to ask it; `notices` has sentences about what had to be left out.

    It is `is_exact` when no token is seen before it is asked: only then do the answers add up to a probability.
    """

    is_exact = True

    def __init__(self, model: Model, method: str, max_seq_length: int, stride: int, batch_tokens: int) -> None:
        self.model, self.method, self.batch_tokens = model, method, batch_tokens
        self.tokenizer = require_tokenizer(model)
        self.vocab = self.tokenizer.vocab
        self.template = make_sequence_template(model.config, self.vocab, cls_last=False)
        self.max_length = resolve_max_length(model, max_seq_length)
        self.stride = stride or max(1, self.max_text_tokens // 2)
        if self.max_text_tokens < 1 or not 1 <= self.stride <= self.max_text_tokens:
            raise UserError(
                f"stride is {self.stride}, and must be from 1 to {self.max_text_tokens}, what is read at once."
            )
        self.num_truncated = 0

    @property
    def max_text_tokens(self) -> int:
        """Tokens of text that are read at once."""
        return self.max_length - len(self.template.prefix_ids) - 1

    @property
    def notices(self) -> list[str]:
        return truncation_messages(self.num_truncated, "context", self.max_length)

    # --- texts ---

    def score_texts(self, texts: Iterable[str]) -> Iterator[Likelihood]:
        """The likelihood of each text, in their order."""
        sizes: deque[tuple[int, int]] = deque()  # words and bytes of the texts that are on their way

        def queries() -> Iterator[LogprobQuery]:
            for number, text in enumerate(self.tokenize(texts)):
                scored = self.scored_text(text)
                sizes.append((len(scored.split()), len(scored.encode())))
                yield from (query._replace(text_index=number) for query in self.text_queries(text))

        done = 0
        total = len(texts) if isinstance(texts, Sequence) else None
        with progress("scoring", "tokens" if total is None else "texts", total) as shown:
            for number, answers in groupby(
                compute_logprobs(self.model, queries(), self.batch_tokens), lambda pair: pair[0].text_index
            ):
                for _ in range(done, number):  # texts that have no token
                    yield Likelihood(0.0, 0, 0, *sizes.popleft())
                done = number + 1
                logp, tokens, unknown = 0.0, 0, 0
                for query, answer in answers:
                    logp += float(answer.logprobs.sum())
                    tokens += len(query.labels)
                    unknown += self.count_unknown(query.labels)
                    if total is None:
                        shown.advance(len(query.labels))
                if total is not None:
                    shown.advance()
                yield Likelihood(logp, tokens, unknown, *sizes.popleft())
        while sizes:
            yield Likelihood(0.0, 0, 0, *sizes.popleft())

    def tokenize(self, texts: Iterable[str]) -> Iterator[ScoringText]:
        stream = iter(texts)
        while some := list(islice(stream, TOKENIZE_BATCH_TEXTS)):
            for text, encoding in zip(some, self.tokenizer.encode_with_offsets(some), strict=True):
                begins, starts = [begin for begin, _ in encoding.offsets], self.tokenizer.word_starts(encoding)
                way = -1 if self.tokenizer.is_reversed else 1
                yield ScoringText(text, encoding.ids[::way], starts[::way], begins[::way])

    def scored_text(self, text: ScoringText) -> str:
        """The part of a text that is asked."""
        return text.text

    @abstractmethod
    def text_queries(self, text: ScoringText) -> Iterator[LogprobQuery]:
        """The queries whose answers add up to the likelihood of a text."""

    # --- stretches of a text ---

    def score_spans(
        self, splits: Sequence[SplitText], jointly: bool
    ) -> Iterator[list[tuple[LogprobQuery, TokenLogprobs]]]:
        """The answers to one stretch of each text.

        `jointly` hides all its tokens at once, as when they are to be guessed; otherwise an encoder sees the rest of
        the stretch when it is asked for one token of it.
        """
        queries = [
            query._replace(text_index=number)
            for number, part in enumerate(splits)
            for query in (
                [self.blank_query(self.truncate_context(part))]
                if jointly
                else self.span_queries(self.truncate_context(part))
            )
        ]
        with progress("scoring", "texts", len(splits)) as shown:
            for _, answers in groupby(
                compute_logprobs(self.model, queries, self.batch_tokens), lambda pair: pair[0].text_index
            ):
                yield list(answers)
                shown.advance()

    def split_at_span(self, text: str, begin: int, end: int, where: str) -> SplitText:
        """The tokens of a text before, in and after a stretch of characters; one across an edge is in the stretch."""
        (encoding,) = self.tokenizer.encode_with_offsets([text])
        first = next((i for i, (_, e) in enumerate(encoding.offsets) if e > begin), len(encoding.ids))
        last = next((i for i, (b, _) in enumerate(encoding.offsets) if b >= end), len(encoding.ids))
        if not 0 < last - first <= self.max_text_tokens:
            problem = f"has {last - first} tokens, and must have from 1 to {self.max_text_tokens}, which this model reads at once"
            raise UserError(f"{where}: {text[begin:end].strip()[:40]!r} {problem}.")
        return SplitText(encoding.ids[:first], encoding.ids[first:last], encoding.ids[last:])

    def truncate_context(self, split: SplitText) -> SplitText:
        """Leave out what is furthest from the stretch, so that the model can read the rest."""
        before, answer, after = split
        room = self.max_text_tokens - len(answer)
        self.num_truncated += len(before) + len(after) > room
        right = min(len(after), max(room // 2, room - len(before)))
        left = min(len(before), room - right)
        return SplitText(before[len(before) - left :], answer, after[:right])

    @abstractmethod
    def blank_query(self, split: SplitText) -> LogprobQuery:
        """The stretch as a blank."""

    def span_queries(self, split: SplitText) -> list[LogprobQuery]:
        """The stretch as a text that is likely or not."""
        return [self.blank_query(split)]

    def is_exact_match(self, query: LogprobQuery, logprobs: TokenLogprobs) -> bool:
        """Whether the model, left to itself, would have filled the blank with just the answer."""
        return self.is_in_vocabulary(query) and bool((logprobs.top_ids == query.labels).all())

    def is_in_vocabulary(self, query: LogprobQuery) -> bool:
        """Whether the tokenizer can spell the answer: who writes an unknown token has not written it."""
        return not self.count_unknown(query.labels)

    def count_unknown(self, ids: Sequence[int]) -> int:
        """How many tokens stand for something that the tokenizer does not know."""
        return ids.count(self.vocab.unk) if self.vocab.unk is not None else 0

    def answer_logp(self, logprobs: TokenLogprobs) -> float:
        """The log-probability of what stands in a blank."""
        return float(logprobs.logprobs.sum())


def resolve_max_length(model: Model, max_seq_length: int) -> int:
    """How many tokens are read at once."""
    limit = model.config.max_length
    if max_seq_length < 0:
        raise UserError(
            f"max_seq_length is {max_seq_length}, and must not be negative; 0 means what the model can read."
        )
    if max_seq_length:
        model.check_length(max_seq_length)
    trained: int = getattr(model.config.position, "length", None) or DEFAULT_LENGTH_TOKENS
    return max_seq_length or limit or min(trained, MAX_SCORING_LENGTH_TOKENS)


class CausalScorer(Scorer):
    """A decoder: each token after all that came before, exactly."""

    def text_queries(self, text: ScoringText) -> Iterator[LogprobQuery]:
        ids = [*self.template.prefix_ids, *text.ids]
        first, step = len(self.template.prefix_ids), self.max_length  # the first window is scored whole
        while first < len(ids):
            end = min(first + step - 1, len(ids) - 1)
            begin = max(0, end - self.max_length)
            asked = list(range(first - 1 - begin, end - begin))
            yield LogprobQuery(ids[begin:end], asked, self.replace_out_of_vocabulary(ids[first : end + 1]))
            first, step = end + 1, self.stride

    def truncate_context(self, split: SplitText) -> SplitText:
        """What comes after is not seen: a decoder reads only what came before."""
        return super().truncate_context(split._replace(after=[]))

    def blank_query(self, split: SplitText) -> LogprobQuery:
        read = [*self.template.prefix_ids, *split.before, *split.answer[:-1]]
        first = len(read) - len(split.answer)
        return LogprobQuery(read, list(range(first, len(read))), self.replace_out_of_vocabulary(split.answer))

    def replace_out_of_vocabulary(self, ids: list[int]) -> list[int]:
        """A word that a model reads by its characters, and cannot say, is an unknown one where it is asked."""
        if not isinstance(self.tokenizer, OpenVocabTokenizer):
            return ids
        assert self.vocab.unk is not None
        return [i if i < self.vocab.size else self.vocab.unk for i in ids]


class MaskedScorer(Scorer):
    """An encoder: each token from all others, hidden behind the mask, or by the order of XLNet's query stream."""

    is_exact = False

    def __init__(self, model: Model, *settings: Any) -> None:
        super().__init__(model, *settings)
        self.has_query_stream = model.config.get_extra("query") is not None
        if self.vocab.mask is None and not self.has_query_stream:
            raise UserError("The tokenizer of this encoder has no mask token, so it cannot be asked for a hidden word.")

    def text_queries(self, text: ScoringText) -> Iterator[LogprobQuery]:
        for window in sliding_windows(len(text.ids), self.max_text_tokens, self.stride):
            ids, starts = text.ids[window.begin : window.end], text.word_starts[window.begin : window.end]
            ends = word_ends(starts)
            for i in range(window.first - window.begin, window.last - window.begin):
                end = ends[i] if self.method == "within-word-l2r" else i + 1
                yield self.masked_query(ids, i, end, num_targets=1)

    def blank_query(self, split: SplitText) -> LogprobQuery:
        first = len(split.before)
        last = first + len(split.answer)
        return self.masked_query([*split.before, *split.answer, *split.after], first, last, num_targets=last - first)

    def span_queries(self, split: SplitText) -> list[LogprobQuery]:
        first, ids = len(split.before), [*split.before, *split.answer, *split.after]
        return [self.masked_query(ids, i, i + 1, num_targets=1) for i in range(first, first + len(split.answer))]

    def masked_query(self, ids: list[int], first: int, last: int, num_targets: int) -> LogprobQuery:
        """Hide the tokens from `first` to `last`, and ask for some from `first` on."""
        before, end = list(self.template.prefix_ids), self.template.eos_id
        places, labels = [len(before) + first + k for k in range(num_targets)], ids[first : first + num_targets]
        if not self.has_query_stream:
            assert self.vocab.mask is not None
            hidden = [self.vocab.mask] * (last - first)
            return LogprobQuery([*before, *ids[:first], *hidden, *ids[last:], end], places, labels)
        # Nothing that is read freely (0) sees what is asked (1), and neither sees what is only hidden (2).
        hidden = [1] * num_targets + [2] * (last - first - num_targets)
        rank = [0] * (len(before) + first) + hidden + [0] * (len(ids) - last + 1)
        return LogprobQuery([*before, *ids, end], places, labels, attention_rank=rank)


class SpanScorer(Scorer):
    """An encoder-decoder: each word from the text around it, as it has learned to restore what was hidden."""

    is_exact = False

    def __init__(self, model: Model, *settings: Any) -> None:
        super().__init__(model, *settings)
        self.adds_bos = model.config.adds_bos
        if self.adds_bos and self.vocab.mask is None:
            raise UserError("The tokenizer has no mask token: take the method 'continuation'.")
        if not self.adds_bos and not self.vocab.sentinel_ids:
            raise UserError("The tokenizer has no sentinels (<extra_id_0> ...): take the method 'continuation'.")

    def text_queries(self, text: ScoringText) -> Iterator[LogprobQuery]:
        for window in sliding_windows(len(text.ids), self.max_text_tokens, self.stride):
            ids = text.ids[window.begin : window.end]
            i, ends = window.first - window.begin, word_ends(text.word_starts[window.begin : window.end])
            while i < window.last - window.begin:
                end = min(ends[i], window.last - window.begin)
                query = self.blank_query(SplitText(ids[:i], ids[i:end], ids[end:]))
                yield query._replace(target_positions=query.target_positions[: end - i], labels=query.labels[: end - i])
                i = end

    def blank_query(self, split: SplitText) -> LogprobQuery:
        """The answer is followed by what ends a span: T5's next sentinel, or BART's next token."""
        before, answer, after = split
        frame, end = list(self.template.prefix_ids), self.template.eos_id
        if self.adds_bos:
            assert self.vocab.mask is not None
            read = [*frame, *before, self.vocab.mask, *after, end]
            written = [self.template.decoder_start_id, *frame, *before, *answer]
            follows = after[0] if after else end
        else:
            hole, *others = self.vocab.sentinel_ids
            read = [*frame, *before, hole, *after, end]
            written = [self.template.decoder_start_id, hole, *answer]
            follows = others[0] if others else end
        first = len(written) - 1 - len(answer)
        return LogprobQuery(read, list(range(first, len(written))), [*answer, follows], written)

    def span_queries(self, split: SplitText) -> list[LogprobQuery]:
        query = self.blank_query(split)
        return [query._replace(target_positions=query.target_positions[:-1], labels=query.labels[:-1])]

    def is_exact_match(self, query: LogprobQuery, logprobs: TokenLogprobs) -> bool:
        ends = {*self.vocab.special_ids, query.labels[-1]}
        return (
            self.is_in_vocabulary(query)
            and bool((logprobs.top_ids[:-1] == query.labels[:-1]).all())
            and int(logprobs.top_ids[-1]) in ends
        )

    def is_in_vocabulary(self, query: LogprobQuery) -> bool:
        return not self.count_unknown(query.labels[:-1])

    def answer_logp(self, logprobs: TokenLogprobs) -> float:
        return float(logprobs.logprobs[:-1].sum())


class ContinuationScorer(Scorer):
    """An encoder-decoder: the second half of a text after the first; of a long one, each stretch after the last."""

    def truncate_context(self, split: SplitText) -> SplitText:
        return super().truncate_context(split._replace(after=[]))

    def split_point(self, text: ScoringText) -> int:
        return min(len(text.ids) // 2, self.max_text_tokens)

    def scored_text(self, text: ScoringText) -> str:
        first = self.split_point(text)
        return text.text[text.char_offsets[first] :] if first else text.text

    def text_queries(self, text: ScoringText) -> Iterator[LogprobQuery]:
        for first in range(self.split_point(text), len(text.ids), self.max_text_tokens):
            read = text.ids[max(0, first - self.max_text_tokens) : first]
            yield self.blank_query(SplitText(read, text.ids[first : first + self.max_text_tokens], []))

    def blank_query(self, split: SplitText) -> LogprobQuery:
        frame = list(self.template.prefix_ids)
        written = [self.template.decoder_start_id, *frame, *split.answer[:-1]]
        asked = list(range(len(written) - len(split.answer), len(written)))
        return LogprobQuery([*frame, *split.before, self.template.eos_id], asked, split.answer, written)


SCORERS_BY_ARCHITECTURE: dict[str, dict[str, type[Scorer]]] = {
    "decoder": {"left-to-right": CausalScorer},
    "encoder": {"pseudo": MaskedScorer, "within-word-l2r": MaskedScorer},
    "encoder-decoder": {"span": SpanScorer, "continuation": ContinuationScorer},
}


class ScoringWindow(NamedTuple):
    """Tokens `split_point` to `end` are read, those from `first` to `last` are scored."""

    begin: int
    end: int
    first: int
    last: int


def sliding_windows(num_tokens: int, max_tokens: int, stride: int) -> Iterator[ScoringWindow]:
    """Windows over a text in which each token is scored once, with as much text on both sides as there is room for.

    >>> [tuple(window) for window in sliding_windows(5, 4, 2)]
    [(0, 4, 0, 2), (1, 5, 2, 4), (1, 5, 4, 5)]
    """
    if num_tokens <= max_tokens:
        stride = max(num_tokens, 1)
    for first in range(0, num_tokens, stride):
        begin = min(max(0, first - (max_tokens - stride) // 2), max(0, num_tokens - max_tokens))
        yield ScoringWindow(begin, min(begin + max_tokens, num_tokens), first, min(first + stride, num_tokens))


def word_ends(word_starts: np.ndarray) -> list[int]:
    """For each token the place after the last token of its word.

    >>> word_ends(np.array([True, True, False, False, True]))
    [1, 4, 4, 4, 5]
    """
    first = np.append(np.flatnonzero(word_starts), len(word_starts))
    return first[np.searchsorted(first, np.arange(len(word_starts)), side="right")].tolist()


def evaluate_perplexity(checkpoint: Model | str | Path, texts: Iterable[str], **settings: Any) -> dict[str, Any]:
    """How well a model foresees texts: perplexity per token and per word, bits per byte. `settings`: `make_scorer`.

    Where tokens see both sides (an encoder, spans) it is a pseudo-perplexity, and there are no bits per byte.
    """
    scorer = make_scorer(checkpoint, **settings)
    metrics, facts = aggregate_likelihoods(scorer, list(scorer.score_texts(texts)))
    return metrics | facts


def text_likelihoods(checkpoint: Model | str | Path, texts: Iterable[str], **settings: Any) -> list[Likelihood]:
    """The (pseudo-)likelihood of each text. `settings`: those of `make_scorer`."""
    return list(make_scorer(checkpoint, **settings).score_texts(texts))


def unknown_token_messages(num_unknown: int) -> list[str]:
    """What a person should be told about tokens that stand for any word."""
    some = format_count(num_unknown, "token stands", "tokens stand")
    return [f"{some} for text that the tokenizer does not know: easy to guess."] if num_unknown else []


def text_metric_names(is_exact: bool) -> tuple[str, ...]:
    """The names of the scores of texts, of which less is better. Where tokens see both sides no code is so short."""
    return (
        ("perplexity", "word_perplexity", "bits_per_byte")
        if is_exact
        else ("pseudo_perplexity", "pseudo_word_perplexity")
    )


def aggregate_likelihoods(scorer: Any, likelihoods: Sequence[Likelihood]) -> tuple[dict[str, float], dict[str, Any]]:
    """The scores of all texts together, and what they are of."""
    nats, tokens = -sum(one.logp for one in likelihoods), sum(one.tokens for one in likelihoods)
    if not tokens:
        raise UserError("There is nothing to score: no text has a token.")
    words, num_bytes = sum(one.words for one in likelihoods), sum(one.bytes for one in likelihoods)
    each = [as_perplexity(nats, tokens), as_perplexity(nats, max(words, 1))]
    if scorer.is_exact:
        each.append(bits_per_byte(nats, num_bytes))
    return dict(zip(text_metric_names(scorer.is_exact), each, strict=True)), {
        "method": scorer.method,
        "nats": nats,
        "texts": len(likelihoods),
        "tokens": tokens,
        "words": words,
        "bytes": num_bytes,
        "unknown": sum(one.unknown_tokens for one in likelihoods),
        "max_seq_length": scorer.max_length,
        "stride": scorer.stride,
    }
