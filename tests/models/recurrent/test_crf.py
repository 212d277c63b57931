"""The CRF against all tag sequences, enumerated."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from firth.models import TokenClassificationHead, make_model
from firth.models.presets import bag_of_words
from firth.models.recurrent.crf import CRF, tag_chain_masks
from firth.objectives import Batch

C = 3


def chain() -> CRF:
    torch.manual_seed(0)
    crf = CRF(C)
    for p in crf.parameters():
        p.data.normal_()
    return crf


def score(crf: CRF, words: Tensor, tags: tuple[int, ...]) -> float:
    found = float(crf.start_transitions[tags[0]] + crf.end_transitions[tags[-1]]) + sum(
        float(w[t]) for w, t in zip(words, tags, strict=True)
    )
    return found + sum(float(crf.transitions[a, b]) for a, b in pairwise(tags))


def every(crf: CRF, words: Tensor) -> dict[tuple[int, ...], float]:
    return {tags: score(crf, words, tags) for tags in product(range(C), repeat=len(words))}


def log_total(scores: list[float]) -> float:
    return math.log(sum(map(math.exp, scores)))


# Row 0 has sentences of three and two words, and a slot that is not used; row 1 one of one word.
ASKED = torch.tensor([[1, 2, 3, 5, 6, 0], [2, 0, 0, 0, 0, 0]])
DOC = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1], [0, 0, 0, -1, -1, -1, -1, -1]])
SENTENCES = [(0, 0, 3), (0, 3, 5), (1, 0, 1)]


def test_slots_of_one_sentence() -> None:
    link, used = tag_chain_masks(ASKED, DOC)
    assert link.long().tolist() == [[0, 1, 1, 0, 1, 0], [0] * 6]
    assert used.long().tolist() == [[1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]]
    empty_link, empty_used = tag_chain_masks(torch.zeros(1, 2, dtype=torch.long), torch.full((1, 4), -1))
    assert not empty_link.any()
    assert not empty_used.any()


def test_forward_algorithm_sums_over_all_sequences() -> None:
    crf, words = chain(), torch.randn(2, 6, C)
    wanted = sum(log_total(list(every(crf, words[b, i:j]).values())) for b, i, j in SENTENCES)
    assert float(crf.log_partition(words, *tag_chain_masks(ASKED, DOC))) == pytest.approx(wanted, rel=1e-5)


def test_loss_is_the_negative_log_likelihood() -> None:
    crf, words = chain(), torch.randn(2, 6, C)
    target = torch.tensor([[0, 2, 1, 1, 1, -100], [2, -100, -100, -100, -100, -100]])
    wanted = 0.0
    for b, i, j in SENTENCES:
        scores = every(crf, words[b, i:j])
        wanted += log_total(list(scores.values())) - scores[tuple(target[b, i:j].tolist())]
    assert float(crf.loss(words, target, *tag_chain_masks(ASKED, DOC))) == pytest.approx(wanted, rel=1e-4)


def test_a_word_without_a_label_sums_over_all_tags() -> None:
    crf, words = chain(), torch.randn(1, 3, C)
    link, used = tag_chain_masks(torch.tensor([[1, 2, 3]]), None)
    scores = every(crf, words[0])
    right = log_total([value for tags, value in scores.items() if tags[0] == 1 and tags[2] == 0])
    found = crf.loss(words, torch.tensor([[1, -100, 0]]), link, used)
    assert float(found) == pytest.approx(log_total(list(scores.values())) - right, rel=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_viterbi_finds_the_best_sequence(seed: int) -> None:
    crf = chain()
    torch.manual_seed(seed)
    words = torch.randn(2, 6, C)
    best = crf.max_marginals(words, tag_chain_masks(ASKED, DOC)[0])
    for b, i, j in SENTENCES:
        scores = every(crf, words[b, i:j])
        top = max(scores, key=scores.__getitem__)
        assert best[b, i:j].argmax(-1).tolist() == list(top)
        assert_close(best[b, i:j].amax(-1), torch.full((j - i,), scores[top]), rtol=1e-4, atol=1e-4)
        through = max(value for tags, value in scores.items() if tags[0] == 1)
        assert float(best[b, i, 1]) == pytest.approx(through, rel=1e-4)


def test_gradients_are_finite_and_lower_the_loss() -> None:
    crf, words = chain(), torch.randn(2, 6, C, requires_grad=True)
    target = torch.tensor([[0, 2, 1, 1, 1, -100], [2, -100, -100, -100, -100, -100]])
    crf.loss(words, target, *tag_chain_masks(ASKED, DOC)).backward()
    assert words.grad is not None
    assert words.grad.isfinite().all()
    assert (words.grad[0, 5] == 0).all(), "an unused slot"
    assert float(words.grad[0, 1, 2]) < 0 < float(words.grad[0, 1, 0])
    assert crf.transitions.grad is not None
    assert crf.transitions.grad.isfinite().all()


def test_a_head_with_a_crf() -> None:
    torch.manual_seed(0)
    model = make_model(replace(bag_of_words(9, 4), head=TokenClassificationHead(("a", "b", "c"), crf=True))).eval()
    batch = Batch(
        torch.randint(0, 9, (2, 8)),
        document_ids=DOC,
        target_positions=ASKED,
        task_labels=torch.where(tag_chain_masks(ASKED, DOC)[1], 1, -100),
    )
    head = model.head
    assert head.crf is not None  # type: ignore[union-attr]
    with torch.no_grad():
        head.crf.transitions[0, 0] = 100.0  # type: ignore[union-attr, index]
    logits = model.logits(batch)
    assert logits[0, :3].argmax(-1).tolist() == [0, 0, 0], "what may follow decides"
    assert logits[0, 3:5].argmax(-1).tolist() == [0, 0]
    assert float(model.loss(batch)) > 100
