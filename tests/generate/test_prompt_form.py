"""A checkpoint's objective decides how its prompt is read: by generation, fine-tuning and evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firth.core.errors import UserError
from firth.evaluate.embed import embed_texts
from firth.evaluate.likelihood import SplitText, make_scorer
from firth.evaluate.logprobs import compute_logprobs
from firth.generate import GenerationConfig, fill, generate, generate_ids
from firth.generate.decode_state import make_decode_state
from firth.generate.text import PromptText
from firth.models import Model, load_model, make_model, make_sequence_template, read_config
from firth.models.config import ALiBi, LearnedPosition, T5Bias
from firth.models.presets import gpt2, unilm
from firth.models.prompt_form import prompt_form_of_objective
from firth.objectives import (
    CLM,
    OBJECTIVES,
    Batch,
    CounterRNG,
    Mixture,
    Objective,
    PrefixLM,
    WeightedObjective,
    corruption,
)
from firth.tasks import make_task
from firth.tasks.recipe import FinetuneRecipe
from firth.text import Example
from firth.tokens import Rows, Tokenizer, train_tokenizer
from firth.train import ComputeConfig
from firth.train.pretrain import describe_objective

FORMS = {
    "clm": "causal",
    "prefix-lm": "prefix",
    "lm-denoising": "denoising",
    "prefix-lm-denoising": "prefix-denoising",
    "unilm": "masked",
    "masked-next-token": "next-token",
    "mlm-and-clm": "causal-encoder",
    "mlm": "causal",
    "span-corruption": "causal",
}
KINDS = {"unilm": "wordpiece", "lm-denoising": "unigram", "prefix-lm-denoising": "unigram"}


@pytest.fixture
def trained_with(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> Any:
    """`trained_with("prefix-lm")`: a random model, saved and loaded as if this objective had trained it."""

    def make(name: str, **changes: Any) -> Model:
        tokenizer = tokenizers[KINDS.get(name, "byte-bpe")]
        make_config = unilm if name == "unilm" else gpt2
        torch.manual_seed(0)
        model = make_model(make_config(2, 32, 2, tokenizer.vocab.size, **{"position": LearnedPosition(64)} | changes))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.2)
        model.tokenizer, model.objective = tokenizer, describe_objective(OBJECTIVES[name])
        model.save(tmp_path / name, overwrite=True)
        return load_model(tmp_path / name)

    return make


@pytest.mark.parametrize("name", FORMS)
def test_the_form_is_that_of_the_objective(name: str) -> None:
    assert prompt_form_of_objective(describe_objective(OBJECTIVES[name])) == FORMS[name]


def test_a_mixture_continues_texts_if_a_part_does() -> None:
    def mix(*objectives: Objective) -> str:
        parts = tuple(WeightedObjective(part) for part in objectives)  # type: ignore[arg-type]
        return prompt_form_of_objective(describe_objective(Mixture(parts)))

    assert mix(CLM(), PrefixLM()) == "prefix"
    assert mix(OBJECTIVES["lm-denoising"], OBJECTIVES["prefix-lm-denoising"]) == "prefix-denoising"
    assert prompt_form_of_objective(None) == prompt_form_of_objective({"kind": "Mixture"}) == "causal"


def test_a_fine_tuned_checkpoint_keeps_the_form(trained_with: Any, tmp_path: Path) -> None:
    model = trained_with("prefix-lm")
    model.objective = None  # fine-tuned checkpoints name no objective
    model.save(tmp_path / "tuned")
    assert read_config(tmp_path / "tuned").prompt_form == "prefix"
    assert read_config(tmp_path / "tuned").family == "gpt2"


# --- the forward pass of training ---------------------------------------------------------------------------------


def training_logits(model: Model, name: str, text_ids: list[int], num_prefix: int) -> torch.Tensor:
    """Logits (T, V) of the objective's own batch, for a document whose prefix has `num_prefix` tokens."""

    class Fixed(CounterRNG):
        def uniform(self, purpose: str, width: int) -> np.ndarray:
            assert purpose == "prefix"
            return np.full((1, width), (num_prefix - 1 + 0.5) / (len(text_ids) - 1), np.float32)

    ids, zero = np.array([text_ids]), np.zeros((1, len(text_ids)), np.int32)
    rows = Rows(ids, zero, np.arange(ids.shape[1], dtype=np.int32)[None], np.ones_like(ids, bool), np.arange(1))
    batch = OBJECTIVES[name](rows, Fixed(0, np.arange(1)), model.tokenizer.vocab)  # type: ignore[union-attr]
    assert (batch.attention_rank[0] == 0).sum() == num_prefix
    return model.logits(batch._replace(labels=None).to(torch.device("cpu")))[0]


