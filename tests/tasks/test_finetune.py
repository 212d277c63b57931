"""Fine-tuning: three shapes learn a toy task, and what is written down is true."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from firth.errors import UserError
from firth.evaluate import evaluate
from firth.files import damage
from firth.models import load_model, make_model, read_config
from firth.models.presets import t5_v1_1
from firth.tasks import FinetuneRecipe, finetune, make_task
from firth.tasks.finetune import few, first_model
from firth.text import Example
from firth.tokens import load_tokenizer
from firth.train import Interrupted, load_recipe, read_log

Checkpoints = Callable[[str], Path]
Toy = dict[str, Path]
RATES = {"bert": 3e-3, "gpt2": 3e-3, "t5": 1e-2}


def recipe(checkpoint: Path, toy: Toy, folder: Path, **fields: Any) -> FinetuneRecipe:
    small: dict[str, Any] = dict(
        checkpoint=str(checkpoint),
        train=str(toy["train"]),
        dev=str(toy["dev"]),
        output_dir=str(folder),
        max_steps=60,
        max_seq_length=32,
        seeds=1,
        learning_rate=3e-3,
        compile=False,
        bf16=False,
    )
    return FinetuneRecipe(**small | fields)


def predictions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", RATES)
def test_three_shapes_learn_to_classify(family: str, checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    run = tmp_path / "run"
    steps = 200 if family == "t5" else 120
    result = finetune(
        recipe(checkpoint_of(family), toy, run, learning_rate=RATES[family], max_target_length=8, max_steps=steps)
    )
    assert result["metric"] == "accuracy"
    assert result["accuracy"] == result["mean"] > 0.9
    assert json.loads((run / "results.json").read_text()) == result
    assert {"metric", "mean", "std", "seeds", "accuracy", "macro_f1", "mcc"} <= result.keys()

    found = predictions(run)
    truth = [json.loads(line) for line in toy["dev"].read_text().splitlines()]
    assert [p["reference"] for p in found] == [t["label"] for t in truth]
    assert [p["id"] for p in found] == list(range(1, len(truth) + 1))
    assert np.mean([p["prediction"] == p["reference"] for p in found]) == result["accuracy"]
    for p in found:
        assert sum(p["scores"].values()) == pytest.approx(1)
        assert max(p["scores"], key=p["scores"].get) == p["prediction"]

    # the same checkpoint, scored by the other verb
    again = evaluate(run / "final", "classify", toy["dev"], tmp_path / "scores")
    assert again["metrics"]["accuracy"] == result["accuracy"]
    assert [p["prediction"] for p in predictions(tmp_path / "scores")] == [p["prediction"] for p in found]
    assert damage(run / "final") is None


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_transformers_opens_a_classifier_with_equal_logits(
    family: str, checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path
) -> None:
    finetune(recipe(checkpoint_of(family), toy, tmp_path / "run", max_steps=3))
    folder = tmp_path / "run" / "final"
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ours, tokenizer = load_model(folder), load_tokenizer(folder)
    assert theirs.config.id2label == {0: "animal", 1: "place"}
    task = make_task("classify", ("animal", "place"), tokenizer, ours.config, 32, 8)
    items = task.encode(
        [Example(0, ("I saw the cat",), "animal"), Example(1, ("We like the old garden again",), "place")]
    )
    batch = task.batch(items).to(torch.device("cpu"))
    with torch.no_grad():
        expected = theirs(input_ids=batch.tokens, attention_mask=(batch.doc >= 0).long()).logits
        torch.testing.assert_close(ours.logits(batch), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            ours(batch.tokens, attention_mask=(batch.doc >= 0).long()).logits, expected, rtol=1e-4, atol=1e-5
        )


def test_text_to_text_learns(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pairs = {"train": str(toy["train_pairs"]), "dev": str(toy["dev_pairs"]), "task": "text-to-text"}
    result = finetune(
        recipe(checkpoint_of("t5"), toy, run, **pairs, max_steps=150, learning_rate=1e-2, max_target_length=8)
    )
    losses = [line["loss"] for line in read_log(run / "seed-0" / "log.jsonl") if "loss" in line]
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) / 2
    assert result["metric"] == "chrf"
    assert {"chrf", "bleu", "rouge_l", "exact_match"} <= result.keys()
    found = predictions(run)
    truth = [json.loads(line)["target"] for line in toy["dev_pairs"].read_text().splitlines()]
    assert [p["reference"] for p in found] == truth
    assert all(set(p) == {"id", "prediction", "reference"} for p in found)
    assert result["exact_match"] > 0.3  # guessing one of the eight words gives 0.125
    again = evaluate(run / "final", "text-to-text", toy["dev_pairs"], tmp_path / "scores")
    assert again["metrics"]["exact_match"] == result["exact_match"]


def test_several_seeds(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = finetune(recipe(checkpoint_of("bert"), toy, run, seeds=3, max_steps=12))
    scores = [json.loads((run / f"seed-{i}" / "results.json").read_text())["accuracy"] for i in range(3)]
    assert result["seeds"] == scores
    assert result["mean"] == pytest.approx(np.mean(scores))
    assert result["std"] == pytest.approx(np.std(scores, ddof=1))
    best = run / f"seed-{int(np.argmax(scores))}"
    for name in ("final/model.safetensors", "predictions.jsonl"):
        assert (run / name).read_bytes() == (best / name).read_bytes()
    logs = [(run / f"seed-{i}" / "log.jsonl").read_text() for i in range(3)]
    assert len(set(logs)) == 3, "seeds differ"


def test_resume_does_not_repeat_and_gives_the_same(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "straight", seeds=2, max_steps=8, save_steps=3))
    module = sys.modules["firth.tasks.finetune"]
    real, calls = module.fit, []

    def stops(run: Any, resume: bool = False) -> Any:
        calls.append(run.name)
        if len(calls) == 2:  # the second seed is stopped after five steps
            run.hooks.append((5, lambda step, model: (_ for _ in ()).throw(Interrupted("stopped"))))
        return real(run, resume)

    monkeypatch.setattr(module, "fit", stops)
    r = recipe(checkpoint_of("bert"), toy, tmp_path / "stopped", seeds=2, max_steps=8, save_steps=3)
    with pytest.raises(Interrupted):
        finetune(r)
    resumed = finetune(r, resume=True)
    assert calls == ["seed 1 of 2", "seed 2 of 2", "seed 2 of 2"]
    assert {k: v for k, v in resumed.items() if k not in ("output_dir", "predictions")} == {
        k: v for k, v in straight.items() if k not in ("output_dir", "predictions")
    }
    for seed in ("seed-0", "seed-1"):
        for name in ("final/model.safetensors", "log.jsonl", "predictions.jsonl"):
            assert (tmp_path / "stopped" / seed / name).read_bytes() == (
                tmp_path / "straight" / seed / name
            ).read_bytes()


def test_the_untrained_twin_is_another_model(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    config = read_config(checkpoint_of("bert"))
    task = make_task("classify", ("animal", "place"), load_tokenizer(checkpoint_of("bert")), config, 32, 8)
    trained = first_model(recipe(checkpoint_of("bert"), toy, tmp_path), task)
    twin = first_model(recipe(checkpoint_of("bert"), toy, tmp_path, from_scratch=True), task)
    assert twin.config == trained.config
    base = load_model(checkpoint_of("bert"))
    assert torch.equal(trained.embed.tokens.weight, base.embed.tokens.weight)
    assert not torch.equal(twin.embed.tokens.weight, base.embed.tokens.weight)
    result = finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", from_scratch=True, max_steps=2))
    assert result["from_scratch"] is True


def test_a_published_folder_is_fine_tuned_the_same_way(toy: Toy, tmp_path: Path) -> None:
    words = "the cat dog horse fox river garden harbour forest i saw we like anna knows they found he painted you"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words.split(), "remember", "today", "again", "at", "noon"]
    folder = tmp_path / "published"
    config = transformers.BertConfig(
        vocab_size=len(tokens), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)  # the bare body, as many are published
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    result = finetune(recipe(folder, toy, tmp_path / "run"))
    assert result["accuracy"] > 0.9
    assert load_tokenizer(tmp_path / "run" / "final").encode("The cat") == [5, 6]


def test_an_untied_head_of_t5_is_kept(toy: Toy, tmp_path: Path, checkpoint_of: Checkpoints) -> None:
    """`transformers` 5 calls every head of T5 tied in config.json; what counts is the file."""
    tokenizer = load_tokenizer(checkpoint_of("t5"))
    model = make_model(t5_v1_1(1, 32, 2, 64, tokenizer.vocab.size))
    model.tokenizer = tokenizer
    model.save(tmp_path / "t5")
    file = tmp_path / "t5" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    task = make_task("text-to-text", None, tokenizer, read_config(tmp_path / "t5"), 32, 8)
    found = first_model(recipe(tmp_path / "t5", toy, tmp_path / "run", task="text-to-text"), task)
    assert torch.equal(found.head.weight, model.head.weight)


# --- few examples


def examples(labels: str) -> list[Example]:
    return [Example(i, (f"text {i}",), label) for i, label in enumerate(labels)]


def test_few_are_even_over_the_labels() -> None:
    data = examples("a" * 50 + "b" * 10 + "c" * 2)
    chosen = [data[i].target for i in few(data, 12, seed=0)]
    assert {label: chosen.count(label) for label in "abc"} == {"a": 5, "b": 5, "c": 2}


def test_few_depend_on_the_seed_alone() -> None:
    data = examples("ab" * 30)
    assert few(data, 6, 1) == few(data, 6, 1)
    assert set(few(data, 6, 1)) != set(few(data, 6, 2))
    assert sorted(few(data, 100, 1)) == list(range(60))
    assert len(set(few(data, 40, 3))) == 40


def test_few_of_many_targets_are_not_the_first_of_the_alphabet() -> None:
    data = examples("abcdefghijklmnopqrstuvwxyz")
    drawn = [frozenset(few(data, 5, seed)) for seed in range(5)]
    assert len(set(drawn)) == 5
    assert all(len(d) == 5 for d in drawn)


def test_shots_reach_the_run(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["firth.tasks.finetune"]
    seen = []
    monkeypatch.setattr(module, "one_seed", lambda r, s, task, items, *rest: seen.append(items) or {"accuracy": 1.0})
    monkeypatch.setattr(module, "conclude", lambda *a: {})
    finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", shots=8, seeds=2))
    for items in seen:
        assert sorted(item.label for item in items) == [0] * 4 + [1] * 4
    assert [i.ids for i in seen[0]] != [i.ids for i in seen[1]], "each seed draws its own"


def test_small_data_get_enough_steps(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["firth.tasks.finetune"]
    monkeypatch.setattr(module, "one_seed", lambda *a: {"accuracy": 1.0})
    monkeypatch.setattr(module, "conclude", lambda *a: {})
    finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", max_steps=0, num_train_epochs=1))
    stored = load_recipe(tmp_path / "run" / "recipe.yaml", FinetuneRecipe)
    assert (stored.max_steps, stored.eval_steps, stored.warmup_steps) == (200, 200, 20)


# --- what is said


def test_long_texts_are_cut_and_that_is_said_once(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", max_seq_length=5, seeds=2, max_steps=1))
    total = len(toy["train"].read_text().splitlines()) + len(toy["dev"].read_text().splitlines())
    assert capsys.readouterr().err.count(f"{total} texts were longer than 5 tokens") == 1


def test_the_model_has_fewer_places_than_asked(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text('{"text": "%s", "label": "animal"}\n' % ("cat " * 50))
    finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", max_seq_length=128, dev=str(long), max_steps=1))
    assert "1 texts were longer than 32 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "clasify"}, "Unknown task 'clasify'. Did you mean 'classify'"),
        ({"task": "text-to-text"}, "text-to-text needs an encoder-decoder"),
        ({"seeds": 0}, "seeds is 0"),
        ({"shots": -1}, "shots is -1"),
        ({"max_target_length": 1}, "max_target_length is 1"),
        ({"checkpoint": "nowhere"}, "nowhere is not a checkpoint"),
        ({"encoding": "klingon"}, "klingon"),
    ],
)
def test_mistakes(fields: dict[str, Any], message: str, checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    pairs = (
        {"train": str(toy["train_pairs"]), "dev": str(toy["dev_pairs"])} if fields.get("task") == "text-to-text" else {}
    )
    with pytest.raises(UserError, match=message):
        finetune(replace(recipe(checkpoint_of("bert"), toy, tmp_path / "run", **pairs), **fields))
    assert not (tmp_path / "run").exists()


def test_labels_that_cannot_be_learned(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text('{"text": "the cat", "label": "animal"}\n')
    with pytest.raises(UserError, match=r"one.jsonl: every example has the label 'animal'"):
        finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", train=str(one)))
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "the cat", "label": "animal"}\n{"text": "red", "label": "colour"}\n')
    with pytest.raises(UserError, match=r"other.jsonl, example 2: the label 'colour' does not occur in .*train.jsonl"):
        finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", dev=str(other)))
    assert not (tmp_path / "run").exists()


def test_evaluate_asks_for_what_it_can_score(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no classes: fine-tune it first"):
        evaluate(checkpoint_of("bert"), "classify", toy["dev"], tmp_path / "scores")
    with pytest.raises(UserError, match="Unknown task 'pair'"):
        evaluate(checkpoint_of("bert"), "pair", toy["dev"], tmp_path / "scores")
    assert not (tmp_path / "scores").exists()
