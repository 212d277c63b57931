"""The verbs as plain functions: what the command line does, callable from Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np

from firth.core.console import format_count, progress, quiet, say
from firth.core.errors import UserError, did_you_mean
from firth.core.files import atomic_folder, check_output_folder, find_corruption, read_json, write_json
from firth.core.html import resolve_page_path
from firth.core.serialization import TYPE_KEY, to_dict
from firth.evaluate import compare_contexts, embed_texts, max_logit_difference, write_run_report_and_card
from firth.evaluate import evaluate as evaluate_checkpoint
from firth.evaluate import evaluate_suite as run_suite
from firth.evaluate.export import write_export
from firth.evaluate.neighbours import Neighbour, most_similar, sample_neighbours, write_vector_report, write_vectors
from firth.evaluate.vectors import load_word_vectors
from firth.generate import Blank, generate_results
from firth.generate import fill as fill_blanks
from firth.generate.config import make_generation_config
from firth.generate.ngram import generate_ngram_results
from firth.lab.check import COMPARED_TOKENIZER_KINDS as COMPARED
from firth.lab.check import check_corpus, read_leak_examples
from firth.lab.check_page import save_check_page as save_check
from firth.lab.check_text import print_check
from firth.lab.prove_resume import run_resume_proof
from firth.lab.quickstart import quickstart as quickstart
from firth.lab.show import build_batch_preview
from firth.lab.show_page import find_free_show_page, save_show_page
from firth.lab.show_text import print_preview
from firth.models import (
    FAMILY_DESCRIPTIONS,
    PRESETS,
    Model,
    ModelConfig,
    count_parameters,
    flops_per_token,
    from_hf_config,
    get_preset,
    is_preset,
    load_model,
    read_config,
    with_vocabulary,
)
from firth.objectives import OBJECTIVES
from firth.recipes import (
    continued_defaults,
    default_objective,
    default_vocab_size,
    finetuning_defaults,
    pretraining_recipe,
    tokenizer_kind,
    update_recipe,
)
from firth.recipes import named_finetuning_defaults as named_recipe
from firth.static.ngram import is_ngram, load_ngram
from firth.tasks import TASK_FILE, FinetuneRecipe, check_task, encode_task_prompts, finetuned_generation_settings
from firth.tasks import finetune as run_finetune
from firth.text import (
    CORPUS_OPTIONS,
    HELD_OUT_FRACTION,
    Corpus,
    SalientSpanFinder,
    load_salient_finder,
    read_labelled,
    salient_finder_name,
)
from firth.tokens import (
    TOKENIZER_KINDS,
    MixConfig,
    Tokenizer,
    is_shards_folder,
    load_tokenizer,
    open_shards,
    retrain_tokenizer,
    train_tokenizer,
)
from firth.tokens import prepare as prepare_shards
from firth.tokens.checkup import SAMPLE_CHARS
from firth.tokens.prepare import digest_documents
from firth.train import Recipe, apply_overrides, pretrain_in_folder, read_yaml_mapping, run_folder
from firth.train.clock import RunClock
from firth.train.distributed import init_distributed, require_single_process, silence_other_ranks
from firth.train.folder import shared_run_folder

MAX_CONCURRENT_SEQUENCES = 16  # texts that are written at once
# What learns by counting: the kind of tokenizer that it is given, and its size unless said (0: by the text's size).
STATIC_TOKENIZERS = {"word2vec": ("word", 2**20), "glove": ("word", 2**20), "ngram": ("byte-bpe", 0)}
STATIC_FIELD_NAMES = {"num_train_epochs": "epochs", "learning_rate": "alpha"}  # gensim's names for what all runs have

# What a pretraining that goes on keeps, whatever has become usual since.
KEPT_ON_RESUME_FIELDS = ("optim", "learning_rate", "weight_decay", "warm_start", "seed")
DURATION_FIELDS = ("minutes", "max_steps", "num_train_epochs", "epochs")

# These have as many numbers as the text has words: what each is good for, and how many numbers.
STATIC_MODELS = (
    ("word2vec", "skip-gram or CBOW", "2 x 100 for each word", "words by themselves: fast, similar words, analogies"),
    ("glove", "counts of pairs", "100 for each word", "words by themselves, from the counts of a whole text"),
    ("ngram", "counts of n-grams", "2 for each n-gram", "writing on by counting; the perplexity to beat"),
)

load = load_model


def check(
    texts: Sequence[str | Path] | str | Path,
    tokenizer: str | Path | None = None,
    output_dir: str | Path = ".",
    kinds: Sequence[str] = COMPARED,
    vocab_sizes: Sequence[int] = (),
    sample: int = SAMPLE_CHARS,
    lowercase: bool = False,
    overwrite: bool = False,
    printed: bool = False,
    labelled: str | Path | None = None,
    task: str | None = None,
    labelled_columns: Mapping[str, str] | None = None,
    **reading: Any,
) -> dict[str, Any]:
    """What is in a text, how tokenizers split it, and what follows for vocabulary, rows and model.

    `tokenizer` is a folder of one, or a checkpoint; beside it others are trained on a sample of `sample` characters,
    of each of `kinds` and `vocab_sizes`. Writes `check.html` to `output_dir`; `printed` writes to the terminal too.
    `labelled` is a file whose examples are looked for in the text; its `task` is told by its columns unless named.
    """
    page = resolve_page_path(Path(output_dir), "check", overwrite)
    for kind in kinds:
        if kind not in TOKENIZER_KINDS:
            raise UserError(f"--kinds: there is no tokenizer of kind {kind!r}. {did_you_mean(kind, TOKENIZER_KINDS)}")
    if small := [size for size in vocab_sizes if size < 1]:
        raise UserError(f"--vocab-sizes: {small[0]} is no size. Name whole numbers, as 4096,8192.")
    if sample < 1000:
        raise UserError(f"--sample is {sample}, and must be at least 1,000 characters.")
    used = load_tokenizer(Path(tokenizer)) if tokenizer is not None else None
    if labelled is None and (task is not None or labelled_columns):
        raise UserError("--task and --labelled-columns are for --labelled, which is not there. Name the file.")
    encoding = reading.get("encoding") or "utf-8"
    asked = read_leak_examples(str(labelled), task, labelled_columns, encoding) if labelled is not None else None
    corpus = Corpus(texts, **reading)
    found = check_corpus(corpus, used, str(tokenizer or ""), kinds, vocab_sizes, sample, lowercase, asked)
    save_check(found, page)
    if printed:
        print_check(found)
    return {**found.to_dict(), "page": str(page)}


def tokenizer(
    texts: Sequence[str | Path],
    output_dir: str | Path,
    kind: str = "wordpiece",
    vocab_size: int = 0,
    lowercase: bool = False,
    overwrite: bool = False,
    like: str | Path | None = None,
    pattern: str = "gpt2",
    byte_fallback: bool = False,
    max_memory: int | None = None,
    seed: int = 0,
    reverse: bool = False,
    **reading: Any,
) -> dict[str, Any]:
    """Train a tokenizer on text. `corpus_options` is what Corpus takes: `documents`, `columns`, `normalize` and so on.

    `like` is the folder of a tokenizer or a checkpoint: the new one is of the same kind, treats text in the same way
    and has the same special tokens. Otherwise `kind`, `lowercase`, `pattern` and `byte_fallback` say what it is. With a
    `reverse` one a model reads every text from its end to its begin.
    """
    folder = Path(output_dir)
    check_output_folder(folder, "--output-dir", overwrite)
    model = None if like is None else load_tokenizer(like)
    corpus = Corpus(texts, **reading)
    size = vocab_size or default_vocab_size(corpus.total_bytes)
    if model is not None:
        made = retrain_tokenizer(model, corpus.texts(), size, max_memory, seed)
    else:
        made = train_tokenizer(corpus.texts(), kind, size, lowercase, max_memory, seed, pattern, byte_fallback)
    made = made.to_reversed() if reverse else made
    say(corpus.describe())
    with atomic_folder(folder) as temporary:
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
    held_out: float = HELD_OUT_FRACTION,
    resume: bool = False,
    overwrite: bool = False,
    salient: str | SalientSpanFinder | None = None,
    workers: int = 0,
    max_memory: int | None = None,
    dedup: str = "exact",
    **reading: Any,
) -> dict[str, Any]:
    """Text to token shards. `marks_salient` marks names, numbers and dates ("default"), or what a function finds.

    `workers` processes do the work (0: as many as there are cores) in `max_memory` bytes; the shards are the same
    whatever these are. `dedup` drops documents that were there before: "none", "exact" or "near".
    """
    folder = Path(output_dir)
    check_held_out_share(held_out)
    find = load_salient_finder(salient) if isinstance(salient, str) else salient
    corpus, used = Corpus(texts, **reading), load_tokenizer(Path(tokenizer))
    if resume and is_shards_folder(folder) and find_corruption(folder) is None:
        check_shard_tokenizer(folder, tokenizer)
        check_shard_salient(folder, find)
        check_shard_options(folder, {"held_out_share": held_out, "dedup": dedup})
        check_shard_source(folder, corpus)
        return summarize_shards(folder)
    check_output_folder(folder, "--output-dir", overwrite or resume)
    return _write_shards(
        corpus, used, folder, held_out, find, workers=workers, max_memory=max_memory, dedup=dedup, resume=resume
    )


def check_shard_salient(shards: Path, find_salient: SalientSpanFinder | None) -> None:
    """Refuse to take shards for those asked for when they mark other spans."""
    used, wanted = (
        open_shards(shards).manifest.get("salient"),
        salient_finder_name(find_salient) if find_salient else None,
    )
    if used != wanted:
        raise UserError(
            f"{shards} was made with --salient {used or 'left out'}, not {wanted or 'left out'}: name another "
            "--output-dir, or make it again with --overwrite in place of --resume."
        )


def check_shard_options(shards: Path, expected: Mapping[str, Any]) -> None:
    """Refuse to take shards for those asked for when they were made in another way."""
    used = open_shards(shards).manifest
    if other := [name for name, value in expected.items() if name in used and used[name] != value]:
        raise UserError(
            f"{shards} was made with {other[0]} {used[other[0]]}, not {expected[other[0]]}: name another --output-dir, "
            "or make it again with --overwrite in place of --resume."
        )


def check_shard_source(shards: Path, corpus: Corpus) -> None:
    """Read the text again, as nothing less proves it, and refuse to take shards of another one for those asked for."""
    used = open_shards(shards).manifest.get("source")
    if used is None:
        say(f"{shards} is whole already. It does not say of which text, so whether that has changed cannot be told.")
        return
    now = digest_documents(corpus, corpus.total_bytes)
    if now != used:
        before, after = (format_count(source["documents"], "document") for source in (used, now))
        change = f"{before} then, {after} now" if before != after else f"{before} then and now, but not the same"
        raise UserError(
            f"{shards} is whole, but the text has changed since it was made: {change}. Make it again with --overwrite "
            "in place of --resume, or name another --output-dir."
        )
    say(f"{shards} is whole already, and the text is the one that it was made of.")


def check_held_out_share(held_out: float) -> None:
    if not 0 <= held_out < 1:
        raise UserError(f"--held-out is {held_out:g}, and must be at least 0 and less than 1.")


def _write_shards(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    held_out: float,
    salient: SalientSpanFinder | None = None,
    resume: bool = True,
    **doing: Any,
) -> dict[str, Any]:
    doing = {"workers": 0, **doing}
    prepare_shards(
        corpus, tokenizer, folder, held_out, total_bytes=corpus.total_bytes, salient=salient, resume=resume, **doing
    )
    say(corpus.describe())
    return summarize_shards(folder)


def summarize_shards(folder: Path) -> dict[str, Any]:
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
    held_out: float = HELD_OUT_FRACTION,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    allow_change: bool = False,
    rewind: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Pretrain a model (preset, config or checkpoint) on shards or on text.

    `options` are fields of the recipe, and what Corpus takes: `documents`, `columns`, `normalize` and so on. A resumed
    run whose recipe or shards have changed is refused unless `allow_change`. `rewind` goes back to a checkpoint so many
    steps or more before steps that did harm, and passes over the text from there to them.
    """
    began = time.monotonic()
    silence_other_ranks()
    making = DataOptions(vocab_size, lowercase, held_out, pop_corpus_options(options))
    if str(model) in STATIC_TOKENIZERS and not (Path(model) / "config.json").is_file():
        require_single_process(f"{model} counts in one process, with all of its cores.")
        if objective is not None:
            raise UserError(f"{model} has no --objective: it is one itself.")
        changes = merge_recipe_changes(
            config, options, overrides, {"output_dir": str(output_dir), "data": "", "tokenizer": ""}
        )
        return pretrain_static(str(model), data, tokenizer, making, changes, resume, overwrite, began)
    earlier = {} if overwrite else read_saved_fields(Path(output_dir), KEPT_ON_RESUME_FIELDS)
    order = plan_pretraining(model, data, output_dir, tokenizer, objective, making, config, overrides, options, earlier)
    world, place = init_distributed(order.recipe), Path(output_dir)
    if world.is_restart(str(output_dir)):
        resume, overwrite, rewind = True, False, None
    resume = resume or rewind is not None
    with shared_run_folder(world, place, resume, overwrite, order.inputs) as folder:
        clock = RunClock(place, resume, began)

        def shards() -> str:
            made = order.make_shards(folder)
            clock.save()
            return str(made)

        with world.enter_on_main(clock):
            recipe = order.resolve_recipe(Path(world.run_on_main(shards)))
            return pretrain_in_folder(folder, recipe, resume, clock.start_time, allow_change, rewind)


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
) -> dict[str, Any]:
    """Kill a real run again and again, go on with it each time, and compare it with one that nobody disturbed.

    Takes what `pretrain` takes. Unless said, the run has 10 steps for each kill and a checkpoint every 5.
    """
    if kills < 1:
        raise UserError(f"--kills is {kills}, and must be at least 1.")
    making = DataOptions(vocab_size, lowercase, held_out, pop_corpus_options(options))
    options = {"max_steps": 10 * kills, "save_steps": 5, **options}
    order = plan_pretraining(model, data, output_dir, tokenizer, objective, making, config, overrides, options)
    with run_folder(Path(output_dir), overwrite=overwrite, inputs=order.inputs) as folder:
        return run_resume_proof(order.resolve_recipe(order.make_shards(folder)), folder, kills)


