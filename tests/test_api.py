"""Commands as functions: which setting wins, how a model is named, and the results."""

from __future__ import annotations

import inspect
import pickle
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import firth
from firth import api
from firth.commands.arguments import flatten_keys, merge_recipe_changes, resolve_model
from firth.commands.data_source import check_same_source
from firth.commands.generate import load_for_generation
from firth.core.errors import UserError
from firth.core.files import read_json, write_json
from firth.core.serialization import to_dict
from firth.evaluate.card import write_model_card
from firth.models import PRESETS, load_model
from firth.models.config import T5Bias
from firth.objectives import OBJECTIVES
from firth.tokens import load_tokenizer, open_shards
from firth.train import Recipe, load_recipe, read_log
from firth.train.pretrain import build_pretrain_model

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
    import firth.evaluate.report as report  # `firth.evaluate` is a package too: the function must win

    assert firth.UserError is UserError
    assert inspect.isclass(firth.Predictor)
    for name in set(firth.__all__) - {"UserError", "Predictor"}:
        assert inspect.isfunction(getattr(firth, name)), name
        assert "->" in str(inspect.signature(getattr(firth, name)))
    assert firth.evaluate.report is report is sys.modules["firth.evaluate.report"]
    assert firth.models.PRESETS is PRESETS
    assert pickle.loads(pickle.dumps(firth.generate)) is firth.generate  # noqa: S301
    assert firth.prove_resume is api.prove_resume
    assert (Path(firth.__file__).parent / "py.typed").is_file()
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
    assert resolve_model("bert-tiny") == (PRESETS["bert-tiny"], None)
    final = home / "run" / "final"
    config, path = resolve_model(final)
    assert (config.dim, path) == (32, final)
    assert resolve_model(final / "config.json") == (config, None)


def test_a_preset_is_not_hidden_by_the_folder_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-tiny").mkdir()
    assert resolve_model("gpt2-tiny") == (PRESETS["gpt2-tiny"], None)


