"""A conversation: ids of the chat template, answers that are remembered, long dialogues that lose their beginning."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch

from firth.cli.main import app
from firth.core.errors import UserError
from firth.models import Model, make_model
from firth.models.config import LearnedPosition
from firth.models.presets import gpt2
from firth.tasks.chat import add_chat_template
from firth.tasks.conversation import Conversation
from firth.tasks.prompts import encode_messages
from firth.tokens import train_tokenizer


@pytest.fixture(scope="module")
def model(corpus_file: Any) -> Model:
    tokenizer = train_tokenizer(corpus_file.read_text(encoding="utf-8").split("\n\n"), "byte-bpe", 300)
    config = gpt2(1, 32, 2, tokenizer.vocab.size, position=LearnedPosition(64))
    tokenizer = add_chat_template(tokenizer, config, ("user", "assistant"))
    torch.manual_seed(0)
    made = make_model(replace(config, vocab_size=tokenizer.vocab.size)).eval()
    made.tokenizer = tokenizer
    return made


def test_an_answer_is_remembered(model: Model) -> None:
    talk = Conversation(model, max_new_tokens=3)
    first = "".join(talk.reply("the otter"))
    assert talk.messages == [("user", "the otter"), ("assistant", first.strip())]
    assert encode_messages(model, talk.messages[:1]) == encode_messages(model, [("user", "the otter")])
    list(talk.reply("and the mill"))
    assert [role for role, _ in talk.messages] == ["user", "assistant"] * 2
    talk.clear()
    assert talk.messages == []


def test_an_answer_that_is_broken_off_is_not_remembered(model: Model) -> None:
    talk = Conversation(model, max_new_tokens=8)
    next(talk.reply("the otter"))
    assert talk.messages == []


def test_a_long_dialogue_loses_its_oldest_exchange_but_not_the_system_message(model: Model) -> None:
    talk = Conversation(model, "be brief", max_new_tokens=4)
    for _ in range(5):
        list(talk.reply("the old mill is quiet"))
    assert talk.messages[0] == ("system", "be brief")
    assert talk.messages[-2] == ("user", "the old mill is quiet")
    assert talk.num_forgotten > 0
    assert len(talk.messages) + talk.num_forgotten == 1 + 5 * 2
    assert len(encode_messages(model, talk.messages[:-1])) <= 64 - 4


def test_the_command(model: Model, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    model.save(tmp_path / "final")
    monkeypatch.setattr("sys.stdin", io.StringIO("the otter\n\n/clear\nthe mill\n/exit\nnever\n"))
    app(["chat", str(tmp_path / "final"), "--max-new-tokens", "3", "--temperature", "0"], standalone_mode=False)
    printed = capsys.readouterr()
    expected = [
        "".join(Conversation(model, max_new_tokens=3, temperature=0.0).reply(t)) for t in ("the otter", "the mill")
    ]
    assert printed.out == "".join(answer + "\n" for answer in expected)
    assert "begins anew" in printed.err


@pytest.mark.parametrize(("options", "dtype"), [((), None), (("--bf16",), torch.bfloat16)])
def test_the_command_uses_the_gpu(
    options: tuple[str, ...],
    dtype: torch.dtype | None,
    model: Model,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    model.save(tmp_path / "final")
    moves: list[tuple[Any, ...]] = []
    monkeypatch.setattr("sys.stdin", io.StringIO("the otter\n"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Model, "to", lambda self, *arguments: moves.append(arguments) or self)
    app(["chat", str(tmp_path / "final"), "--max-new-tokens", "3", *options], standalone_mode=False)
    assert moves == [("cuda", dtype)]


def test_a_model_without_a_chat_template(model: Model, tmp_path: Any) -> None:
    bare = make_model(model.config)
    bare.tokenizer = train_tokenizer(["the otter and the mill"], "byte-bpe", 270)
    with pytest.raises(UserError, match="has no chat template, so it knows no dialogues"):
        Conversation(bare)
    with pytest.raises(UserError, match="is not a checkpoint folder"):
        app(["chat", str(tmp_path / "missing")], standalone_mode=False)
