"""Speculative decoding: the text of greedy decoding, and the target's distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generate.test_loop import PROMPTS
from torch import Tensor

from firth import api
from firth.commands.generate import generate_in_batches
from firth.core.errors import UserError
from firth.generate import GenerationConfig, generate_sequences, speculative
from firth.generate.speculative import count_accepted, generate_speculative, sample_after_drafts
from firth.models.config import LearnedPosition
from firth.tokens import TokenIds

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


class TableSide:
    """A model whose next token depends on the last one alone, in place of `SpeculativeSide`."""

    def __init__(
        self, logits_VV: Tensor, prompt: TokenIds, budget: int, config: GenerationConfig, vocab_size: int = 0
    ) -> None:
        self.logits_VV, self.ids, self.num_prompt, self.vocab_size = logits_VV, list(prompt), len(prompt), 3
        self.state, self.eos_ids = SimpleNamespace(device="cpu"), ()
        self.last_1V = logits_VV[prompt[-1:]]

    @property
    def num_new(self) -> int:
        return len(self.ids) - self.num_prompt

    def append(self, ids: Sequence[int]) -> Tensor:
        logits_TV = torch.cat([self.last_1V, self.logits_VV[list(ids)]])
        self.ids, self.last_1V = [*self.ids, *ids], logits_TV[-1:]
        return logits_TV

    def truncate(self, num_new: int, last_1V: Tensor) -> None:
        del self.ids[self.num_prompt + num_new :]
        self.last_1V = last_1V

    def probabilities(self, logits_TV: Tensor, step: int) -> Tensor:
        return logits_TV.softmax(-1)


def test_the_loop_keeps_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts of three tokens, written in several passes, have the probability of the target."""
    monkeypatch.setattr(speculative, "SpeculativeSide", TableSide)
    torch.manual_seed(1)
    V, rows = 3, 600
    target_VV, draft_VV = (2 * torch.randn(V, V, dtype=torch.double) for _ in range(2))
    config, counts = GenerationConfig(temperature=1.0, seed=3), Counter[tuple[int, ...]]()
    monkeypatch.setattr(speculative, "fit_prompt", lambda draft, prompt, limit: prompt)
    for row in range(rows):
        sequence, _ = speculative.decode_row(target_VV, draft_VV, [0], 3, config, row, None, False)  # type: ignore[arg-type]
        counts[tuple(sequence.tokens)] += 1
    p_VV = target_VV.softmax(-1)
    chi_squared = 0.0
    for a, b, c in product(range(V), repeat=3):
        expected = rows * float(p_VV[0, a] * p_VV[a, b] * p_VV[b, c])
        chi_squared += (counts[a, b, c] - expected) ** 2 / expected
    assert chi_squared < 60, "26 degrees of freedom: 0.0002 of all seeds are above"


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


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_draft_with_fewer_positions_and_another_padding(family: str, untrained: Any) -> None:
    """Models with one tokenizer pad their vocabularies differently; a draft may not read the whole prompt."""
    model = untrained(family)
    if family == "gpt2":
        model = untrained(replace(model.config, position=LearnedPosition(64)))
    size, prompts = model.config.vocab_size, [(ids * 9)[:40] for ids in PROMPTS[:2]]
    config = GenerationConfig(max_new_tokens=9)
    wanted = generate_sequences(model, prompts, config, logprobs=False)
    for vocab_size in (size - 5, size + 60):
        changes = {"position": LearnedPosition(16)} if family == "gpt2" else {}
        draft = untrained(replace(model.config, vocab_size=vocab_size, **changes), 1)
        draft.tokenizer = model.tokenizer
        found, _ = generate_speculative(model, draft, prompts, config, logprobs=False)
        assert [s.tokens for s in found] == [s.tokens for s in wanted]


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
    with pytest.raises(UserError, match=r"The draft cannot propose tokens\. "):
        generate_speculative(model, untrained("bert"), PROMPTS, GenerationConfig())
    with pytest.raises(UserError, match="beam search"):
        generate_speculative(model, model, PROMPTS, GenerationConfig(num_beams=2))


def test_texts_with_a_draft(untrained: Any) -> None:
    model, draft = untrained("gpt2"), untrained("gpt2", 1)
    settings = dict(max_new_tokens=8)
    wanted = generate_in_batches(model, ["Water is", "The"], settings)
    found = generate_in_batches(model, ["Water is", "The"], settings, draft)
    assert [r["text"] for r in found] == [r["text"] for r in wanted]
    assert api.generate(model, "Water is", draft=draft, **settings) == wanted[0]["text"]
