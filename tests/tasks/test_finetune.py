"""Fine-tuning: three architectures learn a toy task, and the files that a run writes are correct."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tasks.small import parts as small_parts
from tasks.test_resume import stop_in_seed

import firth
from firth.core.errors import UserError
from firth.core.files import find_corruption, replace_nonfinite
from firth.evaluate import evaluate
from firth.evaluate.likelihood import make_scorer
from firth.evaluate.report import name_positive_class
from firth.metrics import compute_metrics
from firth.models import (
    AuxiliaryLM,
    ClassificationHead,
    Model,
    get_preset,
    grow_vocabulary,
    load_model,
    make_model,
    read_config,
)
from firth.models.config import LMHead
from firth.models.presets import t5_v1_1
from firth.models.task_heads import with_classification_head
from firth.tasks import (
    FINETUNE_TASKS,
    FinetuneRecipe,
    Prediction,
    check_task,
    finetune,
    make_task,
    metric_names,
    read_predictions,
    write_predictions,
)
from firth.tasks.finetune_data import (
    FinetuneData,
    check_labels,
    sample_stratified,
    select_train_examples,
    warn_about_overlap,
)
from firth.tasks.finetune_job import encode_finetune_data
from firth.tasks.head_task import HeadTask
from firth.tasks.results import (
    chance_score,
    check_baseline,
    checksum_examples,
    compare_with_baseline,
    exclude_failed_seeds,
    index_of_best,
    label_of_f1,
    load_seed_predictions,
    orient_score,
    warn_about_failed_seeds,
)
from firth.tasks.seed_model import build_seed_model
from firth.tasks.seed_results import is_seed_finished
from firth.text import Example
from firth.text.documents import AnswerSpan
from firth.tokens import load_tokenizer
from firth.train import ComputeConfig, Interrupted, load_recipe, read_log
from firth.train.recipe import EngineConfig

Checkpoints = Callable[[str], Path]
Toy = dict[str, Path]
CPU = ComputeConfig(torch.device("cpu"), bf16=False, compile=False)
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


def first(r: FinetuneRecipe) -> Model:
    """The model that a run starts with."""
    lines = [json.loads(line) for line in Path(r.train).read_text().splitlines()]
    train = [Example(i, (x.get("text") or x["source"],), x.get("label") or x["target"]) for i, x in enumerate(lines)]
    task = make_task(r.task, train, load_tokenizer(r.checkpoint), read_config(r.checkpoint), r)
    return build_seed_model(encode_finetune_data(r, task, FinetuneData(train, train[:2]), CPU, Path(r.output_dir)), 0)


def seed_results(run: Path, seed: int) -> dict[str, Any]:
    return json.loads((run / f"seed-{seed}" / "results.json").read_text())


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Two runs of one recipe are equal bit for bit, except for times."""
    own = ("output_dir", "predictions", "seconds", "examples_per_second")
    assert {k: v for k, v in a.items() if k not in own} == {k: v for k, v in b.items() if k not in own}
    for seed in range(len(a["seeds"])):
        ours, theirs = Path(a["output_dir"]) / f"seed-{seed}", Path(b["output_dir"]) / f"seed-{seed}"
        for name in ("final/model.safetensors", "log.jsonl", "predictions.jsonl"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


def predictions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", RATES)
def test_three_architectures_learn_to_classify(
    family: str, checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path
) -> None:
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

    # the same checkpoint, scored by the other command
    again = evaluate(run / "final", "classify", toy["dev"], tmp_path / "scores")
    assert again["metrics"]["accuracy"] == result["accuracy"]
    assert [p["prediction"] for p in predictions(tmp_path / "scores")] == [p["prediction"] for p in found]
    assert find_corruption(run / "final") is None


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_transformers_opens_a_classifier_with_equal_logits(
    family: str, checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path
) -> None:
    finetune(recipe(checkpoint_of(family), toy, tmp_path / "run", max_steps=3))
    folder = tmp_path / "run" / "final"
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ours, tokenizer = load_model(folder), load_tokenizer(folder)
    assert theirs.config.id2label == {0: "animal", 1: "place"}
    task = make_task("classify", json.loads((folder / "task.json").read_text()), tokenizer, ours.config)
    for text in ("I saw the cat", "We like the old garden again"):
        (item,) = task.encode([Example(0, (text,), "animal")])
        batch = task.collate([item]).to(torch.device("cpu"))
        ids = batch.input_ids[:, : item.num_tokens]
        with torch.no_grad():
            expected = theirs(input_ids=ids).logits
            torch.testing.assert_close(ours.logits(batch)[:, 0], expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(ours(ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "xlnet", "bart", "gpt2", "llama"])
def test_saved_tokenizer_adds_the_tasks_special_tokens(
    family: str, checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path
) -> None:
    """`transformers` reads raw texts with the template that the head was trained with."""
    finetune(recipe(checkpoint_of(family), toy, tmp_path / "run", max_steps=3))
    folder = tmp_path / "run" / "final"
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["text"] for line in toy["dev"].read_text().splitlines()]
    for text, found in zip(texts[:8], predictions(tmp_path / "run"), strict=False):
        with torch.no_grad():
            logits = theirs(**tokenizer(text, return_tensors="pt")).logits[0]
        assert logits.softmax(-1).tolist() == pytest.approx(list(found["scores"].values()), abs=1e-5)


def test_mixed_kinds_of_tags_raise(checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    files = {"train": tmp_path / "names.jsonl", "dev": tmp_path / "words.jsonl"}
    for path, tags in zip(files.values(), (["O", "B-PER"], ["DET", "NOUN"]), strict=True):
        path.write_text(json.dumps({"tokens": ["the", "cat"], "tags": tags}) + "\n")
    with pytest.raises(UserError, match="tags of two kinds"):
        finetune(recipe(checkpoint_of("bert"), files, tmp_path / "run", task="tag"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("constant", ["train", "dev"])
def test_equal_scores_raise(checkpoint_of: Checkpoints, tmp_path: Path, constant: str) -> None:
    files = {"train": tmp_path / "train.csv", "dev": tmp_path / "dev.csv"}
    for name, path in files.items():
        path.write_text(f"text,score\nthe cat,3\nthe dog,{3 if name == constant else 4}\n")
    with pytest.raises(UserError, match=f"{constant}.csv: every example has the score 3;"):
        finetune(recipe(checkpoint_of("bert"), files, tmp_path / "run", task="regress"))
    assert not (tmp_path / "run").exists()


def test_labels_that_are_spelled_in_several_ways_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = [
        Example(i, ("a text",), label) for i, label in enumerate((" Pos", "pos", "caf\u00e9", "cafe\u0301", "x"))
    ]
    check_labels(examples, examples, FinetuneRecipe(train="train.csv", dev="dev.csv"))
    said = " ".join(capsys.readouterr().err.split())
    assert "train.csv: ' Pos', 'pos', 'cafe\u0301', 'caf\u00e9': labels that differ in capitals" in said
    check_labels(examples[1:3], examples[1:3], FinetuneRecipe(train="train.csv", dev="dev.csv"))
    assert capsys.readouterr().err == ""


def test_several_labels_in_one_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = FinetuneRecipe(train="train.csv", dev="dev.csv")
    train = [Example(i, ("a text",), label) for i, label in enumerate(("bill", "praise", "bill; praise"))]
    check_labels(train, train, recipe)
    assert "train.csv: 'bill; praise': several labels in one." in capsys.readouterr().err
    with pytest.raises(UserError, match="A text has one label here; for several, train one model per label"):
        check_labels(train, [Example(0, ("a text",), "praise;bill")], recipe)


def test_f1_names_its_class() -> None:
    dev = [Example(i, ("a text",), label) for i, label in enumerate(("ok", "fraud", "ok"))]
    found = label_of_f1({"accuracy": 0.5, "mcc": 0.1, "f1": 0.9}, dev)
    assert found == {"positive_label": "ok"}
    assert name_positive_class([("accuracy", "50%"), ("f1", "90%")], found)[1] == ("f1 of 'ok'", "90%")
    assert label_of_f1({"f1": 0.9, "exact_match": 0.1}, dev) == {}  # the words of answers
    assert label_of_f1({"f1": 0.9, "mcc": 0.1}, [*dev, Example(3, ("a text",), "other")]) == {}


def test_fractional_labels_and_too_many_shots_are_reported(
    checkpoint_of: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "numbers.jsonl"
    path.write_text("".join(json.dumps({"text": f"the cat {x}", "label": x}) + "\n" for x in (0.5, 1.5, 2.5)))
    files = {"train": path, "dev": path}
    finetune(recipe(checkpoint_of("bert"), files, tmp_path / "run", max_steps=1, shots=9))
    said = " ".join(capsys.readouterr().err.split())
    assert "the labels are numbers, as 0.5. Each is a class of its own; --task regress learns them." in said
    assert "has 3 examples: all are taken." in said


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
    assert all(set(p) == {"id", "prediction", "reference", "complete"} for p in found)
    assert result["exact_match"] > 0.3  # guessing one of the eight words gives 0.125
    again = evaluate(run / "final", "text-to-text", toy["dev_pairs"], tmp_path / "scores")
    assert again["metrics"]["exact_match"] == result["exact_match"]


def test_several_seeds(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, shown = tmp_path / "run", list[str]()
    monkeypatch.setattr("firth.train.loop.StatusLine.show", lambda self, text: shown.append(text))
    result = finetune(recipe(checkpoint_of("bert"), toy, run, seeds=3, max_steps=12))
    scores = [seed_results(run, i)["scores"]["accuracy"] for i in range(3)]
    assert result["seeds"] == scores
    assert result["mean"] == pytest.approx(np.mean(scores))
    assert result["std"] == pytest.approx(np.std(scores, ddof=1))
    best = run / f"seed-{int(np.argmax(scores))}"
    for name in ("final/model.safetensors", "predictions.jsonl"):
        assert (run / name).read_bytes() == (best / name).read_bytes()
    logs = [(run / f"seed-{i}" / "log.jsonl").read_text() for i in range(3)]
    assert len(set(logs)) == 3, "seeds differ"
    lines = [line for line in shown if line.startswith("seed ")]
    assert len(lines) >= 3
    assert all(line.endswith(" left in all") for line in lines), lines


def test_resume_skips_finished_seeds_and_gives_equal_results(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "straight", seeds=2, max_steps=8, save_steps=3))
    module = sys.modules["firth.tasks.train_seed"]
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
    assert_same(resumed, straight)


def test_from_scratch_is_another_model(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    trained = first(recipe(checkpoint_of("bert"), toy, tmp_path))
    scratch = first(recipe(checkpoint_of("bert"), toy, tmp_path, from_scratch=True))
    assert scratch.config == trained.config
    base = load_model(checkpoint_of("bert"))
    assert torch.equal(trained.embed.tokens.weight, base.embed.tokens.weight)
    assert not torch.equal(scratch.embed.tokens.weight, base.embed.tokens.weight)
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
    """`transformers` 5 writes every T5 head as tied in config.json; the weights file decides."""
    tokenizer = load_tokenizer(checkpoint_of("t5"))
    model = make_model(t5_v1_1(1, 32, 2, 64, tokenizer.vocab.size))
    model.tokenizer = tokenizer
    model.save(tmp_path / "t5")
    file = tmp_path / "t5" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    pairs = {"train": str(toy["train_pairs"]), "task": "text-to-text"}
    found = first(recipe(tmp_path / "t5", toy, tmp_path / "run", **pairs))
    assert torch.equal(found.head.weight, model.head.weight)


@pytest.mark.parametrize("listed", [True, False], ids=["with the tokenizer's", "without it"])
def test_generated_answers_end_at_any_eos_id(
    listed: bool, checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path
) -> None:
    """The EOS token of the training answers counts, whether the checkpoint lists it or not."""
    base, end = tmp_path / "base", load_tokenizer(checkpoint_of("llama")).vocab.eos
    shutil.copytree(checkpoint_of("llama"), base)
    ends = [7, end, 9] if listed else [7, 9]
    facts = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps(facts | {"eos_token_id": ends}))
    pairs = {"train": str(toy["train_pairs"]), "dev": str(toy["dev_pairs"]), "task": "text-to-text"}
    run = tmp_path / "run"
    result = finetune(recipe(base, toy, run, **pairs, max_steps=60, learning_rate=1e-2, max_target_length=8))
    wanted = ends if listed else [*ends, end]
    assert load_model(run / "final").eos_token_ids == tuple(wanted)
    assert transformers.AutoModelForCausalLM.from_pretrained(run / "final").generation_config.eos_token_id == wanted
    assert result["exact_match"] > 0.3  # an answer without EOS never ends
    again = evaluate(run / "final", "text-to-text", toy["dev_pairs"], tmp_path / "scores")
    assert again["metrics"]["exact_match"] == result["exact_match"]


# --- few examples


def examples(labels: str) -> list[Example]:
    return [Example(i, (f"text {i}",), label) for i, label in enumerate(labels)]


def test_shots_are_balanced_over_labels() -> None:
    data = "a" * 50 + "b" * 10 + "c" * 2
    chosen = [data[i] for i in sample_stratified(data, 12, seed=0)]
    assert {label: chosen.count(label) for label in "abc"} == {"a": 5, "b": 5, "c": 2}


def test_shots_depend_on_the_seed_only() -> None:
    data = "ab" * 30
    assert sample_stratified(data, 6, 1) == sample_stratified(data, 6, 1)
    assert set(sample_stratified(data, 6, 1)) != set(sample_stratified(data, 6, 2))
    assert sorted(sample_stratified(data, 100, 1)) == list(range(60))
    assert len(set(sample_stratified(data, 40, 3))) == 40


def test_shots_of_many_targets_are_not_alphabetical() -> None:
    data = "abcdefghijklmnopqrstuvwxyz"
    drawn = [frozenset(sample_stratified(data, 5, seed)) for seed in range(5)]
    assert len(set(drawn)) == 5
    assert all(len(d) == 5 for d in drawn)


def test_shots_keep_the_share_of_unanswerable_questions() -> None:
    """All answers differ, while unanswerable questions share one target."""
    data = [Example(i, ("q", "c"), (AnswerSpan(f"a{i}", 0),) if i % 2 else ()) for i in range(400)]
    chosen = select_train_examples(data, FinetuneRecipe(task="span-qa", shots=100), 0)
    assert sum(not data[i].target for i in chosen) == 50


@pytest.mark.parametrize("task", ["tag", "choice", "regress", "text-to-text"])
def test_shots_without_classes_are_sampled_uniformly(task: str) -> None:
    """Half of the targets are equal, and so about half of the sample."""
    data = [Example(i, ("t",), ("O", i) if i % 2 else ("O",)) for i in range(1000)]
    chosen = select_train_examples(data, FinetuneRecipe(task=task, shots=100), 0)
    assert 35 < sum(data[i].target == ("O",) for i in chosen) < 65


def test_shots_limit_the_training_examples(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["firth.tasks.train_seed"]
    seen = []
    monkeypatch.setattr(module, "train_seed", lambda job, seed, *rest: seen.append((job, seed)))
    monkeypatch.setattr(sys.modules["firth.tasks.finetune"], "summarize_seeds", lambda *a: {})
    finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", shots=8, seeds=2))
    drawn = [job.train_indices[seed] for job, seed in seen]
    for (job, _), indices in zip(seen, drawn, strict=True):
        assert sorted(job.train_items[i].label for i in indices) == [0] * 4 + [1] * 4
    assert drawn[0] != drawn[1], "each seed draws its own"


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({}, (200, 200, 20)),  # three passes over 115 examples are 22 steps, and few
        ({"num_train_epochs": 1.0}, (8, 8, 0)),
        ({"num_train_epochs": 3.0}, (22, 22, 2)),  # what is said is done, also where it is the usual number
        ({"max_steps": 50, "early_stopping": 2}, (50, 5, 5)),
        ({"max_steps": 50, "eval_steps": 7, "early_stopping": 2}, (50, 7, 5)),
    ],
)
def test_default_steps(
    fields: dict[str, Any],
    steps: tuple[int, ...],
    checkpoint_of: Checkpoints,
    toy: Toy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = sys.modules["firth.tasks.train_seed"]
    monkeypatch.setattr(module, "train_seed", lambda *a: {})
    monkeypatch.setattr(sys.modules["firth.tasks.finetune"], "summarize_seeds", lambda *a: {})
    r = recipe(checkpoint_of("bert"), toy, tmp_path / "run", **{"max_steps": 0} | fields)
    finetune(r)
    stored = load_recipe(tmp_path / "run" / "recipe.yaml", FinetuneRecipe)
    assert (stored.max_steps, stored.eval_steps, stored.warmup_steps) == steps
    finetune(r, resume=True)  # the same command resumes


# --- what is said


def test_truncation_is_reported_once(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", max_seq_length=5, seeds=2, max_steps=1))
    total = len(toy["train"].read_text().splitlines()) + len(toy["dev"].read_text().splitlines())
    assert capsys.readouterr().err.count(f"{total} texts were longer than 5 tokens") == 1


def test_max_seq_length_above_the_models_positions_is_reported(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text('{"text": "%s", "label": "animal"}\n' % ("cat " * 50))
    finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", max_seq_length=128, dev=str(long), max_steps=1))
    assert "1 text was longer than 32 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "clasify"}, "Unknown task 'clasify'. Did you mean 'classify'"),
        ({"task": "text-to-text"}, "text-to-text needs a model that writes"),
        ({"seeds": 0}, "seeds is 0"),
        ({"shots": -1}, "shots is -1"),
        ({"max_target_length": 1}, "max_target_length is 1"),
        ({"checkpoint": "nowhere"}, "nowhere is not a checkpoint"),
        ({"encoding": "klingon"}, "klingon"),
    ],
)
def test_invalid_inputs_raise(
    fields: dict[str, Any], message: str, checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path
) -> None:
    pairs = (
        {"train": str(toy["train_pairs"]), "dev": str(toy["dev_pairs"])} if fields.get("task") == "text-to-text" else {}
    )
    with pytest.raises(UserError, match=message):
        finetune(replace(recipe(checkpoint_of("bert"), toy, tmp_path / "run", **pairs), **fields))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (
            "bert",
            {"task": "lm"},
            "lm needs a model that writes.* every task but lm, preference, extract and text-to-text",
        ),
        ("bert", {"task": "text-to-text"}, "text-to-text needs a model that writes"),
        ("bert", {"answer": "text"}, "An encoder generates no text"),
        ("t5", {"task": "tag", "answer": "text"}, "cannot be generated as text: take answer=head"),
        ("gpt2", {"crf": True}, "crf is for the task tag"),
        ("bert", {"lm_loss_weight": 0.5}, "lm_loss_weight=0.5 needs a decoder"),
        (
            "gpt2",
            {"lm_loss_weight": 0.5, "answer": "text", "max_target_length": 4},
            "lm_loss_weight=0.5 needs a decoder",
        ),
    ],
)
def test_unsupported_tasks_raise_before_the_examples_are_read(
    family: str, fields: dict[str, Any], message: str, checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        finetune(recipe(checkpoint_of(family), toy, tmp_path / "run", train="nowhere.jsonl", **fields))


@pytest.mark.parametrize("family", RATES)
@pytest.mark.parametrize("task", FINETUNE_TASKS)
def test_supported_tasks_read_the_examples(task: str, family: str, checkpoint_of: Checkpoints) -> None:
    if (family == "bert" and task in ("lm", "text-to-text", "extract")) or (task == "preference" and family != "gpt2"):
        return
    if task == "reward" and family == "t5":
        return
    check_task(FinetuneRecipe(checkpoint=str(checkpoint_of(family)), task=task, max_target_length=8, crf=task == "tag"))


def test_invalid_labels_raise(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text('{"text": "the cat", "label": "animal"}\n')
    with pytest.raises(UserError, match=r"one.jsonl: every example has the label 'animal'"):
        finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", train=str(one)))
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "the cat", "label": "animal"}\n{"text": "red", "label": "colour"}\n')
    with pytest.raises(UserError, match=r"other.jsonl, example 2: the label 'colour' does not occur in .*train.jsonl"):
        finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", dev=str(other)))
    assert not (tmp_path / "run").exists()


def test_evaluate_raises_without_a_scorable_task(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was not fine-tuned for the task classify: fine-tune it first"):
        evaluate(checkpoint_of("bert"), "classify", toy["dev"], tmp_path / "scores")
    with pytest.raises(UserError, match="Unknown task 'pear'"):
        evaluate(checkpoint_of("bert"), "pear", toy["dev"], tmp_path / "scores")
    assert not (tmp_path / "scores").exists()


# --- what learns, how fast, and for how long


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Callable[[FinetuneRecipe, int], dict[str, Any]]:
    """Run a recipe, stop it after some steps as kill -9 does, and resume it."""
    module = sys.modules["firth.tasks.train_seed"]
    real = module.fit

    def run(r: FinetuneRecipe, step: int) -> dict[str, Any]:
        def stops(run: Any, resume: bool = False) -> Any:
            run.hooks.append((step, lambda step, model: (_ for _ in ()).throw(Interrupted("stopped"))))
            return real(run, resume)

        monkeypatch.setattr(module, "fit", stops)
        with pytest.raises(Interrupted):
            finetune(r)
        monkeypatch.setattr(module, "fit", real)
        return finetune(r, resume=True)

    return run


WAYS: dict[str, dict[str, Any]] = {
    "layer_decay": {"layer_decay": 0.5, "lr_scheduler_type": "slanted-triangle"},
    "freeze": {"freeze": "embeddings"},
    "unfreeze": {"unfreeze_every": 3},
    "lora": {"lora_rank": 2, "lora_dropout": 0.1},
    "lora, all": {"lora_rank": 2, "lora_targets": "all", "unfreeze_every": 4, "layer_decay": 0.9},
    "balanced": {"class_weights": "balanced"},
    "balanced, bf16 weights": {"class_weights": "balanced", "engine": EngineConfig(weights="bf16")},
    "best": {"eval_steps": 2, "learning_rate": 0.03},
    "best of lora": {"eval_steps": 2, "learning_rate": 0.1, "lora_rank": 2},
}


@pytest.fixture(scope="module")
def without_options(checkpoint_of: Checkpoints, toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights after 11 steps with no training option."""
    return weights(finetune(recipe(checkpoint_of("bert"), toy, tmp_path_factory.mktemp("plain") / "run", max_steps=11)))


@pytest.mark.parametrize("way", WAYS)
def test_every_training_option_resumes_exactly(
    way: str, stopping: Any, checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, without_options: bytes
) -> None:
    fields = {"max_steps": 11, "save_steps": 4} | WAYS[way]
    straight = finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "straight", **fields))
    resumed = stopping(recipe(checkpoint_of("bert"), toy, tmp_path / "stopped", **fields), 7)
    assert_same(resumed, straight)
    assert without_options != weights(straight), "the way makes a difference"


def weights(result: dict[str, Any]) -> bytes:
    return (Path(result["output_dir"]) / "final" / "model.safetensors").read_bytes()


def test_a_frozen_backbone_is_unchanged(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    base = load_model(checkpoint_of("bert"))
    for way, moves in (({"freeze": "backbone"}, ()), ({"freeze": "embeddings"}, ("stack.",))):
        folder = tmp_path / str(way["freeze"])
        finetune(recipe(checkpoint_of("bert"), toy, folder, max_steps=3, **way))
        found = load_model(folder / "final").state_dict()
        for name, value in base.state_dict().items():
            if not name.startswith("head."):
                assert torch.equal(found[name], value) != name.startswith(moves or "-"), name


def test_lora_is_saved_merged_and_as_adapter(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    """peft loads the adapter onto the base checkpoint."""
    peft = pytest.importorskip("peft")
    run = tmp_path / "run"
    fields: dict[str, Any] = dict(lora_rank=4, max_steps=200, learning_rate=1e-2, lora_targets="all", save_steps=199)
    result = finetune(recipe(checkpoint_of("bert"), toy, run, **fields))
    assert result["accuracy"] > 0.9
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(run / "final").eval()
    facts = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert (facts["r"], facts["base_model_name_or_path"]) == (4, str(checkpoint_of("bert")))
    base = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint_of("bert"), num_labels=2)
    adapted = peft.PeftModel.from_pretrained(base, run / "adapter").eval()
    ids = torch.arange(5, 25).reshape(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(load_model(run / "final")(ids).logits, merged(ids).logits, rtol=0, atol=1e-5)
    kept = load_model(run / "seed-0" / "checkpoint-199")  # before the last step, whose rate is next to nothing
    with torch.no_grad():
        torch.testing.assert_close(kept(ids).logits, merged(ids).logits, rtol=0, atol=1e-2)
    assert not (run / "seed-0" / "checkpoint-200").exists()


def test_an_adapter_includes_new_token_embeddings(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    run = tmp_path / "run"
    finetune(recipe(checkpoint_of("gpt2"), toy, run, lora_rank=2, max_steps=5, learning_rate=1e-2))
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(run / "final").eval()
    base = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint_of("gpt2"), num_labels=2)
    size = merged.config.vocab_size
    assert size == base.config.vocab_size + 2
    assert f"resize_token_embeddings({size})" in capsys.readouterr().err
    base.resize_token_embeddings(size)
    adapted = peft.PeftModel.from_pretrained(base, run / "adapter").eval()
    ids = torch.tensor([[5, 6, 7, size - 2, 8, size - 1]])
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=0, atol=1e-5)


def test_an_adapter_includes_rows_of_an_untied_head(
    checkpoint_of: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Llama's LM head is a matrix of its own, which has grown too."""
    peft = pytest.importorskip("peft")
    run, file = tmp_path / "run", tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"prompt": "the cat", "response": "the dog"}) + "\n")
    talk = dict(train=file, dev=file, pairs=file)
    finetune(recipe(checkpoint_of("llama"), talk, run, task="lm", lora_rank=2, max_steps=5, learning_rate=1e-2))
    merged = transformers.AutoModelForCausalLM.from_pretrained(run / "final").eval()
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint_of("llama"))
    size = merged.config.vocab_size
    assert size > base.config.vocab_size
    assert f"resize_token_embeddings({size})" in capsys.readouterr().err
    base.resize_token_embeddings(size)
    adapted = peft.PeftModel.from_pretrained(base, run / "adapter").eval()
    ids = torch.tensor([[5, 6, 7, size - 2, 8, size - 1]])
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_lora_learns_the_rows_of_new_tokens_alone_and_resumes_exactly(
    family: str, checkpoint_of: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The roles of a chat template, of a family with an output projection of its own, and of one where it is tied."""
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"prompt": "the cat", "response": "the dog"}) + "\n")
    talk = dict(train=file, dev=file, pairs=file)
    fields: dict[str, Any] = dict(task="lm", lora_rank=2, max_steps=4, save_steps=2, learning_rate=1e-2)
    plans = [recipe(checkpoint_of(family), talk, tmp_path / name, **fields) for name in ("run", "stopped")]
    finetune(plans[0])
    with monkeypatch.context() as patch:
        stop_in_seed(patch, "seed-0", 3)
        with pytest.raises(KeyboardInterrupt):
            finetune(plans[1])
    finetune(plans[1], resume=True)
    found, again = (load_model(tmp_path / name / "final").embed.tokens.weight for name in ("run", "stopped"))
    assert torch.equal(found, again)
    base = load_model(checkpoint_of(family))
    size = base.config.vocab_size
    initial = grow_vocabulary(base, len(found)).embed.tokens.weight
    assert len(found) == size + 3
    assert torch.equal(found[:size], initial[:size])
    used = [
        load_tokenizer(tmp_path / "run" / "final").backend.token_to_id(f"<|{role}|>") for role in ("user", "assistant")
    ]
    assert ((found[used] - initial[used]).abs().mean(1) > 1e-3).all()


def test_load_best_and_early_stopping(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopping: Any
) -> None:
    """Given scores 0.5, 0.9, 0.9, 0.7 ...: the first of the best counts, and two worse ones end the run."""
    made_up = {2: 0.5, 4: 0.9, 6: 0.9, 8: 0.7, 10: 1.0}
    loop = sys.modules["firth.train.loop"]
    real = loop.update_best
    seen: dict[str, list[torch.Tensor]] = {}

    def compare(run: Any, state: Any, scores: Any, model: Model) -> None:
        seen.setdefault(str(run.folder), []).append(model.head.out.weight.detach().clone())
        real(run, state, {"accuracy": made_up[state.step]}, model)

    monkeypatch.setattr(loop, "update_best", compare)
    fields = dict(max_steps=10, eval_steps=2, early_stopping=2)
    straight = finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "straight", **fields))
    assert (straight["steps"], straight["best_steps"]) == ([8], [4])
    found = load_model(tmp_path / "straight" / "final").head.out.weight
    assert torch.equal(found, seen[str(tmp_path / "straight" / "seed-0")][1])
    assert not list((tmp_path / "straight" / "seed-0").glob("best-*"))
    # stopped between the best and the end, with and without a checkpoint that knows the best
    for save_steps in (5, 100):
        r = recipe(checkpoint_of("bert"), toy, tmp_path / f"stopped-{save_steps}", save_steps=save_steps, **fields)
        assert_same(stopping(r, 7), straight)
    last = finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "last", max_steps=10, eval_steps=2, load_best=False))
    assert (last["steps"], last["best_steps"]) == ([10], [10])
    assert weights(last) != weights(straight)


def test_metric_selects_the_best_step(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given scores: accuracy is best at step 2, mcc at step 4."""
    made_up = {2: (0.9, 0.1), 4: (0.8, 0.3), 6: (0.7, 0.2)}
    loop = sys.modules["firth.train.loop"]
    real = loop.update_best

    def compare(run: Any, state: Any, scores: Any, model: Model) -> None:
        real(run, state, dict(zip(("accuracy", "mcc"), made_up[state.step], strict=True)), model)

    monkeypatch.setattr(loop, "update_best", compare)
    for metric, step in {"": 2, "mcc": 4}.items():
        fields = dict(max_steps=6, eval_steps=2, seeds=2, metric=metric)
        found = finetune(recipe(checkpoint_of("bert"), toy, tmp_path / f"by-{metric}", **fields))
        assert (found["metric"], found["best_steps"]) == (metric or "accuracy", [step, step])
        assert found["seeds"] == [scores[metric or "accuracy"] for scores in found["scores"]]
        assert found["best_seed"] == index_of_best(found["seeds"])
        assert (found["chance"] == 0) == bool(metric)


@pytest.mark.parametrize("metric", ["f2", "entity_f1"])
def test_an_unknown_metric_raises(metric: str, checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=rf"has no score '{metric}' here. metric is one of accuracy, macro_f1, mcc, f1\."
    ):
        finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", metric=metric))
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_keeps_its_metric(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", max_steps=1))
    changed = recipe(checkpoint_of("bert"), toy, tmp_path / "run", max_steps=1, metric="mcc")
    with pytest.raises(UserError, match="metric:  -> mcc"):
        finetune(changed, resume=True, allow_change=True)


def test_a_run_killed_after_early_stopping_resumes(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the last checkpoint, before its results were written."""
    module = sys.modules["firth.tasks.train_seed"]
    fields = dict(max_steps=40, eval_steps=2, early_stopping=1, learning_rate=1e-6)  # it learns nothing: stops at once
    straight = finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "straight", **fields))
    assert straight["steps"][0] < 40
    r = recipe(checkpoint_of("bert"), toy, tmp_path / "stopped", **fields)
    with monkeypatch.context() as m:
        m.setattr(module, "save_seed_model", lambda *a: (_ for _ in ()).throw(Interrupted("stopped")))
        with pytest.raises(Interrupted):
            finetune(r)
    assert_same(finetune(r, resume=True), straight)


def test_ctrl_c_in_the_last_step_starts_no_further_seed(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    module = sys.modules["firth.tasks.train_seed"]
    real = module.fit

    def press(run: Any, resume: bool = False) -> Any:
        run.hooks.append((3, lambda step, model: os.kill(os.getpid(), signal.SIGINT)))
        return real(run, resume)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(module, "fit", press)
        with pytest.raises(Interrupted, match="step 3 of 3"):
            finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", max_steps=3, seeds=2))
    assert not (tmp_path / "run" / "seed-1").exists()


def test_balanced_class_weights(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    uneven = tmp_path / "uneven.jsonl"
    rows = [json.loads(line) for line in toy["train"].read_text().splitlines()]
    kept = [r for r in rows if r["label"] == "animal"][:6] + [r for r in rows if r["label"] == "place"][:2]
    uneven.write_text("".join(json.dumps(r) + "\n" for r in kept))
    r = recipe(checkpoint_of("bert"), toy, tmp_path / "run", train=str(uneven), class_weights="balanced")
    head = first(r).config.head
    assert isinstance(head, ClassificationHead)
    assert head.class_weights == (8 / (2 * 6), 8 / (2 * 2))
    with pytest.raises(UserError, match="needs a classification head"):
        first(replace(r, checkpoint=str(checkpoint_of("t5"))))


def test_a_head_of_another_task_is_reinitialized(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "first", max_steps=2))
    assert "a new head for classify, over 2 classes" in capsys.readouterr().err
    kept = load_model(tmp_path / "first" / "final").head.out.weight
    again = recipe(tmp_path / "first" / "final", toy, tmp_path / "again", max_steps=2)
    assert torch.equal(first(again).head.out.weight, kept)
    finetune(again)
    assert "training continues with the checkpoint's head for classify" in capsys.readouterr().err
    finetune(replace(again, from_scratch=True, output_dir=str(tmp_path / "scratch")))
    said = capsys.readouterr().err
    assert "a new head for classify, over 2 classes" in said
    assert "training continues with the checkpoint's head" not in said
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "the cat", "label": "x"}\n{"text": "the dog", "label": "y"}\n')
    assert not torch.equal(first(replace(again, train=str(other))).head.out.weight, kept)


@pytest.mark.parametrize(("lost", "times"), [(True, 1), (False, 0)])
def test_a_missing_lm_head_is_reported_once(
    lost: bool, times: int, checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A LlamaModel has no lm_head, and its head is not tied."""
    folder = shutil.copytree(checkpoint_of("llama"), tmp_path / "body")
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "lm_head.weight" or not lost}, folder / "model.safetensors")
    fields = dict(task="text-to-text", train=str(toy["train_pairs"]), dev=str(toy["dev_pairs"]), seeds=2, max_steps=1)
    finetune(recipe(folder, toy, tmp_path / "run", max_target_length=8, **fields))
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("body has no weights of its head (head.") == times
    if lost:  # random weights would answer
        for ask in (lambda: firth.generate(folder, "the cat"), lambda: make_scorer(folder)):
            with pytest.raises(UserError, match=r"saved without its LM head.*firth pretrain"):
                ask()


# --- what several seeds come to


class Scored:
    """A task that only scores."""

    def __init__(self, name: str, metric: str) -> None:
        self.name, self.metric = name, metric

    def score(self, examples: Any, found: Any) -> dict[str, float]:
        return compute_metrics(self.name, [p.prediction for p in found], [e.target for e in examples])


@pytest.mark.parametrize(
    ("task", "target"),
    [
        ("regress", 1.0),
        ("choice", 1),
        ("span-qa", ["the mill"]),
        ("text-to-text", "the mill"),
        ("tag", ("O", "B-PER")),
        ("tag", ("NOUN", "VERB")),
        ("relation", "born_in"),
        ("classify", "a"),
        ("embed", 0.5),
    ],
)
def test_metric_names_of_each_task(task: str, target: Any) -> None:
    answer = target[0] if task == "span-qa" else target
    assert metric_names(task, [Example(0, ("t",), target)]) == tuple(compute_metrics(task, [answer], [target]))


def test_metric_names_depend_on_the_examples() -> None:
    assert "f1" in metric_names("pair", examples("ab"))
    assert "f1" not in metric_names("pair", examples("abc"))
    assert metric_names("embed", [Example(0, ("a", "b"), None)])[0] == "precision_at_1"
    assert metric_names("lm", []) == ("perplexity", "bits_per_byte", "token_accuracy")


def test_chance_scores() -> None:
    dev = examples("aabb" + "b" * 6)
    assert chance_score(Scored("classify", "accuracy"), "accuracy", examples("aaab"), dev) == 0.8  # type: ignore[arg-type]
    assert chance_score(Scored("classify", "mcc"), "mcc", examples("aaab"), dev) == 0.0  # type: ignore[arg-type]
    numbers = [Example(i, ("t",), float(i)) for i in range(4)]
    assert chance_score(Scored("regress", "pearson"), "pearson", numbers, numbers) == 0.0  # type: ignore[arg-type]
    assert chance_score(Scored("regress", "pearson"), "mean_absolute_error", numbers, numbers) is None  # type: ignore[arg-type]
    tags = [Example(0, ("a", "b", "c"), ("O", "O", "B-X"))]
    assert chance_score(Scored("tag", "entity_f1"), "entity_f1", tags, tags) == 0.0  # type: ignore[arg-type]
    assert chance_score(Scored("embed", "spearman"), "spearman", numbers, numbers) == 0.0  # type: ignore[arg-type]
    pairs = [Example(i, (f"a{i}", f"b{i}")) for i in range(4)]
    assert chance_score(Scored("embed", "mrr"), "precision_at_1", pairs, pairs) == 1 / 4  # type: ignore[arg-type]
    expected = (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4
    assert chance_score(Scored("embed", "mrr"), "mrr", pairs, pairs) == pytest.approx(expected)  # type: ignore[arg-type]
    for metric in ("perplexity", "token_accuracy"):
        assert chance_score(Scored("lm", "perplexity"), metric, [], []) is None  # type: ignore[arg-type]


def test_failed_seeds_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    found = exclude_failed_seeds([0.8, 0.5, 0.9, float("nan")], 0.5)
    assert found["failed"] == [1, 3]
    assert found["mean_without_failed"] == pytest.approx(0.85)
    words = "2 of 4 seeds did not beat chance (accuracy 50.0%); the mean of the others is 85.0%."
    for causes, named in (
        ({1: "few steps", 3: "few steps"}, " Likely cause: few steps."),
        ({1: "few steps", 3: "one label"}, " Likely causes: seed-1: few steps. seed-3: one label."),
        ({}, ""),
    ):
        warn_about_failed_seeds(found, causes, "accuracy", 4)
        assert capsys.readouterr().err == f"note: {words}{named}\n"
    assert exclude_failed_seeds([0.5], 0.5)["mean_without_failed"] is None
    assert exclude_failed_seeds([0.6], 0.5)["failed"] == []


def test_lower_perplexity_is_better_and_ties_take_the_first() -> None:
    assert orient_score("perplexity", {"perplexity": 3.0}) > orient_score("perplexity", {"perplexity": 4.0})
    assert orient_score("a.mean_absolute_error", {"a.mean_absolute_error": 3.0}) == -3.0
    assert orient_score("accuracy", {"accuracy": 0.4}) > orient_score("accuracy", {"accuracy": 0.3})
    assert index_of_best([0.1, 0.3, 0.3]) == 1
    assert index_of_best([float("nan"), 0.1]) == 1


def test_predictions_round_trip(tmp_path: Path) -> None:
    odd = "one\u2028two\u0085three\rfour\nfive\x0csix"
    written = [Example("a\u2029b", ("t",), odd), Example(2, ("t",), odd)]
    write_predictions(tmp_path / "predictions.jsonl", written, [Prediction(odd), Prediction("", {odd: 0.5})])
    read = read_predictions(tmp_path / "predictions.jsonl")
    assert [line["prediction"] for line in read] == [odd, ""]
    assert read[1] == {"id": 2, "prediction": "", "reference": odd, "scores": {odd: 0.5}}
    assert list(load_seed_predictions(tmp_path)[0].values()) == [odd, ""]


@pytest.mark.parametrize(
    "line",
    [
        "3",
        '{"id": 1}',
        '{"id": 1, "prediction": 1, "reference": 1, "scores": 5}',
        '{"id": 1, "prediction": {}, "reference": "a"}',
    ],
)
def test_damaged_predictions_are_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "predictions.jsonl"
    file.write_text(line)
    with pytest.raises(UserError, match=r"predictions.jsonl:1: not a prediction .* Remove"):
        read_predictions(file)


def test_all_references_are_written(tmp_path: Path) -> None:
    dev = [Example(1, ("q",), "a", references=("a", "b")), Example(2, ("q",), "c", references=("c",))]
    write_predictions(tmp_path / "predictions.jsonl", dev, [Prediction("b"), Prediction("c")])
    lines = read_predictions(tmp_path / "predictions.jsonl")
    assert lines[0] == {"id": 1, "prediction": "b", "reference": "a", "references": ["a", "b"]}
    assert "references" not in lines[1]
    right = [line.get("references", line["reference"]) for line in lines]
    assert compute_metrics("text-to-text", [line["prediction"] for line in lines], right)["exact_match"] == 1.0


def test_comparison_with_a_baseline(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "bad", max_steps=1, seeds=2))
    fields = dict(max_steps=80, seeds=2, baseline=str(tmp_path / "bad"))
    good = finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "good", **fields))
    found = good["comparison"]
    assert found["difference"] == pytest.approx(good["mean"] - bad["mean"])
    assert found["low"] < found["difference"] < found["high"]
    assert found["low"] > 0
    assert found["p_value"] < 0.01
    said = " ".join(capsys.readouterr().err.split())
    assert "2 and 2 seeds are too few to judge whether other seeds agree" in said
    assert "more than chance" not in said
    same = finetune(
        recipe(checkpoint_of("bert"), toy, tmp_path / "same", **fields | {"baseline": str(tmp_path / "good")})
    )
    assert (same["comparison"]["difference"], same["comparison"]["p_value"]) == (0.0, 1.0)


def compared(folder: Path, task: Any, dev: list[Example], ours: list[Any], theirs: list[Any]) -> Any:
    """The bootstrap of given answers of one seed each, whose runs are in `folder`."""
    for name, answers in {"ours/seed-0": ours, "theirs/seed-0": theirs}.items():
        (folder / name).mkdir(parents=True)
        write_predictions(folder / name / "predictions.jsonl", dev, [Prediction(answer) for answer in answers])
    r = FinetuneRecipe(task=task.name, dev="dev.jsonl", baseline=str(folder / "theirs"), seeds=1)
    check_baseline(r, dev)
    return compare_with_baseline(r, task, dev, folder / "ours")


def test_a_baseline_on_other_examples_raises(tmp_path: Path) -> None:
    """Ids are often line numbers, which are equal in any file."""
    ours = [Example(i, ("t",), "ab"[i % 2]) for i in range(4)]
    theirs = [Example(i, ("t",), "aabb"[i]) for i in range(4)]
    (tmp_path / "seed-0").mkdir()
    write_predictions(tmp_path / "seed-0" / "predictions.jsonl", theirs, [Prediction("a")] * 4)
    r = FinetuneRecipe(task="classify", dev="dev.jsonl", baseline=str(tmp_path), seeds=1)
    check_baseline(r, theirs)
    with pytest.raises(
        UserError, match=r'on another dev file: the answer to example [12] was "[ab]" there, and is "[ab]"'
    ):
        check_baseline(r, ours)


def test_a_baseline_with_other_references_raises(tmp_path: Path) -> None:
    def right(*texts: str) -> list[Example]:
        return [Example(1, ("t",), "a", references=texts)]

    r = FinetuneRecipe(task="text-to-text", dev="dev.jsonl", baseline=str(tmp_path), seeds=1)
    write_predictions(tmp_path / "predictions.jsonl", right("a", "b"), [Prediction("a")])
    check_baseline(r, right("a", "b"))
    with pytest.raises(UserError, match=r'on another dev file: .* was \["a", "b"\] there, and is \["a", "c"\]'):
        check_baseline(r, right("a", "c"))


def test_a_baseline_on_other_texts_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = ([Example(1, ("Ann met Bo",), "a", ((0, 3), span))] for span in ((8, 10), (4, 7)))
    r = FinetuneRecipe(task="relation", dev="dev.jsonl", baseline=str(tmp_path), seeds=1)
    write_predictions(tmp_path / "predictions.jsonl", theirs, [Prediction("a")])
    (tmp_path / "recipe.yaml").write_text(f"dev_checksum: '{checksum_examples(theirs)}'\n")
    check_baseline(r, theirs)
    assert capsys.readouterr().err == ""
    check_baseline(r, ours)
    assert "has the same ids and answers as dev.jsonl, but other texts" in " ".join(capsys.readouterr().err.split())


def test_a_difference_within_seed_noise_is_not_significant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dev = [Example(i, ("t",), "ab"[i % 2]) for i in range(200)]
    right, half = [e.target for e in dev], ["a"] * 200
    for i, (ours, theirs) in enumerate([(right, half), (half, half), (half, half)]):
        for name, answers in {"ours": ours, "theirs": theirs}.items():
            (tmp_path / name / f"seed-{i}").mkdir(parents=True)
            file = tmp_path / name / f"seed-{i}" / "predictions.jsonl"
            write_predictions(file, dev, [Prediction(answer) for answer in answers])
    r = FinetuneRecipe(task="classify", dev="dev.jsonl", baseline=str(tmp_path / "theirs"), seeds=3)
    found = compare_with_baseline(r, Scored("classify", "accuracy"), dev, tmp_path / "ours")  # type: ignore[arg-type]
    assert found["difference"] == pytest.approx(0.5 / 3)
    assert found["seed_error"] == pytest.approx(0.5 / 3)  # a deviation of 0.5 / sqrt(3), over sqrt(3) again
    assert found["p_value"] > 0.3  # over the examples alone: 0.001
    said = " ".join(capsys.readouterr().err.split())
    assert "over 3 and 3 seeds and 200 dev examples" in said
    assert "that may be chance" in said


def test_dev_equal_to_train_is_reported(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", max_steps=1, dev=str(toy["train"]), num_beams=2))
    said = " ".join(capsys.readouterr().err.split())
    count = len(toy["train"].read_text().splitlines())
    assert f"{count} of {count} examples (100.0%) also occur in {toy['train']}, the first as example 1." in said
    assert "says nothing about unseen ones. Take other examples." in said
    assert "num_beams: unused, since a task head predicts here and generates no text" in said


def test_the_share_of_dev_examples_in_train_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    train = [Example(i, (text,), "x") for i, text in enumerate("abcd")]
    fields = FinetuneRecipe(train="train.csv", dev="dev.csv")
    warn_about_overlap(train, [Example(7, ("b",), "y"), *(Example(i, ("z",), "x") for i in range(3))], fields)
    said = " ".join(capsys.readouterr().err.split())
    assert "dev.csv: 1 of 4 examples (25.0%) also occur in train.csv, the first as example 7." in said
    assert said.endswith("Remove them from train.csv.")
    warn_about_overlap(train, [Example(0, ("a",), "x", spans=((0, 1),))], fields)
    assert not capsys.readouterr().err, "another span of the same text is another example"


def test_a_single_tag_raises(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    file = tmp_path / "one.conll"
    file.write_text("the O\ncat O\n\nruns O\n")
    fields = {"task": "tag", "train": str(file), "dev": str(file)}
    with pytest.raises(UserError, match=r"one.conll: every word has the tag 'O'; tagging needs two or more"):
        finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", **fields))
    assert not (tmp_path / "run").exists()


def test_examples_with_equal_ids_are_paired_in_order(tmp_path: Path) -> None:
    dev = [Example("same", ("t",), label) for label in "abab"]
    found = compared(tmp_path, Scored("classify", "accuracy"), dev, list("abab"), list("aaaa"))
    assert (found["difference"], found["examples"]) == (0.5, 4)


@pytest.mark.parametrize("spans", [(), ((0, 1),)])
def test_entities_are_bootstrapped_like_the_metric(spans: Any, tmp_path: Path) -> None:
    """Given predicates (V) are excluded; the bootstrap takes under a second."""
    dev = [Example(i, ("a", "b"), ("B-V", "B-PER"), spans) for i in range(300)]
    wrong = [("B-V", "B-PER") if i % 2 else ("B-V", "B-LOC") for i in range(300)]
    found = compared(tmp_path, Scored("tag", "entity_f1"), dev, [e.target for e in dev], wrong)
    assert found["difference"] == pytest.approx(0.5 if spans else 0.25)
    assert found["samples"] == 1000


@pytest.mark.parametrize("num_classes", [3, 20])
def test_bootstrap_with_few_and_many_classes(num_classes: int, tmp_path: Path) -> None:
    names = [str(i) for i in range(num_classes)]
    dev, ours = [Example(i, ("t",), name) for i, name in enumerate(names)], [*names[1:], "other"]
    found = compared(tmp_path, Scored("classify", "macro_f1"), dev, names, ours)
    assert found["difference"] == 1.0
    assert found["samples"] == 1000


def test_results_are_written_before_the_comparison(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "one", max_steps=1))
    seen = []

    def compare(*_: Any, **__: Any) -> Any:
        seen.append(json.loads((tmp_path / "two" / "results.json").read_text()))
        return real(*_, **__)

    module = sys.modules["firth.tasks.results"]
    real = module.bootstrap_scores
    monkeypatch.setattr(module, "bootstrap_scores", compare)
    found = finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "two", max_steps=1, baseline=str(tmp_path / "one")))
    assert seen[0]["comparison"] is None
    assert seen[0]["mean"] == found["mean"]
    assert json.loads((tmp_path / "two" / "results.json").read_text()) == replace_nonfinite(found)
    assert found["comparison"]["samples"] == 1000