@pytest.mark.parametrize("position", [LearnedPosition(64), T5Bias(8, 16), ALiBi()], ids=["learned", "t5", "alibi"])
def test_prefill_and_steps_are_the_forward_pass_of_training(position: Any, trained_with: Any) -> None:
    """Prompts of three lengths in one batch: the logits of each step are those of the prefix LM's own batch."""
    model = trained_with("prefix-lm", position=position)
    prompts, new = [[4, 40, 41, 42, 43], [4, 50, 51], [4, 60, 61, 62, 63, 64, 65]], [[30, 31], [32, 33], [34, 35]]
    with torch.no_grad():
        for use_cache in (True, False):
            state = make_decode_state(model, prompts, 4, use_cache)
            logits = [state.prefill(), *(state.decode_step(torch.tensor(tokens)) for tokens in zip(*new, strict=True))]
            for row, (prompt, ids) in enumerate(zip(prompts, new, strict=True)):
                wanted = training_logits(model, "prefix-lm", [*prompt, *ids, 7], len(prompt))
                for step in range(3):
                    found = logits[step][row]
                    torch.testing.assert_close(
                        found, wanted[len(prompt) - 1 + step, : len(found)], rtol=1e-4, atol=1e-4
                    )
    causal = replace(model.config, prompt_form="causal")
    assert causal == model.config, "the form changes no weight"


@pytest.mark.parametrize("name", ["prefix-lm", "prefix-lm-denoising", "lm-denoising", "unilm"])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_cached_decoding_equals_uncached(name: str, num_beams: int, trained_with: Any) -> None:
    model = trained_with(name)
    prompts = ["The fox", "Anna said that the heron was older than the bridge.", "At noon"]
    settings = GenerationConfig(max_new_tokens=9, num_beams=num_beams)
    found = generate(model, prompts, settings)
    assert found == generate(model, prompts, settings, use_cache=False)
    assert all(text.startswith(prompt[:5]) or name == "unilm" for text, prompt in zip(found, prompts, strict=True))
    assert len(set(found)) == 3


def test_unilm_predicts_at_a_mask(trained_with: Any) -> None:
    """Each token is the argmax of UniLM's prefix batch: source bidirectional, target causal, [MASK] last."""
    model = trained_with("unilm")
    vocab, prompt = model.tokenizer.vocab, [model.tokenizer.vocab.cls, 40, 41, 42]
    (found,) = generate_ids(model, [prompt], 5)
    ids: list[int] = []
    for _ in range(5):
        rank = [*[0] * 4, *range(1, len(ids) + 2)]
        batch = Batch(
            np.array([[*prompt, *ids, vocab.mask]]),
            attention_rank=np.array([rank]),
            token_type_ids=(np.array([rank]) > 0).astype(int),
            target_positions=np.array([[len(rank) - 1]]),
        )
        with torch.no_grad():
            ids.append(int(model.logits(batch.to(torch.device("cpu")))[0, 0, : vocab.size].argmax()))
    assert found == ids[: len(found)]
    assert len(found) == 5 or ids[len(found)] == vocab.sep
    assert len(generate_ids(model, [[*prompt, *[43] * 56]], 50)[0]) <= 32, "a [MASK] needs a position too"
    with pytest.raises(UserError, match="cannot generate"):
        generate(trained_with("unilm").__class__(replace(model.config, prompt_form="causal")), ["The"])


