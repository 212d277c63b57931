"""Adapting a checkpoint: what is measured, what is trained on, what is forgotten, and an exact resume."""

from __future__ import annotations

import json
import re
import shlex
import zlib
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from firth import api
from firth.cli.main import app
from firth.core.console import program
from firth.core.errors import UserError
from firth.evaluate.export import compare_with_transformers
from firth.lab import adapt_texts
from firth.lab.adapt import choose_new_tokens
from firth.lab.adapt_texts import CorpusText, ReplayDocuments, ShardText, find_own_text, sample_held_out
from firth.lab.check_commands import adapt_commands
from firth.models.hf.config_io import read_stored_objective
from firth.text import Corpus
from firth.tokens import load_tokenizer, open_shards, prepare, train_tokenizer
from firth.train import dataloader

SYLLABLES = ["ki", "ta", "bu", "mwa", "na", "shu", "le", "ni", "wa", "zo", "ngo", "re"]
TINY = {"model.num_layers": 1, "model.dim": 16, "model.num_heads": 2}
RUN: dict[str, Any] = {
    "held_out": 0.2,
    "max_steps": 8,
    "per_device_train_batch_size": 4,
    "save_steps": 2,
    "eval_steps": 8,
    "eval_rows": 16,
    "async_save": False,
    "device": "cpu",
}


