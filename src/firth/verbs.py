"""The verbs as plain functions: what the command line does, callable from Python."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from firth.console import say
from firth.errors import UserError, nearest
from firth.evaluate import evaluate as evaluate_checkpoint
from firth.evaluate import largest_difference
from firth.files import damage, fresh_folder, read_json, whole_folder, write_json
from firth.generate import Blank
from firth.generate import fill as fill_blanks
from firth.generate import generate as generate_texts
from firth.lab.quickstart import quickstart as quickstart
from firth.models import (
    PRESETS,
    Model,
    ModelConfig,
    count_parameters,
    from_hf_config,
    load_model,
    preset,
    read_config,
)
from firth.objectives import CLM, DEFAULT, MLM, Objective, SpanCorruption
from firth.recipes import TOKENIZERS, finetuning, pretraining, vocabulary_size
from firth.tasks import FinetuneRecipe
from firth.tasks import finetune as run_finetune
from firth.text import HELD_OUT, Corpus
from firth.tokens import Tokenizer, is_shards, load_tokenizer, open_shards, train_tokenizer
from firth.tokens import prepare as prepare_shards
from firth.train import override, pretrain_in, read_yaml, run_folder

OBJECTIVES: dict[str, type[Objective]] = {"clm": CLM, "mlm": MLM, "span-corruption": SpanCorruption}
load = load_model


def tokenizer(
    texts: Sequence[str | Path],
    output_dir: str | Path,
    kind: str = "wordpiece",
    vocab_size: int = 0,
    lowercase: bool = False,
    overwrite: bool = False,
    **reading: Any,
) -> dict[str, Any]:
    """Train a tokenizer on text. `reading` are Corpus's `documents`, `columns`, `encoding`."""
    folder = Path(output_dir)
    fresh_folder(folder, "--output-dir", overwrite)
    corpus = Corpus(texts, **reading)
    made = train_tokenizer((d.text for d in corpus), kind, vocab_size or vocabulary_size(corpus.bytes), lowercase)
    say(corpus.describe())
    with whole_folder(folder) as temporary:
        made.save(temporary)
    return {
        "output_dir": str(folder),
        "kind": made.kind,
        "vocab_size": made.vocab.size,
        "fingerprint": made.fingerprint,
    }


def prepare(
    texts: Sequence[str | Path],
    tokenizer: str | Path,
    output_dir: str | Path,
    held_out: float = HELD_OUT,
    resume: bool = False,
    overwrite: bool = False,
    **reading: Any,
) -> dict[str, Any]:
    """Text to token shards."""
    folder = Path(output_dir)
    check_held_out(held_out)
    corpus, used = Corpus(texts, **reading), load_tokenizer(Path(tokenizer))
    if resume and is_shards(folder) and damage(folder) is None:
        check_tokenizer(folder, tokenizer)
        say(f"{folder} is whole already.")
        return shard_facts(folder)
    fresh_folder(folder, "--output-dir", overwrite or resume)
    return _prepare(corpus, used, folder, held_out)


def check_held_out(share: float) -> None:
    if not 0 <= share < 1:
        raise UserError(f"--held-out is {share:g}, and must be at least 0 and less than 1.")


def _prepare(corpus: Corpus, tokenizer: Tokenizer, folder: Path, held_out: float) -> dict[str, Any]:
    prepare_shards(corpus, tokenizer, folder, held_out_share=held_out, total_bytes=corpus.bytes)
    say(corpus.describe())
    return shard_facts(folder)


def shard_facts(folder: Path) -> dict[str, Any]:
    manifest = open_shards(folder).manifest
    names = ("documents", "tokens", "duplicates", "train", "held_out", "unigram_entropy")
    return {"output_dir": str(folder), **{name: manifest[name] for name in names}}


