"""The examples of a report: each one once, with its mistakes marked, and their counts.

A row is made by the function of its task in `ROW_FNS`. Mistakes come first, the surest first where the model gives a
confidence, then the other examples in the order of the file. Search and filters are in `core/templates/examples.js`.

| task         | marked                                               | confidence                                     |
|--------------|------------------------------------------------------|------------------------------------------------|
| tag          | entities by outcome (`metrics/tagging.py`), or words | lowest probability of the entity's tags        |
| span-qa      | predicted and right answer in the context            | probability among the best answers             |
| text-to-text | words that only one of both texts has                | none: the least similar texts come first       |
| preference,  | the chosen answer, and a rejected one that has the   | reward of the rejected answer less that of the |
| reward       | higher reward                                        | chosen one                                     |
| all others   | labels                                               | score of the prediction less that of the right |
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from firth.core.html import HtmlPage, format_cell
from firth.evaluate.marked import CharSpan, Part, diff_words, mark_entities, mark_spans, shorten, slug
from firth.metrics import normalise_squad
from firth.metrics.tagging import EntityMatch, are_span_tags, match_entities
from firth.tasks import Prediction
from firth.tasks.preference import pair_rewards
from firth.tasks.span_qa import find_answer_start
from firth.tasks.tag import excluded_entity_types
from firth.text import Example

PAIR_TASKS = ("preference", "reward")
CLASS_TASKS = ("classify", "pair", "relation", "word-in-context")
MAX_EXAMPLE_ROWS = 5000
MAX_EXAMPLE_CHARS = 3_000_000  # characters of all rows, so that a page stays at a few MB
MAX_CONTEXT_CHARS = 200  # characters on each side of an answer
MAX_CONFUSION_LABELS = 30  # labels: a larger confusion matrix is unreadable
MAX_CONFUSION_PAIRS = 20  # rows of the list of confusions that replaces a larger matrix
NO_LABEL = "(none)"
LabelPair = tuple[str | None, str | None]  # true and predicted; None: missed or invented

ENTITY_MEANINGS = {
    "right": "words and type are right",
    "missed": "a true entity that was not predicted",
    "invented": "a predicted entity that is not one",
    "wrong type": "right words, other type",
    "wrong boundary": "right type; only some words are in common",
}
ANSWER_MEANINGS = {
    "right": "equals a right answer but for case, punctuation and articles",
    "missed": "there is an answer, and none was predicted",
    "invented": "there is no answer, and one was predicted",
    "wrong answer": "shares no word with a right answer",
    "partly right": "shares words with a right answer",
}
TEXT_MEANINGS = {"added": "only the prediction has these words", "missing": "only the reference has these words"}
OUTCOME_MEANINGS = {"entities": ENTITY_MEANINGS, "span-qa": ANSWER_MEANINGS, "text-to-text": TEXT_MEANINGS}
# The marks of an outcome: classes of the predicted and of the right text.
MARK_CLASSES = {
    "right": ("p p-right", "g g-right"),
    "missed": ("", "g g-missed"),
    "invented": ("p p-invented", ""),
    "wrong type": ("p p-wrong-type", "g g-wrong-type"),
    "wrong boundary": ("p p-wrong-boundary", "g g-wrong-boundary"),
    "partly right": ("p p-wrong-boundary", "g g-wrong-boundary"),
    "wrong answer": ("p p-wrong-type", "g g-missed"),
    "wrong": ("p p-wrong-type", "g g-right"),
    "added": ("p p-invented ins", ""),
    "missing": ("", "g g-missed del"),
}


class ExampleRow(NamedTuple):
    """An example with marked texts. `pairs` are its labels; the mistakes with the highest `confidence` come first."""

    id: str
    lines: Sequence[tuple[str, Sequence[Part]]]  # each with a title
    outcomes: Sequence[str]  # one for each entity; one for an example without entities
    pairs: Sequence[LabelPair] = ()
    confidence: float | None = None
    facts: Sequence[str] = ()

    @property
    def is_mistake(self) -> bool:
        return any(outcome not in ("right", "equal") for outcome in self.outcomes)


def add_examples(page: HtmlPage, task: str, pairs: Sequence[tuple[Example, Prediction]]) -> None:
    """Add confusions, the counts of outcomes, and the examples with their mistakes; nothing without labels."""
    labelled = [(e, p) for e, p in pairs if has_outcome(task, e, p)]
    if not labelled:
        return
    view = "entities" if task == "tag" and marks_entities(labelled) else task
    rows = list(make_rows(view, labelled))
    add_frequent_confusions(page, rows)
    page.add_script("examples.js")
    page.add_fragment("examples.html.j2", "example_section", make_section(view, rows))


def add_frequent_confusions(page: HtmlPage, rows: Sequence[ExampleRow]) -> None:
    """Add the most frequent confusions of labels that are too many for a matrix."""
    counts = Counter(pair for row in rows for pair in row.pairs)
    wrong = [(true, predicted, n) for (true, predicted), n in counts.most_common() if true != predicted]
    if wrong and len({label for pair in counts for label in pair}) > MAX_CONFUSION_LABELS:
        page.add_table(["true", "predicted", "count"], wrong[:MAX_CONFUSION_PAIRS], "The most frequent confusions.")


def has_outcome(task: str, example: Example, prediction: Prediction) -> bool:
    """Whether a prediction is right or wrong. Numbers, vectors and likelihoods are neither."""
    if task == "minimal-pairs":
        return True
    if task in PAIR_TASKS:
        return pair_rewards(prediction.prediction) is not None
    known = example.target is not None and (prediction.prediction is not None or task == "choice")
    return known and task in (*CLASS_TASKS, "tag", "span-qa", "text-to-text", "choice", "cloze", "analogy")


def is_mistake(task: str, example: Example, prediction: Prediction) -> bool:
    """Whether a prediction is wrong; numbers and generated texts are never counted as wrong."""
    if task == "text-to-text" or not has_outcome(task, example, prediction):
        return False
    pairs = [(example, prediction)]
    view = "entities" if task == "tag" and marks_entities(pairs) else task
    return next(iter(make_rows(view, pairs))).is_mistake


def marks_entities(pairs: Sequence[tuple[Example, Prediction]]) -> bool:
    """Whether all tags mark spans; parts of speech do not."""
    return are_span_tags([tags for e, p in pairs for tags in (e.target, p.prediction)])


def make_rows(view: str, pairs: Sequence[tuple[Example, Prediction]]) -> Iterable[ExampleRow]:
    """Return a row for each example. A view is a task, or "entities" for tags that mark spans."""
    if view == "entities":
        exclude = excluded_entity_types([e for e, _ in pairs])
        return (entity_row(e, p, exclude) for e, p in pairs)
    row_fn = ROW_FNS.get(view, label_row)
    return (row_fn(view, e, p) for e, p in pairs)


# --- one row, by task


def entity_row(example: Example, prediction: Prediction, exclude: Sequence[str] = ()) -> ExampleRow:
    """A sentence with its entities: a box is predicted, an underline is true."""
    matches = match_entities(prediction.prediction, example.target, exclude)
    confidences = [entity_confidence(match, prediction) for match in matches]
    labels = [entity_label(match, confidence) for match, confidence in zip(matches, confidences, strict=True)]
    wrong = [c for match, c in zip(matches, confidences, strict=True) if match.outcome != "right" and c is not None]
    return ExampleRow(
        str(example.id),
        [("", shorten(mark_entities(example.texts, matches, labels)))],
        [match.outcome for match in matches],
        [(match.true and match.true.type, match.predicted and match.predicted.type) for match in matches],
        max(wrong, default=None),
    )


def entity_confidence(match: EntityMatch, prediction: Prediction) -> float | None:
    """Return the lowest probability of the predicted tags of an entity; of a missed one, those of its words."""
    probabilities = (prediction.extra or {}).get("probabilities")
    span = match.predicted or match.true
    assert span
    return min(probabilities[span.start : span.end]) if probabilities else None


def entity_label(match: EntityMatch, confidence: float | None) -> str:
    sure = f" {100 * confidence:.0f}%" if confidence is not None and match.outcome != "right" else ""
    if match.true and match.predicted and match.outcome == "wrong type":
        return f"{match.predicted.type}, right: {match.true.type}{sure}"
    span = match.true or match.predicted
    assert span
    return span.type if match.outcome == "right" else f"{match.outcome}: {span.type}{sure}"


def tag_row(task: str, example: Example, prediction: Prediction) -> ExampleRow:
    """A sentence with its wrong tags, for tags that mark no spans."""
    probabilities = (prediction.extra or {}).get("probabilities")
    words, wrong = [], []
    for i, (word, true, predicted) in enumerate(zip(example.texts, example.target, prediction.prediction, strict=True)):
        space = " " if i else ""
        if true == predicted:
            words.append(Part(space + word))
            continue
        sure = f" {100 * probabilities[i]:.0f}%" if probabilities else ""
        words += [Part(space), Part(word, " ".join(MARK_CLASSES["wrong type"]), f"{predicted}, right: {true}{sure}")]
        wrong.append(i)
    pairs = list(zip(example.target, prediction.prediction, strict=True))
    confidence = max((probabilities[i] for i in wrong), default=None) if probabilities else None
    return ExampleRow(str(example.id), [("", join_plain(words))], ["wrong" if wrong else "right"], pairs, confidence)


def answer_row(task: str, example: Example, prediction: Prediction) -> ExampleRow:
    """A question, and its context with the predicted and the right answer."""
    question, context = example.texts[:2]
    outcome, answer = judge_answer(prediction.prediction, example.target)
    nbest = (prediction.extra or {}).get("nbest", ())
    chosen = next((c for c in nbest if c["text"] == prediction.prediction), None)
    predicted_classes, true_classes = MARK_CLASSES[outcome]
    spans = []
    if prediction.prediction:
        start = chosen["start"] if chosen else context.find(prediction.prediction)
        label = "" if outcome == "right" else "predicted"
        spans += [CharSpan(start, start + len(prediction.prediction), predicted_classes, label)] if start >= 0 else []
    if answer and (true_start := find_answer_start(context, *answer)) is not None and outcome != "invented":
        label = "right" if outcome != "right" else ""
        spans.append(CharSpan(true_start, true_start + len(answer.text), true_classes, label))
    texts = dict.fromkeys(answer.text for answer in example.target)
    lines = [
        ("question", shorten([Part(question)])),
        ("context", shorten(mark_spans(context, spans), MAX_CONTEXT_CHARS)),
        ("predicted", [Part(prediction.prediction or "(no answer)", predicted_classes)]),
        ("right", [Part(" | ".join(texts) or "(no answer)", true_classes)]),
    ]
    sure = [f"{100 * chosen['probability']:.0f}% sure"] if chosen else []
    return ExampleRow(str(example.id), lines, [outcome], (), chosen and chosen["probability"], [outcome, *sure])


def judge_answer(predicted: str, answers: Sequence[Any]) -> tuple[str, Any]:
    """Return the outcome of an answer, and the right answer that it shares most words with; None if there is none."""
    if not answers or not predicted:
        outcome = "right" if not answers and not predicted else "missed" if answers else "invented"
        return outcome, answers[0] if answers else None
    words = Counter(normalise_squad(predicted).split())
    by_shared = [((words & Counter(normalise_squad(a.text).split())).total(), a) for a in answers]
    equal = [a for a in answers if normalise_squad(a.text) == normalise_squad(predicted)]
    shared, best = max(by_shared, key=lambda pair: pair[0])
    return ("right", equal[0]) if equal else ("partly right" if shared else "wrong answer", best)


def text_row(task: str, example: Example, prediction: Prediction) -> ExampleRow:
    """A source text, and the words in which the prediction differs from the most similar reference."""
    references = example.references or (example.target,)
    diff = max((diff_words(prediction.prediction, text) for text in references), key=lambda diff: diff.similarity)
    outcome = "equal" if prediction.prediction in references else "different"
    lines = [
        ("source", shorten([Part("\n".join(example.texts))])),
        ("prediction against reference", shorten(diff.parts)),
    ]
    facts = [f"{100 * diff.similarity:.0f}% equal words"]
    return ExampleRow(str(example.id), lines, [outcome], (), -diff.similarity, facts)


def pair_row(task: str, example: Example, prediction: Prediction) -> ExampleRow:
    """A prompt with its two answers, each with its reward."""
    rewards = pair_rewards(prediction.prediction)
    assert rewards is not None, "has_outcome"
    margin = rewards[0] - rewards[1]
    outcome = "right" if margin > 0 else "wrong"
    classes = MARK_CLASSES["right"][1], "" if margin > 0 else MARK_CLASSES["wrong"][0]
    prompt = "\n".join(f"{role}: {text}" for role, text in zip(example.texts[::2], example.texts[1::2], strict=True))
    lines: list[tuple[str, Sequence[Part]]] = [("prompt", shorten([Part(prompt)]))]
    for name, answer, reward, own in zip(("chosen", "rejected"), example.references, rewards, classes, strict=True):
        lines.append((name, [Part(shorten([Part(answer)])[0].text, own, f"{reward:.3f}")]))
    return ExampleRow(str(example.id), lines, [outcome], (), -margin, [f"margin {margin:.3f}"])


def label_row(task: str, example: Example, prediction: Prediction) -> ExampleRow:
    """Texts with a predicted and a right label."""
    predicted, true = prediction.prediction, gold_answer(task, example)
    is_right = same_label(task, predicted, true)
    lines: list[tuple[str, Sequence[Part]]] = [("", parts) for parts in example_texts(task, example)]
    names = [name_label(task, example, label) for label in (predicted, true)]
    classes = MARK_CLASSES["right" if is_right else "wrong"]
    lines.append(("predicted", [Part(names[0], classes[0], probability_text(prediction))]))
    if not is_right:
        lines.append(("right", [Part(names[1], classes[1])]))
    outcome = "right" if is_right else "wrong"
    pairs = [(str(true), str(predicted))] if task in CLASS_TASKS else ()
    return ExampleRow(str(example.id), lines, [outcome], pairs, confidence_margin(task, example, prediction))


def same_label(task: str, predicted: Any, true: Any) -> bool:
    return predicted == true or (task == "analogy" and str(predicted).lower() == str(true).lower())


def gold_answer(task: str, example: Example) -> Any:
    return "good" if task == "minimal-pairs" else example.target


def name_label(task: str, example: Example, label: Any) -> str:
    """Return a label as text; a choice is shown, not its index."""
    choices = example.texts[1:]
    if label is None:
        return NO_LABEL
    if task == "choice" and isinstance(label, int):
        return shorten([Part(choices[label])])[0].text if 0 <= label < len(choices) else NO_LABEL
    return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False)


def example_texts(task: str, example: Example) -> list[list[Part]]:
    """Return the texts of an example; the entities of a relation, and the word in its contexts, are marked."""
    if task == "relation" and len(example.spans) == 2:
        spans = [CharSpan(*span, "g", name) for span, name in zip(example.spans, ("head", "tail"), strict=True)]
        return [shorten(mark_spans(example.texts[0], spans))]
    if task == "word-in-context" and len(example.spans) == len(example.texts):
        return [
            shorten(mark_spans(text, [CharSpan(*span, "g", "")]))
            for text, span in zip(example.texts, example.spans, strict=True)
        ]
    return [shorten([Part(text)]) for text in example.texts]


def confidence_margin(task: str, example: Example, prediction: Prediction) -> float | None:
    """Score of the prediction minus that of the right label; None where the model did not score both."""
    scores = prediction.scores or {}
    names = str(prediction.prediction), str(gold_answer(task, example))
    return scores[names[0]] - scores[names[1]] if all(name in scores for name in names) else None


def probability_text(prediction: Prediction) -> str:
    """Return the probability of the predicted label; "" where the scores are not probabilities."""
    scores = prediction.scores or {}
    is_distribution = abs(sum(scores.values()) - 1) < 1e-3 and all(score >= 0 for score in scores.values())
    score = scores.get(str(prediction.prediction)) if is_distribution else None
    return "" if score is None else f"{100 * score:.0f}%"


def join_plain(parts: Iterable[Part]) -> list[Part]:
    """Join neighbouring plain parts."""
    joined: list[Part] = []
    for part in parts:
        if joined and not part.classes and not joined[-1].classes and not joined[-1].label:
            joined[-1] = Part(joined[-1].text + part.text)
        else:
            joined.append(part)
    return shorten(joined)


ROW_FNS: dict[str, Callable[[str, Example, Prediction], ExampleRow]] = {
    "tag": tag_row,
    "span-qa": answer_row,
    "text-to-text": text_row,
    **dict.fromkeys(PAIR_TASKS, pair_row),
}


# --- the section


def make_section(view: str, rows: Sequence[ExampleRow]) -> dict[str, Any]:
    """Return the values of the template: rows, counts, filters and the confusion matrix."""
    wrong = [row for row in rows if row.is_mistake]
    has_confidence = any(row.confidence is not None for row in wrong)
    if has_confidence:
        wrong.sort(key=lambda row: -(row.confidence if row.confidence is not None else -float("inf")))
    ordered = [*wrong, *(row for row in rows if not row.is_mistake)]
    shown = limit_rows(ordered)
    labels = sorted({label for row in rows for pair in row.pairs for label in pair if label is not None})
    index = {label: str(i) for i, label in enumerate(labels)} | {None: "-"}
    by_outcome = Counter(outcome for row in shown for outcome in set(row.outcomes))
    meanings = OUTCOME_MEANINGS.get(view, {})
    return {
        "title": "Mistakes" if wrong and view != "text-to-text" else "Examples",
        "unit": {"entities": "entities", "span-qa": "questions"}.get(view, ""),
        "outcomes": outcome_table(meanings, rows),
        "notes": describe_rows(view, len(rows), len(wrong), len(shown), has_confidence),
        "labels": labels,
        "has_none": any(None in pair for row in rows for pair in row.pairs),
        "chips": make_chips(shown, by_outcome),
        "rows": [
            {
                "id": row.id,
                "slugs": " ".join([*map(slug, dict.fromkeys(row.outcomes)), *["mistake"] * row.is_mistake]),
                "pairs": " ".join(dict.fromkeys(f"{index[true]}:{index[predicted]}" for true, predicted in row.pairs)),
                "lines": row.lines,
                "facts": row.facts,
            }
            for row in shown
        ],
        "confusion": confusion_table(rows, labels, index),
    }


def outcome_table(meanings: Mapping[str, str], rows: Sequence[ExampleRow]) -> list[dict[str, Any]]:
    """Return each outcome with its mark, its count and its meaning: the legend of the marks."""
    counts = Counter(outcome for row in rows for outcome in row.outcomes)
    return [
        {
            "sample": Part(name, " ".join(filter(None, MARK_CLASSES[name]))),
            "count": format_cell(counts[name]),
            "meaning": meaning,
        }
        for name, meaning in meanings.items()
    ]


def describe_rows(view: str, total: int, wrong: int, shown: int, has_confidence: bool) -> list[str]:
    """Return the sentences above the rows: how many are wrong, in which order they come, what the marks mean."""
    noun = {"entities": "sentences", "tag": "sentences", "span-qa": "questions"}.get(view, "examples")
    if view == "text-to-text":
        texts = [f"Predictions that differ from the reference: {wrong:,} of {total:,}. The least similar come first."]
    else:
        order = "The surest mistakes come first." if has_confidence else "They have the order of the file."
        texts = [f"{noun.capitalize()} with a mistake: {wrong:,} of {total:,}.{f' {order}' if wrong else ''}"]
    if view in ("entities", "tag", "span-qa"):
        sure = " A percentage is the model's confidence." if has_confidence else ""
        texts.append(f"A box is a prediction, an underline is the right answer.{sure}")
    if shown < total:
        texts.append(f"This page has {shown:,} of {total:,} {noun}; predictions.jsonl has all.")
    return texts


def limit_rows(rows: Sequence[ExampleRow]) -> list[ExampleRow]:
    """Return as many rows as a light page can hold."""
    shown, chars = [], 0
    for row in rows[:MAX_EXAMPLE_ROWS]:
        chars += 150 + sum(len(part.text) + len(part.label) + 40 for _, parts in row.lines for part in parts)
        if chars > MAX_EXAMPLE_CHARS:
            break
        shown.append(row)
    return shown


def make_chips(rows: Sequence[ExampleRow], by_outcome: Mapping[str, int]) -> list[dict[str, str]]:
    """Return the filters by outcome, with the number of rows of each. The first one is on."""
    wrong = sum(row.is_mistake for row in rows)
    is_text = "different" in by_outcome or "equal" in by_outcome
    chips = [("different" if is_text else "with mistakes", "mistake", wrong)] if wrong else []
    chips += [("all", "", len(rows))]
    known = [name for name in [*MARK_CLASSES, "equal"] if name in by_outcome and name != "wrong"]
    chips += [(name, slug(name), by_outcome[name]) for name in known]
    return [{"name": name, "slug": value, "count": f"{count:,}"} for name, value, count in chips]


def confusion_table(
    rows: Sequence[ExampleRow], labels: Sequence[str], index: Mapping[str | None, str]
) -> dict[str, Any] | None:
    """Return the confusion matrix with its shares by row; of many labels, none."""
    counts = Counter(pair for row in rows for pair in row.pairs)
    if not counts or len(labels) > MAX_CONFUSION_LABELS:
        return None
    names: list[str | None] = [*labels, *([None] if any(None in pair for pair in counts) else [])]
    table = []
    for true in names:
        total = sum(counts[true, predicted] for predicted in names)
        cells = [
            {
                "count": format_cell(counts[true, predicted]),
                "share": counts[true, predicted] / total if total else 0,
                "pair": f"{index[true]}:{index[predicted]}",
                "is_right": true == predicted is not None,
            }
            for predicted in names
        ]
        table.append({"name": "invented" if true is None else true, "cells": cells})
    columns = ["missed" if name is None else name for name in names]
    kinds = " A wrong boundary counts for its type." if None in names else ""
    caption = f"Confusion matrix: true in rows, predicted in columns.{kinds} Choose a number to see its examples."
    return {"columns": columns, "rows": table, "caption": caption}
