"""Every route: its answer, and that it is the answer of the same function in Python."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import firth
from firth.evaluate.attention import compute_attention
from firth.models import load_model


def ask(client: Any, route: str, **body: Any) -> Any:
    answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def read_events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


BF16_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"model": "gpt2", "prompt": "the cat", "max_new_tokens": 4}),
    ("/generate", {"model": "t5", "prompt": "the cat", "max_new_tokens": 4, "num_beams": 2}),
    ("/next", {"model": "gpt2", "prompt": "the cat", "top": 5, "temperatures": [1.0]}),
    ("/fill", {"model": "bert", "text": "the [MASK] of the sea"}),
    ("/v1/embeddings", {"model": "bert", "input": ["the cat", "a river"]}),
    ("/attention", {"model": "t5", "text": "the cat", "target": "a river"}),
    ("/attention/heads", {"model": "gpt2", "text": "the cat lives near the river"}),
    ("/vectors", {"model": "bert", "texts": ["the cat", "a cat"], "words": ["cat"]}),
    ("/salience", {"model": "topics", "input": "a big cat"}),
    ("/tag", {"model": "names", "inputs": ["the cat"]}),
    ("/answer", {"model": "questions", "question": "the cat?", "context": "the cat"}),
]


def test_a_server_computes_in_bfloat16(connect: Any) -> None:
    """Every route answers, and a classifier's probabilities are near those of float32."""
    import torch

    with connect("gpt2", "bert", "t5", "topics", "names", "questions", bf16=True) as (client, server):
        for model in server.models.values():
            assert {p.dtype for p in model.model.parameters()} == {torch.bfloat16}
            assert not any(predictor.compute.bf16 for predictor in model.predictors.values())  # no autocast around it
        for route, body in BF16_REQUESTS:
            ask(client, route, **body)
        rounded = ask(client, "/classify", model="topics", inputs=["the cat"])
    with connect("topics") as (client, _):
        exact = ask(client, "/classify", model="topics", inputs=["the cat"])
    p, q = (found["results"][0]["probabilities"] for found in (rounded, exact))
    assert p == pytest.approx(q, abs=0.05)
    assert p != q


def test_models_are_listed_with_what_they_can_do(client: Any) -> None:
    found = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
    assert {name: model["tasks"] for name, model in found.items() if model["tasks"]} == {
        "topics": {"classify": "classify"},
        "names": {"tag": "tag"},
        "questions": {"span-qa": "span-qa"},
    }
    assert found["gpt2"]["has_chat_template"]
    assert found["gpt2"]["max_length"] == 64
    assert client.get("/v1/models/t5").json() == found["t5"]
    assert client.get("/v1/models/t6").status_code == 404
    assert client.get("/health").json()["status"] == "ok"


def test_generate_is_firths_own(client: Any, folders: dict[str, Path]) -> None:
    settings = {"temperature": 0.9, "top_k": 50, "seed": 3, "max_new_tokens": 12}
    found = ask(client, "/generate", model="gpt2", prompt="the cat", **settings)
    assert [result["text"] for result in found["results"]] == [firth.generate(folders["gpt2"], "the cat", **settings)]
    beams = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6}
    found = ask(client, "/generate", model="t5", prompt=["the cat", "a river"], **beams)
    assert [r["text"] for r in found["results"]] == firth.generate(folders["t5"], ["the cat", "a river"], **beams)
    assert [r["prompt"] for r in found["results"]] == [0, 0, 1, 1]
    assert found["usage"]["completion_tokens"] == sum(len(r["tokens"]) for r in found["results"])


@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_streamed_pieces_are_the_whole_answer(client: Any, model: str) -> None:
    body = {"model": model, "prompt": "the cat", "max_tokens": 20, "n": 2, "seed": 5, "temperature": 0.7}
    whole = ask(client, "/v1/completions", **body)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = read_events(client.post("/v1/completions", json={**body, **options}).text)
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert chunks[-1]["usage"] == whole["usage"]
    ends = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["finish_reason"]]
    assert [e["finish_reason"] for e in ends] == [choice["finish_reason"] for choice in whole["choices"]]
    generated = client.post("/generate", json={"model": model, "prompt": "the cat", "stream": True})
    pieces = read_events(generated.text)
    assert (
        "".join(p["text"] for p in pieces)
        == ask(client, "/generate", model=model, prompt="the cat")["results"][0]["new"]
    )


