"""Task heads on packed rows, by hand; losses add up; unsupported combinations raise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.models import (
    PRESETS,
    AuxiliaryLM,
    ClassificationHead,
    EmbeddingHead,
    LMHead,
    Model,
    ModelConfig,
    MultipleChoiceHead,
    RegressionHead,
    SpanHead,
    TokenClassificationHead,
    count_parameters,
    head_for_task,
    load_model,
    make_model,
)
from firth.models.presets import bart, bert, gpt2, labse, llama
from firth.models.task_heads import gather_pairs, grouped_logsumexp
from firth.objectives.batch import Batch

V, NAN = 30, float("nan")
ENCODER, DECODER = bert(1, 16, 2, V), gpt2(1, 16, 2, V)
DOC = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1], [0, 0, 1, 1, 2, 2, 2, 2]])
POSITION = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 0, 1, 0, 1, 2, 3]])
TOKENS = torch.randint(3, V, (2, 8), generator=torch.Generator().manual_seed(0))
FIRST = torch.tensor([[0, 3, 0], [0, 2, 4]])  # of each text; the third slot of the first row is not used
TEXTS = [(0, slice(0, 3)), (0, slice(3, 7)), (1, slice(0, 2)), (1, slice(2, 4)), (1, slice(4, 8))]


def lively(config: ModelConfig) -> Model:
    torch.manual_seed(0)
    model = make_model(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model.eval()


def packed(**fields: Any) -> Batch:
    return Batch(TOKENS, document_ids=DOC, position_ids=POSITION, **fields)


def with_head(config: ModelConfig, task: str, **changes: Any) -> ModelConfig:
    return replace(config, head=head_for_task(config, task, ("a", "b", "c"), **changes))


# --- sums within groups --------------------------------------------------------------------------------------


def test_log_sum_exp_by_hand() -> None:
    """Two groups, large scores, an unused slot; the gradient is the softmax within the group."""
    score = torch.tensor([1000.0, 1.0, 1000.0, -5.0, 3.0], requires_grad=True)
    group, used = torch.tensor([2, 0, 2, -1, 0]), torch.tensor([True, True, True, False, True])
    found = grouped_logsumexp(score, group, used)
    assert_close(found[0], 1000 + torch.tensor(2.0).log())
    assert_close(found[1], torch.tensor([1.0, 3.0]).logsumexp(0))
    assert found[0] == found[2]
    found[1].backward()
    assert score.grad is not None
    assert_close(score.grad, torch.tensor([0, torch.e**1, 0, 0, torch.e**3]) / (torch.e**1 + torch.e**3))


def test_pairs_by_hand() -> None:
    """Six slots: pair 1 (positions 0 and 4), pair 0 (positions 1 and 2), two unused."""
    x, group = torch.arange(6.0)[:, None], torch.tensor([1, 0, 0, -1, 1, -1])
    first, second, used = gather_pairs(x, group, None)
    assert first[:2, 0].tolist() == [1, 0]
    assert second[:2, 0].tolist() == [2, 4]
    assert used.tolist() == [True, True, False]
    first, second, _ = gather_pairs(x, group, torch.tensor([1, 0, 1, 0, 0, 0]))
    assert first[:2, 0].tolist() == [1, 4]
    assert second[:2, 0].tolist() == [2, 0]


# --- each head -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["first", "mean"])
def test_classification_of_packed_texts_equals_single_texts(pool: str) -> None:
    model = lively(with_head(ENCODER, "classify", pool=pool))
    target = torch.tensor([[2, 0, -100], [1, 1, 0]])
    batch = packed(target_positions=FIRST, task_labels=target)
    logits = model.logits(batch)
    alone = torch.stack([model(TOKENS[row : row + 1, part]).logits[0] for row, part in TEXTS])
    assert_close(torch.stack([logits[0, 0], logits[0, 1], *logits[1]]), alone)
    wanted = F.cross_entropy(alone, torch.tensor([2, 0, 1, 1, 0]), reduction="sum")
    assert_close(model.losses(batch), {"targets": wanted})
    assert batch.loss_counts["targets"] == 5


def test_class_weights_scale_the_loss() -> None:
    model = lively(with_head(ENCODER, "classify", class_weights=(1.0, 10.0, 0.5)))
    plain = lively(with_head(ENCODER, "classify"))
    positions, target = FIRST[:, :1], torch.tensor([[1], [2]])
    each = [
        plain.loss(packed(target_positions=positions, task_labels=t))
        for t in (torch.tensor([[1], [-100]]), torch.tensor([[-100], [2]]))
    ]
    assert_close(model.loss(packed(target_positions=positions, task_labels=target)), 10 * each[0] + 0.5 * each[1])
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_relation_head_concatenates_the_marked_states() -> None:
    model = lively(with_head(ENCODER, "relation"))
    assert model.config.head.num_marked == 2
    positions = torch.tensor([[0, 2, 4, 6], [1, 0, 5, 7]])
    states = model.hidden_states(packed())
    both = torch.cat([states[0, 4], states[0, 6]])
    assert_close(model.logits(packed(target_positions=positions))[0, 1], model.head.out(both))
    with pytest.raises(UserError, match="several positions"):
        model(TOKENS)


@pytest.mark.parametrize("task", ["classify", "regress"])
def test_both_orders_of_a_pair_are_added(task: str) -> None:
    model = lively(with_head(DECODER, task, num_orders=2))
    states = model.hidden_states(packed())
    both = model.head.out(states[1, 3] + states[1, 7])
    found = model.logits(packed(target_positions=torch.tensor([[2, 6], [3, 7]])))[1, 0]
    assert_close(found, both if task == "classify" else both[0])


def test_regression_by_hand() -> None:
    model = lively(with_head(ENCODER, "regress"))
    batch = packed(target_positions=FIRST, task_labels=torch.tensor([[1.0, -2.0, NAN], [0.0, NAN, 3.5]]))
    score = model.logits(batch)
    wanted = (score[0, 0] - 1) ** 2 + (score[0, 1] + 2) ** 2 + score[1, 0] ** 2 + (score[1, 2] - 3.5) ** 2
    assert_close(model.loss(batch), wanted)
    assert batch.loss_counts["targets"] == 4
    model.loss(batch).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_choices_of_a_group_may_span_rows() -> None:
    model = lively(with_head(ENCODER, "choice"))
    group, target = torch.tensor([[0, 1, -1], [1, 0, 0]]), torch.tensor([[0, 1, 0], [0, 0, 1]])
    batch = packed(target_positions=FIRST, task_labels=target, group_ids=group)
    score = model.logits(batch)
    first = torch.stack([score[0, 0], score[1, 1], score[1, 2]])
    second = torch.stack([score[0, 1], score[1, 0]])
    assert_close(model.loss(batch), -first.log_softmax(0)[2] - second.log_softmax(0)[0])
    assert batch.loss_counts["targets"] == 2
    with pytest.raises(UserError, match="rows, choices, tokens"):
        model(TOKENS)


def test_tags_by_hand() -> None:
    model = lively(with_head(ENCODER, "tag"))
    batch = packed(
        target_positions=torch.tensor([[1, 4, 5], [0, 0, 0]]), task_labels=torch.tensor([[0, 2, 1], [-100] * 3])
    )
    logits = model.logits(batch)
    assert_close(logits[0], model.head.out(model.hidden_states(packed())[0, [1, 4, 5]]))
    assert_close(model.loss(batch), F.cross_entropy(logits[0], torch.tensor([0, 2, 1]), reduction="sum"))
    assert batch.loss_counts["targets"] == 3


def span_target() -> Tensor:
    """Spans 1-2 of the first text, 4-6 of the second (not before 4), 2-2 of the third row's second text."""
    target = torch.zeros(2, 8, 2)
    target[0, 1, 0] = target[0, 2, 1] = target[0, 4, 0] = target[0, 6, 1] = target[1, 2, 0] = target[1, 2, 1] = 1
    target[0, 3] = -1
    return target


