"""README.md of a checkpoint: a model card with what is known of it, and places for what only a person knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml

from firth.errors import UserError
from firth.evaluate.export import auto_class
from firth.files import CARD, read_json, write_text
from firth.metrics import summarise
from firth.models import OWN, LMHead, ModelConfig, count_parameters, family_of, read_config
from firth.objectives import Mixture, Objective
from firth.page import cell
from firth.plain import to_plain
from firth.tasks import TASK_FILE, FinetuneRecipe
from firth.tokens import Tokenizer, load_tokenizer
from firth.train import Recipe
from firth.train.recipe import flat

FILL_IN = "*Fill in.*"
PIPELINES = {  # the names under which the Hugging Face hub lists models
    "classify": "text-classification",
    "pair": "text-classification",
    "regress": "text-classification",
    "choice": "multiple-choice",
    "tag": "token-classification",
    "span-qa": "question-answering",
    "embed": "sentence-similarity",
    "text-to-text": "text2text-generation",
    "lm": "text-generation",
    "encoder": "fill-mask",
    "decoder": "text-generation",
    "encoder-decoder": "text2text-generation",
}
USES = {
    "encoder": "filling in masked words, and as a start for fine-tuning on tasks that read text",
    "decoder": "continuing text, and as a start for fine-tuning",
    "encoder-decoder": "restoring hidden spans, and as a start for fine-tuning on tasks that read and write text",
}
RECIPE = (  # what a reader of a card asks first; what is not as usual comes after it
    "objective",
    "checkpoint",
    "from_scratch",
    "seeds",
    "shots",
    "max_steps",
    "max_seq_length",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "warmup_steps",
    "weight_decay",
    "lora_rank",
    "seed",
)
LEFT_OUT = ("shots", "lora_rank")  # where they are 0: all examples, all weights
ELSEWHERE = (  # in other parts of a card, or nothing that the model depends on
    *("output_dir", "task", "train", "dev", "data", "sources", "tokenizer", "model", "baseline"),
    *("logging_steps", "save_steps", "save_total_limit", "async_save"),
    *("train_checksum", "dev_checksum", "shards_checksum"),
)
EMPTY: tuple[Any, ...] = (None, "", {}, [])


class Scores(NamedTuple):
    """What a model scores on some data; of a run with several seeds also their means and deviations."""

    data: str
    metrics: dict[str, Any]
    means: dict[str, tuple[float, float]]


def write_card(checkpoint: str | Path, overwrite: bool = False) -> Path:
    """Write the model card of a checkpoint into its folder; one that is there is left alone unless `overwrite`.

    It is filled from the checkpoint and from the run folder around it (recipe.yaml, source.json, results.json, and
    the results of evaluations). What no file says is left for a person to fill in.
    """
    folder = Path(checkpoint)
    path = folder / CARD
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists already, and may have been edited. Pass --overwrite to write it anew.")
    write_text(path, make_card(folder))
    return path


def make_card(folder: Path) -> str:
    """The card as text."""
    config, run = read_config(folder), folder.absolute().parent
    tokenizer = load_tokenizer(folder)
    facts = found(folder / TASK_FILE)
    recipe = read_recipe(run / "recipe.yaml")
    scores = list(all_scores(folder, recipe))
    sections = {
        "Model": about_model(config, tokenizer, facts),
        "Intended use": about_use(config, facts),
        "Data": about_data(recipe, found(run / "source.json")),
        "Training": about_training(recipe, found(run / "results.json")),
        "Scores": about_scores(scores),
        "Limitations": FILL_IN,
        "Licence": f"{FILL_IN} Say it in `license` at the top of this file too.",
        "How to load": loading(config, tokenizer),
    }
    name = f"{run.name}" if folder.name in ("final", "best") else folder.name
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    found_here = {one.data: one.metrics for one in scores}
    return f"---\n{front_matter(config, tokenizer, facts, name, found_here)}---\n\n# {name}\n\n{body}\n"


def found(path: Path) -> dict[str, Any]:
    """A JSON file, or nothing where there is none."""
    return dict(read_json(path)) if path.is_file() else {}


def read_recipe(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")) or {}) if path.is_file() else {}


def front_matter(
    config: ModelConfig, tokenizer: Tokenizer, facts: Mapping[str, Any], name: str, scores: Mapping[str, Any]
) -> str:
    """What the Hugging Face hub reads. `license` is 'unknown' until somebody says it."""
    own = family_of(config, tokenizer.vocab) == OWN
    task = facts.get("task")
    kind = PIPELINES.get(task or config.shape)
    matter: dict[str, Any] = {
        "license": "unknown",
        "library_name": "firth" if own else "transformers",
        **({"pipeline_tag": kind} if kind and (task or isinstance(config.head, LMHead)) else {}),
        "tags": ["firth", config.family, *([task] if task else [])],
    }
    if kind and scores:
        results = [
            {
                "task": {"type": kind},
                "dataset": {"name": data, "type": data},
                "metrics": [{"type": n, "value": x} for n, x in metrics.items() if isinstance(x, int | float)],
            }
            for data, metrics in scores.items()
        ]
        matter["model-index"] = [{"name": name, "results": results}]
    return yaml.safe_dump(matter, sort_keys=False, allow_unicode=True)


def about_model(config: ModelConfig, tokenizer: Tokenizer, facts: Mapping[str, Any]) -> str:
    rows = {
        "architecture": f"{config.family} ({config.shape})",
        "parameters": count_parameters(config),
        "layers": config.num_layers,
        "width": config.dim,
        "attention heads": config.num_heads,
        "longest text": "no fixed limit" if config.max_length is None else f"{config.max_length:,} tokens",
        "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab.size:,} tokens",
        **({"task": facts["task"]} if "task" in facts else {}),
        **({"labels": ", ".join(facts["labels"])} if facts.get("labels") else {}),
    }
    return as_table(["", ""], rows)


def about_use(config: ModelConfig, facts: Mapping[str, Any]) -> str:
    if "task" in facts:
        return f"The model was fine-tuned for one task, {facts['task']}, on the data below. {FILL_IN}"
    return f"A model of this shape is meant for {USES[config.shape]}. {FILL_IN}"


def about_data(recipe: Mapping[str, Any], source: Mapping[str, Any]) -> str:
    """Which files, as they were named; what is in them only a person knows."""
    rows = {name: recipe[name] for name in ("data", "train", "dev") if recipe.get(name)}
    if source.get("data"):
        rows |= {"text": ", ".join(map(str, source["data"])), "bytes": source.get("bytes")}
    table = as_table(["", ""], {name: value for name, value in rows.items() if value is not None})
    return f"{table}\n\nWhat the data are, in which languages, and under which licence: {FILL_IN}" if rows else FILL_IN


def about_training(recipe: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    rows = {name: recipe[name] for name in RECIPE if recipe.get(name) not in EMPTY}
    rows = {name: value for name, value in rows.items() if value or name not in LEFT_OUT}
    rows |= {name: value for name, value in unusual(recipe).items() if name not in rows}
    if isinstance(rows.get("objective"), Mapping):
        rows["objective"] = rows["objective"].get("kind", "")
    if isinstance(rows.get("max_steps"), int) and rows["max_steps"] < 1:
        del rows["max_steps"]
    rows |= {name: results[name] for name in ("steps", "tokens", "seconds") if results.get(name)}
    return as_table(["", ""], rows) if rows else FILL_IN


def unusual(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe says and its defaults do not."""
    usual: dict[str, Any] = {}
    for field in fields(FinetuneRecipe if "task" in recipe else Recipe):
        if field.name in recipe and field.name not in (*ELSEWHERE, *RECIPE[1:]):
            usual[field.name] = to_plain(field.default if field.default_factory is MISSING else field.default_factory())
    if "objective" in usual:
        usual["objective"] = usual_objective(recipe["objective"])
    before, here = flat(usual), flat({name: recipe[name] for name in usual})
    return {name: value for name, value in here.items() if value != before.get(name) and value not in EMPTY}


