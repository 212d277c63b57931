"""LSTMs: AWD-LSTM, packed rows, and recurrent states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.models import Decoder, Encoder, ModelConfig, count_parameters, get_preset, make_model
from firth.models.config import AWDLSTMConfig, FeatureEncoderConfig, LearnedPosition, LMHead, without_dropout
from firth.models.kernels.dropout import fast_dropout
from firth.models.presets import PRESETS
from firth.models.recurrent.awd import AWDLSTMStack
from firth.models.recurrent.lstm import locked_dropout, run_lstm, unpack_documents
from firth.models.recurrent.presets import RECURRENT_PRESETS, bilstm, elmo, rnn, ulmfit
from firth.models.sizes import flops_per_token
from firth.models.task_heads import max_pool_documents, pool_hidden_states
from firth.objectives import Batch, CounterRNG, SequenceAutoencoder
from firth.tokens import Rows, Vocabulary

V = 30
NONE = {"weight_drop": 0.0, "word_drop": 0.0, "input_drop": 0.0, "hidden_drop": 0.0, "output_drop": 0.0}
FREE = {**NONE, "activation_reg": 0.0, "temporal_activation_reg": 0.0}


def awd(**changes: float | int) -> Decoder:
    """Three layers of widths 4, 6, 6 and 4, without regularization unless set."""
    torch.manual_seed(0)
    config = ulmfit(3, 4, 6, V)
    model = make_model(replace(config, recurrent=AWDLSTMConfig(**{"hidden_size": 6, **FREE, **changes})))  # type: ignore[arg-type]
    assert isinstance(model, Decoder)
    return model


def stack_of(model: Decoder) -> AWDLSTMStack:
    assert isinstance(model.stack, AWDLSTMStack)
    return model.stack


def tokens(rows: int = 2, length: int = 7) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(1))


def by_hand(lstm: nn.LSTM, x_NLD: Tensor, weight_hh: Tensor) -> Tensor:
    """The equations of an LSTM, step by step."""
    h = c = torch.zeros(len(x_NLD), lstm.hidden_size)
    found = []
    for x in x_NLD.unbind(1):
        gates = x @ lstm.weight_ih_l0.T + lstm.bias_ih_l0 + h @ weight_hh.T + lstm.bias_hh_l0
        i, f, g, o = gates.chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        found.append(h)
    return torch.stack(found, 1)


# --- AWD-LSTM -------------------------------------------------------------------------------------------------------


def test_equals_torch_lstm_without_dropout() -> None:
    model = awd().train()
    x = model.embed.tokens(tokens())
    for lstm in stack_of(model).blocks:
        x, _ = lstm(x)
    assert_close(model.hidden_states(Batch(tokens())), x)


def test_without_dropout_training_computes_what_evaluation_does() -> None:
    torch.manual_seed(0)
    model = make_model(without_dropout(ulmfit(3, 4, 6, V)))
    trained, evaluated = (model.train(mode).hidden_states(Batch(tokens())) for mode in (True, False))
    assert_close(trained, evaluated)


def test_weight_drop_applies_to_hidden_to_hidden_weights() -> None:
    model = awd(weight_drop=0.5).train()
    torch.manual_seed(7)
    found = model.hidden_states(Batch(tokens()))
    torch.manual_seed(7)
    x = model.embed.tokens(tokens())
    for lstm in stack_of(model).blocks:
        assert isinstance(lstm, nn.LSTM)
        dropped = fast_dropout(lstm.weight_hh_l0, 0.5)
        assert 0 < int((dropped == 0).sum()) < dropped.numel()
        x = by_hand(lstm, x, dropped)
    assert_close(found, x)
    model.eval()
    x = model.embed.tokens(tokens())
    for lstm in stack_of(model).blocks:
        x = by_hand(lstm, x, lstm.weight_hh_l0)  # type: ignore[arg-type]
    assert_close(model.hidden_states(Batch(tokens())), x)


def test_dropped_weights_have_no_gradient() -> None:
    model = awd(weight_drop=0.5).train()
    torch.manual_seed(7)
    model.hidden_states(Batch(tokens())).sum().backward()
    torch.manual_seed(7)
    lstm = stack_of(model).blocks[0]
    gone = fast_dropout(lstm.weight_hh_l0, 0.5) == 0  # type: ignore[arg-type]
    assert (lstm.weight_hh_l0.grad[gone] == 0).all()  # type: ignore[index, union-attr]
    assert (lstm.weight_hh_l0.grad[~gone] != 0).any()  # type: ignore[index, union-attr]


def test_locked_dropout_is_shared_by_all_positions_of_a_text() -> None:
    torch.manual_seed(0)
    x = locked_dropout(torch.ones(50, 6, 20), 0.4)
    assert (x == x[:, :1]).all(), "the same at all positions"
    assert not (x == x[:1]).all(), "and another for each text"
    assert x.unique().tolist() == pytest.approx([0.0, 1 / 0.6], rel=1e-4)
    assert float((x == 0).float().mean()) == pytest.approx(0.4, abs=0.05)


def test_embedding_dropout_drops_a_word_at_all_positions() -> None:
    model = awd(word_drop=0.5).train()
    twice = torch.arange(V).repeat(2)[None]
    x = model.embed.embed_unprojected(twice)[0]
    assert_close(x[:V], x[V:])
    gone = (x == 0).all(-1)
    assert 0 < int(gone.sum()) < 2 * V
    assert_close(x[~gone], 2 * model.embed.tokens(twice[0])[~gone], rtol=1e-3, atol=1e-4)


def test_each_dropout_is_applied_at_its_site() -> None:
    """With one of them alone: inputs of the first layer, between layers, outputs."""
    x = torch.randn(2, 5, 4)
    for name in ("input_drop", "hidden_drop", "output_drop"):
        stack = stack_of(awd(**{name: 0.5})).train()
        torch.manual_seed(3)
        found, states = stack(x, None), list[Tensor]()
        torch.manual_seed(3)
        y = locked_dropout(x, 0.5) if name == "input_drop" else x
        for i, lstm in enumerate(stack.blocks):
            y, _ = lstm(y)
            if name == ("output_drop" if i == 2 else "hidden_drop"):
                y = locked_dropout(y, 0.5)
        assert_close(found, y)
        stack.eval()(x, None, all_hidden_states=states)
        assert [s.shape[-1] for s in states] == [4, 6, 6, 4]


def test_an_autoencoder_is_two_lstms_with_the_same_weights() -> None:
    """Dai & Le 2015, figure 1: torch's LSTMs read a text; others with these weights write it from their last states."""
    model, text = awd().eval(), torch.tensor([[7, 8, 9, 3]])  # 3 is </s>
    same = np.zeros((1, 4), np.int32)
    rows = Rows(text.numpy(), same, np.arange(4, dtype=np.int32)[None], same == 0, *np.zeros((3, 1), np.int64))
    vocab = Vocabulary(V, 0, 1, None, 3, None, None, None, (), (0, 1, 3))
    batch = SequenceAutoencoder()(rows, CounterRNG(0, np.zeros(1, np.int64)), vocab).to(torch.device("cpu"))

    encoder, decoder = model.embed.tokens(text), model.embed.tokens(text.roll(1, 1))  # </s> starts the decoder
    for lstm in stack_of(model).blocks:
        _, state = lstm(encoder[:, :-1])
        encoder, decoder = lstm(encoder)[0], lstm(decoder, state)[0]
    loss = nn.functional.cross_entropy(model.head(decoder, model.embed.tokens.weight)[0], text[0], reduction="sum")
    assert_close(model.loss(batch), loss)
    assert batch.num_targets == 4


