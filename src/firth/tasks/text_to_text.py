"""Text-to-text tasks (T5, Raffel et al. 2020, section 2.4): the model reads a source and generates the answer as text.

`TextToTextTask` decodes freely, greedily or by beam search. `LabelRankingTask` scores a closed set of answers instead:
it computes log p(answer | source) of each candidate and picks the highest, so a prediction is always a valid label.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from firth.core.console import progress
from firth.core.errors import UserError, quote
from firth.generate import GenerationConfig, generate_sequences
from firth.generate.device_decode import drop_device_decode
from firth.generate.loop import ended_by_choice
from firth.metrics import compute_metrics
from firth.models import Model, ModelConfig, head_for_task, make_prompt_suffix, make_sequence_template
from firth.objectives import Batch
from firth.tasks.seq2seq_batch import (
    DecoderExample,
    PackedAnswers,
    pack_decoder_examples,
    pack_masked_examples,
    pack_seq2seq_examples,
    score_answers,
)
from firth.tasks.task import Prediction, TruncatingTokenizer, batch_indices_by_length
from firth.tasks.template import DELIMITER_TOKEN, LONGER_TEXTS
from firth.text import Example
from firth.tokens import Tokenizer
from firth.tokens.template import SequenceTemplate, with_template
from firth.train import ComputeConfig

DEFAULT_SOURCE_TOKENS, DEFAULT_TARGET_TOKENS = 512, 32  # defaults if neither recipe nor model sets a length
MAX_FITTED_TARGET_TOKENS = 128  # of answers as long as those of train
NUM_ANSWER_SPECIAL_TOKENS = 2  # at most: a begin and an end token
UNILM_MASK_RATE = 0.7  # share of an answer's tokens that UniLM's published fine-tuning masks

CandidateIds = Sequence[list[int]]


@dataclass(frozen=True)
class AnswerConfig:
    """Options of generated answers: maximum lengths in tokens, source prefix, beam search, and date."""

    max_seq_length: int = DEFAULT_SOURCE_TOKENS
    max_target_length: int = DEFAULT_TARGET_TOKENS
    prefix: str = ""
    num_beams: int = 1
    length_penalty: float = 1.0
    day: str = ""  # ISO date for chat templates. Default: today


def make_answer_config(metadata: Mapping[str, Any], config: ModelConfig) -> AnswerConfig:
    """Read the options from task.json or a recipe. Lengths of 0 default to the model's maximum length."""
    known = {name: metadata[name] for name in AnswerConfig.__dataclass_fields__ if metadata.get(name) is not None}
    length = known.pop("max_seq_length", 0) or config.max_length or DEFAULT_SOURCE_TOKENS
    target = known.pop("max_target_length", 0) or min(DEFAULT_TARGET_TOKENS, (config.max_length or length) // 2)
    return AnswerConfig(length, target, **known)


def count_longest_answer(tokenizer: Tokenizer, examples: Sequence[Example]) -> int:
    """Return the number of tokens of the longest answer, without special tokens."""
    return max((len(ids) for ids in tokenizer.encode_batch([e.target or "" for e in examples])), default=0)


def fit_target_length(
    answer_config: AnswerConfig, tokenizer: Tokenizer, examples: Sequence[Example], config: ModelConfig
) -> AnswerConfig:
    """Return the options with room for the answers of these examples, in at most half of the model's positions."""
    limit = min(MAX_FITTED_TARGET_TOKENS, (config.max_length or answer_config.max_seq_length) // 2)
    fitted = min(count_longest_answer(tokenizer, examples) + NUM_ANSWER_SPECIAL_TOKENS, limit)
    return replace(answer_config, max_target_length=max(answer_config.max_target_length, fitted))


class Seq2SeqExample(NamedTuple):
    ids: list[int]
    answer_ids: list[int]
    candidates: tuple[list[int], ...] = ()  # answers of this example to rank; default: the task's labels

    @property
    def num_tokens(self) -> int:
        return len(self.ids) + len(self.answer_ids)


def check_task_can_generate(task: str, config: ModelConfig) -> None:
    if config.architecture == "encoder" and not (config.predicts_at_mask and task == TextToTextTask.name):
        raise UserError(
            f"{task} needs a model that writes: a decoder or an encoder-decoder. This {config.family} is an encoder, "
            "which can learn every task but lm, preference, extract and text-to-text (UniLM can)."
        )


@contextmanager
def decoding_model(model: Model, compute: ComputeConfig) -> Iterator[Model]:
    """Yield the model for generation: with bf16 a copy in bfloat16, instead of autocast.

    Autocast casts all weights again for every token. On a GPU it also rules out the CUDA graphs of
    `generate/device_decode.py`.
    """
    if not compute.bf16 or next(model.parameters()).dtype != torch.float32:
        with replace(compute, bf16=False).autocast():
            yield model
        return
    copy = model.clone_as(torch.bfloat16)
    try:
        yield copy
    finally:
        drop_device_decode(copy)


class TextToTextTask:
    """Generate the answer token by token. A decoder reads source, delimiter, answer in one row.

    A pretrained decoder without fine-tuning has no delimiter token: the answer follows the source directly. A denoising
    decoder needs none: its answer fills a blank at the end of the source, as in pretraining. UniLM reads [CLS] source
    [SEP] answer [SEP] in one row, and learns to predict masked tokens of the answer.
    """

    name = "text-to-text"
    metric = "chrf"
    labels: tuple[str, ...] = ()
    long_answer_remedy = "Lower max_target_length."

    def __init__(
        self, tokenizer: Tokenizer, config: ModelConfig, answer_config: AnswerConfig, is_training: bool = True
    ) -> None:
        check_task_can_generate(self.name, config)
        self.is_decoder, self.decoder_start_id = (
            config.architecture != "encoder-decoder",  # source and answer in one row
            make_sequence_template(config, tokenizer.vocab).decoder_start_id,
        )
        end_ids = make_prompt_suffix(config, tokenizer.vocab) or None
        needs_delimiter = config.architecture == "decoder" and end_ids is None
        if needs_delimiter and is_training:
            tokenizer = tokenizer.with_special_tokens((DELIMITER_TOKEN,))
        self.tokenizer, self.answer_config, self.pad_id = tokenizer, answer_config, tokenizer.vocab.pad
        self.answer_tokenizer = TruncatingTokenizer(
            tokenizer, config, answer_config.max_target_length, prefix_ids=() if self.is_decoder else None
        )
        length = answer_config.max_seq_length
        if self.is_decoder:  # source and answer share the context window
            length = min(
                length,
                (config.max_length or length + self.answer_tokenizer.max_length) - self.answer_tokenizer.max_length,
            )
        if needs_delimiter:
            delimiter = tokenizer.backend.token_to_id(DELIMITER_TOKEN)
            end_ids = () if delimiter is None else (delimiter,)
        self.source_tokenizer = TruncatingTokenizer(tokenizer, config, length, end_ids=end_ids)
        self.row_tokens = max(self.source_tokenizer.max_length, self.answer_tokenizer.max_length)
        self.packs_several_answers = not self.is_decoder and config.recurrent is None  # candidates of one source
        self.has_prefix_attention = config.has_bidirectional_prompt and self.is_decoder
        self.num_answer_ids_in_source = int(config.has_sentinel_prompt)  # the answer's sentinel
        self.mask_id = tokenizer.vocab.mask if config.predicts_at_mask else None
        self.check_length_budget(config)
        self.generation_config = GenerationConfig(
            max_new_tokens=self.answer_tokenizer.max_length,
            num_beams=answer_config.num_beams,
            length_penalty=answer_config.length_penalty,
        )

    def check_length_budget(self, config: ModelConfig) -> None:
        """Raise if answer length and prefix leave no tokens for the source."""
        room = (
            self.source_tokenizer.max_length
            - len(self.source_tokenizer.prefix_ids)
            - len(self.source_tokenizer.end_ids)
            - len(self.tokenizer.encode(self.answer_config.prefix))
        )
        if room >= 1:
            return
        if self.is_decoder and config.max_length and self.answer_tokenizer.max_length >= config.max_length // 2:
            raise UserError(
                f"A row of this decoder has {config.max_length} positions, and answers take "
                f"{self.answer_tokenizer.max_length} of them: no room is left for a text. {self.long_answer_remedy}"
            )
        raise UserError(
            f"max_seq_length={self.source_tokenizer.max_length} has no room for a text behind the prefix "
            f"{quote(self.answer_config.prefix)}."
        )

    @property
    def notices(self) -> list[str]:
        remedy = "a model that learns them stops there. Fine-tune with --max-target-length for longer ones."
        cut_answers = self.answer_tokenizer.truncation_notices("answer")
        return [
            *(f"{notice} {LONGER_TEXTS}" for notice in self.source_tokenizer.truncation_notices("text")),
            *(f"{notice.removesuffix('.')}: {remedy}" for notice in cut_answers),
        ]

    def configure_model(self, config: ModelConfig) -> ModelConfig:
        return replace(config, head=head_for_task(config, "text-to-text"))

    def templated_tokenizer(self) -> Tokenizer:
        source = self.source_tokenizer
        template = SequenceTemplate(source.prefix_ids, source.end_ids)
        return with_template(self.tokenizer, template, pairs=False)

    def metadata(self) -> dict[str, Any]:
        return {"task": self.name, "answer": "text", **vars(self.answer_config)}

    def encode(self, examples: Sequence[Example]) -> list[Seq2SeqExample]:
        read = self.source_tokenizer.encode_texts(self.answer_config.prefix + e.texts[0] for e in examples)
        write = self.answer_tokenizer.encode_texts(e.target or "" for e in examples)
        return [Seq2SeqExample(r, w) for r, w in zip(read, write, strict=True)]

    def collate(self, items: Sequence[Seq2SeqExample]) -> Batch:
        if self.mask_id is not None:
            examples = [self.join_answer(item, item.answer_ids) for item in items]
            return pack_masked_examples(examples, self.max_row_tokens, self.pad_id, self.mask_id, UNILM_MASK_RATE)
        return self.pack_answers(items, [[item.answer_ids] for item in items]).batch

    def pack_answers(
        self,
        items: Sequence[Seq2SeqExample],
        answers: Sequence[CandidateIds],
        reserved_tokens: Sequence[int] | None = None,
    ) -> PackedAnswers:
        """Pack the items' sources with `answers`. `reserved_tokens`: see `pack_seq2seq_examples`."""
        if self.is_decoder:
            examples = [
                self.join_answer(i, a) for i, candidates in zip(items, answers, strict=True) for a in candidates
            ]
            prefix_lengths = [e.target_positions[0] + 1 - self.num_answer_ids_in_source for e in examples]
            return pack_decoder_examples(
                examples, self.max_row_tokens, self.pad_id, prefix_lengths if self.has_prefix_attention else None
            )
        return pack_seq2seq_examples(
            [item.ids for item in items], answers, self.row_tokens, self.pad_id, self.decoder_start_id, reserved_tokens
        )

    @property
    def max_row_tokens(self) -> int:
        return self.source_tokenizer.max_length + self.answer_tokenizer.max_length

    def join_answer(self, item: Seq2SeqExample, answer_ids: list[int]) -> DecoderExample:
        """Return source and answer as one document; the targets are the answer's tokens."""
        first = len(item.ids) - 1
        return DecoderExample([*item.ids, *answer_ids], range(first, first + len(answer_ids)))

    def predict(
        self, model: Model, items: Sequence[Seq2SeqExample], compute: ComputeConfig, batch_size: int
    ) -> list[Prediction]:
        """Return the answers; `complete` in `extra` is false for an answer that was cut."""
        predictions: list[Prediction | None] = [None] * len(items)
        with decoding_model(model, compute) as decoder, progress("writing", "answers", len(items)) as shown:
            for indices in batch_indices_by_length(items, batch_size, lambda item: len(item.ids)):
                prompts = [items[i].ids for i in indices]
                written = generate_sequences(decoder, prompts, self.generation_config, logprobs=False)
                for i, sequence in zip(indices, written, strict=True):
                    complete = ended_by_choice(decoder, sequence, self.generation_config.max_new_tokens)
                    text = self.tokenizer.decode(sequence.tokens).strip()
                    predictions[i] = Prediction(text, extra={"complete": complete})
                shown.advance(len(indices))
        return [p for p in predictions if p is not None]

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        references = [list(e.references) or e.target for e in examples]
        return compute_metrics(self.name, [p.prediction for p in predictions], references)


class LabelRankingTask(TextToTextTask):
    """Pick the candidate answer with the highest log-likelihood: one of the task's labels or of the item's."""

    name = "classify"
    metric = "accuracy"

    def __init__(
        self,
        labels: Sequence[str],
        tokenizer: Tokenizer,
        config: ModelConfig,
        answer_config: AnswerConfig,
        is_training: bool = True,
    ) -> None:
        super().__init__(tokenizer, config, answer_config, is_training)
        self.labels = tuple(labels)
        self.label_token_ids = tuple(self.answer_tokenizer.encode_texts(self.labels))
        if len(set(map(tuple, self.label_token_ids))) < len(self.labels):
            raise UserError(
                f"Some labels have the same first {self.answer_tokenizer.max_length} tokens: "
                "raise max_target_length or shorten them."
            )

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {"labels": list(self.labels)}

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        return compute_metrics(self.name, [p.prediction for p in predictions], [e.target for e in examples])

    def predict(
        self, model: Model, items: Sequence[Seq2SeqExample], compute: ComputeConfig, batch_size: int
    ) -> list[Prediction]:
        predictions = []
        for p_C in self.probabilities(model, items, compute, batch_size):
            names = self.labels or [str(i) for i in range(len(p_C))]
            predictions.append(Prediction(names[int(p_C.argmax())], dict(zip(names, p_C.tolist(), strict=True))))
        return predictions

    def probabilities(
        self, model: Model, items: Sequence[Seq2SeqExample], compute: ComputeConfig, batch_size: int
    ) -> list[np.ndarray]:
        """Return (C,) per item: the softmax of its candidates' log-likelihoods."""
        model.eval()
        probabilities: list[np.ndarray] = [np.zeros(0)] * len(items)
        with progress("choosing", "answers", len(items)) as shown:
            for indices in batch_indices_by_length(items, batch_size, lambda item: len(item.ids)):
                batch = [items[i] for i in indices]
                choices = [item.candidates or self.label_token_ids for item in batch]
                for i, score_C in zip(indices, self.log_likelihoods(model, batch, choices, compute), strict=True):
                    probabilities[i] = np.exp(score_C - np.logaddexp.reduce(score_C))
                shown.advance(len(indices))
        return probabilities

    def log_likelihoods(
        self, model: Model, items: Sequence[Seq2SeqExample], choices: Sequence[CandidateIds], compute: ComputeConfig
    ) -> list[np.ndarray]:
        """Return (C,) per item. The encoder runs once per source; a decoder row holds as many candidates as fit."""
        longest, encoder_states = max(len(ids) for candidates in choices for ids in candidates), None
        per_row = max(1, self.row_tokens // longest) if self.packs_several_answers else 1
        # A chunk holds up to `per_row` candidates of every item; an item without further ones repeats its first.
        chunks = [
            [candidates[c : c + per_row] or candidates[:1] for candidates in choices]
            for c in range(0, max(map(len, choices)), per_row)
        ]
        reserved = [max(sum(map(len, answers)) for answers in item_chunks) for item_chunks in zip(*chunks, strict=True)]
        scores: list[list[float]] = [[] for _ in items]
        for chunk in chunks:
            packed = self.pack_answers(items, chunk, reserved)
            logp_A, _, encoder_states = score_answers(model, packed, compute, encoder_states)
            score = iter(packed.sum_by_answer(logp_A).tolist())
            for item_scores, answers in zip(scores, chunk, strict=True):
                item_scores += islice(score, len(answers))
        return [np.array(item[: len(candidates)]) for item, candidates in zip(scores, choices, strict=True)]
