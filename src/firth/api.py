"""Every command as a Python function.

    import firth
    firth.pretrain("bert-base", data="books/", output_dir="run")
    model = firth.load("run/final")

Each function takes the options of its command as keyword arguments and returns the object that --json prints. A user's
mistake raises `UserError` before anything is written. The command line (`firth.cli`) only parses and prints.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from firth.core.console import format_count, progress, quiet, say, warn
from firth.core.errors import Interrupted, UserError, did_you_mean, quote
from firth.core.files import atomic_folder, check_output_folder, find_corruption, read_json, read_object, write_json
from firth.core.html import resolve_page_path
from firth.core.serialization import TYPE_KEY, from_dict, to_dict
from firth.generate.config import CONSTRAINTS, make_generation_config
from firth.lab.check import COMPARED_TOKENIZER_KINDS as COMPARED
from firth.lab.check import check_corpus, read_leak_examples
from firth.lab.check_page import save_check_page as save_check
from firth.lab.check_text import print_check
from firth.models import (
    ARCHITECTURE_FAMILIES,
    FAMILY_DESCRIPTIONS,
    PRESETS,
    ModelConfig,
    count_parameters,
    flops_per_token,
    from_hf_config,
    get_preset,
    is_preset,
    read_config,
    shaped_model,
    with_vocabulary,
)
from firth.objectives import OBJECTIVES
from firth.recipes import (
    choose_batch,
    continued_defaults,
    default_objective,
    default_vocab_size,
    finetuning_defaults,
    preference_defaults,
    pretraining_recipe,
    scale_rate_to_batch,
    tokenizer_kind,
    update_recipe,
    with_rate_candidates,
)
from firth.recipes import named_finetuning_defaults as named_recipe
from firth.static.ngram import is_ngram, load_ngram
from firth.tasks.recipe import TASK_FILE, FinetuneRecipe, read_task_file
from firth.text import (
    CORPUS_OPTIONS,
    HELD_OUT_FRACTION,
    Corpus,
    SalientSpanFinder,
    load_salient_finder,
    salient_finder_name,
)
from firth.text.labelled import infer_task
from firth.tokens import (
    TOKENIZER_KINDS,
    MixConfig,
    Tokenizer,
    extend_word_tokenizer,
    is_shards_folder,
    load_tokenizer,
    open_shards,
    retrain_tokenizer,
    train_tokenizer,
)
from firth.tokens import prepare as prepare_shards
from firth.tokens.checkup import SAMPLE_CHARS
from firth.tokens.prepare import digest_documents
from firth.tokens.shard_writer import remove_finished_journal
from firth.tokens.shards import find_shard_damage, remember_verified
from firth.train.clock import RunClock
from firth.train.launch_env import require_single_process, silence_other_ranks
from firth.train.recipe import Recipe, apply_overrides, read_yaml_mapping

if TYPE_CHECKING:
    import numpy as np

    from firth.evaluate.neighbours import Neighbour
    from firth.evaluate.predict import Predictor as Predictor
    from firth.evaluate.predict_input import PredictInput
    from firth.generate import Blank
    from firth.lab.planner import Planner
    from firth.lab.quickstart import quickstart as quickstart
    from firth.models import Model
    from firth.tokens import ShardSet
    from firth.train.distributed import DistContext

# Functions import whatever loads torch when they run: a mistake is reported at once, and torch takes seconds to load.

DEFAULT_PLANNED_MINUTES = 30.0  # of a run whose size is planned and that names no length
MAX_CONCURRENT_SEQUENCES = 16  # sequences of one generation batch, beams included
MAX_QUEUED_SEQUENCES = 1024  # the same on a GPU, where sequences wait for those before them
# Models that are counted, not trained: kind and default vocabulary size of their tokenizer (0: by the text's size).
STATIC_TOKENIZERS = {"word2vec": ("word", 2**20), "glove": ("word", 2**20), "ngram": ("byte-bpe", 0)}
STATIC_FIELD_NAMES = {"num_train_epochs": "epochs", "learning_rate": "alpha"}  # gensim's names of recipe fields

# Fields of a resumed pretraining that keep the saved value unless they are given.
KEPT_ON_RESUME_FIELDS = ("optim", "learning_rate", "weight_decay", "warm_start", "seed")
PLANNED_FIELDS = ("model", "save_steps", "minutes")  # the same for a run whose size was planned
DURATION_FIELDS = ("minutes", "max_steps", "num_train_epochs", "epochs")

# Name, objective, number of parameters (which depends on the text) and purpose.
STATIC_MODELS = (
    ("word2vec", "skip-gram or CBOW", "2 x 100 for each word", "single words: fast, similar words, analogies"),
    ("glove", "counts of pairs", "100 for each word", "single words, from the co-occurrence counts of a whole text"),
    ("ngram", "counts of n-grams", "2 for each n-gram", "a baseline for perplexity; generation"),
)


def __getattr__(name: str) -> Any:
    """Import `load`, `quickstart` and `Predictor` at their first use."""
    if name == "load":
        from firth.models import load_model

        return load_model
    if name == "quickstart":
        from firth.lab.quickstart import quickstart

        return quickstart
    if name == "Predictor":
        from firth.evaluate.predict import Predictor

        return Predictor
    raise AttributeError(f"module 'firth.api' has no attribute {name!r}")


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
    """Check a text and how tokenizers split it; recommend vocabulary, row length and model size.

    `tokenizer` is the folder of a tokenizer or checkpoint to judge. It is compared with tokenizers of all `kinds` and
    `vocab_sizes`, trained on `sample` characters. `labelled` is a file whose examples are searched in the text; its
    `task` is told by its columns unless given. Writes check.html to `output_dir`, and to the terminal if `printed`.
    """
    page = resolve_page_path(Path(output_dir), "check", overwrite)
    for kind in kinds:
        if kind not in TOKENIZER_KINDS:
            raise UserError(f"--kinds: unknown kind of tokenizer {quote(kind)}. {did_you_mean(kind, TOKENIZER_KINDS)}")
    if small := [size for size in vocab_sizes if size < 1]:
        raise UserError(f"--vocab-sizes: {small[0]} is not a size. Write whole numbers, as 4096,8192.")
    if sample < 1000:
        raise UserError(f"--sample is {sample}, and must be at least 1,000 characters.")
    judged = load_tokenizer(Path(tokenizer)) if tokenizer is not None else None
    if labelled is None and (task is not None or labelled_columns):
        raise UserError("--task and --labelled-columns need --labelled FILE.")
    encoding = reading.get("encoding") or "utf-8"
    examples = read_leak_examples(str(labelled), task, labelled_columns, encoding) if labelled is not None else None
    corpus = Corpus(texts, **reading)
    result = check_corpus(corpus, judged, str(tokenizer or ""), kinds, vocab_sizes, sample, lowercase, examples)
    save_check(result, page)
    if printed:
        print_check(result)
    return {**result.to_dict(), "page": str(page)}


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
    dry_run: bool = False,
    **reading: Any,
) -> dict[str, Any]:
    """Train a tokenizer on text; with `dry_run` only say what would be read and written.

    `like` is the folder of a tokenizer or checkpoint, whose kind, normalization and special tokens the new one gets;
    otherwise `kind`, `lowercase`, `pattern` and `byte_fallback` define it. `reverse` reverses every text, for models
    that read from its end. `reading` are arguments of Corpus: `documents`, `columns`, `normalize` and so on.
    """
    folder = Path(output_dir)
    check_output_folder(folder, "--output-dir", overwrite, "tokenizer")
    template = None if like is None else load_tokenizer(like)
    corpus = Corpus(texts, **reading)
    size = vocab_size or default_vocab_size(corpus.total_bytes)
    if dry_run:
        from firth.lab.dry_run import describe_text

        kind = kind if template is None else template.kind
        return {"dry_run": True, **describe_text(corpus), "kind": kind, "vocab_size": size, "writes": str(folder)}
    if template is not None:
        new = retrain_tokenizer(template, corpus.texts(), size, max_memory, seed)
    else:
        new = train_tokenizer(
            corpus.texts(), kind, size, lowercase, max_memory, seed, pattern, byte_fallback, corpus.cleaner.normalize
        )
    new = new.to_reversed() if reverse else new
    say(corpus.describe())
    with atomic_folder(folder, "tokenizer") as temporary:
        new.save(temporary)
    facts = {"kind": new.kind, "vocab_size": new.vocab.size, "fingerprint": new.fingerprint}
    return {"output_dir": str(folder), **facts}


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
    dry_run: bool = False,
    **reading: Any,
) -> dict[str, Any]:
    """Tokenize text into shards; with `dry_run` only say what would be read and written.

    `salient` marks names, numbers and dates ("default"), or the spans that a function finds. `workers` processes (0:
    one per core) share `max_memory` bytes; the shards do not depend on either. `dedup` drops duplicate documents:
    "none", "exact" or "near". `reading` are arguments of Corpus.
    """
    folder = Path(output_dir)
    check_held_out_share(held_out)
    find = load_salient_finder(salient) if isinstance(salient, str) else salient
    corpus, loaded = Corpus(texts, **reading), load_tokenizer(Path(tokenizer))
    if dry_run:
        from firth.lab.dry_run import describe_shards

        check_output_folder(folder, "--output-dir", overwrite, "shards", resume)
        return {"dry_run": True, **describe_shards(corpus, folder)}
    if resume and is_shards_folder(folder) and find_shard_damage(folder) is None:
        check_shard_tokenizer(folder, tokenizer)
        check_shard_salient(folder, find)
        check_shard_options(folder, {"held_out_share": held_out, "dedup": dedup})
        check_shard_source(folder, corpus)
        return summarize_shards(folder)
    check_output_folder(folder, "--output-dir", overwrite, "shards", resume)
    return _write_shards(
        corpus, loaded, folder, held_out, find, workers=workers, max_memory=max_memory, dedup=dedup, resume=resume
    )


def check_shard_salient(shards: Path, find_salient: SalientSpanFinder | None) -> None:
    """Refuse to resume shards that mark other salient spans."""
    saved = open_shards(shards).manifest.get("salient")
    given = salient_finder_name(find_salient) if find_salient else None
    if saved != given:
        raise UserError(
            f"{shards} was made with --salient {saved or 'left out'}, not {given or 'left out'}: name another "
            "--output-dir, or pass --overwrite instead of --resume."
        )


def check_shard_options(shards: Path, expected: Mapping[str, Any]) -> None:
    """Refuse to resume shards that were made with other options."""
    saved = open_shards(shards).manifest
    if other := [name for name, value in expected.items() if name in saved and saved[name] != value]:
        raise UserError(
            f"{shards} was made with {other[0]} {saved[other[0]]}, not {expected[other[0]]}: name another "
            "--output-dir, or pass --overwrite instead of --resume."
        )


def check_shard_source(shards: Path, corpus: Corpus) -> None:
    """Hash the text again, and refuse to resume shards of another text."""
    saved = open_shards(shards).manifest.get("source")
    if saved is None:
        say(f"{shards} is complete. Its manifest has no hash of the text, so changes cannot be detected.")
        return
    now = digest_documents(corpus, corpus.total_bytes)
    if now != saved:
        before, after = (format_count(source["documents"], "document") for source in (saved, now))
        change = f"{before} then, {after} now" if before != after else f"{before} then and now, but not the same"
        raise UserError(
            f"{shards} is complete, but the text has changed since it was made: {change}. Pass --overwrite instead of "
            "--resume, or name another --output-dir."
        )
    say(f"{shards} is complete, and the text has not changed.")


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
    workers: int = 0,
    **options: Any,
) -> dict[str, Any]:
    options |= {"total_bytes": corpus.total_bytes, "salient": salient, "resume": resume, "workers": workers}
    prepare_shards(corpus, tokenizer, folder, held_out, **options)
    remember_verified(folder)  # their checksums were just computed
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
    add_words: bool = False,
    dry_run: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Pretrain a model (preset, config or checkpoint) on shards or on text.

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
        return pretrain_static(
            str(model), data, tokenizer, data_options, changes, resume, overwrite, start_time, dry_run
        )
    saved = {} if overwrite else read_saved_fields(Path(output_dir), is_architecture(model))
    plan = plan_pretraining(
        model, data, output_dir, tokenizer, objective, data_options, config, overrides, options, saved
    )
    from firth.evaluate.pretraining_report import write_interrupted_report, write_pretraining_report_and_card
    from firth.train import pretrain_in_folder
    from firth.train.folder import check_run_folder, shared_run_folder
    from firth.train.launch import init_distributed

    if dry_run:
        check_run_folder(Path(output_dir), resume, overwrite, plan.inputs)
        return {"dry_run": True, **plan.describe()}
    dist, path = init_distributed(plan.recipe), Path(output_dir)
    if dist.is_restart(str(output_dir)):
        resume, overwrite, rewind = True, False, None
    resume = resume or rewind is not None
    with shared_run_folder(dist, path, resume, overwrite, plan.inputs) as folder:
        clock = RunClock(path, resume, start_time)

        def make_shards() -> dict[str, str]:
            shards = plan.make_shards(folder)
            clock.save()
            return shards

        with dist.enter_on_main(clock):
            recipe = resolve_on_main(dist, plan, dist.run_on_main(make_shards), clock)
            try:
                results = pretrain_in_folder(folder, recipe, resume, clock.start_time, allow_change, rewind)
            except Interrupted as e:
                # SIGTERM, which torchrun sends too, wants the process to end at once.
                if dist.world_size == 1 and e.code == Interrupted.code:
                    with report_errors():
                        write_interrupted_report(folder, clock.elapsed_seconds)
                raise
            report: dict[str, str] = {}
            if dist.is_main_process:
                with report_errors():
                    report = write_pretraining_report_and_card(folder, results)
            return {**results, **report}


def resolve_on_main(dist: DistContext, plan: PretrainPlan, shards: Mapping[str, str], clock: RunClock) -> Recipe:
    """The recipe of a run. A size is planned by the main process, as timed steps differ between processes."""
    if plan.architecture:
        return from_dict(
            dist.run_on_main(lambda: to_dict(plan.resolve_recipe(shards, True, clock.elapsed_seconds))),
            Recipe,
            "recipe",
        )
    recipe = plan.resolve_recipe(shards)
    if plan.is_new_preset and dist.is_main_process:
        warn_of_misfit(recipe, plan, shards)
    return recipe


def warn_of_misfit(recipe: Recipe, plan: PretrainPlan, shards: Mapping[str, str]) -> None:
    """Warn about a named model that is much too large or small for its text and minutes."""
    from firth.lab.planner import describe_misfit

    if not recipe.minutes or recipe.model.recurrent is not None or list(shards) != [""]:
        return
    try:
        message = describe_misfit(recipe, plan.make_planner(open_shards(Path(shards[""]))))
    except UserError:  # no other size takes the user's changes of the model, as a width that its heads do not divide
        return
    if message:
        warn(message)


@contextmanager
def report_errors() -> Iterator[None]:
    """Turn any error inside the block into a warning: a report must not fail a run whose model is written."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as e:
        warn(f"the report could not be written ({type(e).__name__}: {e}). The run itself is not affected.")


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
) -> dict[str, Any]:
    """Plan a pretraining: size and settings of the best model for a text, a budget and this machine.

    `model` is "encoder", "decoder", "encoder-decoder" or a preset. The budget is `minutes`, `passes` over the text or
    `tokens` to read; 30 minutes without one. `options` are fields of the recipe, and arguments of Corpus. The result
    has `chosen` with its expected time, memory and held-out loss, `smaller` and `larger` beside it, and `command`.

    `fit` fits a scaling law to six or more finished runs instead, and writes plan.html to `output_dir`.
    """
    if fit:
        if data is not None:
            raise UserError("--fit reads finished runs, --data a text to plan for: leave one out.")
        page = resolve_page_path(Path(output_dir), "plan", overwrite)
        from firth.lab.plan import fit_runs

        return fit_runs(fit, page)
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
        default_vocab_size(source.corpus.total_bytes, source.new_tokenizer_args[0]) if source.corpus else 0
    )
    command = write_command(found.chosen, source.sources, source.corpus, tokenizer, vocab_size, lowercase, options)
    return {**found.to_dict(), "notes": found.notes, "command": command}


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
    """Kill and resume a run `kills` times, and compare it bit for bit with an undisturbed run.

    Takes the arguments of `pretrain`. By default the run has 10 steps for each kill and a checkpoint every 5 steps.
    """
    if kills < 1:
        raise UserError(f"--kills is {kills}, and must be at least 1.")
    data_options = DataOptions(vocab_size, lowercase, held_out, pop_corpus_options(options))
    options = {"max_steps": 10 * kills, "save_steps": 5, **options}
    plan = plan_pretraining(model, data, output_dir, tokenizer, objective, data_options, config, overrides, options)
    from firth.lab.prove_resume import run_resume_proof
    from firth.train import run_folder

    with run_folder(Path(output_dir), overwrite=overwrite, inputs=plan.inputs) as folder:
        return run_resume_proof(plan.resolve_recipe(plan.make_shards(folder)), folder, kills)


