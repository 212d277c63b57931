"""A checkpoint and data to scores, saved predictions and a page that shows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from firth.console import count, say
from firth.errors import UserError, nearest
from firth.evaluate.cloze import choice, cloze
from firth.evaluate.embed import similar_texts, word_in_context
from firth.evaluate.likelihood import about_unknown, make_scorer, summed, way_to_ask
from firth.evaluate.minimal_pairs import minimal_pairs
from firth.evaluate.ngram import NgramScorer
from firth.evaluate.outcome import Outcome
from firth.evaluate.report import write_report
from firth.evaluate.vectors import analogy, word_similarity, word_vectors
from firth.files import fresh_folder, is_free, read_json, refuse_unwritable, without_nan, write_results, write_text
from firth.metrics import score
from firth.models import load_model, read_config
from firth.models.ngram import is_ngram
from firth.tasks import TASK_FILE, TASKS, Prediction, lines_of, make_task, without_examples
from firth.text import Corpus, Example, Notes, read_labelled
from firth.text.row import LISTED
from firth.text.suite import OF_TEXT
from firth.tokens import load_tokenizer
from firth.train import Training, choose_machine

LIKELIHOOD = ("method", "max_seq_length", "stride", "batch_tokens")
READING = ("max_seq_length", "batch_tokens")
# What a checkpoint can be asked without having been fine-tuned for it, and what each of these may be told.
ZERO_SHOT: dict[str, tuple[Callable[..., Outcome], tuple[str, ...]]] = {
    "minimal-pairs": (minimal_pairs, LIKELIHOOD),
    "cloze": (cloze, LIKELIHOOD),
    "choice": (choice, ("delimiter", *LIKELIHOOD)),
    "word-in-context": (word_in_context, ("train", "threshold", "layer", "batch_tokens")),
    "embed": (similar_texts, ("pool", "layer", *READING)),
    "word-similarity": (word_similarity, ("limit",)),
    "analogy": (analogy, ("limit",)),
}
STATIC = ("word-similarity", "analogy")  # ask word vectors
FROM_FILES = (*STATIC, "word-in-context")  # take a file of word vectors too
NAMES = ("checkpoint", "data", "together")  # of files, in the results
IN_THE_TEXTS = ("lm", "embed")  # are scored without further answers: on what is said, on which texts belong together
EVALUATIONS = tuple(sorted({*TASKS, *ZERO_SHOT, *OF_TEXT}))


def evaluate(
    checkpoint: str | Path,
    task: str,
    data: str | Path | Sequence[str | Path],
    output_dir: str | Path,
    columns: Mapping[str, str] | None = None,
    batch_size: int = 32,
    overwrite: bool = False,
    encoding: str = "utf-8",
    documents: str = "auto",
    numbered: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Score a checkpoint on a file: one that was fine-tuned for the task, or any one where the task needs no training.

    `metrics` are the scores, and the rest says how they came about. `settings` are what the task can be told (see
    ZERO_SHOT); None means left out. A file without answers gives predictions and no scores; one that lacks some is
    refused. Writes results.json, predictions.jsonl and report.html to `output_dir`; with `numbered` to a folder beside
    it where it has other results.
    """
    checkpoint, folder = Path(checkpoint), Path(output_dir)
    settings = {name: value for name, value in settings.items() if value is not None}
    facts = task_facts(checkpoint)
    check_order(checkpoint, task, facts, settings)
    if not overwrite and not numbered:
        fresh_folder(folder, "--output-dir")
    refuse_unwritable(folder)
    if task in OF_TEXT:
        examples, outcome = of_text(checkpoint, Corpus(data, documents, columns, encoding), settings)
    else:
        if not isinstance(data, str | Path):
            raise UserError(f"The task {task} is scored on one file; {len(data)} were given.")
        notes = Notes(str(data))
        examples = read_labelled(data, task, columns, "dev", encoding, answers=False, notes=notes)
        refuse_half_answered(data, examples)
        if is_tuned(task, facts):
            try:
                outcome = by_task(checkpoint, task, facts, examples, batch_size)
                if "together" in settings:
                    outcome = joined(outcome, task, settings["together"], examples, batch_size)
            except UserError as e:
                raise UserError(f"{data}: {e}") from None
        else:
            if "train" in settings:
                settings["train"] = read_labelled(settings["train"], task, columns, "train", encoding)
            outcome = zero_shot(checkpoint, task, examples, settings)
        if found := notes.whole():
            outcome = outcome._replace(facts={**outcome.facts, "notes": found})
    for sentence in outcome.said:
        say(sentence)
    if not outcome.metrics:
        say("The file has no answers: there are predictions, and no scores.")
    return save(folder, checkpoint, task, data, examples, outcome, numbered and not overwrite)


