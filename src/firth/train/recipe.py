"""Recipe: everything a run depends on, as one plain file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from firth.errors import UserError, nearest
from firth.files import write_text
from firth.models import Distillation, LMHead, ModelConfig
from firth.objectives import NAMED, Objective
from firth.plain import from_plain, to_plain

R = TypeVar("R", bound="Training")
LONGEST_ROW = 2**16  # places in a row are sorted as numbers of 16 bits


def option(default: Any, help: str, shown: str | None = None) -> Any:
    """A field that every run has, with the words that `--help` shows for it and, where they differ, its default."""
    return field(default=default, metadata={"help": help, "default": str(default) if shown is None else shown})


@dataclass(frozen=True, kw_only=True)
class Training:
    """What pretraining and fine-tuning have in common, under the names that Hugging Face uses."""

    output_dir: str = option("", "Folder of the run. An existing one is refused unless --resume or --overwrite.")
    max_steps: int = option(0, "Optimizer steps; 0 counts them from --num-train-epochs.")
    num_train_epochs: float = option(3.0, "How often the text is read, when --max-steps is not given.")
    minutes: float = option(
        0.0, "Plan the run to end after so many minutes: some steps are timed, then max_steps is fixed."
    )
    max_seq_length: int = option(128, "Tokens in a row.")
    per_device_train_batch_size: int = option(32, "Rows that are computed at once.")
    gradient_accumulation_steps: int = option(1, "How many of these make one optimizer step.")
    learning_rate: float = option(1e-3, "The highest rate, reached after the warm-up.", shown="by the model's width")
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = option(
        "linear", "How the rate falls after the warm-up."
    )
    warmup_steps: int = option(-1, "Steps over which the rate rises; -1 takes a tenth of the run.")
    weight_decay: float = option(0.01, "AdamW's weight decay, on matrices only.")
    adam_beta1: float = option(0.9, "AdamW's first decay rate.")
    adam_beta2: float = option(0.98, "AdamW's second decay rate.")
    adam_epsilon: float = option(1e-6, "AdamW's epsilon.")
    max_grad_norm: float = option(1.0, "Gradients longer than this are cut; 0 leaves them.")
    eval_steps: int = option(
        0, "Evaluate every so many steps; 0 takes a tenth of the run (pretraining). Always at the end."
    )
    save_steps: int = option(500, "Write a checkpoint every so many steps.")
    save_total_limit: int = option(2, "Keep so many checkpoints; 0 keeps all.")
    logging_steps: int = option(1, "Write a line to log.jsonl every so many steps.")
    seed: int = option(0, "Decides the order of the text, the noise, the first weights and the dropout.")
    gradient_checkpointing: bool = option(
        False, "Compute each layer again in the backward pass: a third slower, and room for much longer rows."
    )
    bf16: bool | None = option(None, "Compute in bfloat16; by itself on a GPU that can, never by itself on a CPU.")
    compile: bool | None = option(None, "Compile the step (torch.compile); by itself on a GPU.")

    @property
    def global_batch(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def check(self) -> None:
        """Refuse numbers that make no sense before anything is computed."""
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), float) and not math.isfinite(value):
                raise UserError(f"{f.name} is {value}, and must be a finite number.")
        at_least = {
            "max_seq_length": 4,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "save_steps": 1,
            "logging_steps": 1,
            "max_steps": 0,
            "eval_steps": 0,
            "save_total_limit": 0,
            "seed": 0,
            "minutes": 0,
            "learning_rate": 0,
            "weight_decay": 0,
            "adam_beta1": 0,
            "adam_beta2": 0,
            "adam_epsilon": 0,
            "max_grad_norm": 0,
        }
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}, and must be at least {least}.")
        for name in ("adam_beta1", "adam_beta2"):
            if getattr(self, name) >= 1:
                raise UserError(f"{name} is {getattr(self, name)}, and must be less than 1.")
        if self.max_seq_length > LONGEST_ROW:
            raise UserError(f"max_seq_length is {self.max_seq_length:,}, and rows have at most {LONGEST_ROW:,} tokens.")
        if self.seed >= 2**63:
            raise UserError(f"seed is {self.seed}, and must be less than 2 to the power of 63.")
        if not self.max_steps and not self.minutes and self.num_train_epochs <= 0:
            raise UserError("num_train_epochs must be more than 0 when neither max_steps nor minutes is given.")


@dataclass(frozen=True, kw_only=True)
class Recipe(Training):
    """A pretraining run. `model` and `objective` are complete: nothing is looked up elsewhere."""

    model: ModelConfig
    objective: Objective
    data: str = option("", "Folder of token shards.")
    tokenizer: str = option("", "Fingerprint of the tokenizer that the shards were made with.")
    checkpoint: str = option("", "Checkpoint whose weights the run starts from; empty starts fresh.")
    teacher: str = option("", "Checkpoint to learn from, whose layers the model also begins with (distillation).")
    distillation: Distillation = field(default_factory=Distillation)
    warm_start: Literal["none", "ppmi"] = option(
        "none", "ppmi begins with embeddings that know which tokens keep company, counted in the whole text."
    )
    eval_rows: int = option(256, "At most so many held-out rows are read at an evaluation.")

    def check(self) -> None:
        """Also what can be wrong between model, objective and length."""
        super().check()
        model, objective = self.model, self.objective
        if self.eval_rows < 1:
            raise UserError(f"eval_rows is {self.eval_rows}, and must be at least 1.")
        if wrong := model.problems():
            raise UserError("; ".join(wrong) + ".")
        if model.shape not in objective.shapes:
            name, wanted = type(objective).__name__, " or ".join(objective.shapes)
            others = ", ".join(n for n, o in NAMED.items() if model.shape in o.shapes)
            raise UserError(
                f"{name} is for the shape {wanted}; {model.family} has the shape {model.shape}. "
                f"Take such a model, or one of these objectives: {others}."
            )
        if not isinstance(model.head, LMHead):
            raise UserError("This checkpoint has a classifier's head: pretraining goes on from a language model.")
        if model.max_length is not None and self.max_seq_length > model.max_length:
            raise UserError(
                f"--max-seq-length {self.max_seq_length} is longer than the model's {model.max_length} places. "
                "Shorten the rows, or give a new model more places with model.position.length."
            )


def save_recipe(recipe: Training, path: Path) -> None:
    write_text(path, yaml.safe_dump(to_plain(recipe), sort_keys=False, allow_unicode=True))


def load_recipe(path: Path, kind: type[R]) -> R:
    return from_plain(read_yaml(path), kind, str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(e).split())}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected lines of `key: value`.")
    return value


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`model.num_layers=6` after the options, as {"model.num_layers": 6}.

    >>> parse_overrides(["model.num_layers=6", "learning_rate=1e-3"])
    {'model.num_layers': 6, 'learning_rate': '1e-3'}
    """
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            hint = f" Name each file with its own option: --data {word}." if Path(word).exists() else ""
            raise UserError(f"{word!r} is not key=value.{hint}")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(f"{word!r}: {value!r} is neither a number nor a word nor true or false.") from None
    return found


