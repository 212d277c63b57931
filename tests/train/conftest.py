"""Small shards and small recipes: one layer, 32 wide, a few steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firth.models.config import LearnedPosition, ModelConfig
from firth.models.presets import bert, gpt2, t5
from firth.recipes import DEFAULT_TOKENIZERS, pretraining_recipe
from firth.text import Corpus
from firth.tokens import ShardSet, open_shards, prepare, train_tokenizer
from firth.train import Recipe

FAMILIES = ("bert", "gpt2", "t5")


def small_model(family: str, vocab_size: int, dropout: float = 0.0) -> ModelConfig:
    changes: dict[str, Any] = {"dropout": dropout, "attention_dropout": dropout}
    if family == "t5":
        return t5(1, 32, 2, 64, vocab_size, **changes)
    make = {"bert": bert, "gpt2": gpt2}[family]
    return replace(make(1, 32, 2, vocab_size, **changes), position=LearnedPosition(32))


@pytest.fixture(scope="session")
def shards_of(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ShardSet]:
    """The corpus as shards with the tokenizer of a family; built once."""
    made: dict[str, ShardSet] = {}

    def get(family: str) -> ShardSet:
        if family not in made:
            corpus = Corpus([corpus_file])
            kind = DEFAULT_TOKENIZERS[small_model(family, 100).architecture]
            tokenizer = train_tokenizer((d.text for d in corpus), kind, 400)
            folder = tmp_path_factory.mktemp("shards") / family
            prepare(corpus, tokenizer, folder)
            made[family] = open_shards(folder)
        return made[family]

    return get


@pytest.fixture
def recipe_of(shards_of: Callable[[str], ShardSet], tmp_path: Path) -> Callable[..., Recipe]:
    """A recipe of a few steps for a family; any field can be overridden."""

    def get(family: str = "bert", dropout: float = 0.0, **fields: Any) -> Recipe:
        shards = shards_of(family)
        small: dict[str, Any] = dict(
            output_dir=str(tmp_path / "run"),
            data=str(shards.folder),
            tokenizer=shards.tokenizer.fingerprint,
            max_steps=6,
            max_seq_length=32,
            per_device_train_batch_size=4,
            save_steps=2,
            compile=False,
            bf16=False,
        )
        return pretraining_recipe(small_model(family, shards.tokenizer.vocab.size, dropout), **small | fields)

    return get