@pytest.mark.parametrize("name", ["elmo", "ulmfit"])
def test_a_model_by_the_name_of_its_paper(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model(name) == (PRESETS[f"{name}-base"], None)
    (tmp_path / name).mkdir()
    assert resolve_model(name) == (PRESETS[f"{name}-base"], None)
    assert name not in {model["name"] for model in firth.models()}


def test_settings_reach_a_model_that_starts_from_a_checkpoint(home: Path, tmp_path: Path) -> None:
    changes = {"model.dropout": 0.5, "model.attention_dropout": 0.0}
    firth.pretrain(home / "run" / "final", home / "shards", tmp_path / "more", overrides=changes, **SIZES)
    recipe = load_recipe(tmp_path / "more" / "recipe.yaml", Recipe)
    base = load_model(home / "run" / "final")
    assert base.tokenizer is not None
    model = build_pretrain_model(recipe, base.tokenizer)
    assert model.embed.drop.p == 0.5
    assert torch.equal(model.embed.tokens.weight, base.embed.tokens.weight)
    with pytest.raises(UserError, match=r"missing, such as stack.blocks.1"):
        firth.pretrain(
            home / "run" / "final", home / "shards", tmp_path / "deep", overrides={"model.num_layers": 2}, **SIZES
        )


def test_default_optimizers(home: Path, tmp_path: Path) -> None:
    """New models use Muon; checkpoints and students use AdamW; a resumed run keeps its optimizer."""

    def used(model: Any, folder: str, **options: Any) -> tuple[str, float]:
        overrides = TINY if model == "bert-tiny" else {}
        firth.pretrain(model, home / "shards", tmp_path / folder, overrides=overrides, **SIZES | options)
        recipe = load_recipe(tmp_path / folder / "recipe.yaml", Recipe)
        return recipe.optim, recipe.learning_rate

    final = home / "run" / "final"
    assert used("bert-tiny", "new") == ("muon", 4e-3)
    assert used(final, "more") == ("adamw", 1e-3)
    assert used(final, "own", learning_rate=3e-3) == ("adamw", 3e-3)
    assert used("bert-tiny", "pupil", teacher=str(final)) == ("adamw", 1e-3)
    assert used("bert-tiny", "old", optim="adamw", learning_rate=2e-3) == ("adamw", 2e-3)
    assert used("bert-tiny", "old", resume=True) == ("adamw", 2e-3), "kept"
    with pytest.raises(UserError, match=r"optim: adamw -> muon"):
        used("bert-tiny", "old", resume=True, optim="muon")
    assert used("bert-tiny", "old", overwrite=True) == ("muon", 4e-3)


# --- which setting wins


def test_later_words_win(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("seed: 1\nmax_steps: 1\nlearning_rate: 1.0\nmodel:\n  dim: 64\n")
    found = merge_recipe_changes(file, {"seed": 2, "max_steps": 2, "bf16": None}, {"seed": 3}, {"output_dir": "here"})
    assert found == {"seed": 3, "max_steps": 2, "learning_rate": 1.0, "model.dim": 64, "output_dir": "here"}


def test_a_run_length_that_is_given_replaces_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max_steps: 300\nminutes: 0.7\nnum_train_epochs: 3.0\n")
    assert merge_recipe_changes(file, {"num_train_epochs": 4.0}, {}, {}) == {"num_train_epochs": 4.0}
    assert merge_recipe_changes(file, {}, {"max_steps": 9}, {}) == {"max_steps": 9, "num_train_epochs": 3.0}
    assert merge_recipe_changes(file, {"minutes": 2.0}, {}, {})["minutes"] == 2.0


def test_a_new_length_chooses_the_warm_up_and_the_evaluations_again(tmp_path: Path) -> None:
    """Else a run of 188 steps by the recipe of one of 1,875 would warm up until its end."""
    file = tmp_path / "c.yaml"
    file.write_text("max_steps: 1875\nwarmup_steps: 187\neval_steps: 188\n")
    assert merge_recipe_changes(file, {"max_steps": 188}, {}, {}) == {"max_steps": 188}
    assert merge_recipe_changes(file, {"num_train_epochs": 4.0}, {}, {}) == {"num_train_epochs": 4.0}
    assert merge_recipe_changes(file, {"seed": 1}, {}, {})["warmup_steps"] == 187
    own = merge_recipe_changes(file, {"max_steps": 188, "warmup_steps": 20}, {}, {})
    assert own == {"max_steps": 188, "warmup_steps": 20}
    file.write_text("max_steps: 1875\nwarmup_steps: 10\neval_steps: 20\n")
    assert merge_recipe_changes(file, {"max_steps": 188}, {}, {}) == {
        "max_steps": 188,
        "warmup_steps": 10,
        "eval_steps": 20,
    }


def test_zero_minutes_are_refused_unless_saved(tmp_path: Path) -> None:
    for options, overrides in (({"minutes": 0}, {}), ({}, {"minutes": 0})):
        with pytest.raises(UserError, match=r"minutes is 0, and must be more than 0. Leave it out"):
            merge_recipe_changes(None, options, overrides, {})
    (tmp_path / "saved.yaml").write_text("minutes: 0.0\n")
    assert merge_recipe_changes(tmp_path / "saved.yaml", {"minutes": None}, {}, {}) == {"minutes": 0.0}


def test_a_length_above_the_models_positions_is_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--max-seq-length 513 is longer than the 512 positions .* Choose 512 or less"):
        firth.finetune(home / "run" / "final", "classify", "a.csv", "b.csv", tmp_path / "new", max_seq_length=513)


def test_a_choice_is_set_whole() -> None:
    plain = {"model": {"position": {"kind": "T5Bias", "num_buckets": 8}, "dim": 4}}
    assert flatten_keys(plain) == {"model.position": {"kind": "T5Bias", "num_buckets": 8}, "model.dim": 4}


def test_a_config_sets_the_run(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    position = {"kind": "T5Bias", "num_buckets": 8, "max_distance": 16}
    model = {"num_layers": 1, "dim": 32, "mlp": {"dim": 64}, "position": position}
    file.write_text(yaml.safe_dump({"model": model, "objective": {"kind": "MLM", "rate": 0.3}, "seed": 5, **SIZES}))
    firth.pretrain("bert-tiny", home / "shards", tmp_path / "run", config=file, seed=6)
    recipe = load_recipe(tmp_path / "run" / "recipe.yaml", Recipe)
    assert recipe.model.position == T5Bias(8, 16)
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
    with pytest.raises(UserError, match="CLM needs the architecture decoder"):
        firth.pretrain("bert-tiny", home / "shards", tmp_path / "run", objective="clm", config=file)


# --- what a run reads


def test_prepare_goes_on_only_with_the_same_tokenizer(home: Path, corpus_file: Path, tmp_path: Path) -> None:
    facts = firth.prepare([corpus_file], home / "tokenizer", home / "shards", resume=True)
    assert facts["documents"] == 300
    firth.tokenizer([corpus_file], tmp_path / "other", "wordpiece", 250)
    with pytest.raises(UserError, match="made with another tokenizer"):
        firth.prepare([corpus_file], tmp_path / "other", home / "shards", resume=True)


def test_prepare_notices_text_that_has_changed(
    home: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, shards, text = tmp_path / "a.txt", tmp_path / "s", corpus_file.read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    facts = firth.prepare([file], home / "tokenizer", shards)
    assert firth.prepare([file], home / "tokenizer", shards, resume=True) == facts
    assert "is complete, and the text has not changed." in capsys.readouterr().err
    for change, said in (
        (text + "\n\nOne more document.", "300 documents then, 301 documents now"),
        (text.replace("e", "a", 1), "300 documents then and now, but not the same"),
    ):
        file.write_text(change, encoding="utf-8")
        with pytest.raises(UserError, match=f"is complete, but the text has changed since it was made: {said}"):
            firth.prepare([file], home / "tokenizer", shards, resume=True)
    manifest = read_json(shards / "manifest.json")  # as it was before shards noted their text
    del manifest["metadata"]["source"]
    write_json(shards / "manifest.json", manifest)
    firth.prepare([file], home / "tokenizer", shards, resume=True)
    assert "has no hash of the text" in capsys.readouterr().err


def test_a_mix_is_made_of_text(corpus_file: Path, tmp_path: Path) -> None:
    """One tokenizer for all sources, shards for each, and a resumed run that makes nothing again."""
    texts = corpus_file.read_text(encoding="utf-8").split("\n\n")
    (tmp_path / "a.txt").write_text("\n\n".join(texts[:200]), encoding="utf-8")
    (tmp_path / "b.txt").write_text("\n\n".join(texts[200:]).upper(), encoding="utf-8")
    data = [f"low={tmp_path / 'a.txt'}", f"up={tmp_path / 'b.txt'}"]
    options: dict[str, Any] = {"mix": {"low": 3, "up": 1}, "overrides": TINY, "vocab_size": 400, **SIZES}
    ran = firth.pretrain("gpt2-tiny", data, tmp_path / "run", **options)
    assert [(part["source"], part["share"]) for part in ran["mix"]] == [("low", 0.75), ("up", 0.25)]
    assert all(part["eval_loss"] > 0 for part in ran["mix"])
    shards = [open_shards(tmp_path / "run" / "data" / name) for name in ("low", "up")]
    tokenizer = load_tokenizer(tmp_path / "run" / "tokenizer")
    assert {part.tokenizer.fingerprint for part in shards} == {tokenizer.fingerprint}
    assert [part.manifest["documents"] for part in shards] == [200, len(texts) - 200]
    assert len(tokenizer.encode(texts[0])) < 0.8 * len(texts[0]), "it has seen the first source"
    assert len(tokenizer.encode(texts[-1].upper())) < 0.8 * len(texts[-1]), "and the second"
    times = [(part.folder / "train" / "tokens.bin").stat().st_mtime_ns for part in shards]
    assert firth.pretrain("gpt2-tiny", data, tmp_path / "run", resume=True, **options) == ran
    assert times == [(part.folder / "train" / "tokens.bin").stat().st_mtime_ns for part in shards]
    # shards and text: the text gets the tokenizer of the shards
    both = [f"low={shards[0].folder}", data[1]]
    mixed = firth.pretrain("gpt2-tiny", both, tmp_path / "both", overrides=TINY, **SIZES)
    assert [part["source"] for part in mixed["mix"]] == ["low", "up"]
    assert open_shards(tmp_path / "both" / "data" / "up").tokenizer.fingerprint == tokenizer.fingerprint
    assert load_recipe(tmp_path / "both" / "recipe.yaml", Recipe).sources["low"] == str(shards[0].folder)
    with pytest.raises(UserError, match="Did you mean 'low'"):
        firth.pretrain("gpt2-tiny", data, tmp_path / "wrong", **options | {"mix": {"lwo": 1, "up": 1}})
    assert not (tmp_path / "wrong").exists()


def test_several_shards_are_mixed(home: Path, corpus_file: Path, tmp_path: Path) -> None:
    lines = corpus_file.read_text(encoding="utf-8").split("\n\n")
    (tmp_path / "few.txt").write_text("\n\n".join(lines[:60]), encoding="utf-8")
    firth.prepare([tmp_path / "few.txt"], home / "tokenizer", tmp_path / "few", held_out=0)
    data = [f"all={home / 'shards'}", f"few={tmp_path / 'few'}"]
    ran = firth.pretrain("bert-tiny", data, tmp_path / "run", mix={"all": 3, "few": 1}, overrides=TINY, **SIZES)
    assert [(part["source"], part["share"]) for part in ran["mix"]] == [("all", 0.75), ("few", 0.25)]
    recipe = load_recipe(tmp_path / "run" / "recipe.yaml", Recipe)
    assert recipe.sources == {"all": str(home / "shards"), "few": str(tmp_path / "few")}
    again = firth.pretrain(
        "bert-tiny", data, tmp_path / "run", mix={"all": 3, "few": 1}, overrides=TINY, resume=True, **SIZES
    )
    assert again == ran
    unnamed = [home / "shards", tmp_path / "few"]
    shown = firth.show("bert-tiny", unnamed, 2, output_dir=tmp_path, mix_temperature=0.0, overrides=TINY, **SIZES)
    assert "50.0% of the rows" in Path(shown["page"]).read_text(encoding="utf-8")
    for wrong, options, said in (
        ([*data, home / "shards"], {}, "has no name, the others have"),
        (["all=nowhere"], {}, "nowhere"),
        (["../all=nowhere"], {}, "cannot name a folder"),
        ([data[0], data[0]], {}, "the same name"),
        (home / "shards", {"mix_temperature": 0.3}, "A mix needs several named sources"),
        (data, {"mix": {"all": 1, "fwe": 1}}, "Did you mean 'few'"),
        (data, {"mix_temperature": 0.3, "order": "stream"}, "does not support a mix of sources"),
    ):
        with pytest.raises(UserError, match=said):
            firth.pretrain("bert-tiny", wrong, tmp_path / "other", overrides=TINY, **SIZES, **options)


def test_prepare_marks_what_is_salient(home: Path, corpus_file: Path, tmp_path: Path) -> None:
    facts = firth.prepare([corpus_file], home / "tokenizer", tmp_path / "s", salient="default")
    assert facts["train"]["salient"] > 0
    assert firth.prepare([corpus_file], home / "tokenizer", tmp_path / "s", resume=True, salient="default") == facts
    with pytest.raises(UserError, match="made with --salient default, not left out"):
        firth.prepare([corpus_file], home / "tokenizer", tmp_path / "s", resume=True)
    with pytest.raises(UserError, match="neither 'default' nor"):
        firth.prepare([corpus_file], home / "tokenizer", tmp_path / "other", salient="names")


def test_resuming_with_other_ways_of_reading_is_refused(corpus_file: Path, tmp_path: Path) -> None:
    run: dict[str, Any] = {"overrides": TINY, "vocab_size": 400, **SIZES}
    firth.pretrain("bert-tiny", corpus_file, tmp_path / "run", **run)
    changed = ({"documents": "file"}, {"normalize": "nfkc"}, {"min_words": 3})
    for changes in ({"held_out": 0.2}, {"vocab_size": 200}, {"lowercase": True}, *changed):
        with pytest.raises(UserError, match="text or options differ"):
            firth.pretrain("bert-tiny", corpus_file, tmp_path / "run", resume=True, **run | changes)
    with pytest.raises(UserError, match="text or options differ"):
        firth.pretrain("bert-tiny", [corpus_file, corpus_file], tmp_path / "run", resume=True, **run)
    firth.pretrain("bert-tiny", corpus_file, tmp_path / "run", resume=True, **run, encoding="utf-8", max_words=0)


def test_a_run_with_cleaned_text_goes_on_only_with_the_same(tmp_path: Path) -> None:
    source = {"data": ["a"], "normalize": "nfc"}
    check_same_source(tmp_path / "source.json", source)
    check_same_source(tmp_path / "source.json", source)
    with pytest.raises(UserError, match="normalize: nfc -> None"):
        check_same_source(tmp_path / "source.json", {"data": ["a"]})


def test_a_refused_run_does_not_stand_in_the_way_of_the_next(corpus_file: Path, tmp_path: Path) -> None:
    run: dict[str, Any] = {"overrides": TINY, "vocab_size": 400, **SIZES}
    wrong = {**TINY, "objective.mean_span": 30.0}
    with pytest.raises(UserError, match="fewer than one span of 30"):
        firth.pretrain("t5-tiny", corpus_file, tmp_path / "run", **run | {"overrides": wrong})
    assert not (tmp_path / "run" / "data").exists(), "it is refused before the text is tokenised"
    with pytest.raises(UserError, match=r"text or options differ: tokenizer: .*unigram.*wordpiece.*--overwrite"):
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
    (tmp_path / "out" / "README.md").write_text("mine")  # a model card, which stays
    firth.export(home / "run" / "final", tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "README.md").read_text() == "mine"
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"thesis.txt"):
        firth.export(home / "run" / "final", tmp_path / "out", overwrite=True)


def test_a_check_that_cannot_run_writes_nothing(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"--check needs the package transformers. Install it: .* -m pip install"):
        firth.export(home / "run" / "final", tmp_path / "hf", check=True)
    assert not (tmp_path / "hf").exists()


def test_evaluations_lie_beside_the_checkpoint(home: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"text": "the cat", "label": "a"}\n{"text": "the dog", "label": "b"}\n')
    firth.finetune(home / "run" / "final", "classify", data, data, tmp_path / "tuned", max_steps=1, seeds=1)
    found = firth.evaluate(tmp_path / "tuned" / "final", "classify", data)
    assert Path(found["predictions"]) == tmp_path / "tuned" / "evaluate-classify-d.jsonl" / "predictions.jsonl"
    assert firth.evaluate(tmp_path / "tuned" / "final", data=data) == found, "and again, its own task"
    other = tmp_path / "other" / "d.jsonl"
    other.parent.mkdir()
    other.write_text(data.read_text())
    again = firth.evaluate(tmp_path / "tuned" / "final", data=other)
    assert Path(again["report"]).parent == tmp_path / "tuned" / "evaluate-classify-d.jsonl-2", "another file's"
    # the run can still be resumed
    again = firth.finetune(
        home / "run" / "final", "classify", data, data, tmp_path / "tuned", max_steps=1, seeds=1, resume=True
    )
    assert again["mean"] == pytest.approx(found["metrics"]["accuracy"])


def test_no_evaluation_replaces_another(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(home / "run" / "final", tmp_path / "run" / "final")
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"good": "the cat sat", "bad": "cat the sat"}\n')

    def scores(**settings: Any) -> str:
        found = firth.evaluate(tmp_path / "run" / "final", "minimal-pairs", data, **settings)
        return Path(found["predictions"]).parent.name

    name = "evaluate-minimal-pairs-pairs.jsonl"
    assert [scores(), scores()] == [name, name], "the same again"
    assert "stays" not in capsys.readouterr().err
    first = (tmp_path / "run" / name / "results.json").read_text()
    assert scores(method="pseudo") == f"{name}-2"
    assert f"{name} has other results: these are in" in capsys.readouterr().err
    data.write_text('{"good": "the dog sat", "bad": "dog the sat"}\n')
    assert [scores(), scores()] == [f"{name}-3"] * 2
    assert (tmp_path / "run" / name / "results.json").read_text() == first
    card = write_model_card(tmp_path / "run" / "final", overwrite=True).read_text()
    assert all(f"| {row} | accuracy |" in card for row in ("pairs.jsonl", f"pairs.jsonl ({name}-2)"))
    assert scores(overwrite=True) == name
    assert read_json(tmp_path / "run" / name / "results.json")["data"] == str(data)
    assert "dog" in (tmp_path / "run" / name / "report.html").read_text()


@pytest.fixture(scope="module")
def decoder(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("decoder") / "run"
    firth.pretrain("gpt2-tiny", corpus_file, run, overrides=TINY, vocab_size=300, **SIZES)
    return run / "final"


def test_generate_and_embed_take_one_or_several(home: Path, decoder: Path) -> None:
    model = firth.load(decoder)
    alone, both = firth.generate(model, "the cat", max_new_tokens=3), firth.generate(model, ["the cat", "a dog"])
    assert isinstance(alone, str)
    assert isinstance(both, list)
    assert both[0].startswith(alone)
    assert len(firth.generate(model, "the cat", num_return_sequences=3, temperature=1.0)) == 3
    vectors = firth.embed(home / "run" / "final", ["the cat", "a dog"], normalize=True)
    assert vectors.shape == (2, 32)
    assert firth.embed(home / "run" / "final", "the cat", normalize=True) == pytest.approx(vectors[0], abs=1e-5)
    with pytest.raises(UserError, match="no text"):
        firth.embed(model, [])


def test_equal_prompts_are_drawn_for_differently(decoder: Path) -> None:
    texts = firth.generate(decoder, ["the"] * 20, temperature=1.0, max_new_tokens=8)
    assert len(set(texts)) > 15
    assert texts == firth.generate(decoder, ["the"] * 20, temperature=1.0, max_new_tokens=8)


def test_a_tuned_model_reads_prompts_as_it_learned_to(decoder: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"source": "the cat", "target": "a"}\n{"source": "the dog", "target": "b"}\n')
    tune: dict[str, Any] = {"max_steps": 1, "seeds": 1, "max_seq_length": 32, "max_target_length": 4}
    firth.finetune(decoder, "text-to-text", data, data, tmp_path / "t", prefix="say: ", **tune)
    model, (ids,), usual = load_for_generation(tmp_path / "t" / "final", ["the cat"])
    assert usual == {"max_new_tokens": 4, "num_beams": 1, "length_penalty": 1.0}
    assert isinstance(ids, list)
    assert model.tokenizer is not None
    assert model.tokenizer.decode(ids, skip_special_tokens=False).endswith("say: the cat<delimiter>")
    found = firth.generate(tmp_path / "t" / "final", "the cat")
    assert found == firth.generate(tmp_path / "t" / "final", "the cat", max_new_tokens=4)
    assert "the cat" not in found, "the answer alone"
    assert load_for_generation(model, ["the cat"])[1] == ["the cat"], "a loaded model continues the text"
    data.write_text('{"prompt": "the cat", "response": "a"}\n')
    firth.finetune(decoder, "lm", data, data, tmp_path / "c", **tune)
    model, (ids,), usual = load_for_generation(tmp_path / "c" / "final", ["the cat"])
    assert usual == {}
    assert isinstance(ids, list)
    assert model.tokenizer is not None
    assert model.tokenizer.decode(ids, skip_special_tokens=False).endswith("<|user|> the cat<|assistant|>")
    assert load_for_generation(tmp_path / "c" / "final", ["the cat"], chat=False)[1] == ["the cat"]


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
    assert shown["objective"]["rate"] == shown["expected_rates"]["targets"] == 0.3
    assert shown["counts"]["sample"]["targets"] == pytest.approx(0.3, abs=0.03)
    recipe = load_recipe(tmp_path / "run" / "recipe.yaml", Recipe)
    assert to_dict(recipe)["objective"] == shown["objective"]


def test_a_look_that_is_stopped_leaves_nothing(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def press(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("firth.lab.show.build_batch_preview", press)
    with pytest.raises(KeyboardInterrupt):
        firth.show("bert-tiny", corpus_file, vocab_size=300, output_dir=tmp_path / "out", **SIZES)
    assert list(tmp_path.iterdir()) == []


def test_a_named_objective_brings_what_it_needs(home: Path, tmp_path: Path) -> None:
    firth.pretrain("bert-tiny", home / "shards", tmp_path / "run", objective="span", overrides=TINY, **SIZES)
    recipe = load_recipe(tmp_path / "run" / "recipe.yaml", Recipe)
    assert recipe.objective == OBJECTIVES["span"]
    assert recipe.model.get_extra("boundary") is not None
    with pytest.raises(UserError, match=r"Unknown objective 'spann'. Did you mean 'span'\?"):
        firth.pretrain("bert-tiny", home / "shards", tmp_path / "other", objective="spann", **SIZES)
    assert {m["name"]: m["objective"] for m in firth.models()}["t5-tiny"] == "span-corruption"


def test_a_checkpoint_keeps_its_objective(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its kind and its settings; a setting changes it, and --objective replaces it."""

    def trained(model: Path | str, name: str, objective: str | None = None, **changes: Any) -> Any:
        overrides = (TINY if model == "bert-tiny" else {}) | changes
        firth.pretrain(model, home / "shards", tmp_path / name, objective=objective, overrides=overrides, **SIZES)
        return load_recipe(tmp_path / name / "recipe.yaml", Recipe).objective

    changed = replace(OBJECTIVES["whole-word"], rate=0.25)  # type: ignore[type-var]
    assert trained("bert-tiny", "start", "whole-word", **{"objective.rate": 0.25}) == changed
    final = tmp_path / "start" / "final"
    assert "objective:" not in capsys.readouterr().err
    assert trained(final, "more") == changed
    assert f"objective: MLM, as {final} was trained with; --objective chooses another" in capsys.readouterr().err
    assert trained(final, "rate", **{"objective.rate": 0.4}) == replace(changed, rate=0.4)  # type: ignore[type-var]
    assert trained(final, "named", "mlm") == OBJECTIVES["mlm"]
    assert "was trained with" not in capsys.readouterr().err.split("--objective chooses another")[-1]
    trained(home / "run" / "final", "default")
    assert "was trained with" not in capsys.readouterr().err, "the family's own needs no word"


def test_a_model_that_goes_on_reads_other_rows_first(home: Path, tmp_path: Path) -> None:
    """With the seed of the run before it would read the same once more; one that is named stands."""
    runs = [home / "run"]
    for name in ("again", "more"):
        firth.pretrain(runs[-1] / "final", home / "shards", tmp_path / name, **SIZES)
        runs.append(tmp_path / name)
    firth.pretrain(runs[0] / "final", home / "shards", tmp_path / "named", seed=0, **SIZES)
    runs.append(tmp_path / "named")
    assert [load_recipe(run / "recipe.yaml", Recipe).seed for run in runs] == [0, 1, 2, 0]
    data = [read_log(run / "log.jsonl")[0]["data"] for run in runs]
    assert len(set(data[:3])) == 3
    assert data[3] == data[0]
    firth.pretrain(runs[0] / "final", home / "shards", tmp_path / "again", resume=True, **SIZES)


def test_a_run_chooses_its_batch_and_keeps_it(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """4,096 tokens in a run of few steps on a CPU; rows that are given stay as they are, and so does their rate."""
    run: dict[str, Any] = {"overrides": TINY, "max_steps": 1, "max_seq_length": 32, "device": "cpu"}
    firth.pretrain("bert-tiny", home / "shards", tmp_path / "run", **run)
    recipe, given = (load_recipe(folder / "recipe.yaml", Recipe) for folder in (tmp_path / "run", home / "run"))
    assert (recipe.global_batch_tokens, recipe.global_batch_size, recipe.gradient_accumulation_steps) == (4096, 128, 1)
    assert (given.global_batch_tokens, given.per_device_train_batch_size) == (0, 4)
    assert recipe.learning_rate == given.learning_rate, "tuned with this batch"
    said = capsys.readouterr().err
    assert "global batch: 4,096 tokens, 128 rows of 32 (small, as a short run" in said
    assert "a step computes 1 micro-batch of 128 rows: about" in said
    firth.pretrain("bert-tiny", home / "shards", tmp_path / "run", resume=True, **run)
    assert "already finished" in capsys.readouterr().err

    run |= {"per_device_train_batch_size": "auto", "global_batch_tokens": 64}
    firth.pretrain("bert-tiny", home / "shards", tmp_path / "small", **run)
    small = load_recipe(tmp_path / "small" / "recipe.yaml", Recipe)
    assert (small.global_batch_size, small.learning_rate) == (2, recipe.learning_rate / 2)
    dry = firth.pretrain("bert-tiny", home / "shards", tmp_path / "none", dry_run=True, **run)
    assert (dry["tokens_per_step"], dry["rows_per_step"], dry["learning_rate"]) == (64, 2, small.learning_rate)


@pytest.mark.parametrize("name", [name for name in firth.__all__ if name != "UserError"])
def test_docstrings_explain_all_arguments(name: str) -> None:
    function = getattr(firth, name)
    text = inspect.getdoc(function) or ""
    if "the arguments of `pretrain`" in text:
        text += inspect.getdoc(firth.pretrain) or ""
    arguments = inspect.signature(function).parameters
    missing = [argument for argument in arguments if not re.search(rf"\b{argument}\b", text)]
    assert missing == []
