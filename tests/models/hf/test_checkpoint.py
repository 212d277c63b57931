"""Checkpoints in every published form, and an error for every broken one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.models import (
    ClassificationHead,
    Extra,
    Model,
    ModelConfig,
    MultipleChoiceHead,
    from_hf_config,
    hf_model_type,
    load_model,
    load_weights,
    make_model,
    make_sequence_template,
    read_tensors,
    to_hf_config,
    with_vocabulary,
)
from firth.models.config import (
    DetectorConfig,
    FanInInit,
    GeneratorConfig,
    LearnedPosition,
    LMHead,
    MLPConfig,
    QueryStream,
    RMSNormConfig,
    SentencePairHead,
    SpanBoundaryHead,
)
from firth.models.hf.checkpoint import (
    WEIGHTS_FILE,
    forced_token_settings,
    generation_config_json,
    read_forced_tokens,
    write_model,
)
from firth.models.hf.config_io import read_stored_objective, special_token_ids
from firth.models.hf.registry import FAMILY_LAYOUTS
from firth.models.model import ForcedTokens
from firth.models.presets import (
    PRESETS,
    albert,
    bart,
    bert,
    distilbert,
    electra,
    get_preset,
    gpt,
    gpt2,
    llama,
    rembert,
    roberta,
    t5,
    xlm,
    xlm_roberta,
)
from firth.models.task_heads import with_classification_head
from firth.tokens import Vocabulary, load_tokenizer, train_tokenizer

V = 30
CONFIGS = {
    "bert": bert(2, 16, 2, V),
    "roberta": roberta(2, 16, 2, V),
    "xlm-roberta": xlm_roberta(2, 16, 2, V),
    "albert": albert(2, 16, 2, 8, V),
    "electra": electra(2, 16, 2, 8, V),
    "distilbert": distilbert(2, 16, 2, V),
    "rembert": rembert(2, 16, 2, 8, 24, V),
    "xlm": xlm(2, 16, 2, V, num_languages=3),
    "gpt": gpt(2, 16, 2, V),
    "gpt2": gpt2(2, 16, 2, V),
    "t5": t5(2, 16, 2, 32, V),
    "bart": bart(2, 16, 2, V),
}


def written(folder: Path, family: str = "bert") -> Model:
    torch.manual_seed(0)
    model = make_model(CONFIGS[family]).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    write_model(model, folder)
    return model


def rewrite(folder: Path, change: Any) -> None:
    save_file(change(load_file(folder / WEIGHTS_FILE)), folder / WEIGHTS_FILE)


def set_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def assert_same(a: Model, b: Model) -> None:
    mine, other = a.state_dict(), b.state_dict()
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[k], other[k]) for k in mine)


@pytest.mark.parametrize("family", CONFIGS)
def test_round_trip(family: str, tmp_path: Path) -> None:
    model = written(tmp_path, family)
    again = load_model(tmp_path)
    assert again.config == model.config
    assert not again.training
    assert_same(again, model)


def test_save_is_atomic(tmp_path: Path) -> None:
    model = written(tmp_path)
    model.save(tmp_path / "new")
    assert_same(load_model(tmp_path / "new"), model)
    assert (tmp_path / "new" / "manifest.json").is_file()
    with pytest.raises(UserError, match="exists already"):
        model.save(tmp_path / "new")


@pytest.mark.parametrize("family", CONFIGS)
def test_several_files_with_an_index(family: str, tmp_path: Path) -> None:
    model = written(tmp_path, family)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    (tmp_path / WEIGHTS_FILE).unlink()
    names = sorted(tensors)
    where = {name: f"model-0000{1 + i % 3}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({n: tensors[n] for n in names if where[n] == file}, tmp_path / file)
    (tmp_path / (WEIGHTS_FILE + ".index.json")).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert_same(load_model(tmp_path), model)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00003.safetensors"):
        load_model(tmp_path)


def test_an_index_without_weight_map_raises(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / (WEIGHTS_FILE + ".index.json")).write_text("{}")
    with pytest.raises(UserError, match="'weight_map' is missing"):
        load_model(tmp_path)


def test_gamma_and_beta_are_norm_weights(tmp_path: Path) -> None:
    model = written(tmp_path)

    def old(name: str) -> str:
        head, _, last = name.rpartition(".")
        return f"{head}.{ {'weight': 'gamma', 'bias': 'beta'}[last] }" if "LayerNorm" in name else name

    rewrite(tmp_path, lambda tensors: {old(k): v for k, v in tensors.items()})
    assert any(k.endswith("LayerNorm.gamma") for k in load_file(tmp_path / WEIGHTS_FILE))
    assert_same(load_model(tmp_path), model)


PREFIXED = [family for family in CONFIGS if FAMILY_LAYOUTS[family].prefix]


@pytest.mark.parametrize("family", PREFIXED)
def test_a_backbone_without_prefix(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, prefix = written(tmp_path, family), FAMILY_LAYOUTS[family].prefix
    rewrite(tmp_path, lambda ts: {k.removeprefix(prefix): v for k, v in ts.items() if k.startswith(prefix)})
    again = load_model(tmp_path)
    mine, other = again.state_dict(), model.state_dict()
    assert all(torch.equal(mine[k], other[k]) for k in mine if not k.startswith("head."))
    fresh = any(k.startswith("head.") for k in mine)  # the head of GPT-2 is its embedding
    assert ("start at random" in capsys.readouterr().err) == fresh


ODDMENTS = {  # what published files hold beside what the model needs
    "bert": ("bert.embeddings.position_ids", "bert.pooler.dense.weight", "cls.seq_relationship.weight"),
    "roberta": ("roberta.embeddings.position_ids", "roberta.pooler.dense.bias"),
    "albert": ("albert.pooler.weight", "sop_classifier.classifier.bias"),
    "distilbert": ("distilbert.embeddings.position_ids",),
    "gpt": ("transformer.h.0.attn.bias",),
    "gpt2": ("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"),
    "t5": ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    "bart": ("final_logits_bias",),
}


@pytest.mark.parametrize("family", ODDMENTS)
def test_extra_tensors_of_published_files_are_ignored(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = written(tmp_path, family)
    rewrite(tmp_path, lambda tensors: tensors | {name: torch.zeros(1, V) for name in ODDMENTS[family]})
    assert_same(load_model(tmp_path), model)
    assert capsys.readouterr().err == ""


def test_an_unexpected_tensor_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"bert.adapter.weight": torch.ones(2)})
    assert_same(load_model(tmp_path), model)
    said = " ".join(capsys.readouterr().err.split())
    assert "1 tensors are not part of this model and are ignored, such as bert.adapter.weight" in said
    load_model(tmp_path, head=ClassificationHead(("a", "b"), has_pooler=True))
    assert capsys.readouterr().err == "", "a new head leaves things out by intention"


TIED = [family for family in CONFIGS if FAMILY_LAYOUTS[family].aliases]


@pytest.mark.parametrize("family", TIED)
def test_tied_tensors_under_any_alias(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both copies, or one under the other name; a difference between the copies is reported."""
    model, (name, others) = written(tmp_path, family), next(iter(FAMILY_LAYOUTS[family].aliases.items()))
    rewrite(tmp_path, lambda ts: ts | {other: ts[name].clone() for other in others})
    assert_same(load_model(tmp_path), model)
    rewrite(tmp_path, lambda ts: {k: v for k, v in ts.items() if k != name})
    assert_same(load_model(tmp_path), model)
    assert capsys.readouterr().err == ""
    rewrite(tmp_path, lambda ts: ts | {name: ts[others[0]] + 1})
    again = load_model(tmp_path)
    assert torch.equal(again.embed.tokens.weight, model.embed.tokens.weight + 1)
    assert others[0] in " ".join(capsys.readouterr().err.split())


