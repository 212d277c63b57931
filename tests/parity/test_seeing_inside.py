"""Attention weights equal those of `transformers`, and returning them changes no other output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.alike import CLOSE, stir
from torch.testing import assert_close

from firth.models import PRESETS, ScalarMix, load_model, make_model
from firth.models.hf.checkpoint import write_model
from firth.models.presets import bart, bert, deberta, gpt2, llama, modernbert, roberta, t5

transformers = pytest.importorskip("transformers")
V, T, U = 61, 12, 5
OURS: dict[str, Any] = {
    "bert": lambda: bert(3, 32, 4, V),
    "roberta": lambda: roberta(2, 32, 4, V),
    "modernbert": lambda: modernbert(3, 32, 4, 48, V),
    "deberta": lambda: deberta(2, 32, 4, V),
    "gpt2": lambda: gpt2(2, 32, 4, V),
    "llama": lambda: llama(2, 32, 4, 48, V, num_kv_heads=2),
    "t5": lambda: t5(2, 32, 4, 48, V),
    "bart": lambda: bart(2, 32, 4, V),
}


@pytest.mark.parametrize("name", OURS)
def test_weights_are_theirs(name: str, tmp_path: Path) -> None:
    ours = stir(make_model(OURS[name]()))
    write_model(ours, tmp_path)
    two = ours.config.architecture == "encoder-decoder"
    auto = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    ids = torch.randint(3, V, (2, T))
    mask = (torch.arange(T) < torch.tensor([T, 8])[:, None]).long()
    inputs = {"input_ids": ids, "attention_mask": mask}
    if two:
        inputs["decoder_input_ids"] = torch.randint(3, V, (2, U))
    with torch.no_grad():
        plain = load_model(tmp_path)(**inputs)
        mine = load_model(tmp_path)(**inputs, output_attentions=True)
        theirs = auto.eval()(**inputs, output_attentions=True)
    assert plain.attentions is None
    assert_close(mine.logits, plain.logits, **CLOSE)
    pairs = {"attentions": "decoder_attentions" if two else "attentions"}
    if two:
        pairs |= {"encoder_attentions": "encoder_attentions", "cross_attentions": "cross_attentions"}
    for own, other in pairs.items():
        found, wanted = getattr(mine, own), getattr(theirs, other)
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            if (own == "attentions" and not two) or own == "encoder_attentions":
                a, b = a * mask[:, None, :, None], b * mask[:, None, :, None]  # padding that asks means nothing
            assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("name", [n for n in PRESETS if n.endswith("-tiny") and PRESETS[n].recurrent is None])
def test_every_family_shows_its_layers(name: str) -> None:
    model = make_model(PRESETS[name]).eval()
    ids = torch.randint(3, 100, (1, 9))
    extra = {"decoder_input_ids": ids} if model.config.architecture == "encoder-decoder" else {}
    with torch.no_grad():
        out = model(ids, output_attentions=True, output_hidden_states=True, **extra)
    layers = model.config.decoder_layers if extra else model.config.num_layers
    assert out.attentions is not None
    assert out.hidden_states is not None
    assert len(out.attentions) == layers
    assert len(out.hidden_states) == layers + 1
    for weights in out.attentions:
        assert_close(weights.sum(-1), torch.ones(1, model.config.num_heads, 9))
    assert ScalarMix(layers + 1)(out.hidden_states).shape == (1, 9, model.config.dim)
