"""DeBERTa, all versions: equal to `transformers` in logits, states and gradients, in both directions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.alike import CLOSE, mixture, same_gradients, stir
from safetensors.torch import load_file, save_file
from tasks.small import tokenizer_of
from torch import Tensor
from torch.testing import assert_close

from firth import api
from firth.core.errors import UserError
from firth.evaluate.card import render_model_card
from firth.models import PRESETS, Encoder, ModelConfig, count_parameters, hf_model_type, load_model, make_model
from firth.models.config import ConvolutionConfig, Disentangled, GeneratorConfig, LearnedPosition, MaskDecoder
from firth.models.hf.checkpoint import write_model
from firth.models.hf.config_io import from_hf_config, to_hf_config
from firth.models.presets import deberta, deberta_v2, deberta_v3
from firth.models.task_heads import with_classification_head
from firth.objectives.batch import Batch

transformers = pytest.importorskip("transformers")
V, T = 61, 13
LENGTHS = [13, 6, 9]
TOKENS = torch.randint(2, V, (3, T), generator=torch.Generator().manual_seed(1))
SEGMENT = torch.randint(0, 2, (3, T), generator=torch.Generator().manual_seed(2))
MASK = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]).long()
SIZES = dict(
    vocab_size=V,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=16,
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    position_biased_input=False,
)
V2 = dict(share_att_key=True, position_buckets=6, norm_rel_ebd="layer_norm")
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "v1": ("Deberta", {}),
    "v1, near distances": ("Deberta", {"max_relative_positions": 4}),
    "v1, absolute positions and segments": ("Deberta", {"position_biased_input": True, "type_vocab_size": 2}),
    "v2": ("DebertaV2", V2 | {"conv_kernel_size": 3, "conv_act": "gelu"}),
    "v2, own projections": ("DebertaV2", {"max_relative_positions": 8}),
    "v2, wide convolution": ("DebertaV2", {"conv_kernel_size": 5, "position_buckets": 4}),
    "v3": ("DebertaV2", V2),
    "v3, absolute positions and segments": ("DebertaV2", V2 | {"position_biased_input": True, "type_vocab_size": 2}),
}


def reference(name: str, kind: str = "ForMaskedLM", **changes: Any) -> Any:
    family, settings = SETTINGS[name]
    config = getattr(transformers, f"{family}Config")(**SIZES | settings | changes)
    torch.manual_seed(0)
    return stir(getattr(transformers, family + kind)(config))


def inputs(name: str, padded: bool) -> dict[str, Tensor]:
    given = {"input_ids": TOKENS} | ({"attention_mask": MASK} if padded else {})
    return given | ({"token_type_ids": SEGMENT} if "segments" in name else {})


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", SETTINGS)
def test_from_transformers(name: str, padded: bool, tmp_path: Path) -> None:
    theirs = reference(name)
    theirs.save_pretrained(tmp_path)
    ours, given = load_model(tmp_path), inputs(name, padded)
    text = MASK.bool() if padded else torch.ones_like(MASK).bool()
    a, b = ours(**given, output_hidden_states=True), theirs(**given, output_hidden_states=True)
    assert_close(a.logits[text], b.logits[text], **CLOSE)
    for mine, other in zip(a.hidden_states, b.hidden_states, strict=True):
        assert_close(mine[text], other[text], **CLOSE)
    mixture(a.logits[text]).backward()
    mixture(b.logits[text]).backward()
    same_gradients(ours, theirs)


@pytest.mark.parametrize("name", ["v1", "v2", "v3"])
def test_classes(name: str, tmp_path: Path) -> None:
    theirs = reference(name, "ForSequenceClassification", num_labels=3)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    a, b = ours(TOKENS, attention_mask=MASK), theirs(TOKENS, attention_mask=MASK)
    assert_close(a.logits, b.logits, **CLOSE)
    mixture(a.logits).backward()
    mixture(b.logits).backward()
    same_gradients(ours, theirs)


@pytest.mark.parametrize("name", ["v1", "v1, absolute positions and segments", "v2", "v2, wide convolution", "v3"])
def test_packed_documents_are_read_as_if_alone(name: str, tmp_path: Path) -> None:
    theirs = reference(name)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    assert isinstance(ours, Encoder)
    segment = SEGMENT[:1] if "segments" in name else None
    doc, position = torch.tensor([[0] * 5 + [1] * 8]), torch.tensor([[*range(5), *range(8)]])
    packed = ours.logits(Batch(TOKENS[:1], document_ids=doc, position_ids=position, token_type_ids=segment))
    for part in (slice(0, 5), slice(5, T)):
        alone = None if segment is None else segment[:, part]
        assert_close(packed[:, part], theirs(TOKENS[:1, part], token_type_ids=alone).logits, **CLOSE)


OURS: dict[str, ModelConfig] = {
    "v1": deberta(2, 32, 4, V, position=Disentangled(max_distance=8, length=20)),
    "v1, absolute positions": deberta(
        2, 32, 4, V, position=Disentangled(16, 16, absolute_embeddings=True), num_segments=2
    ),
    "v2": deberta_v2(
        2, 32, 4, V, position=Disentangled(16, 16, num_buckets=4, share_projections=True, norm_embeddings=True)
    ),
    "v2, tanh": deberta_v2(2, 32, 4, V, convolution=ConvolutionConfig(5, "tanh"), position=Disentangled(16, 16)),
    "v3": deberta_v3(
        2, 32, 4, V, position=Disentangled(16, 16, num_buckets=4, share_projections=True, norm_embeddings=True)
    ),
}


@pytest.mark.parametrize("classes", [False, True], ids=["lm", "classes"])
@pytest.mark.parametrize("name", OURS)
def test_to_transformers(name: str, classes: bool, tmp_path: Path) -> None:
    config = with_classification_head(OURS[name], ("no", "yes", "maybe")) if classes else OURS[name]
    ours = stir(make_model(config))
    write_model(ours, tmp_path)
    auto = transformers.AutoModelForSequenceClassification if classes else transformers.AutoModelForMaskedLM
    theirs, loading = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    given = {"input_ids": TOKENS, "attention_mask": MASK}
    text = slice(None) if classes else MASK.bool()
    assert_close(ours(**given).logits[text], theirs.eval()(**given).logits[text], **CLOSE)
    again = load_model(tmp_path)
    assert again.config == config
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("deberta")])
def test_presets_have_the_published_size(name: str) -> None:
    settings = to_hf_config(PRESETS[name], None)
    (kind,) = settings.pop("architectures")
    with torch.device("meta"):
        theirs = getattr(transformers, kind)(transformers.AutoConfig.for_model(**settings))
    theirs.tie_weights()
    assert count_parameters(PRESETS[name]) == theirs.num_parameters()


def test_heads_under_their_older_names(tmp_path: Path) -> None:
    """The published folders name the head `lm_predictions` and hold further tensors."""
    theirs = reference("v1", legacy=False)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    assert_close(ours(TOKENS).logits, theirs(TOKENS).logits, **CLOSE)

    tensors = load_file(tmp_path / "model.safetensors")
    more = {
        "deberta.embeddings.position_embeddings.weight": torch.ones(16, 32),
        "mask_predictions.dense.bias": torch.ones(3),
    }
    save_file(tensors | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_close(load_model(tmp_path)(TOKENS).logits, ours(TOKENS).logits)


def test_published_settings_are_read() -> None:
    """As published: attention types in one string, distances as far as there are positions."""
    hf = {
        "model_type": "deberta-v2",
        "architectures": ["DebertaV2ForMaskedLM"],
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
        "relative_attention": True,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "layer_norm_eps": 1e-7,
        "max_relative_positions": -1,
        "position_biased_input": False,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "type_vocab_size": 0,
        "vocab_size": 128100,
    }
    assert from_hf_config(hf) == replace(PRESETS["deberta-v3-base"], family="deberta-v2")


def test_what_is_not_deberta_is_said_or_kept_under_our_name() -> None:
    hf = to_hf_config(OURS["v1"], None)
    for change in ({"relative_attention": False}, {"pos_att_type": "c2p"}, {"pos_att_type": None}):
        with pytest.raises(UserError, match="only with relative_attention and with pos_att_type c2p and p2c"):
            from_hf_config(hf | change)
    with pytest.raises(UserError, match="talking_head"):
        from_hf_config(hf | {"talking_head": True})
    with pytest.raises(UserError, match="embedding_size"):
        from_hf_config(hf | {"embedding_size": 8})
    assert [hf_model_type(config) for config in OURS.values()] == ["deberta"] * 2 + ["deberta-v2"] * 3
    assert hf_model_type(replace(OURS["v1"], attention_bias="all")) == "firth"
    assert hf_model_type(replace(OURS["v3"], norm_first=True)) == "firth"
    assert hf_model_type(replace(OURS["v3"], position=LearnedPosition())) == "firth"


def test_a_pretrained_version_3_opens_in_transformers_after_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The encoder reads the embeddings of the generator plus its own difference; the tokenizer adds [CLS] and [SEP]."""
    tokenizer = tokenizer_of("unigram", False)
    config = replace(OURS["v3"], vocab_size=tokenizer.vocab.size)
    ours = stir(make_model(replace(config, extras=(GeneratorConfig(0.5, 3.0, disentangle_embeddings=True),))))
    ours.tokenizer = tokenizer
    ours.save(tmp_path / "final")
    result = api.export(tmp_path / "final", tmp_path / "hf", check=True)
    assert "the export is the encoder alone, for AutoModel" in " ".join(capsys.readouterr().err.split())
    assert result["max_difference"] < 1e-4
    assert result["compared_with"] == "AutoModel of transformers"
    theirs, loading = transformers.AutoModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(theirs).__name__ == "DebertaV2Model"
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")("the big fox", return_tensors="pt")
    vocab = tokenizer.vocab
    assert read["input_ids"].tolist() == [[vocab.cls, *tokenizer.encode("the big fox"), vocab.sep]]
    states = ours(read["input_ids"], output_hidden_states=True).hidden_states[-1]
    assert_close(theirs.eval()(**read).last_hidden_state, states, **CLOSE)
    assert "`firth export` writes its encoder for `AutoModel`" in render_model_card(tmp_path / "final")