def test_span_softmax_is_over_its_text() -> None:
    model = lively(with_head(ENCODER, "span-qa"))
    batch = packed(task_labels=span_target())
    start, end = model.logits(batch).unbind(-1)
    wanted = -start[0, :3].log_softmax(0)[1] - end[0, :3].log_softmax(0)[2]
    wanted -= start[0, 4:7].log_softmax(0)[0] + end[0, 4:7].log_softmax(0)[2]
    wanted -= start[1, 2:4].log_softmax(0)[0] + end[1, 2:4].log_softmax(0)[0]
    assert_close(model.loss(batch), wanted / 2)
    assert batch.loss_counts["targets"] == 3
    called = model(TOKENS[:1, :3], start_positions=torch.tensor([1]), end_positions=torch.tensor([2]))
    assert_close(called.loss, -(start[0, :3].log_softmax(0)[1] + end[0, :3].log_softmax(0)[2]) / 2)


def test_contrastive_loss_with_margin() -> None:
    """Feng et al. 2022, equation 3: the margin is subtracted from the positive only; both directions."""
    model = lively(replace(labse(1, 16, 2, V), head=EmbeddingHead(has_pooler=True, margin=0.25, scale=4.0)))
    batch = packed(target_positions=FIRST, group_ids=torch.tensor([[0, 1, -1], [1, 0, -1]]))
    vectors = model.logits(batch)
    assert_close(vectors.norm(dim=-1), torch.ones(2, 3))
    a, b = torch.stack([vectors[0, 0], vectors[0, 1]]), torch.stack([vectors[1, 1], vectors[1, 0]])
    near = 4 * (a @ b.T - 0.25 * torch.eye(2))
    wanted = -near.log_softmax(1).diagonal().sum() - near.log_softmax(0).diagonal().sum()
    assert_close(model.loss(batch), wanted)
    assert batch.loss_counts["targets"] == 2


