"""The routes behind the playground: each is compared with an implementation that is not its own."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serve.conftest import LENGTH
from serve.test_routes import ask
from sklearn.decomposition import PCA

from firth.evaluate.attention_heads import summarize_head
from firth.evaluate.embed import embed_words_in_texts
from firth.generate import GenerationConfig
from firth.generate.next_token import describe_logprobs
from firth.generate.sampling import warp_logits
from firth.models import load_model
from firth.objectives import OBJECTIVES

TEXT = "The cat lives near the river. A big dog is not small.\n\nThe red fox and 12 horses. The forest is blue."


def error_of(client: Any, route: str, **body: Any) -> str:
    answer = client.post(route, json=body)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


# --- next tokens and beams


@pytest.mark.slow  # for the import of transformers
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_next_tokens_are_those_of_transformers(client: Any, folders: dict[str, Path], name: str) -> None:
    transformers = pytest.importorskip("transformers")
    taken, temperatures = [20, 31], [0.5, 1.0, 2.0]
    body = {"model": name, "prompt": "the cat", "new_tokens": taken, "top": 5, "temperatures": temperatures}
    found = ask(client, "/next", **body)
    tokenizer = load_model(folders[name]).tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("the cat")
    with torch.no_grad():
        if name == "gpt2":
            reference = transformers.AutoModelForCausalLM.from_pretrained(folders[name]).eval()
            logits = reference(torch.tensor([[tokenizer.vocab.eos, *ids, *taken]])).logits[0, -1]
        else:
            reference = transformers.AutoModelForSeq2SeqLM.from_pretrained(folders[name]).eval()
            decoder_ids = torch.tensor([[reference.config.decoder_start_token_id, *taken]])
            inputs = torch.tensor([[*ids, tokenizer.vocab.eos]])
            logits = reference(inputs, decoder_input_ids=decoder_ids).logits[0, -1]
    logprobs = logits[: tokenizer.vocab.size].double().log_softmax(-1)
    best = logprobs.topk(5)
    assert [token["id"] for token in found["tokens"]] == best.indices.tolist()
    assert [token["logprob"] for token in found["tokens"]] == pytest.approx(best.values.tolist(), abs=1e-4)
    for temperature, rest in zip(temperatures, found["rest_logsumexp"], strict=True):
        listed = sum(math.exp(token["logprob"] / temperature) for token in found["tokens"])
        likeliest = (logprobs / temperature).softmax(-1).max()
        top = math.exp(found["tokens"][0]["logprob"] / temperature)
        assert top / (listed + math.exp(rest)) == pytest.approx(float(likeliest), abs=1e-5)
    assert found["num_rest"] + 5 == tokenizer.vocab.size
    assert found["entropy"] == pytest.approx(float(torch.special.entr(logprobs.exp()).sum()), abs=1e-4)


def test_tokens_that_are_taken_become_text(client: Any) -> None:
    generated = ask(client, "/generate", model="gpt2", prompt="the cat", max_new_tokens=4)["results"][0]
    taken: list[int] = []
    for _ in generated["tokens"]:
        found = ask(client, "/next", model="gpt2", prompt="the cat", new_tokens=taken, top=1)
        taken.append(found["tokens"][0]["id"])
    assert taken == generated["tokens"]
    assert ask(client, "/next", model="gpt2", prompt="the cat", new_tokens=taken)["text"] == generated["new"]
    assert "Token ids must be" in error_of(client, "/next", model="gpt2", prompt="a", new_tokens=[10**6])
    assert "64" in error_of(client, "/next", model="gpt2", prompt="cat " * 80)


@pytest.mark.parametrize("logits", [torch.zeros(8000), torch.linspace(0, 9, 700), torch.arange(600) // 250])
def test_sums_over_tokens_that_are_not_listed(logits: torch.Tensor) -> None:
    """Uniform over 8,000 tokens, top-p = 0.5001 keeps 4,001: each has 0.00025, though 200 of them are listed."""
    logprobs, temperatures, top_ps = logits.double().log_softmax(0), [0.5, 1.0, 2.0], [0.0501, 0.3001, 0.5001, 0.9001]
    found = describe_logprobs(logprobs, 200, temperatures, top_ps)
    listed = set(found.ids)
    for temperature, kept_by_top_p in zip(temperatures, found.nucleus, strict=True):
        for top_p, (num, logsumexp) in zip(top_ps, kept_by_top_p, strict=True):
            config = GenerationConfig(temperature=temperature, top_p=top_p)
            kept = warp_logits(logprobs[None], config)[0]
            rest = [i for i in kept.isfinite().nonzero()[:, 0].tolist() if i not in listed]
            assert num == len(rest)
            assert logsumexp == pytest.approx(float(kept[rest].logsumexp(0)) if rest else None)
    last = logprobs[found.ids[-1]]
    assert found.num_tied == int((logprobs == last).sum()) - int((logprobs[found.ids] == last).sum())


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_beam_search_goes_on_from_the_tokens_that_were_taken(client: Any, name: str) -> None:
    """The first step's candidates are the next tokens after them, in the order of their log-probabilities."""
    first = ask(client, "/next", model=name, prompt="the cat", top=9)["tokens"]
    taken = [first[3]["id"], first[8]["id"]]  # tokens that no tokenizer would write so
    wanted = ask(client, "/next", model=name, prompt="the cat", new_tokens=taken, top=4)["tokens"]
    search = {"model": name, "prompt": "the cat", "num_beams": 3, "max_new_tokens": 4}
    found = ask(client, "/beams", **search, new_tokens=taken)
    children = sorted((n for n in found["nodes"] if n["parent"] == 0), key=lambda n: -n["logprob"])
    assert [child["token"] for child in children[:4]] == [token["id"] for token in wanted]
    assert [c["logprob"] for c in children[:4]] == pytest.approx([t["logprob"] for t in wanted], abs=1e-4)
    assert ask(client, "/beams", **search)["nodes"] != found["nodes"]
    limit = {"gpt2": 64}.get(name)
    if limit:
        assert "64" in error_of(client, "/beams", **search, new_tokens=[20] * limit)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_the_tree_is_the_beam_search_of_generate(client: Any, name: str) -> None:
    search = {"model": name, "prompt": "the cat", "num_beams": 3, "max_new_tokens": 5}
    found = ask(client, "/beams", **search)
    results = ask(client, "/generate", **search, num_return_sequences=3)["results"]
    assert [sequence["text"] for sequence in found["sequences"]] == [result["new"] for result in results]
    assert [s["score"] for s in found["sequences"]] == pytest.approx([r["score"] for r in results], abs=1e-5)
    nodes = found["nodes"]
    for node in nodes[1:]:
        assert node["score"] == pytest.approx(nodes[node["parent"]]["score"] + node["logprob"], abs=1e-4)
    depths = [0]
    for node in nodes[1:]:
        depths.append(depths[node["parent"]] + 1)
    for depth in range(1, max(depths)):
        kept = [n for n, d in zip(nodes, depths, strict=True) if d == depth and n["fate"] == "kept"]
        assert len(kept) == 3
        dropped = [n for n, d in zip(nodes, depths, strict=True) if d == depth and n["fate"] == "dropped"]
        assert max((n["score"] for n in dropped), default=-math.inf) <= min(n["score"] for n in kept)
    assert client.post("/beams", json={**search, "num_beams": 99}).status_code == 400


