"""The report of a pretraining: sentences that agree with their numbers, samples, and a run that it leaves alone."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import firth
from firth.core.files import find_corruption, read_json
from firth.evaluate.pretraining_report import (
    describe_loss,
    describe_trend,
    find_passages,
    loss_part_rows,
    next_commands,
    sample_before_and_after,
    summarize_loss,
)
from firth.models import get_preset
from firth.recipes import pretraining_recipe
from firth.tokens import open_shards
from firth.train import Interrupted, Recipe, load_recipe, read_log
from firth.train.dataloader import open_recipe_shards

TINY = {"model.num_layers": 1, "model.dim": 32, "model.mlp.dim": 64}
SIZES: dict[str, Any] = {"max_steps": 3, "max_seq_length": 32, "per_device_train_batch_size": 4, "overrides": TINY}


@pytest.fixture(scope="module")
def run(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A BERT with next sentence prediction, from a file whose name is markup."""
    folder = tmp_path_factory.mktemp("report")
    text = Path(shutil.copy(corpus_file, folder / "<b>text.txt"))
    return folder / "run", firth.pretrain("bert-tiny", text, folder / "run", objective="nsp", vocab_size=300, **SIZES)


def test_a_run_ends_with_a_report_and_a_card(run: tuple[Path, dict[str, Any]]) -> None:
    folder, result = run
    page = (folder / "report.html").read_text()
    assert result["report"] == str(folder / "report.html")
    assert "bert on &lt;b&gt;text.txt" in page
    assert "<b>" not in page
    for part in ("The loss", "unigram entropy", "nsp accuracy", "words seen", "passes over the text", "Recipe"):
        assert part in page, part
    assert page.count("after training</p>") == page.count("with random weights</p>") == 6
    assert f"firth finetune {folder / 'final'} --task classify" in page.replace(" \\\n    ", " ")
    assert result["next"].startswith(f"firth finetune {folder / 'final'}")
    assert result["summary"] == summarize_loss(load_recipe(folder / "recipe.yaml", Recipe), result)
    assert "| held-out documents | eval_mlm_loss |" in (folder / "final" / "README.md").read_text()
    assert find_corruption(folder / "final") is None
    stored = read_json(folder / "results.json")
    assert stored == {k: v for k, v in result.items() if k not in ("report", "summary", "next")}