def pretrain_static(
    name: str,
    data: str | Path | Sequence[str | Path],
    tokenizer: str | Path | None,
    data_options: DataOptions,
    changes: Mapping[str, Any],
    resume: bool,
    overwrite: bool,
    start_time: float,
) -> dict[str, Any]:
    """Pretrain what is no stack of layers: word2vec, GloVe, an n-gram model. Text is read and kept as for others."""
    from firth.static.recipe import STATIC_RECIPES
    from firth.static.train import run_static_recipe  # which loads numba

    if name == "ngram" and (length := next((field for field in DURATION_FIELDS if field in changes), None)):
        raise UserError(
            f"{length}: an n-gram model counts its text once and is done, so there is nothing to plan. Leave it out; "
            "order=2, or less text, takes less time."
        )
    recipe = apply_overrides(
        STATIC_RECIPES[name](), {STATIC_FIELD_NAMES.get(field, field): value for field, value in changes.items()}
    )
    recipe.check()
    check_held_out_share(data_options.held_out)
    sources = [data] if isinstance(data, str | Path) else list(data)
    kind, least = STATIC_TOKENIZERS[name]
    text = open_data_source(
        sources, tokenizer, data_options, [kind, data_options.vocab_size or least, data_options.lowercase]
    )
    with run_folder(Path(recipe.output_dir), resume, overwrite, text.inputs) as folder:
        clock = RunClock(Path(recipe.output_dir), resume, start_time)
        shards = text.make_shards(folder)
        recipe = replace(recipe, data=str(shards), tokenizer=open_shards(shards).tokenizer.fingerprint)
        clock.save()
        results = run_static_recipe(folder, recipe, resume, clock.start_time)
        if "words" in results and "similar" not in results:
            results["similar"] = sample_neighbours(load_word_vectors(folder / "final"))
            results["report"] = str(write_vector_report(folder, name, results))
            write_json(folder / "results.json", results)
        return results


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
    **options: Any,
) -> dict[str, Any]:
    """Exactly what a model will read and what it will be asked, before any training.

    Takes what `pretrain` takes, and does what it does up to the first rows of the first step. Writes `show.html` to
    `output_dir`; `printed` writes the same to the terminal.
    """
    if rows < 1:
        raise UserError(f"--rows is {rows}, and must be at least 1.")
    page = find_free_show_page(Path(output_dir), overwrite)
    making = DataOptions(vocab_size, lowercase, held_out, pop_corpus_options(options))
    order = plan_pretraining(model, data, output_dir, tokenizer, objective, making, config, overrides, options)
    with TemporaryDirectory(prefix="firth-show-") as folder:
        if isinstance(order.data_source.corpus, Corpus):
            say("Tokenizer and shards are made for this look alone. `firth prepare` once makes every look quick.")
        recipe = order.resolve_recipe(order.make_shards(Path(folder)))
        shown = build_batch_preview(recipe, rows, str(model), ", ".join(map(str, order.data_source.sources)))
    save_show_page(shown, page)
    if printed:
        print_preview(shown)
    return {**shown.to_dict(), "page": str(page)}


