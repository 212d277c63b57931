"""Log-likelihood of texts under a language model, and perplexity.

A decoder factorizes the probability of a text from left to right: log p(x) = sum over t of log p(x_t | x_<t). One
forward pass gives all terms. Perplexity is exp(-log p(x) / tokens); bits per byte are -log2 p(x) / bytes, which
compares models with different tokenizers.

An encoder sees both sides and has no such factorization. Its pseudo-log-likelihood masks one token at a time and adds
up log p(x_t | all others) (Salazar et al. 2020, "Masked Language Model Scoring", section 2): one row per token, so T
times the cost ("pseudo"). Tokens of a long word reveal each other, so a rare word gets too high a score;
"within-word-l2r", the default, therefore also masks the rest of the word (Kauf & Ivanova 2023, section 3). The terms do
not add up to a probability, so there are no bits per byte.

Masked next-token prediction trains a model for both (`objectives/masked_next_token.py`): it has both methods, and a
masked token is scored at the position before it.

A prefix LM reads the tokens before the scored ones as it read its prefix in training: they attend to all of themselves.

An encoder-decoder either restores each masked word ("span", a pseudo-likelihood again), or reads the first half of a
text and scores the second ("continuation", exact). A decoder that was trained to denoise restores words, too.

Texts longer than the model's window are read in sliding windows; each token is scored once, with as much context as
fits. A `Scorer` turns texts into `LogprobQuery` rows, `compute_logprobs` runs the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding

from firth.core.console import format_count, progress, truncation_messages
from firth.core.errors import UserError, did_you_mean, quote
from firth.evaluate.logprobs import EVAL_BATCH_TOKENS, LogprobQuery, TokenLogprobs, compute_logprobs
from firth.generate.decode_state import check_has_lm_head, refuse_random_head, require_tokenizer
from firth.metrics import bits_per_byte
from firth.metrics import perplexity as as_perplexity
from firth.models import Model, ModelConfig, load_model, make_sequence_template
from firth.models.config import ELMoConfig
from firth.objectives.visibility import attention_rank
from firth.tokens import Tokenizer
from firth.tokens.lexicon import OpenVocabTokenizer
from firth.train import TrainingConfig, choose_compute

TOKENIZE_BATCH_TEXTS = 64  # texts per call of the tokenizer
DEFAULT_LENGTH_TOKENS = 512  # tokens per window for a model without a maximum length
MAX_SCORING_LENGTH_TOKENS = 2048  # tokens per window for a model without a maximum, trained on longer rows


class Likelihood(NamedTuple):
    """Log-likelihood of a text, and the size of its scored part."""

    logp: float  # nats
    tokens: int
    unknown_tokens: int  # unknown tokens (<unk>)
    words: int
    bytes: int


class SplitText(NamedTuple):
    """Token ids of a text: before the scored span, in it, and after it; which tokens of the span start a word."""

    before: list[int]
    answer: list[int]
    after: list[int]
    word_starts: tuple[bool, ...] | None = None  # None: unknown

    @property
    def num_tokens(self) -> int:
        return len(self.before) + len(self.answer) + len(self.after)


class ScoringText(NamedTuple):
    """A tokenized text: ids, whether each token starts a word, and its first character."""

    text: str
    ids: list[int]
    word_starts: np.ndarray
    char_offsets: list[int]


def open_model(checkpoint: Model | str | Path) -> Model:
    """Load a checkpoint, or take a loaded model, and move it to this machine's device."""
    model = checkpoint if isinstance(checkpoint, Model) else load_model(checkpoint)
    if model.tokenizer is None and not isinstance(checkpoint, Model):
        raise UserError(f"{checkpoint} has no tokenizer: copy the model's tokenizer.json and its config into it.")
    require_tokenizer(model)
    return model.to(choose_compute(TrainingConfig(bf16=False)).device)