# --- blanks


def test_compared_blanks_have_the_same_words(client: Any, folders: dict[str, Path]) -> None:
    """A word outside the likeliest of one sentence has its own probability there: what a longer list says."""
    texts = ["the ___ is near the ___", "the ___ is not the ___"]
    plain, whole = (ask(client, "/fill", model="bert", text=texts, top=top)["results"] for top in (3, 1000))
    compared = ask(client, "/fill", model="bert", text=texts, top=3, compare=True)["results"]
    for k in (0, 1):
        words = [sorted(guess["text"] for guess in result["blanks"][k]["guesses"]) for result in compared]
        assert words[0] == words[1]
        assert 3 < len(words[0]) <= 6
        for own, everything, likeliest in zip(compared, whole, plain, strict=True):
            found = [(guess["text"], guess["probability"]) for guess in own["blanks"][k]["guesses"]]
            known = {guess["text"]: guess["probability"] for guess in everything["blanks"][k]["guesses"]}
            assert [p for _, p in found] == pytest.approx([known[word] for word, _ in found], rel=1e-4)
            assert [word for word, _ in found[:3]] == [g["text"] for g in likeliest["blanks"][k]["guesses"]]
    other = ask(client, "/fill", model="bert", text=["the ___", "a ___ and ___"], top=3, compare=True)["results"]
    assert [len(blank["guesses"]) for result in other for blank in result["blanks"]] == [3, 3, 3]


# --- attention


