"""Sentence embeddings from pairs: the contrastive loss by hand, duplicates, ranks, saved files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tasks.small import ANIMALS, CPU, PLACES, WORDS, learn, model_for, parts

from firth.core.errors import UserError
from firth.evaluate import evaluate
from firth.evaluate.embed import embed_texts
from firth.evaluate.export import compare_with_transformers, write_export
from firth.metrics import compute_metrics
from firth.models import EmbeddingHead, load_model, make_model
from firth.tasks import FinetuneRecipe, finetune, make_task
from firth.tasks.embed import select_positive_pairs
from firth.text import Example


def pairs(number: int = 9) -> list[Example]:
    rng = random.Random(0)
    return [
        Example(i, (" ".join(rng.choices(WORDS, k=rng.randint(2, 4))), " ".join(rng.choices(WORDS, k=4))))
        for i in range(number)
    ]


def made(family: str, known: list[Example]) -> Any:
    config, tokenizer = parts(family)
    return make_task("embed", known, tokenizer, config, FinetuneRecipe(max_seq_length=32)), config


@pytest.mark.parametrize(
    ("family", "pool"), [("bert", "mean"), ("roberta", "mean"), ("gpt2", "last"), ("llama", "last")]
)
def test_contrastive_loss_and_embeddings(family: str, pool: str) -> None:
    known = pairs()
    task, config = made(family, known)
    items = task.encode(known)
    model = model_for(task, config).eval()
    model.tokenizer = task.tokenizer
    assert isinstance(model.config.head, EmbeddingHead)
    assert model.config.head.pool == pool
    batch = task.collate(items)
    assert len(batch.input_ids) < 2 * len(items)
    assert batch.num_targets == len(items)
    a, b = (torch.tensor(embed_texts(model, [e.texts[side] for e in known], normalise=True)) for side in (0, 1))
    with torch.no_grad():
        loss = model.losses(batch.to(CPU.device))["targets"]
    near = 20 * (a @ b.T - 0.3 * torch.eye(len(known)))
    right = torch.arange(len(known))
    expected = sum(torch.nn.functional.cross_entropy(m, right, reduction="sum") for m in (near, near.T))
    assert loss.item() == pytest.approx(float(expected), rel=1e-5)

    many, single = task.predict(model, items, CPU, 100), task.predict(model, items, CPU, 1)
    cosines = (a * b).sum(1).tolist()
    assert [p.prediction["cosine"] for p in many] == pytest.approx(cosines, abs=1e-5)
    assert [p.prediction["cosine"] for p in single] == pytest.approx(cosines, abs=1e-5)
    found = compute_metrics("embed", list(zip(a.numpy(), b.numpy(), strict=True)), [None] * len(known))
    assert task.score(known, many) == pytest.approx(found)
    assert task.metric == "mrr"


def test_pairs_with_a_repeated_text_are_excluded() -> None:
    texts = [("a cat", "a dog"), ("a fox", "a dog"), ("red", "blue"), ("blue", "big"), ("near", "near")]
    known = [Example(i, pair) for i, pair in enumerate(texts)]
    task, _ = made("bert", known)
    batch = task.collate(task.encode(known))
    assert batch.num_targets == 3
    token_by_text = {}
    for row, slot in zip(*np.nonzero(batch.group_ids >= 0), strict=True):
        token_by_text[batch.group_ids[row, slot], batch.task_labels[row, slot]] = batch.input_ids[
            row, batch.target_positions[row, slot] + 1
        ]
    words = {key: task.tokenizer.backend.id_to_token(int(i)) for key, i in token_by_text.items()}
    assert words == {(0, 0): "a", (0, 1): "a", (1, 0): "red", (1, 1): "blue", (2, 0): "near", (2, 1): "near"}


@pytest.mark.parametrize("family", ["bert", "gpt2", "bart", "t5"])
def test_a_tiny_model_learns_to_match_pairs(family: str) -> None:
    """Each animal has its place."""
    rng, homes = random.Random(0), list(zip(ANIMALS, PLACES, strict=True))
    known = [
        Example(i, (f"{rng.choice(['a', 'the'])} {a}", f"near {rng.choice(['a', 'the'])} {p}"))
        for i, (a, p) in enumerate(homes * 8)
    ]
    task, config = made(family, known)
    items = task.encode(known)
    model = learn(task, config, items, 80, rate=3e-3, size=4)
    four = [Example(i, (f"the {a}", f"near a {p}")) for i, (a, p) in enumerate(homes)]
    scores = task.score(four, task.predict(model, task.encode(four), CPU, 3))
    assert scores["precision_at_1"] == 1.0
    assert scores["mrr"] == 1.0

    scored = [Example(0, ("the cat", "near a river"), 5.0), Example(1, ("the cat", "near the garden"), 0.0)]
    found = task.predict(model, task.encode(scored), CPU, 3)
    assert task.metric == "spearman"
    assert found[0].prediction > found[1].prediction
    assert task.score(scored, found)["spearman"] == pytest.approx(1.0)
    again = make_task("embed", task.metadata(), task.tokenizer, model.config)
    assert again.metadata() == task.metadata()
    assert again.predict(model, again.encode(scored), CPU, 3) == found


def test_only_positive_pairs_are_trained(capsys: pytest.CaptureFixture[str]) -> None:
    scored = [Example(i, ("a", "b"), value) for i, value in enumerate([5.0, 3.9, 4.0, 0.0])]
    assert [e.target for e in select_positive_pairs(scored, "x.jsonl")] == [5.0, 4.0]
    assert "2 of 4 pairs have a score of at least 4; the others are not learned." in capsys.readouterr().err
    assert select_positive_pairs(pairs(), "x.jsonl") == pairs()
    with pytest.raises(UserError, match=r"x.jsonl: fewer than 2 pairs have a score near the highest, 5: nothing"):
        select_positive_pairs(scored[:2], "x.jsonl")


def test_embed_and_evaluate_give_the_same_vectors(tmp_path: Path) -> None:
    """Long texts: all three read the 8 tokens of fine-tuning. Margin and scale are those of the options."""
    config, tokenizer = parts("bert")
    fresh = make_model(config)
    fresh.tokenizer = tokenizer
    fresh.save(tmp_path / "checkpoint")
    rng, file = random.Random(1), tmp_path / "pairs.jsonl"
    rows = [{f"text_{side}": " ".join(rng.choices(WORDS, k=16)) for side in "ab"} | {"score": i} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint"), "task": "embed", "max_seq_length": 8}
    fields |= {"train": str(file), "dev": str(file), "output_dir": str(tmp_path / "run"), "max_steps": 1, "seeds": 1}
    finetune(FinetuneRecipe(**fields, contrastive_margin=0.1, contrastive_scale=5.0))
    final = tmp_path / "run" / "final"
    assert load_model(final).config.head == EmbeddingHead("mean", margin=0.1, scale=5.0, max_length=8)

    def cosines(folder: Path) -> list[float]:
        return [json.loads(line)["prediction"] for line in (folder / "predictions.jsonl").read_text().splitlines()]

    evaluate(final, "embed", file, tmp_path / "scores")
    for checkpoint in (final, load_model(final)):
        x_ND = embed_texts(checkpoint, [row[f"text_{side}"] for row in rows for side in "ab"])
        found = (x_ND[::2] * x_ND[1::2]).sum(1)
        assert cosines(tmp_path / "scores") == pytest.approx(found, abs=1e-6)
        assert cosines(tmp_path / "run") == pytest.approx(found, abs=1e-5)
    again = FinetuneRecipe(**fields | {"checkpoint": str(final)}).apply_head_options(load_model(final).config)
    assert isinstance(again.head, EmbeddingHead)
    assert (again.head.margin, again.head.scale) == (0.1, 5.0), "without an option the embedder's own"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"contrastive_margin": -0.1}, "contrastive_margin is -0.1; it must be from 0 to 2"),
        ({"contrastive_scale": 0.0}, "contrastive_scale is 0.0; it must be above 0"),
        ({"contrastive_scale": 9.0, "task": "pair"}, "contrastive_scale is for the task embed, not for pair"),
    ],
)
def test_wrong_losses_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FinetuneRecipe(**{"checkpoint": "x", "task": "embed", "train": "x", "dev": "x"} | fields).check()


@pytest.mark.parametrize("family", ["bert", "xlnet", "t5", "bart"])
def test_from_a_file_to_scores(family: str, tmp_path: Path) -> None:
    """Fine-tune, save, and score again; transformers with mean pooling gives the same vectors."""
    import transformers

    config, tokenizer = parts(family)
    fresh = make_model(config)
    fresh.tokenizer = tokenizer
    fresh.save(tmp_path / "checkpoint")
    rows = [{"text_a": f"near the {a}", "text_b": f"red and {a}"} for a in (*ANIMALS, *PLACES)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint"), "task": "embed", "max_seq_length": 32}
    fields |= {"train": str(file), "dev": str(file), "output_dir": str(tmp_path / "run"), "max_steps": 30, "seeds": 2}
    result = finetune(FinetuneRecipe(**fields, learning_rate=3e-3))
    assert result["metric"] == "mrr"
    assert result["precision_at_1"] > 0.8
    final = tmp_path / "run" / "final"
    again = evaluate(final, "embed", file, tmp_path / "scores")
    assert again["metrics"]["mrr"] == pytest.approx(max(result["seeds"]), rel=1e-4)
    assert compare_with_transformers(final).max_difference < 1e-5

    if family == "bart":  # of which sentence-transformers would take the decoder's
        assert not (final / "modules.json").exists()
    else:
        modules = json.loads((final / "modules.json").read_text())
        assert [m["path"] for m in modules] == ["", "1_Pooling", "2_Normalize"]
        pooling = json.loads((final / "1_Pooling" / "config.json").read_text())
        assert pooling["pooling_mode_mean_tokens"]
    texts = ["near the cat", "the big river is not a garden"]
    read = transformers.AutoTokenizer.from_pretrained(final)(texts, padding=True, return_tensors="pt")
    kind = transformers.T5EncoderModel if family == "t5" else transformers.AutoModel
    theirs = kind.from_pretrained(final).eval()
    with torch.no_grad():
        states = (theirs.get_encoder() if family == "bart" else theirs)(**read).last_hidden_state
    mask = read["attention_mask"][..., None]
    mean = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    np.testing.assert_allclose(mean.numpy(), embed_texts(final, texts, normalise=True), atol=1e-5)
    as_it_is = embed_texts(tmp_path / "checkpoint", texts)  # before it was tuned: with the same special tokens
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "checkpoint")(texts, padding=True, return_tensors="pt")
    if family == "t5":  # the task gives its tokenizer the template
        return
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "checkpoint").eval()
    with torch.no_grad():
        states = (theirs.get_encoder() if family == "bart" else theirs)(**read).last_hidden_state
    mask = read["attention_mask"][..., None]
    np.testing.assert_allclose(((states * mask).sum(1) / mask.sum(1)).numpy(), as_it_is, atol=1e-5)


@pytest.mark.parametrize(("family", "pool"), [("bert", "mean"), ("t5", "mean"), ("gpt2", "last")])
def test_sentence_transformers_computes_the_same_vectors(family: str, pool: str, tmp_path: Path) -> None:
    """An export has its files, whether or not the checkpoint has: pooling, normalisation and the maximum length."""
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    config, tokenizer = parts(family)
    task = make_task("embed", pairs(), tokenizer, config, FinetuneRecipe(max_seq_length=8))
    model = model_for(task, config).eval()
    model.tokenizer = task.templated_tokenizer()
    model.save(tmp_path / "checkpoint")
    write_export(tmp_path / "checkpoint", tmp_path / "hf")
    write_export(tmp_path / "hf", tmp_path / "again")
    files = {p.name for p in (tmp_path / "again").iterdir()}
    assert {"modules.json", "1_Pooling", "config_sentence_transformers.json"} <= files
    opened = library.SentenceTransformer(str(tmp_path / "again"), device="cpu")
    assert opened.max_seq_length == 8
    assert isinstance(model.config.head, EmbeddingHead)
    assert model.config.head.pool == pool
    texts = ["near the cat", "the big river is not a garden and not a forest near the harbour", "fox"]
    np.testing.assert_allclose(
        opened.encode(texts), embed_texts(tmp_path / "checkpoint", texts, normalise=True), atol=1e-5
    )
