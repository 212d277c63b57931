"""The same weights give the same logits, hidden states and gradients as `transformers`, in both directions."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from firth.models import PRESETS, Classes, Extra, LMHead, Model, ModelConfig, count_parameters, load_model, make_model
from firth.models.config import MLP, Boundary, Learned, Pair, Query
from firth.models.position import bucket
from firth.models.presets import bert, gpt2, t5, t5_v1_1
from firth.models.weights import to_hf, write_model

transformers = pytest.importorskip("transformers")
V, T, U = 61, 11, 7
LENGTHS = [11, 6, 9]  # of the three rows, when they are padded
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def tiny_bert(**changes: Any) -> Any:
    return transformers.BertConfig(
        vocab_size=V,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=24,
        **changes,
    )


def tiny_gpt2(**changes: Any) -> Any:
    return transformers.GPT2Config(
        vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_inner=48, n_positions=24, pad_token_id=0, **changes
    )


def tiny_t5(**changes: Any) -> Any:
    return transformers.T5Config(
        vocab_size=V,
        d_model=32,
        d_kv=12,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=10,
        decoder_start_token_id=0,
        initializer_factor=0.5,  # smaller logits, so that rounding stays below the bound
        **changes,
    )


def t5_1_1() -> Any:
    return tiny_t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False)


THEIRS: dict[str, Any] = {
    "bert": lambda: transformers.BertForMaskedLM(tiny_bert()),
    "bert-relu": lambda: transformers.BertForMaskedLM(tiny_bert(hidden_act="relu", layer_norm_eps=1e-3)),
    "bert-classes": lambda: transformers.BertForSequenceClassification(tiny_bert(num_labels=3)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(tiny_gpt2()),
    "gpt2-classes": lambda: transformers.GPT2ForSequenceClassification(tiny_gpt2(num_labels=3)),
    "t5": lambda: transformers.T5ForConditionalGeneration(tiny_t5()),
    "t5.1.1": lambda: transformers.T5ForConditionalGeneration(t5_1_1()),
}


def stir(model: torch.nn.Module, seed: int = 0) -> Any:
    """Move every weight, so that no bias of 0 and no norm of 1 hides a mistake."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.1)
    return model.eval()


def inputs(name: str, padded: bool) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(2, V, (3, T), generator=g)
    mask = torch.ones_like(ids)
    if padded:
        mask = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]).long()
        ids = ids * mask  # 0 is the padding token
    given = {"input_ids": ids}
    if padded:
        given["attention_mask"] = mask
    if name.startswith("bert"):
        given["token_type_ids"] = torch.randint(0, 2, (3, T), generator=g)
    if name.startswith("t5"):
        given["decoder_input_ids"] = torch.randint(2, V, (3, U), generator=g)
    return given


def at_text(x: Tensor, given: dict[str, Tensor]) -> Tensor:
    """States or logits where there is text; what stands on padding means nothing."""
    mask = given.get("attention_mask")
    return x[mask.bool()] if mask is not None and x.shape[:2] == mask.shape else x