def usual_objective(plain: Any) -> Any:
    """The objective of the same kind as nobody has changed it; as it is where there is no such thing."""
    kinds = {kind.__name__: kind for kind in get_args(Objective) if kind is not Mixture}  # which has parts of one's own
    name = plain.get("kind") if isinstance(plain, Mapping) else None
    return {"kind": name, **to_plain(kinds[name]())} if name in kinds else plain


def all_scores(folder: Path, recipe: Mapping[str, Any]) -> Iterator[Scores]:
    """The scores of a model in its run, and in every evaluation of it there, by the name of the data."""
    run, seen = folder.absolute().parent, set[str]()
    results = found(run / "results.json")
    if "metric" in results:
        own, broken = results["scores"][results["best_seed"]], results.get("diverged", ())
        each = [scores for i, scores in enumerate(results["scores"]) if i not in broken]
        names = dict.fromkeys([results["metric"], *own])
        known = [n for n in names if all(s.get(n) is not None for s in each)]  # which some seed may have no number for
        means = {n: summarise([s[n] for s in each]) for n in known if len(each) > 1}
        here = {n: own[n] for n in names if own.get(n) is not None}
        yield Scores(Path(str(recipe.get("dev", "dev"))).name, here, means)
    elif results.get("eval_loss") is not None:
        yield Scores("held-out documents", {"eval_loss": results["eval_loss"]}, {})
    for path in sorted(run.glob("evaluate-*/results.json")):
        other = found(path)
        if other.get("metrics") and Path(other.get("checkpoint", folder)).name == folder.name:
            here = {name: x for name, x in other["metrics"].items() if x is not None}
            data = Path(str(other.get("data", path.parent.name))).name
            yield Scores(f"{data} ({path.parent.name})" if data in seen else data, here, {})
            seen.add(data)


