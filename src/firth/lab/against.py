"""One question, one command: does this checkpoint beat another one, or random weights, on a task?

`firth finetune CHECKPOINT ... --against scratch` fine-tunes two arms with the same examples, seeds and settings: first
the other side, then the checkpoint. Their difference is tested over seeds and dev examples
(`metrics.compare_seeds`). Each arm is an ordinary run in a folder of its own, so that an interrupted command resumes
where it stopped.

With `learning_rate: auto` each arm chooses among three rates by its own trials. Random weights and pretrained ones need
different rates: with one rate for both, the comparison would also measure whom it suits. The effort is equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from firth.core.console import format_count, quiet, run_series, say
from firth.core.errors import UserError
from firth.core.files import write_results
from firth.core.html import HtmlPage
from firth.evaluate import write_run_report_and_card
from firth.evaluate.report import add_distillation_section
from firth.lab.doctor import try_diagnosis
from firth.metrics import format_metric
from firth.tasks import FinetuneRecipe, check_task, finetune
from firth.tasks.finetune_data import read_finetune_data
from firth.tasks.recipe import DISTILLATION_FIELDS
from firth.tasks.results import describe_comparison
from firth.train import load_recipe, run_folder
from firth.train.recipe import recipe_differences

SCRATCH = "scratch"  # the name of the arm of random weights, and its folder
ALONE = "alone"  # of the arm of a student without its teacher
FINETUNED_FOLDER, AGAINST_FOLDER = "finetuned", "against"
ARM_FIELDS = (
    "output_dir",
    "checkpoint",
    "from_scratch",
    "teacher",
    *DISTILLATION_FIELDS,
)  # in which the arms differ on purpose
SCHEDULE_FIELDS = ("max_steps", "warmup_steps", "eval_steps")


def finetune_against(
    recipe: FinetuneRecipe,
    other: FinetuneRecipe,
    resume: bool = False,
    overwrite: bool = False,
    allow_change: bool = False,
) -> dict[str, Any]:
    """Fine-tune `other`, then `recipe`, in folders under `recipe.output_dir`; return the results and the difference.

    `minutes` cover both arms. The first one's number of steps holds for both.
    """
    for arm in (recipe, other):
        if arm.baseline:
            raise UserError("--against makes its own baseline run: leave out --baseline.")
        check_task(arm)
    for difference in recipe_differences(replace(other, **{f: getattr(recipe, f) for f in ARM_FIELDS}), recipe):
        say(f"the two arms differ in their family's defaults; give the option to both. {difference}")
    folder, inputs = Path(recipe.output_dir), [recipe.checkpoint, other.checkpoint, *recipe.label_files]
    with run_folder(folder, resume, overwrite, inputs):
        is_alone = bool(recipe.teacher) and not other.teacher
        first = folder / (SCRATCH if other.from_scratch else ALONE if is_alone else AGAINST_FOLDER)
        seeds = format_count(recipe.seeds, "seed")
        start = "the same model from random weights" if other.from_scratch else other.checkpoint
        start += " without the teacher" * is_alone
        say(f"Arm 1 of 2: fine-tuning {start}, for comparison ({seeds})")
        other = replace(other, output_dir=str(first), minutes=recipe.minutes / 2)
        with run_series([1.0, 1.0]) as series:
            results = {first.name: run_arm(other, resume, allow_change)}
            series.end_run()
            say(f"Arm 2 of 2: fine-tuning {recipe.checkpoint} ({seeds})")
            if recipe.minutes:
                resolved = load_recipe(first / "recipe.yaml", FinetuneRecipe)
                recipe = replace(recipe, minutes=0.0, **{name: getattr(resolved, name) for name in SCHEDULE_FIELDS})
            second = replace(recipe, output_dir=str(folder / FINETUNED_FOLDER), baseline=str(first))
            results = {FINETUNED_FOLDER: run_arm(second, resume, allow_change)} | results
        report = write_comparison_report(folder, recipe, results)
        names = ("output_dir", "mean", "std", "seeds", "from_scratch", "learning_rate")
        against = {"checkpoint": other.checkpoint, **{name: results[first.name][name] for name in names}}
        result = results[FINETUNED_FOLDER] | {"against": against, "report": str(report)}
        write_results(folder / "results.json", result)
        return result


def run_arm(recipe: FinetuneRecipe, resume: bool, allow_change: bool) -> dict[str, Any]:
    """Fine-tune one arm and write its own report."""
    result = finetune(recipe, resume=resume, allow_change=allow_change)
    with quiet():  # the run has printed all notices on these files
        examples = read_finetune_data(recipe).dev
    folder = Path(recipe.output_dir)
    return {**result, "report": str(write_run_report_and_card(folder, result, examples, try_diagnosis(folder)))}


def arm_table(results: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Columns and rows of the arms: mean, deviation and the score of each seed."""
    metric, most = next(iter(results.values()))["metric"], max(len(r["seeds"]) for r in results.values())
    rows = [(name, r["mean"], r["std"], *r["seeds"]) for name, r in results.items()]
    return [metric, "mean", "deviation", *(f"seed {i}" for i in range(most))], rows


def write_comparison_report(folder: Path, recipe: FinetuneRecipe, results: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write the page of both arms: the difference first, then the scores and where each arm's own report is."""
    ours, (other_name, other) = results[FINETUNED_FOLDER], list(results.items())[-1]
    page = HtmlPage(f"{ours['task']}: {FINETUNED_FOLDER} against {other_name}")
    page.add_paragraph(describe_comparison(ours["comparison"]))
    page.add_heading("Scores")
    columns, rows = arm_table(results)
    cells = [(name, *(format_metric(ours["metric"], score) for score in scores)) for name, *scores in rows]
    caption = f"Scores on {recipe.dev}. Both arms have the same examples, seeds and settings."
    if ours["learning_rate_trial"]:
        caption += " Each has chosen its learning rate by its own trials on train."
    if ours["search"]:
        caption += " Each has chosen its settings by its own search on train."
    page.add_table(columns, cells, caption)
    add_distillation_section(page, ours)
    page.add_heading("Arms")
    other_start = recipe.checkpoint if other_name == ALONE else "another checkpoint"
    starts = [recipe.checkpoint, "random weights" if other["from_scratch"] else other_start]
    facts = zip(results.items(), starts, strict=True)
    rows = [(name, start, f"{r['learning_rate']:g}", r["report"]) for (name, r), start in facts]
    page.add_table(["arm", "starts from", "learning rate", "report"], rows)
    page.save(folder / "report.html")
    return folder / "report.html"