def test_encoder_decoder_heads_read_the_decoder() -> None:
    for pool in ("last", "mean"):
        model = lively(with_head(bart(1, 16, 2, V), "classify", pool=pool))
        written = TOKENS.roll(1, 1)
        batch = packed(target_positions=torch.tensor([[2, 6], [3, 7]]), task_labels=torch.tensor([[0, 1], [2, 0]]))
        batch = batch._replace(decoder_input_ids=written, decoder_document_ids=DOC, decoder_position_ids=POSITION)
        first = model(TOKENS[1:, 2:4], decoder_input_ids=written[1:, 2:4]).logits
        assert_close(model.logits(batch)[1, :1], first)
        assert batch.num_tokens == 30


# --- beside the answers --------------------------------------------------------------------------------------


def test_auxiliary_lm_loss(tmp_path: Path) -> None:
    """Radford et al. 2018, equation 5. An untied LM head is kept from the language model."""
    body = lively(llama(1, 16, 2, 24, V))
    body.save(tmp_path)
    beside = AuxiliaryLM(0.5, LMHead(tied=False))
    model = load_model(tmp_path, head=head_for_task(body.config, "classify", ("a", "b")), extras=(beside,))
    labels = torch.where(DOC.roll(-1, 1) == DOC, TOKENS.roll(-1, 1), -100)
    labels[:, -1] = -100
    batch = packed(
        target_positions=torch.tensor([[2, 6], [1, 3]]), task_labels=torch.tensor([[0, 1], [1, 1]]), labels=labels
    )
    parts = model.losses(batch)
    assert_close(parts["lm_targets"], 0.5 * body.loss(packed(labels=labels)))
    assert_close(parts["targets"], model.loss(batch))
    assert batch.loss_counts == {"targets": 4, "tokens": 15, "lm_targets": int((labels != -100).sum())}
    model.save(tmp_path / "tuned")
    again = load_model(tmp_path / "tuned")
    assert again.config == model.config
    assert_close(again.losses(batch), parts)