class DataOptions(NamedTuple):
    """How text becomes shards: the tokenizer that is trained for it, what is held out, how files are read."""

    vocab_size: int
    lowercase: bool
    held_out: float
    corpus_options: dict[str, Any]


def pop_corpus_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take out of some options those that say how files are read."""
    reading = {name: options.pop(name) for name in CORPUS_OPTIONS if name in options}
    return {"documents": "auto", "columns": {}, "encoding": "utf-8"} | {k: v for k, v in reading.items() if v}


class DataSource(NamedTuple):
    """Where the text of a run comes from, and how it becomes shards: what is settled before anything is made."""

    sources: list[str | Path]
    tokenizer_path: str | Path | None  # the folder of a tokenizer, or the checkpoint that has one
    data_options: DataOptions
    new_tokenizer_args: list[Any]  # kind, size and case of the tokenizer that is trained where none is given
    marks_salient: bool  # whether names, numbers and dates are marked
    corpus: Corpus | Path  # or the first of the shards that the sources are already
    tokenizer: Tokenizer | None  # None where one is trained on the text, or lies in the shards

    @property
    def inputs(self) -> list[str | Path]:
        """What a run reads, and must not write over."""
        return [*self.sources, *([self.tokenizer_path] if self.tokenizer_path else [])]

    def source_record(self, corpus: Corpus) -> dict[str, Any]:
        """What the shards are made of: the same source makes the same shards."""
        return {
            "data": list(map(str, self.sources)),
            "bytes": corpus.total_bytes,
            **self.data_options.corpus_options,
            "tokenizer": self.tokenizer.fingerprint if self.tokenizer is not None else self.new_tokenizer_args,
            "held_out": self.data_options.held_out,
            **({"salient": "default"} if self.marks_salient else {}),
        }

    def make_shards(self, folder: Path, check_tokenizer_fn: Callable[[Tokenizer], None] = lambda used: None) -> Path:
        """The shards: those that were named, or `data` in this folder, made there unless they are there whole.

        `check_tokenizer_fn` may refuse the tokenizer: what it lacks is better said now than after all is tokenised.
        """
        if isinstance(self.corpus, Path):
            return self.corpus
        check_same_source(folder / "source.json", self.source_record(self.corpus))
        shards = folder / "data"
        if not is_shards_folder(shards) or find_corruption(shards) is not None:
            used = self.tokenizer or train_run_tokenizer(folder, self.corpus, *self.new_tokenizer_args)
            check_tokenizer_fn(used)
            if self.marks_salient:
                say("Names, numbers and dates are marked as salient; `firth prepare --salient` can mark other things.")
            salient = load_salient_finder("default") if self.marks_salient else None
            _write_shards(self.corpus, used, shards, self.data_options.held_out, salient)
        return shards


def open_data_source(
    sources: list[str | Path],
    tokenizer_path: str | Path | None,
    data_options: DataOptions,
    new_tokenizer_args: list[Any],
    marks_salient: bool = False,
    mixed_folders: Sequence[str] = (),
) -> DataSource:
    """Text or shards, opened, with the tokenizer that is given; `mixed` are the folders of several shards."""
    made = mixed_folders or [str(source) for source in sources if len(sources) == 1 and is_shards_folder(Path(source))]
    for shards in made:
        check_shard_tokenizer(Path(shards), tokenizer_path)
    corpus = Path(made[0]) if made else Corpus(sources, **data_options.corpus_options)
    used = load_tokenizer(Path(tokenizer_path)) if tokenizer_path is not None and not made else None
    return DataSource(sources, tokenizer_path, data_options, new_tokenizer_args, marks_salient, corpus, used)


@dataclass(frozen=True)
class PretrainPlan:
    """A recipe and its text: what is settled before anything is made."""

    recipe: Recipe
    keeps_vocab_size: bool  # the model has as many tokens as it was told, not as many as the tokenizer
    data_source: DataSource
    shards_by_name: dict[str, str]  # several shards by name; empty where there is one source

    @property
    def inputs(self) -> list[str | Path]:
        """What the run reads, and must not write over."""
        return [*self.data_source.inputs, *self.shards_by_name.values(), self.recipe.checkpoint, self.recipe.teacher]

    def make_shards(self, folder: Path) -> Path:
        """The shards of the text, whose tokenizer must have what the objective needs."""
        objective, length = self.recipe.objective, self.recipe.max_seq_length
        return self.data_source.make_shards(
            folder, lambda used: objective.check(used.vocab, objective.source_length(length))
        )

    def resolve_recipe(self, shards: Path) -> Recipe:
        """The recipe with what the shards alone can say: the tokenizer, and how many tokens a new model has."""
        used, recipe = open_shards(shards).tokenizer, self.recipe
        if not self.keeps_vocab_size:
            recipe = replace(recipe, model=with_vocabulary(recipe.model, used.vocab))
        data = "" if self.shards_by_name else str(shards)
        recipe = replace(recipe, data=data, sources=self.shards_by_name, tokenizer=used.fingerprint)
        recipe.check()
        return recipe


def read_saved_fields(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Read fields of the recipe in a run folder; a resumed run keeps them."""
    file = folder / "recipe.yaml"
    stored = read_yaml_mapping(file) if file.is_file() else {}
    return {name: stored[name] for name in names if name in stored}


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
) -> PretrainPlan:
    """What `pretrain` and `show` are told, as an order; what is wrong with it is found before anything is made.

    Fields that nobody names are the usual ones of the model, or the `saved_fields` ones of a run that goes on.
    """
    model_config, checkpoint = resolve_model(model)
    named = {"output_dir": str(output_dir), "checkpoint": str(checkpoint or ""), "data": "", "tokenizer": ""}
    changes = merge_recipe_changes(config, {**options, "objective": objective_fields(objective)}, overrides, named)
    first = {} if checkpoint is None else {**continued_defaults(model_config), **next_run_seed(checkpoint)}
    recipe = update_recipe(pretraining_recipe(model_config), {**first, **(saved_fields or {}), **changes})
    recipe.check()
    check_held_out_share(data_options.held_out)
    sources = [data] if isinstance(data, str | Path) else list(data)
    given = tokenizer or checkpoint
    if tokenizer and checkpoint and load_tokenizer(tokenizer).fingerprint != load_tokenizer(checkpoint).fingerprint:
        raise UserError(f"{tokenizer} is not the tokenizer that {checkpoint} has learned. Leave --tokenizer out.")
    if checkpoint and (data_options.vocab_size or data_options.lowercase):
        raise UserError(f"{checkpoint} has a tokenizer, and keeps it. Leave --vocab-size and --lowercase out.")
    mixed = parse_named_shards(sources)
    if recipe.mixing != MixConfig() and not mixed:
        raise UserError("A mix is of several shards, each with a name: --data a=shardsA --data b=shardsB.")
    if mixed and "warm_start" not in changes:
        recipe = replace(recipe, warm_start="none")
    new = [tokenizer_kind(recipe.model, recipe.objective), data_options.vocab_size, data_options.lowercase]
    text = open_data_source(
        sources, given, data_options, new, "salient" in recipe.objective.token_flags, list(mixed.values())
    )
    own_vocabulary = checkpoint is not None or "model.vocab_size" in changes
    return PretrainPlan(recipe, own_vocabulary, text, mixed)