def test_a_permutation_is_the_order_of_attention(connect: Any, folders: dict[str, Path]) -> None:
    """XLNet: each token attends to itself and to those before it in a random order, and the mask is named so."""
    body = {"model": "xlnet", "text": "the cat lives near the river"}
    with connect("xlnet", "bert") as (client, _):
        abilities = {model["id"]: model["abilities"] for model in client.get("/v1/models").json()["data"]}
        assert ["permutation" in abilities[name] for name in ("xlnet", "bert")] == [True, False]
        whole = ask(client, "/attention/heads", **body)["kinds"]["encoder"]["masks"]
        assert [mask["name"] for mask in whole] == ["full"]
        seen = []
        for permutation in (0, 1):
            (mask,) = ask(client, "/attention/heads", **body, permutation=permutation)["kinds"]["encoder"]["masks"]
            assert mask["name"] == "permutation"
            weights = np.array(ask(client, "/attention", **body, permutation=permutation)["weights"]["encoder"])
            visible = np.asarray((weights > 0).any((0, 1)))
            assert sorted(visible.sum(1)) == list(range(1, len(visible) + 1))
            assert visible.diagonal().all()
            assert np.array_equal(np.frombuffer(base64.b64decode(mask["cells"]), np.uint8), visible.ravel())
            seen.append(mask["cells"])
        assert seen[0] != seen[1]
        assert "query stream" in error_of(client, "/attention/heads", **(body | {"model": "bert"}), permutation=0)


def test_a_window_is_a_part_of_the_whole(client: Any) -> None:
    text = "the cat lives near the river and the dog"
    whole = np.array(ask(client, "/attention", model="bert", text=text)["weights"]["encoder"])
    part = ask(client, "/attention", model="bert", text=text, heads=[1], queries=[2, 5], keys=[1, 8])
    assert np.allclose(part["weights"]["encoder"], whole[:, 1:, 2:5, 1:8])


