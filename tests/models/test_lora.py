"""LoRA: the update by hand, merged or separate, and as `peft` reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from firth.core.errors import UserError
from firth.models import LMHead, Model, load_model, make_model
from firth.models.config import LearnedPosition, ModelConfig
from firth.models.hf.adapter import layer_name_pattern, write_adapter
from firth.models.lora import LoRAConfig, LoRALinear, add_lora, has_lora, train_new_tokens
from firth.models.presets import PRESETS, bert, gpt2, t5
from firth.models.task_heads import with_classification_head
from firth.train.recipe import FreezeSchedule
from firth.train.unfreeze import ever_trainable

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
SURE: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
VOCABULARY = 50
CONFIGS: dict[str, ModelConfig] = {
    "bert": with_classification_head(bert(2, 32, 2, VOCABULARY, position=LearnedPosition(32), **SURE), ("a", "b", "c")),
    "gpt2": gpt2(2, 32, 2, VOCABULARY, position=LearnedPosition(32), **SURE),
    "t5": t5(2, 32, 2, 64, VOCABULARY, **SURE),
}


def shrunk(name: str) -> ModelConfig:
    """A family's smallest preset, with smaller sizes."""
    config = PRESETS[f"{name}-tiny"]
    return replace(config, vocab_size=VOCABULARY, num_layers=2, **SURE)


def learned(config: ModelConfig, spec: LoRAConfig, seed: int = 0) -> Model:
    """A model with nonzero LoRA weights."""
    torch.manual_seed(seed)
    model = make_model(config).eval()
    add_lora(model, model.config, spec)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_b"):
                p.normal_(0, 0.1)
    return model


def answer(model: Any, config: ModelConfig) -> torch.Tensor:
    ids = torch.arange(5, 45).reshape(2, 20)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.architecture == "encoder-decoder":
        inputs["decoder_input_ids"] = ids[:, :7]
    with torch.no_grad():
        return model(**inputs).logits


def test_a_layer_by_hand() -> None:
    """Two slices of two rows and one row, rank 1, scaled by 3."""
    linear = nn.Linear(2, 3, bias=False)
    layer = LoRALinear(linear, (2, 1), LoRAConfig(rank=1, alpha=3.0))
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [1, 1]]))
        layer.lora_a.copy_(torch.tensor([[[1.0, 2.0]], [[0.0, 1.0]]]))
        layer.lora_b.copy_(torch.tensor([[1.0], [10.0], [100.0]]))
    x = torch.tensor([2.0, 3.0])  # the first part reads 8 of it, the second 3
    assert layer(x).tolist() == [2 + 3 * 8, 3 + 3 * 80, 5 + 3 * 300]
    assert layer.lora_delta(x, 0, 2).tolist() == [3 * 8, 3 * 80]
    assert layer.lora_delta(x, 2).tolist() == [3 * 300]
    assert layer.lora_delta(x, 1).tolist() == [3 * 80, 3 * 300]
    assert (layer.merged_weight() @ x).tolist() == layer(x).tolist()


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_rows_of_new_tokens_are_trained_alone(name: str, tmp_path: Path) -> None:
    """Tokens 40 to 44 of 50: rows that a published model has left over. The output is tied (gpt2), or its own."""
    config = CONFIGS.get(name) or shrunk(name)
    torch.manual_seed(0)
    plain = make_model(config).eval()
    plain.save(tmp_path / "base")
    model = load_model(tmp_path / "base").eval()
    spec = LoRAConfig(rank=2)
    add_lora(model, model.config, spec)
    train_new_tokens(model, 40, 44)
    assert torch.equal(answer(model, config), answer(plain, config))
    names = {n for n in ever_trainable(model, FreezeSchedule()) if not n.endswith(("lora_a", "lora_b"))}
    assert names == {"embed.tokens.lora_rows"}
    with torch.no_grad():
        model.embed.tokens.lora_rows.add_(torch.randn(4, 1))
        plain.embed.tokens.weight[40:44] = model.embed.tokens.lora_rows
    torch.testing.assert_close(answer(model, config), answer(plain, config), rtol=0, atol=1e-5)
    model.save(tmp_path / "merged")
    assert torch.equal(load_model(tmp_path / "merged").embed.tokens.weight, plain.embed.tokens.weight)
    (tmp_path / "adapter").mkdir()
    write_adapter(model, spec, str(tmp_path / "base"), tmp_path / "adapter")
    theirs = getattr(transformers, AUTO[name]).from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    torch.testing.assert_close(answer(theirs, config), answer(model, config), rtol=0, atol=1e-5)


def test_initial_outputs_are_unchanged() -> None:
    for config in CONFIGS.values():
        torch.manual_seed(0)
        plain = make_model(config).eval()
        before = answer(plain, config)
        add_lora(plain, plain.config, LoRAConfig(rank=2, targets="all"))
        assert has_lora(plain)
        assert torch.equal(answer(plain, config), before)


