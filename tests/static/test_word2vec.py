from __future__ import annotations

import heapq

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from firth.static import word2vec

RATE = np.float32(0.1)


def arrays(num: int, dim: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.normal(size=(num, dim)).astype(np.float32), draw.normal(size=(num, dim)).astype(np.float32)


def only(word: int, num: int) -> word2vec.AliasTable:
    """A noise table that always gives the same word."""
    return word2vec.build_alias_table(np.eye(num, dtype=np.int64)[word])


def noise(word: int, num: int) -> tuple[word2vec.AliasTable, word2vec.HuffmanTree]:
    return only(word, num), word2vec.NO_TREE


def path(tree: word2vec.HuffmanTree, word: int) -> list[tuple[int, int]]:
    """Inner nodes and signs of a word, root first."""
    where = slice(tree.start[word], tree.start[word + 1])
    return list(zip(tree.node[where].tolist(), tree.code[where].astype(int).tolist(), strict=True))


def test_one_prediction_follows_the_gradient() -> None:
    inputs, outputs = arrays(5, 7)
    x, chosen = inputs[0].copy(), np.array([3, 1, 4, 0])  # 3 is right, the others are noise
    x_t, outputs_t = torch.tensor(x, requires_grad=True), torch.tensor(outputs, requires_grad=True)
    score = outputs_t[torch.tensor(chosen)] @ x_t
    loss_t = F.softplus(-score[0]) + F.softplus(score[1:]).sum()
    loss_t.backward()
    error, after = np.empty(7, np.float32), outputs.copy()
    loss = word2vec._negative_sampling_step(x, error, after, chosen, 4, np.empty(4, np.float32), RATE)
    assert loss == pytest.approx(loss_t.item(), abs=2e-5)
    np.testing.assert_allclose(error, -RATE * x_t.grad.numpy(), atol=1e-5)
    np.testing.assert_allclose(after - outputs, -RATE * outputs_t.grad.numpy(), atol=1e-5)


def test_a_full_softmax_prediction_follows_the_gradient() -> None:
    inputs, outputs = arrays(6, 4)
    x = inputs[0].copy()
    x_t, outputs_t = torch.tensor(x, requires_grad=True), torch.tensor(outputs, requires_grad=True)
    loss_t = F.cross_entropy(outputs_t @ x_t, torch.tensor(2))
    loss_t.backward()
    error, after = np.empty(4, np.float32), outputs.copy()
    loss = word2vec._full_softmax_step(x, error, after, 2, np.empty(6, np.float32), RATE)
    assert loss == pytest.approx(loss_t.item(), abs=1e-5)
    np.testing.assert_allclose(error, -RATE * x_t.grad.numpy(), atol=1e-6)
    np.testing.assert_allclose(after - outputs, -RATE * outputs_t.grad.numpy(), atol=1e-6)


@pytest.mark.parametrize("skip_gram", [True, False])
@pytest.mark.parametrize("loss_kind", ["negative", "full", "hierarchical"])
def test_training_equals_window_by_window_updates(skip_gram: bool, loss_kind: str) -> None:
    """Window 1 has one size, and the noise is always word 3: nothing is random."""
    tree = word2vec.build_huffman_tree(np.array([5, 1, 1, 3])) if loss_kind == "hierarchical" else word2vec.NO_TREE
    words, doc = np.array([0, 1, 2, 0], np.int32), np.array([0, 0, 0, 1], np.int32)
    inputs, outputs = arrays(4, 5)
    a, b = torch.tensor(inputs), torch.tensor(outputs)
    total, guesses = 0.0, 0
    for middle, around in ((0, [1]), (1, [0, 2]), (2, [1])):  # the last 0 is a document of its own
        for context in [[c] for c in around] if skip_gram else [around]:
            x = a[context].mean(0).requires_grad_()
            out = b.clone().requires_grad_()
            if loss_kind == "negative":
                loss = F.softplus(-x @ out[middle]) + F.softplus(x @ out[3])
            elif loss_kind == "hierarchical":
                loss = -torch.stack([F.logsigmoid(sign * x @ out[node]) for node, sign in path(tree, middle)]).sum()
            else:
                loss = F.cross_entropy(out @ x, torch.tensor(middle))
            loss.backward()
            b -= RATE * out.grad
            a[context] -= RATE * x.grad  # the whole gradient of the mean to each, as in the original
            total, guesses = total + loss.item(), guesses + 1
    how = (1, skip_gram, int(loss_kind == "negative"), RATE, only(3, 4), tree, np.uint64(7))
    found = word2vec.train_word2vec(words, doc, inputs, outputs, *how)
    assert found == (pytest.approx(total, abs=1e-4), guesses)
    np.testing.assert_allclose(inputs, a, atol=2e-5)
    np.testing.assert_allclose(outputs, b, atol=2e-5)


def test_the_huffman_tree_by_hand() -> None:
    """1 + 2 is node 0, with 3 node 1, with 5 the root, node 2. The word without a count has no path."""
    tree = word2vec.build_huffman_tree(np.array([5, 1, 0, 3, 2]))
    nodes = [[node for node, _ in path(tree, word)] for word in range(5)]
    assert nodes == [[2], [2, 1, 0], [], [2, 1], [2, 1, 0]]
    signs = [[sign for _, sign in path(tree, word)] for word in (1, 4)]
    assert signs[0][:2] == signs[1][:2]
    assert {signs[0][2], signs[1][2]} == {1, -1}


@pytest.mark.parametrize("num", [1, 2, 3, 500])
def test_paths_are_the_shortest_code_and_their_probabilities_sum_to_one(num: int) -> None:
    draw = np.random.default_rng(num)
    counts = np.append(draw.integers(1, 100, num) ** 2, 0)
    tree = word2vec.build_huffman_tree(counts)
    heap, shortest = sorted(counts[:-1].tolist()), 0  # Huffman 1952, by a heap
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        shortest += both
        heapq.heappush(heap, both)
    assert tree.mean_path_length(counts) == pytest.approx(shortest / counts.sum())
    assert len(set(tree.node.tolist())) == num - 1
    x, outputs = draw.normal(size=8), draw.normal(size=(num, 8))
    probability = [np.prod([1 / (1 + np.exp(-s * (outputs[n] @ x))) for n, s in path(tree, w)]) for w in range(num)]
    assert sum(probability) == pytest.approx(1)


def test_window_sizes_are_uniform() -> None:
    """In the middle of a long text, sizes 1 to 4 give 2, 4, 6 or 8 predictions: 5 on average."""
    words, doc = np.zeros(40_000, np.int32), np.zeros(40_000, np.int32)
    inputs, outputs = np.zeros((2, 1), np.float32), np.zeros((2, 1), np.float32)
    _, guesses = word2vec.train_word2vec(words, doc, inputs, outputs, 4, True, 1, RATE, *noise(1, 2), np.uint64(1))
    assert guesses / 40_000 == pytest.approx(5, abs=0.05)


def test_a_single_word_gives_no_update() -> None:
    inputs, outputs = arrays(3, 2)
    before = inputs.copy()
    words, doc = np.array([0, 1, 2], np.int32), np.array([0, 1, 2], np.int32)
    assert word2vec.train_word2vec(words, doc, inputs, outputs, 5, True, 1, RATE, *noise(0, 3), np.uint64(1)) == (
        0.0,
        0,
    )
    np.testing.assert_array_equal(inputs, before)


def test_noise_follows_counts_to_the_exponent() -> None:
    counts = np.array([0, 1, 16, 81])
    own, alias = word2vec.build_alias_table(counts, 0.75)  # shares 0, 1, 8, 27 of 36
    share = own / 4
    np.add.at(share, alias, (1 - own) / 4)
    np.testing.assert_allclose(share, np.array([0, 1, 8, 27]) / 36, atol=1e-6)


def test_frequent_words_are_subsampled() -> None:
    """A word that is a hundredth of the text is kept with (sqrt(10) + 1) / 10 at sample 1e-3; unknown ones never."""
    counts = np.array([0, 1_000, 10, 98_990])
    kept = word2vec.keep_probabilities(counts, 1e-3)
    np.testing.assert_allclose(kept[:3], [0, (10**0.5 + 1) / 10, 1], rtol=1e-6)
    np.testing.assert_array_equal(word2vec.keep_probabilities(counts, 0), [0, 1, 1, 1])


def test_phrase_score() -> None:
    """(12 - 2) / (20 * 50) * 1000 = 10."""
    assert word2vec.phrase_scores(np.array([12]), np.array([20]), np.array([50]), 2, 1000).tolist() == [10.0]


def test_phrases_are_joined_from_left_to_right_and_not_across_documents() -> None:
    words, doc = np.array([1, 2, 2, 1, -1, 1, 2], np.int32), np.array([0, 0, 0, 0, 0, 0, 1], np.int32)
    out = np.empty(7, np.int64)
    num, index = word2vec.merge_phrases(words, doc, np.array([1 * 10 + 2, 2 * 10 + 1]), np.array([11, 12]), 10, out)
    assert out[:num].tolist() == [11, 12, -1, 1, 2]
    assert index[:num].tolist() == [0, 2, 4, 5, 6]
