"""Pretraining of models that are counted, not trained: word2vec, GloVe, n-grams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firth.commands.data_source import DataOptions, DataSource, open_data_source
from firth.commands.push import push_final
from firth.commands.shards import check_held_out_share
from firth.core.console import format_count, report_errors
from firth.core.errors import Interrupted, UserError
from firth.core.files import write_json
from firth.tokens import open_shards
from firth.train.clock import RunClock
from firth.train.recipe import apply_overrides

if TYPE_CHECKING:
    from firth.static.recipe import StaticRecipe

# Models that are counted, not trained: kind and default vocabulary size of their tokenizer (0: by the text's size).
STATIC_TOKENIZERS = {"word2vec": ("word", 2**20), "glove": ("word", 2**20), "ngram": ("byte-bpe", 0)}
STATIC_FIELD_NAMES = {"num_train_epochs": "epochs", "learning_rate": "alpha"}  # gensim's names of recipe fields
DURATION_FIELDS = ("minutes", "max_steps", "num_train_epochs", "epochs")


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
    recipe = make_static_recipe(name, changes)
    check_held_out_share(data_options.held_out)
    sources = [data] if isinstance(data, str | Path) else list(data)
    kind, vocab_size = STATIC_TOKENIZERS[name]
    new_tokenizer_args = [kind, data_options.vocab_size or vocab_size, data_options.lowercase]
    source = open_data_source(sources, tokenizer, data_options, new_tokenizer_args)
    if dry_run:
        from firth.train.folder import check_run_folder

        check_run_folder(Path(recipe.output_dir), resume, overwrite, source.inputs)
        return {"dry_run": True, **describe_static_run(recipe, source)}
    from firth.evaluate.card import write_static_card
    from firth.evaluate.neighbours import write_interrupted_vector_report
    from firth.evaluate.pretraining_report import write_ngram_report
    from firth.static.train import run_static_recipe  # loads numba
    from firth.train import run_folder

    if recipe.push_to_hub:
        from firth.train.hub import check_push_target

        check_push_target(recipe.push_to_hub, recipe.public, is_resumed=resume)
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
        pushed = push_final(folder / "final", recipe.push_to_hub, recipe.public) if recipe.push_to_hub else {}
        with report_errors():
            report = write_ngram_report(folder, results) if name == "ngram" else report_vectors(folder, name, results)
            return {**results, **report, **pushed}
        return results


def make_static_recipe(name: str, changes: Mapping[str, Any]) -> StaticRecipe:
    """Return the recipe of a model with the changes of the user, checked."""
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
    return recipe


def describe_static_run(recipe: StaticRecipe, source: DataSource) -> dict[str, Any]:
    """Return what a run would do, for --dry-run. It reads all of its text, so the size must be known."""
    from firth.lab.dry_run import describe_static_training
    from firth.lab.plan_text import unknown_size_error

    text, num_tokens, vocab = source.describe()
    if source.corpus is not None and "tokens_at_least" in text:
        raise unknown_size_error(source.corpus)
    return describe_static_training(recipe, text, num_tokens, vocab)


def report_vectors(folder: Path, name: str, results: dict[str, Any]) -> dict[str, str]:
    """Add neighbours of some words and their report to the results of a run; return a summary and a next command."""
    from firth.evaluate.neighbours import next_vector_commands, sample_neighbours, write_vector_report
    from firth.evaluate.vectors import load_word_vectors

    if "similar" not in results:
        results["similar"] = sample_neighbours(load_word_vectors(folder / "final"))
        results["report"] = str(write_vector_report(folder, name, results))
        write_json(folder / "results.json", results)
    command = next(iter(next_vector_commands(folder, results["similar"]).values()))
    return {"summary": f"vectors of {format_count(results['words'], 'word')}", "next": command}
