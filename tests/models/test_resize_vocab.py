"""New tokens: their initial vectors, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.models import (
    AuxiliaryLM,
    LMHead,
    ModelConfig,
    grow_embeddings,
    grow_vocabulary,
    head_for_task,
    load_model,
    make_model,
)
from firth.models.config import GeneratorConfig
from firth.models.presets import albert, bart, bert, deberta_v3, gpt2, llama, rembert
from firth.objectives.batch import Batch
from firth.tokens import Tokenizer, load_tokenizer, train_tokenizer
from firth.tokens.extend import extend_tokenizer, propose_tokens

V, NEW = 30, 33
DECODER = llama(1, 16, 2, 24, V)
CONFIGS: dict[str, ModelConfig] = {
    "tied, with a bias": bert(1, 16, 2, V),
    "narrow": albert(1, 16, 2, 8, V),
    "tied": gpt2(1, 16, 2, V),
    "untied": DECODER,
    "wider out": rembert(1, 16, 2, 8, 24, V),
    "generator": deberta_v3(1, 16, 2, V, extras=(GeneratorConfig(0.5, disentangle_embeddings=True),)),
    "encoder-decoder": bart(1, 16, 2, V),
    "words beside": replace(
        DECODER, head=head_for_task(DECODER, "classify", ("a", "b")), extras=(AuxiliaryLM(head=LMHead(tied=False)),)
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_old_vectors_stay_and_new_ones_have_their_distribution(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make_model(CONFIGS[name]).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    same = grow_vocabulary(model, NEW)
    assert same is model
    assert model.config == replace(CONFIGS[name], vocab_size=NEW)
    assert {k: v.shape for k, v in make_model(model.config).state_dict().items()} == {
        k: v.shape for k, v in model.state_dict().items()
    }
    for key, value in model.state_dict().items():
        assert torch.equal(value[: len(before[key])], before[key]) if value.ndim else True
    vectors, old = model.embed.tokens.weight, before["embed.tokens.weight"]
    assert_close(vectors[V:], old.mean(0).expand(3, -1), atol=float(old.std()), rtol=0)
    assert not torch.equal(vectors[V], vectors[V + 1])
    assert vectors.requires_grad
    model.save(tmp_path)
    assert load_model(tmp_path).config.vocab_size == NEW


def test_without_noise_new_rows_are_the_mean() -> None:
    """As in ULMFiT's program: `match_embeds` of fastai."""
    model = make_model(CONFIGS["tied, with a bias"])
    torch.nn.init.normal_(model.head.bias)
    rows, bias = model.embed.tokens.weight.clone(), model.head.bias.clone()
    grow_vocabulary(model, NEW, noise_ratio=0.0)
    assert_close(model.embed.tokens.weight[V:], rows.mean(0).expand(NEW - V, -1))
    assert_close(model.head.bias[V:], bias.mean().expand(NEW - V))


def test_the_seed_determines_new_vectors() -> None:
    def new(seed: int) -> torch.Tensor:
        torch.manual_seed(0)
        return grow_vocabulary(make_model(CONFIGS["tied"]), NEW, seed).embed.tokens.weight[V:]

    assert torch.equal(new(0), new(0))
    assert not torch.equal(new(0), new(1))


def test_logits_of_old_tokens_are_unchanged() -> None:
    model, tokens = make_model(CONFIGS["untied"]).eval(), torch.randint(0, V, (2, 6))
    before = model.logits(Batch(tokens))
    after = grow_vocabulary(model, NEW).logits(Batch(tokens))
    assert after.shape[-1] == NEW
    assert torch.equal(after[..., :V], before)
    assert_close(after[..., V:].mean(), before.mean(), atol=0.1, rtol=0)


def test_a_model_does_not_shrink() -> None:
    model = make_model(CONFIGS["tied"])
    assert grow_vocabulary(model, V).config == CONFIGS["tied"]
    with pytest.raises(UserError, match="grow, and not shrink to 29"):
        grow_vocabulary(model, V - 1)


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe", "unigram"])
def test_a_tokenizer_with_more_tokens(kind: str, tmp_path: Path) -> None:
    text = "the cat sat on the mat, and the dog sat on the log. " * 4
    plain = train_tokenizer([text], kind, 400 if kind == "byte-bpe" else 140)
    more = plain.with_special_tokens(["<delimiter>", "<extract>"])
    assert more.vocab.size == plain.vocab.size + 2
    first = plain.vocab.size
    assert more.vocab.special_ids[-2:] == (first, first + 1)
    assert more.encode("the cat<delimiter>", parse_special=True)[-1] == first
    assert more.encode("the cat sat") == plain.encode("the cat sat")
    assert first not in more.encode("the <delimiter> cat")  # text that looks like one stays text
    assert more.vocab.sentinel_ids == plain.vocab.sentinel_ids
    assert more.with_special_tokens(["<extract>"]).vocab.size == more.vocab.size
    assert plain.vocab.size == first
    more.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.vocab == more.vocab
    assert again.fingerprint == more.fingerprint != plain.fingerprint


@pytest.fixture(scope="module")
def extended() -> tuple[Tokenizer, Tokenizer]:
    """A tokenizer, and the same with two words, made of two pieces each, and a character that it does not know."""
    old = train_tokenizer(["the cat sat on the mat"] * 4, "wordpiece", 60)
    return old, extend_tokenizer(old, propose_tokens(old, ["thecat catsat ŋ"] * 20, 8))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_padding", [0, 9])
def test_rows_of_new_tokens_are_the_mean_of_their_old_pieces(
    name: str, num_padding: int, extended: tuple[Tokenizer, Tokenizer]
) -> None:
    """For every tensor with a row per token; also where the model has rows that no token uses."""
    old, new = extended
    size = old.vocab.size
    torch.manual_seed(0)
    model = make_model(replace(CONFIGS[name], vocab_size=size + num_padding))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert grow_embeddings(model, old, new) is model
    assert model.config.vocab_size == max(new.vocab.size, size + num_padding)
    the, cat, unknown = new.encode("the")[0], new.encode("cat")[0], new.encode("ŋ")[0]
    thecat = new.encode("thecat")
    assert len(thecat) == 1
    assert min(thecat[0], unknown) >= size > max(the, cat)
    grown = [k for k, v in before.items() if v.ndim and len(v) == size + num_padding]
    assert grown
    for key in grown:
        rows, old_rows = model.state_dict()[key], before[key]
        assert torch.equal(rows[:size], old_rows[:size])
        pieces = old_rows[old.encode("thecat")]
        assert_close(rows[thecat[0]], pieces.mean(0))
        assert_close(rows[unknown], old_rows[:size].mean(0))


def test_a_tokenizer_of_another_model(extended: tuple[Tokenizer, Tokenizer]) -> None:
    with pytest.raises(UserError, match="it is not the model's"):
        grow_embeddings(make_model(replace(CONFIGS["tied"], vocab_size=10)), *extended)