def test_activation_regularization() -> None:
    """AR is the mean square of the states after dropout, TAR that of their differences, before it."""
    stack = stack_of(awd(activation_reg=2.0, temporal_activation_reg=3.0)).train()
    x, doc = torch.randn(2, 5, 4), torch.tensor([[0, 0, 0, 1, 1], [0, 0, -1, -1, -1]])
    y = stack(x, doc)
    y = y.detach()
    large = sum(float(y[b, t].square().mean()) for b, t in ((0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)))
    pairs = ((0, 0), (0, 1), (0, 3), (1, 0))  # no step from a text to the next
    steep = sum(float((y[b, t + 1] - y[b, t]).square().mean()) for b, t in pairs)
    parts = stack.add_regularization({"targets": torch.zeros(())})
    assert float(parts["tokens"]) == pytest.approx(2 * large + 3 * steep, rel=1e-5)
    assert stack.add_regularization({}) == {}, "once"
    stack.eval()(x, doc)
    assert stack.add_regularization({}) == {}, "only in training"


def test_activation_regularization_is_added_to_the_loss() -> None:
    model = awd(activation_reg=2.0)
    batch = Batch(tokens(), labels=tokens().roll(-1, 1))
    assert set(model.train().losses(batch)) == {"targets", "tokens"}
    assert set(model.eval().losses(batch)) == {"targets"}


