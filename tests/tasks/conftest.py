"""A toy task, and small checkpoints to fine-tune on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tasks.small import ANIMALS, FAMILIES, PLACES

from firth.models import make_model
from firth.tokens import train_tokenizer


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Is the text about an animal or about a place? And: which animal (place) was it?"""
    folder = tmp_path_factory.mktemp("toy")
    things = [(word, "animal") for word in ANIMALS] + [(word, "place") for word in PLACES]
    rows = [
        {"text": f"{start} the {word} {end}", "label": kind, "word": word}
        for start in ("I saw", "We like", "Anna knows", "They found", "He painted", "You remember")
        for end in ("today", "again", "at noon")
        for word, kind in things
    ]
    train, dev = [r for i, r in enumerate(rows) if i % 5], [r for i, r in enumerate(rows) if not i % 5]
    pairs = [[{"source": r["text"], "target": r["word"]} for r in part] for part in (train, dev)]
    return {
        "train": write_jsonl(folder / "train.jsonl", train),
        "dev": write_jsonl(folder / "dev.jsonl", dev),
        "train_pairs": write_jsonl(folder / "train_pairs.jsonl", pairs[0]),
        "dev_pairs": write_jsonl(folder / "dev_pairs.jsonl", pairs[1]),
    }


@pytest.fixture(scope="session")
def checkpoint_of(toy: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """An untrained checkpoint with a tokenizer that knows the toy's words; built once."""
    made: dict[str, Path] = {}
    texts = [json.loads(line)["text"] for line in toy["train"].read_text().splitlines()] + ["animal", "place"]

    def get(family: str) -> Path:
        if family not in made:
            kind, config = FAMILIES[family]
            tokenizer = train_tokenizer(texts, kind, 400)
            torch.manual_seed(0)
            model = make_model(config(tokenizer.vocab.size))
            model.tokenizer = tokenizer
            made[family] = tmp_path_factory.mktemp("checkpoint") / family
            model.save(made[family])
        return made[family]

    return get
