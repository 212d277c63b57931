"""Token ids of an exported folder: equal in `transformers`, and a difference is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firth.evaluate.token_check import SCRIPT_TEXTS, compare_token_ids
from firth.models import make_model
from firth.models.presets import bert, gpt2, t5
from firth.tokens import Tokenizer


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe", "unigram"])
def test_ids_are_those_of_transformers(kind: str, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    tokenizer = tokenizers[kind]
    size = tokenizer.vocab.size
    configs = {"wordpiece": bert(1, 16, 2, size), "byte-bpe": gpt2(1, 16, 2, size), "unigram": t5(1, 16, 2, 32, size)}
    model = make_model(configs[kind])
    model.tokenizer = tokenizer
    model.save(tmp_path / "saved")
    assert compare_token_ids(tokenizer, tmp_path / "saved") == []

    file = tmp_path / "saved" / "tokenizer.json"
    state = json.loads(file.read_text())
    state["normalizer"] = {"type": "Replace", "pattern": {"String": "library"}, "content": "bank"}
    file.write_text(json.dumps(state))
    assert SCRIPT_TEXTS[0] in (compare_token_ids(tokenizer, tmp_path / "saved") or [])


def test_a_model_without_a_tokenizer_has_no_ids(tmp_path: Path) -> None:
    assert compare_token_ids(None, tmp_path) is None