def next_run_seed(checkpoint: Path) -> dict[str, int]:
    """A seed for a model that goes on learning: with that of its own run it would read the same rows once more."""
    stored = checkpoint.absolute().parent / "recipe.yaml"
    seed = read_yaml_mapping(stored).get("seed") if stored.is_file() else None
    return {"seed": seed + 1} if isinstance(seed, int) else {}


def parse_named_shards(sources: Sequence[str | Path]) -> dict[str, str]:
    """Shards that are given by name, as `NAME=SHARDS`, or several by their folders; empty if they are neither."""
    pairs = [str(source).partition("=") for source in sources]
    named = [bool(equals) and not Path(source).exists() for source, (_, equals, _) in zip(sources, pairs, strict=True)]
    if not any(named):
        several = len(sources) > 1 and all(is_shards_folder(source) for source in sources)
        pairs = [(Path(source).resolve().name, "=", str(source)) for source in sources] if several else []
    elif not all(named):
        raise UserError(
            f"--data {sources[named.index(False)]}: the others have names. Write NAME={sources[named.index(False)]}."
        )
    found = {name: folder for name, _, folder in pairs}
    if len(found) < len(pairs):
        raise UserError("Two --data have the same name. Write --data a=shardsA --data b=shardsB.")
    for name, folder in found.items():
        if not is_shards_folder(folder):
            raise UserError(f"--data {name}={folder}: no shards folder. Make it with `firth prepare`.")
    return found


