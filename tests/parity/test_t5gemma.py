"""T5Gemma against `transformers`: logits, gradients, the loss of a training call, generation, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.generate import generate_ids
from firth.models import Model, load_model, make_model
from firth.models.config import Rotary
from firth.models.presets import t5gemma
from firth.models.task_heads import with_classification_head
from firth.objectives import Batch, CounterRNG, SpanCorruptionAndMLM
from firth.tokens import Rows, train_tokenizer

transformers = pytest.importorskip("transformers")
CLOSE: Any = {"atol": 1e-5, "rtol": 1e-5}
WORDS = "the fox came back and the heron was older than the bridge at noon anna said so"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    """A model of 2 and 3 layers with a tokenizer, and its folder."""
    tokenizer = train_tokenizer([WORDS] * 20, "unigram", 160)
    torch.manual_seed(0)
    model = make_model(
        t5gemma(2, 32, 4, 48, tokenizer.vocab.size, num_decoder_layers=3, num_kv_heads=2, position=Rotary(500.0, 64))
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.tokenizer = tokenizer
    folder = tmp_path_factory.mktemp("t5gemma") / "saved"
    model.save(folder)
    return model, folder


def given(model: Model, padded: bool) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 100, (3, 9), generator=g)
    mask = (torch.arange(9) < torch.tensor([[9], [6], [2]])).long() if padded else torch.ones_like(ids)
    inputs = {"input_ids": ids * mask, "decoder_input_ids": torch.randint(10, 100, (3, 6), generator=g)}
    return inputs | ({"attention_mask": mask} if padded else {})


def test_losses_of_decoder_and_encoder(saved: tuple[Model, Path]) -> None:
    """Span corruption with masked tokens: two cross-entropies over states of `transformers`, one mean."""
    model, folder = saved
    assert model.tokenizer is not None
    vocab, shape = model.tokenizer.vocab, (3, 24)
    tokens = np.random.default_rng(0).choice(vocab.non_special_ids, shape)
    tokens[:, -1] = vocab.eos
    position = np.broadcast_to(np.arange(shape[1]), shape)
    rows = Rows(tokens, np.zeros(shape, int), position, position < shape[1] - 1, np.arange(shape[0]))
    batch = SpanCorruptionAndMLM(mask_rate=0.3)(rows, CounterRNG(1, rows.stream_index), vocab)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    batch = batch.to(torch.device("cpu"))
    output = theirs(input_ids=batch.input_ids, decoder_input_ids=batch.decoder_input_ids)
    encoded = output.encoder_last_hidden_state
    at = batch.encoder_target_positions[..., None].expand(-1, -1, encoded.shape[-1])
    mlm_logits = encoded.gather(1, at) @ theirs.get_input_embeddings().weight.T
    wanted = [
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        for logits, labels in ((output.logits, batch.labels), (mlm_logits, batch.encoder_labels))
    ]
    parts = model.losses(batch, with_metrics=True)
    assert_close(parts["targets"], sum(wanted), **CLOSE)
    assert_close(parts["lm_loss/decoder_targets"], wanted[0], **CLOSE)
    assert_close(parts["mlm_loss/encoder_targets"], wanted[1], **CLOSE)
    assert batch.num_targets == sum(int((labels != -100).sum()) for labels in (batch.labels, batch.encoder_labels))
    with torch.no_grad():  # an evaluation
        num_correct = model.losses(batch, with_metrics=True)["lm_accuracy/decoder_targets"]
    assert num_correct == (output.logits.argmax(-1) == batch.labels).sum(), "divided by the decoder's labels alone"


@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_gradients(padded: bool, saved: tuple[Model, Path], tmp_path: Path) -> None:
    model, folder = saved
    theirs, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
    assert type(theirs).__name__ == "T5GemmaForConditionalGeneration"
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    theirs.eval().save_pretrained(tmp_path / "theirs")
    ours, inputs = load_model(tmp_path / "theirs"), given(model, padded)
    assert ours.config == model.config
    found, wanted = ours(**inputs).logits, theirs(**inputs).logits
    assert_close(found, wanted, **CLOSE)
    for logits in (found, wanted):
        (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))).mean().backward()
    stacks = theirs.model.encoder, theirs.model.decoder
    both = sum(stack.embed_tokens.weight.grad for stack in stacks)  # one matrix of ours
    pairs = {
        "embed.tokens.weight": both,
        "encoder.blocks.1.attention_output_norm.weight": stacks[0].layers[1].post_self_attn_layernorm.weight.grad,
        "decoder.blocks.2.cross_norm.weight": stacks[1].layers[2].pre_cross_attn_layernorm.weight.grad,
        "decoder.blocks.0.mlp.down.weight": stacks[1].layers[0].mlp.down_proj.weight.grad,
        "decoder.final_norm.weight": stacks[1].norm.weight.grad,
    }
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    for name, grad in pairs.items():
        assert_close(gradients[name], grad, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")


def test_the_loss_of_a_training_call(saved: tuple[Model, Path]) -> None:
    """Without a mask for the decoder, whose first token is our padding: `transformers` must not hide it."""
    model, folder = saved
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).train()
    labels = torch.randint(10, 100, (3, 6), generator=torch.Generator().manual_seed(3))
    labels[0, 3:] = -100
    inputs = given(model, padded=True)
    del inputs["decoder_input_ids"]
    assert_close(model(**inputs, labels=labels).loss, theirs(**inputs, labels=labels).loss, **CLOSE)


def test_generation(saved: tuple[Model, Path]) -> None:
    model, folder = saved
    assert model.tokenizer is not None
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    for text in ("the fox came back", "anna said so at noon"):
        ids = [*model.tokenizer.encode(text), model.tokenizer.vocab.eos]
        (found,) = generate_ids(model, [ids], 8)
        wanted = theirs.generate(torch.tensor([ids]), max_new_tokens=8, num_beams=1, do_sample=False)[0, 1:].tolist()
        assert found == wanted[: len(found)]
        assert found


def test_documents_of_a_packed_row_are_read_apart(saved: tuple[Model, Path]) -> None:
    model, _ = saved
    ids = given(model, padded=False)
    one, two = ids["input_ids"][:1, :5], ids["input_ids"][1:2, :4]
    packed = Batch(
        torch.cat([one, two], 1),
        torch.tensor([[0] * 5 + [1] * 4]),
        torch.tensor([[*range(5), *range(4)]]),
        decoder_input_ids=ids["decoder_input_ids"][:1],
        decoder_document_ids=torch.tensor([[0] * 3 + [1] * 3]),
        decoder_position_ids=torch.tensor([[*range(3), *range(3)]]),
    )
    apart = [
        model(one, decoder_input_ids=ids["decoder_input_ids"][:1, :3]).logits,
        model(two, decoder_input_ids=ids["decoder_input_ids"][:1, 3:]).logits,
    ]
    assert_close(model.logits(packed), torch.cat(apart, 1), **CLOSE)


def test_what_our_blocks_do_not_have_is_refused(saved: tuple[Model, Path], tmp_path: Path) -> None:
    _, folder = saved
    for key, value in (("attn_logit_softcapping", 50.0), ("layer_types", ["sliding_attention"] * 3)):
        facts = json.loads((folder / "config.json").read_text())
        facts["decoder"][key] = value
        (tmp_path / "config.json").write_text(json.dumps(facts))
        with pytest.raises(UserError, match=key):
            load_model(tmp_path)
    other: dict[str, Any] = json.loads((folder / "config.json").read_text())
    other["decoder"]["intermediate_size"] = 64
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="encoder and decoder differ"):
        load_model(tmp_path)


def test_two_different_embeddings_are_refused(saved: tuple[Model, Path], tmp_path: Path) -> None:
    """`transformers` does not tie those of encoder and decoder: training there lets them differ."""
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(saved[1])
    theirs.model.decoder.embed_tokens.weight.data += 0.1
    theirs.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="different token embeddings"):
        load_model(tmp_path)


def test_a_task_head_is_our_own(saved: tuple[Model, Path], tmp_path: Path) -> None:
    model, _ = saved
    head = make_model(with_classification_head(model.config, ("good", "bad")))
    head.save(tmp_path / "head")
    assert json.loads((tmp_path / "head" / "config.json").read_text())["model_type"] == "firth"
    assert load_model(tmp_path / "head").config == head.config
