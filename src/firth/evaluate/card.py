"""README.md of a checkpoint: a model card (Mitchell et al. 2019).

Facts come from the checkpoint and its run folder; sections that need a person (licence, limitations) say "Fill in".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml

from firth.core.console import escape_controls
from firth.core.errors import UserError
from firth.core.files import MODEL_CARD_FILE, read_object, read_yaml, write_text
from firth.core.html import format_cell
from firth.core.serialization import to_dict
from firth.evaluate.export import encoder_without_generator, hf_auto_class
from firth.metrics import format_metric, mean_and_std
from firth.models import FIRTH_MODEL_TYPE, LMHead, ModelConfig, count_parameters, hf_model_type, read_config
from firth.models.config import TaskHead
from firth.objectives import Mixture, Objective
from firth.objectives.registry import name_stored_objective
from firth.tasks import FinetuneRecipe
from firth.tasks.chain import describe_chain
from firth.tasks.recipe import read_task_file
from firth.tokens import Tokenizer, load_tokenizer
from firth.train import Recipe
from firth.train.recipe import flatten_mapping

MARKDOWN_SYNTAX = re.compile(r"[\\`*\[\]<>|~&$#@]|:(?=//)|(?<=www)\.|(?<!\w)_|_(?!\w)")  # _ inside of a word is none
FILL_IN_PLACEHOLDER = "*Fill in.*"
PIPELINE_TAGS = {  # task names of the Hugging Face hub
    "classify": "text-classification",
    "pair": "text-classification",
    "regress": "text-classification",
    "reward": "text-classification",
    "choice": "multiple-choice",
    "tag": "token-classification",
    "span-qa": "question-answering",
    "embed": "sentence-similarity",
    "text-to-text": "text2text-generation",
    "extract": "text2text-generation",
    "lm": "text-generation",
    "encoder": "fill-mask",
    "decoder": "text-generation",
    "encoder-decoder": "text2text-generation",
}
INTENDED_USES = {
    "encoder": "filling in masked words, and fine-tuning on tasks that classify, tag or embed text",
    "decoder": "continuing text, and fine-tuning",
    "encoder-decoder": "restoring masked spans, and fine-tuning on text-to-text tasks",
}
WORD_VECTOR_USE = (
    "finding similar words and analogies, and fine-tuning a bag of words",
    'firth.embed(FOLDER, ["word"])',
)
STATIC_USES = {  # the use of a model, and a line of Python
    "word2vec": WORD_VECTOR_USE,
    "glove": WORD_VECTOR_USE,
    "ngram": ("a baseline of perplexity, and generating text", 'firth.generate(FOLDER, "The", temperature=0.8)'),
}
MAIN_RECIPE_FIELDS = (  # always in the card, in this order; other fields if they are not the default
    "objective",
    "checkpoint",
    "from_scratch",
    "seeds",
    "shots",
    "max_steps",
    "max_seq_length",
    "global_batch_tokens",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "warmup_steps",
    "weight_decay",
    "lora_rank",
    "seed",
)
OMITTED_IF_ZERO_FIELDS = ("shots", "lora_rank", "global_batch_tokens")  # 0: all examples, all weights, set by rows
OMITTED_RECIPE_FIELDS = (  # in other sections of the card, or without effect on the model
    *("output_dir", "task", "train", "dev", "data", "sources", "tokenizer", "model", "baseline"),
    *("logging_steps", "save_steps", "save_total_limit", "async_save", "samples", "report_to", "push_to_hub", "public"),
    *("train_checksum", "dev_checksum", "shards_checksum"),
)
EMPTY_VALUES: tuple[Any, ...] = (None, "", {}, [])


class CardScores(NamedTuple):
    """Scores of a model on one file; for several seeds also (mean, standard deviation) of each metric."""

    data: str
    metrics: dict[str, Any]
    means: dict[str, tuple[float, float]]


def write_model_card(checkpoint: str | Path, overwrite: bool = False) -> Path:
    """Write the model card of a checkpoint into its folder; an existing one is refused unless `overwrite`.

    Its facts come from the checkpoint and from the run folder around it (recipe.yaml, source.json, results.json and the
    results of evaluations).
    """
    folder = Path(checkpoint)
    path = folder / MODEL_CARD_FILE
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists already, and may have been edited. Pass overwrite=True to replace it.")
    write_text(path, render_model_card(folder))
    return path


def write_static_card(run: Path, name: str, results: Mapping[str, Any]) -> Path:
    """Write the model card of word2vec, GloVe or an n-gram model to final/, unless there is one."""
    path = run / "final" / MODEL_CARD_FILE
    if path.exists():  # it may have been edited
        return path
    recipe, tokenizer = read_recipe_yaml(run / "recipe.yaml"), load_tokenizer(run / "final")
    size = {"words": results["words"]} if "words" in results else {"n-grams": sum(results["ngrams"])}
    size |= {"tokenizer": f"{tokenizer.kind}, {tokenizer.vocab.size:,} tokens"}
    settings = {field: x for field, x in recipe.items() if field not in OMITTED_RECIPE_FIELDS and x not in EMPTY_VALUES}
    facts = {field: results[field] for field in ("steps", "tokens", "seconds") if results.get(field)}
    metrics = {field: results[field] for field in ("eval_loss", "unigram_entropy") if results.get(field) is not None}
    use, code = STATIC_USES[name]
    sections = {
        "Model": markdown_table(["", ""], {"model": name, "parameters": results["parameters"], **size}),
        "Intended use": f"This model is meant for {use}. {FILL_IN_PLACEHOLDER}",
        "Data": data_section(recipe, read_if_present(run / "source.json", SourceFile)),
        "Training": markdown_table(["", ""], settings | facts),
        "Scores": scores_section([CardScores("held-out documents", metrics, {})] if metrics else []),
        "Limitations": FILL_IN_PLACEHOLDER,
        "Licence": f"{FILL_IN_PLACEHOLDER} Also set `license` at the top of this file.",
        "How to load": f"```python\nimport firth\n\n{code}\n```",
    }
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    matter = yaml.safe_dump({"license": "unknown", "library_name": "firth", "tags": ["firth", name]}, sort_keys=False)
    write_text(path, f"---\n{matter}---\n\n# {run.absolute().name}\n\n{body}\n")
    return path


def render_model_card(folder: Path, repo: str = "") -> str:
    """The card as Markdown. With `repo` it says how to load the model from the Hugging Face Hub."""
    config, run = read_config(folder), folder.absolute().parent
    tokenizer = load_tokenizer(folder)
    facts = read_task_file(folder)
    recipe = read_recipe_yaml(run / "recipe.yaml")
    scores = list(collect_scores(folder, recipe))
    results = read_if_present(run / "results.json", RunResultsFile)
    sections = {
        "Model": model_section(config, tokenizer, facts),
        "Intended use": intended_use_section(config, facts),
        "Data": data_section(recipe, read_if_present(run / "source.json", SourceFile)),
        "Training": training_section(recipe, results, facts),
        "Scores": scores_section(scores),
        "Limitations": limitations_section(config, results, facts),
        "Licence": f"{FILL_IN_PLACEHOLDER} Also set `license` at the top of this file.",
        "How to load": loading_section(config, tokenizer, repo),
    }
    name = one_line(run.name if folder.name in ("final", "best") else folder.name)
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    metrics = {one_line(one.data): one.metrics for one in scores}
    return f"---\n{front_matter(config, tokenizer, facts, name, metrics)}---\n\n# {escape_markdown(name)}\n\n{body}\n"


@dataclass(frozen=True)
class RunResultsFile:
    """The keys of a results.json that the card shows."""

    allow_unknown_keys = True

    metric: str | None = None
    scores: tuple[dict[str, float | None], ...] | dict[str, Any] = ()  # of each seed, or of one
    best_seed: int = 0
    diverged: tuple[int, ...] = ()
    metrics: dict[str, Any] | None = None
    checkpoint: str | None = None
    steps: Any = None
    best_step: int | None = None
    mix: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class SourceFile:
    """The keys of a source.json that the card shows."""

    allow_unknown_keys = True

    data: tuple[str, ...] = ()
    bytes: int | None = None


def read_if_present(path: Path, schema: type) -> dict[str, Any]:
    """The object in a JSON file; empty without the file."""
    return read_object(path, schema) if path.is_file() else {}


def read_recipe_yaml(path: Path) -> dict[str, Any]:
    return dict(read_yaml(path) or {}) if path.is_file() else {}


def front_matter(
    config: ModelConfig, tokenizer: Tokenizer, task_metadata: Mapping[str, Any], name: str, scores: Mapping[str, Any]
) -> str:
    """YAML metadata for the Hugging Face hub, with `license: unknown`."""
    own = hf_model_type(config, tokenizer.vocab) == FIRTH_MODEL_TYPE
    task = task_metadata.get("task")
    kind = PIPELINE_TAGS.get(task or config.architecture)
    matter: dict[str, Any] = {
        "license": "unknown",
        "library_name": "firth" if own else "transformers",
        **({"pipeline_tag": kind} if kind and (task or isinstance(config.head, LMHead)) else {}),
        "tags": ["firth", config.family, *([one_line(task)] if task else [])],
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


def model_section(config: ModelConfig, tokenizer: Tokenizer, task_metadata: Mapping[str, Any]) -> str:
    rows = {
        "architecture": f"{config.family} ({config.architecture})",
        "parameters": count_parameters(config),
        "layers": config.num_layers,
        "width": config.dim,
        "attention heads": config.num_heads,
        "maximum length": "no fixed limit" if config.max_length is None else f"{config.max_length:,} tokens",
        "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab.size:,} tokens",
        **({"task": task_metadata["task"]} if "task" in task_metadata else {}),
        **({"labels": ", ".join(task_metadata["labels"])} if task_metadata.get("labels") else {}),
    }
    return markdown_table(["", ""], rows)


def intended_use_section(config: ModelConfig, task_metadata: Mapping[str, Any]) -> str:
    if "tasks" in task_metadata:
        names = ", ".join(
            f"{name} ({t['task']}" + (f", prefix {t['prefix']!r})" if t.get("prefix") else ")")
            for name, t in task_metadata["tasks"].items()
        )
        shown = escape_markdown(names)
        return f"The model was fine-tuned for several tasks, {shown}, on the data below. {FILL_IN_PLACEHOLDER}"
    if "task" in task_metadata:
        task = escape_markdown(task_metadata["task"])
        return f"The model was fine-tuned for one task, {task}, on the data below. {FILL_IN_PLACEHOLDER}"
    return f"This {config.architecture} is meant for {INTENDED_USES[config.architecture]}. {FILL_IN_PLACEHOLDER}"


def data_section(recipe: Mapping[str, Any], source: Mapping[str, Any]) -> str:
    """The files of the run; their description is left to a person."""
    rows = {name: recipe[name] for name in ("data", "train", "dev") if recipe.get(name)}
    if source.get("data"):
        rows |= {"text": ", ".join(map(str, source["data"])), "bytes": source.get("bytes")}
    table = markdown_table(["", ""], {name: value for name, value in rows.items() if value is not None})
    return (
        f"{table}\n\nDescription, languages and licence of the data: {FILL_IN_PLACEHOLDER}"
        if rows
        else FILL_IN_PLACEHOLDER
    )


def training_section(recipe: Mapping[str, Any], results: Mapping[str, Any], task_metadata: Mapping[str, Any]) -> str:
    rows = {name: recipe[name] for name in MAIN_RECIPE_FIELDS if recipe.get(name) not in EMPTY_VALUES}
    rows = {name: value for name, value in rows.items() if value or name not in OMITTED_IF_ZERO_FIELDS}
    rows |= {name: value for name, value in non_default_fields(recipe).items() if name not in rows}
    if isinstance(rows.get("objective"), Mapping):
        rows["objective"] = name_stored_objective(rows["objective"])
    if isinstance(rows.get("max_steps"), int) and rows["max_steps"] < 1:
        del rows["max_steps"]
    rows |= {
        name: results[name] for name in ("steps", "tokens", "words_seen", "passes", "seconds") if results.get(name)
    }
    if results.get("best_step"):
        rows["weights of step"] = results["best_step"]
    if len(task_metadata.get("chain", ())) > 1:
        rows["chain"] = describe_chain(task_metadata["chain"])
    return markdown_table(["", ""], rows) if rows else FILL_IN_PLACEHOLDER


def limitations_section(config: ModelConfig, results: Mapping[str, Any], task_metadata: Mapping[str, Any]) -> str:
    """What is known to limit the model; what only a person can know is left to one."""
    sentences = []
    words, steps, best = (results.get(name) for name in ("words_seen", "steps", "best_step"))
    if isinstance(words, int):
        about = ""
        if best and isinstance(steps, int) and best < steps:
            about, words = "about ", round(words * best / steps)
        sentences.append(
            f"The model has read {about}{words:,} words of the data above. It knows no other language, domain "
            "or fact than they hold, and repeats their errors and prejudices, which were not measured."
        )
    if config.has_decoder or config.architecture == "decoder":
        sentences.append("It can write false statements, and sentences of its training text word for word.")
    if config.max_length is not None:
        sentences.append(f"It reads at most {config.max_length:,} tokens at once.")
    if task_metadata:
        sentences.append("Its scores on dev have also chosen the step and the seed: expect less on other text.")
    return " ".join([*sentences, FILL_IN_PLACEHOLDER])


def non_default_fields(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a recipe that differ from their defaults, by dotted names."""
    defaults: dict[str, Any] = {}
    for field in fields(FinetuneRecipe if "task" in recipe else Recipe):
        if field.name in recipe and field.name not in (*OMITTED_RECIPE_FIELDS, *MAIN_RECIPE_FIELDS[1:]):
            defaults[field.name] = to_dict(
                field.default if field.default_factory is MISSING else field.default_factory()
            )
    if "objective" in defaults:
        defaults["objective"] = objective_with_defaults(recipe["objective"])
    flat, values = flatten_mapping(defaults), flatten_mapping({name: recipe[name] for name in defaults})
    return {name: value for name, value in values.items() if value != flat.get(name) and value not in EMPTY_VALUES}


