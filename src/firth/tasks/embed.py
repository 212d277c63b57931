"""Vectors of texts, learned from pairs that mean the same.

N texts, P pairs, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
from firth.train import ComputeConfig

POSITIVE_SCORE_SHARE = 0.8  # a pair with a score means the same from this share of the highest score on: 4 of STS-B's 5
SENTENCE_TRANSFORMERS_POOLING = {
    "mean": "pooling_mode_mean_tokens",
    "first": "pooling_mode_cls_token",
}  # as sentence-transformers says it


class EmbeddingTask(HeadTask):
    """Each text of a pair is to find the other one among those of the batch, from both sides (LaBSE).

    A pair that shares a text with an earlier one of the batch is left out there: it would make a right answer wrong.
    What decides is Spearman's correlation where the examples have scores, else how well partners find each other.
    """

    name = "embed"
    metric = "spearman"

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, max_length: int) -> None:
        super().__init__(
            tokenizer, config, max_length, is_training=False
        )  # texts stand in their own frame: no token is added
        self.sequence_template = make_sequence_template(config, tokenizer.vocab)
        self.pool = self.head_config(config).pool

    def head_config(self, config: ModelConfig) -> EmbeddingHead:
        """The checkpoint's own way to a vector, where it has one already."""
        head: Head = config.head if isinstance(config.head, EmbeddingHead) else head_for_task(config, "embed")
        assert isinstance(head, EmbeddingHead)
        return head

    def encode(self, examples: Sequence[Example]) -> list[EncodedExample]:
        self.metric = "spearman" if all_have_scores(examples) else "mrr"
        rows = iter(self.tokenizer.encode_batch([text for e in examples for text in e.texts]))
        return [EncodedExample(tuple(self.build_inputs(next(rows)) for _ in e.texts), e.target) for e in examples]

    def build_inputs(self, ids: list[int]) -> EncodedSequence:
        """A text in its frame, cut where it is too long."""
        max_text_tokens = self.template.max_length - self.sequence_template.num_special_tokens()
        self.template.num_truncated += len(ids) > max_text_tokens
        input_ids, token_type_ids = self.sequence_template.apply(ids[:max_text_tokens])
        return EncodedSequence(input_ids, token_type_ids, (len(input_ids) - 1 if self.pool == "last" else 0,))

    def templated_tokenizer(self) -> Tokenizer:
        return with_template(self.tokenizer, self.sequence_template, pairs=False)

    def collate(self, items: Sequence[EncodedExample]) -> Batch:
        laid = self.pack_items(items)
        side_A = np.tile([0, 1], len(items))
        group, side = (
            self.scatter_labels(laid, np.repeat(number_distinct_pairs(items), 2), -1),
            self.scatter_labels(laid, side_A, 0),
        )
        return laid.batch._replace(group_ids=group, task_labels=side, labels=None)

    def decode_logits(self, items: Sequence[EncodedExample], logits: Array, packed: PackedBatch) -> list[Prediction]:
        vectors_ND = gather_answer_logits(logits, packed)
        return [Prediction(pair) for pair in zip(vectors_ND[::2], vectors_ND[1::2], strict=True)]

    def predict(
        self, model: Model, items: Sequence[EncodedExample], compute: ComputeConfig, batch_size: int
    ) -> list[Prediction]:
        """The cosine of each pair; where there are no scores, also at which ranks its texts find each other."""
        pairs = [p.prediction for p in super().predict(model, items, compute, batch_size)]
        a_PD, b_PD = (np.stack([pair[side] for pair in pairs]) for side in (0, 1))
        cosines = (a_PD * b_PD).sum(1).tolist()
        if all(item.label is not None for item in items):
            return [Prediction(cosine) for cosine in cosines]
        ranks = zip(*(rank_P.tolist() for rank_P in retrieval_ranks(a_PD, b_PD)), strict=True)
        return [
            Prediction({"cosine": cosine, "rank_forward": there, "rank_backward": back})
            for cosine, (there, back) in zip(cosines, ranks, strict=True)
        ]

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        found = [p.prediction for p in predictions]
        if all_have_scores(examples):
            return compute_metrics(self.name, found, [e.target for e in examples])
        return scores_from_ranks(*(np.array([p[f"rank_{way}"] for p in found]) for way in ("forward", "backward")))


def all_have_scores(examples: Sequence[Example]) -> bool:
    return all(e.target is not None for e in examples)


def number_distinct_pairs(items: Sequence[EncodedExample]) -> list[int]:
    """A number for each pair that shares no text with an earlier one, -1 for the others.

    >>> a, b, c, d = (EncodedSequence([i], [0], (0,)) for i in range(4))
    >>> number_distinct_pairs([EncodedExample((a, b)), EncodedExample((c, b)), EncodedExample((c, d))])
    [0, -1, 1]
    """
    seen: set[tuple[int, ...]] = set()
    numbers, used = [], 0
    for item in items:
        texts = {tuple(sheet.ids) for sheet in item.sequences}
        new = not texts & seen
        if new:
            seen |= texts
        numbers.append(used if new else -1)
        used += new
    return numbers


def select_positive_pairs(examples: Sequence[Example], path: str) -> list[Example]:
    """The pairs to learn from: all, or where the file has scores, those that say that both mean the same."""
    known = [e.target for e in examples if e.target is not None]
    if not known:
        return list(examples)
    least = POSITIVE_SCORE_SHARE * max(known)
    found = [e for e in examples if e.target is None or e.target >= least]
    if len(found) < 2 or max(known) <= 0:
        raise UserError(f"{path}: fewer than 2 pairs have a score near the highest, {max(known):g}: nothing to learn.")
    if len(found) < len(examples):
        say(
            f"{len(found):,} of {len(examples):,} pairs have a score of at least {least:g}; the others are not learned."
        )
    return found


def write_sentence_transformers_files(model: Model, max_length: int, folder: Path) -> bool:
    """What sentence-transformers opens a folder with, where it would get the same vectors; whether it would.

    Of BART it would take the decoder's.
    """
    head, tokenizer = model.config.head, model.tokenizer
    if (
        not isinstance(head, EmbeddingHead)
        or tokenizer is None
        or head.has_pooler
        or head.pool not in SENTENCE_TRANSFORMERS_POOLING
    ):
        return False
    found = tokenizer.backend.encode("a", add_special_tokens=True).ids
    ours = EmbeddingTask(tokenizer, model.config, max_length).build_inputs(tokenizer.encode("a")).ids
    if found != ours or hf_model_type(model.config, tokenizer.vocab) == "firth" or model.config.has_decoder:
        return False
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    (folder / "1_Pooling").mkdir()
    pooling = {name: pool == head.pool for pool, name in SENTENCE_TRANSFORMERS_POOLING.items()}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": model.config.dim, **pooling})
    return True
