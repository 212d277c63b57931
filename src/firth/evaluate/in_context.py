"""In-context learning: a checkpoint without fine-tuning answers after a few solved examples in its prompt.

A prompt is `shots` demonstrations and the query, all written by one template (`prompt_template.py`). No weight changes.
The answer is the label with the highest log p(label | prompt) (Brown et al. 2020, section 2.4). For a decoder and an
encoder-decoder this is a likelihood. An encoder fills a cloze: the label's tokens are masked, and each is predicted
with those before it known and those after it masked, so that the terms multiply to a probability among labels of this
length. A label of one token is PET's verbalizer (Schick & Schütze 2021). With `method="pseudo"` each token also sees
the label's later tokens (Salazar et al. 2020), which favours long labels.

Small models are sensitive to the choice of demonstrations, their order and the template. So every score is a mean over
seeds and templates, with its standard deviation, beside the share of the most frequent label.

- `accuracy` compares sums of log-probabilities, `accuracy_norm` divides them by the label's characters: `acc` and
  `acc_norm` of lm-eval. The space before a label belongs to the label, as there. A tie is wrong.
- `accuracy_calibrated` removes the bias towards labels that are likely in any case. It divides p(label | prompt) by
  p(label | prompt with a content-free input), averaged over "N/A", "[MASK]" and "" (contextual calibration, Zhao et al.
  2021, section 5).
- `accuracy_random_labels` is the control of Min et al. (2022, section 4): demonstrations with random labels. If it is
  as high, the model did not learn the mapping from the demonstrations, but at most the format and the labels.

N examples, C labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding

from firth.core.console import format_count
from firth.core.errors import UserError, did_you_mean, list_names, quote, shorten
from firth.evaluate.cloze import choice_prediction, unique_argmax
from firth.evaluate.evaluation import Evaluation
from firth.evaluate.likelihood import (
    TOKENIZE_BATCH_TEXTS,
    MaskedScorer,
    Scorer,
    SpanScorer,
    SplitText,
    make_scorer,
)
from firth.evaluate.logprobs import LogprobQuery
from firth.evaluate.prompt_template import (
    BUILT_IN_TEMPLATES,
    FIELD_NAMES,
    PromptTemplate,
    parse_template,
    template_fields,
)
from firth.metrics import format_metric, mean_and_std
from firth.models import Model
from firth.tasks import Prediction
from firth.tasks.finetune_data import sample_stratified, sampling_stratum
from firth.text import Example

IN_CONTEXT_TASKS = tuple(BUILT_IN_TEMPLATES)
DEFAULT_SEEDS = 3
CONTENT_FREE_INPUTS = ("N/A", "[MASK]", "")  # Zhao et al. 2021, section 5
STANDARD_ERRORS = 2  # above chance means: by more than this


class Prompt(NamedTuple):
    """A prompt and its candidate labels. `starts` are the first characters of the demonstrations, then of the query."""

    text: str
    candidates: tuple[str, ...]
    ending: str
    starts: list[int]
    where: str


class PromptRun(NamedTuple):
    """The demonstrations of a seed, written by a template; the same for all examples."""

    template: PromptTemplate
    seed: int
    has_random_labels: bool
    demonstrations: tuple[str, ...]

    def prompt(self, fields: Mapping[str, str], candidates: Sequence[str], where: str) -> Prompt:
        starts = np.cumsum([0, *map(len, self.demonstrations)]).tolist()
        text = "".join(self.demonstrations) + self.template.prompt(fields)
        return Prompt(text, tuple(candidates), self.template.ending(fields), starts, where)


class LabelledTask:
    """A task with its examples: which texts are candidates, and which is right."""

    def __init__(self, task: str, examples: Sequence[Example], train: Sequence[Example], words: Mapping[str, str]):
        self.task, self.examples = task, examples
        self.labels: tuple[str, ...] = ()
        if task != "choice":
            found = {example.target for example in (*examples, *train) if example.target is not None}
            check_verbalizer(words, found)
            self.labels = tuple(sorted({*found, *words}))
            self.words = tuple(words.get(label, label) for label in self.labels)
            if len(self.labels) < 2:
                raise UserError(
                    f"The files have {format_count(len(self.labels), 'label')}, and a choice needs two. Give --train "
                    "FILE with labels, or name them: --verbalizer no=wrong,yes=right."
                )
            if repeated := [word for word, n in Counter(self.words).items() if n > 1]:
                raise UserError(f"--verbalizer: {quote(repeated[0])} stands for two labels.")
        elif words:
            raise UserError("--verbalizer is for tasks with labels; the task choice has its own texts.")

    def candidates(self, example: Example) -> tuple[str, ...]:
        return example.texts[1:] if self.task == "choice" else self.words

    def target(self, example: Example) -> int:
        """Index of the right candidate."""
        return int(example.target) if self.task == "choice" else self.labels.index(example.target)

    @property
    def has_targets(self) -> bool:
        return all(example.target is not None for example in self.examples)

    def chance(self) -> tuple[str, np.ndarray]:
        """The baseline that needs no model, and its expected hits (N,): the most frequent label, or a random choice."""
        if self.task == "choice":
            return "chance_accuracy", np.array([1 / (len(example.texts) - 1) for example in self.examples])
        targets = [example.target for example in self.examples]
        commonest = Counter(targets).most_common(1)[0][0]
        return "majority_accuracy", np.array([target == commonest for target in targets], dtype=float)

    def prediction(self, logp: np.ndarray, example: Example) -> Prediction:
        if self.task == "choice":
            return choice_prediction(logp, example.texts[1:])
        best, p = unique_argmax(logp), np.exp(logp - logp.max())
        scores = dict(zip(self.labels, (p / p.sum()).tolist(), strict=True))
        return Prediction(None if best is None else self.labels[best], scores)


def evaluate_in_context(
    checkpoint: Model | str | Path,
    task: str,
    examples: Sequence[Example],
    shots: int = 0,
    template: str | Sequence[str] = (),
    train: Sequence[Example] = (),
    seeds: int = DEFAULT_SEEDS,
    verbalizer: Mapping[str, str] | None = None,
    random_labels: bool = False,
    **settings: Any,
) -> Evaluation:
    """Score labels by their likelihood after `shots` demonstrations from `train`; 0 shots is the query alone.

    Each seed draws its own demonstrations, as evenly over the labels as they allow, and their order. `template` are
    names of built-in templates or texts with fields; default: all built-in ones that the model can read. `verbalizer`
    gives a label another word. The predictions are those of the first template and seed. `settings`: those of
    `make_scorer`.
    """
    scorer = make_scorer(checkpoint, **settings)
    pool, num_known = exclude_queries(train, examples)
    check_shots(shots, len(pool), num_known, random_labels)
    template = [template] if isinstance(template, str) else template
    labelled = LabelledTask(task, examples, train, verbalizer or {})
    templates = choose_templates(scorer, task, template)
    runs = [
        run
        for one in templates
        for seed in range(seeds if shots else 1)
        for run in make_runs(labelled, one, pool, shots, seed, random_labels)
    ]
    prompts = PromptScorer(scorer)
    scored = prompts.score_runs(runs, labelled)
    unknown = prompts.unknown
    notices = [
        *[f"{num_known:,} examples of --train are in --data too, and were not drawn."] * bool(num_known),
        *prompts.describe_dropped(shots),
        *[f"Labels with a token that the tokenizer does not know: {list_names(sorted(unknown))}."] * bool(unknown),
        *scorer.notices,
    ]
    details: dict[str, Any] = {
        "method": scorer.method,
        "shots": shots,
        "seeds": seeds if shots else 1,
        "templates": [one.name for one in templates],
    }
    if labelled.labels:
        details |= {
            "labels": list(labelled.labels),
            "verbalizer": dict(zip(labelled.labels, labelled.words, strict=True)),
        }
    first = [labelled.prediction(logp, example) for logp, example in zip(scored[0].logp, examples, strict=True)]
    if not labelled.has_targets:
        return Evaluation({}, first, details, notices)
    metrics, facts, at_chance = summarize_runs(labelled, runs, scored)
    return Evaluation(metrics, first, details | facts, [*notices, *at_chance])


def check_verbalizer(words: Mapping[str, str], labels: Collection[str]) -> None:
    """Refuse a label that the files do not have, unless all of theirs are named too: it would be one more class."""
    unknown = [label for label in words if label not in labels]
    unnamed = [label for label in labels if label not in words]
    if unknown and unnamed:
        known = list_names(sorted(labels))
        raise UserError(
            f"--verbalizer names the label {quote(unknown[0])}, and the files have {known}. "
            f"{did_you_mean(unknown[0], unnamed)} A label beside those of the files needs a word for each of these too."
        )


def exclude_queries(train: Sequence[Example], examples: Sequence[Example]) -> tuple[list[Example], int]:
    """The training examples that are no query: a demonstration must not give the answer away."""
    queries = {example.texts for example in examples}
    pool = [example for example in train if example.texts not in queries]
    return pool, len(train) - len(pool)


def check_shots(shots: int, num_train: int, num_known: int, random_labels: bool) -> None:
    if shots < 0:
        raise UserError(f"--shots is {shots}, and must be at least 0.")
    if random_labels and not shots:
        raise UserError("--random-labels changes the labels of demonstrations, and --shots 0 has none.")
    if shots > num_train + num_known and not num_train:
        raise UserError(f"--shots {shots} draws its demonstrations from a labelled file: give --train FILE.")
    if shots > num_train:
        also = f" that are not in --data ({num_known:,} are)" if num_known else ""
        raise UserError(f"--shots is {shots}, and --train has {format_count(num_train, 'example')}{also}.")


def choose_templates(scorer: Scorer, task: str, given: Sequence[str]) -> list[PromptTemplate]:
    """The given templates, or the built-in ones whose fields the model reads."""
    templates = [parse_template(text, task) for text in given or BUILT_IN_TEMPLATES[task]]
    if isinstance(scorer, MaskedScorer | SpanScorer):
        return templates
    unread = [one.name for one in templates if one.has_fields_after_label]
    if unread and given:
        raise UserError(
            f"--template {quote(unread[0])}: this model predicts a label from the text before it (method "
            f"{scorer.method}), so no field may come after {{label}}."
        )
    return [one for one in templates if not one.has_fields_after_label]


def make_runs(
    labelled: LabelledTask,
    template: PromptTemplate,
    pool: Sequence[Example],
    shots: int,
    seed: int,
    random_labels: bool,
) -> list[PromptRun]:
    """The run of a template and a seed; with `random_labels` a second one, which differs in the labels alone."""
    rng = np.random.default_rng(seed)
    drawn = sample_stratified([sampling_stratum(labelled.task, example) for example in pool], shots, seed)
    demonstrations = [pool[i] for i in rng.permutation(drawn).tolist()]
    texts: dict[bool, list[str]] = {False: [], True: []}
    for example in demonstrations:
        fields, candidates = template_fields(labelled.task, example), labelled.candidates(example)
        texts[False].append(template.demonstration(fields, candidates[labelled.target(example)]))
        texts[True].append(template.demonstration(fields, candidates[int(rng.integers(len(candidates)))]))
    return [PromptRun(template, seed, key, tuple(texts[key])) for key in (False, True)[: 1 + random_labels]]


# --- scores -----------------------------------------------------------------------------------------------------------


class RunScores(NamedTuple):
    """Log-probabilities of the candidates of each example, (C,) each; of the labels without content, (3, C)."""

    logp: list[np.ndarray]
    content_free: np.ndarray | None


class PromptScorer:
    """Scores prompts, and counts demonstrations that do not fit into the model's window."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.num_prompts, self.num_shortened, self.num_kept = 0, 0, 0
        self.unknown: set[str] = set()  # candidates with an unknown token

    def score_runs(self, runs: Sequence[PromptRun], labelled: LabelledTask) -> list[RunScores]:
        """Score all prompts of all runs in one stream, so that they share batches and inputs."""
        num_free = len(CONTENT_FREE_INPUTS) if labelled.labels else 0

        def prompts() -> Iterator[Prompt]:
            for run in runs:
                for example in labelled.examples:
                    fields = template_fields(labelled.task, example)
                    yield run.prompt(fields, labelled.candidates(example), f"Example {shorten(example.id)}")
                for text in CONTENT_FREE_INPUTS[:num_free]:
                    fields = dict.fromkeys(FIELD_NAMES[labelled.task], text)
                    yield run.prompt(fields, labelled.words, "The content-free input")

        sizes = [len(labelled.candidates(example)) for example in labelled.examples]
        total = len(runs) * (sum(sizes) + num_free * len(labelled.labels))
        groups = (self.label_queries(split) for split in self.split_prompts(prompts()))
        sums = (
            sum(float(one.logprobs.sum()) for _, one in group)
            for group in self.scorer.score_query_groups(groups, total)
        )
        return [
            RunScores(
                [np.array(list(islice(sums, size))) for size in sizes],
                np.array(list(islice(sums, num_free * len(labelled.labels)))).reshape(num_free, -1)
                if num_free
                else None,
            )
            for _ in runs
        ]

    def label_queries(self, split: SplitText) -> list[LogprobQuery]:
        """The queries whose log-probabilities add up to that of a label; an encoder reads it as one word."""
        one_word = (True, *[False] * (len(split.answer) - 1))
        return self.scorer.span_queries(self.scorer.truncate_context(split._replace(word_starts=one_word)))

    def split_prompts(self, prompts: Iterable[Prompt]) -> Iterator[SplitText]:
        """Yield the split of each candidate of each prompt."""
        stream = iter(prompts)
        while batch := list(islice(stream, TOKENIZE_BATCH_TEXTS)):
            texts = [prompt.text + word + prompt.ending for prompt in batch for word in prompt.candidates]
            encodings = iter(self.scorer.tokenizer.encode_with_offsets(texts))
            for prompt in batch:
                yield from self.split_prompt(prompt, list(islice(encodings, len(prompt.candidates))))

    def split_prompt(self, prompt: Prompt, encodings: Sequence[Encoding]) -> list[SplitText]:
        """Split at each candidate, and drop the first demonstrations if they do not fit.

        All candidates of a prompt keep the same demonstrations, or their likelihoods would not compare.
        """
        begin = len(prompt.text.rstrip())
        splits = []
        for word, encoding in zip(prompt.candidates, encodings, strict=True):
            text, end = prompt.text + word + prompt.ending, len(prompt.text + word)
            splits.append(self.scorer.split_encoding(encoding, text, begin, end, prompt.where))
            if self.scorer.count_unknown(splits[-1].answer):
                self.unknown.add(word)
        excess = max(split.num_tokens for split in splits) - self.scorer.max_text_tokens
        dropped, num_tokens = 0, 0
        while num_tokens < excess and dropped + 1 < len(prompt.starts):
            dropped += 1
            start = prompt.starts[dropped]
            num_tokens = sum(end <= start for _, end in encodings[0].offsets)
        self.num_prompts += 1
        self.num_shortened += dropped > 0
        self.num_kept += len(prompt.starts) - 1 - dropped
        return [split._replace(before=split.before[num_tokens:]) for split in splits]

    def describe_dropped(self, shots: int) -> list[str]:
        mean = self.num_kept / max(self.num_prompts, 1)
        notice = (
            f"{self.num_shortened:,} of {self.num_prompts:,} prompts do not fit into {self.scorer.max_length:,} tokens "
            f"and lost their first demonstrations: {mean:.1f} of {shots} are left on average."
        )
        return [notice] if self.num_shortened else []


