"""Each loss of an objective with several is logged, as the mean over its own targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.nn.functional as F

from firth.core.html import HtmlPage
from firth.evaluate.card import write_model_card
from firth.evaluate.report import add_loss_curves
from firth.models import Distillation, Encoder, distillation_losses, load_model, make_model, with_extras
from firth.models.config import GeneratorConfig, SentencePairHead, SpanBoundaryHead
from firth.models.presets import bert
from firth.objectives import MLM, OBJECTIVES, Batch, MLMAndCLM, RTDMLMAndCLM, SpanCorruption, SpanCorruptionAndMLM
from firth.text import Document
from firth.tokens import MixConfig, MixedDataset, PackedDataset, ShardSet, open_shards, prepare
from firth.train import ComputeConfig, Recipe, TrainingConfig, TrainingRun, pretrain, read_log
from firth.train.dataloader import HELD_OUT_SEED, make_batch, make_held_out_dataset, make_row_dataset
from firth.train.held_out import HeldOutLoss, choose_eval_rows, make_evaluation
from firth.train.pretrain import build_pretrain_model
from firth.train.ramp import ramp_stages, stage_at
from firth.train.step import build_step_runner, train_step

Recipes = Callable[..., Recipe]
CPU = ComputeConfig(torch.device("cpu"), bf16=False, compile=False)
EXTRAS = (SentencePairHead(), SpanBoundaryHead(max_span_length=2))
# Two micro-batches: 4 targets and 3 pairs, then 1 target and 1 pair; unequal numbers of tokens.
BATCH = Batch(
    torch.randint(5, 30, (4, 6), generator=torch.Generator().manual_seed(0)),
    document_ids=torch.tensor([[0] * 6, [0] * 4 + [-1] * 2, [0] * 6, [0] * 3 + [-1] * 3]),
    target_positions=torch.tensor([[1, 3], [2, 0], [4, 0], [1, 0]]),
    labels=torch.tensor([[7, 8], [9, -100], [6, -100], [5, -100]]),
    span_boundaries=torch.tensor([[[0, 2, 0], [2, 4, 0]], [[1, 3, 0]] * 2, [[3, 5, 0]] * 2, [[0, 2, 0]] * 2]),
    pair_labels=torch.tensor([0, 1, 1, 0]),
)


def rows_of(batch: Batch, rows: slice) -> Batch:
    return Batch(*(None if a is None else a[rows].numpy() for a in batch))


def step_metrics(model: Encoder, batch: Batch, loss_fn: Any = None) -> tuple[float, dict[str, float]]:
    micro = [rows_of(batch, slice(0, 3)), rows_of(batch, slice(3, 4))]
    run = TrainingRun(TrainingConfig(), CPU, model, lambda step: micro, loss_fn=loss_fn)
    runner = build_step_runner(run)
    loss = train_step(run, runner, torch.optim.SGD(model.parameters(), lr=0.0), micro, 0, 0.0).item()
    return loss, dict(zip(runner.metric_names, runner.metrics.tolist(), strict=True))


def encoder(**changes: Any) -> Encoder:
    torch.manual_seed(0)
    model = make_model(bert(1, 16, 2, 30, dropout=0.0, attention_dropout=0.0, **changes))
    assert isinstance(model, Encoder)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def test_metrics_are_means_over_the_targets_of_all_micro_batches() -> None:
    model = encoder(extras=EXTRAS)
    model.objective = {"kind": "MLM", "pair": "order"}
    loss, found = step_metrics(model, BATCH)
    x = model.backbone(BATCH)
    rows, slots = torch.nonzero(BATCH.labels != -100, as_tuple=True)
    labels, states = BATCH.labels[rows, slots], x[rows, BATCH.target_positions[rows, slots]]
    spans = model.extras["boundary"](x, BATCH.span_boundaries)[rows, slots]
    pairs, weight = model.extras["pair"](x), model.embed.tokens.weight
    wanted = {
        "mlm_loss": F.cross_entropy(model.head(states, weight), labels),
        "boundary_loss": F.cross_entropy(F.linear(spans, weight, model.head.bias), labels),
        "sop_loss": F.cross_entropy(pairs, BATCH.pair_labels),
        "sop_accuracy": (pairs.argmax(1) == BATCH.pair_labels).float().mean(),
    }
    assert found == pytest.approx({name: value.item() for name, value in wanted.items()}, rel=1e-5)
    assert loss == pytest.approx(sum(found[name] for name in ("mlm_loss", "boundary_loss", "sop_loss")), rel=1e-5)


def test_replaced_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """ELECTRA's two losses and the discriminator's accuracy; the loss weighs the second."""
    monkeypatch.setattr("firth.models.electra.sample_generator_tokens", lambda logits: logits.argmax(-1))
    model = encoder(extras=(GeneratorConfig(discriminator_weight=50.0),))
    batch = BATCH._replace(span_boundaries=None, pair_labels=None)
    loss, found = step_metrics(model, batch)
    used, is_token = batch.labels != -100, batch.document_ids >= 0
    logits = model.logits(batch)
    truth, corrupted = batch.input_ids.clone(), batch.input_ids.clone()
    for row, slot in used.nonzero().tolist():
        truth[row, batch.target_positions[row, slot]] = batch.labels[row, slot]
        corrupted[row, batch.target_positions[row, slot]] = logits[row, slot].argmax()
    assert model.generator is not None
    score = model.generator.discriminator_head(model.backbone(batch._replace(input_ids=corrupted)))[is_token]
    replaced = (corrupted != truth)[is_token]
    wanted = {
        "mlm_loss": F.cross_entropy(logits[used], batch.labels[used]).item(),
        "rtd_loss": F.binary_cross_entropy_with_logits(score, replaced.float()).item(),
        "rtd_accuracy": ((score > 0) == replaced).float().mean().item(),
        "rtd_replaced": replaced.float().mean().item(),
    }
    assert found == pytest.approx(wanted, rel=1e-5)
    assert loss == pytest.approx(found["mlm_loss"] + 50 * found["rtd_loss"], rel=1e-5)


def test_distillation() -> None:
    batch = BATCH._replace(span_boundaries=None, pair_labels=None)
    student, teacher, spec = encoder(), encoder().eval(), Distillation(3.0, 5.0, 2.0, 0.5)
    with torch.no_grad():
        teacher.embed.tokens.weight.mul_(1.5)
    loss, found = step_metrics(
        student, batch, lambda b: distillation_losses(student, teacher, b, spec, with_metrics=True)
    )
    assert set(found) == {"mlm_loss", "soft_loss", "cosine_loss"}
    logits, labels = student.logits(batch)[batch.labels != -100], batch.labels[batch.labels != -100]
    assert found["mlm_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert loss == pytest.approx(5 * found["soft_loss"] + 2 * found["mlm_loss"] + 0.5 * found["cosine_loss"], rel=1e-5)


@pytest.mark.parametrize(("objective", "family"), [("nsp", "bert"), ("clm", "gpt2")])
def test_the_log_and_the_results(
    objective: str, family: str, recipe_of: Recipes, shards_of: Callable[[str], ShardSet]
) -> None:
    recipe = recipe_of(family, max_steps=2, eval_steps=1, gradient_accumulation_steps=2)
    task = OBJECTIVES[objective]
    recipe = replace(recipe, objective=task, model=with_extras(recipe.model, task.extras))
    results = pretrain(recipe)
    log = read_log(Path(recipe.output_dir) / "log.jsonl")
    step, evaluation = log[-2], log[-1]
    extra = ["mlm_loss", "nsp_loss", "nsp_accuracy"] if objective == "nsp" else []
    assert list(step) == [
        "step",
        "loss",
        *extra,
        "learning_rate",
        "tokens",
        "targets",
        "words_seen",
        "passes",
        "grad_norm",
        "weight_rms",
        "data",
    ]
    accuracy = "mlm_accuracy" if extra else "lm_accuracy"
    assert set(evaluation) == {"step", "eval_loss", f"eval_{accuracy}", *(f"eval_{name}" for name in extra)}
    assert all(results[name] == value for line in (step, evaluation) for name, value in line.items() if name in results)
    assert {"loss", *extra, *evaluation} - {"step"} <= results.keys()
    names = list(results)
    beside = "eval_mlm_loss" if extra else "eval_loss"
    assert names[names.index("unigram_entropy") - 1] == beside, "the entropy of tokens beside the loss over tokens"
    if extra:
        assert evaluation["eval_loss"] == pytest.approx(evaluation["eval_mlm_loss"] + evaluation["eval_nsp_loss"])
        assert 0 <= evaluation["eval_nsp_accuracy"] <= 1
        assert evaluation["eval_mlm_loss"] < 1.2 * results["unigram_entropy"] + 1


def test_the_progress_line(
    recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch, shards_of: Callable[[str], ShardSet]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("firth.train.loop.StatusLine.show", lambda self, text: shown.append(text))
    task = OBJECTIVES["rtd"]
    recipe = recipe_of("bert", max_steps=1)
    pretrain(replace(recipe, objective=task, model=with_extras(recipe.model, task.extras)))
    (line,) = read_log(Path(recipe.output_dir) / "log.jsonl")[:1]
    numbers = [line[name] for name in ("loss", "mlm_loss", "rtd_loss", "rtd_accuracy", "rtd_replaced")]
    wanted = "loss {:.3f} (mlm {:.3f}, rtd {:.3f}, rtd accuracy {:.3f}, rtd replaced {:.3f})  rate".format(*numbers)
    assert wanted in shown[0]
    assert f"{line['words_seen']:,} words seen, {line['passes']:.2f} passes" in shown[0]


def test_the_held_out_accuracy_by_hand(recipe_of: Recipes, shards_of: Callable[[str], ShardSet]) -> None:
    recipe, shards = recipe_of("gpt2", per_device_train_batch_size=3, eval_rows=4), shards_of("gpt2")
    model, rows = build_pretrain_model(recipe, shards.tokenizer), make_row_dataset(recipe, shards, held_out=True)
    found = HeldOutLoss(recipe, rows, shards.tokenizer, CPU)(model)
    batch = make_batch(recipe, rows, choose_eval_rows(recipe, rows), shards.tokenizer.vocab).to(CPU.device)
    with torch.no_grad():
        logits, used = model.logits(batch), batch.labels != -100
    assert found["eval_lm_accuracy"] == pytest.approx((logits.argmax(-1) == batch.labels)[used].float().mean().item())
    assert found["eval_loss"] == pytest.approx(F.cross_entropy(logits[used], batch.labels[used]).item(), rel=1e-5)


@pytest.mark.parametrize("objective", ["mlm", "mlm-and-clm", "nsp"])
def test_held_out_losses_depend_on_the_weights_alone(
    objective: str, recipe_of: Recipes, shards_of: Callable[[str], ShardSet]
) -> None:
    """Other seeds and batches read the same held-out rows under the same masks."""
    shards, task = shards_of("bert"), OBJECTIVES[objective]
    recipe = replace(recipe_of("bert", eval_rows=12), objective=task)
    recipe = replace(recipe, model=with_extras(recipe.model, task.extras))
    model = build_pretrain_model(recipe, shards.tokenizer)
    losses = []
    for changes in ({}, {"seed": 5}, {"per_device_train_batch_size": 3}):
        changed = replace(recipe, **changes)
        rows = make_held_out_dataset(changed, shards)
        assert rows is not None
        losses.append(HeldOutLoss(changed, rows, shards.tokenizer, CPU)(model))
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-5)


def test_masked_tokens_of_an_encoder_are_not_evaluated(
    recipe_of: Recipes, shards_of: Callable[[str], ShardSet]
) -> None:
    """The held-out loss is that of span corruption, whatever else the encoder learns in training."""
    shards, both = shards_of("t5"), SpanCorruptionAndMLM(mask_rate=0.3)
    recipe = recipe_of("t5", eval_rows=9)
    model = build_pretrain_model(recipe, shards.tokenizer)
    dataset = make_held_out_dataset(recipe, shards)
    assert dataset is not None
    found, other = (
        make_evaluation(changed, dataset, shards.tokenizer, CPU)(model)
        for changed in (replace(recipe, objective=both), replace(recipe, objective=SpanCorruption()))
    )
    assert found == other


def test_masked_and_causal_held_out_rows_apart(recipe_of: Recipes, shards_of: Callable[[str], ShardSet]) -> None:
    """Every second row is masked, whatever share the training masks; the parts are the losses of MLM and CLM."""
    shards, both = shards_of("bert"), MLMAndCLM()
    recipe = replace(recipe_of("bert", eval_rows=9), objective=both)
    model = build_pretrain_model(recipe, shards.tokenizer)
    dataset = make_held_out_dataset(recipe, shards)
    assert dataset is not None
    found, other = (
        make_evaluation(changed, dataset, shards.tokenizer, CPU)(model)
        for changed in (recipe, replace(recipe, objective=replace(both, masked_share=0.9)))
    )
    assert found == other
    detects = replace(recipe, objective=RTDMLMAndCLM(mlm=both.mlm))
    assert make_evaluation(detects, dataset, shards.tokenizer, CPU)(model) == found, "detection is no part of it"
    rows, losses, counts = choose_eval_rows(recipe, dataset), [], []
    for part, objective in ((rows[::2], both.mlm), (rows[1::2], replace(both, masked_share=0.0))):
        batch = make_batch(
            replace(recipe, objective=objective, seed=0), dataset, part, shards.tokenizer.vocab, step=0, progress=1.0
        )
        counts.append(int((batch.labels != -100).sum()))
        with torch.no_grad():
            losses.append(model.loss(batch.to(CPU.device)).item())
    assert found["eval_masked_loss"] == pytest.approx(losses[0] / counts[0], rel=1e-5)
    assert found["eval_causal_loss"] == pytest.approx(losses[1] / counts[1], rel=1e-5)
    assert found["eval_loss"] == pytest.approx(sum(losses) / sum(counts), rel=1e-5)
    assert counts[1] > 3 * counts[0]


def test_every_source_of_a_mix_has_its_loss_and_its_unigram_entropy(
    recipe_of: Recipes, shards_of: Callable[[str], ShardSet], corpus_file: Path, tmp_path: Path
) -> None:
    one, few = shards_of("gpt2"), corpus_file.read_text(encoding="utf-8").split("\n\n")[:80]
    prepare([Document(text, "few") for text in few], one.tokenizer, tmp_path / "few", 0.2)
    shards = {"all": one, "few": open_shards(tmp_path / "few")}
    sources = {name: str(part.folder) for name, part in shards.items()}
    recipe = recipe_of("gpt2", max_steps=2, eval_steps=2, eval_rows=6, data="", sources=sources, warm_start="none")
    results = pretrain(recipe)
    logged = read_log(Path(recipe.output_dir) / "log.jsonl")[-1]
    model = load_model(Path(recipe.output_dir) / "final")
    for source in results["mix"]:
        name = source["source"]
        seed = (HELD_OUT_SEED + crc32(name.encode())) % 2**63
        rows = make_row_dataset(replace(recipe, seed=seed, sources={}), shards[name], held_out=True)
        index = choose_eval_rows(replace(recipe, eval_rows=3), rows)
        batch = make_batch(recipe, rows, index, one.tokenizer.vocab).to(CPU.device)
        with torch.no_grad():
            logits = model.eval().logits(batch)
        wanted = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).item()
        assert source["eval_loss"] == logged[f"eval_loss/{name}"] == pytest.approx(wanted, rel=1e-5)
        assert source["unigram_entropy"] == shards[name].unigram_entropy
    assert results["eval_loss"] == logged["eval_loss"]
    page = HtmlPage("a mix")
    add_loss_curves(page, Path(recipe.output_dir) / "final")
    page.save(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "few: held out" in html
    assert f"{results['mix'][1]['unigram_entropy']:.4g}" in html
    card = write_model_card(Path(recipe.output_dir) / "final").read_text(encoding="utf-8")
    assert "held-out documents of few | eval_loss" in card


@pytest.mark.parametrize("ramps", [{}, {"length_ramp": 0.5, "length_doublings": 1, "batch_ramp": 0.25}])
def test_words_and_passes_follow_from_the_rows(
    ramps: dict[str, Any], recipe_of: Callable[..., Recipe], shards_of: Callable[[str], ShardSet]
) -> None:
    """A pass has every row of its length once, and every word once: also of T5, which reads targets beside them."""
    recipe, shards = recipe_of("t5", max_steps=9, **ramps), shards_of("t5")
    results = pretrain(recipe)
    lines = [line for line in read_log(Path(recipe.output_dir) / "log.jsonl") if "tokens" in line]
    rows = {n: make_row_dataset(replace(recipe, max_seq_length=n), shards, held_out=False).num_rows for n in (16, 32)}
    passes = 0.0
    for line in lines:
        stage = stage_at(ramp_stages(recipe), line["step"] - 1)
        passes += stage.step_rows / rows[stage.seq_length]
        assert line["passes"] == pytest.approx(passes, abs=1e-4)
        assert line["words_seen"] == pytest.approx(passes * shards.train.num_words, abs=1)
    assert (results["passes"], results["words_seen"]) == (lines[-1]["passes"], lines[-1]["words_seen"])


def test_a_mix_counts_the_words_of_each_source(shards_of: Callable[[str], ShardSet]) -> None:
    sources = {"a": shards_of("bert"), "b": shards_of("gpt2")}
    datasets = {
        name: PackedDataset(part.train, 32, MLM().build_template(part.tokenizer.vocab), 0, 0)
        for name, part in sources.items()
    }
    mixed = MixedDataset(datasets, MixConfig(epochs={"a": 2.0, "b": 1.0}), seed=0)
    words = 2 * sources["a"].train.num_words + sources["b"].train.num_words
    assert mixed.num_rows * mixed.words_per_row == pytest.approx(words, rel=1e-3)
