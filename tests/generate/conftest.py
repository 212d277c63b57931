"""Tiny models that have learned nothing, each with a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from firth.models import Model, ModelConfig, make_model
from firth.models.config import Learned
from firth.models.presets import bart, bert, gpt2, t5_v1_1
from firth.tokens import Tokenizer, train_tokenizer

FAMILIES: dict[str, tuple[str, Callable[[int], ModelConfig]]] = {
    "bert": ("wordpiece", lambda size: bert(2, 32, 2, size, position=Learned(24))),
    "gpt2": ("byte-bpe", lambda size: gpt2(2, 32, 2, size, position=Learned(24))),
    "bart": ("byte-bpe", lambda size: bart(2, 32, 2, size)),
    "t5": ("unigram", lambda size: t5_v1_1(2, 32, 2, 48, size)),  # an untrained tied head repeats itself
}


@pytest.fixture(scope="session")
def tokenizers(corpus_file: Path) -> dict[str, Tokenizer]:
    texts = corpus_file.read_text(encoding="utf-8").split("\n\n")
    return {kind: train_tokenizer(texts, kind, 400) for kind in ("wordpiece", "byte-bpe", "unigram")}


@pytest.fixture
def untrained(tokenizers: dict[str, Tokenizer]) -> Any:
    """`untrained("gpt2")`: a random model whose choices differ from place to place."""

    def make(family: str, seed: int = 0) -> Model:
        kind, config = FAMILIES[family]
        torch.manual_seed(seed)
        model = make_model(config(tokenizers[kind].vocab.size)).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.2)
        model.tokenizer = tokenizers[kind]
        return model

    return make