def calibrate(logp: np.ndarray, content_free: np.ndarray) -> np.ndarray:
    """log of p(label) / p_cf(label): p_cf is the mean over the content-free inputs, normalised over the labels.

    A model that says "yes" nine times out of ten without a reason must say it even more often to mean it:

    >>> np.exp(calibrate(np.log([0.8, 0.2]), np.log([[0.9, 0.1]]))).round(2).tolist()
    [0.89, 2.0]
    """
    log_cf = np.logaddexp.reduce(content_free, axis=0)
    return logp - (log_cf - np.logaddexp.reduce(log_cf))


def run_hits(labelled: LabelledTask, run: PromptRun, scores: RunScores) -> dict[str, np.ndarray]:
    """Whether each example is right (N,), by metric."""
    sizes: dict[str, Callable[[str], int] | None] = {"accuracy": None, "accuracy_norm": len}
    if labelled.task == "choice":
        sizes["accuracy_bytes"] = lambda word: len(word.encode())
    targets = [labelled.target(example) for example in labelled.examples]
    words = [labelled.candidates(example) for example in labelled.examples]
    hits = {
        name: np.array(
            [
                unique_argmax(logp if size is None else logp / [size(word) for word in own]) == target
                for logp, own, target in zip(scores.logp, words, targets, strict=True)
            ]
        )
        for name, size in sizes.items()
    }
    if scores.content_free is not None:
        calibrated = [unique_argmax(calibrate(logp, scores.content_free)) for logp in scores.logp]
        hits["accuracy_calibrated"] = np.array(calibrated) == np.array(targets)
    return {"accuracy_random_labels": hits["accuracy"]} if run.has_random_labels else hits