def make_scorer(
    checkpoint: Model | str | Path,
    method: str = "auto",
    max_seq_length: int = 0,
    stride: int = 0,
    batch_tokens: int = EVAL_BATCH_TOKENS,
) -> Scorer:
    """Return the scorer of a model.

    Methods: "left-to-right" for a decoder, and for ELMo's forward direction; "within-word-l2r" or "pseudo" for an
    encoder; all three for masked next-token prediction; "span" or "continuation" for an encoder-decoder; "span" for a
    decoder that was trained to denoise. "auto" takes the first of these. Texts longer than `max_seq_length` are read in
    windows that are `stride` tokens apart; 0 means the model's maximum, and half of it.
    """
    model = open_model(checkpoint)
    name, kind = choose_scoring_method(model.config, method)
    if not isinstance(checkpoint, Model):
        refuse_random_head(model, checkpoint)
    return kind(model, name, max_seq_length, stride, batch_tokens)


def choose_scoring_method(config: ModelConfig, method: str = "auto") -> tuple[str, type[Scorer]]:
    """Return the name and the scorer of a method; refuse a model without an LM head or without the method."""
    check_has_lm_head(config)
    kind = "decoder" if isinstance(config.recurrent, ELMoConfig) else config.architecture
    is_both = config.predicts_next_token or config.is_causal_encoder
    trained = "denoising " if config.has_sentinel_prompt else "masked and causal " if is_both else ""
    methods = SCORERS_BY_ARCHITECTURE[trained + kind]
    if method != "auto" and method not in methods:
        others = [name for scorers in SCORERS_BY_ARCHITECTURE.values() for name in scorers]
        note = {
            "denoising ": " (trained to denoise)",
            "masked and causal ": " (trained on masked and causal rows)",
        }.get(trained, "")
        known = f"This checkpoint has the architecture {kind}{note}, which has: {', '.join(methods)}."
        raise UserError(f"method {quote(method)}: " + (known if method in others else did_you_mean(method, methods)))
    name = next(iter(methods)) if method == "auto" else method
    return name, methods[name]


