"""Bits per byte: equal to those of transformers, and of the same words for every tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from firth.core.errors import UserError
from firth.evaluate.likelihood import MaskedScorer, SpanScorer, make_scorer
from firth.evaluate.text_bits import (
    HIDDEN_BYTES_SHARE,
    BitsChange,
    TextBits,
    compare_text_bits,
    find_hidden_tokens,
    hide_words,
    measure_text_bits,
)
from firth.models import Model
from firth.tokens import Tokenizer

Untrained = Callable[[str], Model]


def test_a_decoder_codes_the_whole_text(untrained: Untrained, saved: Callable[[str], Path]) -> None:
    transformers = pytest.importorskip("transformers")
    model, text = untrained("llama"), "The cat slept by the river."
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved("llama"))
    tokenizer = model.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.vocab.eos if tokenizer.vocab.bos is None else tokenizer.vocab.bos, *tokenizer.encode(text)]
    with torch.no_grad():
        logp = theirs(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    nats = -sum(float(logp[i, ids[i + 1]]) for i in range(len(ids) - 1))
    measured = measure_text_bits(model, [text])
    assert measured.method == "left-to-right"
    assert measured.bits_per_byte == pytest.approx(nats / math.log(2) / len(text), rel=1e-5)
    assert measured.to_dict()["byte_perplexity"] == pytest.approx(2**measured.bits_per_byte)


def test_an_encoder_codes_hidden_words(untrained: Untrained, saved: Callable[[str], Path]) -> None:
    transformers = pytest.importorskip("transformers")
    model, text = untrained("bert"), "The cat slept."
    theirs, tokenizer = transformers.AutoModelForMaskedLM.from_pretrained(saved("bert")), model.tokenizer
    assert tokenizer is not None
    assert tokenizer.vocab.mask is not None
    (passage,) = hide_words(text, 23)
    (encoding,) = tokenizer.encode_with_offsets([text])
    spans = find_hidden_tokens(encoding, passage.spans, 22)
    hidden = [i for first, last in spans for i in range(first, last)]
    masked = [tokenizer.vocab.mask if i in hidden else token for i, token in enumerate(encoding.ids)]
    with torch.no_grad():
        row = torch.tensor([[tokenizer.vocab.cls, *masked, tokenizer.vocab.sep]])
        logp = theirs(row).logits[0].double().log_softmax(-1)
    nats = -sum(float(logp[1 + i, encoding.ids[i]]) for i in hidden)
    size = sum(len(text[start:end]) for start, end in passage.spans)
    measured = measure_text_bits(model, [text])
    assert (measured.method, sum(measured.bytes), measured.tokens) == ("hidden words", size, len(hidden))
    assert measured.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def test_every_tokenizer_has_the_same_words_to_restore(
    tokenizers: dict[str, Tokenizer], sentences: list[str], untrained: Untrained
) -> None:
    text = " ".join(sentences)
    passages = list(hide_words(text, 200))
    assert "".join(passage.text for passage in passages) == text
    hidden = sum(end - start for passage in passages for start, end in passage.spans)
    assert hidden == pytest.approx(HIDDEN_BYTES_SHARE * len(text), rel=0.3)
    for passage in passages:
        words = [passage.text[start:end] for start, end in passage.spans]
        for tokenizer in tokenizers.values():
            (encoding,) = tokenizer.encode_with_offsets([passage.text])
            covered = [
                passage.text[encoding.offsets[first][0] : encoding.offsets[last - 1][1]].strip(" .,;")
                for first, last in find_hidden_tokens(encoding, passage.spans, 1000)
            ]
            assert covered == words
    bits = [measure_text_bits(untrained(family), sentences) for family in ("bert", "bart", "t5")]
    assert all(one.bits_per_byte > 0 and len(one.nats) == len(sentences) for one in bits)


def test_spans_are_hidden_as_in_training(untrained: Untrained) -> None:
    """T5: a sentinel for each span, and the decoder restores the spans with the sentinels between."""
    t5 = make_scorer(untrained("t5"))
    assert isinstance(t5, SpanScorer)
    first, second, third = t5.vocab.sentinel_ids[:3]
    start, end, bos = t5.template.decoder_start_id, t5.template.eos_id, list(t5.template.prefix_ids)
    query = t5.hidden_words_query([10, 11, 12, 13, 14, 15], [(0, 2), (4, 5)])
    assert query.input_ids == [*bos, first, 12, 13, second, 15, end]
    assert query.decoder_input_ids == [start, first, 10, 11, second, 14]
    assert [query.labels[query.target_positions.index(i)] for i in (1, 2, 3, 4, 5)] == [10, 11, second, 14, third]
    bart = make_scorer(untrained("bart"))
    mask, bos = bart.vocab.mask, list(bart.template.prefix_ids)
    query = bart.hidden_words_query([10, 11, 12, 13], [(1, 3)])
    assert query.input_ids == [*bos, 10, mask, 13, bart.template.eos_id]
    assert query.decoder_input_ids is not None
    assert [query.decoder_input_ids[i + 1] for i in query.target_positions] == query.labels == [11, 12]
    bert = make_scorer(untrained("bert"))
    assert isinstance(bert, MaskedScorer)
    query = bert.hidden_words_query([10, 11, 12, 13], [(0, 1), (2, 4)])
    mask = bert.vocab.mask
    assert query.input_ids == [bert.vocab.cls, mask, 11, mask, mask, bert.vocab.sep]
    assert (query.target_positions, query.labels) == ([1, 3, 4], [10, 12, 13])
    with pytest.raises(UserError, match="hides no words"):
        make_scorer(untrained("llama")).hidden_words_query([10], [(0, 1)])


def test_an_unknown_word_costs_its_spelling(untrained: Untrained) -> None:
    model = untrained("bert")
    known, unknown = (measure_text_bits(model, [text]) for text in ("The cat", "ŋʒθ ŋʒθŋʒθ"))
    assert known.unknown_bytes == 0
    assert unknown.unknown_bytes == sum(unknown.bytes)
    assert unknown.bits_per_byte > 8
    with pytest.raises(UserError, match="nothing to score"):
        measure_text_bits(model, ["...", "?"])


def test_a_model_that_diverged_has_figures_too() -> None:
    figures = TextBits("left-to-right", nats=(1e6,), bytes=(1000,), tokens=250, unknown_bytes=0).to_dict()
    assert figures["bits_per_byte"] > 1024
    assert figures["byte_perplexity"] == float("inf")


def test_the_interval_of_a_difference() -> None:
    """Equal texts that all change alike have no spread; with equal sizes it is the interval of a mean difference."""
    sizes = (100,) * 6
    before = TextBits("", (50.0,) * 6, sizes, 1, 0)
    assert compare_text_bits(before, TextBits("", (40.0,) * 6, sizes, 1, 0)) == (
        BitsChange(pytest.approx(-0.1 / math.log(2)), pytest.approx(0.0))
    )
    after = (41.0, 39.0, 44.0, 36.0, 40.0, 40.0)
    differences = torch.tensor(after, dtype=torch.float64) - 50
    expected = 1.96 * float(differences.std()) / math.sqrt(6) / 100 / math.log(2)
    found = compare_text_bits(before, TextBits("", after, sizes, 1, 0))
    assert found.interval == pytest.approx(expected)
    assert compare_text_bits(before, TextBits("", (40.0,), (100,), 1, 0)).interval is None
