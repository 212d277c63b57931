"""FLOPs, counted by torch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from firth.models import ModelConfig, make_model
from firth.models.config import BottleneckConfig, Rotary
from firth.models.presets import albert, bert, gpt2, ib_bert, mobilebert, rembert, t5
from firth.models.sizes import flops_per_token

T = 16
CONFIGS: dict[str, ModelConfig] = {
    "bert": bert(3, 32, 4, 50),
    "gpt2": gpt2(2, 32, 4, 50),
    "albert": albert(3, 32, 4, 16, 50),
    "shared keys": gpt2(2, 32, 4, 50, position=Rotary(), num_kv_heads=2, head_dim=6),
    "mobilebert": mobilebert(2, 32, 4, 16, 12, 50),
    "mobilebert narrow": mobilebert(2, 32, 4, 16, 12, 50, bottleneck=BottleneckConfig(16, 2, "narrow")),
    "ib-bert": ib_bert(2, 32, 4, 48, 12, 50),
    "rembert": rembert(2, 32, 4, 12, 40, 50),
    "t5": t5(2, 32, 4, 48, 50, num_decoder_layers=3),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_equal_torchs_count(name: str) -> None:
    config = CONFIGS[name]
    model, ids = make_model(config).eval(), torch.zeros(2, T, dtype=torch.long)
    extra = {"decoder_input_ids": ids} if config.architecture == "encoder-decoder" else {}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, attention_mask=torch.ones_like(ids), output_attentions=True, **extra)
    tokens = ids.numel() * (2 if extra else 1)
    assert counter.get_total_flops() / tokens == pytest.approx(flops_per_token(config, T))