def override(recipe: R, changes: Mapping[str, Any]) -> R:
    """The recipe with some fields set, by dotted names; an unknown name is an error that names the nearest."""
    plain = to_plain(recipe)
    for key, value in changes.items():
        *path, last = key.split(".")
        place = plain
        free = path and isinstance(getattr(recipe, path[0], None), dict)  # a field whose keys are the user's own
        for depth, name in enumerate([*path, last]):
            if not isinstance(place, dict) or (name not in place and not (free and depth == 1)):
                known = place if isinstance(place, dict) else {}
                above = ".".join(key.split(".")[:depth])
                raise UserError(f"Unknown key {key!r}. " + nearest(name, known) + (f" (in {above})" if above else ""))
            if depth < len(path):
                place = place[name]
        place[last] = value
    return from_plain(plain, type(recipe), "recipe")


def differences(old: Training, new: Training) -> list[str]:
    """What is not the same in two recipes, as `key: old -> new`."""
    a, b = _flat(to_plain(old)), _flat(to_plain(new))
    return [f"{k}: {a.get(k)} -> {b.get(k)}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]


def _flat(plain: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(plain, dict):
        return {prefix.rstrip("."): plain}
    return {k: v for key, value in plain.items() for k, v in _flat(value, f"{prefix}{key}.").items()}