def objective_with_defaults(objective_dict: Any) -> Any:
    """The defaults of an objective of this kind; a mixture, which has none, is returned unchanged."""
    kinds = {kind.__name__: kind for kind in get_args(Objective) if kind is not Mixture}
    name = objective_dict.get("kind") if isinstance(objective_dict, Mapping) else None
    return {"kind": name, **to_dict(kinds[name]())} if name in kinds else objective_dict


def collect_scores(folder: Path, recipe: Mapping[str, Any]) -> Iterator[CardScores]:
    """Yield the scores of a model from its run, and from every evaluation in its run folder."""
    run, seen = folder.absolute().parent, set[str]()
    results = read_if_present(run / "results.json", RunResultsFile)
    scores_of_seeds = results["scores"] if isinstance(results.get("scores"), list) else []
    if "metric" in results and 0 <= results.get("best_seed", 0) < len(scores_of_seeds):
        best, diverged = scores_of_seeds[results.get("best_seed", 0)], results.get("diverged", ())
        seeds = [scores for i, scores in enumerate(scores_of_seeds) if i not in diverged]
        names = dict.fromkeys([results["metric"], *best])
        complete = [n for n in names if all(scores.get(n) is not None for scores in seeds)]
        means = {n: mean_and_std([scores[n] for scores in seeds]) for n in complete if len(seeds) > 1}
        metrics = {n: best[n] for n in names if best.get(n) is not None}
        yield CardScores(Path(str(recipe.get("dev", "dev"))).name, metrics, means)
    elif results.get("eval_loss") is not None:
        yield CardScores("held-out documents", held_out_scores(results), {})
        for source in results.get("mix", ()):
            yield CardScores(f"held-out documents of {source['source']}", held_out_scores(source), {})
    for path in sorted(run.glob("evaluate-*/results.json")):
        result = read_if_present(path, RunResultsFile)
        if result.get("metrics") and Path(result.get("checkpoint", folder)).name == folder.name:
            metrics = {name: x for name, x in result["metrics"].items() if x is not None}
            data = Path(str(result.get("data", path.parent.name))).name
            yield CardScores(f"{data} ({path.parent.name})" if data in seen else data, metrics, {})
            seen.add(data)