def test_what_a_stream_does_not_tell_is_refused(client: Any) -> None:
    body = {"model": "gpt2", "prompt": "the cat", "max_tokens": 2, "stream": True}
    for field, value in {"logprobs": 0, "echo": True}.items():
        answer = client.post("/v1/completions", json={**body, field: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    chat = {"model": "gpt2", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2, "stream": True}
    assert client.post("/v1/chat/completions", json={**chat, "logprobs": True}).status_code == 400
    for allowed in ({**chat, "logprobs": False}, {**chat, "logprobs": None}):
        assert client.post("/v1/chat/completions", json=allowed).status_code == 200
    assert client.post("/v1/completions", json={**body, "echo": False}).status_code == 200


def test_completions_echo_stop_and_tell_log_probabilities(client: Any, folders: dict[str, Path]) -> None:
    body = {"model": "gpt2", "prompt": "the cat", "max_tokens": 10, "temperature": 0}
    plain = ask(client, "/v1/completions", **body, logprobs=0)["choices"][0]
    generated = ask(client, "/generate", model="gpt2", prompt="the cat", max_new_tokens=10)["results"][0]
    assert plain["text"] == generated["new"]
    assert plain["logprobs"]["token_logprobs"] == generated["logprobs"][: len(generated["tokens"])]
    assert len(plain["logprobs"]["tokens"]) == len(plain["logprobs"]["text_offset"]) == len(generated["tokens"])
    assert ask(client, "/v1/completions", **body, echo=True)["choices"][0]["text"] == "the cat" + plain["text"]
    middle = plain["text"][4:6]
    stopped = ask(client, "/v1/completions", **body, stop=middle)["choices"][0]
    assert stopped["text"] == plain["text"][: plain["text"].find(middle)]
    assert stopped["finish_reason"] == "stop"
    ids = load_model(folders["gpt2"]).tokenizer.encode("the cat")  # type: ignore[union-attr]
    prompts = {"prompt": [ids, ids], "temperature": 0, "max_tokens": 4, "model": "gpt2"}
    assert len(ask(client, "/v1/completions", **prompts)["choices"]) == 2


def test_chat_answers_in_the_template(client: Any, folders: dict[str, Path]) -> None:
    messages = [
        {"role": "developer", "content": "the"},
        {"role": "user", "content": [{"type": "text", "text": "a cat"}]},
    ]
    body = {"model": "gpt2", "messages": messages, "temperature": 0, "max_completion_tokens": 8}
    found = ask(client, "/v1/chat/completions", **body, logprobs=True)
    model = load_model(folders["gpt2"])
    from firth.tasks.prompts import encode_messages

    ids = encode_messages(model, [("system", "the"), ("user", "a cat")])
    wanted = firth.generate.generate_results(model, [ids], max_new_tokens=8)[0]
    assert found["choices"][0]["message"]["content"] == wanted["new"].strip()
    assert found["usage"]["prompt_tokens"] == len(ids)
    given = [token["logprob"] for token in found["choices"][0]["logprobs"]["content"]]
    assert given == pytest.approx(wanted["logprobs"][: len(given)])
    chunks = read_events(client.post("/v1/chat/completions", json={**body, "stream": True}).text)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks).strip() == wanted["new"].strip()
    assert (
        client.post("/v1/chat/completions", json={**body, "model": "t5"}).json()["error"]["code"] == "no_chat_template"
    )


def test_an_answer_follows_a_schema(client: Any) -> None:
    schema = {"type": "object", "properties": {"cat": {"enum": ["red", "blue"]}}, "required": ["cat"]}
    schema["additionalProperties"] = False
    body = {"model": "gpt2", "messages": [{"role": "user", "content": "a cat"}], "max_tokens": 40, "seed": 1}
    named = {"type": "json_schema", "json_schema": {"name": "cat", "schema": schema, "strict": True}}
    for stream in (False, True):
        answer = client.post("/v1/chat/completions", json={**body, "response_format": named, "stream": stream})
        assert answer.status_code == 200, answer.text
        if stream:
            text = "".join(c["choices"][0]["delta"].get("content", "") for c in read_events(answer.text))
        else:
            text = answer.json()["choices"][0]["message"]["content"]
        assert json.loads(text)["cat"] in ("red", "blue")
    found = ask(client, "/generate", model="gpt2", prompt="a cat", json_schema=schema, max_new_tokens=40)["results"][0]
    assert found["complete"]
    assert found["value"] == json.loads(found["new"])
    cut = {**body, "max_tokens": 2, "response_format": {"type": "json_object"}}
    assert ask(client, "/v1/chat/completions", **cut)["choices"][0]["finish_reason"] == "length"
    found = ask(client, "/generate", model="t5", prompt="a cat", choices=["yes", "no"], temperature=1.0)
    assert found["results"][0]["new"] in ("yes", "no")
    assert ask(client, "/generate", model="gpt2", prompt="a", regex="[ab]{3}")["results"][0]["new"].strip("ab") == ""


def test_embeddings_are_firths_own(client: Any, folders: dict[str, Path]) -> None:
    texts = ["the cat", "a small river lives near the garden"]
    found = ask(client, "/v1/embeddings", model="bert", input=texts)
    wanted = firth.embed(folders["bert"], texts)
    assert np.allclose([item["embedding"] for item in found["data"]], wanted, atol=1e-5)
    packed = ask(client, "/v1/embeddings", model="bert", input=texts[0], encoding_format="base64")["data"][0]
    assert np.allclose(np.frombuffer(base64.b64decode(packed["embedding"]), "<f4"), wanted[0], atol=1e-5)


@pytest.mark.parametrize("model", ["bert", "t5"])
def test_fill_is_firths_own(client: Any, folders: dict[str, Path], model: str) -> None:
    texts = ["the ___ is red", "a [MASK] lives near the ___"]
    found = ask(client, "/fill", model=model, text=texts, top=3)["results"]
    for text, result in zip(texts, found, strict=True):
        wanted = firth.fill(folders[model], text, 3)
        assert [[g["text"] for g in b["guesses"]] for b in result["blanks"]] == [
            [g.text for g in blank.guesses] for blank in wanted
        ]
        given = [g["probability"] for b in result["blanks"] for g in b["guesses"]]
        assert given == pytest.approx([g.probability for blank in wanted for g in blank.guesses], abs=1e-5)


def test_predictions_are_firths_own(client: Any, folders: dict[str, Path]) -> None:
    texts = ["a big cat", "the red river is not small"]
    assert ask(client, "/classify", inputs=texts)["results"] == firth.predict(folders["topics"], texts)
    inputs = ["the cat lives near Anna", {"tokens": ["a", "river"]}]
    assert ask(client, "/tag", inputs=inputs)["results"] == firth.predict(folders["names"], inputs)
    question = {"question": "the cat?", "context": "a cat lives near the river"}
    answer = ask(client, "/answer", **question)
    assert answer.pop("model") == "questions"
    assert answer == firth.predict(folders["questions"], question)


def test_tokens_and_their_characters(client: Any) -> None:
    text = "the cat"
    (found,) = ask(client, "/tokenize", model="bert", text=text)["results"]
    assert [text[start:end] for start, end in found["offsets"]] == ["the", "cat"]
    (framed,) = ask(client, "/tokenize", model="bert", text=text, add_special_tokens=True)["results"]
    assert framed["tokens"] == ["[CLS]", *found["tokens"], "[SEP]"]
    assert framed["offsets"] == [None, *found["offsets"], None]


def test_attention_sums_to_one_and_sees_what_the_model_sees(client: Any, folders: dict[str, Path]) -> None:
    found = ask(client, "/attention", model="bert", text="the cat")
    weights = np.array(found["weights"]["encoder"])
    assert weights.shape == (1, 2, 4, 4)
    assert np.allclose(weights.sum(-1), 1, atol=1e-3)
    causal = np.array(ask(client, "/attention", model="gpt2", text="the cat lives", heads=[1])["weights"]["decoder"])
    assert causal.shape[:2] == (1, 1)
    assert not np.triu(causal[0, 0], 1).any()
    both = ask(client, "/attention", model="t5", text="the cat", target="a river")
    assert {kind: np.shape(w) for kind, w in both["weights"].items()} == {
        "encoder": (1, 2, len(both["tokens"]), len(both["tokens"])),
        "decoder": (1, 2, len(both["target_tokens"]), len(both["target_tokens"])),
        "cross": (1, 2, len(both["target_tokens"]), len(both["tokens"])),
    }
    direct = compute_attention(load_model(folders["t5"]), "the cat", "a river").matrices["cross"]
    model = load_model(folders["t5"])
    ids = model.tokenizer.encode("a river")
    body = {"model": "t5", "text": "the cat", "is_prompt": True, "new_tokens": ids}
    assert np.allclose(client.post("/attention", json=body).json()["weights"]["cross"], direct, atol=1e-4)
    assert np.allclose(both["weights"]["cross"], direct, atol=1e-3)


def test_the_page_lists_every_route_and_loads_nothing(client: Any) -> None:
    page = client.get("/docs").text
    for path in client.get("/openapi.json").json()["paths"]:
        assert path in page
    assert "<script" not in page
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["model"]["enum"][:2] == ["gpt2", "bert"]
    assert "://" not in page.replace("http://www.w3.org", "")
