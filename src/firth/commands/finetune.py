"""The command `finetune`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from firth.commands.arguments import merge_recipe_changes
from firth.commands.pretrain import pretrain
from firth.commands.push import push_final
from firth.commands.results import FinetuneResult
from firth.core.console import quiet
from firth.core.errors import UserError, did_you_mean, quote
from firth.models import ModelConfig, read_config
from firth.models.presets import checkpoint_hint
from firth.recipes import finetuning_defaults, preference_defaults, with_rate_candidates
from firth.recipes import named_finetuning_defaults as named_recipe
from firth.recipes.finetuning import FINETUNE_RECIPES
from firth.tasks.processes import share_default_batch
from firth.tasks.recipe import DISTILLATION_FIELDS, FinetuneRecipe
from firth.text.labelled import infer_task
from firth.tokens import load_tokenizer
from firth.train.launch_env import read_launch_env, require_single_process, silence_other_ranks
from firth.train.recipe import apply_overrides


def finetune(
    checkpoint: str | Path,
    task: str | Mapping[str, str] | None,
    train: str | Path | Mapping[str, str | Path],
    dev: str | Path | Mapping[str, str | Path],
    output_dir: str | Path,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    columns: Mapping[str, str] | None = None,
    recipe: str | None = None,
    target_text: Sequence[str | Path] = (),
    allow_change: bool = False,
    rewind: int | None = None,
    against: str | Path | None = None,
    from_: str | Path | None = None,
    dry_run: bool = False,
    **options: Any,
) -> FinetuneResult:
    """Fine-tune a checkpoint on a task with several seeds; return the mean and standard deviation of the scores.

    Mappings of names to files as `train` and `dev` train on several tasks at once (T5, section 3.5.2), with `task` and
    `prefix` by name too. The defaults are the task that the columns tell, and the prefix "NAME: ".

    `options` and `overrides` are fields of the recipe, as `seeds=5` and `{"engine.weights": "bf16"}`; `config` is a
    YAML file of them. The run is written to `output_dir`: `resume` continues a stopped one, `overwrite` replaces it.

    `learning_rate` is a number, or "auto" (the default): the best of three tried on a split of train. `search` tries so
    many settings of rate, epochs, batch size, layer decay and warm-up there instead, except those that are given.

    `recipe` names a published one ("ulmfit", "dai-le", "elmo"); the default is the family's own. With `target_text` the
    checkpoint is first pretrained on that text, in OUTPUT_DIR-target (ULMFiT's second stage). A resumed run whose
    recipe or examples have changed is refused unless `allow_change`; `rewind` is as in `pretrain`.

    `against` fine-tunes a second arm with the same settings, and tests the difference: "scratch" starts from random
    weights, "alone" without the teacher, a folder from another checkpoint. The arms are the runs finetuned/ and
    scratch/ (alone/, against/).

    `from_` starts from a fine-tuned `checkpoint` (STILTs): its layers are kept, the head is new where labels differ.
    With `teacher` the student learns the predictions of a fine-tuned checkpoint (`tasks/distill.py`).
    `dry_run` estimates the run and writes nothing.
    """
    silence_other_ranks()
    named: dict[str, Any] = {"output_dir": str(output_dir), **({"columns": dict(columns)} if columns else {})}
    if isinstance(train, Mapping) or isinstance(dev, Mapping) or isinstance(task, Mapping):
        encoding = str(options.get("encoding") or "utf-8")
        named["tasks"] = name_tasks(task, train, dev, options.pop("prefix", None), columns, encoding)
    else:
        named |= {"task": task, "train": str(train), "dev": str(dev)}

    def make_plan(start: str | Path) -> FinetuneRecipe:
        model_config = read_finetune_config(start)
        changes = merge_recipe_changes(config, options, overrides, {"checkpoint": str(start), **named})
        return make_finetune_recipe(model_config, task, recipe, changes)

    if from_ is not None:
        from firth.tasks.chain import resolve_intermediate

        checkpoint = resolve_intermediate(checkpoint, from_)
    plan = make_plan(checkpoint)
    for name, value in {"--against": against, "--target-text": target_text, "--dry-run": dry_run}.items():
        if value:
            require_single_process(f"{name} runs in one process: start it without torchrun.")
    if dry_run:
        from firth.lab.dry_run import describe_finetuning
        from firth.train.folder import check_run_folder

        check_run_folder(Path(output_dir), resume, overwrite, [plan.checkpoint, *plan.label_files])
        return FinetuneResult({"dry_run": True, **describe_finetuning(plan, num_arms=1 if against is None else 2)})
    if against is not None:
        excluded = {"--from-scratch": plan.from_scratch, "--target-text": target_text, "--rewind": rewind is not None}
        other = plan_second_arm(against, plan, make_plan, excluded)
        from firth.lab.against import finetune_against

        return FinetuneResult(finetune_against(plan, other, resume, overwrite, allow_change))
    from firth.tasks import check_task
    from firth.train.hub import check_push_target

    launched = read_launch_env()
    if plan.push_to_hub and (launched is None or launched.rank == 0):
        is_resumed = resume or rewind is not None or (launched is not None and launched.restart_count > 0)
        check_push_target(plan.push_to_hub, plan.public, is_resumed)
    if target_text:
        check_task(plan)  # before the first stage, which takes long
        stage = {"resume": resume or rewind is not None, "overwrite": overwrite, "allow_change": allow_change}
        adapted = adapt_to_target_text(checkpoint, target_text, output_dir, **stage, device=plan.device)
        plan = replace(plan, checkpoint=str(adapted))
    return FinetuneResult(finetune_and_report(plan, resume, overwrite, allow_change, rewind))


def make_finetune_recipe(
    model_config: ModelConfig, task: str | Mapping[str, str] | None, published: str | None, changes: dict[str, Any]
) -> FinetuneRecipe:
    """Return the recipe of a model on a task, by default or as `published`, with the changes of the user."""
    fields = finetuning_defaults(model_config, changes.get("optim"), lora=bool(changes.get("lora_rank")))
    if task == "preference":
        fields = preference_defaults(fields)
    if published is not None:
        fields = named_recipe(published, model_config, task if isinstance(task, str) else "text-to-text")
        changes.setdefault("learning_rate", fields["learning_rate"])  # the published one
    fields, changes = with_rate_candidates(fields, changes, FINETUNE_RECIPES.get(published or "", {}))
    plan, limit = apply_overrides(FinetuneRecipe(**fields), changes), model_config.max_length
    if "max_seq_length" in changes and limit is not None and plan.max_seq_length > limit:
        raise UserError(
            f"--max-seq-length {plan.max_seq_length:,} is longer than the {limit:,} positions of {plan.checkpoint}. "
            f"Choose {limit:,} or less; longer texts are truncated."
        )
    return plan if "per_device_train_batch_size" in changes else share_default_batch(plan)


def plan_second_arm(
    against: str | Path, plan: FinetuneRecipe, make_plan: Callable[..., FinetuneRecipe], excluded: Mapping[str, Any]
) -> FinetuneRecipe:
    """Return the recipe to compare with; a UserError if one of the options `excluded` by --against is given."""
    given = {**excluded, "--minutes with --search": plan.minutes and plan.search}  # both arms need equal steps
    given["--push-to-hub"] = plan.push_to_hub
    if wrong := next((name for name, value in given.items() if value), None):
        raise UserError(f"--against {against} and {wrong} exclude each other: leave one out.")
    from firth.lab.against import ALONE, SCRATCH

    if str(against) == ALONE and not plan.teacher:
        raise UserError("--against alone compares with a student without a teacher: add --teacher FINETUNED.")
    if str(against) == SCRATCH:
        return replace(plan, from_scratch=True)
    return without_teacher(plan) if str(against) == ALONE else make_plan(against)


def finetune_and_report(
    plan: FinetuneRecipe, resume: bool, overwrite: bool, allow_change: bool, rewind: int | None
) -> dict[str, Any]:
    """Fine-tune; rank 0 writes the report and the card, and pushes the model."""
    from firth.evaluate import write_run_report_and_card
    from firth.lab.doctor import try_diagnosis
    from firth.tasks import finetune as run_finetune
    from firth.tasks.finetune_data import read_finetune_data

    result, folder = run_finetune(plan, resume, overwrite, allow_change, rewind), Path(plan.output_dir)
    launched = read_launch_env()
    if launched is not None and launched.rank > 0:
        return {**result, "report": str(folder / "report.html")}
    with quiet():  # the run has printed all notices on these files
        examples = read_finetune_data(plan).dev
    report = write_run_report_and_card(folder, result, examples, try_diagnosis(folder))
    pushed = push_final(folder / "final", plan.push_to_hub, plan.public) if plan.push_to_hub else {}
    return {**result, "report": str(report), **pushed}


def without_teacher(recipe: FinetuneRecipe) -> FinetuneRecipe:
    """Return the recipe of the same student without its teacher."""
    return replace(recipe, teacher="", **{name: getattr(FinetuneRecipe, name) for name in DISTILLATION_FIELDS})


def read_finetune_config(checkpoint: str | Path) -> ModelConfig:
    """Read the config of a checkpoint; a path that is none is an error that says how to make one."""
    if not Path(checkpoint).is_dir():
        export = " `firth export FILE --format firth` makes one of a file of word vectors." * Path(checkpoint).is_file()
        raise UserError(f"{checkpoint} is not a checkpoint folder. {checkpoint_hint(checkpoint)}{export}")
    return read_config(checkpoint)


def name_tasks(
    task: str | Mapping[str, str] | None,
    train: str | Path | Mapping[str, str | Path],
    dev: str | Path | Mapping[str, str | Path],
    prefix: str | Mapping[str, str] | None = None,
    columns: Mapping[str, str] | None = None,
    encoding: str = "utf-8",
) -> dict[str, dict[str, str]]:
    """Return the fields of `TaskData` of each of several tasks."""
    if not isinstance(train, Mapping) or not isinstance(dev, Mapping):
        raise UserError("Several tasks need a name for every file: --train a=train.csv --dev a=dev.csv --train b=...")
    if isinstance(prefix, str):
        raise UserError(f"prefix {quote(prefix)} names no task. Write --prefix NAME={quote(prefix)} for each task.")
    by_task = task if isinstance(task, Mapping) else dict.fromkeys(train, task) if task else {}
    for option, given in {"--dev": dev, "--task": by_task, "--prefix": prefix or {}}.items():
        if unknown := [name for name in given if name not in train]:
            raise UserError(f"{option} {unknown[0]}=... has no --train. {did_you_mean(unknown[0], train)}")
    if missing := [name for name in train if name not in dev]:
        raise UserError(f"--train {missing[0]}={train[missing[0]]} has no --dev {missing[0]}=FILE.")
    if wrong := [name for name in train if not re.fullmatch(r"[\w-]+", name)]:
        raise UserError(f"The task name {quote(wrong[0])} may have letters, digits, - and _ only.")
    return {
        name: {
            "task": by_task.get(name) or infer_task(file, columns, encoding),
            "train": str(file),
            "dev": str(dev[name]),
            "prefix": (prefix or {}).get(name, f"{name}: "),
        }
        for name, file in train.items()
    }


def adapt_to_target_text(
    checkpoint: str | Path,
    text: Sequence[str | Path],
    output_dir: str | Path,
    resume: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> Path:
    """Pretrain on text of the task's domain (Howard & Ruder 2018, section 3.2); return the new checkpoint.

    A word tokenizer gets the words of the text. `options` are fields of the recipe.
    """
    folder = Path(f"{output_dir}-target")
    ulmfit: dict[str, Any] = {"layer_decay": 1 / 2.6, "lr_scheduler_type": "slanted-triangle"}
    ulmfit |= {"adam_beta1": 0.7, "adam_beta2": 0.99, "add_words": load_tokenizer(checkpoint).kind == "word"}
    pretrain(checkpoint, list(text), folder, resume=resume, overwrite=overwrite, **ulmfit | options)
    return folder / "final"
