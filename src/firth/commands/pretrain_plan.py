"""Arguments of `pretrain` become a recipe and its data, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from firth.commands.arguments import is_architecture, merge_recipe_changes, objective_fields, resolve_model
from firth.commands.data_source import DataOptions, DataSource, open_data_source, parse_named_sources
from firth.commands.shards import check_held_out_share
from firth.core.console import format_count, say, warn
from firth.core.errors import UserError
from firth.core.memory import return_freed_memory
from firth.core.serialization import TYPE_KEY
from firth.models import ModelConfig, with_vocabulary
from firth.models.hf.config_io import read_stored_objective
from firth.objectives import MaskedNextToken, MLMAndCLM, RTDMLMAndCLM
from firth.objectives.registry import name_objective
from firth.recipes import (
    choose_batch,
    continued_defaults,
    default_vocab_size,
    pretraining_recipe,
    scale_rate_to_batch,
    shape_recipe_fields,
    tokenizer_kind,
    update_recipe,
    with_repeated_text,
)
from firth.recipes.pretraining import DROPOUT_FIELDS, BatchChoice
from firth.tokens import MixConfig, is_shards_folder, load_tokenizer, open_shards
from firth.train.recipe import Recipe, TrainingConfig, read_yaml_mapping

if TYPE_CHECKING:
    from firth.lab.planner import Planner
    from firth.text import Corpus
    from firth.tokens import ShardSet


DEFAULT_PLANNED_MINUTES = 30.0  # of a run whose size is planned and that names no length
# Fields of a resumed pretraining that keep the saved value unless they are given.
KEPT_ON_RESUME_FIELDS = ("optim", "learning_rate", "weight_decay", "warm_start", "seed")
# The same: chosen by the passes of the first command.
PASSES_FIELDS = frozenset({"dropout", "masked_share"})
PLANNED_FIELDS = ("model", "save_steps", "minutes")  # the same for a run whose size was planned


@dataclass(frozen=True)
class PretrainPlan:
    """A recipe and its data, checked before anything is written."""

    recipe: Recipe
    keeps_vocab_size: bool  # of the model; otherwise it gets that of the tokenizer
    data_source: DataSource
    chooses_batch: bool  # from the text, in a new run that names no batch
    chooses_rate: bool  # follows a batch that is chosen or set in tokens
    # From the passes over the text, in a new run of a model that no paper fixes: "dropout", "masked_share".
    follows_passes: frozenset[str]
    make_recipe: Callable[[ModelConfig], Recipe]  # of another model, with everything that the user has set
    architecture: str = ""  # whose size is planned; "": the model is named
    is_new_preset: bool = False
    keeps_save_steps: bool = False
    token_budget: float = 0.0

    @property
    def inputs(self) -> list[str | Path]:
        """Paths that the run reads and must not overwrite."""
        return [*self.data_source.inputs, self.recipe.checkpoint, self.recipe.teacher]

    def make_shards(self, folder: Path) -> dict[str, str]:
        """Make the shards; the tokenizer must have the special tokens that the objective needs."""
        objective, length = self.recipe.objective, self.recipe.max_seq_length
        shards = self.data_source.make_shards(
            folder, lambda tokenizer: objective.check(tokenizer.vocab, objective.source_length(length))
        )
        return_freed_memory()
        return shards

    def describe(self) -> dict[str, Any]:
        """What the run would do, for --dry-run: the tokens of shards are counted, those of text are estimated."""
        from firth.lab.dry_run import describe_pretraining

        data, num_tokens, vocab = self.data_source.describe()
        if self.architecture:
            return self.describe_planned(data)
        recipe = self.recipe
        config = recipe.model if self.keeps_vocab_size else replace(recipe.model, vocab_size=vocab)
        recipe = replace(recipe, model=config)
        if self.data_source.corpus is not None:
            return self.describe_text_run(recipe, data, num_tokens, self.data_source.corpus)
        shards = {name: str(folder) for name, folder in self.data_source.by_name.items()}
        recipe = self.choose_batch(with_shards(recipe, shards), num_tokens)
        if self.is_new_preset:
            warn_of_misfit(recipe, self, shards)
        return describe_pretraining(recipe, data, num_tokens)

    def describe_text_run(
        self, recipe: Recipe, data: dict[str, Any], num_tokens: int, corpus: Corpus
    ) -> dict[str, Any]:
        """The same for a text. If its size is unknown the run must end within the part that was counted."""
        from firth.lab.dry_run import describe_pretraining
        from firth.lab.plan_text import unknown_size_error

        is_bound = "tokens_at_least" in data
        if is_bound and not (recipe.minutes or recipe.max_steps):
            raise unknown_size_error(corpus)
        found = describe_pretraining(self.choose_batch(recipe, num_tokens), data, num_tokens)
        if is_bound and found["passes"] > 1:
            raise unknown_size_error(corpus)
        return {"passes_at_most" if is_bound and name == "passes" else name: value for name, value in found.items()}

    def describe_planned(self, data: dict[str, Any]) -> dict[str, Any]:
        """The same for a size that is planned, from a sample of the text."""
        from firth.lab.dry_run import describe_pretraining

        with TemporaryDirectory(prefix="firth-plan-") as folder, self.open_sample(Path(folder)) as planner:
            found = planner.plan(self.architecture)
        for line in found.describe():
            say(line)
        run = found.chosen
        estimate = describe_pretraining(run.recipe, data, found.text.tokens)
        planned = {"steps": run.steps, "tokens_read": round(run.tokens_read), "passes": run.passes}
        return {
            "model": run.name,
            **estimate,
            **planned,
            "seconds": run.seconds,
            "peak_memory_bytes": run.memory_bytes,
            "expected_loss": run.expected_loss,
        }

    @contextmanager
    def open_sample(self, folder: Path) -> Iterator[Planner]:
        """A planner for the shards, or for a sample of the text that is tokenized into `folder`."""
        from firth.lab.plan_text import sample_text

        source = self.data_source
        if source.corpus is None:
            yield self.make_planner(open_shards(Path(str(source.by_name[""]))))
            return
        kind, size, lowercase = source.new_tokenizer_args
        size = size or default_vocab_size(source.corpus.text_bytes, kind)
        held_out = source.data_options.held_out
        sample = sample_text(source.corpus, source.tokenizer, (kind, size, lowercase), held_out, folder)
        yield self.make_planner(sample.shards, sample.scale, sample.prepare_seconds, sample.prepare_bytes)

    def make_planner(
        self,
        shards: ShardSet,
        scale: float = 1.0,
        prepare_seconds: float = 0.0,
        prepare_bytes: float = 0.0,
        elapsed_seconds: float = 0.0,
    ) -> Planner:
        """A planner whose recipes have everything that the user has set, for a text of `scale` times these shards."""
        from firth.lab.plan_text import read_text_facts
        from firth.lab.planner import Planner

        def make_recipe(config: ModelConfig) -> Recipe:
            recipe = self.make_recipe(config)
            if not self.keeps_vocab_size:
                recipe = replace(recipe, model=with_vocabulary(recipe.model, shards.tokenizer.vocab))
            return replace(recipe, processes=num_devices)

        num_devices = launched_devices()
        keeps = {
            "batch": self.chooses_batch,
            "rate": self.chooses_rate,
            **{name: name in self.follows_passes for name in PASSES_FIELDS},
            "save_steps": not self.keeps_save_steps,
        }
        return Planner(
            make_recipe,
            shards,
            read_text_facts(make_recipe(self.recipe.model), shards, scale, prepare_seconds, prepare_bytes),
            tokens=self.token_budget,
            keeps=[name for name, chosen in keeps.items() if not chosen],
            num_devices=num_devices,
            elapsed_seconds=elapsed_seconds,
        )

    def resolve_recipe(
        self, shards: Mapping[str, str], times_steps: bool = False, elapsed_seconds: float = 0.0
    ) -> Recipe:
        """The recipe with the fields that depend on the shards: paths, tokenizer, vocabulary size, planned size.

        With `times_steps` a plan times steps on a CPU; on a GPU they would have to be compiled first.
        """
        first = open_shards(Path(next(iter(shards.values()))))
        recipe, tokenizer = self.recipe, first.tokenizer
        if self.architecture:
            from firth.train.distributed import SINGLE_PROCESS, select_device

            times_steps = times_steps and select_device(SINGLE_PROCESS, recipe).type == "cpu"
            planner = self.make_planner(first, elapsed_seconds=elapsed_seconds)
            found = planner.plan(self.architecture, times_steps)
            for line in found.describe():
                say(line)
            for note in found.notes if not recipe.minutes else ():  # such a run says both once it has timed its steps
                warn(note)
            recipe = replace(found.chosen.recipe, processes=self.recipe.processes)
        elif not self.keeps_vocab_size:
            recipe = replace(recipe, model=with_vocabulary(recipe.model, tokenizer.vocab))
        recipe = replace(with_shards(recipe, shards), tokenizer=tokenizer.fingerprint)
        if not self.architecture:
            text_tokens = sum(open_shards(Path(folder)).num_tokens for folder in shards.values())
            recipe = self.choose_batch(recipe, text_tokens, elapsed_seconds)
        recipe.check()
        return recipe

    def choose_batch(self, recipe: Recipe, text_tokens: int, elapsed_seconds: float = 0.0) -> Recipe:
        """The recipe with its global batch, the learning rate that follows from it, and what suits so many passes."""
        if self.chooses_batch:
            recipe = with_chosen_batch(recipe, text_tokens, elapsed_seconds)
        if self.follows_passes:
            recipe = adapt_to_passes(recipe, text_tokens, PASSES_FIELDS - self.follows_passes, elapsed_seconds)
        if self.chooses_rate and recipe.global_batch_tokens:
            rate = scale_rate_to_batch(recipe.learning_rate, recipe.model, recipe.global_batch_tokens)
            if rate != recipe.learning_rate:
                say(f"learning rate: {rate:g} instead of {recipe.learning_rate:g}, as it follows the batch")
            recipe = replace(recipe, learning_rate=rate)
        return recipe


def plan_pretraining(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    output_dir: str | Path,
    tokenizer: str | Path | None,
    objective: str | None,
    data_options: DataOptions,
    config: str | Path | None,
    overrides: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    saved_fields: Mapping[str, Any] | None = None,
    token_budget: float = 0.0,
) -> PretrainPlan:
    """Resolve the arguments of `pretrain` into a checked recipe and its data.

    A field that is not given keeps the value of the saved recipe of a resumed run, or the model's default; a checkpoint
    keeps the objective that it was trained with. The size of an architecture is planned later, from the text; until
    then its smallest model stands for it. `token_budget` are the tokens that a plan may read.
    """
    architecture = str(model) if is_architecture(model) and not saved_fields else ""
    model_config, checkpoint = resolve_model(model)
    named = {"output_dir": str(output_dir), "checkpoint": str(checkpoint or ""), "data": "", "tokenizer": ""}
    changes = merge_recipe_changes(config, {**options, "objective": objective_fields(objective)}, overrides, named)
    shape_fields = {} if checkpoint is not None else planned_shape_fields(str(model), changes)
    defaults = choose_defaults(model_config, checkpoint, architecture, changes)

    def make_recipe(config: ModelConfig) -> Recipe:
        own, saved = pretraining_recipe(config, **shape_fields), dict(saved_fields or {})
        if "objective" in changes or not isinstance(own.objective, MaskedNextToken):
            saved.pop("objective.masked_share", None)  # of another objective: a resumed run is refused later
        if "objective" in changes:
            saved.pop("objective", None)
        return update_recipe(own, {**defaults, **saved, **changes})

    recipe = make_recipe(model_config)
    recipe.check()
    check_held_out_share(data_options.held_out)
    sources = [data] if isinstance(data, str | Path) else list(data)
    check_tokenizer_options(tokenizer, checkpoint, data_options, sources)
    mixed = parse_named_sources(sources)
    check_mix(recipe, mixed, architecture)
    if mixed and "warm_start" not in changes:
        recipe = replace(recipe, warm_start="none")
    new = [tokenizer_kind(recipe.model, recipe.objective), data_options.vocab_size, data_options.lowercase]
    marks_salient = "salient" in recipe.objective.token_flags
    source = open_data_source(sources, tokenizer or checkpoint, data_options, new, marks_salient, mixed)
    keeps_vocab_size = (checkpoint is not None and not data_options.add_words) or "model.vocab_size" in changes
    names_batch = recipe.per_device_train_batch_size or recipe.global_batch_tokens
    chooses_rate = not saved_fields and "learning_rate" not in changes
    named_fields = {
        "dropout": {"model", *(f"model.{name}" for name in DROPOUT_FIELDS)},
        "masked_share": {"objective", "objective.masked_share"},
    }
    is_open = bool(shape_fields) and not saved_fields
    follows_passes = frozenset(name for name, fields in named_fields.items() if is_open and not fields & changes.keys())
    return PretrainPlan(
        recipe,
        keeps_vocab_size,
        source,
        not (saved_fields or names_batch),
        chooses_rate,
        follows_passes,
        make_recipe,
        architecture,
        not saved_fields and checkpoint is None,
        "save_steps" in changes,
        token_budget,
    )


def planned_shape_fields(model: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the default recipe of `encoder-8x512` and the like, on the device that these options choose."""
    on_cpu, on_gpu = (shape_recipe_fields(model, device_type) for device_type in ("cpu", "cuda"))
    if on_cpu == on_gpu:  # other models need no torch here, which takes seconds to load
        return on_cpu
    from firth.train.distributed import SINGLE_PROCESS, select_device

    device = select_device(SINGLE_PROCESS, TrainingConfig(device=changes.get("device", "auto")))
    return on_gpu if device.type == "cuda" else on_cpu


