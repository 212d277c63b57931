"""The verbs as functions: which setting wins, what a model may be named by, what comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import firth
from firth.errors import UserError
from firth.models import PRESETS, load_model
from firth.models.config import Buckets
from firth.objectives import NAMED
from firth.plain import to_plain
from firth.train import Recipe, load_recipe
from firth.train.pretrain import first_model
from firth.verbs import all_changes, find_model, flatten

TINY = {"model.num_layers": 1, "model.dim": 32, "model.mlp.dim": 64}
SIZES: dict[str, Any] = {"max_steps": 2, "max_seq_length": 32, "per_device_train_batch_size": 4}


@pytest.fixture(scope="module")
def home(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, shards and a run."""
    folder = tmp_path_factory.mktemp("home")
    firth.tokenizer([corpus_file], folder / "tokenizer", "wordpiece", 300)
    firth.prepare([corpus_file], folder / "tokenizer", folder / "shards")
    firth.pretrain("bert-tiny", folder / "shards", folder / "run", overrides=TINY, **SIZES)
    return folder


def test_every_name_is_there_and_no_other() -> None:
    for _ in range(2):  # `firth.evaluate` is a folder too: the verb stays in front of it
        for name in firth.__all__:
            assert callable(getattr(firth, name)), name
    assert firth.models()[0]["name"] == "bert-tiny"
    with pytest.raises(AttributeError):
        _ = firth.pretrian


def test_a_loaded_model_is_called_as_hugging_face_models_are(home: Path) -> None:
    model = firth.load(home / "run" / "final")
    out = model(input_ids=torch.tensor([[2, 7, 8, 3]]), attention_mask=torch.ones(1, 4), output_hidden_states=True)
    assert out.logits.shape == (1, 4, model.config.vocab_size)
    assert [tuple(h.shape) for h in out.hidden_states] == [(1, 4, 32)] * 2


# --- MODEL


def test_a_preset_a_config_and_a_checkpoint(home: Path) -> None:
    assert find_model("bert-tiny") == (PRESETS["bert-tiny"], None)
    final = home / "run" / "final"
    config, place = find_model(final)
    assert (config.dim, place) == (32, final)
    assert find_model(final / "config.json") == (config, None)


def test_a_preset_is_not_hidden_by_the_folder_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-tiny").mkdir()
    assert find_model("gpt2-tiny") == (PRESETS["gpt2-tiny"], None)


def test_settings_reach_a_model_that_starts_from_a_checkpoint(home: Path, tmp_path: Path) -> None:
    changes = {"model.dropout": 0.5, "model.attention_dropout": 0.0}
    firth.pretrain(home / "run" / "final", home / "shards", tmp_path / "more", overrides=changes, **SIZES)
    recipe = load_recipe(tmp_path / "more" / "recipe.yaml", Recipe)
    base = load_model(home / "run" / "final")
    assert base.tokenizer is not None
    model = first_model(recipe, base.tokenizer)
    assert model.embed.drop.p == 0.5
    assert torch.equal(model.embed.tokens.weight, base.embed.tokens.weight)
    with pytest.raises(UserError, match=r"missing, such as stack.blocks.1"):
        firth.pretrain(
            home / "run" / "final", home / "shards", tmp_path / "deep", overrides={"model.num_layers": 2}, **SIZES
        )


# --- which setting wins