def test_dropout_is_for_training_only() -> None:
    model = learned(CONFIGS["bert"], LoRAConfig(dropout=0.5))
    assert torch.equal(answer(model, model.config), answer(model, model.config))
    model.train()
    assert not torch.equal(answer(model, model.config), answer(model, model.config))


@pytest.mark.parametrize(("targets", "matrices"), [("attention", 2), ("all", 4)])
def test_target_matrices(targets: Any, matrices: int) -> None:
    model = learned(CONFIGS["gpt2"], LoRAConfig(targets=targets))
    found = [name for name, m in model.named_modules() if isinstance(m, LoRALinear)]
    assert len(found) == 2 * matrices
    assert ("stack.blocks.1.mlp.down" in found) == (targets == "all")


@pytest.mark.parametrize(
    "name", ["bert", "gpt2", "t5", "roberta", "llama", "deberta", "deberta-v3", "bart", "albert", "modernbert"]
)
def test_saved_weights_are_merged(name: str, tmp_path: Path) -> None:
    config = CONFIGS.get(name) or shrunk(name)
    model = learned(config, LoRAConfig(rank=4, targets="all"))
    torch.manual_seed(0)
    assert not torch.allclose(answer(model, config), answer(make_model(config).eval(), config), atol=1e-3)
    model.save(tmp_path / "merged")
    again = load_model(tmp_path / "merged")
    assert not has_lora(again)
    torch.testing.assert_close(answer(again, config), answer(model, config), rtol=1e-4, atol=1e-5)


AUTO = {
    "bert": "AutoModelForSequenceClassification",
    "roberta": "AutoModelForSequenceClassification",
    "gpt2": "AutoModelForCausalLM",
    "llama": "AutoModelForCausalLM",
    "t5": "AutoModelForSeq2SeqLM",
    "bart": "AutoModelForSeq2SeqLM",
    "deberta": "AutoModelForSequenceClassification",
    "deberta-v3": "AutoModelForSequenceClassification",
}


@pytest.mark.parametrize("targets", ["attention", "all"])
@pytest.mark.parametrize("name", AUTO)
def test_peft_opens_the_adapter_with_equal_logits(name: str, targets: Any, tmp_path: Path) -> None:
    config = CONFIGS.get(name) or shrunk(name)
    if "Classification" in AUTO[name] and name != "bert":
        config = with_classification_head(config, ("a", "b", "c"))
    spec = LoRAConfig(rank=3, alpha=5.0, targets=targets)
    ours = learned(config, spec)
    torch.manual_seed(0)
    base = make_model(config)
    base.save(tmp_path / "base")
    with torch.no_grad():  # a head that was learned too
        for p in ours.head.parameters():
            p.add_(0.0 if isinstance(config.head, LMHead) else 0.1)
    (tmp_path / "adapter").mkdir()
    write_adapter(ours, spec, str(tmp_path / "base"), tmp_path / "adapter")
    theirs = getattr(transformers, AUTO[name]).from_pretrained(tmp_path / "base")
    alone = answer(theirs.eval(), config)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    assert not torch.allclose(answer(theirs, config), alone, atol=1e-3)
    torch.testing.assert_close(answer(theirs, config), answer(ours, config), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "t5gemma"])
def test_peft_opens_the_embeddings_of_new_tokens(name: str, tmp_path: Path) -> None:
    """T5Gemma has two copies of them."""
    config, spec = CONFIGS.get(name) or shrunk(name), LoRAConfig(rank=3)
    ours = learned(config, spec)
    torch.manual_seed(0)
    make_model(config).save(tmp_path / "base")
    train_new_tokens(ours, VOCABULARY // 2, VOCABULARY)
    with torch.no_grad():
        ours.embed.tokens.lora_rows.add_(0.3)
    (tmp_path / "adapter").mkdir()
    write_adapter(ours, spec, str(tmp_path / "base"), tmp_path / "adapter")
    auto = transformers.AutoModelForCausalLM if name == "gpt2" else transformers.AutoModelForSeq2SeqLM
    theirs = peft.PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
    torch.testing.assert_close(answer(theirs, config), answer(ours, config), rtol=0, atol=1e-5)


def test_adapters_that_peft_cannot_open_raise(tmp_path: Path) -> None:
    model = learned(shrunk("xlnet"), LoRAConfig())
    with pytest.raises(UserError, match="xlnet has queries and keys that are no layers"):
        write_adapter(model, LoRAConfig(), str(tmp_path), tmp_path)
    assert not list(tmp_path.iterdir())


def test_target_modules_pattern() -> None:
    assert layer_name_pattern("h.11.c_attn") == r"h\.\d+\.c_attn"