def run(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Logits and hidden states where there is text, and gradients of a random mixture of the logits."""
    out = model(**given, output_hidden_states=True)
    states = getattr(out, "decoder_hidden_states", None) or out.hidden_states
    if getattr(out, "encoder_last_hidden_state", None) is not None:
        states = (*states, out.encoder_last_hidden_state)
    logits = at_text(out.logits, given)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).mean().backward()
    return logits.detach(), [at_text(s, given).detach() for s in states]


def gradients_in_their_names(model: Model) -> dict[str, Tensor]:
    mirror = copy.deepcopy(model)
    for p, q in zip(mirror.parameters(), model.parameters(), strict=True):
        assert q.grad is not None
        p.data = q.grad
    return to_hf(mirror)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", THEIRS)
def test_from_transformers(name: str, padded: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = stir(THEIRS[name]())
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    given = inputs(name, padded)
    logits, states = run(ours, given)
    their_logits, their_states = run(theirs, given)
    assert_close(logits, their_logits, **CLOSE)
    assert len(states) == len(their_states)
    for mine, other in zip(states, their_states, strict=True):
        assert_close(mine, other, **CLOSE)
    gradients = gradients_in_their_names(ours)
    wanted = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    assert gradients.keys() == wanted.keys()
    for key, g in wanted.items():
        assert_close(gradients[key], g, **CLOSE, msg=lambda m, key=key: f"{key}: {m}")


def test_left_padding_of_an_encoder(tmp_path: Path) -> None:
    theirs = stir(THEIRS["bert"]())
    theirs.save_pretrained(tmp_path)
    given = inputs("bert", padded=True)
    given["attention_mask"] = given["attention_mask"].flip(1)
    assert_close(run(load_model(tmp_path), given)[0], run(theirs, given)[0], **CLOSE)


NAMES = ("good", "bad", "so-so")
LONG = {"position": Learned(24), "mlp": MLP(48, "gelu-tanh")}
OURS: dict[str, tuple[ModelConfig, str]] = {
    "bert": (bert(2, 32, 4, V, position=Learned(24)), "AutoModelForMaskedLM"),
    "bert-classes": (bert(2, 32, 4, V, head=Classes(NAMES, pooled=True)), "AutoModelForSequenceClassification"),
    "gpt2": (gpt2(2, 32, 4, V, **LONG), "AutoModelForCausalLM"),
    "gpt2-classes": (gpt2(2, 32, 4, V, head=Classes(NAMES)), "AutoModelForSequenceClassification"),
    "t5": (t5(2, 32, 4, 48, V), "AutoModelForSeq2SeqLM"),
    "t5.1.1": (t5_v1_1(2, 32, 4, 48, V, head_dim=12), "AutoModelForSeq2SeqLM"),
    "t5.1.1-tied": (t5_v1_1(2, 32, 4, 48, V, head=LMHead()), "AutoModelForSeq2SeqLM"),
    "t5-uneven": (t5(1, 32, 4, 48, V, num_decoder_layers=3, head_dim=8), "AutoModelForSeq2SeqLM"),
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
    given = inputs(name, padded=False)
    assert_close(run(ours, given)[0], run(theirs.eval(), given)[0], **CLOSE)
    if isinstance(config.head, Classes):
        assert tuple(theirs.config.id2label[i] for i in range(3)) == NAMES
    again = load_model(tmp_path)
    assert again.config == replace(config, head_dim=None) if name == "t5-uneven" else again.config == config
    assert_close(run(again, given)[0], run(ours, given)[0], atol=0, rtol=0)


@pytest.mark.parametrize("extras", [(Pair(),), (Pair(), Boundary())], ids=["pair", "pair and boundary"])
def test_a_pair_head_is_theirs(extras: tuple[Extra, ...], tmp_path: Path) -> None:
    """BertForPreTraining in both directions; what it does not know beside that is passed over."""
    ours = stir(make_model(bert(2, 32, 4, V, position=Learned(24), extras=extras)))
    write_model(ours, tmp_path)
    theirs, info = transformers.BertForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert all(key.startswith("extras.boundary") for key in info["unexpected_keys"])
    given = inputs("bert", padded=True)
    out, x = theirs.eval()(**given), ours(**given, output_hidden_states=True)
    assert_close(at_text(x.logits, given), at_text(out.prediction_logits, given), **CLOSE)
    assert_close(ours.extras["pair"](x.hidden_states[-1]), out.seq_relationship_logits, **CLOSE)
    masked = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert_close(at_text(masked(**given).logits, given), at_text(x.logits, given), **CLOSE)
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_model(tmp_path / "theirs")
    assert again.config.extras[:1] == (Pair(),)
    assert torch.equal(again.extras["pair"].out.weight, ours.extras["pair"].out.weight)


@pytest.mark.parametrize("extra", [Boundary(), Query()], ids=["boundary", "query"])
def test_other_extras_do_not_keep_transformers_from_opening_it(extra: Extra, tmp_path: Path) -> None:
    ours = stir(make_model(bert(2, 32, 4, V, position=Learned(24), extras=(extra,))))
    write_model(ours, tmp_path)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    given = inputs("bert", padded=True)
    assert_close(at_text(ours(**given).logits, given), at_text(theirs(**given).logits, given), **CLOSE)


def test_an_untied_head_survives_a_save_by_transformers(tmp_path: Path) -> None:
    """Its config.json then says that the head is tied; the tensors know better."""
    ours = stir(make_model(OURS["t5.1.1"][0]))
    write_model(ours, tmp_path)
    transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).save_pretrained(tmp_path / "theirs")
    again = load_model(tmp_path / "theirs")
    given = inputs("t5", padded=False)
    assert_close(run(again, given)[0], run(ours, given)[0], atol=0, rtol=0)
    assert isinstance(again.config.head, LMHead)
    assert not again.config.head.tied


def test_the_loss_of_a_call_is_theirs(tmp_path: Path) -> None:
    for name in THEIRS:
        theirs = stir(THEIRS[name]())
        theirs.save_pretrained(tmp_path / name)
        given = inputs(name, padded=False)
        given.pop("decoder_input_ids", None)
        labels = torch.randint(2, V, (3, U if name.startswith("t5") else T), generator=torch.Generator().manual_seed(3))
        labels[0, 2:] = -100
        given["labels"] = labels[:, 1] % 3 if name.endswith("classes") else labels
        assert_close(load_model(tmp_path / name)(**given).loss, theirs(**given).loss, **CLOSE)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("bert-base", lambda: transformers.BertForMaskedLM(transformers.BertConfig())),
        ("gpt2", lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config())),
        (
            "t5-base",
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12)
            ),
        ),
        (
            "t5.1.1-base",
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(
                    d_model=768, d_ff=2048, num_layers=12, num_heads=12, feed_forward_proj="gated-gelu"
                )
            ),
        ),
    ],
)
def test_presets_have_the_published_size(name: str, make: Any) -> None:
    with torch.device("meta"):
        theirs = sum(p.numel() for p in make().parameters())
    config = PRESETS[name]
    assert isinstance(config.head, LMHead)
    own_head = 0 if config.head.tied else config.vocab_size * config.dim  # theirs is always tied in `transformers` 5
    assert count_parameters(config) == theirs + own_head


def test_buckets_are_theirs() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-300, 301)
    for num, far in ((32, 128), (8, 10), (16, 1000)):
        for both_ways in (True, False):
            theirs = T5Attention._relative_position_bucket(distance, both_ways, num, far)
            assert torch.equal(bucket(distance, num, far, both_ways), theirs)