def summarize_runs(
    labelled: LabelledTask, runs: Sequence[PromptRun], scored: Sequence[RunScores]
) -> tuple[dict[str, float], dict[str, Any], list[str]]:
    """Means over seeds and templates; deviations and the scores of each run; whether the means are above chance."""
    baseline_name, baseline = labelled.chance()
    all_hits = [run_hits(labelled, run, scores) for run, scores in zip(runs, scored, strict=True)]
    by_metric = {
        name: np.array([hits[name] for hits in all_hits if name in hits]) for each in all_hits for name in each
    }
    summary = {name: mean_and_std(hits.mean(1).tolist()) for name, hits in by_metric.items()}
    templates = list(dict.fromkeys(run.template.name for run in runs))
    lines: list[dict[str, Any]] = [
        {"template": run.template.name, "seed": run.seed, **{name: float(hit.mean()) for name, hit in hits.items()}}
        for run, hits in zip(runs, all_hits, strict=True)
    ]
    by_template = {
        name: mean_and_std([line["accuracy"] for line in lines if line["template"] == name and "accuracy" in line])
        for name in templates
    }
    verdicts = {
        name: compare_with_chance(name, by_metric[name], baseline_name, baseline)
        for name in ("accuracy", "accuracy_calibrated")
        if name in by_metric
    }
    facts = {
        "std": {name: std for name, (_, std) in summary.items()},
        "by_template": {name: {"accuracy": mean, "std": std} for name, (mean, std) in by_template.items()},
        "at_chance": {name: at_chance for name, (at_chance, _) in verdicts.items()},
        "runs": lines,
    }
    metrics = {name: mean for name, (mean, _) in summary.items()} | {baseline_name: float(baseline.mean())}
    return metrics, facts, [sentence for _, sentence in verdicts.values()]