def choose_defaults(
    model_config: ModelConfig, checkpoint: Path | None, architecture: str, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields that differ from the model's defaults: those of continued training, and the minutes of a plan."""
    defaults = {} if checkpoint is None else {**continued_defaults(model_config), **next_run_seed(checkpoint)}
    if architecture and not (changes.get("minutes") or changes.get("max_steps") or changes.get("num_train_epochs")):
        say(f"no --minutes, --max-steps or --num-train-epochs: planning for {DEFAULT_PLANNED_MINUTES:g} minutes")
        defaults["minutes"] = DEFAULT_PLANNED_MINUTES
    if checkpoint is not None and "objective" not in changes and (stored := read_stored_objective(checkpoint)):
        defaults["objective"] = stored
        own = update_recipe(pretraining_recipe(model_config), {"objective": stored}).objective
        if own != pretraining_recipe(model_config).objective:
            say(f"objective: {name_objective(own)}, as {checkpoint} was trained with; --objective chooses another")
    return defaults


def check_tokenizer_options(
    tokenizer: str | Path | None, checkpoint: Path | None, data_options: DataOptions, sources: Sequence[str | Path]
) -> None:
    """Raise a UserError where the options ask for another tokenizer than that of the checkpoint."""
    if tokenizer and checkpoint and load_tokenizer(tokenizer).fingerprint != load_tokenizer(checkpoint).fingerprint:
        raise UserError(f"{tokenizer} is not the tokenizer that {checkpoint} was trained with. Leave out --tokenizer.")
    if data_options.add_words:
        check_can_add_words(checkpoint, sources)
    if checkpoint and (data_options.vocab_size or data_options.lowercase):
        raise UserError(f"{checkpoint} keeps its tokenizer. Leave out --vocab-size and --lowercase.")


def check_mix(recipe: Recipe, mixed: Mapping[str, Any], architecture: str) -> None:
    """Raise a UserError where the named sources do not suit the recipe."""
    if mixed and architecture:
        raise UserError(
            f"The size of {architecture} is planned for one text. Name a size for a mix: {architecture}-8x512."
        )
    if recipe.mixing != MixConfig() and not mixed:
        raise UserError("A mix needs several named sources: --data a=a.txt --data b=b.txt.")
    if mixed:  # refuse wrong names before any text is tokenized
        recipe.mixing.row_weights(dict.fromkeys(mixed, 1), dict.fromkeys(mixed, 1))


def read_saved_fields(run: Path, is_planned: bool = False) -> dict[str, Any]:
    """Fields that a resumed run keeps, from the recipe in its folder; empty for a new run.

    A run whose size was planned keeps that too.
    """
    saved = read_yaml_mapping(run / "recipe.yaml") if (run / "recipe.yaml").is_file() else {}
    names = (*KEPT_ON_RESUME_FIELDS, *(PLANNED_FIELDS if is_planned else ()))
    parts = (("model", DROPOUT_FIELDS), ("objective", ("masked_share",)))
    chosen = {
        f"{part}.{name}": saved[part][name]
        for part, fields in parts
        for name in fields
        if isinstance(saved.get(part), Mapping) and name in saved[part]
    }
    kind = dict(saved.get("objective") or {}).get(TYPE_KEY)
    if kind in (MLMAndCLM.__name__, RTDMLMAndCLM.__name__):  # the defaults of a CPU and of a GPU: either may resume it
        chosen = {"objective": saved["objective"], **chosen}
    return {**{name: saved[name] for name in names if name in saved}, **chosen}


def check_can_add_words(checkpoint: Path | None, sources: Sequence[str | Path]) -> None:
    """Raise a UserError where --add-words has no word tokenizer to extend or no text to read."""
    if checkpoint is None:
        raise UserError("--add-words extends the vocabulary of a checkpoint. Leave it out for a new model.")
    if (kind := load_tokenizer(checkpoint).kind) != "word":
        raise UserError(f"--add-words is for word tokenizers; that of {checkpoint} is {kind}. Leave it out.")
    if any(is_shards_folder(Path(source)) for source in sources):
        raise UserError("--add-words needs text: the tokens of shards are fixed. Give --data TEXT.")


def next_run_seed(checkpoint: Path) -> dict[str, int]:
    """The next seed for continued pretraining: with the checkpoint's own seed it would read the same rows again."""
    stored = checkpoint.absolute().parent / "recipe.yaml"
    seed = read_yaml_mapping(stored).get("seed") if stored.is_file() else None
    return {"seed": seed + 1} if isinstance(seed, int) else {}


def with_shards(recipe: Recipe, shards: Mapping[str, str]) -> Recipe:
    """The recipe with the folders of its shards: one, or those of a mix by name."""
    return replace(recipe, data=shards.get("", ""), sources={name: folder for name, folder in shards.items() if name})


def with_chosen_batch(recipe: Recipe, text_tokens: int, elapsed_seconds: float = 0.0) -> Recipe:
    """The recipe with the global batch that suits model, text, time and device, which is said."""
    from firth.train.distributed import SINGLE_PROCESS, select_device

    length, on_gpu = recipe.max_seq_length, select_device(SINGLE_PROCESS, recipe).type == "cuda"
    steps_set, num_devices = recipe.max_steps and not recipe.minutes, launched_devices()
    tokens_read = 0.0 if steps_set else tokens_to_read(recipe, text_tokens, elapsed_seconds)

    def choose(devices: int, tokens: float) -> BatchChoice:
        run_length = {"max_steps": recipe.max_steps} if steps_set else {"tokens_read": tokens}
        return choose_batch(recipe.model, length, text_tokens, on_gpu, devices, **run_length)

    choice = choose(num_devices, tokens_read)
    alone = choose(1, tokens_read / num_devices if recipe.minutes else tokens_read)
    rows = format_count(choice.tokens // length, "row")
    say(f"global batch: {choice.tokens:,} tokens, {rows} of {length} ({choice.reason})")
    if alone.tokens != choice.tokens:
        say(
            f"one process would have a global batch of {alone.tokens:,} tokens: --global-batch-tokens {alone.tokens} "
            f"trains in {num_devices} processes as in one"
        )
    return replace(recipe, global_batch_tokens=choice.tokens)


def adapt_to_passes(recipe: Recipe, text_tokens: int, keeps: Collection[str], elapsed_seconds: float = 0.0) -> Recipe:
    """The recipe with what keeps a model from learning its text by heart, where the run reads it often; it is said."""
    passes = count_passes(recipe, text_tokens, elapsed_seconds)
    new = with_repeated_text(recipe, passes, text_tokens, keeps)
    if new.model != recipe.model:
        say(f"dropout: {new.model.dropout:g}, as the text is read {passes:.0f} times")
    if isinstance(new.objective, MaskedNextToken) and new.objective != recipe.objective:
        say(f"masked rows: {new.objective.masked_share:.0%}, as the text is read {passes:.0f} times")
    return new


def count_passes(recipe: Recipe, text_tokens: int, elapsed_seconds: float = 0.0) -> float:
    """How often a run reads its text. Rows of shards are counted, as a row also has special tokens and padding."""
    if not (recipe.minutes or recipe.max_steps):
        return recipe.num_train_epochs
    if recipe.data or recipe.sources:
        from firth.lab.plan_text import count_rows
        from firth.train.dataloader import open_recipe_shards

        text_tokens = count_rows(recipe, open_recipe_shards(recipe)) * recipe.max_seq_length
    return tokens_to_read(recipe, text_tokens, elapsed_seconds) / max(text_tokens, 1)


def tokens_to_read(recipe: Recipe, text_tokens: int, elapsed_seconds: float = 0.0) -> float:
    """The tokens that a run reads, about: from its steps, its passes, or its minutes at an estimated speed.

    Of the minutes `elapsed_seconds` have gone, for a tokenizer and shards.
    """
    from firth.train.batch_size import global_batch_rows
    from firth.train.distributed import SINGLE_PROCESS, select_device
    from firth.train.resources import estimate_tokens_per_second

    if recipe.minutes:
        from firth.lab.planner import CPU_START_SECONDS, GPU_START_SECONDS
        from firth.train.replan import seconds_to_train

        device = select_device(SINGLE_PROCESS, recipe)
        speed = launched_devices() * estimate_tokens_per_second(recipe.model, recipe.max_seq_length, device)
        start = GPU_START_SECONDS if device.type == "cuda" else CPU_START_SECONDS
        return seconds_to_train(recipe.minutes, elapsed_seconds + start) * speed
    if recipe.max_steps:
        rows = global_batch_rows(recipe, recipe.processes)
        return float(recipe.max_steps * rows * recipe.max_seq_length)
    return recipe.num_train_epochs * text_tokens


def launched_devices() -> int:
    """The processes of this run: those of torchrun, or one."""
    from firth.train.launch_env import read_launch_env

    launched = read_launch_env()
    return launched.world_size if launched is not None else 1


def warn_of_misfit(recipe: Recipe, plan: PretrainPlan, shards: Mapping[str, str]) -> None:
    """Warn about a named model that is much too large or small for its text and its minutes, steps or passes."""
    from firth.lab.planner import describe_misfit

    if recipe.model.recurrent is not None or list(shards) != [""]:
        return
    try:
        message = describe_misfit(recipe, plan.make_planner(open_shards(Path(shards[""]))))
    except UserError:  # no other size takes the user's changes of the model, as a width that its heads do not divide
        return
    if message:
        warn(message)
