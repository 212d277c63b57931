"""Vectors of texts, learned from pairs that mean the same.

N texts, P pairs, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from firth.console import say
from firth.errors import UserError
from firth.files import write_json
from firth.metrics import score
from firth.metrics.pairs import rank_scores, retrieval_ranks
from firth.models import Embedding, Head, Model, ModelConfig, family_of, head_for
from firth.models.model import surroundings
from firth.objectives import Batch
from firth.tasks.form import Sheet
from firth.tasks.headed import Array, Headed, Item, Laid, at_slots
from firth.tasks.task import Prediction
from firth.text import Example
from firth.tokens import Tokenizer
from firth.tokens.frame import A, framed
from firth.train import Machine

POSITIVE = 0.8  # a pair with a score means the same from this share of the highest score on: 4 of STS-B's 5
POOLS = {"mean": "pooling_mode_mean_tokens", "first": "pooling_mode_cls_token"}  # as sentence-transformers says it


class Embed(Headed):
    """Each text of a pair is to find the other one among those of the batch, from both sides (LaBSE).

    A pair that shares a text with an earlier one of the batch is left out there: it would make a right answer wrong.
    What decides is Spearman's correlation where the examples have scores, else how well partners find each other.
    """

    name = "embed"
    metric = "spearman"

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, length: int) -> None:
        super().__init__(tokenizer, config, length, learns=False)  # texts stand in their own frame: no token is added
        self.before, _, self.after = surroundings(config, tokenizer.vocab)
        self.pool = self.answers(config).pool

    def answers(self, config: ModelConfig) -> Embedding:
        """The checkpoint's own way to a vector, where it has one already."""
        head: Head = config.head if isinstance(config.head, Embedding) else head_for(config, "embed")
        assert isinstance(head, Embedding)
        return head

    def encode(self, examples: Sequence[Example]) -> list[Item]:
        self.metric = "spearman" if are_scored(examples) else "mrr"
        rows = iter(self.tokenizer.encode_batch([text for e in examples for text in e.texts]))
        return [Item(tuple(self.sheet(next(rows)) for _ in e.texts), e.target) for e in examples]

    def sheet(self, ids: list[int]) -> Sheet:
        """A text in its frame, cut where it is too long."""
        room = self.form.length - len(self.before) - len(self.after)
        self.form.cut += len(ids) > room
        read = [*self.before, *ids[:room], *self.after]
        segment = [0] * len(read)
        if self.form.own_segment:
            segment[-1] = 2
        return Sheet(read, segment, (len(read) - 1 if self.pool == "last" else 0,))

    def framed(self) -> Tokenizer:
        return framed(self.tokenizer, [self.sheet([A])], self.form.own_segment)

    def batch(self, items: Sequence[Item]) -> Batch:
        laid = self.lay(items)
        side_A = np.tile([0, 1], len(items))
        group, side = self.targets(laid, np.repeat(without_doubles(items), 2), -1), self.targets(laid, side_A, 0)
        return laid.batch._replace(group=group, target=side, labels=None)

    def read(self, items: Sequence[Item], logits: Array, laid: Laid) -> list[Prediction]:
        vectors_ND = at_slots(logits, laid)
        return [Prediction(pair) for pair in zip(vectors_ND[::2], vectors_ND[1::2], strict=True)]

    def predict(self, model: Model, items: Sequence[Item], machine: Machine, size: int) -> list[Prediction]:
        """The cosine of each pair; where there are no scores, also at which ranks its texts find each other."""
        pairs = [p.prediction for p in super().predict(model, items, machine, size)]
        a_PD, b_PD = (np.stack([pair[side] for pair in pairs]) for side in (0, 1))
        cosines = (a_PD * b_PD).sum(1).tolist()
        if all(item.answer is not None for item in items):
            return [Prediction(cosine) for cosine in cosines]
        ranks = zip(*(rank_P.tolist() for rank_P in retrieval_ranks(a_PD, b_PD)), strict=True)
        return [
            Prediction({"cosine": cosine, "rank_forward": there, "rank_backward": back})
            for cosine, (there, back) in zip(cosines, ranks, strict=True)
        ]

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        found = [p.prediction for p in predictions]
        if are_scored(examples):
            return score(self.name, found, [e.target for e in examples])
        return rank_scores(*(np.array([p[f"rank_{way}"] for p in found]) for way in ("forward", "backward")))


def are_scored(examples: Sequence[Example]) -> bool:
    return all(e.target is not None for e in examples)


def without_doubles(items: Sequence[Item]) -> list[int]:
    """A number for each pair that shares no text with an earlier one, -1 for the others.

    >>> a, b, c, d = (Sheet([i], [0], (0,)) for i in range(4))
    >>> without_doubles([Item((a, b)), Item((c, b)), Item((c, d))])
    [0, -1, 1]
    """
    seen: set[tuple[int, ...]] = set()
    numbers, used = [], 0
    for item in items:
        texts = {tuple(sheet.ids) for sheet in item.sheets}
        new = not texts & seen
        if new:
            seen |= texts
        numbers.append(used if new else -1)
        used += new
    return numbers


def positives(examples: Sequence[Example], where: str) -> list[Example]:
    """The pairs to learn from: all, or where the file has scores, those that say that both mean the same."""
    known = [e.target for e in examples if e.target is not None]
    if not known:
        return list(examples)
    least = POSITIVE * max(known)
    found = [e for e in examples if e.target is None or e.target >= least]
    if len(found) < 2 or max(known) <= 0:
        raise UserError(f"{where}: fewer than 2 pairs have a score near the highest, {max(known):g}: nothing to learn.")
    if len(found) < len(examples):
        say(
            f"{len(found):,} of {len(examples):,} pairs have a score of at least {least:g}; the others are not learned."
        )
    return found


def write_sentence_transformer(model: Model, length: int, folder: Path) -> bool:
    """What sentence-transformers opens a folder with, where it would get the same vectors; whether it would.

    Of BART it would take the decoder's.
    """
    head, tokenizer = model.config.head, model.tokenizer
    if not isinstance(head, Embedding) or tokenizer is None or head.dense or head.pool not in POOLS:
        return False
    found = tokenizer.backend.encode("a", add_special_tokens=True).ids
    ours = Embed(tokenizer, model.config, length).sheet(tokenizer.encode("a")).ids
    if found != ours or family_of(model.config, tokenizer.vocab) == "firth" or model.config.has_decoder:
        return False
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
    (folder / "1_Pooling").mkdir()
    pooling = {name: pool == head.pool for pool, name in POOLS.items()}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": model.config.dim, **pooling})
    return True
