"""The loss of a student equals torch's functions on the logits of `transformers`, and so does its gradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification

from firth.models import load_model
from firth.models.task_distill import TaskDistillation
from firth.objectives import Batch

T = 3.0


def test_the_loss_and_its_gradient_are_those_of_transformers(tmp_path: Path) -> None:
    """Two random models: the loss by torch's functions on the logits of `transformers`, and the student's gradient."""
    shape = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"intermediate_size": 24, "num_labels": 3, "max_position_embeddings": 16}
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(BertForSequenceClassification(BertConfig(**shape)).eval())
        models[-1].save_pretrained(tmp_path / str(seed))
    teacher, student = models
    ids, label = torch.randint(5, 60, (4, 8)), torch.tensor([0, 2, -100, 1])
    with torch.no_grad():
        target = teacher(ids).logits
    logits = student(ids).logits
    soft = T**2 * F.kl_div((logits / T).log_softmax(-1), (target / T).softmax(-1), reduction="batchmean")
    expected = 0.4 * F.cross_entropy(logits, label) + 0.6 * soft
    expected.backward()
    ours = load_model(tmp_path / "1").eval()
    ours.distillation = TaskDistillation(0.6, T)
    positions = np.zeros((4, 1), np.int64)
    batch = Batch(
        ids.numpy(), target_positions=positions, task_labels=label[:, None].numpy(), soft_labels=target[:, None].numpy()
    )
    counts, found = batch.loss_counts, ours.losses(batch.to(torch.device("cpu")))
    assert counts["targets"] == 3
    assert counts["soft_targets"] == 4
    loss = sum((found[name] / counts[name] for name in ("targets", "soft_targets")), torch.zeros(()))
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(ours.head.out.weight.grad, student.classifier.weight.grad, atol=1e-6)
    assert torch.allclose(ours.embed.tokens.weight.grad, student.bert.embeddings.word_embeddings.weight.grad, atol=1e-6)
