"""Speculative decoding: the text of greedy decoding, and the target's distribution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from generate.test_loop import PROMPTS

from firth import api
from firth.commands.generate import generate_in_batches
from firth.core.errors import UserError
from firth.generate import GenerationConfig, generate_sequences
from firth.generate.speculative import count_accepted, generate_speculative, sample_after_drafts

ROWS = 400_000


def test_the_distribution_is_the_targets() -> None:
    """Two drafts from q over three tokens, each given the one before: all triples have the probability of p."""
    torch.manual_seed(0)
    V, K = 3, 2
    p_first, q_first = torch.rand(2, V).double().pow(2)
    p_first, q_first = p_first / p_first.sum(), q_first / q_first.sum()
    p_next, q_next = torch.rand(2, V, V).double().pow(2)  # of a token, given the one before
    p_next, q_next = p_next / p_next.sum(-1, keepdim=True), q_next / q_next.sum(-1, keepdim=True)
    q_next[1, 2] = 0.0  # a token that the draft never proposes
    q_next[1] /= q_next[1].sum()
    first = torch.multinomial(q_first, ROWS, replacement=True)
    second = torch.multinomial(q_next[first], 1)[:, 0]
    drafts = torch.stack([first, second], 1)
    p = torch.stack([p_first.expand(ROWS, V), p_next[first], p_next[second]], 1)
    q = torch.stack([q_first.expand(ROWS, V), q_next[first]], 1)
    accepted = count_accepted(p, q, drafts, torch.rand(ROWS, K))
    token = sample_after_drafts(p, q, accepted, torch.rand(ROWS, 1))
    assert set(accepted.tolist()) == {0, 1, 2}
    # complete each row to three tokens by the target itself, as later passes would
    tokens = torch.cat([drafts, torch.zeros(ROWS, 1, dtype=torch.long)], 1)
    tokens.scatter_(1, accepted[:, None], token[:, None])
    for position in (1, 2):
        late = torch.multinomial(p_next[tokens[:, position - 1]], 1)[:, 0]
        tokens[:, position] = torch.where(accepted < position, late, tokens[:, position])
    found = torch.bincount(tokens @ torch.tensor([9, 3, 1]), minlength=27).double() / ROWS
    wanted = (p_first[:, None, None] * p_next[:, :, None] * p_next[None]).flatten()
    assert ((found - wanted).abs() < 5 * (wanted * (1 - wanted) / ROWS).sqrt() + 1e-6).all()


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_greedy_is_greedy(family: str, untrained: Any) -> None:
    model = untrained(family)
    wanted = generate_sequences(model, PROMPTS, GenerationConfig(max_new_tokens=14))
    for draft in (untrained(family, 1), model):
        found, tokens_per_pass = generate_speculative(model, draft, PROMPTS, GenerationConfig(max_new_tokens=14))
        assert [(s.tokens, s.finished) for s in found] == [(s.tokens, s.finished) for s in wanted]
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert (tokens_per_pass > 4) == (draft is model)
        bare, _ = generate_speculative(model, draft, PROMPTS, GenerationConfig(max_new_tokens=14), logprobs=False)
        assert bare == [replace(sequence, logprobs=[], score=0) for sequence in found]


def test_a_sample_of_the_model_itself_is_always_accepted(untrained: Any) -> None:
    model = untrained("llama")
    config = GenerationConfig(max_new_tokens=30, temperature=1.0, top_k=20, seed=2, num_return_sequences=2)
    found, tokens_per_pass = generate_speculative(model, model, PROMPTS, config)
    again, _ = generate_speculative(model, model, PROMPTS[1:], config, first_row=2)
    assert tokens_per_pass > 5
    assert len({tuple(s.tokens) for s in found}) == 8
    assert [s.tokens for s in again] == [s.tokens for s in found[2:]]


def test_a_tiny_temperature_is_greedy(untrained: Any) -> None:
    model, draft = untrained("gpt2"), untrained("gpt2", 1)
    greedy, tiny = (GenerationConfig(max_new_tokens=6, temperature=t) for t in (0.0, 1e-320))
    wanted, _ = generate_speculative(model, draft, PROMPTS, greedy)
    assert generate_speculative(model, draft, PROMPTS, tiny)[0] == wanted


def test_eos_and_stop_strings_end_a_text(untrained: Any) -> None:
    model, draft = untrained("gpt2"), untrained("gpt2", 1)
    free = generate_sequences(model, PROMPTS, GenerationConfig(max_new_tokens=14))
    token = free[0].tokens[5]
    wanted = [s.tokens[: s.tokens.index(token) + 1] if token in s.tokens else s.tokens for s in free]
    found, _ = generate_speculative(
        model, draft, PROMPTS, GenerationConfig(max_new_tokens=14), stop_fn=lambda _, ids: token in ids
    )
    assert [s.tokens for s in found] == wanted
    model.eos_token_ids = (token,)
    for side in (draft, model):
        ended, _ = generate_speculative(model, side, PROMPTS, GenerationConfig(max_new_tokens=14))
        assert [s.tokens for s in ended] == [ids[:-1] if ids[-1] == token else ids for ids in wanted]


def test_other_tokenizers_and_settings_are_refused(untrained: Any, tokenizers: Any) -> None:
    model, other = untrained("gpt2"), untrained("t5")
    with pytest.raises(UserError, match="another tokenizer"):
        generate_speculative(model, other, PROMPTS, GenerationConfig())
    with pytest.raises(UserError, match="beam search"):
        generate_speculative(model, model, PROMPTS, GenerationConfig(num_beams=2))


def test_texts_with_a_draft(untrained: Any) -> None:
    model, draft = untrained("gpt2"), untrained("gpt2", 1)
    settings = dict(max_new_tokens=8)
    wanted = generate_in_batches(model, ["Water is", "The"], settings)
    found = generate_in_batches(model, ["Water is", "The"], settings, draft)
    assert [r["text"] for r in found] == [r["text"] for r in wanted]
    assert api.generate(model, "Water is", draft=draft, **settings) == wanted[0]["text"]