def test_truncated_backpropagation() -> None:
    x = torch.randn(1, 6, 4, requires_grad=True)
    whole, cut = stack_of(awd(bptt=6)).train(), stack_of(awd(bptt=2)).train()
    y = cut(x, None)
    assert_close(y, whole(x, None))
    y[0, 3].sum().backward()
    assert x.grad is not None
    assert (x.grad[0, :2] == 0).all(), "two positions are learned from"
    assert (x.grad[0, 2:4] != 0).all()


def test_tied_weights() -> None:
    model = awd()
    names = {name for name, _ in model.named_parameters()}
    assert "head.weight" not in names
    assert "head.bias" in names
    assert float(model.embed.tokens.weight.detach().abs().max()) <= 0.1


# --- texts of packed rows -------------------------------------------------------------------------------------------

BODIES: dict[str, ModelConfig] = {
    "ulmfit": replace(ulmfit(2, 8, 6, V), recurrent=AWDLSTMConfig(6, **NONE)),
    "bilstm": replace(bilstm(2, 8, V), dropout=0.0),
    "elmo": replace(elmo(2, 6, 4, V, filters=((1, 4), (2, 4))), dropout=0.0),
    "elmo without bounds": replace(elmo(2, 6, 4, V, filters=((1, 4),), clip=0.0), dropout=0.0),
}


@pytest.mark.parametrize("name", BODIES)
def test_packed_documents_are_independent(name: str) -> None:
    torch.manual_seed(0)
    stack = make_model(BODIES[name]).stack
    width = 4 if name.startswith("elmo") else 8
    x, doc = torch.randn(2, 7, width), torch.tensor([[0, 0, 0, 1, 1, 2, -1], [0, 0, 0, 0, 0, 0, 0]])
    together = stack(x, doc)
    assert_close(together[0, :3], stack(x[:1, :3], None)[0])
    assert_close(together[0, 3:5], stack(x[:1, 3:5], None)[0])
    assert_close(together[0, 5:6], stack(x[:1, 5:6], None)[0])
    assert (together[0, 6] == 0).all()
    assert_close(together[1], stack(x[1:], None)[0])


def test_rows_of_padding_only() -> None:
    stack = make_model(BODIES["bilstm"]).stack
    assert stack(torch.randn(1, 3, 8), torch.full((1, 3), -1)).shape == (1, 3, 8)


def test_unpack_and_repack() -> None:
    doc = torch.tensor([[0, 0, 1], [-1, 0, 0]])
    x = torch.arange(6.0).view(2, 3, 1) + 1
    texts = unpack_documents(x, doc)
    apart = texts.unpack(x)[..., 0]
    assert [row[is_token].tolist() for row, is_token in zip(apart, texts.mask, strict=True)] == [[1, 2], [3], [5, 6]]
    assert texts.repack(texts.unpack(x))[..., 0].tolist() == [[1, 2, 3], [0, 5, 6]]
    back = texts.repack(texts.reverse(texts.unpack(x)))[..., 0]
    assert back.tolist() == [[2, 1, 3], [0, 6, 5]]
    assert texts.reverse(texts.reverse(texts.unpack(x))).equal(texts.unpack(x))


# --- recurrent state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ulmfit", "elmo", "elmo without bounds"])
def test_states_continue_from_the_last_batch(name: str) -> None:
    """ELMo's backward LSTM restarts with every row: it must not see the past."""
    torch.manual_seed(0)
    model = make_model(BODIES[name]).eval()
    width, forward = (4, slice(0, 4)) if name.startswith("elmo") else (8, slice(None))
    x = torch.randn(2, 6, width)
    whole = model.stack(x, None)[..., forward]
    model.load_state({})
    first = model.stack(x[:, :2], torch.zeros(2, 2, dtype=torch.long))
    carry = model.pop_state()
    assert all(len(value) == 2 for value in carry.values())
    assert not any(value.requires_grad for value in carry.values())
    model.load_state(carry)
    second = model.stack(x[:, 2:], torch.zeros(2, 4, dtype=torch.long))
    model.pop_state()
    assert_close(torch.cat([first, second], 1)[..., forward], whole)
    if name.startswith("elmo"):
        assert_close(second[..., 4:], model.stack(x[:, 2:], None)[..., 4:])