def test_a_new_head_is_initialized_randomly(tmp_path: Path) -> None:
    model = written(tmp_path)
    again = load_model(tmp_path, head=ClassificationHead(("yes", "no", "maybe"), has_pooler=True))
    assert again(torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 3)
    assert torch.equal(again.embed.tokens.weight, model.embed.tokens.weight)


def test_half_precision_is_read_as_float32(tmp_path: Path) -> None:
    model = written(tmp_path)
    rewrite(tmp_path, lambda tensors: {k: v.bfloat16() for k, v in tensors.items()})
    again = load_model(tmp_path)
    assert again.embed.tokens.weight.dtype == torch.float32
    assert_close(again.embed.tokens.weight, model.embed.tokens.weight, rtol=0.01, atol=0)


def test_pickles_raise(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / WEIGHTS_FILE).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"\.bin.*save_pretrained"):
        load_model(tmp_path)


def test_no_weights_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere is not a checkpoint: there is no such folder"):
        load_model(tmp_path / "nowhere")
    written(tmp_path)
    (tmp_path / WEIGHTS_FILE).unlink()
    with pytest.raises(UserError, match=r"no model.safetensors"):
        load_model(tmp_path)


def test_a_truncated_file_raises(tmp_path: Path) -> None:
    written(tmp_path)
    file = tmp_path / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="damaged or cut short"):
        load_model(tmp_path)


