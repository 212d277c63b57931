"""Commands that begin with the recipe of a pretraining: `pretrain`, `plan`, `show`, `prove_resume`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from firth.commands.arguments import is_architecture, merge_recipe_changes
from firth.commands.data_source import DataOptions, pop_corpus_options
from firth.commands.pretrain_plan import PretrainPlan, plan_pretraining, read_saved_fields, warn_of_misfit
from firth.commands.pretrain_static import STATIC_TOKENIZERS, pretrain_static
from firth.commands.push import push_final
from firth.commands.results import PlanResult, PretrainResult, ResumeProof, ShowResult
from firth.core.console import report_errors, say
from firth.core.errors import Interrupted, UserError, shorten
from firth.core.html import resolve_page_path
from firth.core.serialization import from_dict, to_dict
from firth.recipes import default_vocab_size
from firth.text import HELD_OUT_FRACTION
from firth.train.clock import RunClock
from firth.train.launch_env import require_single_process, silence_other_ranks
from firth.train.recipe import Recipe

MAX_SHOWN_ROWS = 10_000  # of `show`

if TYPE_CHECKING:
    from firth.lab.show import BatchPreview
    from firth.lab.show_dialogue import DialoguePreview
    from firth.train.distributed import DistContext


def pretrain(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    output_dir: str | Path,
    tokenizer: str | Path | None = None,
    objective: str | None = None,
    vocab_size: int = 0,
    lowercase: bool = False,
    held_out: float = HELD_OUT_FRACTION,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    allow_change: bool = False,
    rewind: int | None = None,
    add_words: bool = False,
    dry_run: bool = False,
    **options: Any,
) -> PretrainResult:
    """Pretrain a model (preset, config or checkpoint) on shards or on text.

    `data` is a folder of shards, or text: for text a tokenizer of `vocab_size` tokens (0: by the size of the text) is
    trained, which lowercases with `lowercase`, unless `tokenizer` names a folder. `held_out` is the share of the
    documents for evaluation. `objective` is a name of `firth.objectives.OBJECTIVES`, by default the family's. The run
    is written to `output_dir`: `resume` continues a stopped one, `overwrite` replaces it. `config` is a YAML file of
    recipe fields.

    "encoder", "decoder" or "encoder-decoder" as `model` plans size and settings for text, budget and machine, as `plan`
    does. `options` are fields of the recipe, and arguments of Corpus: `documents`, `columns`, `normalize` and so on;
    `overrides` sets nested fields by their dotted names. A resumed run whose recipe or shards have changed is refused
    unless `allow_change`. `rewind` resumes at least N steps before the first skipped step, and skips the data between.
    `add_words` adds the text's words to the word tokenizer of a checkpoint. `dry_run` estimates the run and writes
    nothing.
    """
    start_time = time.monotonic()
    silence_other_ranks()
    data_options = DataOptions(vocab_size, lowercase, held_out, pop_corpus_options(options), add_words)
    if str(model) in STATIC_TOKENIZERS and not (Path(model) / "config.json").is_file():
        require_single_process(f"{model} runs in one process, on all cores.")
        if objective is not None:
            raise UserError(f"{model} takes no --objective: leave it out.")
        if add_words:
            raise UserError(f"{model} takes no --add-words: leave it out.")
        changes = merge_recipe_changes(
            config, options, overrides, {"output_dir": str(output_dir), "data": "", "tokenizer": ""}
        )
        return PretrainResult(
            pretrain_static(str(model), data, tokenizer, data_options, changes, resume, overwrite, start_time, dry_run)
        )
    saved = {} if overwrite else read_saved_fields(Path(output_dir), is_architecture(model))
    plan = plan_pretraining(
        model, data, output_dir, tokenizer, objective, data_options, config, overrides, options, saved
    )
    if dry_run:
        from firth.train.folder import check_run_folder

        check_run_folder(Path(output_dir), resume, overwrite, plan.inputs)
        return PretrainResult({"dry_run": True, **plan.describe()})
    return PretrainResult(run_plan(plan, Path(output_dir), resume, overwrite, allow_change, rewind, start_time))


def run_plan(
    plan: PretrainPlan,
    path: Path,
    resume: bool,
    overwrite: bool,
    allow_change: bool,
    rewind: int | None,
    start_time: float,
) -> dict[str, Any]:
    """Make the shards, train and write the reports, in all processes of a run."""
    from firth.evaluate.companions import COMPANIONS
    from firth.evaluate.pretraining_report import write_interrupted_report, write_pretraining_report_and_card
    from firth.lab.doctor import try_diagnosis
    from firth.train import pretrain_in_folder
    from firth.train.folder import shared_run_folder
    from firth.train.launch import init_distributed

    dist = init_distributed(plan.recipe)
    if dist.is_restart(plan.recipe.output_dir):
        resume, overwrite, rewind = True, False, None
    resume = resume or rewind is not None
    repo, public = plan.recipe.push_to_hub, plan.recipe.public
    if repo:
        from firth.train.hub import check_push_target

        dist.run_on_main(lambda: check_push_target(repo, public, is_resumed=resume))
    with shared_run_folder(dist, path, resume, overwrite, plan.inputs) as folder:
        clock = RunClock(path, resume, start_time)

        def make_shards() -> dict[str, str]:
            shards = plan.make_shards(folder)
            clock.save()
            return shards

        with dist.enter_on_main(clock):
            recipe = resolve_on_main(dist, plan, dist.run_on_main(make_shards), clock)
            try:
                results = pretrain_in_folder(
                    folder,
                    recipe,
                    resume,
                    clock.start_time,
                    allow_change,
                    rewind,
                    companions=COMPANIONS,
                )
            except Interrupted as e:
                # SIGTERM, which torchrun sends too, wants the process to end at once.
                if dist.world_size == 1 and e.code == Interrupted.code:
                    with report_errors():
                        write_interrupted_report(folder, clock.elapsed_seconds, try_diagnosis(folder))
                raise
            report: dict[str, str] = {}
            if dist.is_main_process:
                with report_errors():
                    report = write_pretraining_report_and_card(folder, results, try_diagnosis(folder))
                if repo:
                    report |= push_final(folder / "final", repo, public)
            return {**results, **report}


def resolve_on_main(dist: DistContext, plan: PretrainPlan, shards: Mapping[str, str], clock: RunClock) -> Recipe:
    """The recipe of a run, from the main process: it times steps, which differ between processes, or counts rows."""
    recipe = from_dict(
        dist.run_on_main(lambda: to_dict(plan.resolve_recipe(shards, True, clock.elapsed_seconds))), Recipe, "recipe"
    )
    if plan.is_new_preset and not plan.architecture and dist.is_main_process:
        warn_of_misfit(recipe, plan, shards)
    return recipe


def plan(
    model: str | Path = "encoder",
    data: str | Path | Sequence[str | Path] | None = None,
    minutes: float | None = None,
    passes: float | None = None,
    tokens: float | None = None,
    fit: Sequence[str | Path] = (),
    output_dir: str | Path = ".",
    overwrite: bool = False,
    tokenizer: str | Path | None = None,
    vocab_size: int = 0,
    lowercase: bool = False,
    held_out: float = HELD_OUT_FRACTION,
    **options: Any,
) -> PlanResult:
    """Plan a pretraining: size and settings of the best model for a text, a budget and this machine.

    `model` is "encoder", "decoder", "encoder-decoder" or a preset. The budget is `minutes`, `passes` over the text or
    `tokens` to read. Without one it is that of `pretrain`: 30 minutes, or 3 passes of a preset. `data`, `tokenizer`,
    `vocab_size`, `lowercase` and `held_out` are as in `pretrain`. `options` are fields of the recipe, and arguments of
    Corpus. The result has `chosen` with its expected time, memory and held-out loss,
    `smaller` and `larger` beside it, and `command`.

    `fit` fits a scaling law to six or more finished runs instead, and writes plan.html to `output_dir`; `overwrite`
    replaces a plan.html of other origin.
    """
    if fit:
        if data is not None:
            raise UserError("--fit reads finished runs, --data a text to plan for: leave one out.")
        page = resolve_page_path(Path(output_dir), "plan", overwrite)
        from firth.lab.plan import fit_runs

        return PlanResult(fit_runs(fit, page))
    if data is None:
        raise UserError("There is no text to plan for: give --data TEXT, or --fit RUN... for a law of your own runs.")
    budget = {"minutes": minutes, "passes": passes, "tokens": tokens}
    given = [name for name, value in budget.items() if value is not None]
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1]} are two budgets: leave one out.")
    for name in given:
        if not 0 < float(budget[name] or 0) < math.inf:
            raise UserError(f"--{name} is {budget[name]}, and must be more than 0.")
    data_options = DataOptions(vocab_size, lowercase, held_out, pop_corpus_options(options))
    length = {"minutes": minutes} if minutes else {"num_train_epochs": passes or 1.0} if passes or tokens else {}
    requested = plan_pretraining(
        model, data, "run", tokenizer, None, data_options, None, None, {**options, **length}, {}, tokens or 0.0
    )
    from firth.lab.plan_command import write_command

    with TemporaryDirectory(prefix="firth-plan-") as folder, requested.open_sample(Path(folder)) as planner:
        found = (
            planner.plan(requested.architecture)
            if requested.architecture
            else planner.plan_named(str(model), requested.recipe.model)
        )
    source = requested.data_source
    vocab_size = source.new_tokenizer_args[1] or (
        default_vocab_size(source.corpus.text_bytes, source.new_tokenizer_args[0]) if source.corpus else 0
    )
    command = write_command(found.chosen, source.sources, source.corpus, tokenizer, vocab_size, lowercase, options)
    return PlanResult({**found.to_dict(), "notes": found.notes, "command": command})


def show(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    rows: int = 4,
    tokenizer: str | Path | None = None,
    objective: str | None = None,
    vocab_size: int = 0,
    lowercase: bool = False,
    held_out: float = HELD_OUT_FRACTION,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    output_dir: str | Path = ".",
    overwrite: bool = False,
    printed: bool = False,
    task: str | None = None,
    **options: Any,
) -> ShowResult:
    """Show inputs, masks and labels of the first rows of the first step, before any training.

    Takes the arguments of `pretrain`. Shows `rows` rows. Writes show.html to `output_dir`, and to the terminal if
    `printed`. With `task` ("lm", "preference" or "reward") `model` is a checkpoint and `data` a labelled file, whose
    labels are shown.
    """
    if not 1 <= rows <= MAX_SHOWN_ROWS:
        raise UserError(f"--rows is {shorten(rows)}, and must be from 1 to {MAX_SHOWN_ROWS:,}.")
    page = resolve_page_path(Path(output_dir), "show", overwrite)
    if task is not None:
        given = {"tokenizer": tokenizer, "objective": objective, "config": config, "KEY=VALUE": overrides, **options}
        return show_labels(model, task, data, rows, page, printed, given)
    data_options = DataOptions(vocab_size, lowercase, held_out, pop_corpus_options(options))
    plan = plan_pretraining(model, data, output_dir, tokenizer, objective, data_options, config, overrides, options)
    from firth.lab.show import build_batch_preview
    from firth.lab.show_page import save_show_page
    from firth.lab.show_text import print_preview

    with TemporaryDirectory(prefix="firth-show-") as folder:
        if plan.data_source.corpus is not None:
            say("Making a tokenizer and shards for this preview alone. After `firth prepare` it starts at once.")
        recipe = plan.resolve_recipe(plan.make_shards(Path(folder)))
        preview = build_batch_preview(recipe, rows, str(model), ", ".join(map(str, plan.data_source.sources)))
    save_show_page(preview, page)
    if printed:
        print_preview(preview)
    return show_result(preview, page)


def show_result(preview: BatchPreview | DialoguePreview, page: Path) -> ShowResult:
    result = ShowResult({**preview.to_dict(), "page": str(page)})
    result.preview = preview
    return result


def show_labels(
    checkpoint: str | Path,
    task: str,
    data: str | Path | Sequence[str | Path],
    rows: int,
    page: Path,
    printed: bool,
    options: Mapping[str, Any],
) -> ShowResult:
    """Show the labels of a labelled file, as the fine-tuning of a checkpoint would make them."""
    files = [data] if isinstance(data, str | Path) else list(data)
    if len(files) != 1:
        raise UserError(f"--task {task} is shown for one file as --data; {len(files)} were given.")
    taken = ("columns", "encoding", "max_seq_length")
    unused = {"documents": "auto", "normalize": "", "language": ""}
    for name, value in options.items():
        if name not in taken and value and value != unused.get(name):
            option = name if name.isupper() else f"--{name.replace('_', '-')}"
            raise UserError(f"{option} is for the rows of pretraining: leave it out with --task {task}.")
    if not Path(checkpoint).is_dir():
        raise UserError(
            f"{checkpoint} is not a checkpoint folder, which --task {task} needs: `firth pretrain` makes one."
        )
    from firth.lab.show_dialogue import build_dialogue_preview
    from firth.lab.show_page import save_show_page
    from firth.lab.show_text import print_preview

    chosen = {name: options[name] for name in taken if options.get(name)}
    preview = build_dialogue_preview(checkpoint, task, files[0], rows, **chosen)
    save_show_page(preview, page)
    if printed:
        print_preview(preview)
    return show_result(preview, page)


def prove_resume(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    output_dir: str | Path,
    kills: int = 10,
    tokenizer: str | Path | None = None,
    objective: str | None = None,
    vocab_size: int = 0,
    lowercase: bool = False,
    held_out: float = HELD_OUT_FRACTION,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    **options: Any,
) -> ResumeProof:
    """Kill and resume a run `kills` times, and compare it bit for bit with an undisturbed run.

    Takes the arguments of `pretrain`. By default the run has 10 steps for each kill and a checkpoint every 5 steps.
    """
    if kills < 1:
        raise UserError(f"--kills is {kills}, and must be at least 1.")
    require_single_process("prove-resume runs in one process: start it without torchrun.")
    data_options = DataOptions(vocab_size, lowercase, held_out, pop_corpus_options(options))
    options = {"max_steps": 10 * kills, "save_steps": 5, **options}
    plan = plan_pretraining(model, data, output_dir, tokenizer, objective, data_options, config, overrides, options)
    from firth.lab.prove_resume import run_resume_proof
    from firth.train import run_folder

    with run_folder(Path(output_dir), overwrite=overwrite, inputs=plan.inputs) as folder:
        return ResumeProof(run_resume_proof(plan.resolve_recipe(plan.make_shards(folder)), folder, kills))