@pytest.mark.parametrize("name", ["lm-denoising", "prefix-lm-denoising"])
def test_a_denoiser_fills_a_blank_at_the_end(name: str, trained_with: Any) -> None:
    """Its prompt is the beginning of the row that the objective makes of a text that ends with one noise span."""
    model = trained_with(name)
    vocab, text = model.tokenizer.vocab, list(model.tokenizer.encode("The fox came back"))
    first = vocab.sentinel_ids[0]
    prompt = PromptText(model, text, ())
    assert prompt.input_ids == [*text, first, vocab.eos, first]
    ids = np.array([[*text, 30, 31, vocab.eos]])
    doc = np.zeros_like(ids)
    maskable = ids != vocab.eos
    rows = Rows(ids, doc.astype(np.int32), np.arange(ids.shape[1], dtype=np.int32)[None], maskable, np.arange(1))
    noise = np.zeros_like(maskable)
    noise[0, [-3, -2]] = True
    n = len(text)
    batch = corruption.decoder_denoising_batch(rows, noise, n + 6, 4, vocab, name.startswith("prefix"))
    assert batch.input_ids[0, : n + 3].tolist() == prompt.input_ids
    with torch.no_grad():
        wanted = model.logits(batch._replace(labels=None).to(torch.device("cpu")))[0]  # at the sentinel, 30, 31
        for use_cache in (True, False):
            state = make_decode_state(model, [prompt.input_ids], 4, use_cache)
            found = [state.prefill(), state.decode_step(torch.tensor([30])), state.decode_step(torch.tensor([31]))]
            torch.testing.assert_close(torch.cat(found), wanted[1:4], rtol=1e-4, atol=1e-4)
        scorer = make_scorer(model)
        assert scorer.method == "span"
        ((_, scored),) = compute_logprobs(model, scorer.span_queries(SplitText(text, [30, 31], [])))
        expected = wanted[[1, 2]].log_softmax(-1)[[0, 1], [30, 31]]
        torch.testing.assert_close(torch.tensor(scored.logprobs).float(), expected, rtol=1e-4, atol=1e-4)
    blanks = fill(model, "The ___ came back to the ___.")
    assert len(blanks) == 2
    with pytest.raises(UserError, match="trained to denoise"):
        make_scorer(model, "left-to-right")


# --- evaluation and fine-tuning -----------------------------------------------------------------------------------


def test_scores_read_the_context_as_a_prefix(trained_with: Any) -> None:
    model = trained_with("prefix-lm")
    scorer = make_scorer(model)
    text = "The fox slept by the river, and Anna did not wake it."
    split = scorer.split_at_span(text, text.index(", and"), len(text), "here")
    with torch.no_grad():
        ((_, found),) = next(scorer.score_spans([split], jointly=True))
        ids = [*scorer.template.prefix_ids, *split.before, *split.answer]
        num_prefix = len(ids) - len(split.answer)
        logp = training_logits(model, "prefix-lm", ids, num_prefix)[num_prefix - 1 : -1].log_softmax(-1)
    wanted = logp[torch.arange(len(split.answer)), torch.tensor(split.answer)]
    torch.testing.assert_close(torch.tensor(found.logprobs).float(), wanted, rtol=1e-4, atol=1e-4)
    queries = list(make_scorer(model, max_seq_length=8, stride=3).text_queries(next(scorer.tokenize([text]))))
    assert queries[0].attention_rank == list(range(8)), "every token of the first window is scored"
    first = queries[1].target_positions[0]
    assert queries[1].attention_rank == [*[0] * (first + 1), *range(1, len(queries[1].input_ids) - first)]
    vectors = embed_texts(model, ["The fox slept", "The fox ran"], pool="first")
    assert not np.allclose(vectors[0], vectors[1]), "the first token sees the last"


