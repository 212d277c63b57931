"""An encoder-decoder of LSTMs, with attention and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from firth.generate import generate_ids
from firth.generate.config import GenerationConfig
from firth.models import EncoderDecoder, load_model, make_model
from firth.models.recurrent.lstm import unpack_documents
from firth.models.recurrent.presets import rnn
from firth.models.recurrent.seq2seq import BahdanauAttention, EncoderStates, Seq2SeqDecoderLayer
from firth.objectives import Batch
from firth.tokens import train_tokenizer

V, BOTH = 20, pytest.mark.parametrize("attention", [False, True])


def model(attention: bool, layers: int = 1) -> EncoderDecoder:
    torch.manual_seed(0)
    made = make_model(replace(rnn(layers, 8, attention, V), dropout=0.0))
    assert isinstance(made, EncoderDecoder)
    return made.eval()


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, V, shape, generator=torch.Generator().manual_seed(seed))


@BOTH
def test_packed_pairs_equal_single_pairs(attention: bool) -> None:
    net = model(attention, 2)
    texts, answers = some(1, 8), some(1, 7, seed=1)
    doc, answer_doc = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1]]), torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    together = net.hidden_states(
        Batch(texts, document_ids=doc, decoder_input_ids=answers, decoder_document_ids=answer_doc)
    )
    first = net.hidden_states(Batch(texts[:, :3], decoder_input_ids=answers[:, :4]))
    second = net.hidden_states(Batch(texts[:, 3:7], decoder_input_ids=answers[:, 4:]))
    assert_close(together, torch.cat([first, second], 1))


@BOTH
def test_logits_depend_on_the_source_and_on_earlier_targets(attention: bool) -> None:
    net = model(attention)
    texts, answers = some(1, 5), some(1, 4, seed=1)
    before = net.hidden_states(Batch(texts, decoder_input_ids=answers))
    for position in range(5):
        other = texts.clone()
        other[0, position] = (other[0, position] + 1) % V
        assert not torch.allclose(net.hidden_states(Batch(other, decoder_input_ids=answers)), before)
    later = answers.clone()
    later[0, 2] = (later[0, 2] + 1) % V
    after = net.hidden_states(Batch(texts, decoder_input_ids=later))
    assert_close(after[:, :2], before[:, :2])
    assert not torch.allclose(after[:, 2], before[:, 2])


def test_bahdanau_attention_by_hand() -> None:
    torch.manual_seed(0)
    look, read = BahdanauAttention(3, 4), torch.randn(2, 5, 4)
    doc = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]])
    answers = torch.zeros(2, 2, 3)
    source = EncoderStates(read, doc, answers, torch.zeros(2, 2, dtype=torch.long), unpack_documents(answers, None))
    state = torch.randn(2, 3)
    weights = look.weights(state, look.keys(read), source)
    for row, size in ((0, 3), (1, 4)):
        keys = torch.stack([look.score(torch.tanh(look.query(state[row]) + look.keys(x))) for x in read[row, :size]])
        assert_close(weights[row, :size], keys[:, 0].softmax(0))
        assert (weights[row, size:] == 0).all()
        assert_close(look(state, look.keys(read), source)[row], weights[row] @ read[row])


def test_decoder_starts_from_the_encoders_last_state() -> None:
    net = model(False)
    texts, answers = some(2, 5), some(2, 3, seed=1)
    (reader,), (layer,) = net.encoder.blocks, net.decoder.blocks
    assert isinstance(layer, Seq2SeqDecoderLayer)
    x = net.embed.tokens(texts)
    _, (there, _) = reader.forward_lstm(x)  # type: ignore[operator, union-attr]
    _, (back, _) = reader.backward_lstm(x.flip(1))  # type: ignore[operator, union-attr]
    ends = torch.cat([there[0], back[0]], -1)
    state = layer.start_h(ends).tanh()[None], layer.start_c(ends).tanh()[None]
    assert isinstance(layer.lstm, nn.LSTM)
    assert_close(
        net.hidden_states(Batch(texts, decoder_input_ids=answers)), layer.lstm(net.embed.tokens(answers), state)[0]
    )


def test_learns_to_copy_and_decodes_with_beams(tmp_path: Path) -> None:
    """With attention; a reloaded model generates the same, greedily and with three beams."""
    words = ["red", "blue", "green", "big"]
    tokenizer = train_tokenizer([" ".join(words)] * 3, "word", 9)
    texts = [[a, b] for a in words for b in words]
    torch.manual_seed(0)
    net = make_model(replace(rnn(1, 32, True, tokenizer.vocab.size), dropout=0.0))
    net.tokenizer = tokenizer
    end, pad = tokenizer.vocab.eos, tokenizer.vocab.pad
    assert end is not None
    rows = [[*tokenizer.encode(" ".join(text)), end] for text in texts]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    doc = torch.tensor([[0] * len(row) + [-1] * (width - len(row)) for row in rows])
    begun = torch.cat([torch.full((len(rows), 1), pad), tokens[:, :-1]], 1)
    batch = Batch(tokens, document_ids=doc, decoder_input_ids=begun, decoder_document_ids=torch.zeros_like(doc),
                  labels=tokens.masked_fill(doc < 0, -100))  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for _ in range(120):
        optimizer.zero_grad()
        net.loss(batch).backward()
        optimizer.step()
    net.eval().save(tmp_path / "rnn")
    again = load_model(tmp_path / "rnn")
    for beams in (1, 3):
        written = generate_ids(
            again, rows, generation_config=GenerationConfig(max_new_tokens=width, num_beams=beams, temperature=0.0)
        )
        said = [tokenizer.decode(one).strip() for one in written]
        assert sum(a == " ".join(b) for a, b in zip(said, texts, strict=True)) >= 14
