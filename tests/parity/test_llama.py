"""Llama 1 to 3 and ModernBERT: the same numbers as `transformers`, in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.alike import CLOSE, mixture, same_gradients, stir
from torch import Tensor
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.models import ClassificationHead, LMHead, ModelConfig, from_hf_config, hf_model_type, load_model, make_model
from firth.models.config import LayerNormConfig, RopeScaling, Rotary, SlidingWindow
from firth.models.hf.checkpoint import write_model
from firth.models.presets import llama, llama3, modernbert
from firth.tokens import Vocabulary

transformers = pytest.importorskip("transformers")
V, T = 61, 20
SIZES = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=64,
)
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
BOTH = dict(attention_bias=True, mlp_bias=True)
BIASES = dict(norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True)


def a_llama(kind: str = "LlamaForCausalLM", **changes: Any) -> Any:
    return getattr(transformers, kind)(transformers.LlamaConfig(**SIZES, **changes))


def a_modernbert(**changes: Any) -> Any:
    return transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(**SIZES, **IDS, local_attention=6, **changes)
    )


THEIRS: dict[str, Any] = {
    "llama 1": a_llama,
    "llama 3": lambda: a_llama(num_key_value_heads=2, rope_parameters=STRETCHED, tie_word_embeddings=True),
    "llama with one head of keys": lambda: a_llama(
        num_key_value_heads=1, attention_bias=True, mlp_bias=True, head_dim=12
    ),
    "llama with classes": lambda: a_llama("LlamaForSequenceClassification", num_labels=3, pad_token_id=0),
    "modernbert": a_modernbert,
    "modernbert with biases": lambda: a_modernbert(**BIASES),
    "modernbert with every second layer wide": lambda: a_modernbert(global_attn_every_n_layers=2),
}


def given(padded: bool) -> dict[str, Tensor]:
    ids = torch.randint(3, V, (3, T), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(T) < torch.tensor([T, 9, 13])[:, None]).long() if padded else torch.ones_like(ids)
    return {"input_ids": ids * mask, "attention_mask": mask}


def at_text(x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    mask = inputs["attention_mask"]
    return x[mask.bool()] if x.shape[:2] == mask.shape else x


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", THEIRS)
def test_from_transformers(name: str, padded: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    theirs = stir(THEIRS[name]())
    theirs.save_pretrained(tmp_path)
    ours, inputs = load_model(tmp_path), given(padded)
    assert "no place" not in capsys.readouterr().err
    found = [model(**inputs, output_hidden_states=True) for model in (ours, theirs)]
    assert_close(at_text(found[0].logits, inputs), at_text(found[1].logits, inputs), **CLOSE)
    for mine, other in zip(found[0].hidden_states, found[1].hidden_states, strict=True):
        assert_close(at_text(mine, inputs), at_text(other, inputs), **CLOSE)
    for out in found:
        mixture(at_text(out.logits, inputs)).backward()
    same_gradients(ours, theirs)


SMALL = dict(position=Rotary(500.0, 64, RopeScaling(4.0, original_length=16)))
OURS: dict[str, tuple[ModelConfig, str]] = {
    "llama": (llama(2, 32, 4, 48, V), "AutoModelForCausalLM"),
    "llama 3": (llama3(2, 32, 4, 48, num_kv_heads=2, head=LMHead(), **SMALL), "AutoModelForCausalLM"),
    "classes": (
        llama(2, 32, 4, 48, V, head=ClassificationHead(("a", "b", "c"), pool="last")),
        "AutoModelForSequenceClassification",
    ),
    "modernbert": (modernbert(4, 32, 4, 48, V, window=SlidingWindow(6, 3)), "AutoModelForMaskedLM"),
    "norms with biases": (modernbert(4, 32, 4, 48, V, norm=LayerNormConfig(1e-5)), "AutoModelForMaskedLM"),
}


@pytest.mark.parametrize("name", OURS)
def test_to_transformers(name: str, tmp_path: Path) -> None:
    config, auto = OURS[name]
    ours = stir(make_model(config))
    write_model(ours, tmp_path)
    theirs, info = getattr(transformers, auto).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    theirs.config.pad_token_id = 0
    inputs = given(padded=False)
    with torch.no_grad():
        assert_close(ours(**inputs).logits, theirs.eval()(**inputs).logits, **CLOSE)
    assert load_model(tmp_path).config == config
    vocab = Vocabulary(V, 0, 1, 2, 2, 2, 3, 4, (), special_ids=(0, 1, 2, 3, 4))
    assert hf_model_type(config, vocab) == config.family, "also with a tokenizer"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model_type": "llama", "attention_bias": True}, "attention_bias and mlp_bias differ"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"model_type": "t5", "feed_forward_proj": "gated-gelu", "dense_act_fn": "silu"}, "dense_act_fn"),
        ({"model_type": "t5", "is_gated_act": True}, "is_gated_act"),
        ({"model_type": "modernbert", "mlp_bias": True}, "mlp_bias and classifier_bias differ"),
        ({"model_type": "modernbert", "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}, "layer_types"),
        (
            {
                "model_type": "modernbert",
                "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            },
            "linear",
        ),
        (
            {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "hidden_activation": "silu"},
            "classifier_activation and hidden_activation differ",
        ),
    ],
)
def test_settings_that_are_not_known(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_hf_config(settings)
