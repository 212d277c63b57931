"""ELMo, ULMFiT and biLSTMs with the usual commands: pretrain, resume, fine-tune, evaluate, embed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from firth import api
from firth.core.errors import UserError
from firth.evaluate import load_word_vectors, read_vectors
from firth.generate import generate_ids
from firth.generate.config import GenerationConfig
from firth.models import get_preset, load_model, make_model, read_config
from firth.models.config import ClassificationHead, FeatureEncoderConfig
from firth.models.presets import bag_of_words
from firth.recipes import finetuning_defaults, named_finetuning_defaults, pretraining_recipe
from firth.tasks.registry import make_task
from firth.text import Example
from firth.tokens import load_tokenizer, open_shards, train_tokenizer
from firth.train import Recipe, TrainingConfig, load_recipe
from firth.train.batch_size import MemoryTrial
from firth.train.optim import learning_rate_at
from firth.train.pretrain import build_pretrain_model
from firth.train.unfreeze import FreezeSchedule, trainable_parameters

SMALL: dict[str, Any] = {"per_device_train_batch_size": 4, "max_seq_length": 16, "eval_steps": 4, "save_steps": 4}
NARROW = {
    "ulmfit-tiny": {"model.dim": 32, "model.recurrent.hidden_size": 48},
    "elmo-tiny": {
        "model.dim": 16,
        "model.head.dim": 8,
        "model.recurrent.proj_size": 8,
        "model.recurrent.hidden_size": 12,
    },
}


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences about animals and places, enough for a few steps."""
    draw = np.random.default_rng(0)
    words = [
        "the",
        "a",
        "big",
        "small",
        "red",
        "cat",
        "dog",
        "fox",
        "horse",
        "river",
        "garden",
        "forest",
        "ran",
        "sat",
        "near",
        "and",
        "then",
        "home",
    ]
    documents = [" ".join(draw.choice(words, 30)) + "." for _ in range(40)]
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(documents), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def run_of(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A pretraining run of eight steps, run once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("run") / name
            options = {**SMALL, "max_steps": 8, "save_total_limit": 0, "overrides": NARROW[name]}
            api.pretrain(name, text, made[name], **options)
        return made[name]

    return get


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def scores(result: dict[str, Any]) -> dict[str, float]:
    (one,) = result["scores"]
    return dict(one)


# --- pretraining ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NARROW)
def test_a_stopped_run_resumes_bit_exactly(
    name: str, run_of: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    whole, again = run_of(name), tmp_path / "again"
    shutil.copytree(whole, again)
    for gone in ("checkpoint-8", "final"):
        shutil.rmtree(again / gone)
    (again / "results.json").unlink()
    carry = load_file(again / "checkpoint-4" / "training" / "recurrent_state.safetensors")
    assert len(carry) == read_config(whole / "final").num_layers
    api.pretrain(name, text, again, resume=True, **SMALL, max_steps=8, save_total_limit=0, overrides=NARROW[name])
    theirs, ours = (load_file(folder / "final" / "model.safetensors") for folder in (whole, again))
    assert theirs.keys() == ours.keys()
    assert all(theirs[key].equal(ours[key]) for key in theirs)
    assert (whole / "log.jsonl").read_text() == (again / "log.jsonl").read_text()


def test_stream_order_is_the_default() -> None:
    assert pretraining_recipe(get_preset("ulmfit-base")).order == "stream"
    assert pretraining_recipe(get_preset("ulmfit-base")).max_seq_length == 70
    assert type(pretraining_recipe(get_preset("elmo-base")).objective).__name__ == "BiLM"
    assert pretraining_recipe(get_preset("bilstm-tiny")).order == "packed"


@pytest.mark.parametrize(
    ("name", "objective", "said"),
    [
        ("ulmfit-tiny", "prefix-lm", "its objective is clm"),
        ("elmo-tiny", "mlm", "bilm"),
        ("bilstm-tiny", "bilm", "bilm"),
        ("bilstm-tiny", "unilm", "is bidirectional"),
    ],
)
def test_unsupported_objectives_raise(name: str, objective: str, said: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        api.pretrain(name, text, tmp_path / "run", objective=objective, max_steps=1)


@pytest.mark.parametrize("name", NARROW)
def test_evaluated_and_embedded(name: str, run_of: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    final = run_of(name) / "final"
    found = api.evaluate(final, "perplexity", text, tmp_path / "perplexity")
    assert 5 < found["metrics"]["perplexity"] < 30
    vectors = api.embed(final, ["the cat ran", "the zebra ran", "the gnu ran"])
    assert vectors.shape == (3, read_config(final).dim)
    assert np.allclose(vectors[1], vectors[2]) == (name == "ulmfit-tiny"), "only ELMo reads words it has never met"


def test_the_micro_batch_of_elmo_is_measured(run_of: Callable[[str], Path]) -> None:
    """A trial step spells words by the tokenizer of the shards."""
    run = run_of("elmo-tiny")
    trial = MemoryTrial(load_recipe(run / "recipe.yaml", Recipe), open_shards(run / "data"), torch.device("cpu"))
    assert 0 < trial.saved_bytes(2) < trial.saved_bytes(4)


def test_elmo_word_vectors_come_from_characters(
    run_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firth.evaluate.vectors.CHAR_ENCODER_BATCH_WORDS", 5)
    final = run_of("elmo-tiny") / "final"
    model = load_model(final)
    assert model.tokenizer is not None
    found = load_word_vectors(model)
    with torch.no_grad():
        right = model.embed.embed_unprojected(torch.tensor([model.tokenizer.encode("cat river")]))[0]
    assert_close(torch.from_numpy(found.vectors_ND[[found.index_of_word["cat"], found.index_of_word["river"]]]), right)
    assert len(api.similar(final, "cat", top=3)) == 3
    for file in api.export(final, tmp_path / "out", format="word2vec")["files"]:
        assert read_vectors(file).words == found.words
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("word1\tword2\tscore\ncat\tdog\t9\ncat\triver\t3\nfox\tgarden\t1\n")
    assert api.evaluate(final, "word-similarity", pairs, tmp_path / "scores")["unknown"] == 0


def test_decoding_from_the_state_equals_reading_all_again(run_of: Callable[[str], Path]) -> None:
    model = load_model(run_of("ulmfit-tiny") / "final")
    assert model.tokenizer is not None
    prompts = [model.tokenizer.encode(prompt) for prompt in ("the cat", "a big red fox ran", "near")]
    for decoding in (
        GenerationConfig(max_new_tokens=6, temperature=0.0),
        GenerationConfig(max_new_tokens=6, num_beams=3),
    ):
        once, again = (
            generate_ids(model, prompts, generation_config=decoding, use_cache=cache) for cache in (True, False)
        )
        assert once == again


# --- ULMFiT ---------------------------------------------------------------------------------------------------------


def test_slanted_triangular_equals_the_papers_equation() -> None:
    """Equation 3: cut = T * cut_frac; p rises to 1 at the cut, falls to 0; the rate is max * (1 + p * 31) / 32."""
    steps, cut, highest = 200, 20, 0.01
    training = TrainingConfig(
        max_steps=steps, warmup_steps=cut, learning_rate=highest, lr_scheduler_type="slanted-triangle"
    )
    for t in (0, 1, 10, 19, 20, 21, 100, 199):
        p = t / cut if t < cut else 1 - (t - cut) / (cut * (1 / (cut / steps) - 1))
        assert learning_rate_at(t, training) == pytest.approx(highest * (1 + p * 31) / 32)


def test_gradual_unfreezing() -> None:
    """One more layer per epoch, and rates that fall by 2.6 from layer to layer (sections 3.2 and 3.3)."""
    recipe = finetuning_defaults(get_preset("ulmfit-base"))
    assert recipe["unfreeze_every"] == -1
    assert 1 / recipe["layer_decay"] == pytest.approx(2.6)
    model = make_model(replace(get_preset("ulmfit-tiny"), head=ClassificationHead(("good", "bad"), pool="last")))
    depth = [
        set(trainable_parameters(model, FreezeSchedule(1 / 2.6, "none", 10), step).values())
        for step in (0, 10, 20, 30, 40)
    ]
    assert depth == [{4}, {3, 4}, {2, 3, 4}, {1, 2, 3, 4}, {0, 1, 2, 3, 4}]


def test_ulmfit_stages_in_both_directions(
    run_of: Callable[[str], Path], toy: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    """General text, the task's text, the task; the same reversed; the ensemble of both."""
    quick: dict[str, Any] = {
        "seeds": 1,
        "max_steps": 60,
        "unfreeze_every": 2,
        "layer_decay": 1.0,
        "per_device_train_batch_size": 16,
        "device": "cpu",
    }
    tuned = {}
    for way in ("forward", "backward"):
        general = run_of("ulmfit-tiny")
        if way == "backward":
            api.tokenizer([text], tmp_path / "back", kind="word", vocab_size=100, reverse=True)
            general = tmp_path / "general"
            options = {**SMALL, "max_steps": 8, "overrides": NARROW["ulmfit-tiny"]}
            api.pretrain("ulmfit-tiny", text, general, tokenizer=tmp_path / "back", **options)
        out = tmp_path / way
        own = write_jsonl(tmp_path / "own.jsonl", [{"text": f"I saw the cat {i} today " * 12} for i in range(30)])
        found = api.finetune(
            general / "final", "classify", toy["train"], toy["dev"], out,
            recipe="ulmfit", target_text=[own, text], **quick,
        )  # fmt: skip
        assert scores(found)["accuracy"] > 0.6
        assert (tmp_path / f"{way}-target" / "final").is_dir()
        second = load_recipe(tmp_path / f"{way}-target" / "recipe.yaml", Recipe)
        assert second.device == "cpu", "all stages are there"
        assert second.learning_rate == 4e-3, "the rate of the paper, section 4.1"
        assert {"saw", "today"} <= load_tokenizer(out / "final").backend.get_vocab().keys()
        tuned[way] = out / "final"
    assert (
        load_tokenizer(tuned["backward"]).encode("the cat") == load_tokenizer(tuned["backward"]).encode("cat the")[::-1]
    )
    assert load_tokenizer(tuned["backward"]).is_reversed
    alone = [
        api.evaluate(folder, data=toy["dev"], output_dir=tmp_path / f"alone-{way}") for way, folder in tuned.items()
    ]
    both = api.evaluate(tuned["forward"], data=toy["dev"], ensemble=[tuned["backward"]])
    assert both["ensemble"] == [str(tuned["backward"])]
    single = api.evaluate(tuned["forward"], data=toy["dev"])
    assert Path(single["report"]).parent != Path(both["report"]).parent, "neither replaces the other"
    assert "ensemble" not in single
    rows = [
        [json.loads(line)["scores"] for line in Path(r["predictions"]).read_text().splitlines()] for r in (*alone, both)
    ]
    for first, second, mean in zip(*rows, strict=True):
        assert mean == {k: pytest.approx((first[k] + second[k]) / 2) for k in mean}


def test_new_words_of_the_target_are_appended_and_training_on_them_is_exact(
    run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Old text keeps its ids, new vectors start at the mean of the old ones, and a stopped run resumes bit-exactly."""
    general = run_of("ulmfit-tiny") / "final"
    own = tmp_path / "own.txt"
    own.write_text("\n\n".join(f"the zebra saw a red gnu {i} near home ." * 8 for i in range(30)), encoding="utf-8")
    options: dict[str, Any] = {**SMALL, "max_steps": 8, "save_total_limit": 0, "add_words": True}
    api.pretrain(general, own, tmp_path / "whole", **options)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for gone in ("checkpoint-8", "final"):
        shutil.rmtree(tmp_path / "again" / gone)
    (tmp_path / "again" / "results.json").unlink()
    api.pretrain(general, own, tmp_path / "again", resume=True, **options)
    whole, again = (load_file(tmp_path / run / "final" / "model.safetensors") for run in ("whole", "again"))
    assert all(whole[key].equal(again[key]) for key in whole)

    before, after = load_tokenizer(general), load_tokenizer(tmp_path / "whole" / "final")
    assert {"zebra", "gnu"} <= after.backend.get_vocab().keys() - before.backend.get_vocab().keys()
    for text in ("the red fox sat near a river.", "unheard the words", "<unk> </s>"):
        assert after.encode(text) == before.encode(text)
    assert after.encode("the zebra")[1] >= before.vocab.size
    recipe = load_recipe(tmp_path / "whole" / "recipe.yaml", Recipe)
    model, old = build_pretrain_model(recipe, after), load_model(general)
    assert model.config.vocab_size == after.vocab.size
    rows, size = model.embed.tokens.weight, before.vocab.size
    assert_close(rows[:size], old.embed.tokens.weight)
    assert_close(rows[size:], rows[:size].mean(0).expand(after.vocab.size - size, -1))


def test_where_no_words_can_be_added(run_of: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="extends the vocabulary of a checkpoint"):
        api.pretrain("ulmfit-tiny", text, tmp_path / "run", add_words=True)
    with pytest.raises(UserError, match="is for word tokenizers"):
        api.pretrain(run_of("elmo-tiny") / "final", text, tmp_path / "run", add_words=True)
    with pytest.raises(UserError, match="needs text"):
        api.pretrain(run_of("ulmfit-tiny") / "final", run_of("ulmfit-tiny") / "data", tmp_path / "run", add_words=True)


def test_a_reversed_tokenizer_reads_from_the_end() -> None:
    plain = train_tokenizer(["the cat sat"] * 2, "word", 20)
    back = plain.to_reversed()
    assert back.encode("the cat sat") == plain.encode("sat cat the")
    assert back.decode(back.encode("the cat sat")) == "the cat sat"
    assert back.fingerprint != plain.fingerprint
    with pytest.raises(UserError, match="reads backward"):
        make_task("tag", [Example(0, ("the",), ("O",))], back, get_preset("bilstm-tiny"), finetune_defaults())  # type: ignore[arg-type]


def finetune_defaults() -> Any:
    from firth.tasks import FinetuneRecipe

    return FinetuneRecipe()


def test_shards_of_a_reversed_model_are_reversed(text: Path, tmp_path: Path) -> None:
    api.tokenizer([text], tmp_path / "there", kind="word", vocab_size=100)
    api.tokenizer([text], tmp_path / "back", kind="word", vocab_size=100, reverse=True)
    tokens = []
    for way in ("there", "back"):
        api.prepare([text], tmp_path / way, tmp_path / f"{way}-shards", held_out=0.0, workers=1)
        shards = open_shards(tmp_path / f"{way}-shards").train
        tokens.append([shards.tokens[a:b].tolist() for a, b in zip(shards.offsets, shards.offsets[1:], strict=False)])
    assert tokens[1] == [document[::-1] for document in tokens[0]]


def test_a_sequence_autoencoder_starts_a_classifier(toy: dict[str, Path], text: Path, tmp_path: Path) -> None:
    """Dai & Le 2015: read and write with one LSTM; then their head on the state of the last word. Resume is exact."""
    options: dict[str, Any] = {**SMALL, "max_seq_length": 32, "max_steps": 8, "save_total_limit": 0}
    options |= {"objective": "autoencoder", "overrides": NARROW["ulmfit-tiny"]}
    api.pretrain("ulmfit-tiny", text, tmp_path / "sa", **options)
    recipe = load_recipe(tmp_path / "sa" / "recipe.yaml", Recipe)
    assert (type(recipe.objective).__name__, recipe.order) == ("SequenceAutoencoder", "packed")
    shutil.copytree(tmp_path / "sa", tmp_path / "again")
    for gone in ("checkpoint-8", "final"):
        shutil.rmtree(tmp_path / "again" / gone)
    (tmp_path / "again" / "results.json").unlink()
    api.pretrain("ulmfit-tiny", text, tmp_path / "again", resume=True, **options)
    whole, again = (load_file(tmp_path / run / "final" / "model.safetensors") for run in ("sa", "again"))
    assert all(whole[key].equal(again[key]) for key in whole)

    quick: dict[str, Any] = {"seeds": 1, "max_steps": 2, "max_seq_length": 32}
    api.finetune(
        tmp_path / "sa" / "final", "classify", toy["train"], toy["dev"], tmp_path / "run", recipe="dai-le", **quick
    )
    head = read_config(tmp_path / "run" / "final").head
    assert isinstance(head, ClassificationHead)
    assert (head.pool, head.has_pooler, head.pooler_dim, head.has_norm) == ("last", True, 512, False)
    assert (head.activation, head.dropout) == ("relu", 0.5)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("gpt2-tiny", {}, "would copy the text through attention"),
        ("ulmfit-tiny", {"order": "stream"}, "remove order=stream"),
    ],
)
def test_who_cannot_be_an_autoencoder(name: str, fields: dict[str, Any], said: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        api.pretrain(name, text, tmp_path / "run", objective="autoencoder", max_steps=1, **fields)


def test_dai_and_le_train_all_layers_at_once() -> None:
    recipe = named_finetuning_defaults("dai-le", get_preset("ulmfit-base"))
    assert (recipe["layer_decay"], recipe["unfreeze_every"], recipe["lr_scheduler_type"]) == (1.0, 0, "linear")
    assert (recipe["pool"], recipe["head_dim"], recipe["head_dropout"]) == ("last", 512, 0.5)
    assert "pool" not in named_finetuning_defaults("dai-le", get_preset("ulmfit-base"), "tag")
    assert "pool" not in named_finetuning_defaults("dai-le", get_preset("bert-tiny"))
    with pytest.raises(UserError, match="ulmfit"):
        named_finetuning_defaults("ulmfitt", get_preset("ulmfit-base"))


# --- ELMo and biLSTMs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["elmo-tiny", "ulmfit-tiny"])
def test_lora_raises_for_lstms(name: str, run_of: Callable[[str], Path], toy: dict[str, Path], tmp_path: Path) -> None:
    final = run_of(name) / "final"
    with pytest.raises(UserError, match="LoRA adapts the matrices of attention and MLP, and LSTMs have none"):
        api.finetune(final, "classify", toy["train"], toy["dev"], tmp_path / "run", lora_rank=2)


def test_elmo_opens_in_transformers(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert api.export(run_of("elmo-tiny") / "final", tmp_path / "out", check=True)["max_difference"] < 1e-5


def test_elmo_is_frozen_in_fine_tuning(run_of: Callable[[str], Path], toy: dict[str, Path], tmp_path: Path) -> None:
    """Only the scalar mix, the LSTM on top and the head are trained."""
    final = run_of("elmo-tiny") / "final"
    recipe = finetuning_defaults(read_config(final))
    assert (recipe["freeze"], recipe["layers"]) == ("backbone", "mix")
    options: dict[str, Any] = {"seeds": 1, "max_steps": 10, "bilstm": 16}
    found = api.finetune(final, "classify", toy["train"], toy["dev"], tmp_path / "topics", **options)
    tuned, before = load_model(tmp_path / "topics" / "final"), load_model(final)
    body = {name: p for name, p in tuned.named_parameters() if not name.startswith(("head.", "extras."))}
    old = dict(before.named_parameters())
    assert body
    assert all(p.equal(old[name]) for name, p in body.items())
    features = FeatureEncoderConfig(mix_layers=True, bilstm_hidden_size=16, word_dim=50, l2_mix=1e-3)
    assert tuned.config.extras == (features,)
    again = api.evaluate(tmp_path / "topics" / "final", data=toy["dev"], output_dir=tmp_path / "again")
    assert again["metrics"] == pytest.approx(scores(found))


@pytest.mark.parametrize("name", ["elmo-tiny", "ulmfit-tiny", "word2vec"])
def test_word_in_context_by_fine_tuning_and_by_threshold(
    name: str, run_of: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    """With a contextual and a static model."""
    pairs = [("the big fox ran", "a fox sat", True), ("a red fox", "then home and fox near the river", False)] * 4
    rows = [{"word": "fox", "text_a": a, "text_b": b, "label": same} for a, b, same in pairs]
    file = write_jsonl(tmp_path / "wic.jsonl", rows)
    if name == "word2vec":
        words = {"vector_size": 8, "min_count": 1, "workers": 1, "max_steps": 1}
        api.pretrain(name, text, tmp_path / "words", overrides=words)
    final = (tmp_path / "words" if name == "word2vec" else run_of(name)) / "final"
    by_threshold = api.evaluate(final, "word-in-context", file, tmp_path / "as-it-is", train=str(file))
    lines = (tmp_path / "as-it-is" / "predictions.jsonl").read_text().splitlines()
    assert len({json.loads(line)["scores"]["cosine"] for line in lines}) == (1 if name == "word2vec" else 2)
    assert by_threshold["metrics"]["accuracy"] >= 0.5
    options: dict[str, Any] = {"seeds": 1, "max_steps": 3, "max_seq_length": 32}
    tuned = api.finetune(final, "word-in-context", file, file, tmp_path / "tuned", **options)
    again = api.evaluate(tmp_path / "tuned" / "final", data=file, output_dir=tmp_path / "again")
    assert again["metrics"]["accuracy"] == pytest.approx(tuned["accuracy"])


def test_tagging_with_bilstm_and_crf(tmp_path: Path) -> None:
    """On random word vectors. A tag that depends on the previous word needs the LSTM."""
    words, draw = ["cat", "dog", "the", "ran", "big"], np.random.default_rng(0)
    rows = []
    for _ in range(60):
        sentence = draw.choice(words, 6).tolist()
        named_ = [b in ("cat", "dog") and a == "the" for a, b in zip(["", *sentence], sentence, strict=False)]
        rows.append({"tokens": sentence, "tags": ["B-A" if tag else "O" for tag in named_]})
    train, dev = write_jsonl(tmp_path / "train.jsonl", rows[:45]), write_jsonl(tmp_path / "dev.jsonl", rows[45:])
    tokenizer = train_tokenizer([" ".join(words)] * 2, "word", 20)
    torch.manual_seed(0)
    model = make_model(bag_of_words(tokenizer.vocab.size, 16))
    torch.nn.init.normal_(model.embed.tokens.weight)
    model.tokenizer = tokenizer
    model.save(tmp_path / "words")
    options: dict[str, Any] = {"seeds": 1, "max_steps": 80, "learning_rate": 2e-2, "crf": True, "bilstm": 32}
    found = api.finetune(tmp_path / "words", "tag", train, dev, tmp_path / "tags", **options)
    assert scores(found)["entity_f1"] > 0.8
    lines = (tmp_path / "tags/predictions.jsonl").read_text(encoding="utf-8")
    assert "probabilities" not in lines, "scores of whole sequences are not probabilities of tags"
    with pytest.raises(UserError, match="crf is for the task tag"):
        api.finetune(tmp_path / "words", "classify", train, dev, tmp_path / "no", crf=True)


def test_a_head_reads_the_top_layer_by_default(run_of: Callable[[str], Path]) -> None:
    """ELMo without scalar mix and without layers on top."""
    config = read_config(run_of("elmo-tiny") / "final")
    recipe = finetune_defaults()
    task = make_task(
        "classify", [Example(0, ("a",), "x"), Example(1, ("b",), "y")], tokenizer_in(run_of), config, recipe
    )
    assert recipe.apply_head_options(task.configure_model(config)).extras == ()
    assert recipe.__class__(layers="mix").apply_head_options(task.configure_model(config)).extras == (
        FeatureEncoderConfig(mix_layers=True),
    )


def tokenizer_in(run_of: Callable[[str], Path]) -> Any:
    return load_tokenizer(run_of("elmo-tiny") / "final")


def test_gradients_do_not_depend_on_how_a_batch_is_split() -> None:
    """The losses of two halves add up to that of the whole."""
    from firth.objectives import Batch

    torch.manual_seed(0)
    model = make_model(get_preset("bilstm-tiny")).eval()
    tokens = torch.randint(5, 40, (4, 6))
    whole = Batch(tokens, labels=tokens)
    parts = [model.loss(Batch(tokens[i : i + 2], labels=tokens[i : i + 2])) for i in (0, 2)]
    assert_close(model.loss(whole), parts[0] + parts[1])
