"""ELMo: character CNN, two directional language models, task features, sampled softmax."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.models import ClassificationHead, Encoder, grow_vocabulary, load_model, make_model
from firth.models.config import FeatureEncoderConfig
from firth.models.heads import sampled_cross_entropy
from firth.models.hf.config_io import hf_model_type
from firth.models.presets import bag_of_words, bert
from firth.models.recurrent import clipped
from firth.models.recurrent.clipped import clipped_lstm
from firth.models.recurrent.elmo import CharCNNEmbedding, ELMoLayer, ELMoStack
from firth.models.recurrent.features import FeatureEncoder
from firth.models.recurrent.presets import elmo
from firth.objectives import OBJECTIVES, Batch, CounterRNG
from firth.tokens import Rows, Tokenizer, train_tokenizer
from firth.tokens.characters import EOS_CHAR, PAD_CHAR, encode_word_chars, sentence_boundary_chars
from firth.tokens.lexicon import (
    FIRST_OPEN_WORD_ID,
    OpenVocabTokenizer,
    WordCharTable,
    id_to_open_word,
    open_word_to_id,
    to_open_vocab,
)

P, FILTERS = 3, ((1, 4), (2, 6))
TEXT = "the cat sat on the mat and the dog ran home"


def words_tokenizer(lowercase: bool = False) -> Tokenizer:
    return train_tokenizer([TEXT] * 3, "elmo-characters", 100, lowercase)


def small(clip: float = 3.0, sampled: int = 0, dropout: float = 0.0) -> Encoder:
    torch.manual_seed(0)
    tokenizer = words_tokenizer()
    config = elmo(2, 5, P, tokenizer.vocab.size, num_sampled=sampled, filters=FILTERS, num_highways=1, clip=clip)
    model = make_model(replace(config, dropout=dropout))
    model.tokenizer = tokenizer
    assert isinstance(model, Encoder)
    return model.eval()


def ids(model: Encoder, text: str = TEXT) -> Tensor:
    assert model.tokenizer is not None
    return torch.tensor([model.tokenizer.encode(text)])


# --- spelling -------------------------------------------------------------------------------------------------------


def test_no_word_is_unknown() -> None:
    tokenizer = to_open_vocab(words_tokenizer())
    known, new, again = tokenizer.encode("cat zebra zebra")
    assert known < tokenizer.vocab.size
    assert new == again == open_word_to_id("zebra") >= FIRST_OPEN_WORD_ID
    assert id_to_open_word(new) == "zebra"
    assert tokenizer.encode("zebras")[0] != new
    (encoding,) = tokenizer.encode_with_offsets(["a zebra!"])
    assert len(encoding) == 3
    assert encoding.offsets == [(0, 1), (2, 7), (7, 8)]
    assert to_open_vocab(tokenizer) is tokenizer
    assert tokenizer.fingerprint == words_tokenizer().fingerprint
    lower = to_open_vocab(words_tokenizer(lowercase=True))
    assert lower.encode("Zebra") == [new], "as the tokenizer reads it"


def test_char_ids_of_the_vocabulary() -> None:
    tokenizer = to_open_vocab(words_tokenizer())
    vocab = tokenizer.vocab
    assert vocab.eos is not None
    spelled = WordCharTable(tokenizer).lookup_chars(
        torch.tensor([*tokenizer.encode("cat zebra"), vocab.eos, vocab.pad])
    )
    assert spelled[:2].tolist() == encode_word_chars(["cat", "zebra"]).char_ids.tolist()
    assert spelled[2].tolist() == sentence_boundary_chars(EOS_CHAR).tolist()
    assert (spelled[3] == PAD_CHAR).all()


def test_char_cnn_by_hand() -> None:
    model = small()
    assert isinstance(model.embed, CharCNNEmbedding)
    embed, spelled = model.embed, torch.from_numpy(encode_word_chars(["mat"]).char_ids).long()
    x_CE = embed.tokens(spelled[0]).detach()
    found = []
    for conv in embed.filters:
        assert isinstance(conv, nn.Conv1d)
        (width,) = conv.kernel_size
        for weight, bias in zip(conv.weight.detach(), conv.bias.detach(), strict=True):  # type: ignore[union-attr]
            starts = range(len(x_CE) - width + 1)
            found.append(max(0.0, max(float((x_CE[i : i + width].T * weight).sum() + bias) for i in starts)))
    x = torch.tensor([found])
    (highway,) = embed.highways
    gate = torch.sigmoid(highway.gate(x))
    x = gate * F.relu(highway.new(x)) + (1 - gate) * x
    assert_close(model.embed(ids(model, "mat"))[0], embed.project(x))
    assert (highway.gate.bias == -2).all()


def test_char_ids_of_the_batch() -> None:
    model = small()
    spelled = torch.from_numpy(encode_word_chars(TEXT.split()).char_ids).long()[None]
    assert_close(
        model.hidden_states(Batch(torch.zeros_like(ids(model)), char_ids=spelled)),
        model.hidden_states(Batch(ids(model))),
    )


def test_an_unknown_word_is_read_by_its_characters() -> None:
    model = small()
    x = model.hidden_states(Batch(ids(model, "cat zebra zebras")))
    assert not torch.allclose(x[0, 1], x[0, 2])
    with pytest.raises(UserError, match="needs a tokenizer"):
        make_model(model.config).eval()(ids(model))


# --- two language models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [3.0, 0.0])
@pytest.mark.parametrize("position", range(6))
def test_no_direction_sees_its_target(clip: float, position: int) -> None:
    """Forward states depend on tokens up to their position, backward states on tokens from it on."""
    model = small(clip)
    x = torch.randn(1, 6, P, requires_grad=True)
    stack = model.stack
    assert isinstance(stack, ELMoStack)
    forward, backward = stack.split_directions(stack(x, None))[0]
    seen = torch.autograd.grad(forward[position].sum(), x, retain_graph=True)[0][0].abs().sum(-1) > 0
    assert seen.tolist() == [i <= position for i in range(6)]
    seen = torch.autograd.grad(backward[position].sum(), x)[0][0].abs().sum(-1) > 0
    assert seen.tolist() == [i >= position for i in range(6)]


def test_targets_are_the_next_and_the_previous_word() -> None:
    model = small()
    assert model.tokenizer is not None
    tokens = ids(model).numpy()
    position = torch.arange(tokens.shape[1])[None].numpy()
    rows = Rows(tokens, position * 0, position, position >= 0, position[:, 0])
    batch = OBJECTIVES["bilm"](rows, CounterRNG(0, position[:, 0]), model.tokenizer.vocab).to(torch.device("cpu"))
    assert batch.labels[0, 0, :-1].tolist() == tokens[0, 1:].tolist()
    assert batch.labels[0, 1, 1:].tolist() == tokens[0, :-1].tolist()
    logits = model.logits(batch)
    assert logits.shape == (1, 2, tokens.shape[1], model.config.vocab_size)
    wanted = F.cross_entropy(logits.flatten(0, 2), batch.labels.flatten(), ignore_index=-100, reduction="sum")
    assert_close(model.losses(batch)["targets"], wanted)
    assert_close(model.logits(Batch(batch.input_ids)), logits[:, 0], msg="unless said, the way forward answers")
    assert_close(model(batch.input_ids).logits, logits[:, 0])


def test_the_second_layer_has_a_residual() -> None:
    stack, x = small().stack, torch.randn(2, 4, P)
    states: list[Tensor] = []
    stack(x, None, all_hidden_states=states)
    first, second = stack.blocks
    assert isinstance(first, ELMoLayer)
    assert isinstance(second, ELMoLayer)
    (there, back), _ = first(x, x.flip(1), None)
    (there2, back2), _ = second(there, back, None)
    assert_close(states[0], torch.cat([x, x], -1))
    assert_close(states[1], torch.cat([there, back.flip(1)], -1))
    assert_close(states[2], torch.cat([there2 + there, (back2 + back).flip(1)], -1))


def test_clipping() -> None:
    """Wide bounds change nothing; narrow ones clip cells and projections."""
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 5, proj_size=2, batch_first=True)
    weights, x = [w[None] for w in lstm._flat_weights], torch.randn(1, 2, 4, 3)
    h, c = torch.zeros(1, 2, 2), torch.zeros(1, 2, 5)
    y, h_n, c_n = clipped_lstm(x, h, c, weights, 100.0)
    wanted, (wanted_h, wanted_c) = lstm(x[0])
    assert_close((y[0], h_n, c_n), (wanted, wanted_h, wanted_c))
    y, h_n, c_n = clipped_lstm(30 * x, h, c, [10 * w for w in weights], 0.3)
    assert float(y.detach().abs().max()) == float(c_n.detach().abs().max()) == pytest.approx(0.3)
    gates = 300 * x[0, :, 0] @ weights[0][0].T + 10 * (weights[2][0] + weights[3][0])
    i, _, g, o = gates.chunk(4, -1)
    cell = (torch.sigmoid(i) * torch.tanh(g)).clamp(-0.3, 0.3)
    assert_close(y[0, :, 0], (torch.sigmoid(o) * torch.tanh(cell) @ (10 * weights[4][0]).T).clamp(-0.3, 0.3))


def place_by_place(x: Tensor, h: Tensor, c: Tensor, weights: list[Tensor], clip: float) -> tuple[Tensor, ...]:
    """The same by autograd, position by position."""
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    found = []
    for i in range(x.shape[2]):
        scores = x[:, :, i] @ w_ih.mT + h @ w_hh.mT + (b_ih + b_hh)[:, None]
        enter, keep, new, show = scores.chunk(4, -1)
        c = (keep.sigmoid() * c + enter.sigmoid() * new.tanh()).clamp(-clip, clip)
        h = ((show.sigmoid() * c.tanh()) @ w_hr.mT).clamp(-clip, clip)
        found.append(h)
    return torch.stack(found, 2), h, c


@pytest.mark.parametrize("clip", [0.3, 100.0])
def test_gradients_through_clipping(clip: float) -> None:
    """Of all inputs, in float64: two LSTMs with initial states, some values clipped."""
    torch.manual_seed(1)
    shapes = (2, 3, 6, 3), (2, 3, 4), (2, 3, 5), (2, 20, 3), (2, 20, 4), (2, 20), (2, 20), (2, 4, 5)
    given = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    x, h, c, *weights = given
    ours, theirs = (learn(x, h, c, weights, clip) for learn in (clipped_lstm, place_by_place))
    if clip < 1:
        assert 0.1 < float((ours[0].abs() == clip).double().mean()) < 0.9
    assert_close(ours, theirs)
    grad_outputs = [torch.randn_like(y) for y in theirs]
    for mine, other in zip(*(torch.autograd.grad(found, given, grad_outputs) for found in (ours, theirs)), strict=True):
        assert_close(mine, other)


INTERPRETED = clipped.triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_cell_kernels(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    W, N, L, H, clip = 2, 3, 4, 300, 0.8
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
    gates, dshown = torch.randn(W, N, 4 * H).to(DEVICE, dtype), torch.randn(W, N, H).to(DEVICE, dtype)
    before, dc = (torch.randn(W, N, H).to(DEVICE) for _ in range(2))
    ours, plain = gates.clone(), gates.float()
    cell, shown = clipped.fused_lstm_cell_forward(ours, before, clip)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipped, "triton", None)
        wanted = clipped.lstm_cell_forward(plain, before, clip)
        for mine, other in zip((cell, shown, ours), (*wanted, plain), strict=True):
            assert_close(mine.float(), other, **tolerance)
        buffers = [torch.zeros(W, L, N, n, device=DEVICE) for n in (4 * H, H)]
        state = plain, cell, before, dshown.float(), dc
        dbefore = clipped.lstm_cell_backward(*state, *(x[:, 1] for x in buffers), clip)
    mine = [torch.zeros_like(x, dtype=dtype) for x in buffers]
    given = ours, cell, before, dshown, dc
    found = clipped.fused_lstm_cell_backward(given, *(x[:, 1] for x in mine), clip)
    for x, y in zip((found, *mine), (dbefore, *buffers), strict=True):
        assert_close(x.float(), y, **tolerance)


# --- the sampled softmax --------------------------------------------------------------------------------------------


def test_sampled_softmax_against_the_formula() -> None:
    torch.manual_seed(0)
    vocabulary, drawn = 50, 7
    x, weight, bias = torch.randn(3, 4), torch.randn(vocabulary, 4), torch.randn(vocabulary)
    labels = torch.tensor([2, -100, 40])
    torch.manual_seed(5)
    found = sampled_cross_entropy(x, weight, bias, labels, drawn)
    torch.manual_seed(5)
    tokens = [min(int(math.exp(float(u) * math.log(vocabulary + 1))) - 1, vocabulary - 1) for u in torch.rand(drawn)]
    share = [math.log((r + 2) / (r + 1)) / math.log(vocabulary + 1) for r in range(vocabulary)]
    assert sum(share) == pytest.approx(1.0)
    wanted = 0.0
    for row in (0, 2):
        label = int(labels[row])

        def score(token: int, row: int = row) -> float:
            return float(x[row] @ weight[token] + bias[token]) - math.log(drawn * share[token])

        others = [math.exp(score(token)) for token in tokens if token != label]
        wanted += math.log(math.exp(score(label)) + sum(others)) - score(label)
    assert float(found) == pytest.approx(wanted, rel=1e-5)


def test_sampled_softmax_in_training_full_in_evaluation() -> None:
    model = small(sampled=4)
    labels = ids(model).roll(-1, 1)
    batch = Batch(ids(model), labels=labels)
    whole = F.cross_entropy(model.logits(batch).flatten(0, 1), labels.flatten(), reduction="sum")
    assert_close(model.loss(batch), whole)
    assert not torch.allclose(model.train().loss(batch), whole)


# --- features -------------------------------------------------------------------------------------------------------


def test_a_head_on_a_scalar_mix() -> None:
    """Equal weights at the start, times gamma; the backbone may be frozen."""
    model = small()
    config = replace(
        model.config,
        head=ClassificationHead(("a", "b"), bias=True, pool="mean"),
        extras=(FeatureEncoderConfig(mix_layers=True),),
    )
    tuned = make_model(config)
    tuned.tokenizer = model.tokenizer
    tuned.eval()
    assert isinstance(tuned, Encoder)
    reader = tuned.extras["features"]
    assert isinstance(reader, FeatureEncoder)
    assert reader.mix is not None
    with torch.no_grad():
        reader.mix.weights.copy_(torch.tensor([0.0, 1.0, -1.0]))
        reader.mix.gamma.fill_(2.0)
    states: list[Tensor] = []
    tuned.backbone(Batch(ids(model)), states)
    share = torch.tensor([0.0, 1.0, -1.0]).softmax(0)
    mixed = 2 * (share[0] * states[0] + share[1] * states[1] + share[2] * states[2])
    assert_close(tuned.hidden_states(Batch(ids(model))), mixed)
    positions = torch.zeros(1, 1, dtype=torch.long)
    assert_close(tuned(ids(model)).logits, tuned.logits(Batch(ids(model), target_positions=positions))[:, 0])
    assert tuned(ids(model)).hidden_states is None


@pytest.mark.parametrize("backbone", ["elmo", "bag", "bert"])
def test_a_bilstm_on_top(backbone: str) -> None:
    base = {"elmo": small().config, "bag": bag_of_words(40, 6), "bert": bert(1, 6, 1, 40)}[backbone]
    features = FeatureEncoderConfig(mix_layers=backbone != "bag", bilstm_hidden_size=4, dropout=0.0)
    model = make_model(replace(base, head=ClassificationHead(("a", "b"), bias=True, pool="concat"), extras=(features,)))
    if backbone == "elmo":
        model.tokenizer = words_tokenizer()
    tokens = torch.randint(5, 14, (2, 5))
    batch = Batch(tokens, document_ids=torch.zeros_like(tokens), target_positions=torch.zeros(2, 1, dtype=torch.long))
    assert model.hidden_states(batch).shape == (2, 5, 8)
    assert model.logits(batch).shape == (2, 1, 2)
    assert hf_model_type(model.config) == "firth", "no family of transformers has a head of this kind"


def test_a_task_reads_its_own_word_vectors_beside_the_mixture() -> None:
    """Peters et al. 2018, section 3.3: [x_k; ELMo_k]. A word outside of the vocabulary has only its characters."""
    model = small()
    head = ClassificationHead(("a", "b"), bias=True, pool="mean")
    features = FeatureEncoderConfig(mix_layers=True, word_dim=3)
    tuned = make_model(replace(model.config, head=head, extras=(features,)))
    tuned.tokenizer = model.tokenizer
    tuned.eval()
    reader = tuned.extras["features"]
    tokens, states = ids(model, "cat zebra"), []
    x_BTD = tuned.hidden_states(Batch(tokens))
    tuned.backbone(Batch(tokens), states)
    assert_close(x_BTD[..., 3:], reader.mix(states))
    assert_close(x_BTD[0, 0, :3], reader.words.weight[tokens[0, 0]])
    assert not x_BTD[0, 1, :3].any()
    grow_vocabulary(tuned, tuned.config.vocab_size + 2)
    assert reader.words.weight.shape == (tuned.config.vocab_size, 3)


def test_the_penalty_on_the_mix_is_its_squared_norm_for_any_split() -> None:
    """lambda * ||w||^2 is in the training loss only (section 3.3), without gamma."""
    model = make_model(
        replace(
            bert(1, 6, 1, 40, dropout=0.0, attention_dropout=0.0),
            head=ClassificationHead(("a", "b"), bias=True, pool="mean"),
            extras=(FeatureEncoderConfig(mix_layers=True, dropout=0.0, l2_mix=0.5),),
        )
    )
    with torch.no_grad():
        model.extras["features"].mix.weights.copy_(torch.tensor([3.0, -4.0]))
    tokens, doc = torch.randint(5, 40, (2, 5)), torch.tensor([[0, 0, 0, 1, 1], [0, 0, -1, -1, -1]])
    positions, labels = torch.zeros(2, 1, dtype=torch.long), torch.tensor([[0], [1]])
    batches = [
        Batch(tokens[i], doc[i], target_positions=positions[i], task_labels=labels[i]) for i in ([0, 1], [0], [1])
    ]
    whole, *halves = (model.losses(batch)["tokens"] for batch in batches)
    assert_close(whole / 7, torch.tensor(0.5 * 25))
    assert_close(sum(halves), whole)
    assert "tokens" not in model.eval().losses(batches[0])


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path: Path) -> None:
    model = small()
    model.save(tmp_path / "elmo")
    again = load_model(tmp_path / "elmo")
    assert again.config == model.config
    assert isinstance(again.tokenizer, OpenVocabTokenizer)
    assert_close(
        again.hidden_states(Batch(ids(model, "cat zebra"))), model.hidden_states(Batch(ids(model, "cat zebra")))
    )
