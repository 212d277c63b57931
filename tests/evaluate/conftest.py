"""Tiny models that have learned nothing, each with a tokenizer, as objects and as folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from firth.models import Model, ModelConfig, make_model
from firth.models.config import LearnedPosition
from firth.models.presets import bart, bert, gpt2, llama, t5_v1_1
from firth.tokens import Tokenizer, train_tokenizer

LENGTH = 24
FAMILIES: dict[str, tuple[str, Callable[[int], ModelConfig]]] = {
    "bert": ("wordpiece", lambda size: bert(2, 32, 2, size, position=LearnedPosition(LENGTH))),
    "gpt2": ("byte-bpe", lambda size: gpt2(2, 32, 2, size, position=LearnedPosition(LENGTH))),
    "llama": ("byte-bpe", lambda size: llama(2, 32, 2, 48, size)),
    "bart": ("byte-bpe", lambda size: bart(2, 32, 2, size)),
    "t5": ("unigram", lambda size: t5_v1_1(2, 32, 2, 48, size)),
}


@pytest.fixture(scope="session")
def tokenizers(corpus_file: Path) -> dict[str, Tokenizer]:
    texts = corpus_file.read_text(encoding="utf-8").split("\n\n")
    return {kind: train_tokenizer(texts, kind, 400) for kind in ("wordpiece", "byte-bpe", "unigram")}


@pytest.fixture(scope="session")
def sentences(corpus_file: Path) -> list[str]:
    """Short ones and long ones."""
    return [text.replace("\n", " ") for text in corpus_file.read_text(encoding="utf-8").split("\n\n")[:6]]


@pytest.fixture(scope="session")
def untrained(tokenizers: dict[str, Tokenizer]) -> Callable[[str], Model]:
    """`untrained("gpt2")`: a random model whose predictions differ between positions."""
    made: dict[str, Model] = {}

    def make(family: str) -> Model:
        if family not in made:
            kind, config = FAMILIES[family]
            torch.manual_seed(0)
            model = make_model(config(tokenizers[kind].vocab.size)).eval()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn_like(p) * 0.2)
            model.tokenizer = tokenizers[kind]
            made[family] = model
        return made[family]

    return make


@pytest.fixture(scope="session")
def saved(untrained: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`saved("gpt2")`: the same model as a checkpoint folder."""
    made: dict[str, Path] = {}

    def save(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("models") / family
            untrained(family).save(made[family])
        return made[family]

    return save
