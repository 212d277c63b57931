"""Intermediate training: fine-tune on a large task first, then on the target (STILTs, Phang et al. 2018).

    firth finetune bert/final --task pair --train mnli.jsonl --dev mnli-dev.jsonl --output-dir mnli
    firth finetune bert/final --from mnli --task pair --train rte.jsonl --dev rte-dev.jsonl --output-dir rte

The second run keeps the backbone of the first. Its head is new, unless task and labels are the same. task.json of each
fine-tuned checkpoint lists the runs that led to it, the links of its chain, so that the list travels with the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from firth.core.errors import UserError
from firth.core.files import replace_nonfinite
from firth.metrics import format_metric
from firth.models import ModelConfig, read_config
from firth.tasks.recipe import FinetuneRecipe, read_task_file
from firth.tokens import load_tokenizer


def resolve_intermediate(checkpoint: str | Path, finetuned: str | Path) -> Path:
    """Return the folder of a fine-tuned checkpoint that starts the next run; a run's folder stands for its final/.

    Raise a UserError if it is not a fine-tuned `checkpoint`: another architecture, or another tokenizer.
    """
    folder = Path(finetuned)
    if not (folder / "config.json").is_file() and (folder / "final").is_dir():
        folder = folder / "final"
    config, base = read_config(folder), read_config(checkpoint)
    if not read_task_file(folder):
        raise UserError(f"--from {finetuned} was not fine-tuned: give it as CHECKPOINT, without --from.")
    different = [
        name
        for name in ("family", "architecture", "num_layers", "dim", "num_heads")
        if getattr(config, name) != getattr(base, name)
    ]
    if different:
        name = different[0]
        raise UserError(
            f"--from {finetuned} is not a fine-tuned {checkpoint}: {name} is {getattr(config, name)} there and "
            f"{getattr(base, name)} here. Give the fine-tuned checkpoint as CHECKPOINT, without --from."
        )
    words, base_words = (set(load_tokenizer(path).backend.get_vocab()) for path in (folder, checkpoint))
    if not base_words <= words:  # a task may have added tokens
        raise UserError(
            f"--from {finetuned} has another tokenizer than {checkpoint}: it is not a fine-tuned one of it."
        )
    return folder


def read_chain(checkpoint: str | Path) -> list[dict[str, Any]]:
    """Return the links of a checkpoint's chain; empty for a pretrained one."""
    facts = read_task_file(Path(checkpoint))
    return list(facts.get("chain") or ([{"task": facts["task"]}] if facts else []))


def extend_chain(recipe: FinetuneRecipe, keeps_head: bool, metric: str, score: float) -> list[dict[str, Any]]:
    """Return the chain of a run's model: the links of its start, and its own."""
    if recipe.from_scratch:
        earlier, start = [], "random weights"
    else:
        earlier, start = read_chain(recipe.checkpoint), recipe.checkpoint
    link = {"checkpoint": start, "task": recipe.task, "train": recipe.train, "head": "kept" if keeps_head else "new"}
    link |= {"teacher": recipe.teacher} if recipe.teacher else {}
    found: list[dict[str, Any]] = replace_nonfinite([*earlier, link | {"metric": metric, "score": score}])
    return found


def describe_chain(chain: Sequence[Mapping[str, Any]]) -> str:
    """
    >>> links = [{"checkpoint": "bert", "task": "pair", "train": "mnli.csv", "metric": "accuracy", "score": 0.8}]
    >>> describe_chain([*links, {"checkpoint": "mnli/final", "task": "pair", "train": "rte.csv"}])
    'bert -> pair on mnli.csv (accuracy 80.0) -> pair on rte.csv'
    """
    parts = [str(chain[0].get("checkpoint", "a checkpoint"))] if chain else []
    for link in chain:
        score = link.get("score")
        scored = f" ({link['metric']} {format_metric(link['metric'], score)})" if score is not None else ""
        parts.append(link["task"] + (f" on {link['train']}" if link.get("train") else "") + scored)
    return " -> ".join(parts)


def describe_start(config: ModelConfig, recipe: FinetuneRecipe) -> list[str]:
    """Notice: which weights of a fine-tuned checkpoint are taken."""
    chain = read_chain(recipe.checkpoint)
    if not chain or recipe.from_scratch:
        return []
    layers = config.num_layers + (config.decoder_layers if config.has_decoder else 0)
    return [
        f"the chain so far: {describe_chain(chain)}",
        f"the embeddings and all {layers} layers are those of {recipe.checkpoint}",
    ]