def test_a_report_is_written_once_and_its_failure_is_a_warning(
    run: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, result = run
    text, report = folder.parent / "<b>text.txt", folder / "report.html"
    again = {"resume": True, "objective": "nsp", "vocab_size": 300, **SIZES}
    before = report.stat().st_mtime_ns
    assert firth.pretrain("bert-tiny", text, folder, **again) == result
    assert report.stat().st_mtime_ns == before

    def fails(*_: object) -> None:
        raise RuntimeError("no font")

    report.unlink()
    monkeypatch.setattr("firth.evaluate.pretraining_report.loss_chart", fails)
    assert "report" not in firth.pretrain("bert-tiny", text, folder, **again)
    assert "the report could not be written (RuntimeError: no font)" in capsys.readouterr().err


def test_an_interrupted_run_has_a_report_and_ends_as_an_undisturbed_one(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"vocab_size": 300, **SIZES}
    firth.pretrain("gpt2-tiny", corpus_file, tmp_path / "straight", **options)
    module = sys.modules["firth.train.pretrain"]
    real = module.fit

    def stopped(run: Any, resume: bool = False) -> Any:
        run.hooks.append((2, lambda step, model: os.kill(os.getpid(), signal.SIGINT)))
        return real(run, resume)

    with monkeypatch.context() as patch:
        patch.setattr(module, "fit", stopped)
        with pytest.raises(Interrupted):
            firth.pretrain("gpt2-tiny", corpus_file, tmp_path / "run", **options)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "stopped at step 2 of 3" in page
    assert "after training</p>" in page
    firth.pretrain("gpt2-tiny", corpus_file, tmp_path / "run", resume=True, **options)
    assert "stopped at" not in (tmp_path / "run" / "report.html").read_text()
    assert read_log(tmp_path / "run" / "log.jsonl") == read_log(tmp_path / "straight" / "log.jsonl")


def test_samples_leave_the_random_state_alone(run: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = run
    recipe, before = load_recipe(folder / "recipe.yaml", Recipe), torch.get_rng_state()
    samples = sample_before_and_after(recipe, open_recipe_shards(recipe), folder / "final")
    assert torch.equal(torch.get_rng_state(), before)
    assert [side.title for side in samples[0].sides] == ["with random weights", "after training"]
    assert samples[0].sides[0].guesses != samples[0].sides[1].guesses
    assert samples == sample_before_and_after(recipe, open_recipe_shards(recipe), folder / "final")


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe", "unigram"])
def test_a_blank_is_one_token_of_a_held_out_sentence(kind: str, corpus_file: Path, tmp_path: Path) -> None:
    firth.tokenizer([corpus_file], tmp_path / "tokenizer", kind, 400)
    firth.prepare([corpus_file], tmp_path / "tokenizer", tmp_path / "shards")
    shards, text = open_shards(tmp_path / "shards"), corpus_file.read_text()
    blanks, halves = (find_passages(shards, fills, max_length=512) for fills in (True, False))
    assert len(blanks) == len(halves) == 6
    for passage in blanks:
        assert passage.before.endswith(" ")
        sentence = passage.before + passage.answer + passage.after
        assert kind == "wordpiece" or sentence.strip() in text
        ids = shards.tokenizer.encode(sentence)
        assert passage.answer in [shards.tokenizer.decode([i]).strip() for i in ids]
    assert all(p.before and p.answer.strip() and not p.after for p in halves)


def test_sentences_agree_with_their_numbers() -> None:
    recipe = pretraining_recipe(get_preset("bert-tiny"))

    def story(loss: float | None, **more: float) -> str:
        return " ".join(describe_loss(recipe, {"loss": 5.0, "eval_loss": loss, "unigram_entropy": 6.0, **more}))

    better = story(5.0, eval_mlm_accuracy=0.25)
    assert "among 148 equally likely tokens" in better  # e ** 5
    assert "right for 25.0% of them" in better
    assert "2.7 times the probability" in better  # e ** (6 - 5)
    assert "`firth doctor` says why" in story(6.07)
    assert "On the training text (no text is held out)" in story(None)
    results = {"loss": 5.0, "eval_loss": 6.07, "unigram_entropy": 6.0}
    remedy = ": `firth doctor` says why"
    assert summarize_loss(recipe, results) == f"0.07 nats worse than word frequencies{remedy}"
    t5 = replace(recipe, model=get_preset("t5-tiny"))
    assert summarize_loss(t5, results) == "held-out loss 6.07 nats per token"
    assert "no baseline" in " ".join(describe_loss(t5, results))
    falling, rising = ([{"step": i, "eval_loss": x} for i, x in enumerate(xs)] for xs in ((7, 6, 5), (7, 5, 6)))
    assert "a longer run" in "".join(describe_trend(falling))
    assert "lowest at step 1 (5.00)" in "".join(describe_trend(rising))
    assert "by heart" in "".join(describe_trend(rising))
    assert "has the weights of step 1." in "".join(describe_trend(rising, kept_step=1))
    both_rise = [line | {"loss": line["eval_loss"]} for line in rising]  # a rate that is too high
    assert "by heart" not in "".join(describe_trend(both_rise))
    rows = loss_part_rows({"loss": 7.0, "mlm_loss": 6.0, "eval_nsp_loss": 0.7, "eval_nsp_accuracy": 0.5})
    assert [row[:3] for row in rows] == [
        ("mlm loss", "6", "–"),
        ("nsp loss", "–", "0.7"),
        ("nsp accuracy", "–", "50.0%"),
    ]


def test_each_part_of_masked_and_causal_rows_is_described() -> None:
    found = {"lm_loss": 3.1, "generator_loss": 2.8, "rtd_loss": 0.2, "eval_masked_loss": 2.1, "eval_causal_loss": 3.5}
    described = {part: what for part, *_, what in loss_part_rows(found)}
    assert all(described.values())
    assert described["lm loss"] == "the tokens of both kinds of rows"


def test_commands_quote_a_path_with_spaces() -> None:
    commands = next_commands(pretraining_recipe(get_preset("gpt2-tiny")), Path("my run/final"))
    assert next(iter(commands.values())) == "firth generate 'my run/final' \"The\" --temperature 0.8"


@pytest.mark.parametrize("model", ["ngram", "word2vec"])
def test_static_models(model: str, corpus_file: Path, tmp_path: Path) -> None:
    steps = {} if model == "ngram" else {"max_steps": 1}
    plan = firth.pretrain(model, corpus_file, tmp_path / "run", **steps, dry_run=True)
    assert not (tmp_path / "run").exists()
    assert (plan["text_bytes"], plan["writes"]) == (corpus_file.stat().st_size, str(tmp_path / "run"))
    result = firth.pretrain(model, corpus_file, tmp_path / "run", **steps)
    size = (plan["ngrams_at_most"], sum(result["ngrams"])) if model == "ngram" else (1 << 20, result["words"])
    assert size[0] >= size[1]
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert f"| model | {model} |" in card
    assert f"| {'n-grams' if model == 'ngram' else 'words'} | {size[1]:,} |" in card
    assert (f"firth.{'generate' if model == 'ngram' else 'embed'}(FOLDER") in card
    with pytest.raises(firth.UserError, match="exists already"):
        firth.pretrain(model, corpus_file, tmp_path / "run", dry_run=True)
    page = (tmp_path / "run" / "report.html").read_text()
    assert result["report"] == str(tmp_path / "run" / "report.html")
    assert result["next"] in page.replace("&#34;", '"').replace(" \\\n    ", " ")
    assert "nats better than word frequencies" in result["summary"] or model != "ngram"


def test_interrupted_word_vectors(corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from firth.static.learners import Word2VecTrainer

    real = Word2VecTrainer.step

    def stopped(self: Any, number: int, pool: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(self, number, pool)

    monkeypatch.setattr(Word2VecTrainer, "step", stopped)
    with pytest.raises(Interrupted):
        firth.pretrain("word2vec", corpus_file, tmp_path / "run", max_steps=3, save_steps=1)
    assert "nearest words" in (tmp_path / "run" / "report.html").read_text()