def test_wrong_shapes_are_named(tmp_path: Path) -> None:
    written(tmp_path)
    set_config(tmp_path, vocab_size=V + 1)
    with pytest.raises(UserError, match=rf"embed.tokens.weight is \({V}, 16\) in the file and \({V + 1}, 16\)"):
        load_model(tmp_path)


def test_wrong_shapes_of_a_head_are_named(tmp_path: Path) -> None:
    """The config requires this head, so it may not be initialized randomly."""
    write_model(
        make_model(replace(CONFIGS["bert"], head=ClassificationHead(("a", "b", "c"), has_pooler=True))), tmp_path
    )
    set_config(tmp_path, id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1})
    with pytest.raises(UserError, match=r"head.out.weight is \(3, 16\) in the file and \(2, 16\)"):
        load_model(tmp_path)
    fresh = load_model(tmp_path, head=ClassificationHead(("a", "b"), has_pooler=True))
    assert fresh.head.out.weight.shape == (2, 16)


@pytest.mark.parametrize("family", CONFIGS)
def test_mismatched_and_missing_tensors_are_named_in_every_family(family: str, tmp_path: Path) -> None:
    """A tensor of another shape with both shapes, and a missing one."""
    written(tmp_path, family)
    name, other = (
        next(iter(FAMILY_LAYOUTS[family].rules(CONFIGS[family]))).hf_names[0],
        load_file(tmp_path / WEIGHTS_FILE),
    )
    rewrite(tmp_path, lambda ts: ts | {name: torch.zeros(3, 5)})
    with pytest.raises(
        UserError, match=r"embed.tokens.weight is \(3, 5\) in the file and \(30, (8|16)\) by the config"
    ):
        load_model(tmp_path)
    rewrite(tmp_path, lambda ts: {k: v for k, v in other.items() if k != name})
    with pytest.raises(UserError, match=r"missing, such as embed.tokens.weight"):
        load_model(tmp_path)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    written(tmp_path)

    def without(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v for k, v in tensors.items() if "layer.1.attention.self.key" not in k}

    rewrite(tmp_path, without)
    with pytest.raises(UserError, match=r"missing, such as stack.blocks.1.attention.qkv.weight"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt3"}, "model_type 'gpt3'.*Did you mean 'gpt2'"),
        ({"model_type": ["bert"]}, r"model_type \['bert'\] is not one"),
        ({"model_type": "distilbart"}, "model_type 'distilbart'.*Did you mean 'distilbert'"),
        ({"hidden_act": "mish"}, "activation 'mish'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"hidden_size": "wide"}, "config.json.*dim: 'wide' is not a whole number"),
        ({"id2label": {"a": "b"}, "architectures": ["BertForSequenceClassification"]}, "value of the wrong type"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
    ],
)
def test_unsupported_configs_raise(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    written(tmp_path)
    set_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_described_by_its_family(name: str) -> None:
    """Or by our own format, where `transformers` lacks the family."""
    config = PRESETS[name]
    assert hf_model_type(config) == (
        FAMILY_LAYOUTS[config.family].model_type if config.family in FAMILY_LAYOUTS else "firth"
    )
    assert from_hf_config(to_hf_config(config, None)) == config


# --- extras -------------------------------------------------------------------------------------------------------

EXTRAS: dict[str, tuple[Extra, ...]] = {
    "pair": (SentencePairHead(),),
    "boundary": (SpanBoundaryHead(max_span_length=7),),
    "pair and boundary": (SentencePairHead(), SpanBoundaryHead()),
    "generator": (GeneratorConfig(0.5, 20.0),),
    "query": (QueryStream(),),
    "detector": (DetectorConfig(),),
}


def stirred(config: ModelConfig) -> Model:
    torch.manual_seed(0)
    model = make_model(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


@pytest.mark.parametrize("name", EXTRAS)
def test_extras_round_trip(name: str, tmp_path: Path) -> None:
    model = stirred(replace(CONFIGS["bert"], extras=EXTRAS[name]))
    write_model(model, tmp_path)
    again = load_model(tmp_path)
    assert again.config == model.config
    assert_same(again, model)


def test_a_generator_changes_the_model_type_and_other_extras_do_not() -> None:
    """ELECTRA's generator owns the LM head, so no masked LM of `transformers` fits."""
    kinds = {name: hf_model_type(replace(CONFIGS["bert"], extras=extras)) for name, extras in EXTRAS.items()}
    assert {name for name, kind in kinds.items() if kind != "bert"} == {"generator"}
    assert hf_model_type(replace(CONFIGS["bert"], extras=(SentencePairHead(),), num_shared=2)) == "firth"


def test_extras_are_saved_under_firth_names(tmp_path: Path) -> None:
    write_model(stirred(replace(CONFIGS["bert"], extras=(SentencePairHead(), SpanBoundaryHead(7)))), tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text())
    assert facts["architectures"] == ["BertForPreTraining"]
    assert facts["firth_extras"] == [{"kind": "SpanBoundaryHead", "max_span_length": 7}]
    names = load_file(tmp_path / WEIGHTS_FILE)
    assert "extras.boundary.dense1.weight" in names
    assert {"bert.pooler.dense.weight", "cls.seq_relationship.bias"} <= names.keys()
    assert not any(name.startswith("extras.pair") for name in names)
    set_config(tmp_path, firth_extras=[{"kind": "SpanBondaryHead"}])
    with pytest.raises(UserError, match=r"unknown kind 'SpanBondaryHead'.*SpanBoundaryHead"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", EXTRAS)
def test_a_new_head_drops_the_extras(name: str, tmp_path: Path) -> None:
    """Also from a folder with Firth names, which a BERT classifier would not have."""
    model = stirred(replace(CONFIGS["bert"], extras=EXTRAS[name]))
    write_model(model, tmp_path)
    again = load_model(tmp_path, head=ClassificationHead(("yes", "no"), has_pooler=True))
    assert again.config.extras == ()
    ours = again.state_dict()
    assert all(torch.equal(p, ours[n]) for n, p in model.state_dict().items() if n.startswith(("embed.", "stack.")))
    if name == "pair":  # BERT fine-tunes the pooler that it was pretrained with
        assert torch.equal(ours["head.pooler.weight"], model.state_dict()["extras.pair.pooler.weight"])


@pytest.mark.parametrize("name", EXTRAS)
def test_an_extra_can_be_added_to_a_checkpoint(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Continued pretraining with another objective; new tensors are initialized randomly, with a notice."""
    plain = written(tmp_path)
    model = stirred(replace(CONFIGS["bert"], extras=EXTRAS[name]))
    load_weights(model, read_tensors(tmp_path), str(tmp_path))
    ours = model.state_dict()
    body = {n: p for n, p in plain.state_dict().items() if n.startswith(("embed.", "stack."))}
    assert all(torch.equal(p, ours[n]) for n, p in body.items())
    assert "start at random" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(UserError, match="missing"):
        load_weights(model, read_tensors(tmp_path), str(tmp_path), strict=True)


@pytest.mark.parametrize("name", EXTRAS)
def test_extras_can_be_dropped_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Another objective; a generator takes its LM head with it, other extras leave it."""
    model = stirred(replace(CONFIGS["bert"], extras=EXTRAS[name]))
    write_model(model, tmp_path)
    plain = make_model(CONFIGS["bert"])
    load_weights(plain, read_tensors(tmp_path), str(tmp_path))
    kept = [
        n for n, p in plain.state_dict().items() if n in model.state_dict() and torch.equal(p, model.state_dict()[n])
    ]
    fresh = {n for n in plain.state_dict() if n not in kept}
    assert {n.split(".")[0] for n in fresh} == ({"head"} if name == "generator" else set())


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("-tiny")])
def test_every_tiny_preset_round_trips_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = stirred(replace(PRESETS[name], vocab_size=V))
    write_model(model, tmp_path)
    before = torch.get_rng_state()
    again = load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), before), "no random weights are drawn"
    assert again.config == model.config
    assert_same(again, model)
    ours, theirs = dict(again.named_buffers()), dict(model.named_buffers())  # also those that no file has
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", ["bert", "t5", "gpt2"])
def test_a_new_head_has_the_weights_of_its_seed(family: str, tmp_path: Path) -> None:
    """As if the whole model were drawn first, and the file's tensors copied over it."""
    written(tmp_path, family)
    head = ClassificationHead(("yes", "no", "maybe"), pool="first" if family == "bert" else "last")
    torch.manual_seed(5)
    model = load_model(tmp_path, head=head)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    plain = make_model(replace(CONFIGS[family], head=head))
    fresh = {name: value.clone() for name, value in plain.state_dict().items() if name.startswith("head.")}
    assert torch.equal(torch.get_rng_state(), after)
    load_weights(plain, read_tensors(tmp_path), str(tmp_path), new_head=True)
    assert_same(model, plain)
    assert fresh
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in fresh.items())


