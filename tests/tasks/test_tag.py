"""Word labels on pieces, windows over long sentences, marked predicates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tasks.small import ANIMALS, PLACES, parts

from firth.evaluate import evaluate
from firth.evaluate.export import compare_with_transformers
from firth.models import load_model, make_model
from firth.tasks import FinetuneRecipe, Prediction, finetune, make_task
from firth.tasks.tag import TaggingTask, WordWindow, split_word_windows
from firth.text import Example

WORDS = ("the", "elephants", "near", "Ω", "river")
TAGS = ("O", "B-A", "O", "O", "B-P")


def tagger(family: str, example: Example, length: int = 32) -> TaggingTask:
    config, tokenizer = parts(family)
    task = make_task("tag", [example], tokenizer, config, FinetuneRecipe(max_seq_length=length))
    assert isinstance(task, TaggingTask)
    return task


@pytest.mark.parametrize("family", ["bert", "roberta", "xlnet"])
def test_an_encoder_labels_the_first_piece_of_each_word(family: str) -> None:
    task = tagger(family, Example(0, WORDS, TAGS))
    ((sequence,),) = [item.sequences for item in task.encode([Example(0, WORDS, TAGS)])]
    assert len(sequence.target_positions) == 5
    special_ids = task.template.sequence_template.suffix_ids + task.template.sequence_template.prefix_ids
    for word, position, after in zip(
        WORDS, sequence.target_positions, [*sequence.target_positions[1:], sequence.num_tokens], strict=True
    ):
        pieces = [i for i in sequence.ids[position:after] if i not in special_ids]
        if task.tokenizer.vocab.unk in pieces:
            assert word in ("Ω", "elephants")
        else:
            assert task.tokenizer.decode(pieces).strip() == word


def test_a_decoder_labels_the_last_piece_of_each_word() -> None:
    task = tagger("gpt2", Example(0, WORDS, TAGS))
    ((sequence,),) = [item.sequences for item in task.encode([Example(0, WORDS, TAGS)])]
    text = [task.tokenizer.decode(sequence.ids[1 : position + 1]) for position in sequence.target_positions]
    assert text == ["the", "the elephants", "the elephants near", "the elephants near Ω", "the elephants near Ω river"]


def test_words_without_tokens_become_unk() -> None:
    words = ("the", "\u200b", "", "cat")
    task = tagger("bert", Example(0, words, ("O",) * 4))
    (item,) = task.encode([Example(0, words, ("O",) * 4)])
    (sequence,) = item.sequences
    unk = task.tokenizer.vocab.unk
    assert [sequence.ids[position] == unk for position in sequence.target_positions] == [False, True, True, False]
    assert "2 words were without a token, and replaced by the unknown token." in task.notices


def test_windows_label_every_word_once() -> None:
    assert split_word_windows([1] * 6, 8) == [WordWindow(0, 6, 0, 6)]
    assert split_word_windows([1] * 12, 8) == [WordWindow(0, 8, 0, 7), WordWindow(6, 12, 7, 12)]
    assert split_word_windows([], 8) == [WordWindow(0, 0, 0, 0)]
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = rng.integers(1, 5, rng.integers(1, 60)).tolist()
        found = split_word_windows(sizes, 9)
        assert [w for window in found for w in range(window.target_start, window.target_end)] == list(range(len(sizes)))
        for window in found:
            assert window.start <= window.target_start <= window.target_end <= window.end
            assert sum(sizes[window.start : window.end]) <= 9


def test_long_sentences_are_read_in_windows() -> None:
    words = ("red", "cat", "near", "the", "river") * 8
    example = Example(0, words, tuple("B-A" if w == "cat" else "O" for w in words))
    task = tagger("bert", example, length=14)
    (item,) = task.encode([example])
    assert len(item.sequences) > 3
    assert max(sequence.num_tokens for sequence in item.sequences) <= 14
    read = [
        task.tokenizer.decode([sequence.ids[position]])
        for sequence in item.sequences
        for position in sequence.target_positions
    ]
    assert read == list(words)
    assert task.notices == ["1 sentence was longer than 14 tokens, and split into overlapping windows."]
    batch = task.collate([item])
    assert batch.num_targets == 40
    cat = task.tokenizer.encode("cat")[0]
    tokens_at_targets = np.take_along_axis(batch.input_ids, batch.target_positions, 1)
    assert ((tokens_at_targets == cat) == (batch.task_labels == task.labels.index("B-A")))[batch.task_labels >= 0].all()


def test_a_word_that_is_too_long_is_truncated() -> None:
    words = ("q" * 40, "cat")
    task = tagger("gpt2", Example(0, words, ("O", "B-A")), length=16)
    (item,) = task.encode([Example(0, words, ("O", "B-A"))])
    assert sum(len(sequence.target_positions) for sequence in item.sequences) == 2
    assert "1 word was longer than half a row, and truncated." in task.notices


def test_the_predicate_is_marked() -> None:
    words, tags = ("the", "cat", "lives", "near"), ("B-A0", "I-A0", "B-V", "O")
    example = Example(0, words, tags, spans=((2, 3),))
    ((with_segments,),) = [item.sequences for item in tagger("bert", example).encode([example])]
    assert [with_segments.token_type_ids[position] for position in with_segments.target_positions] == [0, 0, 1, 0]
    task = tagger("roberta", example)
    ((with_marks,),) = [item.sequences for item in task.encode([example])]
    assert task.tokenizer.decode(with_marks.ids).strip() == "the cat @ lives @ near"
    lives = with_marks.target_positions[2]
    assert task.tokenizer.decode([with_marks.ids[lives - 1]]).strip() == "@"


def test_deciding_metric() -> None:
    assert tagger("bert", Example(0, ("a", "cat"), ("O", "B-A"))).metric == "entity_f1"
    assert tagger("bert", Example(0, ("a", "cat"), ("DET", "NOUN"))).metric == "accuracy"


def test_the_predicate_is_not_scored() -> None:
    example = Example(0, ("cat", "lives"), ("B-A0", "B-V"), spans=((1, 2),))
    task = tagger("bert", example)
    for name in ("entity_f1", "entity_precision", "entity_recall"):
        assert task.score([example], [Prediction(("O", "B-V"))])[name] == 0
        assert task.score([example], [Prediction(("B-A0", "O"))])[name] == 1


def test_unknown_tags_are_ignored() -> None:
    task = tagger("bert", Example(0, ("a", "cat"), ("O", "B-A")))
    (item,) = task.encode([Example(1, ("a", "dog"), ("O", "B-Z"))])
    assert task.collate([item]).num_targets == 1
    assert task.notices == ["1 word was tagged with a label that the training file lacks, and counted as wrong."]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_an_encoder_decoder_learns_tags(family: str, tmp_path: Path) -> None:
    """T5 with its encoder only, BART with its decoder, which reads the text again; saved, and scored again."""
    config, tokenizer = parts(family)
    fresh = make_model(config)
    fresh.tokenizer = tokenizer
    fresh.save(tmp_path / "checkpoint")
    rows = []
    for i, animal in enumerate(ANIMALS * 6):
        words = ["the", "big", animal, "is", "near", "a", PLACES[i % 4]]
        rows.append({"tokens": words, "tags": ["O", "O", "B-A", "O", "O", "O", "B-P"]})
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint"), "task": "tag", "max_seq_length": 32}
    fields |= {"train": str(file), "dev": str(file), "output_dir": str(tmp_path / "run"), "max_steps": 40, "seeds": 1}
    result = finetune(FinetuneRecipe(**fields, learning_rate=5e-3))
    assert result["entity_f1"] > 0.9
    final = tmp_path / "run" / "final"
    again = evaluate(final, "tag", file, tmp_path / "scores")
    assert again["metrics"]["entity_f1"] == pytest.approx(result["entity_f1"])
    assert compare_with_transformers(final).max_difference < 1e-5
    assert hasattr(load_model(final), "decoder") == (family == "bart")