def objective_fields(name: str | None) -> dict[str, Any] | None:
    """An objective by its name, written out, so that key=value can change what is in it."""
    if name is None:
        return None
    if name not in OBJECTIVES:
        raise UserError(f"Unknown objective {name!r}. {did_you_mean(name, OBJECTIVES)}")
    return {TYPE_KEY: type(OBJECTIVES[name]).__name__, **to_dict(OBJECTIVES[name])}


def resolve_model(name: str | Path) -> tuple[ModelConfig, Path | None]:
    """A preset, a config file or a checkpoint folder: what it describes, and where its weights are."""
    path = Path(name)
    if path.is_dir() and ((path / "config.json").is_file() or not is_preset(str(name))):
        return read_config(path), path
    if path.is_file():
        return from_hf_config(read_json(path), str(path)), None
    if len(path.parts) > 1:
        raise UserError(
            f"{name}: no such file or folder. Name a checkpoint, a config.json or a preset (`firth models`)."
        )
    return get_preset(str(name)), None


def check_same_source(file: Path, source: dict[str, Any]) -> None:
    """Keep what text a run reads, and how; one that goes on with what is there and would read another is refused."""
    earlier = read_json(file) if file.is_file() else source
    if changed := [
        f"{name}: {earlier.get(name)} -> {source.get(name)}"
        for name in {**source, **earlier}
        if earlier.get(name) != source.get(name)
    ]:
        raise UserError(
            "A run reads the text that it began with, and this one differs: " + "; ".join(changed) + ". "
            "Give the same text and options, start anew with --overwrite, or name another --output-dir."
        )
    write_json(file, source)