def about_scores(scores: Sequence[Scores]) -> str:
    if not scores:
        return f"Not evaluated yet. {FILL_IN}"
    several = any(one.means for one in scores)
    columns = ["data", "metric", "score", *(["mean of the seeds", "deviation"] if several else [])]
    rows = [
        (one.data, name, x, *(one.means.get(name, ("", "")) if several else ()))
        for one in scores
        for name, x in one.metrics.items()
        if x is not None
    ]
    table = "\n".join([line(columns), "| --- | --- |" + " ---: |" * (len(columns) - 2), *(line(row) for row in rows)])
    note = "This is the model of the seed that was best on dev: what to expect of another is the mean.\n\n"
    return (note if several else "") + table


def loading(config: ModelConfig, tokenizer: Tokenizer) -> str:
    ours = "import firth\n\nmodel = firth.load(FOLDER)"
    kind = auto_class(config)
    theirs = f"from transformers import {kind}, AutoTokenizer\n\nmodel = {kind}.from_pretrained(FOLDER)"
    own = family_of(config, tokenizer.vocab) == OWN
    blocks = [ours] if own else [ours, f"{theirs}\ntokenizer = AutoTokenizer.from_pretrained(FOLDER)"]
    return "\n\n".join(f"```python\n{block}\n```" for block in blocks)


def as_table(columns: list[str], rows: Mapping[str, Any]) -> str:
    return "\n".join([line(columns), "| --- " * len(columns) + "|", *(line(pair) for pair in rows.items())])


def line(cells: Any) -> str:
    """
    >>> line(["a|b", 1234])
    '| a\\\\|b | 1,234 |'
    """
    return "| " + " | ".join(cell(value).replace("|", "\\|").replace("\n", " ") for value in cells) + " |"