def held_out_scores(results: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in results.items() if name.startswith("eval_")}


def scores_section(scores: Sequence[CardScores]) -> str:
    if not scores:
        return f"Not evaluated yet. {FILL_IN_PLACEHOLDER}"
    several = any(one.means for one in scores)
    columns = ["data", "metric", "score", *(["mean of seeds", "standard deviation"] if several else [])]
    rows = []
    for one in scores:
        for name, x in one.metrics.items():
            values = [x, *(one.means.get(name, (None, None)) if several else ())]
            if x is not None:
                rows.append((one.data, name, *(format_metric(name, value) for value in values)))
    table = "\n".join(
        [markdown_row(columns), "| --- | --- |" + " ---: |" * (len(columns) - 2), *(markdown_row(row) for row in rows)]
    )
    note = "This model is the best seed on dev; the mean is what to expect of another seed.\n\n"
    return (note if several else "") + table


def loading_section(config: ModelConfig, tokenizer: Tokenizer, repo: str = "") -> str:
    is_tuned = isinstance(config.head, TaskHead)
    folder, source = ("folder", repr(repo)) if repo else ("FOLDER", "FOLDER")
    download = (
        f"from huggingface_hub import snapshot_download\n\nfolder = snapshot_download({source})\n" if repo else "\n"
    )
    use = f"predictions = firth.predict({folder}, inputs)" if is_tuned else f"model = firth.load({folder})"
    blocks = [f"import firth\n{download}{use}"]
    if hf_model_type(config, tokenizer.vocab) != FIRTH_MODEL_TYPE:
        kind = hf_auto_class(config)
        blocks.append(
            f"from transformers import {kind}, AutoTokenizer\n\nmodel = {kind}.from_pretrained({source})\n"
            f"tokenizer = AutoTokenizer.from_pretrained({source})"
        )
    notes = ["Branches such as `step-1000` have the checkpoints of the training: pass `revision`."] if repo else []
    blocks = [f"```python\n{block}\n```" for block in blocks]
    return "\n\n".join([*blocks, *notes, *loading_notes(config, tokenizer)])