def test_which_models_keep_the_lm_head() -> None:
    for config in (replace(ENCODER, extras=(AuxiliaryLM(),)), replace(DECODER, extras=(AuxiliaryLM(),))):
        with pytest.raises(UserError, match="AuxiliaryLM"):
            make_model(config)


# --- any split adds up ---------------------------------------------------------------------------------------

SPLIT = {
    "classify": dict(target_positions=FIRST, task_labels=torch.tensor([[2, 0, -100], [1, 1, 0]])),
    "regress": dict(target_positions=FIRST, task_labels=torch.tensor([[1.0, -2.0, NAN], [0.0, NAN, 3.5]])),
    "tag": dict(target_positions=FIRST, task_labels=torch.tensor([[2, 0, -100], [1, 1, 0]])),
    "span-qa": dict(task_labels=span_target()),
    "choice": dict(
        target_positions=FIRST,
        task_labels=torch.tensor([[0, 1, 0], [1, 0, 0]]),
        group_ids=torch.tensor([[0, 0, -1], [1, 1, 1]]),
    ),
}


@pytest.mark.parametrize("task", SPLIT)
def test_the_losses_of_micro_batches_add_up(task: str) -> None:
    model = lively(with_head(ENCODER, task))
    whole = packed(**SPLIT[task])
    rows = [Batch(*(None if a is None else a[i : i + 1] for a in whole)) for i in (0, 1)]
    if task == "choice":  # groups are numbered within a batch
        rows[1] = rows[1]._replace(group_ids=rows[1].group_ids - 1)
    assert_close(model.loss(whole), model.loss(rows[0]) + model.loss(rows[1]))
    assert whole.loss_counts["targets"] == sum(row.loss_counts["targets"] for row in rows)


@pytest.mark.parametrize("task", [*SPLIT, "embed"])
def test_a_batch_without_labels_has_zero_loss_and_gradient(task: str) -> None:
    model = lively(
        with_head(ENCODER, task) if task != "embed" else replace(ENCODER, head=EmbeddingHead(has_pooler=True))
    )
    fields = dict(SPLIT.get(task, {"target_positions": FIRST, "group_ids": FIRST}))
    empty = {"classify": -100, "tag": -100, "regress": NAN, "span-qa": 0.0, "choice": 0, "embed": 0}[task]
    if "task_labels" in fields:
        fields["task_labels"] = torch.full_like(fields["task_labels"], empty)
    if "group_ids" in fields:
        fields["group_ids"] = torch.full_like(fields["group_ids"], -1)
    batch = packed(**fields)
    loss = model.loss(batch)
    loss.backward()
    assert loss == 0
    assert batch.loss_counts["targets"] == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("task", SPLIT)
def test_losses_compile_to_one_graph(task: str) -> None:
    """No loss depends on values or loops over texts: one trace serves all batches of a shape."""
    model = lively(with_head(ENCODER, task))
    batch = packed(**SPLIT[task])
    compiled = torch.compile(model.losses, backend="eager", fullgraph=True)
    assert_close(compiled(batch), model.losses(batch))


# --- which head ----------------------------------------------------------------------------------------------


