"""The commands that `firth check` ends with: for this text, this machine, and checked against the preset.

A command that a person pastes must run. So each pretraining command is built as the recipe that the command would
make, and is left out if the recipe or the objective refuses it: a decoder needs an end-of-text token, T5 needs a
sentinel for each of a row's spans.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from firth.core.console import program
from firth.core.errors import UserError
from firth.models import get_preset
from firth.recipes import pretraining_recipe, update_recipe
from firth.text import Corpus
from firth.text.corpus import STDIN_PATH
from firth.text.filters import TextCleaner
from firth.text.normalize import parse_normal_forms
from firth.tokens import Tokenizer

CPU_MINUTES, GPU_MINUTES = 60, 30  # of a pretraining; its size is planned for this time (`planner.py`)
MIN_ROW_TOKENS, MAX_ROW_TOKENS = 32, 512  # tokens of the shortest and of the longest row to advise
PURPOSES = {
    "encoder": "for classification, tagging and search",
    "decoder": "or a model that writes",
    "encoder-decoder": "or one that turns text into text",
}


def suggest_commands(
    corpus: Corpus,
    tokenizer: Tokenizer,
    tokenizer_path: str,
    vocab_size: int,
    models: Sequence[Mapping[str, Any]],
    row_length: int,
    normal_forms: Sequence[str] = (),
    near_dedup: bool = False,
    lowercase: bool = False,
    extends: bool = False,
) -> list[str]:
    """Return the commands from text to a pretrained model; none for standard input, which cannot be read again.

    `tokenizer_path` is the folder of a tokenizer to keep, or with `extends` to extend by the words of the text; "":
    train one of the kind and size of `tokenizer`.
    """
    if STDIN_PATH in corpus.paths:
        return []
    texts = [str(path) for path in corpus.paths]
    reading = reading_options(corpus, normal_forms)
    commands = []
    if not tokenizer_path:
        kind = ["--kind", tokenizer.kind, "--vocab-size", str(vocab_size), *["--lowercase"] * lowercase]
        commands.append(["tokenizer", *texts, *kind, *reading, "--output-dir", "tok"])
    if extends:
        commands.append(["tokenizer", "--extend", tokenizer_path, *texts, *reading, "--output-dir", "tok"])
    used = "tok" if extends or not tokenizer_path else tokenizer_path
    dedup = ["--dedup", "near"] if near_dedup else []
    commands.append(["prepare", *texts, "--tokenizer", used, *dedup, *reading, "--output-dir", "shards"])
    lines = [shlex.join([*program(), *words]) for words in commands]
    return lines + pretrain_commands(tokenizer, models, row_length)


def adapt_commands(corpus: Corpus, given: str, normal_forms: Sequence[str] = ()) -> list[str]:
    """Return the command that trains a given checkpoint further on the text; none if `given` is only a tokenizer."""
    if not (Path(given) / "config.json").is_file() or STDIN_PATH in corpus.paths:
        return []
    from firth.lab.adapt import check_adaptable  # loads torch

    try:
        check_adaptable(Path(given))
    except UserError:
        return []
    texts = [word for path in corpus.paths for word in ("--data", str(path))]
    words = ["adapt", given, *texts, *reading_options(corpus, normal_forms), "--output-dir", "adapted"]
    return [f"{shlex.join([*program(), *words])}  # train the checkpoint further on this text"]


def pretrain_commands(tokenizer: Tokenizer, models: Sequence[Mapping[str, Any]], row_length: int) -> list[str]:
    """Return a pretraining command for each architecture that can use the tokenizer; its size is planned by the run."""
    import torch  # takes seconds to load: a mistake in the command line is reported before

    minutes, lines = str(GPU_MINUTES if torch.cuda.is_available() else CPU_MINUTES), []
    for architecture, purpose in PURPOSES.items():
        fitting = [model["name"] for model in models if model["architecture"] == architecture and model["fits"]]
        length = accepted_length(fitting[-1], tokenizer, row_length) if fitting else None
        if length is not None:
            words = [
                "pretrain",
                architecture,
                "--data",
                "shards",
                "--max-seq-length",
                str(length),
                "--minutes",
                minutes,
            ]
            lines.append(f"{shlex.join([*program(), *words, '--output-dir', f'run-{architecture}'])}  # {purpose}")
    return lines


def limited_length(preset: str, row_length: int) -> int:
    """Return the row length, at most the longest to advise and the number of the preset's positions."""
    return min(row_length, MAX_ROW_TOKENS, get_preset(preset).max_length or row_length)


def accepted_length(preset: str, tokenizer: Tokenizer, row_length: int) -> int | None:
    """Return the row length, halved until pretraining accepts it; None: the preset cannot use the tokenizer."""
    length = limited_length(preset, row_length)
    while length >= MIN_ROW_TOKENS:
        if can_pretrain(preset, tokenizer, length):
            return length
        length //= 2
    return None


def can_pretrain(preset: str, tokenizer: Tokenizer, row_length: int) -> bool:
    """Whether the recipe of a preset accepts the row length, and its objective the tokenizer's special tokens."""
    try:
        recipe = update_recipe(pretraining_recipe(get_preset(preset)), {"max_seq_length": row_length})
        recipe.check()
        recipe.objective.check(tokenizer.vocab, recipe.objective.source_length(row_length))
    except UserError:
        return False
    return True


def reading_options(corpus: Corpus, normal_forms: Sequence[str]) -> list[str]:
    """Return the options with which the text was read, and `--normalize` with further normal forms."""
    cleaner = corpus.cleaner
    forms = dict.fromkeys([*parse_normal_forms(cleaner.normalize), *normal_forms])
    options = {
        "documents": corpus.documents if corpus.documents != "auto" else "",
        "columns": ",".join(f"{role}={corpus.columns[role]}" for role in sorted(corpus.user_columns)),
        "encoding": corpus.encoding if corpus.encoding != "utf-8" else "",
        **{field.name: getattr(cleaner, field.name) for field in fields(TextCleaner) if field.init},
        "normalize": ",".join(forms),
    }
    return [word for name, value in options.items() if value for word in (f"--{name.replace('_', '-')}", str(value))]