class Scorer(ABC):
    """A model and a scoring method; `notices` has sentences on what was truncated.

    `is_exact`: no token is visible before it is predicted, so that the log-probabilities add up to that of the text.
    """

    is_exact = True

    def __init__(self, model: Model, method: str, max_seq_length: int, stride: int, batch_tokens: int) -> None:
        self.model, self.method, self.batch_tokens = model, method, batch_tokens
        self.tokenizer = require_tokenizer(model)
        self.vocab = self.tokenizer.vocab
        self.template = make_sequence_template(model.config, self.vocab)
        self.max_length = resolve_max_length(model, max_seq_length)
        self.stride = stride or max(1, self.max_text_tokens // 2)
        if self.max_text_tokens < 1 or not 1 <= self.stride <= self.max_text_tokens:
            raise UserError(
                f"stride is {self.stride}, and must be from 1 to {self.max_text_tokens}, the tokens of a window."
            )
        self.num_truncated = 0

    @property
    def max_text_tokens(self) -> int:
        """Tokens of a window without special tokens."""
        return self.max_length - self.template.num_special_tokens()

    @property
    def notices(self) -> list[str]:
        return truncation_messages(self.num_truncated, "context", self.max_length)

    # --- texts ---

    def score_texts(self, texts: Iterable[str]) -> Iterator[Likelihood]:
        """Yield the likelihood of each text, in order."""
        sizes: deque[tuple[int, int]] = deque()  # words and bytes of texts that are not yet scored

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
                for _ in range(done, number):  # texts without a token
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
        while batch := list(islice(stream, TOKENIZE_BATCH_TEXTS)):
            for text, encoding in zip(batch, self.tokenizer.encode_with_offsets(batch), strict=True):
                begins, starts = [begin for begin, _ in encoding.offsets], self.tokenizer.word_starts(encoding)
                step = -1 if self.tokenizer.is_reversed else 1
                yield ScoringText(text, encoding.ids[::step], starts[::step], begins[::step])

    def scored_text(self, text: ScoringText) -> str:
        """The part of a text that is scored."""
        return text.text

    @abstractmethod
    def text_queries(self, text: ScoringText) -> Iterator[LogprobQuery]:
        """Yield the queries whose log-probabilities add up to the likelihood of a text."""

    # --- spans of a text ---

    def score_spans(
        self, splits: Sequence[SplitText], jointly: bool
    ) -> Iterator[list[tuple[LogprobQuery, TokenLogprobs]]]:
        """Yield the log-probabilities of one span of each text.

        `jointly` masks all tokens of the span at once, as for a prediction; otherwise an encoder sees the rest of the
        span when it predicts one token of it.
        """
        parts = map(self.truncate_context, splits)
        groups = ([self.blank_query(part)] if jointly else self.span_queries(part) for part in parts)
        return self.score_query_groups(groups, len(splits))

    def score_query_groups(
        self, groups: Iterable[Sequence[LogprobQuery]], total: int
    ) -> Iterator[list[tuple[LogprobQuery, TokenLogprobs]]]:
        """Yield the queries of each group with their log-probabilities, in order."""
        queries = (query._replace(text_index=number) for number, group in enumerate(groups) for query in group)
        with progress("scoring", "texts", total) as shown:
            for _, answers in groupby(
                compute_logprobs(self.model, queries, self.batch_tokens), lambda pair: pair[0].text_index
            ):
                yield list(answers)
                shown.advance()

    def split_at_span(self, text: str, begin: int, end: int, where: str) -> SplitText:
        """Tokens before, in and after a span of characters; a token across its boundary is in the span."""
        (encoding,) = self.tokenizer.encode_with_offsets([text])
        return self.split_encoding(encoding, text, begin, end, where)

    def split_encoding(self, encoding: Encoding, text: str, begin: int, end: int, where: str) -> SplitText:
        """As `split_at_span`, of a text that is tokenized already."""
        if self.tokenizer.is_reversed:
            raise UserError(
                "A model that reads backward scores whole texts only: spans of a text need a forward model."
            )
        first = next((i for i, (_, e) in enumerate(encoding.offsets) if e > begin), len(encoding.ids))
        last = next((i for i, (b, _) in enumerate(encoding.offsets) if b >= end), len(encoding.ids))
        if not 0 < last - first <= self.max_text_tokens:
            problem = f"has {last - first} tokens, and must have from 1 to {self.max_text_tokens}, the model's window"
            raise UserError(f"{where}: {text[begin:end].strip()[:40]!r} {problem}.")
        starts = tuple(self.tokenizer.word_starts(encoding)[first:last].tolist())
        return SplitText(encoding.ids[:first], encoding.ids[first:last], encoding.ids[last:], starts)

    def truncate_context(self, split: SplitText) -> SplitText:
        """Drop the tokens furthest from the span until the rest fits into the window."""
        before, answer, after, _ = split
        budget = self.max_text_tokens - len(answer)
        self.num_truncated += len(before) + len(after) > budget
        right = min(len(after), max(budget // 2, budget - len(before)))
        left = min(len(before), budget - right)
        return split._replace(before=before[len(before) - left :], after=after[:right])

    @abstractmethod
    def blank_query(self, split: SplitText) -> LogprobQuery:
        """The query that predicts the whole span."""

    def span_queries(self, split: SplitText) -> list[LogprobQuery]:
        """The queries whose log-probabilities add up to that of the span."""
        return [self.blank_query(split)]

    def hidden_words_query(self, ids: list[int], spans: Sequence[tuple[int, int]]) -> LogprobQuery:
        """The query that hides several spans of tokens at once, as in training, and predicts all of their tokens."""
        raise UserError(f"The method {self.method} hides no words.")

    def is_exact_match(self, query: LogprobQuery, logprobs: TokenLogprobs) -> bool:
        """Whether greedy decoding gives exactly the answer."""
        return self.is_in_vocabulary(query) and bool((logprobs.top_ids == query.labels).all())

    def is_in_vocabulary(self, query: LogprobQuery) -> bool:
        """Whether the answer has no unknown token: predicting <unk> is not predicting the answer."""
        return not self.count_unknown(query.labels)

    def count_unknown(self, ids: Sequence[int]) -> int:
        """Number of unknown tokens."""
        return ids.count(self.vocab.unk) if self.vocab.unk is not None else 0

    def answer_logp(self, logprobs: TokenLogprobs) -> float:
        """Log-probability of the answer."""
        return float(logprobs.logprobs.sum())


def resolve_max_length(model: Model, max_seq_length: int) -> int:
    """Tokens of a window: `max_seq_length`, or the model's maximum, or the length it was trained on."""
    limit = model.config.max_length
    if max_seq_length < 0:
        raise UserError(f"max_seq_length is {max_seq_length}, and must not be negative; 0 takes the model's maximum.")
    if max_seq_length:
        model.check_length(max_seq_length)
    trained: int = getattr(model.config.position, "length", None) or DEFAULT_LENGTH_TOKENS
    return max_seq_length or limit or min(trained, MAX_SCORING_LENGTH_TOKENS)


class CausalScorer(Scorer):
    """A decoder: the log-probability of each token given all before it."""

    def text_queries(self, text: ScoringText) -> Iterator[LogprobQuery]:
        ids = [*self.template.prefix_ids, *text.ids]
        first, step = len(self.template.prefix_ids), self.max_length  # all tokens of the first window are scored
        while first < len(ids):
            end = min(first + step - 1, len(ids) - 1)
            begin = max(0, end - self.max_length)
            target_positions = list(range(first - 1 - begin, end - begin))
            labels = self.replace_out_of_vocabulary(ids[first : end + 1])
            yield self.with_visibility(LogprobQuery(ids[begin:end], target_positions, labels))
            first, step = end + 1, self.stride

    def truncate_context(self, split: SplitText) -> SplitText:
        """Drop the tokens after the span, which a decoder does not see."""
        return super().truncate_context(split._replace(after=[]))

    def blank_query(self, split: SplitText) -> LogprobQuery:
        input_ids = [*self.template.prefix_ids, *split.before, *split.answer[:-1]]
        first = len(input_ids) - len(split.answer)
        labels = self.replace_out_of_vocabulary(split.answer)
        return self.with_visibility(LogprobQuery(input_ids, list(range(first, len(input_ids))), labels))

    def with_visibility(self, query: LogprobQuery) -> LogprobQuery:
        """Let a prefix LM's context, all tokens before the first label, attend to all of itself.

        An encoder that was trained on causal rows too gets causal attention.
        """
        if self.model.config.is_causal_encoder:
            return query._replace(attention_rank=list(range(len(query.input_ids))))
        if not self.model.config.has_bidirectional_prompt:
            return query
        rank_T = attention_rank(np.arange(len(query.input_ids)), query.target_positions[0] + 1)
        return query._replace(attention_rank=rank_T.tolist())

    def replace_out_of_vocabulary(self, ids: list[int]) -> list[int]:
        """Label ids with <unk> for words outside the output vocabulary, which ELMo reads by their characters."""
        if not isinstance(self.tokenizer, OpenVocabTokenizer):
            return ids
        assert self.vocab.unk is not None
        return [i if i < self.vocab.size else self.vocab.unk for i in ids]


class MaskedScorer(Scorer):
    """An encoder: each token given all others, behind a mask token or by the rank of XLNet's query stream."""

    is_exact = False

    def __init__(self, model: Model, *settings: Any) -> None:
        super().__init__(model, *settings)
        self.has_query_stream = model.config.get_extra("query") is not None
        if self.vocab.mask is None and not self.has_query_stream:
            raise UserError("The tokenizer of this encoder has no mask token, so no token can be masked and scored.")

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
        ends = [i + 1 for i in range(len(split.answer))]
        if self.method == "within-word-l2r" and split.word_starts is not None:
            ends = word_ends(np.array(split.word_starts))
        return [self.masked_query(ids, first + i, first + end, num_targets=1) for i, end in enumerate(ends)]

    def masked_query(self, ids: list[int], first: int, last: int, num_targets: int) -> LogprobQuery:
        """Mask the tokens [first, last), and score `num_targets` from `first` on."""
        return self.hidden_query(ids, range(first, last), range(first, first + num_targets))

    def hidden_words_query(self, ids: list[int], spans: Sequence[tuple[int, int]]) -> LogprobQuery:
        hidden = [i for first, last in spans for i in range(first, last)]
        return self.hidden_query(ids, hidden, hidden)

    def hidden_query(self, ids: list[int], hidden: Sequence[int], targets: Sequence[int]) -> LogprobQuery:
        """Mask the tokens at the positions `hidden` of a text, and score those at `targets`, which are among them."""
        num_prefix = len(self.template.prefix_ids)
        before = int(self.model.config.predicts_next_token)
        positions, labels = [num_prefix + i - before for i in targets], [ids[i] for i in targets]
        if not self.has_query_stream:
            assert self.vocab.mask is not None
            ids = list(ids)
            for i in hidden:
                ids[i] = self.vocab.mask
        input_ids, token_types = self.template.apply(ids)
        query = LogprobQuery(input_ids, positions, labels)
        if self.template.last_token_type is not None:  # XLNet always reads segments
            query = query._replace(token_type_ids=token_types)
        if self.model.config.predicts_next_token and self.model.config.architecture == "decoder":
            query = query._replace(attention_rank=[0] * len(input_ids))  # attention to all tokens
        if not self.has_query_stream:
            return query
        # Rank 0 is context, 1 a target and 2 masked only: a token attends to ranks up to its own, strictly in XLNet's
        # query stream.
        rank = [0] * len(input_ids)
        for positions_of_rank, value in ((hidden, 2), (targets, 1)):
            for i in positions_of_rank:
                rank[num_prefix + i] = value
        return query._replace(attention_rank=rank)


class SpanScorer(Scorer):
    """An encoder-decoder: each word given the text around it, as in its span-corruption pretraining."""

    is_exact = False

    def __init__(self, model: Model, *settings: Any) -> None:
        super().__init__(model, *settings)
        self.adds_bos = model.config.adds_bos
        if self.adds_bos and self.vocab.mask is None:
            raise UserError("The tokenizer has no mask token: use the method 'continuation'.")
        if not self.adds_bos and not self.vocab.sentinel_ids:
            raise UserError("The tokenizer has no sentinels (<extra_id_0> ...): use the method 'continuation'.")

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
        """The labels end with the token that ends a span: T5's next sentinel, or the text's next token for BART."""
        before, answer, after, _ = split
        prefix, end = list(self.template.prefix_ids), self.template.eos_id
        if self.adds_bos:
            assert self.vocab.mask is not None
            input_ids = [*prefix, *before, self.vocab.mask, *after, end]
            decoder_input_ids = [self.template.decoder_start_id, *prefix, *before, *answer]
            next_id = after[0] if after else end
        else:
            sentinel, *others = self.vocab.sentinel_ids
            input_ids = [*prefix, *before, sentinel, *after, end]
            decoder_input_ids = [self.template.decoder_start_id, sentinel, *answer]
            next_id = others[0] if others else end
        positions = list(range(len(decoder_input_ids) - 1 - len(answer), len(decoder_input_ids)))
        return LogprobQuery(input_ids, positions, [*answer, next_id], decoder_input_ids)

    def span_queries(self, split: SplitText) -> list[LogprobQuery]:
        query = self.blank_query(split)
        return [query._replace(target_positions=query.target_positions[:-1], labels=query.labels[:-1])]

    def hidden_words_query(self, ids: list[int], spans: Sequence[tuple[int, int]]) -> LogprobQuery:
        """T5's decoder restores one span after the other, and the sentinel after a span ends it: a label as well.

        BART's decoder reads the whole text; the tokens of the spans are its labels.
        """
        prefix, start = list(self.template.prefix_ids), self.template.decoder_start_id
        ends = [*(first for first, _ in spans[1:]), len(ids)]
        if self.adds_bos:
            assert self.vocab.mask is not None
            marks, decoder_input_ids = [self.vocab.mask] * len(spans), [start, *prefix, *ids]
            labels = [i for first, last in spans for i in ids[first:last]]
            positions = [len(prefix) + i for first, last in spans for i in range(first, last)]
        else:
            marks = list(self.vocab.sentinel_ids[: len(spans)])
            if len(marks) < len(spans):
                raise UserError(f"The tokenizer has {len(marks)} sentinels, and {len(spans)} words are hidden.")
            target_ids = [i for mark, (first, last) in zip(marks, spans, strict=True) for i in (mark, *ids[first:last])]
            next_mark = next(iter(self.vocab.sentinel_ids[len(spans) :]), self.template.eos_id)
            decoder_input_ids = [start, *target_ids]
            labels = [*target_ids[1:], next_mark]
            positions = list(range(1, len(decoder_input_ids)))
        kept = [i for mark, (_, last), end in zip(marks, spans, ends, strict=True) for i in (mark, *ids[last:end])]
        return LogprobQuery(
            [*prefix, *ids[: spans[0][0]], *kept, self.template.eos_id], positions, labels, decoder_input_ids
        )

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


class DecoderSpanScorer(SpanScorer):
    """A denoising decoder: the same in one row, the text with a blank and then the word."""

    @property
    def max_text_tokens(self) -> int:
        """Tokens of a window without special tokens: those of the template, and the sentinel of the word twice."""
        return self.max_length - self.template.num_special_tokens() - 2

    def blank_query(self, split: SplitText) -> LogprobQuery:
        return self.to_decoder_row(super().blank_query(split))

    def hidden_words_query(self, ids: list[int], spans: Sequence[tuple[int, int]]) -> LogprobQuery:
        return self.to_decoder_row(super().hidden_words_query(ids, spans))

    def to_decoder_row(self, query: LogprobQuery) -> LogprobQuery:
        """Join the encoder's input and the decoder's to one row."""
        assert query.decoder_input_ids is not None
        _, *target_ids = query.decoder_input_ids  # the end of the text stands for the decoder's start token
        num_before = len(query.input_ids) - 1
        rank = attention_rank(np.arange(len(query.input_ids) + len(target_ids)), len(query.input_ids)).tolist()
        return query._replace(
            input_ids=[*query.input_ids, *target_ids],
            target_positions=[num_before + position for position in query.target_positions],
            decoder_input_ids=None,
            attention_rank=rank if self.model.config.has_bidirectional_prompt else None,
        )


class ContinuationScorer(Scorer):
    """An encoder-decoder: the second half of a text given the first; in a long one, each window given the last."""

    def truncate_context(self, split: SplitText) -> SplitText:
        return super().truncate_context(split._replace(after=[]))

    def split_point(self, text: ScoringText) -> int:
        return min(len(text.ids) // 2, self.max_text_tokens)

    def scored_text(self, text: ScoringText) -> str:
        first = self.split_point(text)
        return text.text[text.char_offsets[first] :] if first else text.text

    def text_queries(self, text: ScoringText) -> Iterator[LogprobQuery]:
        for first in range(self.split_point(text), len(text.ids), self.max_text_tokens):
            context = text.ids[max(0, first - self.max_text_tokens) : first]
            yield self.blank_query(SplitText(context, text.ids[first : first + self.max_text_tokens], []))

    def blank_query(self, split: SplitText) -> LogprobQuery:
        prefix = list(self.template.prefix_ids)
        decoder_input_ids = [self.template.decoder_start_id, *prefix, *split.answer[:-1]]
        positions = list(range(len(decoder_input_ids) - len(split.answer), len(decoder_input_ids)))
        return LogprobQuery([*prefix, *split.before, self.template.eos_id], positions, split.answer, decoder_input_ids)


SCORERS_BY_ARCHITECTURE: dict[str, dict[str, type[Scorer]]] = {
    "decoder": {"left-to-right": CausalScorer},
    "denoising decoder": {"span": DecoderSpanScorer},
    "masked and causal decoder": {
        "left-to-right": CausalScorer,
        "within-word-l2r": MaskedScorer,
        "pseudo": MaskedScorer,
    },
    "encoder": {"within-word-l2r": MaskedScorer, "pseudo": MaskedScorer},
    "masked and causal encoder": {
        "left-to-right": CausalScorer,
        "within-word-l2r": MaskedScorer,
        "pseudo": MaskedScorer,
    },
    "encoder-decoder": {"span": SpanScorer, "continuation": ContinuationScorer},
}


class ScoringWindow(NamedTuple):
    """Tokens [begin, end) are the input, tokens [first, last) are scored."""

    begin: int
    end: int
    first: int
    last: int


def sliding_windows(num_tokens: int, max_tokens: int, stride: int) -> Iterator[ScoringWindow]:
    """Yield windows over a text in which each token is scored once, with as much context on both sides as fits.

    >>> [tuple(window) for window in sliding_windows(5, 4, 2)]
    [(0, 4, 0, 2), (1, 5, 2, 4), (1, 5, 4, 5)]
    """
    if num_tokens <= max_tokens:
        stride = max(num_tokens, 1)
    for first in range(0, num_tokens, stride):
        begin = min(max(0, first - (max_tokens - stride) // 2), max(0, num_tokens - max_tokens))
        yield ScoringWindow(begin, min(begin + max_tokens, num_tokens), first, min(first + stride, num_tokens))


def word_ends(word_starts: np.ndarray) -> list[int]:
    """For each token, the position after the last token of its word.

    >>> word_ends(np.array([True, True, False, False, True]))
    [1, 4, 4, 4, 5]
    """
    first = np.append(np.flatnonzero(word_starts), len(word_starts))
    return first[np.searchsorted(first, np.arange(len(word_starts)), side="right")].tolist()


def text_likelihoods(checkpoint: Model | str | Path, texts: Iterable[str], **settings: Any) -> list[Likelihood]:
    """The (pseudo-)log-likelihood of each text. `settings`: those of `make_scorer`."""
    return list(make_scorer(checkpoint, **settings).score_texts(texts))


def unknown_token_messages(num_unknown: int) -> list[str]:
    """A message on unknown tokens, which are easy to predict and lower the perplexity."""
    count = format_count(num_unknown, "token is", "tokens are")
    return [f"{count} unknown to the tokenizer (<unk>), which is easy to predict."] if num_unknown else []


def lowercasing_messages(tokenizer: Tokenizer) -> list[str]:
    """A message on a tokenizer that lowercases: a code for the text would have to say which letters are capitals."""
    normalizer = tokenizer.backend.normalizer
    if normalizer is None or "A" in normalizer.normalize_str("A"):
        return []
    message = (
        "The tokenizer lowercases texts, so that capitals cost nothing: compare the bits per byte only with those of "
        "tokenizers that do the same."
    )
    return [message]


def text_metric_names(is_exact: bool) -> tuple[str, ...]:
    """Names of the scores, lower is better. A pseudo-likelihood is no code length, so it has no bits per byte."""
    return (
        ("perplexity", "word_perplexity", "bits_per_byte")
        if is_exact
        else ("pseudo_perplexity", "pseudo_word_perplexity")
    )


def aggregate_likelihoods(scorer: Any, likelihoods: Sequence[Likelihood]) -> tuple[dict[str, float], dict[str, Any]]:
    """Scores over all texts, and the counts they are computed from."""
    nats, tokens = -sum(one.logp for one in likelihoods), sum(one.tokens for one in likelihoods)
    if not tokens:
        raise UserError("There is nothing to score: no text has a token.")
    words, num_bytes = sum(one.words for one in likelihoods), sum(one.bytes for one in likelihoods)
    scores = [as_perplexity(nats, tokens), as_perplexity(nats, max(words, 1))]
    if scorer.is_exact:
        scores.append(bits_per_byte(nats, num_bytes))
    return dict(zip(text_metric_names(scorer.is_exact), scores, strict=True)), {
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