def test_no_state_is_kept_by_default() -> None:
    model = make_model(BODIES["ulmfit"]).eval()
    model.load_state({})
    model.hidden_states(Batch(tokens()))
    assert len(model.pop_state()) == 2
    assert model.pop_state() == {}
    once = model.hidden_states(Batch(tokens(5)))
    assert_close(model.hidden_states(Batch(tokens(5))), once)


def test_a_learned_initial_state() -> None:
    lstm = nn.LSTM(3, 4, batch_first=True)
    x, h, c = torch.randn(2, 5, 3), torch.randn(2, 4), torch.randn(2, 4)
    y, (h_n, c_n) = run_lstm(lstm, x, (h, c))
    wanted, (wanted_h, wanted_c) = lstm(x, (h[None], c[None]))
    assert_close(y, wanted)
    assert_close((h_n, c_n), (wanted_h[0], wanted_c[0]))


# --- heads ----------------------------------------------------------------------------------------------------------


def test_concat_pooling() -> None:
    x = torch.randn(2, 5, 3)
    doc = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, -1, -1]])
    positions = torch.tensor([[1, 4], [2, 0]])
    found = pool_hidden_states(x, positions, doc, "concat")
    assert found.shape == (2, 2, 9)
    for b, k, first, end in ((0, 0, 0, 2), (0, 1, 2, 5), (1, 0, 0, 3)):
        text = x[b, first:end]
        assert_close(found[b, k], torch.cat([text[-1], text.amax(0), text.mean(0)]))
    assert_close(max_pool_documents(x, positions, None), x.amax(1, keepdim=True).expand(2, 2, 3))


# --- presets --------------------------------------------------------------------------------------------------------


def test_published_sizes() -> None:
    """ELMo without its softmax has 93.6, 28.0 and 13.6 million parameters; those of ULMFiT are counted by hand."""
    for name, figure in (("elmo-base", 93.6e6), ("elmo-medium", 28.0e6), ("elmo-small", 13.6e6)):
        config = get_preset(name)
        assert isinstance(config.head, LMHead)
        assert config.head.dim is not None
        assert count_parameters(config) - config.vocab_size * (config.head.dim + 1) == pytest.approx(figure, rel=0.005)
    layers = sum(4 * out * (read + out + 2) for read, out in ((400, 1150), (1150, 1150), (1150, 400)))
    assert count_parameters(get_preset("ulmfit-base")) == 30002 * 401 + layers


def test_flops_per_token() -> None:
    """Two per weight, whatever the length of the row."""
    config = get_preset("ulmfit-base")
    weights = sum(4 * out * (read + out) for read, out in ((400, 1150), (1150, 1150), (1150, 400))) + 30002 * 400
    assert flops_per_token(config, 512) == flops_per_token(config, 64) == 2 * weights


def test_they_are_among_the_presets() -> None:
    assert set(RECURRENT_PRESETS) <= set(PRESETS)
    assert {"ulmfit-tiny", "ulmfit-base", "elmo-tiny", "elmo-small", "elmo-base"} <= set(RECURRENT_PRESETS)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (replace(ulmfit(2, 8, 6), architecture="encoder"), "for the architecture decoder"),
        (replace(ulmfit(2, 8, 6), position=LearnedPosition(8)), "NoPosition"),
        (replace(ulmfit(2, 8, 6), recurrent=AWDLSTMConfig(6, weight_drop=1.0)), "weight_drop is 1.0"),
        (replace(ulmfit(2, 8, 6), recurrent=AWDLSTMConfig(6, bptt=0)), "bptt must be at least 1"),
        (replace(bilstm(1, 8), dim=9), "model.dim=9 must be 8"),
        (elmo(1, 0, 4), "at least 1"),
        (replace(bilstm(1, 8), extras=(FeatureEncoderConfig(),)), "the head of a task"),
        (replace(rnn(1, 8, True), architecture="decoder"), "for the architecture encoder-decoder"),
    ],
)
def test_invalid_configs_raise(config: ModelConfig, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_model(config)


def test_the_same_model_by_its_names() -> None:
    model = make_model(BODIES["bilstm"]).eval()
    assert isinstance(model, Encoder)
    out = model(tokens(), attention_mask=torch.ones(2, 7), output_hidden_states=True)
    assert out.hidden_states is not None
    assert [h.shape for h in out.hidden_states] == [(2, 7, 8)] * 3
    assert_close(out.logits, model.logits(Batch(tokens())))