def test_heads_as_published() -> None:
    heads = {
        name: head_for_task(PRESETS[name], "classify", ("a",)) for name in PRESETS if not name.startswith(("t5", "rnn"))
    }
    assert heads["bert-tiny"] == ClassificationHead(("a",), has_pooler=True)
    assert heads["roberta-tiny"] == ClassificationHead(("a",), has_pooler=True, dropout_before_pooler=True)
    assert heads["electra-tiny"] == ClassificationHead(
        ("a",), has_pooler=True, activation="gelu", dropout_before_pooler=True
    )
    assert heads["xlnet-tiny"] == ClassificationHead(("a",), has_pooler=True, pool="last")
    assert heads["gpt2-tiny"] == ClassificationHead(("a",), pool="last", dropout=0.0)
    assert heads["gpt-tiny"] == ClassificationHead(("a",), pool="last")
    assert heads["llama-tiny"] == ClassificationHead(("a",), pool="last")
    assert heads["modernbert-tiny"] == ClassificationHead(
        ("a",), has_pooler=True, pool="mean", activation="gelu", has_norm=True
    )
    assert heads["bart-tiny"] == ClassificationHead(
        ("a",), pool="last", has_pooler=True, dropout=0.0, dropout_before_pooler=True
    )
    pooled = ClassificationHead(
        ("a",), has_pooler=True, pool="concat", activation="relu", has_norm=True, pooler_dim=50, dropout=0.1
    )
    assert heads["ulmfit-tiny"] == pooled
    assert head_for_task(PRESETS["labse"], "embed") == EmbeddingHead(has_pooler=True)
    assert head_for_task(PRESETS["bert-tiny"], "embed") == EmbeddingHead("mean")
    assert head_for_task(PRESETS["gpt2-tiny"], "embed") == EmbeddingHead("last")
    assert head_for_task(PRESETS["gpt2-tiny"], "choice") == MultipleChoiceHead(pool="last", dropout=0.0)
    assert head_for_task(PRESETS["deberta-tiny"], "regress") == RegressionHead(has_pooler=True, activation="gelu")
    assert head_for_task(PRESETS["distilbert-tiny"], "tag", ("a",)) == TokenClassificationHead(("a",))
    assert head_for_task(PRESETS["bert-tiny"], "span-qa") == SpanHead(dropout=0.0)
    assert head_for_task(PRESETS["t5-tiny"], "text-to-text") == PRESETS["t5-tiny"].head
    assert head_for_task(PRESETS["t5-tiny"], "tag", ("a",)) == TokenClassificationHead(("a",), dropout=0.0)
    for name in ("t5-tiny", "bart-tiny"):
        assert head_for_task(PRESETS[name], "embed") == EmbeddingHead("mean")


def test_unsupported_heads_raise() -> None:
    with pytest.raises(UserError, match=r"generates its answers.*text-to-text"):
        head_for_task(PRESETS["rnn-tiny"], "classify", ("a", "b"))
    for task in ("tag", "embed"):
        with pytest.raises(UserError, match=f"has no head for {task}: take a transformer for the task {task}"):
            head_for_task(PRESETS["rnn-tiny"], task, ("a", "b"))
    with pytest.raises(UserError, match="Did you mean 'classify'"):
        head_for_task(ENCODER, "clasify")
    with pytest.raises(UserError, match="has no LM head"):
        head_for_task(with_head(DECODER, "classify"), "lm")
    for head, wrong in (
        (TokenClassificationHead(()), "no tags"),
        (ClassificationHead(("a", "b"), class_weights=(1.0,)), "1 numbers for 2 classes"),
        (ClassificationHead(("a",), num_marked=2, num_orders=2), "one of them 1"),
        (RegressionHead(dropout=1.5), "model.head.dropout is 1.5"),
    ):
        with pytest.raises(UserError, match=wrong):
            make_model(replace(ENCODER, head=head))
    with pytest.raises(UserError, match="has read one token"):
        make_model(replace(DECODER, head=ClassificationHead(("a", "b"))))


def test_head_parameters_are_counted_without_building() -> None:
    body = count_parameters(replace(ENCODER, head=SpanHead()))
    assert count_parameters(replace(ENCODER, head=TokenClassificationHead(("a", "b", "c")))) == body + 17
    assert count_parameters(with_head(ENCODER, "classify")) == body + 17 + 16 * 17
    assert count_parameters(with_head(ENCODER, "relation")) == body + 3 * 33 - 34
    assert body == make_model(replace(ENCODER, head=SpanHead())).num_parameters


def test_arrays_become_tensors() -> None:
    batch = Batch(
        np.zeros((1, 4), np.int32), task_labels=np.array([[0.5, np.nan]]), group_ids=np.array([[0, -1]], np.int32)
    )
    moved = batch.to(torch.device("cpu"))
    assert moved.task_labels.dtype == torch.float32
    assert moved.group_ids.dtype == torch.long