def test_later_words_win(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("seed: 1\nmax_steps: 1\nlearning_rate: 1.0\nmodel:\n  dim: 64\n")
    found = all_changes(file, {"seed": 2, "max_steps": 2, "bf16": None}, {"seed": 3}, {"output_dir": "here"})
    assert found == {"seed": 3, "max_steps": 2, "learning_rate": 1.0, "model.dim": 64, "output_dir": "here"}


def test_a_choice_is_set_whole() -> None:
    plain = {"model": {"position": {"kind": "Buckets", "num": 8}, "dim": 4}}
    assert flatten(plain) == {"model.position": {"kind": "Buckets", "num": 8}, "model.dim": 4}


def test_a_config_sets_the_run(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    position = {"kind": "Buckets", "num": 8, "far": 16}
    model = {"num_layers": 1, "dim": 32, "mlp": {"dim": 64}, "position": position}
    file.write_text(yaml.safe_dump({"model": model, "objective": {"kind": "MLM", "rate": 0.3}, "seed": 5, **SIZES}))
    firth.pretrain("bert-tiny", home / "shards", tmp_path / "run", config=file, seed=6)
    recipe = load_recipe(tmp_path / "run" / "recipe.yaml", Recipe)
    assert recipe.model.position == Buckets(8, 16)
    assert recipe.objective.rate == 0.3  # type: ignore[union-attr]
    assert (recipe.seed, recipe.max_steps) == (6, 2)


def test_the_recipe_of_one_run_makes_another_one(home: Path, tmp_path: Path) -> None:
    first = home / "run"
    before = (first / "log.jsonl").read_text()
    firth.pretrain("bert-tiny", home / "shards", tmp_path / "again", config=first / "recipe.yaml")
    recipe = load_recipe(tmp_path / "again" / "recipe.yaml", Recipe)
    assert recipe.output_dir == str(tmp_path / "again"), "not the first one's"
    assert (tmp_path / "again" / "log.jsonl").read_text() == before
    weights = [(folder / "final" / "model.safetensors").read_bytes() for folder in (first, tmp_path / "again")]
    assert weights[0] == weights[1]


def test_a_named_objective_wins_over_the_config(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("objective: {kind: MLM, rate: 0.4}\n")
    with pytest.raises(UserError, match="CLM is for the shape decoder"):
        firth.pretrain("bert-tiny", home / "shards", tmp_path / "run", objective="clm", config=file)


# --- what a run reads


def test_prepare_goes_on_only_with_the_same_tokenizer(home: Path, corpus_file: Path, tmp_path: Path) -> None:
    facts = firth.prepare([corpus_file], home / "tokenizer", home / "shards", resume=True)
    assert facts["documents"] == 300
    firth.tokenizer([corpus_file], tmp_path / "other", "wordpiece", 250)
    with pytest.raises(UserError, match="made with another tokenizer"):
        firth.prepare([corpus_file], tmp_path / "other", home / "shards", resume=True)


def test_prepare_marks_what_is_salient(home: Path, corpus_file: Path, tmp_path: Path) -> None:
    facts = firth.prepare([corpus_file], home / "tokenizer", tmp_path / "s", salient="default")
    assert facts["train"]["salient"] > 0
    assert firth.prepare([corpus_file], home / "tokenizer", tmp_path / "s", resume=True, salient="default") == facts
    with pytest.raises(UserError, match="made with --salient default, not left out"):
        firth.prepare([corpus_file], home / "tokenizer", tmp_path / "s", resume=True)
    with pytest.raises(UserError, match="neither 'default' nor"):
        firth.prepare([corpus_file], home / "tokenizer", tmp_path / "other", salient="names")


def test_resuming_with_other_ways_of_reading_is_refused(corpus_file: Path, tmp_path: Path) -> None:
    run: dict[str, Any] = {"overrides": TINY, "vocab_size": 300, **SIZES}
    firth.pretrain("bert-tiny", corpus_file, tmp_path / "run", **run)
    for changes in ({"held_out": 0.2}, {"vocab_size": 200}, {"lowercase": True}, {"documents": "file"}):
        with pytest.raises(UserError, match="reads the text that it began with"):
            firth.pretrain("bert-tiny", corpus_file, tmp_path / "run", resume=True, **run | changes)
    with pytest.raises(UserError, match="reads the text that it began with"):
        firth.pretrain("bert-tiny", [corpus_file, corpus_file], tmp_path / "run", resume=True, **run)


def test_a_refused_run_does_not_stand_in_the_way_of_the_next(corpus_file: Path, tmp_path: Path) -> None:
    run: dict[str, Any] = {"overrides": TINY, "vocab_size": 300, **SIZES}
    wrong = {**TINY, "objective.mean_span": 30.0}
    with pytest.raises(UserError, match="fewer than one span of 30"):
        firth.pretrain("t5-tiny", corpus_file, tmp_path / "run", **run | {"overrides": wrong})
    assert not (tmp_path / "run" / "data").exists(), "it is refused before the text is tokenised"
    with pytest.raises(
        UserError, match=r"began with, and this one differs: tokenizer: .*unigram.*wordpiece.*--overwrite"
    ):
        firth.pretrain("bert-tiny", corpus_file, tmp_path / "run", **run)
    made = (tmp_path / "run" / "tokenizer" / "tokenizer.json").stat().st_mtime_ns
    firth.pretrain("t5-tiny", corpus_file, tmp_path / "run", **run)
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").stat().st_mtime_ns == made
    with pytest.raises(UserError, match="exists already"):
        firth.pretrain("t5-tiny", corpus_file, tmp_path / "run", **run)


def test_an_exported_folder_may_be_replaced_only_by_another(home: Path, tmp_path: Path) -> None:
    firth.export(home / "run" / "final", tmp_path / "out")
    with pytest.raises(UserError, match="exists already"):
        firth.export(home / "run" / "final", tmp_path / "out")
    firth.export(home / "run" / "final", tmp_path / "out", overwrite=True)
    (tmp_path / "out" / "README.md").write_text("mine")
    with pytest.raises(UserError, match=r"README.md"):
        firth.export(home / "run" / "final", tmp_path / "out", overwrite=True)


def test_evaluations_lie_beside_the_checkpoint(home: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"text": "the cat", "label": "a"}\n{"text": "the dog", "label": "b"}\n')
    firth.finetune(home / "run" / "final", "classify", data, data, tmp_path / "tuned", max_steps=1, seeds=1)
    found = firth.evaluate(tmp_path / "tuned" / "final", "classify", data)
    assert Path(found["predictions"]) == tmp_path / "tuned" / "evaluate-d.jsonl" / "predictions.jsonl"
    firth.evaluate(tmp_path / "tuned" / "final", "classify", data)  # and again
    # which does not stand in the way of going on with the run
    again = firth.finetune(
        home / "run" / "final", "classify", data, data, tmp_path / "tuned", max_steps=1, seeds=1, resume=True
    )
    assert again["mean"] == pytest.approx(found["metrics"]["accuracy"])


# --- what a model will see


def test_show_reads_from_text_what_pretrain_will(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    run: dict[str, Any] = {"overrides": {**TINY, "objective.rate": 0.3}, "vocab_size": 300, "objective": "mlm", **SIZES}
    shown = firth.show("bert-tiny", corpus_file, rows=5, output_dir=tmp_path / "out", **run)
    assert list((tmp_path / "temporary").iterdir()) == [], "tokenizer and shards are removed"
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["show.html"]
    firth.pretrain("bert-tiny", corpus_file, tmp_path / "run", **run)
    again = firth.show("bert-tiny", tmp_path / "run" / "data", rows=5, output_dir=tmp_path / "out", **run)
    assert shown["rows"] == again["rows"]
    assert shown["objective"]["rate"] == shown["promises"]["asked"] == 0.3
    assert shown["counts"]["sample"]["asked"] == pytest.approx(0.3, abs=0.03)
    recipe = load_recipe(tmp_path / "run" / "recipe.yaml", Recipe)
    assert to_plain(recipe)["objective"] == shown["objective"]


def test_a_look_that_is_stopped_leaves_nothing(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def press(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("firth.verbs.look", press)
    with pytest.raises(KeyboardInterrupt):
        firth.show("bert-tiny", corpus_file, vocab_size=300, output_dir=tmp_path / "out", **SIZES)
    assert list(tmp_path.iterdir()) == []


def test_a_named_objective_brings_what_it_needs(home: Path, tmp_path: Path) -> None:
    firth.pretrain("bert-tiny", home / "shards", tmp_path / "run", objective="span", overrides=TINY, **SIZES)
    recipe = load_recipe(tmp_path / "run" / "recipe.yaml", Recipe)
    assert recipe.objective == NAMED["span"]
    assert recipe.model.extra("boundary") is not None
    with pytest.raises(UserError, match=r"Unknown objective 'spann'. Did you mean 'span'\?"):
        firth.pretrain("bert-tiny", home / "shards", tmp_path / "other", objective="spann", **SIZES)
    assert {m["name"]: m["objective"] for m in firth.models()}["t5-tiny"] == "span-corruption"