def test_a_nan_score_is_not_significant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dev = [Example(i, ("t",), float(i)) for i in range(8)]
    found = compared(tmp_path, Scored("regress", "pearson"), dev, [float(i) for i in range(8)], [1.0] * 8)
    assert np.isnan([found[name] for name in ("difference", "low", "high", "p_value")]).all()
    said = capsys.readouterr().err
    assert "pearson cannot be compared with" in said
    assert "it is not a number in one of both runs" in said
    assert "chance" not in said


def test_f1_of_one_class_is_nan(tmp_path: Path) -> None:
    dev = examples("aaab")
    found = compared(tmp_path, Scored("classify", "f1"), dev, list("aaab"), list("bbbb"))
    assert 500 < found["samples"] < 800  # of 1,000; (3/4) ** 4 have no b
    assert found["difference"] == pytest.approx(1 - 2 / 5)


def test_invalid_baselines_raise(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    r = recipe(checkpoint_of("bert"), toy, tmp_path / "run", baseline=str(tmp_path))
    with pytest.raises(UserError, match=r"has no predictions.jsonl"):
        finetune(r)
    dev = examples("ab")
    line = '{"id": %d, "prediction": "a", "reference": "%s"}\n'
    (tmp_path / "predictions.jsonl").write_text(line % (7, "a"))
    with pytest.raises(UserError, match="no example in common"):
        check_baseline(r, dev)
    (tmp_path / "predictions.jsonl").write_text(line % (7, "a") + line % (1, dev[1].target))
    check_baseline(r, dev)
    assert "1 id is in dev alone, 1 in the baseline alone. The 1 in both" in capsys.readouterr().err.replace("\n", " ")
    (tmp_path / "results.json").write_text('{"task": "pair"}')
    with pytest.raises(UserError, match="a run of the task pair"):
        check_baseline(r, dev)
    (tmp_path / "predictions.jsonl").write_text("nonsense\n")
    with pytest.raises(UserError, match=r"predictions\.jsonl:1: not JSON"):
        check_baseline(r, dev)


def test_predictions_of_many_seeds_are_in_the_order_of_the_seeds(tmp_path: Path) -> None:
    """With `shots` a paired test compares seed i with seed i: seed-10 is not the second one."""
    for seed in range(12):
        (tmp_path / f"seed-{seed}").mkdir()
        file = tmp_path / f"seed-{seed}" / "predictions.jsonl"
        write_predictions(file, [Example(0, ("a",), "x")], [Prediction(str(seed))])
    assert [seed[0, 0] for seed in load_seed_predictions(tmp_path)] == [str(seed) for seed in range(12)]


def test_labels_missing_from_dev_are_reported(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few_of = tmp_path / "dev.jsonl"
    few_of.write_text('{"text": "the cat", "label": "animal"}\n')
    finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", dev=str(few_of), max_steps=1))
    assert "has no example of place" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_decay": 0.0}, "layer_decay is 0.0"),
        ({"layer_decay": 1.5}, "layer_decay is 1.5"),
        ({"lm_loss_weight": -1.0}, "lm_loss_weight is -1.0"),
        ({"lora_rank": -1}, "lora_rank is -1"),
        ({"lora_dropout": 1.0}, "lora_dropout is 1.0"),
        ({"lora_alpha": 0.0}, "lora_alpha is 0.0"),
        ({"early_stopping": -1}, "early_stopping is -1"),
        ({"early_stopping": 1, "load_best": False}, "needs load_best"),
        ({"lora_rank": 2, "freeze": "backbone"}, "LoRA freezes all weights itself"),
        ({"unfreeze_every": 5, "freeze": "backbone"}, "choose one"),
        ({"num_train_epochs": -1.0, "max_steps": 0}, "num_train_epochs must be more than 0"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0"),
        ({"num_train_epochs": 1e308}, r"num_train_epochs is 1e\+308; the limit is 1,000,000"),
        ({"lora_alpha": 32.0}, "lora_alpha changes nothing here: add --lora-rank 8"),
        ({"lora_targets": "all"}, "lora_targets changes nothing here: add --lora-rank 8"),
        ({"teacher": "t", "augment_rate": 0.2}, "augment_rate changes nothing here: add --augment 20"),
        ({"mix_temperature": 0.5}, "mix_temperature changes nothing here: add several tasks"),
        ({"json_schema": "s.json"}, "json_schema is for the task extract, not for classify"),
        ({"task": "preference", "simpo_gamma": 0.5}, "add --preference-loss simpo"),
    ],
)
def test_contradicting_options_raise(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FinetuneRecipe(**fields).check()


@pytest.mark.parametrize("change", [{"head": LMHead()}, {"head": ClassificationHead(("x",))}])
def test_a_checkpoint_with_the_head_of_another_task_is_refused(change: dict[str, Any]) -> None:
    config, tokenizer = small_parts("bert")
    task = make_task("classify", {"labels": ["x", "y"], "max_seq_length": 32, "answer": "head"}, tokenizer, config)
    assert isinstance(task, HeadTask)
    task.check_head(task.configure_model(config), "c")
    with pytest.raises(UserError, match=r"c: task.json and config.json do not belong together, .* with 2 labels"):
        task.check_head(replace(config, **change), "c")


@pytest.mark.parametrize("lost", ["", "scores", "steps", "seconds", "examples_per_second"])
def test_results_of_a_seed_without_one_of_their_keys_are_computed_again(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(is_seed_finished.__globals__, "find_corruption", lambda folder: None)
    results = {"scores": {"accuracy": 1.0}, "steps": 2, "seconds": 0.5, "examples_per_second": None}
    results.pop(lost, None)
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert is_seed_finished(tmp_path) == (not lost)
    (tmp_path / "results.json").write_text(json.dumps({**results, "scores": {"accuracy": "1.0"}}))
    assert not is_seed_finished(tmp_path)


def test_a_head_dropout_of_0_is_an_option() -> None:
    recipe, config = FinetuneRecipe(head_dropout=0.0), replace(get_preset("bert-tiny"), dropout=0.1)
    head = recipe.apply_head_options(with_classification_head(config, ("a", "b"))).head
    assert isinstance(head, ClassificationHead)
    assert head.dropout == 0.0
    with pytest.raises(UserError, match=r"head_dropout=0\.0 needs a head"):
        recipe.apply_head_options(config)


def test_only_gpt_models_language_beside_its_task_unless_asked() -> None:
    """Radford et al. 2018, section 4.1: lambda is 0.5. Later decoders were published without the auxiliary loss."""
    config, tokenizer = small_parts("gpt2")
    examples = [Example(0, ("a",), "x"), Example(1, ("b",), "y")]

    def weights_of(family: str, **fields: Any) -> list[float]:
        r = FinetuneRecipe(**fields)
        task = make_task("classify", examples, tokenizer, config, r)
        wanted = r.apply_head_options(task.configure_model(replace(config, family=family)))
        return [extra.weight for extra in wanted.extras if isinstance(extra, AuxiliaryLM)]

    assert weights_of("gpt") == [0.5]
    assert weights_of("gpt2") == weights_of("llama") == weights_of("gpt", lm_loss_weight=0.0) == []
    assert weights_of("gpt2", lm_loss_weight=0.3) == [0.3]


def test_unfreezing_by_epochs() -> None:
    r = FinetuneRecipe(unfreeze_every=-2, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert r.freeze_schedule(20).unfreeze_every == 5  # two passes over 20 examples, 8 at a time
    assert replace(r, unfreeze_every=7).freeze_schedule(20).unfreeze_every == 7


def test_a_file_of_another_task_is_recognised(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    for task in ("pair", "span-qa", "tag", "choice"):
        with pytest.raises(UserError, match=r"train.jsonl:1: no column .* Or is it a file for --task classify\?"):
            finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", task=task))
    with pytest.raises(UserError, match=r"is a folder\. Name one file"):
        finetune(recipe(checkpoint_of("bert"), toy, tmp_path / "run", train=str(tmp_path)))
    assert not (tmp_path / "run").exists()


def test_pooling_by_first_state_or_mean(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    """The mean is over one text of a packed row; the checkpoint records the pooling."""
    for pool, kept in (("auto", "first"), ("cls", "first"), ("mean", "mean")):
        found = finetune(recipe(checkpoint_of("bert"), toy, tmp_path / pool, pool=pool))
        model = load_model(tmp_path / pool / "final")
        assert isinstance(model.config.head, ClassificationHead)
        assert model.config.head.pool == kept
        assert found["mean"] > 0.9
        again = evaluate(tmp_path / pool / "final", "classify", toy["dev"], tmp_path / f"{pool}-again")
        assert again["metrics"]["accuracy"] == pytest.approx(found["mean"])
    for family in ("gpt2", "bart"):
        with pytest.raises(UserError, match="pool=mean needs an encoder and a task with one label per text"):
            finetune(recipe(checkpoint_of(family), toy, tmp_path / "run", pool="mean"))


def test_notes_json_lists_all_affected_examples(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = {"question": "what", "context": "I saw the cat", "answers": ["cat"]}
    lost = [question | {"id": f"q{i}", "answers": ["cow"]} for i in range(5)]
    for name, rows in {"train": [question, *lost], "dev": [question, *lost[:2]]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {part: str(tmp_path / f"{part}.jsonl") for part in ("train", "dev")}
    r = recipe(checkpoint_of("bert"), toy, tmp_path / "run", task="span-qa", max_steps=1, **files)
    finetune(r)
    said = " ".join(capsys.readouterr().err.split())
    assert "5 questions left out without an answer in the context (q0, q1, q2, ...)." in said
    assert "2 answers scored on, but not in the context (q0, q1)." in said
    assert f"all examples that these notes are about: {tmp_path / 'run' / 'notes.json'}" in said
    assert "not learned from" not in said
    notes = json.loads((tmp_path / "run" / "notes.json").read_text())
    all_five = [f"q{i}" for i in range(5)]
    assert [(Path(n["file"]).name, len(n["examples"])) for n in notes] == [
        ("train.jsonl", 5),
        ("train.jsonl", 5),
        ("dev.jsonl", 2),
    ]
    assert notes[1] == {
        "file": files["train"],
        "note": "5 questions left out without an answer in the context",
        "examples": all_five,
    }
    finetune(r, overwrite=True)


def test_errors_leave_no_output_folder(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    shutil.copytree(checkpoint_of("bert"), tmp_path / "bert")
    (tmp_path / "bert" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"bert has no model.safetensors: not a checkpoint"):
        finetune(recipe(tmp_path / "bert", toy, tmp_path / "run"))
    for family in ("bart", "t5"):
        with pytest.raises(UserError, match=f"bilstm=8 needs an encoder with a task head: {family}"):
            finetune(recipe(checkpoint_of(family), toy, tmp_path / "run", bilstm=8))
    with pytest.raises(UserError, match="exclude each other: add --lm-loss-weight 0"):
        finetune(recipe(checkpoint_of("gpt2"), toy, tmp_path / "run", bilstm=8, lm_loss_weight=0.5))
    with pytest.raises(UserError, match="layers=mix needs an encoder"):
        finetune(recipe(checkpoint_of("t5"), toy, tmp_path / "run", layers="mix"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bert" / name).unlink()
    with pytest.raises(UserError, match="bert holds no tokenizer"):
        finetune(recipe(tmp_path / "bert", toy, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
