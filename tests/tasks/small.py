"""Tiny models, a tokenizer for them, and a loop to train them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from firth.models import Model, ModelConfig, make_model
from firth.models.config import LearnedPosition
from firth.models.hf.convert import to_hf_tensors
from firth.models.presets import bart, bert, gpt2, llama, roberta, t5, t5gemma, xlnet
from firth.tasks import Task
from firth.tokens import Tokenizer, train_tokenizer
from firth.train import ComputeConfig

SURE: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}  # so small a model learns quicker without
FAMILIES = {
    "bert": ("wordpiece", lambda size: bert(1, 32, 2, size, position=LearnedPosition(32), **SURE)),
    "gpt2": ("byte-bpe", lambda size: gpt2(1, 32, 2, size, position=LearnedPosition(32), **SURE)),
    "t5": ("unigram", lambda size: t5(1, 32, 2, 64, size, **SURE)),
    "roberta": ("byte-bpe", lambda size: roberta(1, 32, 2, size, position=LearnedPosition(66, offset=2), **SURE)),
    "bart": ("byte-bpe", lambda size: bart(1, 32, 2, size, position=LearnedPosition(66, offset=2), **SURE)),
    "xlnet": ("unigram", lambda size: xlnet(1, 32, 2, size, **SURE)),
    "t5gemma": ("unigram", lambda size: t5gemma(1, 32, 2, 64, size, **SURE)),
    "llama": ("byte-bpe", lambda size: llama(1, 32, 2, 64, size)),
}
ANIMALS = ["cat", "dog", "horse", "fox"]
PLACES = ["river", "garden", "harbour", "forest"]
WORDS = ["a", "big", "small", "red", "blue", "lives", "near", "the", "is", "not", "and", *ANIMALS, *PLACES, "@", "#"]
LEARNED, ENOUGH = 0.02, 3
CPU = ComputeConfig(torch.device("cpu"), False, False)
TOKENIZERS: dict[tuple[str, bool], Tokenizer] = {}


def tokenizer_of(kind: str, lowercase: bool = False) -> Tokenizer:
    """A tokenizer that knows WORDS, built once."""
    if (kind, lowercase) not in TOKENIZERS:
        texts = [" ".join(WORDS), " ".join(WORDS[::-1]), *WORDS] * 3 + ["sentence1: sentence2: question: context: 0.5"]
        TOKENIZERS[kind, lowercase] = train_tokenizer(texts, kind, 420, lowercase)
    return TOKENIZERS[kind, lowercase]


def parts(family: str) -> tuple[ModelConfig, Tokenizer]:
    """The config and the tokenizer of a tiny model."""
    kind, config = FAMILIES[family]
    tokenizer = tokenizer_of(kind)
    return config(tokenizer.vocab.size), tokenizer


def model_for(task: Task, config: ModelConfig) -> Model:
    """An untrained model."""
    torch.manual_seed(0)
    return make_model(task.configure_model(replace(config, vocab_size=task.tokenizer.vocab.size)))


def learn(task: Task, config: ModelConfig, items: list[Any], steps: int, rate: float = 3e-3, size: int = 32) -> Model:
    """A small training loop: each step takes the next items. It ends at `steps`, or when the items are known by heart.

    They are when ENOUGH batches in a row have a loss below LEARNED.
    """
    model = model_for(task, config).train()
    model.tokenizer = task.tokenizer
    optimizer, known = torch.optim.AdamW(model.parameters(), rate), 0
    for step in range(steps):
        some = [items[i % len(items)] for i in range(step * size, (step + 1) * size)]
        batch = task.collate(some)
        losses, counts = model.losses(batch.to(CPU.device)), batch.loss_counts
        optimizer.zero_grad()
        loss = sum((value / counts[name] for name, value in losses.items()), torch.zeros(()))  # type: ignore[union-attr]
        loss.backward()
        optimizer.step()
        known = known + 1 if loss < LEARNED else 0
        if known == ENOUGH:
            break
    return model


def assert_equal_gradients(model: Model, theirs: torch.nn.Module, tolerance: float = 1e-5) -> None:
    """Every gradient of ours, under the names of `transformers`, is theirs."""
    copy = model.clone()
    for p, q in zip(copy.parameters(), model.parameters(), strict=True):
        p.data = torch.zeros_like(q) if q.grad is None else q.grad.clone()
    found = to_hf_tensors(copy)
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert any(gradient.abs().max() > 100 * tolerance for gradient in expected.values()), "nothing to compare"
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=0, atol=tolerance), name