def compare_with_chance(name: str, hits_RN: np.ndarray, baseline_name: str, baseline_N: np.ndarray) -> tuple[bool, str]:
    """Whether the mean of R runs is no better than the baseline, and a sentence on it.

    The standard error has two parts: other examples (the spread of the difference over examples), and other seeds and
    templates (the spread of the runs).
    """
    gain_N = hits_RN.mean(0) - baseline_N
    variance = gain_N.var(ddof=1) / len(gain_N) if len(gain_N) > 1 else np.inf
    if len(hits_RN) > 1:
        variance += hits_RN.mean(1).var(ddof=1) / len(hits_RN)
    margin = STANDARD_ERRORS * float(np.sqrt(variance))
    at_chance = not gain_N.mean() > margin
    what = "the most frequent label" if baseline_name == "majority_accuracy" else "a random choice"
    above = f"{format_metric(name, float(hits_RN.mean()))} is {'not ' if at_chance else ''}above {what}"
    points = (
        f"{STANDARD_ERRORS} standard errors are {100 * margin:.1f} points" if np.isfinite(margin) else "one example"
    )
    says = "At chance" if at_chance else "Above chance"
    return at_chance, f"{says}, {name}: {above}, {format_metric('accuracy', float(baseline_N.mean()))} ({points})."