def test_fine_tuning_reads_the_source_as_a_prefix(trained_with: Any) -> None:
    """Training and generation of text-to-text give the same logits at the first token of the answer."""
    for name in ("prefix-lm", "prefix-lm-denoising", "lm-denoising"):
        model = trained_with(name)
        task = make_task(
            "text-to-text", [], model.tokenizer, model.config, FinetuneRecipe(max_seq_length=24, max_target_length=8)
        )
        model = make_model(replace(model.config, vocab_size=task.tokenizer.vocab.size)).eval()
        model.tokenizer = task.tokenizer
        examples = [Example(0, ("The fox came back",), "otter"), Example(1, ("At noon Anna slept",), "crow")]
        items = task.encode(examples)
        batch = task.collate(items).to(torch.device("cpu"))
        assert (batch.attention_rank is not None) == name.startswith("prefix")
        with torch.no_grad():
            logits = model.logits(batch)
            for item in items:
                prefill = make_decode_state(model, [item.ids], 4).prefill()[0]
                is_first = (batch.labels == item.answer_ids[0]).nonzero()[0]
                torch.testing.assert_close(logits[tuple(is_first)], prefill, rtol=1e-4, atol=1e-4)
    source = model.tokenizer.encode("The fox came back")
    first = model.tokenizer.vocab.sentinel_ids[0]
    assert items[0].ids == [*source, first, model.tokenizer.vocab.eos, first], "no new token, and no begin token"


def test_a_task_head_reads_a_prefix_lm_in_both_directions(trained_with: Any, tmp_path: Path) -> None:
    model = trained_with("prefix-lm")
    task = make_task("classify", {"labels": ["a", "b"]}, model.tokenizer, model.config)
    config = task.configure_model(model.config)
    assert config.extras == (), "no auxiliary language model, which would see the token that it predicts"
    tuned = make_model(config).eval()
    tuned.tokenizer = model.tokenizer
    tuned.save(tmp_path / "tuned")
    again = load_model(tmp_path / "tuned")
    tokens = torch.tensor([[4, 40, 41, 42]])
    for one in (tuned, again):
        states = [one(t, output_hidden_states=True).hidden_states[-1][0, 0] for t in (tokens, tokens + (tokens == 42))]
        assert not torch.allclose(*states), "the first token sees the last"
    torch.testing.assert_close(tuned(tokens).logits, again(tokens).logits)


def test_unilm_learns_text_to_text() -> None:
    """A lookup of four words: masked answers are learned, and decoding writes them."""
    words = {"fox": "river", "goat": "bridge", "crow": "market", "otter": "harbour"}
    tokenizer = train_tokenizer([f"Anna saw the {a} {b}" for a, b in words.items()] * 5, "wordpiece", 200)
    vocab, cpu = tokenizer.vocab, torch.device("cpu")
    changes: dict[str, Any] = dict(dropout=0.0, attention_dropout=0.0, prompt_form="masked")
    config = unilm(1, 32, 2, vocab.size, position=LearnedPosition(64), **changes)
    task = make_task("text-to-text", [], tokenizer, config, FinetuneRecipe(max_seq_length=16, max_target_length=8))
    examples = [Example(i, (f"Anna saw the {a}",), b) for i, (a, b) in enumerate(words.items())]
    items = task.encode(examples)
    assert items[0].ids == make_sequence_template(config, vocab).apply(tokenizer.encode("Anna saw the fox"))[0]
    batch = task.collate(items)
    assert (task.collate(items).input_ids == batch.input_ids).all(), "a function of the items"
    is_masked = batch.input_ids == vocab.mask
    assert (batch.attention_rank[is_masked] > 0).all()
    assert ((batch.token_type_ids == 1) == (batch.attention_rank > 0)).all()
    assert is_masked.sum() == batch.num_targets >= len(items)
    torch.manual_seed(0)
    model = make_model(task.configure_model(config)).train()
    model.tokenizer = task.tokenizer
    optimizer, rng = torch.optim.AdamW(model.parameters(), 3e-3), np.random.default_rng(0)
    for _ in range(120):
        batch = task.collate([items[i] for i in rng.integers(4, size=16)])
        loss = model.loss(batch.to(cpu)) / batch.num_targets
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    predictions = task.predict(model, items, ComputeConfig(cpu, False, False), 4)
    assert [p.prediction for p in predictions] == list(words.values())