def test_decoder_start_token() -> None:
    vocab = Vocabulary(V, 0, 1, 2, 3, 4, 5, 6, (), special_ids=tuple(range(7)))
    for config, start in ((PRESETS["bart-tiny"], 5), (PRESETS["t5-tiny"], 0)):
        assert make_sequence_template(config, vocab).decoder_start_id == start
        assert to_hf_config(config, vocab)["decoder_start_token_id"] == start
        assert special_token_ids(config, vocab)["decoder_start_token_id"] == start


ODD = {
    "pre-norm bert": replace(CONFIGS["bert"], norm_first=True),
    "bert without segments": replace(CONFIGS["bert"], num_segments=0),
    "bert with its own head": replace(CONFIGS["bert"], head=LMHead(tied=False, transform=True, bias=True)),
    "wide heads": replace(CONFIGS["bert"], head_dim=12),
    "gpt2 with rms": replace(CONFIGS["gpt2"], norm=RMSNormConfig()),
    "gpt2 from fan-in": replace(CONFIGS["gpt2"], init=FanInInit()),
    "t5 with biases": replace(CONFIGS["t5"], bias=True),
    "nobody's": replace(CONFIGS["gpt2"], family="mine"),
    "roberta from 0": replace(CONFIGS["roberta"], position=LearnedPosition(512)),
    "roberta with relu": replace(CONFIGS["roberta"], mlp=MLPConfig(32, "relu")),
    "albert without widening": replace(CONFIGS["albert"], embed_dim=None),
    "rembert without widening": replace(CONFIGS["rembert"], embed_dim=None),
    "distilbert with segments": replace(CONFIGS["distilbert"], num_segments=2),
    "gpt with exact gelu": replace(CONFIGS["gpt"], mlp=MLPConfig(64, "gelu")),
    "xlm with a narrow mlp": replace(CONFIGS["xlm"], mlp=MLPConfig(32)),
    "t5 with choices": replace(CONFIGS["t5"], head=MultipleChoiceHead(pool="last")),
    "wrong classes": replace(CONFIGS["distilbert"], head=ClassificationHead(("a", "b"), has_pooler=True)),
}


