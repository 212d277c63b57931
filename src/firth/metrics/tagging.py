"""Entity metrics of tagging, from 0 to 1: an entity is correct if its start, its end and its type are.

Entities are decoded as by conlleval, the script of the CoNLL-2000 and 2003 tasks. It accepts any order of tags, so one
decoder serves IOB1, IOB2 (BIO), BIOES and BILOU. A prediction and a reference are the tags of one sentence.

F1 tells how many entities are wrong, not how. `match_entities` pairs the entities of a sentence and names each outcome:

| outcome        | true entity | predicted entity                              |
|----------------|-------------|-----------------------------------------------|
| right          | yes         | same words, same type                         |
| wrong type     | yes         | same words, other type                        |
| wrong boundary | yes         | same type, other words, at least one in common |
| missed         | yes         | none of these                                 |
| invented       | none of these | yes                                         |

Each entity has one outcome. So true entities = right + wrong type + wrong boundary + missed, and predicted entities =
right + wrong type + wrong boundary + invented. A prediction with other words and another type is an invented entity,
and the true one is missed, as F1 counts it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import product
from typing import Literal, NamedTuple

from firth.core.errors import UserError, quote
from firth.metrics.classification import ClassMetrics, check_same_length

TagSequence = Sequence[str]
# Begin, Inside, End, Single; BILOU names the last two Last and Unit.
CHUNK_TAG_PATTERN = re.compile(r"O|([BIESLU])(?:-(.+))?", re.DOTALL)
BILOU_TO_BIOES = {"L": "E", "U": "S"}
EntityOutcome = Literal["right", "missed", "invented", "wrong type", "wrong boundary"]


class EntitySpan(NamedTuple):
    """Words [start, end) of a sentence, and their entity type."""

    type: str
    start: int
    end: int


class EntityMatch(NamedTuple):
    """A true entity with the predicted one that it is compared with. A missed or invented entity has no partner."""

    outcome: EntityOutcome
    true: EntitySpan | None
    predicted: EntitySpan | None

    @property
    def start(self) -> int:
        return min(span.start for span in (self.true, self.predicted) if span)

    @property
    def end(self) -> int:
        return max(span.end for span in (self.true, self.predicted) if span)


def entity_f1(
    predictions: Sequence[TagSequence], references: Sequence[TagSequence], exclude: Collection[str] = ()
) -> float:
    """Return micro F1 of the entities; `exclude` lists ignored types, such as V in CoNLL-2005's semantic roles."""
    return _entity_metrics(predictions, references, exclude).f1


def entity_precision(
    predictions: Sequence[TagSequence], references: Sequence[TagSequence], exclude: Collection[str] = ()
) -> float:
    """Return the share of predicted entities that are correct."""
    return _entity_metrics(predictions, references, exclude).precision


def entity_recall(
    predictions: Sequence[TagSequence], references: Sequence[TagSequence], exclude: Collection[str] = ()
) -> float:
    """Return the share of true entities that were predicted."""
    return _entity_metrics(predictions, references, exclude).recall


def tag_accuracy(predictions: Sequence[TagSequence], references: Sequence[TagSequence]) -> float:
    """Return the share of words with the correct tag."""
    _check_tag_lengths(predictions, references)
    correct = [
        p == r for tags, true in zip(predictions, references, strict=True) for p, r in zip(tags, true, strict=True)
    ]
    if not correct:
        raise UserError("There is nothing to score: no sentence has a word.")
    return sum(correct) / len(correct)


def per_type_metrics(predictions: Sequence[TagSequence], references: Sequence[TagSequence]) -> dict[str, ClassMetrics]:
    """Return the metrics of every entity type that occurs in predictions or references, sorted."""
    correct, predicted, true = _count_entities_by_type(predictions, references)
    return {
        name: ClassMetrics.from_counts(correct[name], predicted[name], true[name]) for name in sorted(predicted | true)
    }


def are_span_tags(references: Sequence[TagSequence]) -> bool:
    """Whether tags mark spans (O, B-PER ...) rather than single words (NOUN, VERB ...)."""
    return all(CHUNK_TAG_PATTERN.fullmatch(tag) for tag in {tag for tags in references for tag in tags})


def find_stray_tags(references: Sequence[TagSequence]) -> list[str]:
    """Return the tags that mark no span, if most other tags do: a likely typo, which would disable entity metrics.

    >>> find_stray_tags([["B-PER", "I-PER", "O", "X"]]), find_stray_tags([["B-PER", "O"]])
    (['X'], [])
    >>> find_stray_tags([["NOUN", "VERB", "X"]])
    []
    """
    tags = {tag for tags in references for tag in tags}
    stray = sorted(tag for tag in tags if not CHUNK_TAG_PATTERN.fullmatch(tag))
    return stray if 2 * len(stray) < len(tags) else []


