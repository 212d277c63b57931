"""Text to text in packed rows: equal to single examples, trained, decoded, and scored on all references."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tasks.small import ANIMALS, CPU, PLACES, WORDS, learn, model_for, parts

from firth.core.errors import UserError
from firth.generate import GenerationConfig, generate_ids
from firth.metrics import compute_metrics
from firth.objectives import IGNORE_INDEX
from firth.tasks import FinetuneRecipe, Prediction, extract, make_task, text_to_text
from firth.tasks.packing import pack_texts
from firth.tasks.seq2seq_batch import DecoderExample, pack_alongside, pack_decoder_examples, pack_seq2seq_examples
from firth.tasks.text_to_text import AnswerConfig, LabelRankingTask
from firth.text import Example

FAMILIES = ["t5", "bart", "gpt2", "llama"]


def examples(number: int = 12) -> list[Example]:
    rng = random.Random(0)
    words = WORDS[:-2]
    return [
        Example(
            i, (" ".join(rng.choices(words, k=rng.randint(1, 6))),), " ".join(rng.choices(words, k=rng.randint(1, 4)))
        )
        for i in range(number)
    ]


def made(family: str, known: list[Example], **fields: Any) -> Any:
    config, tokenizer = parts(family)
    recipe = FinetuneRecipe(**{"max_seq_length": 24, "max_target_length": 8} | fields)
    return make_task("text-to-text", known, tokenizer, config, recipe), config


def test_packed_pairs_by_hand() -> None:
    laid = pack_seq2seq_examples(
        [[5, 6, 7], [8], [9, 9]], [[[1]], [[2, 3]], [[4, 4, 4, 4]]], row_tokens=6, pad_id=0, decoder_start_id=90
    )
    batch = laid.batch
    assert batch.input_ids[0, :5].tolist() == [8, 9, 9, 0, 0]  # 2 and 4 positions on the longer side
    assert batch.document_ids[0, :4].tolist() == [0, 1, 1, -1]
    assert batch.decoder_input_ids[0, :7].tolist() == [90, 2, 90, 4, 4, 4, 0]
    assert batch.labels[0, :7].tolist() == [2, 3, 4, 4, 4, 4, IGNORE_INDEX]
    assert batch.decoder_document_ids[0].tolist() == [0] * 2 + [1] * 14
    assert batch.decoder_position_ids[0, :7].tolist() == [0, 1, 0, 1, 2, 3, 0]
    assert batch.input_ids[1, :3].tolist() == [5, 6, 7]
    assert batch.labels[1, :2].tolist() == [1, IGNORE_INDEX]
    assert laid.sum_by_answer(batch.labels.reshape(-1)[laid.label_slots]).tolist() == [1, 5, 16]


def test_packed_candidates_by_hand() -> None:
    laid = pack_seq2seq_examples(
        [[5, 6, 7], [8]], [[[1, 2], [1, 3, 4]], [[2]]], row_tokens=8, pad_id=0, decoder_start_id=90
    )
    batch, used = laid.batch, slice(6)
    assert batch.input_ids[0, :4].tolist() == [5, 6, 7, 8]
    assert batch.decoder_input_ids[0, used].tolist() == [90, 1, 90, 1, 3, 90]
    assert batch.labels[0, used].tolist() == [1, 2, 1, 3, 4, 2]
    assert batch.decoder_position_ids[0, used].tolist() == [0, 1, 0, 1, 2, 0]
    assert batch.decoder_document_ids[0, used].tolist() == [0, 0, 1, 1, 1, 2]
    assert laid.source_index is not None
    assert laid.shared_prefix is not None
    assert laid.source_index[0].tolist() == [0] * 5 + [1] * 11
    assert laid.shared_prefix.tolist() == [0, 1, 0, 1, 4, 5]
    assert laid.answer_lengths.tolist() == [2, 3, 1]


def test_packed_decoder_examples_by_hand() -> None:
    laid = pack_decoder_examples(
        [DecoderExample([5, 6, 7], [1]), DecoderExample([8, 9, 4, 3], [0, 2])], row_tokens=8, pad_id=0
    )
    batch = laid.batch
    assert batch.input_ids[0, :7].tolist() == [5, 6, 7, 8, 9, 4, 3]
    assert batch.labels.reshape(-1)[laid.label_slots].tolist() == [7, 9, 3]
    assert batch.input_ids[0][batch.target_positions.reshape(-1)[laid.label_slots]].tolist() == [6, 8, 4]


def test_packing_keeps_rows_within_their_width() -> None:
    rng = np.random.default_rng(0)
    packing = pack_texts(rng.integers(3, 20, 40), 32)
    other = pack_alongside(packing, rng.integers(1, 9, 40))
    doc, position = other.document_ids_and_positions()
    for i in range(40):
        positions = np.flatnonzero(doc[packing.row_index[i]] == packing.document_index[i])
        assert positions.tolist() == list(range(other.start[i], other.start[i] + other.lengths[i]))
        assert position[packing.row_index[i], positions].tolist() == list(range(other.lengths[i]))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_unpacked(family: str) -> None:
    task, config = made(family, examples())
    items = task.encode(examples())
    model = model_for(task, config).eval()
    model.tokenizer = task.tokenizer
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        packed = task.collate(items)
        assert len(packed.input_ids) < len(items)
        together = model.losses(packed.to(CPU.device))["targets"].item()
        alone = sum(model.losses(task.collate([item]).to(CPU.device))["targets"].item() for item in items)
    assert together == pytest.approx(alone, rel=1e-5)
    assert packed.num_targets == sum(len(item.answer_ids) for item in items)
    many, single = task.predict(model, items, CPU, 100), task.predict(model, items, CPU, 1)
    assert many == single


@pytest.mark.parametrize("family", FAMILIES)
def test_label_probabilities_do_not_depend_on_packing(family: str) -> None:
    config, tokenizer = parts(family)
    labels = ("red", "red and small", "blue and small", "the big cat", "the big cat and the red cat", "the big")
    task = LabelRankingTask(
        labels, tokenizer, config, AnswerConfig(24, 8)
    )  # more than fit into a row, some begin alike
    known = [e._replace(target=labels[i % 6]) for i, e in enumerate(examples())]
    items = task.encode(known)
    model = model_for(task, config).eval()
    found = task.probabilities(model, items, CPU, 5)
    for item, p_C in zip(items, found, strict=True):
        batches = [task.collate([item._replace(answer_ids=answer)]).to(CPU.device) for answer in task.label_token_ids]
        with torch.no_grad():
            costs = np.array([model.losses(batch)["targets"].item() for batch in batches])
        np.testing.assert_allclose(p_C, np.exp(-costs) / np.exp(-costs).sum(), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_choice_probabilities_do_not_depend_on_packing(family: str) -> None:
    config, tokenizer = parts(family)
    task = LabelRankingTask((), tokenizer, config, AnswerConfig(24, 8))
    answers = task.answer_tokenizer.encode_texts(
        ["red", "blue and small", "the big cat", "the", "the red cat near the big cat"]
    )
    items = [item._replace(candidates=tuple(answers[: 2 + i % 4])) for i, item in enumerate(task.encode(examples()))]
    model = model_for(task, config).eval()
    together = task.probabilities(model, items, CPU, 12)
    for item, p_C in zip(items, together, strict=True):
        (alone,) = task.probabilities(model, [item], CPU, 1)
        assert len(p_C) == len(item.candidates)
        np.testing.assert_allclose(p_C, alone, atol=1e-5)


@pytest.mark.parametrize(("name", "module"), [("text-to-text", text_to_text), ("extract", extract)])
def test_answers_in_bf16_are_generated_without_autocast(
    monkeypatch: pytest.MonkeyPatch, name: str, module: Any
) -> None:
    """A copy in bfloat16 generates: autocast would keep a GPU from its CUDA graphs. The model stays as it is."""
    config, tokenizer = parts("t5")
    known = [Example(0, ("the cat",), '{"a": "b"}' if name == "extract" else "a river")]
    task = make_task(name, known, tokenizer, config, FinetuneRecipe(max_seq_length=24, max_target_length=8))
    model, seen = model_for(task, config), []
    model.tokenizer = task.tokenizer

    def generate(model: Any, prompts: Any, generation_config: GenerationConfig, **options: Any) -> Any:
        seen.append((torch.is_autocast_enabled("cpu"), {p.dtype for p in model.parameters()}))
        return original(model, prompts, generation_config=generation_config, **options)

    target = "generate_sequences" if name == "text-to-text" else "generate_ids"
    original = getattr(module, target)
    monkeypatch.setattr(module, target, generate)
    assert len(task.predict(model, task.encode(known), replace(CPU, bf16=True), 2)) == 1
    assert len(task.predict(model, task.encode(known), CPU, 2)) == 1
    assert seen == [(False, {torch.bfloat16}), (False, {torch.float32})]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    copied = model.clone_as(torch.bfloat16)
    assert copied.tokenizer is model.tokenizer
    assert copied.num_parameters == model.num_parameters  # tied weights stay one


@pytest.mark.parametrize("family", ["t5", "bart", "gpt2"])
def test_a_tiny_model_learns_to_generate(family: str) -> None:
    """Which animal comes first?"""
    rng = random.Random(0)
    known = []
    for i in range(64):
        animal, place = rng.choice(ANIMALS), rng.choice(PLACES)
        known.append(Example(i, (rng.choice([f"{animal} near the {place}", f"the {place} and a {animal}"]),), animal))
    task, config = made(family, known)
    items = task.encode(known)
    model = learn(task, config, items, 150, rate=1e-2 if family == "t5" else 3e-3)
    scores = task.score(known, task.predict(model, items, CPU, 20))
    assert scores["exact_match"] > 0.9
    again = make_task("text-to-text", task.metadata(), task.tokenizer, model.config)
    assert again.metadata() == task.metadata()
    assert again.predict(model, again.encode(known[:5]), CPU, 20) == task.predict(model, items[:5], CPU, 20)


def test_a_prefix_is_prepended_and_saved() -> None:
    known = [Example(0, ("the cat",), "cat")]
    task, _ = made("t5", known, prefix="big red: ")
    plain, _ = made("t5", [])
    (item,) = task.encode(known)
    assert task.tokenizer.decode(item.ids) == "big red: the cat"
    assert task.metadata()["prefix"] == "big red: "
    again = make_task("text-to-text", task.metadata(), task.tokenizer, parts("t5")[0])
    assert again.encode(known) == [item] != plain.encode(known)


def test_recipes_set_beams_and_length_penalty() -> None:
    task, config = made("t5", examples(), num_beams=3, length_penalty=2.0, max_target_length=5)
    model = model_for(task, config)
    model.tokenizer = task.tokenizer
    items = task.encode(examples(4))
    found = [p.prediction for p in task.predict(model, items, CPU, 4)]
    beams = GenerationConfig(max_new_tokens=5, num_beams=3, length_penalty=2.0)
    ids = [generate_ids(model, [item.ids], generation_config=beams)[0] for item in items]
    assert found == [task.tokenizer.decode(row).strip() for row in ids]
    assert all(len(row) <= 5 for row in ids)


def test_every_reference_counts() -> None:
    task, _ = made("t5", examples())
    two = Example(0, ("who",), "the cat", references=("the cat", "a dog"))
    one = Example(1, ("what",), "a fox")
    scores = task.score([two, one], [Prediction("a dog"), Prediction("a fox")])
    assert scores["exact_match"] == 1.0
    assert scores["rouge_l"] == pytest.approx(100)
    assert scores == compute_metrics("text-to-text", ["a dog", "a fox"], [["the cat", "a dog"], "a fox"])


def test_truncated_examples_are_counted() -> None:
    task, _ = made("gpt2", examples(), max_seq_length=10, max_target_length=4)
    task.encode([Example(0, ("cat " * 30,), "dog " * 9), Example(1, ("cat",), "dog")])
    assert task.notices == [
        "1 text was longer than 10 tokens, and cut. Fine-tune with --max-seq-length for longer ones.",
        (
            "1 answer was longer than 4 tokens, and cut: a model that learns them stops there. Fine-tune with "
            "--max-target-length for longer ones."
        ),
    ]


@pytest.mark.parametrize(
    ("family", "num_words", "length"),
    [("t5", 3, 32), ("t5", 60, 62), ("t5", 900, 128), ("gpt2", 60, 16)],  # this GPT-2 has 32 positions
)
def test_answers_may_be_as_long_as_those_of_train(family: str, num_words: int, length: int) -> None:
    known = [*examples(), Example(12, ("cat",), " ".join(["dog"] * num_words))]
    task, _ = made(family, known, max_target_length=0, max_seq_length=512)
    assert task.metadata()["max_target_length"] == length
    task.encode(known)
    assert (task.answer_tokenizer.num_truncated == 0) == (num_words + 2 <= length)
    assert made(family, known)[0].metadata()["max_target_length"] == 8, "what a person sets stays"


def test_an_untuned_decoder_continues_the_prompt() -> None:
    config, tokenizer = parts("gpt2")
    task = make_task("text-to-text", {}, tokenizer, config)
    (item,) = task.encode([Example(0, ("a cat",), None)])
    assert item.ids == [tokenizer.vocab.eos, *tokenizer.encode("a cat")]


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("bert", {}, "text-to-text needs a model that writes"),
        ("gpt2", {"max_target_length": 32}, "has 32 positions, and answers take 32 of them.*Lower max_target_length"),
        ("t5", {"prefix": "the big red cat " * 9}, "max_seq_length=24 has no room for a text behind the prefix"),
    ],
)
def test_unsupported_settings_raise(family: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(family, examples(), **fields)