def test_the_check_says_which_path_it_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`transformers` has no enhanced mask decoder, and Firth's own architectures have no other implementation."""
    tokenizer = tokenizer_of("unigram", False)
    config = replace(OURS["v1"], vocab_size=tokenizer.vocab.size)
    decoded = stir(make_model(replace(config, extras=(MaskDecoder(2, 20),))))
    own = stir(make_model(replace(config, norm_first=True)))
    results = []
    for name, model in {"decoded": decoded, "own": own}.items():
        model.tokenizer = tokenizer
        model.save(tmp_path / name)
        results.append((api.export(tmp_path / name, check=True), " ".join(capsys.readouterr().err.split())))
    (found, said), (found_own, said_own) = results
    assert found["max_difference"] < 1e-4
    assert found["mask_decoder_difference"] > 0.01
    assert f"at masks differ from those of transformers by up to {found['mask_decoder_difference']:.2g}" in said
    assert "no enhanced mask decoder" in render_model_card(tmp_path / "decoded")
    assert found_own.pop("differing_texts") in (None, [])
    assert found_own == {"max_difference": 0.0, "compared_with": "AutoModelForMaskedLM of firth.hf (Firth's own code)"}
    assert "This is no independent check" in said_own
    assert "No family of `transformers` describes this model" in render_model_card(tmp_path / "own")