def train_run_tokenizer(folder: Path, corpus: Corpus, kind: str, vocab_size: int, lowercase: bool) -> Tokenizer:
    """A tokenizer that is trained on the text and kept in the run's folder."""
    place = folder / "tokenizer"
    if find_corruption(place) is not None:
        size = vocab_size or default_vocab_size(corpus.total_bytes, kind)
        with atomic_folder(place) as temporary:
            train_tokenizer(corpus.texts(), kind, size, lowercase).save(temporary)
    return load_tokenizer(place)


def check_shard_tokenizer(shards: Path, tokenizer_path: str | Path | None) -> None:
    if tokenizer_path is None:
        return
    wanted, used = load_tokenizer(Path(tokenizer_path)).fingerprint, open_shards(shards).tokenizer.fingerprint
    if wanted != used:
        raise UserError(
            f"{shards} was made with another tokenizer than that of {tokenizer_path}: "
            f"prepare the text again with `firth prepare --tokenizer {tokenizer_path}`."
        )


def merge_recipe_changes(
    config: str | Path | None,
    options: Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    fixed_fields: Mapping[str, Any],
) -> dict[str, Any]:
    """What a YAML file, the options and key=value set, the later ones on top; `fixed_fields` are set by the verb alone."""
    if wrong := [name for name in overrides or {} if name in fixed_fields]:
        raise UserError(f"{wrong[0]}={(overrides or {})[wrong[0]]}: the verb names this itself (see --help).")
    changes: dict[str, Any] = flatten_keys(read_yaml_mapping(Path(config))) if config else {}
    changes |= {name: value for name, value in options.items() if value is not None}
    return {**changes, **(overrides or {}), **fixed_fields}


def flatten_keys(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as dotted ones; a value with a `kind` is set whole."""
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) and "kind" not in value:
            flat |= flatten_keys(value, f"{prefix}{key}.")
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
    recipe: str | None = None,
    target_text: Sequence[str | Path] = (),
    allow_change: bool = False,
    rewind: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Fine-tune a checkpoint on a task, several times; mean and deviation.

    `recipe` names a published one ("ulmfit", "dai-le", "elmo"); else it is the family's own. With `target_text` the
    checkpoint first goes on learning the language of that text, in a folder beside `output_dir` (ULMFiT's stage two).
    A resumed run whose recipe or examples have changed is refused unless `allow_change`; `rewind` as in `pretrain`.
    """
    require_single_process("Fine-tuning has no --parallel; several seeds can be several runs, one for each GPU.")
    if not Path(checkpoint).is_dir():
        also = " `firth export FILE --format firth` makes one of a file of word vectors." * Path(checkpoint).is_file()
        raise UserError(f"{checkpoint} is not a checkpoint folder. `firth pretrain` makes one: RUN/final.{also}")
    usual = read_config(checkpoint)
    fields = finetuning_defaults(usual) if recipe is None else named_recipe(recipe, usual)
    named: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "task": task,
        "train": str(train),
        "dev": str(dev),
        "output_dir": str(output_dir),
        **({"columns": dict(columns)} if columns else {}),
    }
    plan = apply_overrides(FinetuneRecipe(**fields), merge_recipe_changes(config, options, overrides, named))
    if plan.parallel != "none":
        raise UserError(f"parallel={plan.parallel} is for pretraining: fine-tuning is for one process. Leave it out.")
    if target_text:
        check_task(plan)  # before the first stage takes its time
        goes_on = {"resume": resume or rewind is not None, "overwrite": overwrite, "allow_change": allow_change}
        found = adapt_to_target_text(checkpoint, target_text, output_dir, **goes_on, device=plan.device)
        plan = replace(plan, checkpoint=str(found))
    result = run_finetune(plan, resume, overwrite, allow_change, rewind)
    with quiet():  # the run has said all about this file
        examples = read_labelled(plan.dev, plan.task, plan.columns, "dev", plan.encoding)
    return {**result, "report": str(write_run_report_and_card(Path(plan.output_dir), result, examples))}