def pretrain(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    output_dir: str | Path,
    tokenizer: str | Path | None = None,
    objective: str | None = None,
    vocab_size: int = 0,
    lowercase: bool = False,
    held_out: float = HELD_OUT,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    documents: str = "auto",
    columns: Mapping[str, str] | None = None,
    encoding: str = "utf-8",
    **options: Any,
) -> dict[str, Any]:
    """Pretrain a model (preset, config or checkpoint) on shards or on text."""
    began = time.monotonic()
    model_config, checkpoint = find_model(model)
    if objective is not None:
        if objective not in OBJECTIVES:
            raise UserError(f"Unknown objective {objective!r}. {nearest(objective, OBJECTIVES)}")
        options["objective"] = OBJECTIVES[objective].__name__
    named = {"output_dir": str(output_dir), "checkpoint": str(checkpoint or ""), "data": "", "tokenizer": ""}
    changes = all_changes(config, options, overrides, named)
    recipe = override(pretraining(model_config), changes)
    recipe.check()
    check_held_out(held_out)
    sources = [data] if isinstance(data, str | Path) else list(data)
    given = tokenizer or checkpoint
    if tokenizer and checkpoint and load_tokenizer(tokenizer).fingerprint != load_tokenizer(checkpoint).fingerprint:
        raise UserError(f"{tokenizer} is not the tokenizer that {checkpoint} has learned. Leave --tokenizer out.")
    corpus = None
    if len(sources) == 1 and is_shards(Path(sources[0])):
        check_tokenizer(Path(sources[0]), given)
    else:
        corpus = Corpus(sources, documents=documents, columns=columns, encoding=encoding)
        made = load_tokenizer(Path(given)) if given is not None else None

    with run_folder(Path(output_dir), resume, overwrite, [*sources, *([given] if given else [])]) as folder:
        if corpus is None:
            shards = Path(sources[0])
        else:
            source = {
                "data": list(map(str, sources)),
                "bytes": corpus.bytes,
                "documents": documents,
                "columns": dict(columns or {}),
                "encoding": encoding,
                "tokenizer": made.fingerprint if made is not None else [vocab_size, lowercase],
                "held_out": held_out,
            }
            same_source(folder / "source.json", source)
            shards = folder / "data"
            if not is_shards(shards) or damage(shards) is not None:
                made = made or run_tokenizer(folder, corpus, recipe.model, vocab_size, lowercase)
                _prepare(corpus, made, shards, held_out)
        used = open_shards(shards).tokenizer
        if checkpoint is None and "model.vocab_size" not in changes:
            recipe = override(recipe, {"model.vocab_size": used.vocab.size})
        return pretrain_in(folder, replace(recipe, data=str(shards), tokenizer=used.fingerprint), resume, began)


def find_model(name: str | Path) -> tuple[ModelConfig, Path | None]:
    """A preset, a config file or a checkpoint folder: what it describes, and where its weights are."""
    path = Path(name)
    if path.is_dir() and ((path / "config.json").is_file() or str(name) not in PRESETS):
        return read_config(path), path
    if path.is_file():
        return from_hf_config(read_json(path), str(path)), None
    if len(path.parts) > 1:
        raise UserError(
            f"{name}: no such file or folder. Name a checkpoint, a config.json or a preset (`firth models`)."
        )
    return preset(str(name)), None


def same_source(file: Path, source: dict[str, Any]) -> None:
    """Keep what text a run reads, and how; a resumed run that would read another one is refused."""
    earlier = read_json(file) if file.is_file() else source
    if changed := [
        f"{name}: {earlier.get(name)} -> {source[name]}" for name in source if earlier.get(name) != source[name]
    ]:
        raise UserError(
            "A resumed run reads the text that it began with, and this one differs: " + "; ".join(changed) + ". "
            "Give the same text and options, or start a new run."
        )
    write_json(file, source)


def run_tokenizer(folder: Path, corpus: Corpus, model: ModelConfig, vocab_size: int, lowercase: bool) -> Tokenizer:
    """A tokenizer that is trained on the text and kept in the run's folder."""
    place = folder / "tokenizer"
    if damage(place) is not None:
        size = vocab_size or vocabulary_size(corpus.bytes)
        with whole_folder(place) as temporary:
            train_tokenizer((d.text for d in corpus), TOKENIZERS[model.shape], size, lowercase).save(temporary)
    return load_tokenizer(place)