def loading_notes(config: ModelConfig, tokenizer: Tokenizer) -> list[str]:
    """What `transformers` lacks of this model."""
    if hf_model_type(config, tokenizer.vocab) != FIRTH_MODEL_TYPE:
        decoder = (
            "`transformers` has no enhanced mask decoder. It computes the logits of the backbone and the LM head, as "
            "`firth export --check` compares them; `firth fill` uses the decoder, so its logits at masks differ."
        )
        return [decoder] if config.get_extra("decoder") is not None else []
    if encoder_without_generator(config) is not None:
        return ["`transformers` has no such model with a generator. `firth export` writes its encoder for `AutoModel`."]
    return ["No family of `transformers` describes this model. After `import firth.hf`, Auto classes run Firth's code."]


def markdown_table(columns: list[str], rows: Mapping[str, Any]) -> str:
    return "\n".join(
        [markdown_row(columns), "| --- " * len(columns) + "|", *(markdown_row(pair) for pair in rows.items())]
    )


def markdown_row(cells: Any) -> str:
    """
    >>> markdown_row(["a|b", 1234])
    '| a\\\\|b | 1,234 |'
    """
    return "| " + " | ".join(escape_markdown(format_cell(value)) for value in cells) + " |"


def one_line(text: str) -> str:
    """Return a text on one line, with its control characters visible."""
    return " ".join(escape_controls(text).split())


def escape_markdown(text: str) -> str:
    r"""Return a text that Markdown shows as it is: no link, image, HTML or emphasis, and no line or cell ends in it.

    Labels, file names and settings come from a person's data, and hubs render the card.

    >>> print(escape_markdown("[a](http://b) <img> **c** d_e_f"))
    \[a\](http\://b) \<img\> \*\*c\*\* d_e_f
    """
    return MARKDOWN_SYNTAX.sub(r"\\\g<0>", one_line(text))
