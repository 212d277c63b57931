"""Tiny models that have learned nothing, as a server has them, and a client that asks it without a socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tasks.small import FAMILIES, tokenizer_of

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")
from fastapi.testclient import TestClient

from firth.core.files import write_json
from firth.models import make_model
from firth.models.config import LearnedPosition
from firth.serve.app import make_app
from firth.serve.config import ServeConfig
from firth.serve.gate import Gate, hash_key
from firth.serve.model_server import ModelServer
from firth.serve.served_model import ServedModel
from firth.static.learners import make_bag_model
from firth.tasks import TASK_FILE, make_task
from firth.tasks.chat import add_chat_template

LENGTH = 64
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "topics": ("classify", {"labels": ["animal", "place"]}),
    "names": ("tag", {"labels": ["B-PER", "I-PER", "O"]}),
    "questions": ("span-qa", {"unanswerable": True, "threshold": 0.999}),
    "endings": ("choice", {}),
}


def randomize(model: Any) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def base(family: str) -> tuple[Any, Any]:
    kind, config = FAMILIES[family]
    tokenizer = tokenizer_of(kind)
    sized = config(tokenizer.vocab.size)
    position = {"position": LearnedPosition(LENGTH)} if family in ("bert", "gpt2") else {}
    return replace(sized, **position), tokenizer


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints: gpt2 (with a chat template), bert, xlnet and t5 as pretrained, fine-tuned encoders, and word2vec."""
    home, made = tmp_path_factory.mktemp("served"), {}
    for family in ("gpt2", "bert", "t5", "xlnet"):
        torch.manual_seed(0)
        config, tokenizer = base(family)
        if family == "gpt2":
            tokenizer = add_chat_template(tokenizer, config, ())
        model = randomize(make_model(replace(config, vocab_size=tokenizer.vocab.size)))
        model.tokenizer = tokenizer
        made[family] = home / family
        model.save(made[family])
    for name, (task, facts) in TASKS.items():
        config, tokenizer = base("bert")
        tuned = make_task(task, {"answer": "auto", **facts}, tokenizer, config)
        torch.manual_seed(1)
        model = randomize(make_model(replace(tuned.configure_model(config), vocab_size=tuned.tokenizer.vocab.size)))
        model.tokenizer = tuned.tokenizer
        made[name] = home / name / "final"
        model.save(made[name])
        write_json(made[name] / TASK_FILE, tuned.metadata())
    words = tokenizer_of("word")
    vectors = torch.randn(words.vocab.size, 8, generator=torch.Generator().manual_seed(0)).numpy()
    made["word2vec"] = home / "word2vec"
    make_bag_model(words, vectors, vectors, 0).save(made["word2vec"])
    return made


Connect = Callable[..., Any]


@pytest.fixture(scope="session")
def connect(folders: dict[str, Path]) -> Connect:
    """`with connect("gpt2", "bert", max_queue=2) as (client, server)`: a running server without a socket."""

    @contextmanager
    def open_server(*names: str, key: str = "", **settings: Any) -> Iterator[tuple[TestClient, ModelServer]]:
        config = ServeConfig(**settings)
        server = ModelServer({name: ServedModel(name, folders[name], config) for name in names}, config)
        gate = Gate(make_app(server), config, len(names), [hash_key(key.encode())] if key else [])
        with TestClient(gate, "http://localhost", raise_server_exceptions=False) as client:
            client.gate = gate  # type: ignore[attr-defined]
            yield client, server
        server.stop()

    return open_server


@pytest.fixture(scope="session")
def everything(connect: Connect) -> Iterator[tuple[TestClient, ModelServer]]:
    """A checkpoint of each kind behind one server: a request for a task needs no name."""
    with connect("gpt2", "bert", "t5", "word2vec", "topics", "names", "questions") as opened:
        yield opened


@pytest.fixture
def client(everything: tuple[TestClient, ModelServer]) -> TestClient:
    return everything[0]
