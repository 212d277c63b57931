"""Token ids of an exported folder: equal in `transformers`, and a difference is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import processors

from firth.evaluate.token_check import (
    DIALOGUES,
    SCRIPT_TEXTS,
    TEMPLATE_TEXTS,
    compare_token_ids,
    differing_dialogues,
    differing_templates,
)
from firth.models import make_model
from firth.models.presets import bert, gpt2, t5
from firth.tasks.chat import add_chat_template
from firth.tokens import Tokenizer, load_tokenizer


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


@pytest.mark.parametrize("damage", ["post_processor", "chat_template"])
def test_other_special_tokens_are_found(damage: str, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    kind = "wordpiece" if damage == "post_processor" else "byte-bpe"
    size = tokenizers[kind].vocab.size
    model = make_model(bert(1, 16, 2, size) if kind == "wordpiece" else gpt2(1, 16, 2, size + 3))
    model.tokenizer = add_chat_template(tokenizers[kind], model.config, ()) if kind == "byte-bpe" else tokenizers[kind]
    model.save(tmp_path / "saved")
    tokenizer = load_tokenizer(tmp_path / "saved")
    assert compare_token_ids(tokenizer, tmp_path / "saved") == []
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    if damage == "chat_template":
        theirs.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        assert differing_dialogues(tokenizer, theirs) == [dialogue[0][1] for dialogue in DIALOGUES]
    else:
        ids = {"special_tokens": [("[CLS]", tokenizer.vocab.cls), ("[SEP]", tokenizer.vocab.sep)]}
        own = processors.TemplateProcessing(single="$A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", **ids)
        theirs.backend_tokenizer.post_processor = own
        assert differing_templates(tokenizer, theirs) == list(TEMPLATE_TEXTS), "pairs have the right template"


def test_a_model_without_a_tokenizer_has_no_ids(tmp_path: Path) -> None:
    assert compare_token_ids(None, tmp_path) is None
