"""Text embeddings, trained on pairs of texts with the same meaning.

The loss is contrastive with in-batch negatives: each text must find its partner among the partners of the batch, in
both directions (LaBSE, Feng et al. 2022).

N texts, P pairs, D model width.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from firth.core.console import say
from firth.core.errors import UserError
from firth.core.files import write_json
from firth.metrics import compute_metrics
from firth.metrics.pairs import retrieval_ranks, scores_from_ranks
from firth.models import EmbeddingHead, Head, Model, ModelConfig, head_for_task, hf_model_type, make_sequence_template
from firth.objectives import Batch
from firth.tasks.head_task import Array, EncodedExample, HeadTask, PackedBatch, gather_answer_logits
from firth.tasks.task import Prediction
from firth.tasks.template import EncodedSequence
from firth.text import Example
from firth.tokens import Tokenizer
from firth.tokens.template import with_template
from firth.tokens.tokenizer import tokenizer_errors
from firth.train import ComputeConfig

POSITIVE_SCORE_SHARE = 0.8  # share of the highest score from which a pair is positive: 4 of STS-B's 5
# keys of sentence-transformers' pooling config
SENTENCE_TRANSFORMERS_POOLING = {
    "mean": "pooling_mode_mean_tokens",
    "first": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
}
SENTENCE_TRANSFORMERS_FILES = (
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json"),
)


class EmbeddingTask(HeadTask):
    """Contrastive training of text embeddings.

    A pair that shares a text with an earlier pair of the batch is left out: it would be a false negative. The metric is
    Spearman's correlation if the examples have scores, else the mean reciprocal rank of the partners.
    """

    name = "embed"
    metric = "spearman"

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, max_length: int) -> None:
        super().__init__(tokenizer, config, max_length, is_training=False)  # False: adds no delimiter tokens
        self.sequence_template = make_sequence_template(config, tokenizer.vocab)
        self.pool = self.head_config(config).pool

    def head_config(self, config: ModelConfig) -> EmbeddingHead:
        """Return the checkpoint's embedding head if it has one, else the default, with this task's maximum length."""
        head: Head = config.head if isinstance(config.head, EmbeddingHead) else head_for_task(config, "embed")
        assert isinstance(head, EmbeddingHead)
        return replace(head, max_length=self.template.max_length)

    def encode(self, examples: Sequence[Example]) -> list[EncodedExample]:
        self.metric = "spearman" if all_have_scores(examples) else "mrr"
        rows = iter(self.tokenizer.encode_batch([text for e in examples for text in e.texts]))
        return [EncodedExample(tuple(self.build_inputs(next(rows)) for _ in e.texts), e.target) for e in examples]

    def build_inputs(self, ids: list[int]) -> EncodedSequence:
        """Truncate a text and add the special tokens."""
        max_text_tokens = self.template.max_length - self.sequence_template.num_special_tokens()
        self.template.num_truncated += len(ids) > max_text_tokens
        input_ids, token_type_ids = self.sequence_template.apply(ids[:max_text_tokens])
        return EncodedSequence(input_ids, token_type_ids, (len(input_ids) - 1 if self.pool == "last" else 0,))

    def templated_tokenizer(self) -> Tokenizer:
        return with_template(self.tokenizer, self.sequence_template, pairs=False)

    def add_labels(self, packed: PackedBatch, items: Sequence[EncodedExample]) -> Batch:
        side_A = np.tile([0, 1], len(items))
        group = self.scatter_labels(packed, np.repeat(number_distinct_pairs(items), 2), -1)
        side = self.scatter_labels(packed, side_A, 0)
        return packed.batch._replace(group_ids=group, task_labels=side, labels=None)

    def decode_logits(self, items: Sequence[EncodedExample], logits: Array, packed: PackedBatch) -> list[Prediction]:
        vectors_ND = gather_answer_logits(logits, packed)
        return [Prediction(pair) for pair in zip(vectors_ND[::2], vectors_ND[1::2], strict=True)]

    def predict(
        self, model: Model, items: Sequence[EncodedExample], compute: ComputeConfig, batch_size: int
    ) -> list[Prediction]:
        """Return the cosine of each pair and, without scores, the retrieval ranks in both directions."""
        pairs = [p.prediction for p in super().predict(model, items, compute, batch_size)]
        a_PD, b_PD = (np.stack([pair[side] for pair in pairs]) for side in (0, 1))
        texts = [[tuple(sequence.ids) for sequence in item.sequences] for item in items]
        return compare_pairs(a_PD, b_PD, all(item.label is not None for item in items), texts)

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        return score_pairs(examples, predictions)


def compare_pairs(a_PD: Array, b_PD: Array, have_scores: bool, texts: Sequence[Sequence[Hashable]]) -> list[Prediction]:
    """Return the cosine of each pair of unit vectors and, without scores, the retrieval ranks in both directions.

    `texts`: both texts of each pair, or their tokens.
    """
    cosines = (a_PD * b_PD).sum(1).tolist()
    if have_scores:
        return [Prediction(cosine) for cosine in cosines]
    ranks = zip(*(rank_P.tolist() for rank_P in retrieval_ranks(a_PD, b_PD, texts)), strict=True)
    return [
        Prediction({"cosine": cosine, "rank_forward": there, "rank_backward": back})
        for cosine, (there, back) in zip(cosines, ranks, strict=True)
    ]


def score_pairs(examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
    """Return the correlation of the cosines with the examples' scores; without scores, the retrieval metrics."""
    values = [p.prediction for p in predictions]
    if all_have_scores(examples):
        return compute_metrics("embed", values, [e.target for e in examples])
    return scores_from_ranks(*(np.array([p[f"rank_{way}"] for p in values]) for way in ("forward", "backward")))