def check_tokenizer(shards: Path, given: str | Path | None) -> None:
    if given is None:
        return
    wanted, used = load_tokenizer(Path(given)).fingerprint, open_shards(shards).tokenizer.fingerprint
    if wanted != used:
        raise UserError(
            f"{shards} was made with another tokenizer than that of {given}: "
            f"prepare the text again with `firth prepare --tokenizer {given}`."
        )


def all_changes(
    config: str | Path | None, options: Mapping[str, Any], overrides: Mapping[str, Any] | None, named: Mapping[str, Any]
) -> dict[str, Any]:
    """What a YAML file, the options and key=value set, the later ones on top; `named` are set by the verb alone."""
    if wrong := [name for name in overrides or {} if name in named]:
        raise UserError(f"{wrong[0]}={(overrides or {})[wrong[0]]}: the verb names this itself (see --help).")
    changes: dict[str, Any] = flatten(read_yaml(Path(config))) if config else {}
    changes |= {name: value for name, value in options.items() if value is not None}
    return {**changes, **(overrides or {}), **named}


def flatten(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as dotted ones; a value with a `kind` is set whole."""
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) and "kind" not in value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def finetune(
    checkpoint: str | Path,
    task: str,
    train: str | Path,
    dev: str | Path,
    output_dir: str | Path,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    columns: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Fine-tune a checkpoint on a task, several times; mean and deviation."""
    if not Path(checkpoint).is_dir():
        raise UserError(f"{checkpoint} is not a checkpoint folder. `firth pretrain` makes one: RUN/final.")
    recipe = FinetuneRecipe(**finetuning(read_config(checkpoint)))
    named: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "task": task,
        "train": str(train),
        "dev": str(dev),
        "output_dir": str(output_dir),
        **({"columns": dict(columns)} if columns else {}),
    }
    return run_finetune(override(recipe, all_changes(config, options, overrides, named)), resume, overwrite)


def evaluate(
    checkpoint: str | Path,
    task: str,
    data: str | Path,
    output_dir: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    overwrite: bool = False,
    encoding: str = "utf-8",
) -> dict[str, Any]:
    """Score a fine-tuned checkpoint; predictions go to `output_dir` (beside the checkpoint unless said)."""
    place = Path(output_dir) if output_dir else Path(checkpoint).absolute().parent / f"evaluate-{Path(data).name}"
    overwrite = overwrite or output_dir is None
    return evaluate_checkpoint(checkpoint, task, data, place, columns, overwrite=overwrite, encoding=encoding)


def generate(checkpoint: str | Path | Model, prompt: str, **settings: Any) -> str:
    """Continue a prompt."""
    model = checkpoint if isinstance(checkpoint, Model) else load_model(checkpoint)
    return generate_texts(model, [prompt], **settings)[0]


def fill(checkpoint: str | Path | Model, text: str, top: int = 5) -> list[Blank]:
    """The likeliest words for the blanks of a text."""
    return fill_blanks(checkpoint if isinstance(checkpoint, Model) else load_model(checkpoint), text, top)


def export(
    checkpoint: str | Path, output_dir: str | Path, check: bool = False, overwrite: bool = False
) -> dict[str, Any]:
    """Write a plain Hugging Face folder; `check` opens it in transformers and gives the largest difference."""
    folder = Path(output_dir)
    fresh_folder(folder, "--output-dir", overwrite)
    if folder.exists() and folder.samefile(checkpoint):
        raise UserError(f"{folder} is the checkpoint itself. Name another --output-dir.")
    model = load_model(checkpoint)
    model.save(folder, overwrite=overwrite)
    result: dict[str, Any] = {"output_dir": str(folder)}
    if check:
        result["max_difference"] = largest_difference(folder)
    return result


def models() -> list[dict[str, Any]]:
    """The presets, with their sizes and what they are trained on."""
    return [
        {
            "name": name,
            "family": config.family,
            "parameters": count_parameters(config),
            "objective": next(n for n, kind in OBJECTIVES.items() if kind is DEFAULT[config.shape]),
        }
        for name, config in PRESETS.items()
    ]
