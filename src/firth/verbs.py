"""The verbs as plain functions: what the command line does, callable from Python."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from firth.console import say
from firth.errors import UserError, nearest
from firth.evaluate import evaluate as evaluate_checkpoint
from firth.evaluate import largest_difference
from firth.files import damage, fresh_folder, read_json, whole_folder, write_json
from firth.generate import Blank
from firth.generate import fill as fill_blanks
from firth.generate import generate as generate_texts
from firth.lab.quickstart import quickstart as quickstart
from firth.lab.show import look
from firth.lab.show_page import free_page, save_page
from firth.lab.show_text import print_shown
from firth.models import (
    GOOD_FOR,
    PRESETS,
    Model,
    ModelConfig,
    count_parameters,
    flops_per_token,
    from_hf_config,
    load_model,
    preset,
    read_config,
    with_vocabulary,
)
from firth.objectives import NAMED
from firth.plain import KIND, to_plain
from firth.recipes import complete, default_objective, finetuning, pretraining, tokenizer_kind, vocabulary_size
from firth.tasks import FinetuneRecipe
from firth.tasks import finetune as run_finetune
from firth.text import HELD_OUT, Corpus, Salient, load_salient, salient_name
from firth.tokens import Tokenizer, is_shards, load_tokenizer, open_shards, train_tokenizer
from firth.tokens import prepare as prepare_shards
from firth.train import Recipe, override, pretrain_in, read_yaml, run_folder

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
    made = train_tokenizer(corpus.texts(), kind, vocab_size or vocabulary_size(corpus.bytes), lowercase)
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
    salient: str | Salient | None = None,
    **reading: Any,
) -> dict[str, Any]:
    """Text to token shards. `salient` marks names, numbers and dates ("default"), or what a function finds."""
    folder = Path(output_dir)
    check_held_out(held_out)
    find = load_salient(salient) if isinstance(salient, str) else salient
    corpus, used = Corpus(texts, **reading), load_tokenizer(Path(tokenizer))
    if resume and is_shards(folder) and damage(folder) is None:
        check_tokenizer(folder, tokenizer)
        check_salient(folder, find)
        say(f"{folder} is whole already.")
        return shard_facts(folder)
    fresh_folder(folder, "--output-dir", overwrite or resume)
    return _prepare(corpus, used, folder, held_out, find)


def check_salient(shards: Path, find: Salient | None) -> None:
    """Refuse to take shards for those asked for when they mark other spans."""
    used, wanted = open_shards(shards).manifest.get("salient"), salient_name(find) if find else None
    if used != wanted:
        raise UserError(
            f"{shards} was made with --salient {used or 'left out'}, not {wanted or 'left out'}: name another "
            "--output-dir, or make it again with --overwrite in place of --resume."
        )


def check_held_out(share: float) -> None:
    if not 0 <= share < 1:
        raise UserError(f"--held-out is {share:g}, and must be at least 0 and less than 1.")


def _prepare(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, held_out: float, salient: Salient | None = None
) -> dict[str, Any]:
    prepare_shards(corpus, tokenizer, folder, held_out_share=held_out, total_bytes=corpus.bytes, salient=salient)
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
    making = Making(vocab_size, lowercase, held_out, documents, dict(columns or {}), encoding)
    order = take_order(model, data, output_dir, tokenizer, objective, making, config, overrides, options)
    inputs = [*order.sources, *([order.given] if order.given else [])]
    with run_folder(Path(output_dir), resume, overwrite, inputs) as folder:
        if order.corpus is not None:
            same_source(folder / "source.json", order.source())
        return pretrain_in(folder, order.recipe_for(order.shards_in(folder)), resume, began)


def show(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    rows: int = 4,
    tokenizer: str | Path | None = None,
    objective: str | None = None,
    vocab_size: int = 0,
    lowercase: bool = False,
    held_out: float = HELD_OUT,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    output_dir: str | Path = ".",
    overwrite: bool = False,
    documents: str = "auto",
    columns: Mapping[str, str] | None = None,
    encoding: str = "utf-8",
    printed: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Exactly what a model will read and what it will be asked, before any training.

    Takes what `pretrain` takes, and does what it does up to the first rows of the first step. Writes `show.html` to
    `output_dir`; `printed` writes the same to the terminal.
    """
    if rows < 1:
        raise UserError(f"--rows is {rows}, and must be at least 1.")
    page = free_page(Path(output_dir), overwrite)
    making = Making(vocab_size, lowercase, held_out, documents, dict(columns or {}), encoding)
    order = take_order(model, data, output_dir, tokenizer, objective, making, config, overrides, options)
    with TemporaryDirectory(prefix="firth-show-") as folder:
        if order.corpus is not None:
            say("Tokenizer and shards are made for this look alone. `firth prepare` once makes every look quick.")
        recipe = order.recipe_for(order.shards_in(Path(folder)))
        shown = look(recipe, rows, str(model), ", ".join(map(str, order.sources)))
    save_page(shown, page)
    if printed:
        print_shown(shown)
    return {**shown.plain(), "page": str(page)}


class Making(NamedTuple):
    """How text becomes shards: the tokenizer that is trained for it, what is held out, how files are read."""

    vocab_size: int
    lowercase: bool
    held_out: float
    documents: str
    columns: dict[str, str]
    encoding: str