@pytest.mark.parametrize(("name", "kind", "mask"), [("bert", "encoder", "full"), ("gpt2", "decoder", "causal")])
def test_heads_have_pictures_and_masks(client: Any, name: str, kind: str, mask: str) -> None:
    found = ask(client, "/attention/heads", model=name, text="the cat lives near the river", max_cells=4)
    heads, tokens = found["kinds"][kind], found["tokens"]
    weights = np.array(ask(client, "/attention", model=name, text="the cat lives near the river")["weights"][kind])
    cells = np.frombuffer(base64.b64decode(heads["pictures"]), np.uint8).reshape(1, 2, heads["rows"], heads["columns"])
    size = -(-len(tokens) // 4)
    assert abs(cells[0, 1, 0, 0] / 255 - weights[0, 1, :size, :size].max()) < 0.01
    entropy = -(weights * np.log(np.maximum(weights, 1e-12))).sum(-1).mean(-1)
    assert [head["entropy"] for head in heads["heads"][0]] == pytest.approx(entropy[0].tolist(), abs=0.01)
    assert [m["name"] for m in heads["masks"]] == [mask]
    seq2seq = ask(client, "/attention/heads", model="t5", text="the cat", target="a river is blue")
    assert set(seq2seq["kinds"]) == {"encoder", "decoder", "cross"}
    assert seq2seq["kinds"]["decoder"]["masks"][0]["name"] == "causal"


def test_heads_are_named_by_what_they_do() -> None:
    tokens = ["[CLS]", "the", "cat", "and", "the", "cat", "[SEP]"]
    is_separator = np.array([True, False, False, False, False, False, True])
    eye, size = np.eye(7), 7

    def name(weights: np.ndarray) -> str:
        return summarize_head(weights, tokens, is_separator, is_cross=False).name

    previous = np.eye(size, k=-1) + np.eye(size)[:, :1] @ np.eye(size)[:1]
    assert name(previous) == "previous token"
    assert name(np.eye(size, k=1) + np.outer(eye[6], eye[6])) == "next token"
    assert name(eye) == "same token"
    assert name(np.outer(np.ones(size), eye[0])) == "first token"
    assert name(np.outer(np.ones(size), eye[6])) == "separator"
    assert name(np.full((size, size), 1 / size)) == "broad"
    same = eye.copy()
    for i, j in ((1, 4), (2, 5)):
        same[[i, j]] = same[[j, i]]
    assert name(0.7 * same + 0.3 / size) == "same word"
    three = eye + np.eye(size, k=1) + np.eye(size, k=-1)
    assert name(0.9 * three / three.sum(1, keepdims=True) + 0.1 / size) == ""
    summary = summarize_head(previous, tokens, is_separator, is_cross=False)
    assert summary.entropy == pytest.approx(0, abs=1e-6)
    assert summary.distance == pytest.approx(6 / 7)


# --- vectors and salience


def test_the_map_is_a_pca_of_the_words_vectors(client: Any, folders: dict[str, Path]) -> None:
    texts = ["the cat lives near the river", "a big dog and a Cat"]
    found = ask(client, "/vectors", model="bert", texts=texts)
    spans = [(word["text"], word["start"], word["end"]) for word in found["words"]]
    assert [texts[i][start:end] for i, start, end in spans] == [word for text in texts for word in text.split()]
    for layer, points in enumerate(found["layers"]):
        x_ND = embed_words_in_texts(
            folders["bert"], [texts[i] for i, _, _ in spans], [(start, end) for _, start, end in spans], layer
        )
        reference = PCA(2).fit(x_ND)
        assert points["shares"] == pytest.approx(reference.explained_variance_ratio_.tolist(), abs=1e-4)
        assert np.abs(points["points"]) == pytest.approx(np.abs(reference.transform(x_ND)), abs=1e-3)
        unit = x_ND / np.linalg.norm(x_ND, axis=1, keepdims=True)
        cosines = unit @ unit.T - 2 * np.eye(len(unit))
        assert points["neighbours"][0][0][1] == pytest.approx(cosines[0].max(), abs=1e-3)
    only = ask(client, "/vectors", model="bert", texts=texts, words=["cat"])
    assert [word["word"] for word in only["words"]] == ["cat", "Cat"]
    assert "none of 'horse' occurs" in error_of(client, "/vectors", model="bert", texts=texts, words=["horse"])


def test_salience_is_the_change_of_the_logit(everything: tuple[Any, Any]) -> None:
    """Shrink one token's embedding by a little: the logit changes by salience times that."""
    client, server = everything
    found = ask(client, "/salience", model="topics", input="a big cat lives near the river")
    predictor = server.models["topics"].predictors["classify"]
    model, index = predictor.model, predictor.task.labels.index(found["label"])
    task_input = predictor.reader.read("a big cat lives near the river", 1)
    batch = predictor.task.collate(predictor.task.encode([task_input.example]))
    step = 1e-3

    def logit_with(position: int, scale: float) -> float:
        def shrink(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            output = output.clone()
            output[0, position] *= scale
            return output

        handle = model.embed.tokens.register_forward_hook(shrink)
        try:
            with torch.no_grad():
                return float(model.logits(batch.to(torch.device("cpu"))).flatten(0, 1)[0, index])
        finally:
            handle.remove()

    assert found["logit"] == pytest.approx(logit_with(0, 1.0), abs=1e-4)
    assert len(found["tokens"]) == len(found["values"])
    for position in range(len(found["tokens"])):
        slope = (logit_with(position, 1 + step) - logit_with(position, 1 - step)) / (2 * step)
        assert found["values"][position] == pytest.approx(slope, abs=2e-2 + 0.02 * abs(slope))
    other = ask(client, "/salience", model="topics", input="a big cat", label="place")
    assert other["label"] == "place"
    assert "no label" in error_of(client, "/salience", model="topics", input="a cat", label="planet")


def test_salience_of_a_choice_is_the_change_of_its_logit(connect: Any) -> None:
    body = {"model": "endings", "input": ["the cat lives", "near the river", "in a big forest"]}
    with connect("endings") as (client, server):
        predictor = server.models["endings"].predictors["choice"]
        best = ask(client, "/classify", model="endings", inputs=[body["input"]])["results"][0]["choice"]
        found = ask(client, "/salience", **body)
        assert found["label"] == body["input"][1 + best]
        model, task = predictor.model, predictor.task
        for label in body["input"][1:]:
            found = ask(client, "/salience", **body, label=label)
            example = predictor.reader.read(["the cat lives", label, label], 1).example
            batch = task.collate(task.encode([example])).to(torch.device("cpu"))
            embedding, step = model.embed.tokens, 1e-2
            logits = []
            for scale in (1 - step, 1 + step):
                handle = embedding.register_forward_hook(lambda module, inputs, output, scale=scale: output * scale)
                with torch.no_grad():
                    logits.append(float(model.logits(batch).flatten()[0]))
                handle.remove()
            assert len(found["tokens"]) == len(found["values"]) == len(task.encode([example])[0].sequences[0].ids)
            # the sum over all tokens: every embedding shrinks at once
            assert sum(found["values"]) == pytest.approx((logits[1] - logits[0]) / (2 * step), abs=0.05, rel=0.05)
        assert "no choice" in error_of(client, "/salience", **body, label="somewhere")


def test_the_salience_of_a_long_text_is_that_of_its_first_window(client: Any) -> None:
    short = ask(client, "/salience", model="topics", input="a big cat")
    long = ask(client, "/salience", model="topics", input="a big cat and a dog " * 40)
    assert (short["num_windows"], len(long["tokens"]) <= LENGTH) == (1, True)
    assert long["num_windows"] > 2


def test_heads_of_a_checkpoint_that_reads_several_texts_at_once(connect: Any) -> None:
    """A multiple choice compares texts; its attention is that of its encoder on one."""
    with connect("endings", "bert") as (client, _):
        found = ask(client, "/attention/heads", model="endings", text="the cat lives")
        assert (list(found["kinds"]), len(found["tokens"])) == (["encoder"], 5)
        weights = np.array(ask(client, "/attention", model="endings", text="the cat lives")["weights"]["encoder"])
        assert weights.sum(-1) == pytest.approx(1, abs=1e-3)


# --- static vectors


def test_a_static_model_has_one_vector_for_a_word(client: Any, folders: dict[str, Path]) -> None:
    """A word2vec model stands beside the others: a word is one point in every text, and its tokens are words."""
    (model,) = (model for model in client.get("/v1/models").json()["data"] if model["id"] == "word2vec")
    assert (model["abilities"], model["num_layers"]) == ([], 0)
    unknown = ask(client, "/tokenize", model="word2vec", text="the zyzzyva")["results"][0]["ids"][1]
    assert model["unknown_id"] == unknown  # the page marks such a piece
    found = ask(client, "/vectors", model="word2vec", texts=["the cat lives", "a cat is red"], words=["cat", "red"])
    (layer,) = found["layers"]
    assert [word["word"] for word in found["words"]] == ["cat", "cat", "red"]
    assert layer["points"][0] == layer["points"][1] != layer["points"][2]
    assert layer["neighbours"][0][0] == [1, 1.0]
    embedding = load_model(folders["word2vec"]).embed.tokens.weight.detach().numpy()
    ids = ask(client, "/tokenize", model="word2vec", text="cat red")["results"][0]["ids"]
    cosine = np.dot(*embedding[ids]) / np.linalg.norm(embedding[ids], axis=1).prod()
    assert layer["neighbours"][0][1] == [2, pytest.approx(cosine, abs=1e-3)]


# --- objectives


def test_every_objective_shows_the_text(client: Any) -> None:
    found = ask(client, "/objectives", model="t5", text=TEXT)["objectives"]
    assert [view["name"] for view in found] == list(OBJECTIVES)
    assert {view["name"]: view["problem"] for view in found if view["problem"]} == {
        "tlm": "This objective reads a text and its translation: write them as A ||| B."
    }
    views = {view["name"]: view for view in found}
    mlm = views["mlm"]
    restored = "".join(
        token["original"] if token["kind"] in ("masked", "random") else token["text"].strip()
        for token in mlm["sequences"][0]["tokens"]
        if token["kind"] != "special"
    )
    plain = "".join(
        token["text"].strip() for token in views["bilm"]["sequences"][0]["tokens"] if token["kind"] != "special"
    )
    assert restored.replace("<unk>", "?") == plain.replace("<unk>", "?")
    assert any(token["kind"] == "sentinel" for token in views["span-corruption"]["sequences"][0]["tokens"])
    assert len(views["bart"]["masks"]) == 3
    pair = ask(client, "/objectives", model="t5", text="the cat ||| a river", objectives=["tlm"])["objectives"][0]
    assert not pair["problem"]


def test_the_rate_and_the_draw_change_what_is_hidden(client: Any) -> None:
    def masked(**body: Any) -> list[bool]:
        (view,) = ask(client, "/objectives", model="bert", text=TEXT * 3, objectives=["mlm"], **body)["objectives"]
        return [token["kind"] in ("masked", "random", "kept") for token in view["sequences"][0]["tokens"]]

    few, many = masked(rate=0.1), masked(rate=0.8)
    assert sum(few) / len(few) < 0.15
    assert sum(many) / len(many) > 0.6
    assert masked(rate=0.1) == few
    assert masked(rate=0.1, draw=1) != few
    unknown = client.post("/objectives", json={"model": "bert", "text": "a", "objectives": ["guessing"]})
    assert "Unknown objective" in unknown.json()["error"]["message"]