def adapt_to_target_text(
    checkpoint: str | Path,
    text: Sequence[str | Path],
    output_dir: str | Path,
    resume: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> Path:
    """The language of the task's own text (Howard & Ruder 2018, section 3.2), and where the model is then.

    `options` are fields of the recipe.
    """
    folder = Path(f"{output_dir}-target")
    slow: dict[str, Any] = {"layer_decay": 1 / 2.6, "lr_scheduler_type": "slanted-triangle"}
    slow |= {"adam_beta1": 0.7, "adam_beta2": 0.99}
    pretrain(checkpoint, list(text), folder, resume=resume, overwrite=overwrite, **slow | options)
    return folder / "final"


def evaluate(
    checkpoint: str | Path,
    task: str | None = None,
    data: str | Path | Sequence[str | Path] | None = None,
    output_dir: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    overwrite: bool = False,
    encoding: str = "utf-8",
    documents: str = "auto",
    **settings: Any,
) -> dict[str, Any]:
    """Score a checkpoint on a file; predictions go to `output_dir`.

    Unless said that is a folder beside the checkpoint; where one has other results already, it has a number.

    `task` is what the checkpoint was fine-tuned for unless said. `settings` are what the task can be told, such as
    `stride` for perplexity.
    """
    task = task or read_finetuned_task(checkpoint)
    if data is None:
        raise UserError(f"Which file is the task {task} scored on? Name it with --data.")
    if isinstance(data, Sequence) and not isinstance(data, str) and len(data) == 1:
        data = data[0]
    name = f"{task}-{short_data_name(data)}" + "-ensemble" * bool(settings.get("ensemble"))
    place = Path(output_dir) if output_dir else default_evaluation_folder(checkpoint, name)
    settings = {"columns": columns, "overwrite": overwrite, "encoding": encoding, "documents": documents} | settings
    return evaluate_checkpoint(checkpoint, task, data, place, numbered=output_dir is None, **settings)


def read_finetuned_task(checkpoint: str | Path) -> str:
    """The task that a checkpoint was fine-tuned for."""
    facts = Path(checkpoint) / TASK_FILE
    if not Path(checkpoint).is_dir():
        raise UserError(f"{checkpoint} is not a checkpoint folder: there is no such folder.")
    if not facts.is_file():
        raise UserError(f"{checkpoint} was not fine-tuned: say what it is to do with --task (see --help).")
    return str(read_json(facts)["task"])


def short_data_name(data: str | Path | Sequence[str | Path]) -> str:
    if isinstance(data, str | Path):
        return Path(data).name
    return f"{Path(data[0]).name}-and-{len(data) - 1}-more" if len(data) else ""


def default_evaluation_folder(checkpoint: str | Path, name: str) -> Path:
    """The folder of an evaluation, beside its checkpoint."""
    folder = Path(checkpoint)
    parent = folder.parent if folder.name not in ("", "..") else folder.absolute().parent
    return parent / f"evaluate-{name}"


def evaluate_suite(
    checkpoint: str | Path,
    suite: str | Path,
    data: str | Path | None = None,
    output_dir: str | Path | None = None,
    tasks: Sequence[str] = (),
    seeds: int = 3,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Fine-tune and score a checkpoint on every task of a suite: "glue", "superglue", or a file that lists tasks.

    `options` and `overrides` are fields of the fine-tuning recipe. `metrics` has the score of each task and the
    average. With `resume` tasks that are done are not done again.
    """
    place = Path(output_dir) if output_dir else default_evaluation_folder(checkpoint, Path(suite).stem)
    chosen = merge_recipe_changes(config, options, overrides, {})
    result = run_suite(checkpoint, suite, place, data, seeds, tasks, chosen, resume, overwrite)
    scores = {name: task["score"] for name, task in result["tasks"].items()}
    metrics = {**scores, "average": result["average"]}
    return {**result, "metrics": metrics, "predictions": str(place), "report": str(place / "report.html")}


def generate(
    checkpoint: str | Path | Model, prompt: str | Sequence[str], chat: bool | None = None, **settings: Any
) -> str | list[str]:
    """Continue a prompt, or several. `settings` are the fields of `firth.generate.Decoding`: temperature=0.8.

    One prompt gives a text; several, or num_return_sequences above 1, give a list. A checkpoint folder that was
    fine-tuned to answer reads the prompt as it has learned to, and gives the answer alone, of the length and with the
    beams that it was scored with; `chat` says whether as a user's message in the checkpoint's chat template.
    """
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(checkpoint, Model) and is_ngram(checkpoint):
        found = generate_with_ngram(checkpoint, prompts, settings)
    else:
        model, asked, usual = load_for_generation(checkpoint, prompts, chat)
        found = generate_in_batches(model, asked, usual | settings)
    texts = [one["text"] for one in found]
    return texts[0] if isinstance(prompt, str) and len(texts) == 1 else texts


def generate_with_ngram(
    checkpoint: str | Path, prompts: Sequence[str], settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What `generate_in_batches` gives, by an n-gram model."""
    return generate_ngram_results(load_ngram(checkpoint), prompts, make_generation_config(None, dict(settings)))


def load_for_generation(
    checkpoint: str | Path | Model, prompts: Sequence[str], chat: bool | None = None
) -> tuple[Model, list[str | list[int]], dict[str, Any]]:
    """A model, prompts as it has learned to read them, and how it has learned to answer.

    A loaded model does not know what it was tuned for.
    """
    if isinstance(checkpoint, Model):
        return checkpoint, encode_task_prompts(checkpoint, {}, prompts, chat), {}
    model, file = load_model(checkpoint), Path(checkpoint) / TASK_FILE
    facts = read_json(file) if file.is_file() else {}
    return model, encode_task_prompts(model, facts, prompts, chat), finetuned_generation_settings(model, facts)


def generate_in_batches(
    model: Model, prompts: Sequence[str | list[int]], settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What `generate_results` gives for each prompt, some prompts at a time."""
    decoding, found = make_generation_config(None, dict(settings)), []
    size = max(1, MAX_CONCURRENT_SEQUENCES // (decoding.num_beams * decoding.num_return_sequences))
    with progress("writing", "texts", len(prompts)) as shown:
        for first in range(0, len(prompts), size):
            now = replace(decoding, seed=decoding.seed + first)  # equal prompts are drawn for differently
            for one in generate_results(model, prompts[first : first + size], now):
                found.append({**one, "prompt": one["prompt"] + first})
            shown.advance(len(prompts[first : first + size]))
    return found


def embed(
    checkpoint: str | Path | Model,
    texts: str | Sequence[str],
    pool: Literal["auto", "first", "mean", "last"] = "auto",
    layer: int = -1,
    normalize: bool = False,
    max_seq_length: int = 0,
) -> np.ndarray:
    """A vector for each text, (texts, width) float32; one text alone gives one vector.

    `pool`: the state of the first or the last token, or the mean of all; "auto" is what the checkpoint was fine-tuned
    for (`--task embed`), and else the mean. `layer` 0 is the embedding, -1 the last. `normalize` makes vectors 1 long,
    so that their products are cosines.
    """
    some = [texts] if isinstance(texts, str) else list(texts)
    if not some:
        raise UserError("There is no text to embed.")
    vectors = embed_texts(checkpoint, some, pool, layer, normalize, max_seq_length)
    return vectors[0] if isinstance(texts, str) else vectors


def fill(checkpoint: str | Path | Model, text: str, top: int = 5) -> list[Blank]:
    """The likeliest words for the blanks of a text."""
    return fill_blanks(checkpoint if isinstance(checkpoint, Model) else load_model(checkpoint), text, top)


def similar(
    vectors: str | Path | Model, words: str | Sequence[str], negative: Sequence[str] = (), top: int = 10
) -> list[Neighbour]:
    """The words nearest to a word, or to the mean of several, `negative` from others: those of a checkpoint or a file."""
    return most_similar(load_word_vectors(vectors), [words] if isinstance(words, str) else words, negative, top)


def compare(
    word: str,
    texts: Sequence[str],
    checkpoints: Sequence[str | Path | Model] | str | Path | Model,
    layer: int = -1,
    among: Sequence[str | Path] = (),
    top: int = 5,
) -> dict[str, Any]:
    """The vectors of a word where it stands in some texts, by each of several checkpoints: are they told apart?

    A checkpoint of word2vec or GloVe, or a file of word vectors, has one vector for all texts. `among` names files of
    text: the words of which the vectors, where they stand there, are nearest.
    """
    several = [checkpoints] if isinstance(checkpoints, str | Path | Model) else list(checkpoints)
    return compare_contexts(word, list(texts), several, layer, Corpus(among).texts() if among else (), top)


def export(
    checkpoint: str | Path,
    output_dir: str | Path,
    check: bool = False,
    overwrite: bool = False,
    format: str = "huggingface",
) -> dict[str, Any]:
    """Write a plain Hugging Face folder; `check_tokenizer_fn` opens it in transformers and gives the largest difference.

    The `format` word2vec or glove writes the vectors of single words, as those programs and gensim read them; firth
    a checkpoint of them, as `finetune` takes it. There a file of vectors may stand for the checkpoint.
    """
    folder = Path(output_dir)
    check_output_folder(folder, "--output-dir", overwrite)
    if folder.exists() and Path(checkpoint).exists() and folder.samefile(checkpoint):
        raise UserError(f"{folder} is the checkpoint itself. Name another --output-dir.")
    if format != "huggingface":
        files = write_vectors(load_word_vectors(checkpoint), folder, format)
        return {"output_dir": str(folder), "files": list(map(str, files))}
    write_export(Path(checkpoint), folder)
    result: dict[str, Any] = {"output_dir": str(folder)}
    if check:
        result["max_difference"] = max_logit_difference(folder)
    return result


def models() -> list[dict[str, Any]]:
    """The presets: their sizes, what a token costs, what they are trained on and good for.

    `flops_per_token` are those of reading one token forward in a row of 512; training takes three times as many. What
    learns by counting looks a word up, without any, and has as many parameters as the text has words: they are None,
    and `size` says how many.
    """
    counted = [
        {
            "name": name,
            "family": name,
            "shape": "no layers",
            "parameters": None,
            "size": size,
            "flops_per_token": 0,
            "objective": objective,
            "good_for": good_for,
        }
        for name, objective, size, good_for in STATIC_MODELS
    ]
    return [
        {
            "name": name,
            "family": config.family,
            "shape": config.architecture,
            "parameters": count_parameters(config),
            "flops_per_token": flops_per_token(config, 512),
            "objective": default_objective(config),
            "good_for": FAMILY_DESCRIPTIONS[config.family],
        }
        for name, config in PRESETS.items()
    ] + counted