def refuse_half_answered(data: str | Path, examples: Sequence[Example]) -> None:
    """A file has all its answers, and is scored, or none."""
    lacking = [str(example.id) for example in examples if example.target is None]
    if 0 < len(lacking) < len(examples):
        which = ", ".join(lacking[:LISTED]) + (", ..." if len(lacking) > LISTED else "")
        raise UserError(
            f"{data}: {count(len(lacking), 'example has', 'examples have')} no answer (id or line {which}), and "
            f"{len(examples) - len(lacking):,} have one. Fill in what is missing, or take it out; a file without any "
            "answers gives predictions alone."
        )


def task_facts(checkpoint: Path) -> dict[str, Any]:
    """What a fine-tuned checkpoint was tuned for; nothing for any other."""
    return dict(read_json(checkpoint / TASK_FILE)) if (checkpoint / TASK_FILE).is_file() else {}


def is_tuned(task: str, facts: Mapping[str, Any]) -> bool:
    """Whether the checkpoint answers itself; text to text needs no tuning to be written."""
    return facts.get("task") == task or (task in TASKS and task not in ZERO_SHOT)


def check_order(checkpoint: Path, task: str, facts: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse what cannot be done before anything is read."""
    if task not in EVALUATIONS:
        raise UserError(f"Unknown task {task!r}. {nearest(task, EVALUATIONS)}")
    if not checkpoint.is_dir() and not (task in FROM_FILES and checkpoint.is_file()):
        also = ", nor a file of word vectors" if task in FROM_FILES else ""
        raise UserError(f"{checkpoint} is not a checkpoint folder{also}. `firth pretrain` makes one: RUN/final.")
    tuned = facts.get("task")
    if tuned not in (None, task) and task in TASKS:
        raise UserError(f"{checkpoint} was fine-tuned for {tuned}, not for {task}.")
    if checkpoint.is_dir() and tuned != task:
        check_model(checkpoint, task, settings)
    if tuned is None and task in TASKS and task not in (*ZERO_SHOT, "text-to-text"):
        how = f"fine-tune it first (`firth finetune {checkpoint} --task {task} ...`)"
        raise UserError(f"{checkpoint} has not learned the task {task}: {how}.")
    known = LIKELIHOOD if task in OF_TEXT else ("together",) if is_tuned(task, facts) else ZERO_SHOT[task][1]
    if wrong := [name for name in settings if name not in known]:
        takes = f"It takes {', '.join(known)}." if known else "It takes none: they are the checkpoint's own."
        raise UserError(f"{wrong[0]} is no setting of the task {task}. {takes}")


def check_model(checkpoint: Path, task: str, settings: Mapping[str, Any]) -> None:
    """Refuse what a model that was not tuned for a task cannot do, whatever the data are."""
    if is_ngram(checkpoint) and task in OF_TEXT:
        return
    config = read_config(checkpoint)
    if task in OF_TEXT or "method" in ZERO_SHOT.get(task, (None, ()))[1]:
        way_to_ask(config, settings.get("method", "auto"))
    elif task not in ZERO_SHOT:
        without_examples(task, load_tokenizer(checkpoint), config)


def of_text(checkpoint: Path, corpus: Corpus, settings: Mapping[str, Any]) -> tuple[list[Example], Outcome]:
    """How likely each document is, and all of them together."""
    scorer = NgramScorer(checkpoint, **settings) if is_ngram(checkpoint) else make_scorer(checkpoint, **settings)
    examples: list[Example] = []

    def texts() -> Any:
        for document in corpus:
            examples.append(Example(document.source, (document.text[:1000],)))  # enough to show which one it is
            yield document.text

    found = list(scorer.texts(texts()))
    metrics, facts = summed(scorer, found)
    said = [corpus.describe(), *scorer.said, *about_unknown(facts["unknown"])]
    predictions = [Prediction(one.logp, extra={"tokens": one.tokens, "bytes": one.bytes}) for one in found]
    return examples, Outcome(metrics, predictions, facts, said)


def zero_shot(checkpoint: Path, task: str, examples: Sequence[Example], settings: Mapping[str, Any]) -> Outcome:
    """Ask a checkpoint as it is."""
    measure, _ = ZERO_SHOT[task]
    if task in STATIC:
        return measure(word_vectors(checkpoint, **settings), examples)
    return measure(word_vectors(checkpoint) if checkpoint.is_file() else checkpoint, examples, **settings)


def by_task(
    checkpoint: Path, task: str, facts: Mapping[str, Any], examples: Sequence[Example], batch_size: int = 32
) -> Outcome:
    """Let a fine-tuned checkpoint answer; scored where every example has its answer."""
    model = load_model(checkpoint)
    if model.tokenizer is None:
        raise UserError(f"{checkpoint} has no tokenizer.")
    work = make_task(task, facts, model.tokenizer, model.config)
    machine = choose_machine(Training())
    items = work.encode(examples)
    predictions = work.predict(model.to(machine.device), items, machine, batch_size)
    answered = task in IN_THE_TEXTS or all(example.target is not None for example in examples)
    labels = {"labels": list(work.labels)} if work.labels else {}
    return Outcome(work.score(examples, predictions) if answered else {}, predictions, labels, work.said)


def joined(
    outcome: Outcome, task: str, others: Sequence[str | Path], examples: Sequence[Example], batch_size: int
) -> Outcome:
    """The mean of the probabilities of several checkpoints that were tuned for the same labels (ULMFiT, section 5)."""
    all_scores = [[p.scores for p in outcome.predictions]]
    for other in map(Path, others):
        facts = task_facts(other)
        check_order(other, task, facts, {})
        found = by_task(other, task, facts, examples, batch_size)
        if found.facts != outcome.facts:
            raise UserError(f"{other} knows other labels than the first checkpoint: their answers cannot be joined.")
        all_scores.append([p.scores for p in found.predictions])
    predictions = []
    for several in zip(*all_scores, strict=True):
        if None in several:
            raise UserError(f"The task {task} has no probabilities of labels, whose mean could be taken.")
        mean = {name: sum(scores[name] for scores in several) / len(several) for name in several[0]}
        predictions.append(Prediction(max(mean, key=mean.__getitem__), mean))
    true = [example.target for example in examples]
    metrics = score(task, [p.prediction for p in predictions], true) if None not in true else {}
    facts = {**outcome.facts, "together": [str(other) for other in others]}
    return outcome._replace(metrics=metrics, predictions=predictions, facts=facts)


def save(
    folder: Path,
    checkpoint: Path,
    task: str,
    data: Any,
    examples: Sequence[Example],
    outcome: Outcome,
    numbered: bool = False,
) -> dict[str, Any]:
    """Write what was found; the result of the verb."""
    lines = lines_of(examples, outcome.predictions)
    result = {
        "task": task,
        "checkpoint": str(checkpoint),
        "data": str(data) if isinstance(data, str | Path) else list(map(str, data)),
        "examples": len(examples),
        "metrics": dict(outcome.metrics),
        **outcome.facts,
    }
    folder = free_folder(folder, result, lines) if numbered else folder
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "predictions.jsonl", lines)
    result |= {"predictions": str(folder / "predictions.jsonl"), "report": str(folder / "report.html")}
    write_report(folder / "report.html", result, examples, outcome.predictions)
    write_results(folder / "results.json", result)
    return result


def free_folder(folder: Path, result: Mapping[str, Any], lines: str) -> Path:
    """The first of NAME, NAME-2, NAME-3 ... in which nothing is, or just these results. Another than NAME is said."""
    place, number = folder, 1
    while not is_free(place) and not same_results(place, result, lines):
        number += 1
        place = folder.with_name(f"{folder.name}-{number}")
    if place != folder:
        say(f"{folder} has other results, and stays: these are in {place}. --overwrite replaces the others.")
    return place


def same_results(place: Path, result: Mapping[str, Any], lines: str) -> bool:
    """Whether a folder has just these results, of the same files."""
    results, predictions = place / "results.json", place / "predictions.jsonl"
    if not results.is_file() or not predictions.is_file():
        return False
    before, now = read_json(results), json.loads(json.dumps(without_nan(result)))
    same_names = all(same_files(before.pop(name, None), now.pop(name, None)) for name in NAMES)
    same_scores = all(before.get(name) == value for name, value in now.items())
    return same_names and same_scores and predictions.read_text(encoding="utf-8") == lines


def same_files(a: Any, b: Any) -> bool:
    """Whether two names, or two lists of names, mean the same files."""
    first, second = ([x] if isinstance(x, str) else list(x or ()) for x in (a, b))
    return [Path(x).absolute() for x in first] == [Path(x).absolute() for x in second]
