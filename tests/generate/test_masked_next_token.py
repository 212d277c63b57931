"""A model of masked next-token prediction scores, fills blanks and writes: against `transformers` and its own rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firth.evaluate.likelihood import make_scorer, text_likelihoods
from firth.generate import GenerationConfig, fill, generate, generate_ids
from firth.models import Model, load_model, make_model
from firth.models.presets import llama, modernbert
from firth.objectives import OBJECTIVES, Batch, MaskedNextToken
from firth.objectives.registry import describe_objective
from firth.tokens import Tokenizer

TEXTS = ["The fox came back.", "Anna said that the heron was older than the bridge."]
CPU = torch.device("cpu")


@pytest.fixture(params=["encoder", "decoder", "mlm-and-clm"])
def trained(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> Model:
    """A random model, saved and loaded as if the objective had trained it."""
    is_encoder = request.param != "decoder"
    tokenizer = tokenizers["wordpiece" if is_encoder else "byte-bpe"]
    torch.manual_seed(0)
    model = make_model((modernbert if is_encoder else llama)(3, 32, 2, 64, tokenizer.vocab.size))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    model.tokenizer = tokenizer
    objective = (
        OBJECTIVES["mlm-and-clm"] if request.param == "mlm-and-clm" else MaskedNextToken(architecture=request.param)
    )
    model.objective = describe_objective(objective)
    model.save(tmp_path / "saved")
    return load_model(tmp_path / "saved")


def text_ids(model: Model, text: str) -> list[int]:
    assert model.tokenizer is not None
    vocab = model.tokenizer.vocab
    ends = (vocab.cls, vocab.sep) if model.config.architecture == "encoder" else (vocab.bos or vocab.eos, vocab.eos)
    return [ends[0], *model.tokenizer.encode(text), ends[1]]  # type: ignore[list-item]


@torch.no_grad()
def test_a_masked_token_is_scored_where_it_is_predicted(trained: Model, tmp_path: Path) -> None:
    """Logits of `transformers`, for a decoder with a mask that lets every token attend to all.

    Masked next-token prediction has them at the position before, `mlm-and-clm` at the [MASK] itself.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    assert trained.tokenizer is not None
    is_encoder = trained.config.architecture == "encoder"
    shift = int(trained.config.predicts_next_token)
    other: Any = (AutoModelForMaskedLM if is_encoder else AutoModelForCausalLM).from_pretrained(tmp_path / "saved")
    expected = []
    for text in TEXTS:
        ids = text_ids(trained, text)
        mask = {} if is_encoder else {"attention_mask": torch.zeros(1, 1, len(ids), len(ids))}  # added to the scores
        total = 0.0
        for i in range(1, len(ids) - 1):
            hidden = [*ids[:i], trained.tokenizer.vocab.mask, *ids[i + 1 :]]
            logits = other.eval()(torch.tensor([hidden]), **mask).logits[0, i - shift]
            total += float(logits.log_softmax(-1)[ids[i]])
        expected.append(total)
    found = [one.logp for one in text_likelihoods(trained, TEXTS, method="pseudo")]
    assert found == pytest.approx(expected, abs=1e-3)

    first, *_, last = text_ids(trained, "The fox came back.")
    blanked = trained.tokenizer.encode(f"The {trained.tokenizer.special_tokens['mask']} came back.", parse_special=True)
    ids, at = [first, *blanked, last], 1 + blanked.index(trained.tokenizer.vocab.mask)
    mask = {} if is_encoder else {"attention_mask": torch.zeros(1, 1, len(ids), len(ids))}
    p = other(torch.tensor([ids]), **mask).logits[0, at - shift].softmax(-1)
    p[list(trained.tokenizer.vocab.special_ids)] = 0
    (blank,) = fill(trained, "The ___ came back.", top=3)
    assert [guess.probability for guess in blank.guesses] == pytest.approx(p.topk(3).values.tolist(), rel=1e-3)


@torch.no_grad()
def test_causal_scores_are_those_of_a_causal_row(trained: Model) -> None:
    expected = []
    for text in TEXTS:
        ids = np.array([text_ids(trained, text)[:-1]])
        row = Batch(ids, attention_rank=np.arange(ids.shape[1])[None])
        logprobs = trained.logits(row.to(CPU))[0].log_softmax(-1)
        expected.append(float(sum(logprobs[i, ids[0, i + 1]] for i in range(ids.shape[1] - 1))))
        # no token sees a later one: a shorter text has the same logits
        shorter = Batch(ids[:, :-2], attention_rank=np.arange(ids.shape[1] - 2)[None])
        torch.testing.assert_close(
            trained.logits(shorter.to(CPU))[0].log_softmax(-1), logprobs[:-2], atol=1e-4, rtol=1e-4
        )
    found = [one.logp for one in text_likelihoods(trained, TEXTS, method="left-to-right")]
    assert found == pytest.approx(expected, abs=1e-3)


def test_the_default_method_is_exact(trained: Model) -> None:
    scorer = make_scorer(trained)
    assert scorer.method == "left-to-right"
    assert scorer.is_exact


@pytest.mark.parametrize("num_beams", [1, 2])
def test_cached_decoding_equals_uncached(trained: Model, num_beams: int) -> None:
    prompts = ["The fox", "Anna said that the heron was older than the bridge.", "At noon"]
    settings = GenerationConfig(max_new_tokens=9, num_beams=num_beams)
    found = generate(trained, prompts, settings)
    assert found == generate(trained, prompts, settings, use_cache=False)
    assert len(set(found)) == 3


@torch.no_grad()
def test_each_new_token_is_the_best_of_a_causal_row(trained: Model) -> None:
    assert trained.tokenizer is not None
    prompt = text_ids(trained, "The fox")[:-1]
    (found,) = generate_ids(trained, [prompt], 6)
    ids = list(prompt)
    for token in found:
        row = Batch(np.array([ids]), attention_rank=np.arange(len(ids))[None])
        assert int(trained.logits(row.to(CPU))[0, -1, : trained.tokenizer.vocab.size].argmax()) == token
        ids.append(token)
    assert found