def all_have_scores(examples: Sequence[Example]) -> bool:
    return all(e.target is not None for e in examples)


def number_distinct_pairs(items: Sequence[EncodedExample]) -> list[int]:
    """Number the pairs that share no text with an earlier pair; the others get -1.

    >>> a, b, c, d = (EncodedSequence([i], [0], (0,)) for i in range(4))
    >>> number_distinct_pairs([EncodedExample((a, b)), EncodedExample((c, b)), EncodedExample((c, d))])
    [0, -1, 1]
    """
    seen: set[tuple[int, ...]] = set()
    numbers, used = [], 0
    for item in items:
        texts = {tuple(sequence.ids) for sequence in item.sequences}
        new = not texts & seen
        if new:
            seen |= texts
        numbers.append(used if new else -1)
        used += new
    return numbers


def select_positive_pairs(examples: Sequence[Example], path: str) -> list[Example]:
    """Return the pairs to train on: all, or with scores the pairs near the highest score."""
    scores = [e.target for e in examples if e.target is not None]
    if not scores:
        return list(examples)
    least = POSITIVE_SCORE_SHARE * max(scores)
    positives = [e for e in examples if e.target is None or e.target >= least]
    if len(positives) < 2 or max(scores) <= 0:
        raise UserError(f"{path}: fewer than 2 pairs have a score near the highest, {max(scores):g}: nothing to learn.")
    if len(positives) < len(examples):
        counts = f"{len(positives):,} of {len(examples):,} pairs"
        say(f"{counts} have a score of at least {least:g}; the others are not learned.")
    return positives


def write_sentence_transformers_files(model: Model, max_length: int, folder: Path) -> bool:
    """Write the files with which sentence-transformers opens a folder; return whether they were written.

    They are written only if it would compute the same vectors. For BART it would use the decoder's states.
    """
    head, tokenizer = model.config.head, model.tokenizer
    if (
        not isinstance(head, EmbeddingHead)
        or tokenizer is None
        or head.has_pooler
        or head.pool not in SENTENCE_TRANSFORMERS_POOLING
    ):
        return False
    with tokenizer_errors():
        hf_ids = tokenizer.backend.encode("a", add_special_tokens=True).ids
    our_ids = EmbeddingTask(tokenizer, model.config, max_length).build_inputs(tokenizer.encode("a")).ids
    if hf_ids != our_ids or hf_model_type(model.config, tokenizer.vocab) == "firth" or model.config.has_decoder:
        return False
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    settings: dict[str, Any] = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write_json(folder / "config_sentence_transformers.json", settings)
    (folder / "1_Pooling").mkdir()
    pooling = {name: pool == head.pool for pool, name in SENTENCE_TRANSFORMERS_POOLING.items()}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": model.config.dim, **pooling})
    return True
