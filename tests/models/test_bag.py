"""Word vectors as a model without layers: mean pooling, and hashed bigrams."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from firth.models import ClassificationHead, head_for_task, load_model, make_model
from firth.models.presets import bag_of_words
from firth.objectives import Batch


def test_hidden_states_are_the_word_vectors() -> None:
    model = make_model(bag_of_words(10, 4))
    tokens = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(model.hidden_states(Batch(tokens)), model.embed.tokens.weight[tokens])


def test_classification_uses_the_mean() -> None:
    config = bag_of_words(10, 4)
    head = head_for_task(config, "classify", ("a", "b"))
    assert isinstance(head, ClassificationHead)
    assert head.pool == "mean"
    assert not head.has_pooler
    model = make_model(replace(config, head=head))
    tokens, doc = torch.tensor([[1, 2, 3, 4, 0]]), torch.tensor([[0, 0, 0, 1, -1]])
    logits = model.logits(Batch(tokens, document_ids=doc, target_positions=torch.tensor([[0, 3]])))
    e, out = model.embed.tokens.weight, model.head
    right = torch.stack([e[1:4].mean(0), e[4]])
    weight, bias = (p for name, p in out.named_parameters() if p.shape[0] == 2)
    torch.testing.assert_close(logits[0], right @ weight.T + bias)


def test_bigrams_are_hashed() -> None:
    """(1, 2) differs from (2, 1), and no bigram crosses the start of a text."""
    model = make_model(bag_of_words(10, 4, num_bigram_buckets=97))
    tokens, position = torch.tensor([[1, 2, 1, 2]]), torch.tensor([[0, 1, 0, 1]])
    x = model.embed.embed_unprojected(tokens, position) - model.embed.tokens.weight[tokens]
    torch.testing.assert_close(x[0, 1], x[0, 3])
    assert (x[0, [0, 2]] == 0).all()
    one_text = model.embed.embed_unprojected(tokens) - model.embed.tokens.weight[tokens]
    assert not torch.allclose(one_text[0, 2], one_text[0, 1])
    assert (one_text[0, 0] == 0).all()


def test_save_and_load(tmp_path: Path) -> None:
    model = make_model(bag_of_words(10, 4, num_bigram_buckets=7))
    model.save(tmp_path / "bag")
    found = load_model(tmp_path / "bag")
    assert found.config == model.config
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value)