@dataclass(frozen=True)
class Order:
    """A recipe and where its text comes from: what is settled before anything is made."""

    recipe: Recipe
    own_vocabulary: bool  # the model has as many tokens as it was told, not as many as the tokenizer
    sources: list[str | Path]
    given: str | Path | None  # the folder of a tokenizer, or the checkpoint that has one
    corpus: Corpus | None  # None where the source is shards already
    tokenizer: Tokenizer | None  # None where one is trained on the text, or lies in the shards
    making: Making

    def source(self) -> dict[str, Any]:
        """What the shards are made of: the same source makes the same shards."""
        assert self.corpus is not None
        m = self.making
        return {
            "data": list(map(str, self.sources)),
            "bytes": self.corpus.bytes,
            "documents": m.documents,
            "columns": m.columns,
            "encoding": m.encoding,
            "tokenizer": self.tokenizer.fingerprint if self.tokenizer is not None else self._new_tokenizer,
            "held_out": m.held_out,
            **({"salient": "default"} if self.salient else {}),
        }

    @property
    def _new_tokenizer(self) -> list[Any]:
        """Kind, size and case of the tokenizer that is trained where none is given."""
        return [tokenizer_kind(self.recipe.model, self.recipe.objective), self.making.vocab_size, self.making.lowercase]

    @property
    def salient(self) -> bool:
        """Whether the objective asks for what is salient in the text."""
        return "salient" in self.recipe.objective.bits

    def shards_in(self, folder: Path) -> Path:
        """The shards: those that were named, or `data` in this folder, made there unless they are there whole."""
        if self.corpus is None:
            return Path(self.sources[0])
        shards, m = folder / "data", self.making
        if not is_shards(shards) or damage(shards) is not None:
            used = self.tokenizer or run_tokenizer(folder, self.corpus, *self._new_tokenizer)
            objective = self.recipe.objective  # what it lacks is better said now than after all is tokenised
            objective.check(used.vocab, objective.source_length(self.recipe.max_seq_length))
            if self.salient:
                say("Names, numbers and dates are marked as salient; `firth prepare --salient` can mark other things.")
            _prepare(self.corpus, used, shards, m.held_out, load_salient("default") if self.salient else None)
        return shards

    def recipe_for(self, shards: Path) -> Recipe:
        """The recipe with what the shards alone can say: the tokenizer, and how many tokens a new model has."""
        used, recipe = open_shards(shards).tokenizer, self.recipe
        if not self.own_vocabulary:
            recipe = replace(recipe, model=with_vocabulary(recipe.model, used.vocab))
        return replace(recipe, data=str(shards), tokenizer=used.fingerprint)


def take_order(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    output_dir: str | Path,
    tokenizer: str | Path | None,
    objective: str | None,
    making: Making,
    config: str | Path | None,
    overrides: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Order:
    """What `pretrain` and `show` are told, as an order; what is wrong with it is found before anything is made."""
    model_config, checkpoint = find_model(model)
    named = {"output_dir": str(output_dir), "checkpoint": str(checkpoint or ""), "data": "", "tokenizer": ""}
    changes = all_changes(config, {**options, "objective": named_objective(objective)}, overrides, named)
    recipe = complete(override(pretraining(model_config), changes))
    recipe.check()
    check_held_out(making.held_out)
    sources = [data] if isinstance(data, str | Path) else list(data)
    given = tokenizer or checkpoint
    if tokenizer and checkpoint and load_tokenizer(tokenizer).fingerprint != load_tokenizer(checkpoint).fingerprint:
        raise UserError(f"{tokenizer} is not the tokenizer that {checkpoint} has learned. Leave --tokenizer out.")
    corpus = used = None
    if len(sources) == 1 and is_shards(Path(sources[0])):
        check_tokenizer(Path(sources[0]), given)
    else:
        corpus = Corpus(sources, documents=making.documents, columns=making.columns, encoding=making.encoding)
        used = load_tokenizer(Path(given)) if given is not None else None
    own_vocabulary = checkpoint is not None or "model.vocab_size" in changes
    return Order(recipe, own_vocabulary, sources, given, corpus, used, making)


def named_objective(name: str | None) -> dict[str, Any] | None:
    """An objective by its name, written out, so that key=value can change what is in it."""
    if name is None:
        return None
    if name not in NAMED:
        raise UserError(f"Unknown objective {name!r}. {nearest(name, NAMED)}")
    return {KIND: type(NAMED[name]).__name__, **to_plain(NAMED[name])}


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
    """Keep what text a run reads, and how; one that goes on with what is there and would read another is refused."""
    earlier = read_json(file) if file.is_file() else source
    if changed := [
        f"{name}: {earlier.get(name)} -> {source[name]}" for name in source if earlier.get(name) != source[name]
    ]:
        raise UserError(
            "A run reads the text that it began with, and this one differs: " + "; ".join(changed) + ". "
            "Give the same text and options, start anew with --overwrite, or name another --output-dir."
        )
    write_json(file, source)


def run_tokenizer(folder: Path, corpus: Corpus, kind: str, vocab_size: int, lowercase: bool) -> Tokenizer:
    """A tokenizer that is trained on the text and kept in the run's folder."""
    place = folder / "tokenizer"
    if damage(place) is not None:
        size = vocab_size or vocabulary_size(corpus.bytes)
        with whole_folder(place) as temporary:
            train_tokenizer(corpus.texts(), kind, size, lowercase).save(temporary)
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
    """The presets: their sizes, what a token costs, what they are trained on and good for.

    `flops_per_token` are those of reading one token forward in a row of 512; training takes three times as many.
    """
    return [
        {
            "name": name,
            "family": config.family,
            "shape": config.shape,
            "parameters": count_parameters(config),
            "flops_per_token": flops_per_token(config, 512),
            "objective": default_objective(config),
            "good_for": GOOD_FOR[config.family],
        }
        for name, config in PRESETS.items()
    ]
