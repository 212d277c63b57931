"""Batched likelihoods equal a plain loop over the models of transformers, one reading at a time."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from firth.core.errors import UserError
from firth.evaluate.likelihood import (
    ScoringWindow,
    aggregate_likelihoods,
    lowercasing_messages,
    make_scorer,
    sliding_windows,
    text_likelihoods,
    word_ends,
)
from firth.models import make_sequence_template
from firth.tokens import tokenizer_from_words

CLASSES = {
    "gpt2": "AutoModelForCausalLM",
    "bert": "AutoModelForMaskedLM",
    "bart": "AutoModelForSeq2SeqLM",
    "t5": "AutoModelForSeq2SeqLM",
}


def theirs(folder: Path, family: str) -> Any:
    return getattr(transformers, CLASSES[family]).from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logp(model: Any, position: int, token: int, **inputs: list[int]) -> float:
    """Log-probability of a token at a position, from its own forward pass."""
    tensors = {name: torch.tensor([ids]) for name, ids in inputs.items()}
    return float(model(**tensors).logits[0, position].double().log_softmax(-1)[token])


def short(sentences: list[str], tokenizer: Any, max_tokens: int) -> list[str]:
    """Sentences that a model can read in one window, of different lengths."""
    texts = [" ".join(text.split()[:n]) for n, text in zip((3, 7, 5, 1, 6), sentences, strict=False)]
    assert all(0 < len(tokenizer.encode(text)) <= max_tokens for text in texts)
    return texts


def test_a_decoder_equals_a_plain_loop(untrained: Any, saved: Any, sentences: list[str]) -> None:
    model, reference = untrained("gpt2"), theirs(saved("gpt2"), "gpt2")
    texts = short(sentences, model.tokenizer, 23)
    for text, found in zip(texts, text_likelihoods(model, texts, batch_tokens=40), strict=True):
        ids = [model.tokenizer.vocab.bos, *model.tokenizer.encode(text)]
        wanted = [logp(reference, i - 1, ids[i], input_ids=ids) for i in range(1, len(ids))]
        assert found.logp == pytest.approx(sum(wanted), abs=1e-4)
        assert (found.tokens, found.words, found.bytes) == (len(wanted), len(text.split()), len(text.encode()))


def test_a_long_text_is_read_with_context(untrained: Any, saved: Any, sentences: list[str]) -> None:
    model, reference = untrained("gpt2"), theirs(saved("gpt2"), "gpt2")
    text = " ".join(sentences)
    ids = [model.tokenizer.vocab.bos, *model.tokenizer.encode(text)]
    assert len(ids) > 60
    wanted, stride = 0.0, 5
    for i in range(1, len(ids)):
        late = max(0, i - 24 - 1) // stride if i > 24 else -1  # which of the later windows scores this token
        end = 24 if i <= 24 else min(24 + stride * (late + 1), len(ids) - 1)
        begin = max(0, end - 24)
        wanted += logp(reference, i - 1 - begin, ids[i], input_ids=ids[begin:end])
    (found,) = text_likelihoods(model, [text], stride=stride)
    assert found.tokens == len(ids) - 1
    assert found.logp == pytest.approx(wanted, abs=1e-3)


def test_an_encoder_equals_hiding_one_token_at_a_time(untrained: Any, saved: Any, sentences: list[str]) -> None:
    model, reference = untrained("bert"), theirs(saved("bert"), "bert")
    vocab = model.tokenizer.vocab
    texts = short(sentences, model.tokenizer, 22)
    for text, found in zip(texts, text_likelihoods(model, texts, method="pseudo"), strict=True):
        ids = [vocab.cls, *model.tokenizer.encode(text), vocab.sep]
        wanted = 0.0
        for i in range(1, len(ids) - 1):
            wanted += logp(reference, i, ids[i], input_ids=[*ids[:i], vocab.mask, *ids[i + 1 :]])
        assert found.logp == pytest.approx(wanted, abs=1e-4)


def test_within_a_word_the_later_tokens_are_hidden_too(untrained: Any, saved: Any) -> None:
    model, reference = untrained("bert"), theirs(saved("bert"), "bert")
    vocab, text = model.tokenizer.vocab, "The hedgehogs slept."
    (encoding,) = model.tokenizer.encode_with_offsets([text])
    ids, words = [vocab.cls, *encoding.ids, vocab.sep], [None, *encoding.word_ids, None]
    assert max(words.count(word) for word in words) > 1
    wanted = 0.0
    for i in range(1, len(ids) - 1):
        read = [vocab.mask if j >= i and words[j] == words[i] else ids[j] for j in range(len(ids))]
        wanted += logp(reference, i, ids[i], input_ids=read)
    (found,) = text_likelihoods(model, [text], method="within-word-l2r")
    assert found.logp == pytest.approx(wanted, abs=1e-4)
    assert found.logp == text_likelihoods(model, [text])[0].logp, "the default"
    assert found.logp != text_likelihoods(model, [text], method="pseudo")[0].logp


def words_of(tokenizer: Any, text: str) -> list[list[int]]:
    (encoding,) = tokenizer.encode_with_offsets([text])
    words: list[list[int]] = []
    for start, token in zip(tokenizer.word_starts(encoding), encoding.ids, strict=True):
        if start:
            words.append([])
        words[-1].append(token)
    return words


def test_t5_restores_one_word_at_a_time(untrained: Any, saved: Any, sentences: list[str]) -> None:
    model, reference = untrained("t5"), theirs(saved("t5"), "t5")
    vocab, text = model.tokenizer.vocab, " ".join(sentences[0].split()[:6])
    words, hole = words_of(model.tokenizer, text), vocab.sentinel_ids[0]
    wanted = 0.0
    for w, word in enumerate(words):
        before, after = list(chain(*words[:w])), list(chain(*words[w + 1 :]))
        read, written = [*before, hole, *after, vocab.eos], [vocab.pad, hole, *word]
        for k, token in enumerate(word):
            wanted += logp(reference, 1 + k, token, input_ids=read, decoder_input_ids=written)
    (found,) = text_likelihoods(model, [text])
    assert found.logp == pytest.approx(wanted, abs=1e-4)


def test_bart_restores_one_word_at_a_time(untrained: Any, saved: Any, sentences: list[str]) -> None:
    model, reference = untrained("bart"), theirs(saved("bart"), "bart")
    vocab, text = model.tokenizer.vocab, " ".join(sentences[0].split()[:6])
    words, start = words_of(model.tokenizer, text), make_sequence_template(model.config, vocab).decoder_start_id
    wanted = 0.0
    for w, word in enumerate(words):
        before, after = list(chain(*words[:w])), list(chain(*words[w + 1 :]))
        read, written = [vocab.cls, *before, vocab.mask, *after, vocab.sep], [start, vocab.cls, *before, *word]
        for k, token in enumerate(word):
            position = len(written) - 1 - len(word) + k
            wanted += logp(reference, position, token, input_ids=read, decoder_input_ids=written)
    (found,) = text_likelihoods(model, [text])
    assert found.logp == pytest.approx(wanted, abs=1e-4)


def test_the_second_half_after_the_first(untrained: Any, saved: Any, sentences: list[str]) -> None:
    model, reference = untrained("t5"), theirs(saved("t5"), "t5")
    vocab, text = model.tokenizer.vocab, sentences[0]
    ids = model.tokenizer.encode(text)
    half = len(ids) // 2
    wanted = sum(
        logp(reference, k, token, input_ids=[*ids[:half], vocab.eos], decoder_input_ids=[vocab.pad, *ids[half:]])
        for k, token in enumerate(ids[half:])
    )
    (found,) = text_likelihoods(model, [text], method="continuation")
    assert found.logp == pytest.approx(wanted, abs=1e-4)
    assert found.tokens == len(ids) - half
    assert 0 < found.bytes < len(text.encode())


def test_xlnet_hides_by_order(tokenizers: Any) -> None:
    """The token itself plays no part in its own probability, and what is only hidden plays none in it either."""
    from firth.models import make_model
    from firth.models.presets import xlnet

    tokenizer = tokenizers["unigram"]
    torch.manual_seed(0)
    model = make_model(xlnet(2, 32, 2, tokenizer.vocab.size)).eval()
    model.tokenizer = tokenizer
    scorer = make_scorer(model)
    assert scorer.model.config.get_extra("query") is not None
    ids = tokenizer.encode("The cat slept by the river.")

    def logp_at(ids: list[int], last: int) -> float:
        from firth.evaluate.logprobs import score_query_batch

        query = scorer.masked_query(ids, 2, last, num_targets=1)._replace(labels=[9])  # type: ignore[attr-defined]
        return float(score_query_batch(model, [query])[0].logprobs[0])

    other = [*ids[:2], 7, *ids[3:]]
    assert logp_at(ids, 3) == logp_at(other, 3)
    assert logp_at(ids, 3) != logp_at([*ids[:3], 7, *ids[4:]], 3)
    assert logp_at(ids, 4) == logp_at([*ids[:3], 7, *ids[4:]], 4)


def test_perplexity_adds_up(untrained: Any, sentences: list[str]) -> None:
    model = untrained("gpt2")
    scorer = make_scorer(model)
    parts = list(scorer.score_texts(iter(sentences)))
    metrics, facts = aggregate_likelihoods(scorer, parts)
    result = metrics | facts
    nats = -sum(part.logp for part in parts)
    assert result["nats"] == pytest.approx(nats)
    assert result["perplexity"] == pytest.approx(math.exp(nats / sum(part.tokens for part in parts)))
    assert result["word_perplexity"] == pytest.approx(math.exp(nats / sum(len(t.split()) for t in sentences)))
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / sum(len(t.encode()) for t in sentences))
    assert result["texts"] == len(sentences)


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "bart"])
def test_batches_do_not_matter(family: str, untrained: Any, sentences: list[str]) -> None:
    one = text_likelihoods(untrained(family), sentences[:2], batch_tokens=1)
    many = text_likelihoods(untrained(family), sentences[:2])
    assert [x.logp for x in one] == pytest.approx([x.logp for x in many], abs=1e-3)


def test_a_tokenizer_that_lowercases_is_named(tokenizers: Any) -> None:
    for tokenizer in (*tokenizers.values(), tokenizer_from_words(["A", "cat"])):
        assert lowercasing_messages(tokenizer) == []
    assert "capitals cost nothing" in lowercasing_messages(tokenizer_from_words(["a"], lowercase=True))[0]


def test_a_text_without_tokens_counts_nothing(untrained: Any) -> None:
    found = text_likelihoods(untrained("bert"), ["", "The cat", " "])
    assert [one.tokens for one in found] == [0, 2, 0]
    assert found[0].logp == found[2].logp == 0


def test_windows_score_each_token_once_with_both_sides() -> None:
    assert list(sliding_windows(3, 4, 2)) == [ScoringWindow(0, 3, 0, 3)]
    assert list(sliding_windows(10, 6, 2)) == [
        ScoringWindow(0, 6, 0, 2),
        ScoringWindow(0, 6, 2, 4),
        ScoringWindow(2, 8, 4, 6),
        ScoringWindow(4, 10, 6, 8),
        ScoringWindow(4, 10, 8, 10),
    ]
    assert word_ends(torch.tensor([True, False, True]).numpy()) == [2, 2, 3]


def test_a_method_of_another_architecture_is_refused(untrained: Any) -> None:
    with pytest.raises(UserError, match="architecture decoder, which has: left-to-right"):
        make_scorer(untrained("gpt2"), "pseudo")
    with pytest.raises(UserError, match="Did you mean 'pseudo'"):
        make_scorer(untrained("bert"), "pseudoo")
    with pytest.raises(UserError, match="stride is 99"):
        make_scorer(untrained("bert"), stride=99)
    with pytest.raises(UserError, match="longer than the 24 positions"):
        make_scorer(untrained("bert"), max_seq_length=99)
