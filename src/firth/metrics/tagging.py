"""How well stretches of words were found, from 0 to 1: a stretch is right if its ends and its type are.

Tags are read as conlleval reads them, which forgives every mistake in the order of tags, so that one reader serves
IOB1, IOB2 (BIO), BIOES and BILOU. A prediction and a reference are the tags of one sentence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from firth.core.errors import UserError
from firth.metrics.classification import ClassMetrics, check_same_length

TagSequence = Sequence[str]
# Begin, Inside, End, Single; Last and Unit are BILOU's words for End and Single.
CHUNK_TAG_PATTERN = re.compile(r"O|([BIESLU])(?:-(.+))?", re.DOTALL)
BILOU_TO_BIOES = {"L": "E", "U": "S"}


class EntitySpan(NamedTuple):
    """Words `start` to `end` (not included) of a sentence, and what they are."""

    type: str
    start: int
    end: int


def entity_f1(
    predictions: Sequence[TagSequence], references: Sequence[TagSequence], exclude: Collection[str] = ()
) -> float:
    """F1 over all stretches; `exclude` leaves out types, as CoNLL-2005 does with the verb of semantic roles."""
    return _entity_metrics(predictions, references, exclude).f1


def entity_precision(
    predictions: Sequence[TagSequence], references: Sequence[TagSequence], exclude: Collection[str] = ()
) -> float:
    """The share of the stretches predicted that are right."""
    return _entity_metrics(predictions, references, exclude).precision


def entity_recall(
    predictions: Sequence[TagSequence], references: Sequence[TagSequence], exclude: Collection[str] = ()
) -> float:
    """The share of the true stretches that were found."""
    return _entity_metrics(predictions, references, exclude).recall


def tag_accuracy(predictions: Sequence[TagSequence], references: Sequence[TagSequence]) -> float:
    """The share of words whose tag is right."""
    _check_tag_lengths(predictions, references)
    pairs = [
        p == r for tags, true in zip(predictions, references, strict=True) for p, r in zip(tags, true, strict=True)
    ]
    if not pairs:
        raise UserError("There is nothing to score: no sentence has a word.")
    return sum(pairs) / len(pairs)


def per_type_metrics(predictions: Sequence[TagSequence], references: Sequence[TagSequence]) -> dict[str, ClassMetrics]:
    """A row for every type of stretch that occurs among the predictions or the references, sorted."""
    right, guessed, true = _count_entities_by_type(predictions, references)
    return {name: ClassMetrics.from_counts(right[name], guessed[name], true[name]) for name in sorted(guessed | true)}


def are_span_tags(references: Sequence[TagSequence]) -> bool:
    """Whether tags mark stretches (O, B-PER ...) rather than single words (NOUN, VERB ...)."""
    return all(CHUNK_TAG_PATTERN.fullmatch(tag) for tag in {tag for tags in references for tag in tags})


def find_stray_tags(references: Sequence[TagSequence]) -> list[str]:
    """The few tags that mark no stretches, where most others do: a slip, for which no stretch would be scored.

    >>> find_stray_tags([["B-PER", "I-PER", "O", "X"]]), find_stray_tags([["B-PER", "O"]])
    (['X'], [])
    >>> find_stray_tags([["NOUN", "VERB", "X"]])
    []
    """
    tags = {tag for tags in references for tag in tags}
    odd = sorted(tag for tag in tags if not CHUNK_TAG_PATTERN.fullmatch(tag))
    return odd if 2 * len(odd) < len(tags) else []


def extract_entity_spans(tags: TagSequence) -> list[EntitySpan]:
    """The stretches of one sentence.

    A stretch starts at B and S, at a new type, and at any tag after O, E or S; it lasts until O or the next start.

    >>> [tuple(span) for span in extract_entity_spans(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"])]
    [('PER', 0, 2), ('LOC', 3, 4), ('LOC', 4, 5)]
    """
    found: list[EntitySpan] = []
    before, open_type = "O", ""
    for i, tag in enumerate(tags):
        place, name = _split_tag(tag)
        if place == "O":
            pass
        elif place in "BS" or before in "OES" or name != open_type:
            found.append(EntitySpan(name, i, i + 1))
        else:
            found[-1] = found[-1]._replace(end=i + 1)
        before, open_type = place, name
    return found


def _split_tag(tag: str) -> tuple[str, str]:
    """A tag's place in its stretch, and its type; a tag without a type has the type '_'."""
    match = CHUNK_TAG_PATTERN.fullmatch(tag)
    if not match:
        raise UserError(f"The tag {tag!r} marks no stretch of words. Use O and tags such as B-PER, I-PER (or E-, S-).")
    place, name = match.groups()
    return (BILOU_TO_BIOES.get(place, place), name or "_") if place else ("O", "_")


def _entity_metrics(
    predictions: Sequence[TagSequence], references: Sequence[TagSequence], exclude: Collection[str]
) -> ClassMetrics:
    """One row over all types but those left out."""
    return ClassMetrics.from_counts(*count_entities(predictions, references, exclude))


def count_entities(
    predictions: Sequence[TagSequence], references: Sequence[TagSequence], exclude: Collection[str]
) -> list[int]:
    """How many stretches are right, how many were predicted, how many are true; without types that are left out."""
    return [
        sum(n for name, n in c.items() if name not in exclude) for c in _count_entities_by_type(predictions, references)
    ]


def _count_entities_by_type(
    predictions: Sequence[TagSequence], references: Sequence[TagSequence]
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """By type: how many stretches are right, how many were predicted, how many are true."""
    _check_tag_lengths(predictions, references)
    right: Counter[str] = Counter()
    guessed: Counter[str] = Counter()
    true: Counter[str] = Counter()
    for predicted_tags, true_tags in zip(predictions, references, strict=True):
        predicted, wanted = set(extract_entity_spans(predicted_tags)), set(extract_entity_spans(true_tags))
        right.update(chunk.type for chunk in predicted & wanted)
        guessed.update(chunk.type for chunk in predicted)
        true.update(chunk.type for chunk in wanted)
    return right, guessed, true


def _check_tag_lengths(predictions: Sequence[TagSequence], references: Sequence[TagSequence]) -> None:
    """Every sentence, and every word in it, has a prediction and a reference."""
    check_same_length(predictions, references)
    for i, (predicted, true) in enumerate(zip(predictions, references, strict=True)):
        if len(predicted) != len(true):
            raise UserError(f"Sentence {i} (counted from 0) has {len(true)} words but {len(predicted)} predicted tags.")