def foreign_word(match: re.Match[str]) -> str:
    code = zlib.crc32(match[0].lower().encode())
    return "".join(SYLLABLES[code // 12**i % 12] for i in range(2 + len(match[0]) % 3))


@pytest.fixture(scope="module")
def domain(corpus_file: Path) -> Path:
    """The corpus in a language of its own: each word has another one in its place."""
    path = corpus_file.with_name("domain.txt")
    path.write_text(re.sub(r"\w+", foreign_word, corpus_file.read_text(encoding="utf-8")), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def decoder(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapt") / "decoder"
    overrides = {**TINY, "model.mlp.dim": 32, "max_seq_length": 64}
    options = {"vocab_size": 400, "held_out": 0.2, "max_steps": 4, "per_device_train_batch_size": 4, "device": "cpu"}
    api.pretrain("llama-tiny", corpus_file, folder, overrides=overrides, **options)
    return folder / "final"


@pytest.fixture(scope="module")
def encoder(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapt") / "encoder"
    options = {"vocab_size": 400, "max_steps": 2, "per_device_train_batch_size": 4, "device": "cpu"}
    overrides = {**TINY, "model.mlp.dim": 32}
    api.pretrain("bert-tiny", corpus_file, folder, objective="whole-word", overrides=overrides, **options)
    return folder / "final"


@pytest.fixture(scope="module")
def adapted(decoder: Path, domain: Path) -> dict[str, Any]:
    """A decoder with 40 new tokens, which replays the text of its own run."""
    output = decoder.parents[1] / "adapted"
    return api.adapt(decoder, domain, output, new_tokens=40, replay_share=0.25, **RUN)


def test_both_texts_are_measured_before_and_after(adapted: dict[str, Any], decoder: Path, corpus_file: Path) -> None:
    assert adapted["domain"]["after"]["bits_per_byte"] < adapted["domain"]["before"]["bits_per_byte"]
    assert adapted["domain"]["after"]["tokens_per_word"] < adapted["domain"]["before"]["tokens_per_word"]
    general = adapted["general"]
    assert adapted["forgetting"] == general["change"]
    assert general["change"] == general["after"]["bits_per_byte"] - general["before"]["bits_per_byte"]
    assert general["interval"] > 0
    assert adapted["new_tokens"]["added"] == 40
    assert adapted["replay"] == {"share": 0.25, "source": str(corpus_file)}
    shares = {source["source"]: source["share"] for source in adapted["mix"]}
    assert shares["general"] == pytest.approx(0.25, abs=0.05)
    folder = Path(adapted["output_dir"])
    assert json.loads((folder / "results.json").read_text())["domain"] == adapted["domain"]
    page = (folder / "report.html").read_text()
    assert "bits per byte" in page
    assert adapted["new_tokens"]["best"][0]["token"] in page
    assert "max_seq_length: 64" in (folder / "recipe.yaml").read_text(), "the row length of the checkpoint's run"


def test_old_text_keeps_its_ids_and_transformers_its_logits(adapted: dict[str, Any], decoder: Path) -> None:
    pytest.importorskip("transformers")
    final = Path(adapted["output_dir"]) / "final"
    old, new = load_tokenizer(decoder), load_tokenizer(final)
    assert new.vocab.size == old.vocab.size + 40
    assert new.encode("The cat slept by the river.") == old.encode("The cat slept by the river.")
    assert compare_with_transformers(final).max_difference < 1e-4


def test_a_stopped_run_resumes_to_equal_bits(
    adapted: dict[str, Any],
    decoder: Path,
    domain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_batch = dataloader.make_batch

    def stop(recipe: Any, dataset: Any, rows: Any, vocab: Any, step: Any = None, progress: float = 0.0) -> Any:
        if step == 5:
            raise KeyboardInterrupt
        return make_batch(recipe, dataset, rows, vocab, step, progress)

    settings = {"new_tokens": 40, "replay_share": 0.25, **RUN}
    with monkeypatch.context() as patched:
        patched.setattr(dataloader, "make_batch", stop)
        with pytest.raises(KeyboardInterrupt):
            api.adapt(decoder, domain, tmp_path / "run", **settings)
    assert not (tmp_path / "run" / "final").exists()
    state = tmp_path / "run" / "adapt.json"
    whole = state.read_text()
    state.write_text(whole.replace('"nats": [\n', '"nats": [\n1', 1))
    with monkeypatch.context() as patched:  # a damaged file is not believed: the model is measured again
        patched.setattr(dataloader, "make_batch", stop)
        with pytest.raises(KeyboardInterrupt):
            api.adapt(decoder, domain, tmp_path / "run", resume=True, **settings)
    assert "adapt.json" in capsys.readouterr().err
    volatile = {"seconds": 0, "content_sha256": ""}
    assert json.loads(state.read_text()) | volatile == json.loads(whole) | volatile
    with monkeypatch.context() as patched:  # what was measured before is not measured again
        patched.setattr("firth.lab.adapt.choose_new_tokens", None)
        again = api.adapt(decoder, domain, tmp_path / "run", resume=True, **settings)
    assert again["domain"] == adapted["domain"]
    assert again["general"] == adapted["general"]
    weights = [
        load_file(Path(folder) / "final" / "model.safetensors") for folder in (adapted["output_dir"], tmp_path / "run")
    ]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    with pytest.raises(UserError, match=r"replay_share: 0\.25 -> 0\.5"):
        api.adapt(decoder, domain, tmp_path / "run", resume=True, **{**settings, "replay_share": 0.5})


def test_an_encoder_without_general_text(
    encoder: Path, domain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = tmp_path / "alone"
    alone.symlink_to(encoder)  # a checkpoint without its run
    assert read_stored_objective(alone)["masking"]["kind"] == "WholeWordMasking"
    result = api.adapt(alone, domain, tmp_path / "run", new_tokens=0, **RUN)
    assert "forgetting cannot be measured" in capsys.readouterr().err
    assert result["forgetting"] is None
    assert "general" not in result
    assert result["domain"]["before"]["method"] == "hidden words"
    assert result["domain"]["before"]["tokens_per_word"] == result["domain"]["after"]["tokens_per_word"]
    assert "WholeWordMasking" in (tmp_path / "run" / "recipe.yaml").read_text()
    assert not (tmp_path / "run" / "start-adapted").exists()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "forgetting was not measured" in page
    assert "the difference is the way of counting" in page
    assert "Tokenizers can be compared" not in page


def test_tokens_are_added_where_they_pay(domain: Path, corpus_file: Path) -> None:
    """The tokenizer has most words of the corpus: new tokens save much on the domain, and little there."""
    tokenizer, choices = train_tokenizer(Corpus(corpus_file).texts(), "byte-bpe", 600), []
    for path in (domain, corpus_file):
        text = CorpusText(Corpus(path), 0.2)
        choices.append(choose_new_tokens(tokenizer, text, sample_held_out(text, 10_000, ""), None))
    assert choices[0].tokens
    assert choices[0].saved_share > 0.1
    assert choices[0].reason.endswith("added")
    assert not choices[1].tokens
    assert choices[1].tokenizer is tokenizer
    assert "not added" in choices[1].reason or "split often" in choices[1].reason
    assert not choose_new_tokens(tokenizer, text, sample_held_out(text, 1, ""), 0).tokens


def test_the_text_of_a_run_is_found(decoder: Path, corpus_file: Path, tmp_path: Path) -> None:
    found = find_own_text(decoder)
    assert found is not None
    assert found[1] == str(corpus_file)
    assert isinstance(found[0], CorpusText)
    assert found[0].held_out == 0.2
    shards = open_shards(decoder.parent / "data")
    assert shards.held_out is not None
    decoded = ShardText([shards])
    assert [d.text for d, held_out in decoded if held_out] == [d.text for d, held_out in found[0] if held_out]
    (tmp_path / "final").mkdir()
    assert find_own_text(tmp_path / "final") is None
    (tmp_path / "recipe.yaml").write_text(f"data: {decoder.parent / 'data'}\n")
    from_shards = find_own_text(tmp_path / "final")
    assert from_shards is not None
    assert isinstance(from_shards[0], ShardText)
    replayed = {d.text for d in ReplayDocuments(from_shards[0], 1.0)}
    assert replayed == {d.text for d, held_out in from_shards[0] if not held_out}


def test_a_source_of_somebody_else(decoder: Path, corpus_file: Path, tmp_path: Path) -> None:
    """A file of another size is not what the run has read; wrong types and circles are no tracebacks."""
    (tmp_path / "final").mkdir()
    file, size = tmp_path / "source.json", corpus_file.stat().st_size
    facts = {"data": [str(corpus_file)], "bytes": size}

    def found(**changes: Any) -> Any:
        file.write_text(json.dumps(facts | changes))
        return find_own_text(tmp_path / "final")

    assert found()[1] == str(corpus_file)
    for wrong in (size + 1, None):
        assert found(bytes=wrong) is None
    circle = found(general_from=str(tmp_path))
    assert circle[1] == str(corpus_file), "each run once"
    mistakes: dict[str, Any] = {"data": 3, "general": {"a": 1}, "general_from": 5, "held_out": "x", "encoding": 7}
    for name, value in mistakes.items():
        with pytest.raises(UserError, match=rf"source\.json: {name}"):
            found(**{name: value})
    file.unlink()
    for recipe in ("sources: 3", "data: [a, b]", "sources: {a: 1}"):
        (tmp_path / "recipe.yaml").write_text(recipe)
        assert find_own_text(tmp_path / "final") is None


def test_a_sample_is_a_function_of_the_text(corpus_file: Path, tmp_path: Path) -> None:
    documents = corpus_file.read_text(encoding="utf-8").strip().split("\n\n")
    (tmp_path / "reversed.txt").write_text("\n\n".join([*reversed(documents), documents[0]]), encoding="utf-8")
    samples = [
        sample_held_out(CorpusText(Corpus(path), 0.5), 4000, "") for path in (corpus_file, tmp_path / "reversed.txt")
    ]
    assert samples[0].texts == samples[1].texts
    assert 4000 <= samples[0].num_bytes < 4600
    chosen = [d.text for d in ReplayDocuments(CorpusText(Corpus(corpus_file), 0.2), 0.3)]
    held_out = [d.text for d, is_held_out in CorpusText(Corpus(corpus_file), 0.2) if is_held_out]
    assert set(held_out) < set(chosen)
    assert 0.2 < (len(chosen) - len(held_out)) / (len(documents) - len(held_out)) < 0.4


def test_a_long_document_is_measured_on_the_block_that_prepare_holds_out(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("".join(f"line {i} of a long text\n" for i in range(4000)), encoding="utf-8")
    text = CorpusText(Corpus(tmp_path / "long.txt", documents="file"), 0.1)
    tokenizer = train_tokenizer((d.text for d in text.corpus), "byte-bpe", 300)
    prepare(ReplayDocuments(text, 1.0), tokenizer, tmp_path / "shards", text.held_out)
    shards = open_shards(tmp_path / "shards")
    assert shards.held_out is not None
    (measured,) = (d.text for d, held_out in text if held_out)
    assert tokenizer.decode(shards.held_out.tokens.tolist()).split() == measured.split()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"model_type": "firth-ngram"}, "n-gram"),
    ],
)
def test_wrong_checkpoints(decoder: Path, domain: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for file in decoder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message):
        api.adapt(folder, domain, tmp_path / "run", **RUN)
    assert not (tmp_path / "run").exists()


def test_wrong_arguments(decoder: Path, domain: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.txt"
    small.write_text("One document.\n\nAnother one.\n")
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"checkpoint": tmp_path / "missing"}, "not a checkpoint folder"),
        ({"checkpoint": tmp_path / "lora"}, "adapter"),
        ({"checkpoint": "bert-tiny"}, "not a checkpoint folder"),
        ({"data": decoder.parent / "data"}, "holds shards"),
        ({"data": "-"}, "standard input"),
        ({"data": tmp_path / "missing.txt"}, "missing.txt"),
        ({"data": small}, "--data: "),
        ({"new_tokens": "many"}, "neither a whole number nor auto"),
        ({"replay_share": 1.0}, "--replay-share is 1"),
        ({"held_out": 0.0}, "--held-out is 0"),
        ({"learning_rate": -1.0}, "learning_rate"),
    ]
    for change, message in wrong:
        given = {"checkpoint": decoder, "data": domain, "output_dir": tmp_path / "run", **RUN} | change
        with pytest.raises(UserError, match=message):
            api.adapt(**given)
        assert not (tmp_path / "run").exists()


def test_the_command_that_check_advises(
    decoder: Path, domain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`firth check` names the command for a checkpoint, and not for a tokenizer; it runs, here as a dry run."""
    (line,) = adapt_commands(Corpus([domain]), str(decoder))
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line.removeprefix(shlex.join(program())), comments=True)
    done = CliRunner().invoke(app, [*words, "--dry-run", "--json", "--max-steps", "8"], catch_exceptions=False)
    planned = json.loads(done.stdout.splitlines()[-1])
    assert (planned["dry_run"], planned["steps"], planned["new_tokens"]) == (True, 8, "auto")
    assert not (tmp_path / "adapted").exists()
    load_tokenizer(decoder).save(tmp_path / "tok")
    assert adapt_commands(Corpus([domain]), str(tmp_path / "tok")) == []


def test_a_long_document_is_cut() -> None:
    assert len(adapt_texts.cut_text("word " * 10_000)) < adapt_texts.MAX_DOCUMENT_BYTES