def pretrain_static(
    name: str,
    data: str | Path | Sequence[str | Path],
    tokenizer: str | Path | None,
    data_options: DataOptions,
    changes: Mapping[str, Any],
    resume: bool,
    overwrite: bool,
    start_time: float,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Train word2vec, GloVe or an n-gram model. Text, shards and the run folder are as in `pretrain`."""
    from firth.static.recipe import STATIC_RECIPES

    if name == "ngram" and (length := next((field for field in DURATION_FIELDS if field in changes), None)):
        raise UserError(
            f"{length}: an n-gram model reads its text once, so its duration cannot be set. Leave it out; order=2 or "
            "less text takes less time."
        )
    recipe = apply_overrides(
        STATIC_RECIPES[name](), {STATIC_FIELD_NAMES.get(field, field): value for field, value in changes.items()}
    )
    recipe.check()
    check_held_out_share(data_options.held_out)
    sources = [data] if isinstance(data, str | Path) else list(data)
    kind, vocab_size = STATIC_TOKENIZERS[name]
    new_tokenizer_args = [kind, data_options.vocab_size or vocab_size, data_options.lowercase]
    source = open_data_source(sources, tokenizer, data_options, new_tokenizer_args)
    if dry_run:
        from firth.lab.dry_run import describe_static_training
        from firth.train.folder import check_run_folder

        check_run_folder(Path(recipe.output_dir), resume, overwrite, source.inputs)
        text, num_tokens, vocab = source.describe()
        return {"dry_run": True, **describe_static_training(recipe, text, num_tokens, vocab)}
    from firth.evaluate.card import write_static_card
    from firth.evaluate.neighbours import (
        next_vector_commands,
        sample_neighbours,
        write_interrupted_vector_report,
        write_vector_report,
    )
    from firth.evaluate.pretraining_report import write_ngram_report
    from firth.evaluate.vectors import load_word_vectors
    from firth.static.train import run_static_recipe  # loads numba
    from firth.train import run_folder

    with run_folder(Path(recipe.output_dir), resume, overwrite, source.inputs) as folder:
        clock = RunClock(Path(recipe.output_dir), resume, start_time)
        shards = source.make_shards(folder)[""]
        recipe = replace(recipe, data=shards, tokenizer=open_shards(Path(shards)).tokenizer.fingerprint)
        clock.save()
        try:
            results = run_static_recipe(folder, recipe, resume, clock.start_time)
        except Interrupted as e:
            if e.code == Interrupted.code:
                with report_errors():
                    write_interrupted_vector_report(folder, name)
            raise
        with report_errors():
            write_static_card(folder, name, results)
            if name == "ngram":
                return {**results, **write_ngram_report(folder, results)}
            if "similar" not in results:
                results["similar"] = sample_neighbours(load_word_vectors(folder / "final"))
                results["report"] = str(write_vector_report(folder, name, results))
                write_json(folder / "results.json", results)
            command = next(iter(next_vector_commands(folder, results["similar"]).values()))
            return {**results, "summary": f"vectors of {format_count(results['words'], 'word')}", "next": command}
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
    """Show inputs, masks and labels of the first rows of the first step, before any training.

    Takes the arguments of `pretrain`. Writes show.html to `output_dir`, and to the terminal if `printed`.
    """
    if rows < 1:
        raise UserError(f"--rows is {rows}, and must be at least 1.")
    page = resolve_page_path(Path(output_dir), "show", overwrite)
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
    return {**preview.to_dict(), "page": str(page)}


class DataOptions(NamedTuple):
    """How text becomes shards: size and case of a new tokenizer, held-out fraction, arguments of Corpus.

    `add_words` adds the words of the text to a given word tokenizer.
    """

    vocab_size: int
    lowercase: bool
    held_out: float
    corpus_options: dict[str, Any]
    add_words: bool = False


def pop_corpus_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the arguments of Corpus from `options`, and return them with their defaults."""
    reading = {name: options.pop(name) for name in CORPUS_OPTIONS if name in options}
    return {"documents": "auto", "columns": {}, "encoding": "utf-8"} | {k: v for k, v in reading.items() if v}


class DataSource(NamedTuple):
    """The text or shards of a run, resolved and checked before anything is written."""

    sources: list[str | Path]
    tokenizer_path: str | Path | None  # folder of a tokenizer or checkpoint
    data_options: DataOptions
    new_tokenizer_args: list[Any]  # kind, size and case of a tokenizer to train
    marks_salient: bool  # mark names, numbers and dates
    corpus: Corpus | None  # the text of all sources; None where all are shards
    tokenizer: Tokenizer | None  # None: train one, or take that of the shards
    by_name: dict[str, Corpus | str]  # text or a folder of shards; "" names the source of a run without a mix

    @property
    def inputs(self) -> list[str | Path]:
        """Paths that the run reads and must not overwrite."""
        sources = parse_named_sources(self.sources).values() or self.sources
        return [*sources, *([self.tokenizer_path] if self.tokenizer_path else [])]

    def describe(self) -> tuple[dict[str, Any], int, int]:
        """Return what is read, its tokens (those of text are estimated) and the size of the vocabulary."""
        from firth.lab.dry_run import describe_text

        if self.corpus is None:
            shards = [open_shards(Path(folder)) for folder in self.by_name.values() if isinstance(folder, str)]
            num_tokens = sum(part.num_tokens for part in shards)
            return (
                {"reads": list(map(str, self.sources)), "tokens": num_tokens},
                num_tokens,
                shards[0].tokenizer.vocab.size,
            )
        data, default = describe_text(self.corpus), default_vocab_size(self.corpus.total_bytes)
        vocab = self.tokenizer.vocab.size if self.tokenizer else self.new_tokenizer_args[1] or default
        return data, data["estimated_tokens"], vocab

    def source_record(self, corpus: Corpus) -> dict[str, Any]:
        """Everything that the shards depend on, as written to source.json."""
        return {
            "data": list(map(str, self.sources)),
            "bytes": corpus.total_bytes,
            **self.data_options.corpus_options,
            "tokenizer": self.tokenizer.fingerprint if self.tokenizer is not None else self.new_tokenizer_args,
            "held_out": self.data_options.held_out,
            **({"salient": "default"} if self.marks_salient else {}),
            **({"add_words": True} if self.data_options.add_words else {}),
        }

    def make_shards(
        self, folder: Path, check_tokenizer_fn: Callable[[Tokenizer], None] = lambda _: None
    ) -> dict[str, str]:
        """Return the folders of shards by source. Text becomes FOLDER/data, or FOLDER/data/SOURCE in a mix.

        `check_tokenizer_fn` can refuse a tokenizer before the text is tokenized.
        """
        given = {name: source for name, source in self.by_name.items() if isinstance(source, str)}
        texts = {name: source for name, source in self.by_name.items() if isinstance(source, Corpus)}
        if self.corpus is None:
            return given
        check_same_source(folder / "source.json", self.source_record(self.corpus))
        made = {name: folder / "data" / name for name in texts}
        missing = [
            name for name, path in made.items() if not is_shards_folder(path) or find_shard_damage(path) is not None
        ]
        for name in made.keys() - missing:
            remove_finished_journal(made[name])
        if missing:
            tokenizer = self.tokenizer or train_run_tokenizer(folder, self.corpus, *self.new_tokenizer_args)
            if self.data_options.add_words:
                tokenizer = extend_word_tokenizer(tokenizer, self.corpus.texts())
            check_tokenizer_fn(tokenizer)
            if self.marks_salient:
                say("Names, numbers and dates are marked as salient; `firth prepare --salient` can mark other spans.")
            salient = load_salient_finder("default") if self.marks_salient else None
            for name in missing:
                _write_shards(texts[name], tokenizer, made[name], self.data_options.held_out, salient)
        return {name: given.get(name) or str(made[name]) for name in self.by_name}


def open_data_source(
    sources: list[str | Path],
    tokenizer_path: str | Path | None,
    data_options: DataOptions,
    new_tokenizer_args: list[Any],
    marks_salient: bool = False,
    named_sources: Mapping[str, str] | None = None,
) -> DataSource:
    """Open text or shards with a given tokenizer; `named_sources` are the sources of a mix."""
    paths: dict[str, list[str | Path]] = {name: [path] for name, path in (named_sources or {}).items()} or {"": sources}
    shards = {
        name: str(given[0]) for name, given in paths.items() if len(given) == 1 and is_shards_folder(Path(given[0]))
    }
    for folder in shards.values():
        check_shard_tokenizer(Path(folder), tokenizer_path)
    text_paths = [path for name, given in paths.items() if name not in shards for path in given]
    corpus = Corpus(text_paths, **data_options.corpus_options) if text_paths else None
    by_name = {
        name: shards[name] if name in shards else Corpus(given, **data_options.corpus_options)
        for name, given in paths.items()
    }
    tokenizer = load_tokenizer(Path(tokenizer_path)) if tokenizer_path is not None else None
    if tokenizer is None and shards:
        tokenizer = open_shards(Path(next(iter(shards.values())))).tokenizer
    return DataSource(
        sources, tokenizer_path, data_options, new_tokenizer_args, marks_salient, corpus, tokenizer, by_name
    )


@dataclass(frozen=True)
class PretrainPlan:
    """A recipe and its data, checked before anything is written."""

    recipe: Recipe
    keeps_vocab_size: bool  # of the model; otherwise it gets that of the tokenizer
    data_source: DataSource
    chooses_batch: bool  # from the text, in a new run that names no batch
    chooses_rate: bool  # follows a batch that is chosen or set in tokens
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
        return self.data_source.make_shards(
            folder, lambda tokenizer: objective.check(tokenizer.vocab, objective.source_length(length))
        )

    def describe(self) -> dict[str, Any]:
        """What the run would do, for --dry-run: the tokens of shards are counted, those of text are estimated."""
        from firth.lab.dry_run import describe_pretraining

        data, num_tokens, vocab = self.data_source.describe()
        if self.architecture:
            return self.describe_planned(data)
        recipe = self.recipe
        config = recipe.model if self.keeps_vocab_size else replace(recipe.model, vocab_size=vocab)
        recipe = self.choose_batch(replace(recipe, model=config), num_tokens)
        if self.is_new_preset and self.data_source.corpus is None:
            warn_of_misfit(recipe, self, {name: str(folder) for name, folder in self.data_source.by_name.items()})
        return describe_pretraining(recipe, data, num_tokens)

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
            "expected_loss": run.loss,
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
        size = size or default_vocab_size(source.corpus.total_bytes, kind)
        held_out = source.data_options.held_out
        sample = sample_text(source.corpus, source.tokenizer, (kind, size, lowercase), held_out, folder)
        yield self.make_planner(sample.shards, sample.scale, sample.prepare_seconds)

    def make_planner(
        self, shards: ShardSet, scale: float = 1.0, prepare_seconds: float = 0.0, elapsed_seconds: float = 0.0
    ) -> Planner:
        """A planner whose recipes have everything that the user has set, for a text of `scale` times these shards."""
        from firth.lab.plan_text import read_text_facts
        from firth.lab.planner import Planner
        from firth.train.launch_env import read_launch_env

        def make_recipe(config: ModelConfig) -> Recipe:
            recipe = self.make_recipe(config)
            if not self.keeps_vocab_size:
                recipe = replace(recipe, model=with_vocabulary(recipe.model, shards.tokenizer.vocab))
            return replace(recipe, processes=num_devices)

        launched = read_launch_env()
        num_devices = launched.world_size if launched is not None else 1
        keeps = {"batch": self.chooses_batch, "rate": self.chooses_rate, "save_steps": not self.keeps_save_steps}
        return Planner(
            make_recipe,
            shards,
            read_text_facts(make_recipe(self.recipe.model), shards, scale, prepare_seconds),
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
            for note in found.notes:
                warn(note)
            recipe = replace(found.chosen.recipe, processes=self.recipe.processes)
        elif not self.keeps_vocab_size:
            recipe = replace(recipe, model=with_vocabulary(recipe.model, tokenizer.vocab))
        sources = {name: folder for name, folder in shards.items() if name}
        recipe = replace(recipe, data=shards.get("", ""), sources=sources, tokenizer=tokenizer.fingerprint)
        if not self.architecture:
            recipe = self.choose_batch(recipe, sum(open_shards(Path(folder)).num_tokens for folder in shards.values()))
        recipe.check()
        return recipe

    def choose_batch(self, recipe: Recipe, text_tokens: int) -> Recipe:
        """The recipe with its global batch, and the learning rate that follows from it."""
        if self.chooses_batch:
            recipe = with_chosen_batch(recipe, text_tokens)
        if self.chooses_rate and recipe.global_batch_tokens:
            rate = scale_rate_to_batch(recipe.learning_rate, recipe.model, recipe.global_batch_tokens)
            if rate != recipe.learning_rate:
                say(f"learning rate: {rate:g} instead of {recipe.learning_rate:g}, as it follows the batch")
            recipe = replace(recipe, learning_rate=rate)
        return recipe


def with_chosen_batch(recipe: Recipe, text_tokens: int) -> Recipe:
    """The recipe with the global batch that suits model, text, time and device, which is said."""
    from firth.train.distributed import SINGLE_PROCESS, select_device
    from firth.train.launch_env import read_launch_env
    from firth.train.resources import estimate_tokens_per_second

    device, length = select_device(SINGLE_PROCESS, recipe), recipe.max_seq_length
    launched, on_gpu = read_launch_env(), device.type == "cuda"
    num_devices, run_length = launched.world_size if launched is not None else 1, dict[str, Any]()
    if recipe.minutes:
        speed = num_devices * estimate_tokens_per_second(recipe.model, length, device)
        run_length["tokens_read"] = 60 * recipe.minutes * speed
    elif recipe.max_steps:
        run_length["max_steps"] = recipe.max_steps
    else:
        run_length["tokens_read"] = recipe.num_train_epochs * text_tokens
    choice = choose_batch(recipe.model, length, text_tokens, on_gpu, num_devices, **run_length)
    rows = format_count(choice.tokens // length, "row")
    say(f"global batch: {choice.tokens:,} tokens, {rows} of {length} ({choice.reason})")
    return replace(recipe, global_batch_tokens=choice.tokens)


def read_saved_fields(run: Path, is_planned: bool = False) -> dict[str, Any]:
    """Fields that a resumed run keeps, from the recipe in its folder; empty for a new run.

    A run whose size was planned keeps that too.
    """
    saved = read_yaml_mapping(run / "recipe.yaml") if (run / "recipe.yaml").is_file() else {}
    names = (*KEPT_ON_RESUME_FIELDS, *(PLANNED_FIELDS if is_planned else ()))
    return {name: saved[name] for name in names if name in saved}


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

    A field that is not given keeps the value of the saved recipe of a resumed run, or the model's default. The size of
    an architecture is planned later, from the text; until then its smallest model stands for it. `token_budget` are
    the tokens that a plan may read.
    """
    architecture = str(model) if is_architecture(model) and not saved_fields else ""
    model_config, checkpoint = resolve_model(model)
    named = {"output_dir": str(output_dir), "checkpoint": str(checkpoint or ""), "data": "", "tokenizer": ""}
    changes = merge_recipe_changes(config, {**options, "objective": objective_fields(objective)}, overrides, named)
    defaults = {} if checkpoint is None else {**continued_defaults(model_config), **next_run_seed(checkpoint)}
    if architecture and not (changes.get("minutes") or changes.get("max_steps") or changes.get("num_train_epochs")):
        say(f"no --minutes, --max-steps or --num-train-epochs: planning for {DEFAULT_PLANNED_MINUTES:g} minutes")
        defaults["minutes"] = DEFAULT_PLANNED_MINUTES

    def make_recipe(config: ModelConfig) -> Recipe:
        return update_recipe(pretraining_recipe(config), {**defaults, **(saved_fields or {}), **changes})

    recipe = make_recipe(model_config)
    recipe.check()
    check_held_out_share(data_options.held_out)
    sources = [data] if isinstance(data, str | Path) else list(data)
    tokenizer_path = tokenizer or checkpoint
    if tokenizer and checkpoint and load_tokenizer(tokenizer).fingerprint != load_tokenizer(checkpoint).fingerprint:
        raise UserError(f"{tokenizer} is not the tokenizer that {checkpoint} was trained with. Leave out --tokenizer.")
    if data_options.add_words:
        check_can_add_words(checkpoint, sources)
    if checkpoint and (data_options.vocab_size or data_options.lowercase):
        raise UserError(f"{checkpoint} keeps its tokenizer. Leave out --vocab-size and --lowercase.")
    mixed = parse_named_sources(sources)
    if mixed and architecture:
        raise UserError(
            f"The size of {architecture} is planned for one text. Name a size for a mix: {architecture}-8x512."
        )
    if recipe.mixing != MixConfig() and not mixed:
        raise UserError("A mix needs several named sources: --data a=a.txt --data b=b.txt.")
    if mixed:  # refuse wrong names before any text is tokenized
        recipe.mixing.row_weights(dict.fromkeys(mixed, 1), dict.fromkeys(mixed, 1))
    if mixed and "warm_start" not in changes:
        recipe = replace(recipe, warm_start="none")
    new = [tokenizer_kind(recipe.model, recipe.objective), data_options.vocab_size, data_options.lowercase]
    marks_salient = "salient" in recipe.objective.token_flags
    source = open_data_source(sources, tokenizer_path, data_options, new, marks_salient, mixed)
    keeps_vocab_size = (checkpoint is not None and not data_options.add_words) or "model.vocab_size" in changes
    names_batch = recipe.per_device_train_batch_size or recipe.global_batch_tokens
    chooses_rate = not saved_fields and "learning_rate" not in changes
    return PretrainPlan(
        recipe,
        keeps_vocab_size,
        source,
        not (saved_fields or names_batch),
        chooses_rate,
        make_recipe,
        architecture,
        not saved_fields and checkpoint is None,
        "save_steps" in changes,
        token_budget,
    )


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


def parse_named_sources(sources: Sequence[str | Path]) -> dict[str, str]:
    """The sources of a mix by name, from NAME=TEXT, NAME=SHARDS or several folders of shards; empty without a mix."""
    pairs = [str(source).partition("=") for source in sources]
    named = [bool(equals) and not Path(source).exists() for source, (_, equals, _) in zip(sources, pairs, strict=True)]
    if not any(named):
        several = len(sources) > 1 and all(is_shards_folder(source) for source in sources)
        pairs = [(Path(source).resolve().name, "=", str(source)) for source in sources] if several else []
    elif not all(named):
        raise UserError(f"--data {sources[named.index(False)]} has no name, the others have. Write NAME=PATH.")
    by_name = {name: path for name, _, path in pairs}
    if len(by_name) < len(pairs):
        raise UserError("Two --data have the same name. Write --data a=a.txt --data b=b.txt.")
    for name, path in by_name.items():
        if Path(name).name != name:
            raise UserError(f"--data {name}={path}: {quote(name)} cannot name a folder. Use letters and digits.")
    return by_name


def objective_fields(name: str | None) -> dict[str, Any] | None:
    """The fields of a named objective, which KEY=VALUE can then change."""
    if name is None:
        return None
    if name not in OBJECTIVES:
        raise UserError(f"Unknown objective {quote(name)}. {did_you_mean(name, OBJECTIVES)}")
    return {TYPE_KEY: type(OBJECTIVES[name]).__name__, **to_dict(OBJECTIVES[name])}


def is_architecture(model: str | Path) -> bool:
    """Whether MODEL is an architecture, whose size is planned; a checkpoint folder of that name comes first."""
    return str(model) in ARCHITECTURE_FAMILIES and not (Path(model) / "config.json").is_file()


def resolve_model(name: str | Path) -> tuple[ModelConfig, Path | None]:
    """Config of a preset, config file or checkpoint folder, and the folder of its weights.

    An architecture has the config of its smallest model.
    """
    path = Path(name)
    if is_architecture(name):
        return shaped_model(str(name), 2, 64), None
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
    """Write source.json; refuse to resume a run on another text or with other options of reading it."""
    saved = read_object(file) if file.is_file() else source
    if changed := [
        f"{name}: {saved.get(name)} -> {source.get(name)}"
        for name in {**source, **saved}
        if saved.get(name) != source.get(name)
    ]:
        raise UserError(
            "Cannot resume: text or options differ: " + "; ".join(changed) + ". "
            "Give the same text and options, start over with --overwrite, or name another --output-dir."
        )
    write_json(file, source)


def train_run_tokenizer(folder: Path, corpus: Corpus, kind: str, vocab_size: int, lowercase: bool) -> Tokenizer:
    """Train a tokenizer in the run's folder, unless it is there already."""
    path = folder / "tokenizer"
    if find_corruption(path) is not None:
        size = vocab_size or default_vocab_size(corpus.total_bytes, kind)
        with atomic_folder(path, "tokenizer") as temporary:
            normalize = corpus.cleaner.normalize
            train_tokenizer(corpus.texts(), kind, size, lowercase, normalize=normalize).save(temporary)
    return load_tokenizer(path)


def check_shard_tokenizer(shards: Path, tokenizer_path: str | Path | None) -> None:
    if tokenizer_path is None:
        return
    if load_tokenizer(Path(tokenizer_path)).fingerprint != open_shards(shards).tokenizer.fingerprint:
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
    """Merge a YAML file, options and KEY=VALUE, the later ones on top; the command itself sets `fixed_fields`."""
    if wrong := [name for name in overrides or {} if name in fixed_fields]:
        raise UserError(
            f"{wrong[0]}={(overrides or {})[wrong[0]]}: set this with its own option or argument (see --help)."
        )
    changes: dict[str, Any] = flatten_keys(read_yaml_mapping(Path(config))) if config else {}
    given = {name: value for name, value in options.items() if value is not None} | dict(overrides or {})
    if given.get("minutes") == 0:  # a saved recipe has it, for no limit
        raise UserError("minutes is 0, and must be more than 0. Leave it out for a run without a time limit.")
    merged = {**changes, **given, **fixed_fields}
    if merged.get("per_device_train_batch_size") == "auto":
        merged["per_device_train_batch_size"] = 0
    return merged


def flatten_keys(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested keys to dotted ones; a value with a `kind` is replaced as a whole."""
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) and "kind" not in value:
            flat |= flatten_keys(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


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
    dry_run: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Fine-tune a checkpoint on a task with several seeds; return the mean and standard deviation of the scores.

    Mappings of names to files as `train` and `dev` train on several tasks at once (T5, section 3.5.2), with `task` and
    `prefix` by name too. The defaults are the task that the columns tell, and the prefix "NAME: ".

    `learning_rate` is a number, or "auto" (the default): the best of three tried on a split of train.

    `recipe` names a published one ("ulmfit", "dai-le", "elmo"); the default is the family's own. With `target_text` the
    checkpoint is first pretrained on that text, in OUTPUT_DIR-target (ULMFiT's second stage). A resumed run whose
    recipe or examples have changed is refused unless `allow_change`; `rewind` is as in `pretrain`.

    `against` fine-tunes a second arm with the same settings, and tests the difference: "scratch" starts from random
    weights, a folder from another checkpoint. The arms are the runs finetuned/ and scratch/ (or against/).
    `dry_run` estimates the run and writes nothing.
    """
    require_single_process("Fine-tuning runs in one process: start one run per GPU for several seeds.")
    named: dict[str, Any] = {"output_dir": str(output_dir), **({"columns": dict(columns)} if columns else {})}
    if isinstance(train, Mapping) or isinstance(dev, Mapping) or isinstance(task, Mapping):
        encoding = str(options.get("encoding") or "utf-8")
        named["tasks"] = name_tasks(task, train, dev, options.pop("prefix", None), columns, encoding)
    else:
        named |= {"task": task, "train": str(train), "dev": str(dev)}

    def make_plan(start: str | Path) -> FinetuneRecipe:
        model_config = read_finetune_config(start)
        changes = merge_recipe_changes(config, options, overrides, {"checkpoint": str(start), **named})
        fields = finetuning_defaults(model_config, changes.get("optim"), lora=bool(changes.get("lora_rank")))
        if task == "preference":
            fields = preference_defaults(fields)
        if recipe is not None:
            fields = named_recipe(recipe, model_config, task if isinstance(task, str) else "text-to-text")
            changes.setdefault("learning_rate", fields["learning_rate"])  # the published one
        fields, changes = with_rate_candidates(fields, changes)
        plan, limit = apply_overrides(FinetuneRecipe(**fields), changes), model_config.max_length
        if "max_seq_length" in changes and limit is not None and plan.max_seq_length > limit:
            raise UserError(
                f"--max-seq-length {plan.max_seq_length:,} is longer than the {limit:,} positions of {start}. Choose "
                f"{limit:,} or less; longer texts are truncated."
            )
        return plan

    plan = make_plan(checkpoint)
    if plan.parallel != "none":
        raise UserError(f"parallel={plan.parallel} is for pretraining: fine-tuning runs in one process. Leave it out.")
    if dry_run:
        from firth.lab.dry_run import describe_finetuning
        from firth.train.folder import check_run_folder

        check_run_folder(Path(output_dir), resume, overwrite, [plan.checkpoint, *plan.label_files])
        return {"dry_run": True, **describe_finetuning(plan, num_arms=1 if against is None else 2)}
    if against is not None:
        given = {"--from-scratch": plan.from_scratch, "--target-text": target_text, "--rewind": rewind is not None}
        if wrong := next((name for name, value in given.items() if value), None):
            raise UserError(f"--against {against} and {wrong} exclude each other: leave one out.")
        from firth.lab.against import SCRATCH, finetune_against

        other = replace(plan, from_scratch=True) if str(against) == SCRATCH else make_plan(against)
        return finetune_against(plan, other, resume, overwrite, allow_change)
    from firth.evaluate import write_run_report_and_card
    from firth.tasks import check_task
    from firth.tasks import finetune as run_finetune
    from firth.tasks.finetune import read_finetune_data

    if target_text:
        check_task(plan)  # before the first stage, which takes long
        stage = {"resume": resume or rewind is not None, "overwrite": overwrite, "allow_change": allow_change}
        adapted = adapt_to_target_text(checkpoint, target_text, output_dir, **stage, device=plan.device)
        plan = replace(plan, checkpoint=str(adapted))
    result = run_finetune(plan, resume, overwrite, allow_change, rewind)
    with quiet():  # the run has printed all notices on these files
        examples = read_finetune_data(plan).dev
    return {**result, "report": str(write_run_report_and_card(Path(plan.output_dir), result, examples))}


def read_finetune_config(checkpoint: str | Path) -> ModelConfig:
    """Read the config of a checkpoint; a path that is none is an error that says how to make one."""
    if not Path(checkpoint).is_dir():
        export = " `firth export FILE --format firth` makes one of a file of word vectors." * Path(checkpoint).is_file()
        raise UserError(f"{checkpoint} is not a checkpoint folder. `firth pretrain` makes one: RUN/final.{export}")
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
    """Score a checkpoint on a file, and write results, predictions and a report to `output_dir`.

    The default folder is evaluate-TASK-FILE beside the checkpoint, numbered if it has other results. The default `task`
    is the one that the checkpoint was fine-tuned for. `settings` are those of the task, as `stride` for perplexity.
    `shots=4, train=FILE` scores labels in a prompt with demonstrations, without fine-tuning. The task "induction" needs
    no `data`.
    """
    task = task or read_finetuned_task(checkpoint)
    if (data is None) != (task == "induction"):
        needs = f"No data to score the task {task} on: give --data FILE."
        raise UserError(needs if data is None else "The task induction makes its own data: leave out --data.")
    if isinstance(data, Sequence) and not isinstance(data, str) and len(data) == 1:
        data = data[0]
    shots = settings.get("shots")
    name = task if data is None else f"{task}-{short_data_name(data)}"
    name += "-ensemble" * bool(settings.get("ensemble")) + (f"-{shots}-shot" if shots is not None else "")
    path = Path(output_dir) if output_dir else default_evaluation_folder(checkpoint, name)
    settings = {"columns": columns, "overwrite": overwrite, "encoding": encoding, "documents": documents} | settings
    from firth.evaluate import evaluate as evaluate_checkpoint

    return evaluate_checkpoint(checkpoint, task, data, path, numbered=output_dir is None, **settings)


def predict(
    checkpoint: str | Path | Model,
    inputs: str | Mapping[str, Any] | Iterable[PredictInput],
    task: str | None = None,
    batch_size: int = 32,
) -> Any:
    """Ask a fine-tuned checkpoint: labels, scores, spans, answers, texts or vectors for new inputs.

    An input is a text, a list of texts (a pair; question and context; context and choices) or a record with the columns
    of the training file. Several inputs give a list of records, a single text or record gives one. `task` selects one
    of several tasks. To ask repeatedly, load the model once: `firth.Predictor(checkpoint).predict(inputs)`.
    """
    from firth.evaluate.predict import Predictor

    single = isinstance(inputs, str | Mapping)
    predictor = Predictor(checkpoint, task or "", batch_size)
    records = predictor.predict([inputs] if single else inputs)  # type: ignore[list-item]
    for notice in predictor.notices:
        say(notice)
    return records[0] if single else records


def read_finetuned_task(checkpoint: str | Path) -> str:
    """The task that a checkpoint was fine-tuned for."""
    file = Path(checkpoint) / TASK_FILE
    if not Path(checkpoint).is_dir():
        raise UserError(f"{checkpoint} is not a checkpoint folder: there is no such folder.")
    if not file.is_file():
        raise UserError(
            f"{checkpoint} was not fine-tuned, so it predicts no labels. Fine-tune it first "
            f"(firth finetune {checkpoint} ...), or name a task that needs no labels: --task perplexity."
        )
    facts = read_task_file(Path(checkpoint))
    if "tasks" in facts:
        raise UserError(
            f"{checkpoint} was fine-tuned for several tasks: choose one by --task {' or '.join(facts['tasks'])}."
        )
    return str(facts["task"])


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
    average. `resume` keeps finished tasks.
    """
    path = Path(output_dir) if output_dir else default_evaluation_folder(checkpoint, Path(suite).stem)
    changes = merge_recipe_changes(config, options, overrides, {})
    from firth.evaluate import evaluate_suite as run_suite

    result = run_suite(checkpoint, suite, path, data, seeds, tasks, changes, resume, overwrite)
    scores = {name: task["score"] for name, task in result["tasks"].items()}
    metrics = {**scores, "average": result["average"]}
    return {**result, "metrics": metrics, "predictions": str(path), "report": str(path / "report.html")}


def generate(
    checkpoint: str | Path | Model,
    prompt: str | Sequence[str],
    chat: bool | None = None,
    bf16: bool = False,
    draft: str | Path | Model | None = None,
    **settings: Any,
) -> str | list[str]:
    """Continue a prompt, or several. `settings` are fields of `GenerationConfig`: temperature=0.8.

    One prompt gives a text; several, or num_return_sequences above 1, give a list. A checkpoint that was fine-tuned to
    answer gets the prompt in the format of its training, and returns the answer alone, with the length and the beams
    that it was scored with. `chat` puts the prompt into the chat template as a user's message. A checkpoint is computed
    on the GPU where there is one, with `bf16` in bfloat16; a model stays where it is. `draft` is a smaller model with
    the same tokenizer that proposes tokens (speculative decoding): the same greedy text, or the same distribution.

    `json_schema`, `regex`, `choices` or `grammar` give structured output: the text alone, without the prompt.
    """
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(checkpoint, str | Path) and is_ngram(checkpoint):
        results = generate_with_ngram(checkpoint, prompts, settings)
    else:
        model, encoded, defaults = load_for_generation(checkpoint, prompts, chat, bf16)
        results = generate_in_batches(model, encoded, defaults | settings, load_draft(draft, bf16))
    texts = [result["text"] for result in results]
    return texts[0] if isinstance(prompt, str) and len(texts) == 1 else texts


def generate_with_ngram(
    checkpoint: str | Path, prompts: Sequence[str], settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Generate with an n-gram model; the same results as `generate_in_batches`."""
    from firth.generate.ngram import generate_ngram_results

    return generate_ngram_results(load_ngram(checkpoint), prompts, make_generation_config(None, dict(settings)))


def load_for_generation(
    checkpoint: str | Path | Model, prompts: Sequence[str], chat: bool | None = None, bf16: bool = False
) -> tuple[Model, list[str | list[int]], dict[str, Any]]:
    """Return a model, its prompts in the format of its fine-tuning, and its generation defaults.

    A model that is already loaded has no task file, and gets the prompts unchanged. It also stays on its device.
    """
    from firth.models import load_model
    from firth.tasks import encode_task_prompts, finetuned_generation_settings

    if not isinstance(checkpoint, str | Path):
        return checkpoint, encode_task_prompts(checkpoint, {}, prompts, chat), {}
    model, facts = load_model(checkpoint), read_task_file(Path(checkpoint))
    encoded = encode_task_prompts(model, facts, prompts, chat)
    model = move_for_generation(model, bf16)
    return model, encoded, finetuned_generation_settings(model, facts)


def move_for_generation(model: Model, bf16: bool = False) -> Model:
    """Put a model on the GPU, if there is one; with `bf16` round its weights to bfloat16."""
    import torch

    return model.to("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16 if bf16 else None)


def load_draft(draft: str | Path | Model | None, bf16: bool = False) -> Model | None:
    """Load the draft model of speculative decoding."""
    from firth.models import load_model

    return move_for_generation(load_model(draft), bf16) if isinstance(draft, str | Path) else draft


def with_structured_length(model: Model, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return generation settings, in which structured output has a length that suits it unless one is given."""
    from firth.generate.text import default_structured_tokens

    is_structured = any(settings.get(name) is not None for name in CONSTRAINTS)
    return ({"max_new_tokens": default_structured_tokens(model)} if is_structured else {}) | dict(settings)


def generate_in_batches(
    model: Model, prompts: Sequence[str | list[int]], settings: Mapping[str, Any], draft: Model | None = None
) -> list[dict[str, Any]]:
    """Run `generate_results` on all prompts, a batch at a time.

    On a GPU a batch may be large: prompts wait until a sequence before them has ended.
    """
    from firth.generate import generate_results
    from firth.generate.text import describe_incomplete

    config = make_generation_config(None, with_structured_length(model, settings))
    results: list[dict[str, Any]] = []
    num_sequences = MAX_QUEUED_SEQUENCES if model.embed.tokens.weight.is_cuda else MAX_CONCURRENT_SEQUENCES
    size = max(1, (MAX_CONCURRENT_SEQUENCES if config.num_beams > 1 else num_sequences) // config.num_beams)
    size = max(1, size // config.num_return_sequences)
    with progress("generating", "texts", len(prompts) * config.num_return_sequences) as shown:
        for first in range(0, len(prompts), size):
            part = prompts[first : first + size]
            results += generate_results(model, part, config, first_prompt=first, on_finished=shown.advance, draft=draft)
    if problem := describe_incomplete(results, config):
        warn(problem)
    return results


def embed(
    checkpoint: str | Path | Model,
    texts: str | Sequence[str],
    pool: Literal["auto", "first", "mean", "last"] = "auto",
    layer: int = -1,
    normalize: bool = False,
    max_seq_length: int = 0,
) -> np.ndarray:
    """Embed texts as (texts, width) float32; a single string gives one vector.

    `pool` takes the hidden state of the first or last token, or the mean over all; "auto" pools as the checkpoint was
    fine-tuned (`--task embed`), else by the mean. `layer` 0 is the embedding, -1 the last. `normalize` scales vectors
    to length 1, so that dot products are cosines.
    """
    batch = [texts] if isinstance(texts, str) else list(texts)
    if not batch:
        raise UserError("There is no text to embed.")
    from firth.evaluate import embed_texts

    vectors = embed_texts(checkpoint, batch, pool, layer, normalize, max_seq_length)
    return vectors[0] if isinstance(texts, str) else vectors


def fill(checkpoint: str | Path | Model, text: str, top: int = 5) -> list[Blank]:
    """The most likely words for the blanks of a text."""
    from firth.generate import fill as fill_blanks
    from firth.models import load_model

    return fill_blanks(load_model(checkpoint) if isinstance(checkpoint, str | Path) else checkpoint, text, top)


def similar(
    vectors: str | Path | Model, words: str | Sequence[str], negative: Sequence[str] = (), top: int = 10
) -> list[Neighbour]:
    """The words nearest to `words` and far from `negative`, by the vectors of a checkpoint or a file."""
    from firth.evaluate.neighbours import most_similar
    from firth.evaluate.vectors import load_word_vectors

    return most_similar(load_word_vectors(vectors), [words] if isinstance(words, str) else words, negative, top)


def compare(
    word: str,
    texts: Sequence[str],
    checkpoints: Sequence[str | Path | Model] | str | Path | Model,
    layer: int = -1,
    among: Sequence[str | Path] = (),
    top: int = 5,
) -> dict[str, Any]:
    """Compare the vectors of a word in several texts, by each checkpoint.

    A checkpoint of word2vec or GloVe, or a file of word vectors, has one vector for all texts. The nearest words are
    searched in the files `among`.
    """
    from firth.evaluate import compare_contexts
    from firth.models import Model

    sources = [checkpoints] if isinstance(checkpoints, str | Path | Model) else list(checkpoints)
    return compare_contexts(word, list(texts), sources, layer, Corpus(among).texts() if among else (), top)


def serve(checkpoints: str | Path | Sequence[str | Path], **settings: Any) -> None:
    """Answer requests over HTTP until Ctrl-C. `settings` are fields of `firth.serve.config.ServeConfig`: port=8080."""
    from firth.serve.config import ServeConfig
    from firth.serve.server import serve as serve_checkpoints

    given = [checkpoints] if isinstance(checkpoints, str | Path) else checkpoints
    serve_checkpoints([str(checkpoint) for checkpoint in given], ServeConfig(**settings))


def export(
    checkpoint: str | Path,
    output_dir: str | Path | None = None,
    check: bool = False,
    overwrite: bool = False,
    format: str = "huggingface",
) -> dict[str, Any]:
    """Write a Hugging Face folder that `AutoModel...from_pretrained` opens.

    `check` opens it in transformers and returns the largest difference of a logit as `max_difference`, and the other
    side as `compared_with`; without `output_dir` in a temporary folder, so that nothing is written. `format` "word2vec"
    or "glove" writes word vectors as gensim reads them, "firth" a checkpoint of them for `finetune`; the checkpoint can
    then be a file of vectors.
    """
    if check and format != "huggingface":
        raise UserError(f"--check compares logits in transformers, and {format} has none. Leave it out.")
    from firth.evaluate.export import import_transformers, write_export
    from firth.evaluate.neighbours import write_vectors
    from firth.evaluate.vectors import load_word_vectors

    if check:
        import_transformers()
    if output_dir is None:
        if not check:
            raise UserError("--output-dir is missing: name the folder to write, or pass --check to compare only.")
        with TemporaryDirectory(prefix="firth-export-") as folder:
            write_export(Path(checkpoint), Path(folder) / "export")
            return check_export(Path(folder) / "export")
    path = Path(output_dir)
    if path.exists() and Path(checkpoint).exists() and path.samefile(checkpoint):
        raise UserError(f"{path} is the checkpoint itself. Name another --output-dir.")
    kind = "model" if format in ("huggingface", "firth") else "vectors"
    check_output_folder(path, "--output-dir", overwrite, kind)
    if format != "huggingface":
        files = write_vectors(load_word_vectors(checkpoint), path, format)
        return {"output_dir": str(path), "files": list(map(str, files))}
    write_export(Path(checkpoint), path)
    return {"output_dir": str(path), **(check_export(path) if check else {})}


def check_export(folder: Path) -> dict[str, Any]:
    """The comparison of an exported folder with transformers, as `export` returns it."""
    from firth.evaluate.export import compare_with_transformers

    return {name: value for name, value in compare_with_transformers(folder)._asdict().items() if value is not None}


def models() -> list[dict[str, Any]]:
    """The presets: parameters, FLOPs per token, objective and purpose.

    `flops_per_token` is the forward pass in a row of 512 tokens; training takes three times as many. word2vec, GloVe
    and n-gram models look words up. Their parameters depend on the text: they are None, and `size` describes them.
    """
    static = [
        {
            "name": name,
            "family": name,
            "architecture": "no layers",
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
            "architecture": config.architecture,
            "parameters": count_parameters(config),
            "flops_per_token": flops_per_token(config, 512),
            "objective": default_objective(config),
            "good_for": FAMILY_DESCRIPTIONS[config.family],
        }
        for name, config in PRESETS.items()
    ] + static
