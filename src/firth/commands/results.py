"""The results of the commands: dictionaries and lists that show themselves in a notebook.

Each class is the dictionary, or the list, that the command documents, with the methods of `core/notebook.py`. What a
notebook shows is made when it is asked for: the functions of reports are imported then, and the log of a run is read
then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from firth.core.console import format_count, format_duration
from firth.core.errors import shorten
from firth.core.html import HtmlPage
from firth.core.notebook import (
    Result,
    ResultList,
    add_facts,
    add_heat_table,
    add_note,
    to_notebook_html,
)

if TYPE_CHECKING:
    from firth.lab.check import CorpusCheck
    from firth.lab.show import BatchPreview
    from firth.lab.show_dialogue import DialoguePreview

MAX_NAME_CHARS = 60  # characters of a text in a table
MAX_VECTOR_TEXTS = 12  # texts whose cosines are shown
MAX_SHOWN_FACTS = ("steps", "tokens", "passes", "loss", "eval_loss", "unigram_entropy", "parameters")


class PretrainResult(Result):
    """The result of `pretrain`: what the loss means, the loss curve, and the figures of the run."""

    title = "Pretraining"

    @property
    def log(self) -> list[dict[str, Any]]:
        """The lines of log.jsonl: one for each logged step and each evaluation; empty if the run is gone."""
        from firth.train import read_log

        file = Path(self.get("output_dir", "")) / "log.jsonl"
        return read_log(file) if file.is_file() else []

    def make_page(self) -> HtmlPage:
        if self.get("dry_run"):
            return super().make_page()
        from firth.core.chart import loss_chart
        from firth.evaluate.report import comparable_entropy, loss_series

        page = HtmlPage(f"{self.title}: {self['output_dir']}")
        if summary := self.get("summary"):
            page.add_lead(f"{summary[0].upper()}{summary[1:]}.")
        log = self.log
        if any("loss" in line for line in log):
            entropy = comparable_entropy(Path(self["output_dir"]), self) if "eval_loss" in self else None
            caption = "Loss by step. Thin: training text; with dots: held-out text, which is not trained on."
            page.add_chart(loss_chart(*loss_series(log), entropy), caption)
        facts = {name: self[name] for name in MAX_SHOWN_FACTS if self.get(name) is not None}
        add_facts(page, facts | ({"time": format_duration(self["seconds"])} if "seconds" in self else {}))
        for word, near in list(self.get("similar", {}).items())[:5]:
            add_note(page, f"nearest to {word}: {', '.join(neighbour_names(near))}")
        add_references(page, self)
        return page


def neighbour_names(neighbours: Any) -> list[str]:
    """Return the words of neighbours, which a file has as pairs or as records."""
    return [str(near["word"] if isinstance(near, Mapping) else near[0]) for near in neighbours]


def add_references(page: HtmlPage, result: Mapping[str, Any]) -> None:
    """Name the report and the next command of a run."""
    if "report" in result:
        add_note(page, f"Report: {result['report']}")
    if "next" in result:
        add_note(page, f"Next: {result['next']}")


class FinetuneResult(Result):
    """The result of `finetune`: scores with their standard deviations, of each seed, and beside another arm."""

    title = "Fine-tuning"

    def make_page(self) -> HtmlPage:
        if self.get("dry_run"):
            return super().make_page()
        from firth.metrics import format_metric, is_share_metric

        metric, arms = self["metric"], {Path(a["output_dir"]).name: a for a in (self, self.get("against")) if a}
        page = HtmlPage(f"{self.title}: {self['task']}")
        scores = [
            f"{f'{name}: ' * (len(arms) > 1)}{metric} {format_metric(metric, arm['mean'])}"
            + f" ± {format_metric(metric, arm['std'])}" * (len(arm["seeds"]) > 1)
            for name, arm in arms.items()
        ]
        page.add_lead(f"{'; '.join(scores)}, over {format_count(len(self['seeds']), 'seed')}")
        if len(arms) > 1:
            from firth.lab.report import ArmScore, arm_chart
            from firth.tasks.results import describe_comparison

            scale, unit = (100.0, f"{metric} (%)") if is_share_metric(metric) else (1.0, metric)
            bars = [ArmScore("", name, 0, [scale * x for x in arm["seeds"]]) for name, arm in arms.items()]
            chance = None if self.get("chance") is None else scale * self["chance"]
            page.add_chart(arm_chart(bars, chance, unit), "Bars: the mean. Dots: the seeds.")
            page.add_paragraph(describe_comparison(self["comparison"]))
        else:
            self.add_scores(page)
        if self.get("failed"):
            failed = ", ".join(map(str, self["failed"]))
            add_note(page, f"Seeds no better than {format_metric(metric, self['chance'])}, guessing: {failed}.")
        add_references(page, self)
        return page

    def add_scores(self, page: HtmlPage) -> None:
        from firth.evaluate.report import format_score_rows, name_positive_class, seed_table

        columns, rows = seed_table(self)
        page.add_table(columns, name_positive_class(format_score_rows(rows), self))


class EvaluationResult(Result):
    """The result of `evaluate`: a table of scores, with deviations over seeds where there are several."""

    title = "Evaluation"

    def make_page(self) -> HtmlPage:
        from firth.evaluate.report import format_score_rows, name_positive_class

        if not self.get("metrics"):
            return super().make_page()
        std: Mapping[str, float] = self.get("std") or {}
        data = self.get("data")
        name = Path(str(data)).name if data is not None else ""
        page = HtmlPage(f"{self.get('task') or self.get('suite')}: {name}" if name else str(self.get("task")))
        rows = [(name, value, *((std.get(name),) if std else ())) for name, value in self["metrics"].items()]
        columns = ["metric", "mean", "deviation"] if std else ["metric", "score"]
        page.add_table(columns, name_positive_class(format_score_rows(rows), self))
        if "examples" in self:
            add_note(page, format_count(self["examples"], "example"))
        add_references(page, self)
        return page


class DoctorResult(Result):
    """The result of `doctor`: the loss beside its references, and one block for each finding."""

    title = "Diagnosis"

    def make_page(self) -> HtmlPage:
        from firth.train.findings import Finding

        page = HtmlPage(f"{self.title}: {self['run']}")
        findings = [Finding(**finding) for finding in self["findings"]]
        losses = {"loss": self["loss"], **self["references"]}
        known = [(name.replace("_", " "), f"{value:.2f}") for name, value in losses.items() if value is not None]
        if known:
            page.add_table(["nats per token", ""], known)
        page.add_fragment("doctor.html.j2", "findings", findings)
        if not findings:
            page.add_paragraph(f"{'No finding' if self['not_examined'] else 'Healthy'}: {self['rules']} rules.")
        for reason in self["not_examined"]:
            add_note(page, f"Not examined: {reason}")
        return page


class PlanResult(Result):
    """The result of `plan`: the chosen run beside a smaller and a larger one, and the command to paste."""

    title = "Plan"

    def make_page(self) -> HtmlPage:
        if "chosen" not in self:
            return super().make_page()
        from firth.lab.planner import plan_column

        text = self["text"]
        page = HtmlPage(f"{self.title}: {self['chosen']['model']}")
        about = "about " if text["is_estimated"] else ""
        tokens = f"{about}{text['tokens']:,} tokens in {format_count(text['documents'], 'document')}"
        runs = {"smaller": self["smaller"], "planned": self["chosen"], "larger": self["larger"]}
        shown = {name: plan_column(run) for name, run in runs.items() if run is not None}
        rows = [(row, *(column[row] for column in shown.values())) for row in shown["planned"]]
        page.add_table(["", *shown], rows, f"{tokens}, on {self['device']}")
        for note in self["notes"]:
            add_note(page, note)
        page.add_code(self["command"])
        return page


class ShowResult(Result):
    """The result of `show`: rows as the model reads them, marked tokens, labels, attention masks, rates."""

    title = "What the model will read and predict"
    preview: BatchPreview | DialoguePreview | None = None

    def make_page(self) -> HtmlPage:
        if self.preview is None:
            return super().make_page()
        from firth.lab.show_page import make_show_page

        return make_show_page(self.preview)


class CheckResult(Result):
    """The result of `check`: advice, and the tokenizers that were compared."""

    title = "Check of a text"
    found: CorpusCheck | None = None

    def make_page(self) -> HtmlPage:
        if self.found is None:
            return super().make_page()
        from firth.lab.check_text import FIT_COLUMNS, fit_row

        page = HtmlPage(self.title)
        page.add_paragraph(self["reading"])
        page.add_table(["about", "advice"], [(one["about"], one["do"]) for one in self["advice"]])
        if self.found.fits:
            page.add_table(FIT_COLUMNS, [fit_row(fit, fit.name == self["chosen"]) for fit in self.found.fits])
        add_note(page, f"Report: {self['page']}")
        return page


class ComparisonResult(Result):
    """The result of `compare`: the cosines between the occurrences of a word, by checkpoint."""

    title = "One word in several texts"

    def make_page(self) -> HtmlPage:
        from firth.evaluate.context import Occurrence

        page = HtmlPage(f"{self['word']}: one word in several texts")
        found = [Occurrence(self["texts"][o["text"]], o["begin"], o["end"]) for o in self["occurrences"]]
        numbers = [str(i) for i in range(1, len(found) + 1)]
        names = [f"{number}. {one.excerpt()}" for number, one in zip(numbers, found, strict=True)]
        for one in self["checkpoints"]:
            page.add_heading(f"{one['checkpoint'] or 'model'}: a word's vector is {one['kind']}")
            mean = one["any_two_words"]
            caption = "Cosines." + (
                f" Any two words of these texts: {mean:.2f} on average." if mean is not None else ""
            )
            add_heat_table(page, names, numbers, one["similarity"], caption)
            rows = [
                (number, ", ".join(f"{near['word']} {near['similarity']:.2f}" for near in neighbours))
                for number, neighbours in zip(numbers, one["neighbours"], strict=False)
            ]
            if rows:
                page.add_table(["", "nearest words"], rows)
        return page


class AdaptResult(Result):
    """The result of `adapt`: both texts before and after."""

    title = "Adaptation"

    def make_page(self) -> HtmlPage:
        if self.get("dry_run"):
            return super().make_page()
        from firth.lab.adapt_page import measure_table

        page = HtmlPage(f"{self.title}: {self['output_dir']}")
        page.add_table(*measure_table(self))
        add_references(page, self)
        return page


class TokenizerResult(Result):
    """The result of `tokenizer`."""

    title = "Tokenizer"


class ShardsResult(Result):
    """The result of `prepare`."""

    title = "Shards"


class ExportResult(Result):
    """The result of `export`."""

    title = "Export"


class ResumeProof(Result):
    """The result of `prove_resume`."""

    title = "A killed run against an undisturbed one"


class ModelList(ResultList[dict[str, Any]]):
    """The result of `models`: the presets as a table."""

    def make_page(self) -> HtmlPage:
        page = HtmlPage("Models")
        names = ("name", "architecture", "parameters", "objective", "good_for")
        rows = [tuple(model[name] for name in names) for model in self]
        page.add_table([name.replace("_", " ") for name in names], rows)
        return page


class Vectors(np.ndarray):
    """The result of `embed`: an array that knows its texts, and shows their cosines.

    Arithmetic gives ordinary arrays, and so does a part of it to a notebook: the texts belong to the whole.
    """

    texts: Sequence[str] = ()

    @classmethod
    def of(cls, vectors: np.ndarray, texts: Sequence[str]) -> Vectors:
        found = np.ascontiguousarray(vectors).view(cls)
        found.texts = tuple(texts)
        return found

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """Return the result of a ufunc as an ordinary array, or number."""
        return array[()] if return_scalar else np.asarray(array)

    def _repr_html_(self) -> str | None:
        if len(self.texts) < 2 or self.ndim != 2 or len(self.texts) != len(self):
            return None
        x_ND = np.asarray(self)[:MAX_VECTOR_TEXTS].astype(np.float64)
        x_ND = x_ND / np.maximum(np.linalg.norm(x_ND, axis=1, keepdims=True), 1e-12)
        page = HtmlPage(f"{len(self):,} vectors of {self.shape[1]:,} numbers")
        numbers = [str(i) for i in range(1, len(x_ND) + 1)]
        names = [f"{i}. {shorten(text, MAX_NAME_CHARS)}" for i, text in zip(numbers, self.texts, strict=False)]
        more = f" The first {MAX_VECTOR_TEXTS} texts." if len(self) > MAX_VECTOR_TEXTS else ""
        add_heat_table(page, names, numbers, (x_ND @ x_ND.T).tolist(), f"Cosine of each two texts.{more}")
        return to_notebook_html(page)