@pytest.mark.parametrize("name", ODD)
def test_models_outside_all_families_have_model_type_firth(name: str, tmp_path: Path) -> None:
    model = make_model(ODD[name]).eval()
    write_model(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "firth"
    again = load_model(tmp_path)
    assert again.config == model.config
    assert_same(again, model)


def test_explicit_defaults_change_nothing() -> None:
    assert hf_model_type(replace(CONFIGS["t5"], head_dim=8, num_decoder_layers=2)) == "t5"
    assert hf_model_type(replace(CONFIGS["bert"], head_dim=8)) == "bert"


# --- families that share a layout, and vocabularies ------------------------------------------------------------------


def test_families_that_share_a_layout_keep_their_name(tmp_path: Path) -> None:
    for name, kind in (("spanbert", "bert"), ("labse", "bert"), ("afriberta", "xlm-roberta"), ("gpt3", "gpt2")):
        config = replace(PRESETS[f"{name}-tiny"], vocab_size=V)
        facts = to_hf_config(config, None)
        assert (facts["model_type"], facts["firth_family"]) == (kind, name)
        assert from_hf_config(facts) == config
        del facts["firth_family"]
        assert from_hf_config(facts) == replace(config, family=kind)


def test_adds_bos_is_kept() -> None:
    """BART with T5's objective reads texts without <s>, and so does its checkpoint."""
    config = replace(CONFIGS["bart"], adds_bos=False)
    facts = to_hf_config(config, None)
    assert (facts["model_type"], facts["firth_adds_bos"]) == ("bart", False)
    assert from_hf_config(facts) == config


LLAMA = llama(2, 16, 2, 32, V)


def test_dropout_does_not_close_a_checkpoint_to_transformers(tmp_path: Path) -> None:
    """Llama's config.json has no dropout of layers. It changes training alone, so the checkpoint stays a Llama."""
    mlp = replace(LLAMA.mlp, dropout=0.3)
    config = replace(LLAMA, dropout=0.1, attention_dropout=0.2, layer_drop=0.4, mlp=mlp)
    facts = to_hf_config(config, None)
    assert facts["model_type"] == "llama"
    assert facts["attention_dropout"] == 0.2
    assert facts["firth_dropout"] == {"dropout": 0.1, "mlp_dropout": 0.3, "layer_drop": 0.4}
    assert from_hf_config(facts) == config
    assert "firth_dropout" not in to_hf_config(LLAMA, None)

    model = stirred(config).eval()
    write_model(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(2, 14)[None]
    with torch.no_grad():
        assert_close(model(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rates", [3, [1], {"speed": 0.1}, {"dropout": "much"}, {"dropout": 2}])
def test_damaged_dropout_rates_are_an_error(rates: Any) -> None:
    facts = to_hf_config(replace(LLAMA, dropout=0.1), None)
    with pytest.raises(UserError):
        make_model(from_hf_config(facts | {"firth_dropout": rates}))


VOCAB = Vocabulary(V, 0, 1, 2, 3, 4, 5, 6, (), special_ids=tuple(range(7)))


def test_roberta_positions_start_after_the_padding_id() -> None:
    """`transformers` counts them from pad_token_id + 1; another padding id would be another model."""
    config = with_vocabulary(CONFIGS["roberta"], VOCAB)
    assert config.position == LearnedPosition(513, offset=1)
    assert config.max_length == CONFIGS["roberta"].max_length == 512
    assert to_hf_config(config, VOCAB)["pad_token_id"] == 0
    assert hf_model_type(config, VOCAB) == "roberta"
    assert hf_model_type(CONFIGS["roberta"], VOCAB) == "firth"
    assert with_vocabulary(CONFIGS["bart"], VOCAB) == CONFIGS["bart"]
    assert with_vocabulary(replace(CONFIGS["bert"], vocab_size=9), VOCAB) == CONFIGS["bert"]


def test_a_roberta_over_another_vocabulary_is_our_own(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a b c d"] * 9, "wordpiece", 20)
    model = stirred(replace(CONFIGS["roberta"], vocab_size=tokenizer.vocab.size))
    model.tokenizer = tokenizer
    write_model(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "firth"
    assert_same(load_model(tmp_path), model)


def test_forced_eos_of_bart(tmp_path: Path) -> None:
    model = stirred(CONFIGS["bart"])
    facts = to_hf_config(CONFIGS["bart"], VOCAB) | forced_token_settings(model, VOCAB)
    wanted = {"bos_token_id": 4, "eos_token_id": 5, "decoder_start_token_id": 5, "forced_eos_token_id": 5}
    assert {name: facts[name] for name in wanted} == wanted
    assert generation_config_json(model, VOCAB) == {"pad_token_id": 0, **wanted}
    model.forced_tokens = ForcedTokens(bos=4)
    assert forced_token_settings(model, VOCAB) == {"forced_bos_token_id": 4, "forced_eos_token_id": None}
    (tmp_path / "generation_config.json").write_text(json.dumps({"forced_eos_token_id": [9, 7]}))
    assert read_forced_tokens(tmp_path) == ForcedTokens(eos=7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"forced_bos_token_id": "x"}))
    with pytest.raises(UserError, match=r"forced_bos_token_id: .* is not a whole number"):
        read_forced_tokens(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_invalid_eos_lists_raise(file: str, tmp_path: Path) -> None:
    model = stirred(CONFIGS["gpt2"])
    size = model.config.vocab_size
    wrong = {
        "is \\[\\]": [],
        "'x' is not a whole number, and 'x' is not a list": "x",
        "\\[2, 'x'\\] is not a whole number, and 'x' is not": [2, "x"],
        "None is not a whole number": [2, None],
        "True is not a whole number": [True],
        "2.0 is not a whole number": 2.0,
        f"the id {size},.* only {size} tokens": [2, size],
        "the id -1": [-1],
    }
    write_model(model, tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text())
    for says, value in wrong.items():
        (tmp_path / file).write_text(json.dumps(facts | {"eos_token_id": value}))
        with pytest.raises(UserError, match=f"{tmp_path / file}: eos_token_id.* {says}"):
            load_model(tmp_path)
    (tmp_path / file).write_text(json.dumps(facts | {"eos_token_id": [size - 1, 2]}))
    assert load_model(tmp_path).eos_token_ids == (size - 1, 2)
    for single in (None, 2, size):  # some published settings have the end of another vocabulary
        (tmp_path / file).write_text(json.dumps(facts | {"eos_token_id": single}))
        assert load_model(tmp_path).eos_token_ids is None
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"generation_config.json: must be an object"):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", ["bart", "gpt2"])
def test_a_list_of_eos_ids_is_kept(kind: str, tmp_path: Path) -> None:
    """Also without a tokenizer; a classification head of BART pools at its single EOS token."""
    model = stirred(CONFIGS[kind])
    model.eos_token_ids = (5, 3)
    model.save(tmp_path / "a")
    assert load_model(tmp_path / "a").eos_token_ids == (5, 3)
    assert generation_config_json(model, VOCAB)["eos_token_id"] == [5, 3]
    classes = load_model(tmp_path / "a", with_classification_head(model.config, ("a", "b")).head)
    classes.save(tmp_path / "b")
    assert load_model(tmp_path / "b").eos_token_ids == ((5, 3) if kind == "gpt2" else None)


def test_a_tokenizer_larger_than_the_model_raises(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a b c d"] * 9, "wordpiece", 20)
    write_model(stirred(replace(CONFIGS["bert"], vocab_size=tokenizer.vocab.size - 1)), tmp_path)
    tokenizer.save(tmp_path)
    with pytest.raises(UserError, match="they do not belong together"):
        load_model(tmp_path)


def test_a_vocabulary_with_unused_rows(tmp_path: Path) -> None:
    """T5 has 128 rows that no token uses."""
    tokenizer = train_tokenizer(["a b c d"] * 9, "wordpiece", 20)
    model = stirred(replace(CONFIGS["bert"], vocab_size=tokenizer.vocab.size + 7))
    model.tokenizer = tokenizer
    write_model(model, tmp_path)
    assert_same(load_model(tmp_path), model)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("albert", {"num_hidden_groups": 3}, "num_hidden_layers=2 is not a multiple of num_hidden_groups=3"),
        ("albert", {"inner_group_num": 2}, "inner_group_num is 2"),
        ("roberta", {"hidden_act": "relu"}, "hidden_act is 'relu', and Firth knows roberta only with 'gelu'"),
        ("bart", {"decoder_ffn_dim": 7}, "encoder_ffn_dim and decoder_ffn_dim differ"),
        ("xlm", {"causal": True}, "causal is True"),
        ("rembert", {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    ],
)
def test_unsupported_family_settings_raise(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    written(tmp_path, family)
    set_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "one", "two"),
    [
        ("roberta-tiny", "byte-bpe", "<s> A </s>", "<s> A </s> </s> B </s>"),
        ("bart-tiny", "byte-bpe", "<s> A </s>", "<s> A </s> </s> B </s>"),
        ("xlnet-tiny", "unigram", "A </s> <s>", "A </s> B </s> <s>"),
        ("bert-tiny", "wordpiece", "[CLS] A [SEP]", "[CLS] A [SEP] B [SEP]"),
        ("t5-tiny", "unigram", "A </s>", "A </s> B </s>"),
        ("gpt2-tiny", "byte-bpe", "A", "A B"),
    ],
)
def test_saved_tokenizers_add_the_familys_special_tokens(
    name: str, kind: str, one: str, two: str, tmp_path: Path
) -> None:
    """`transformers` reads raw texts so, and the tokenizer's fingerprint stays that of the shards."""
    tokenizer = train_tokenizer(["ab ab ba ba"] * 50, kind, 300)
    config = with_vocabulary(get_preset(name), tokenizer.vocab)
    model = make_model(replace(config, adds_bos=name == "bart-tiny"))
    model.tokenizer = tokenizer
    model.save(tmp_path / "model")
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path / "model")
    for texts, wanted in ((("ab",), one), (("ab", "ba"), two)):
        names = {"A": tokenizer.encode("ab"), "B": tokenizer.encode("ba")}
        ids = [i for word in wanted.split() for i in names.get(word, [tokenizer.backend.token_to_id(word)])]
        assert theirs(*texts).input_ids == ids
    assert load_tokenizer(tmp_path / "model").fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("stored", ["[1]", "2.5", '"mlm"'])
def test_an_objective_that_is_no_mapping_is_refused(stored: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"firth_objective": {stored}}}')
    with pytest.raises(UserError, match=r"config.json: firth_objective is .*, and must be a mapping"):
        read_stored_objective(tmp_path)