def extract_entity_spans(tags: TagSequence) -> list[EntitySpan]:
    """Return the entities of one sentence.

    An entity starts at B and S, at a new type, and at any tag after O, E or S; it ends before O or the next start.

    >>> [tuple(span) for span in extract_entity_spans(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"])]
    [('PER', 0, 2), ('LOC', 3, 4), ('LOC', 4, 5)]
    """
    spans: list[EntitySpan] = []
    last_prefix, last_type = "O", ""
    for i, tag in enumerate(tags):
        prefix, entity_type = _split_tag(tag)
        if prefix == "O":
            pass
        elif prefix in "BS" or last_prefix in "OES" or entity_type != last_type:
            spans.append(EntitySpan(entity_type, i, i + 1))
        else:
            spans[-1] = spans[-1]._replace(end=i + 1)
        last_prefix, last_type = prefix, entity_type
    return spans


def match_entities(predicted: TagSequence, true: TagSequence, exclude: Collection[str] = ()) -> list[EntityMatch]:
    """Return the outcomes of one sentence from left to right; the table above defines them.

    Equal entities are paired first, then equal spans, then overlapping entities of one type. Of several overlaps, the
    longest is paired, then the leftmost. `exclude` lists ignored types.

    >>> [match.outcome for match in match_entities(["B-PER", "O", "B-LOC"], ["B-PER", "I-PER", "O"])]
    ['wrong boundary', 'invented']
    """
    left_true, left_predicted = (
        [span for span in extract_entity_spans(tags) if span.type not in exclude] for tags in (true, predicted)
    )
    pairs = [(t, p) for t, p in product(left_true, left_predicted) if _num_shared_words(t, p)]
    rules: list[tuple[EntityOutcome, list[tuple[EntitySpan, EntitySpan]]]] = [
        ("right", [(t, p) for t, p in pairs if t == p]),
        ("wrong type", [(t, p) for t, p in pairs if t[1:] == p[1:]]),
        ("wrong boundary", sorted((pair for pair in pairs if pair[0].type == pair[1].type), key=_overlap_order)),
    ]
    matches = []
    for outcome, candidates in rules:
        for t, p in candidates:
            if t in left_true and p in left_predicted:
                left_true.remove(t)
                left_predicted.remove(p)
                matches.append(EntityMatch(outcome, t, p))
    matches += [EntityMatch("missed", t, None) for t in left_true]
    matches += [EntityMatch("invented", None, p) for p in left_predicted]
    return sorted(matches, key=lambda match: (match.start, match.end, match.true is None))


def _num_shared_words(a: EntitySpan, b: EntitySpan) -> int:
    return max(0, min(a.end, b.end) - max(a.start, b.start))


def _overlap_order(pair: tuple[EntitySpan, EntitySpan]) -> tuple[int, int, int]:
    """Sort key: the longest overlap first, then the leftmost."""
    return -_num_shared_words(*pair), pair[0].start, pair[1].start


def _split_tag(tag: str) -> tuple[str, str]:
    """Return a tag's BIOES prefix and its type; a tag without a type has the type '_'."""
    match = CHUNK_TAG_PATTERN.fullmatch(tag)
    if not match:
        raise UserError(f"The tag {quote(tag)} marks no span. Use O and tags such as B-PER, I-PER (or E-, S-).")
    prefix, entity_type = match.groups()
    return (BILOU_TO_BIOES.get(prefix, prefix), entity_type or "_") if prefix else ("O", "_")


def _entity_metrics(
    predictions: Sequence[TagSequence], references: Sequence[TagSequence], exclude: Collection[str]
) -> ClassMetrics:
    """Return the metrics over all types except `exclude`."""
    return ClassMetrics.from_counts(*count_entities(predictions, references, exclude))


def count_entities(
    predictions: Sequence[TagSequence], references: Sequence[TagSequence], exclude: Collection[str]
) -> list[int]:
    """Return the numbers of correct, predicted and true entities, without the types in `exclude`."""
    return [
        sum(n for name, n in c.items() if name not in exclude) for c in _count_entities_by_type(predictions, references)
    ]


def _count_entities_by_type(
    predictions: Sequence[TagSequence], references: Sequence[TagSequence]
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Return the numbers of correct, predicted and true entities by type."""
    _check_tag_lengths(predictions, references)
    correct: Counter[str] = Counter()
    predicted: Counter[str] = Counter()
    true: Counter[str] = Counter()
    for predicted_tags, true_tags in zip(predictions, references, strict=True):
        predicted_spans, true_spans = set(extract_entity_spans(predicted_tags)), set(extract_entity_spans(true_tags))
        correct.update(span.type for span in predicted_spans & true_spans)
        predicted.update(span.type for span in predicted_spans)
        true.update(span.type for span in true_spans)
    return correct, predicted, true


def _check_tag_lengths(predictions: Sequence[TagSequence], references: Sequence[TagSequence]) -> None:
    """Raise a UserError unless every sentence has as many predicted tags as words."""
    check_same_length(predictions, references)
    for i, (predicted, true) in enumerate(zip(predictions, references, strict=True)):
        if len(predicted) != len(true):
            raise UserError(f"Sentence {i} (counted from 0) has {len(true)} words but {len(predicted)} predicted tags.")
