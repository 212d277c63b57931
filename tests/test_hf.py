"""`import firth.hf`: checkpoints that no family describes open in `transformers`, with the same numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from firth.core.errors import UserError
from firth.evaluate.export import compare_with_transformers
from firth.models import ClassificationHead, LMHead, ModelConfig, hf_model_type, load_model, make_model
from firth.models.config import ALiBi, DiscriminatorHead, NoPosition, Rotary, Shaw, SinusoidalPosition, TransformerXL
from firth.models.hf.checkpoint import write_model
from firth.models.presets import bart, bert, electra, gpt2, t5, xlnet
from firth.tokens import train_tokenizer

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("firth.hf")
V = 61
MODELS: dict[str, tuple[str, ModelConfig]] = {
    "norm first, rotary": ("ForMaskedLM", bert(2, 32, 4, V, position=Rotary(), norm_first=True)),
    "slopes": ("ForMaskedLM", bert(2, 32, 4, V, position=ALiBi())),
    "sines": ("ForMaskedLM", bert(2, 32, 4, V, position=SinusoidalPosition(64))),
    "distances": ("ForMaskedLM", xlnet(2, 32, 4, V, position=TransformerXL())),
    "decoder": ("ForCausalLM", gpt2(2, 32, 4, V, position=ALiBi())),
    "decoder, own head": ("ForCausalLM", gpt2(2, 32, 4, V, position=Shaw(4), head=LMHead(tied=False))),
    "two stacks": ("ForSeq2SeqLM", t5(2, 32, 4, 48, V, position=Rotary())),
    "two stacks that share": ("ForSeq2SeqLM", t5(2, 32, 4, 48, V, share_stacks=True)),
    "classes": (
        "ForSequenceClassification",
        bert(2, 32, 4, V, position=Rotary(), head=ClassificationHead(("no", "yes"))),
    ),
    "verdict": ("", electra(2, 32, 4, 16, V, position=NoPosition(), head=DiscriminatorHead(), extras=())),
}


def inputs(config: ModelConfig) -> dict[str, Tensor]:
    given = {"input_ids": torch.arange(18).view(2, 9) + 5, "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    given["attention_mask"][1, 6:] = 0
    return given | (
        {"decoder_input_ids": torch.arange(10).view(2, 5)} if config.architecture == "encoder-decoder" else {}
    )


def saved(config: ModelConfig, folder: Path) -> Any:
    assert hf_model_type(config) == "firth"
    torch.manual_seed(1)
    model = make_model(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    write_model(model, folder)
    return model


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_it_opens_with_the_same_numbers_and_is_saved_again(name: str, tmp_path: Path) -> None:
    kind, config = MODELS[name]
    (tmp_path / "first").mkdir()
    ours, given = saved(config, tmp_path / "first"), inputs(config)
    assert hf.auto_class_for_config(config) == f"AutoModel{kind}"
    opener = getattr(transformers, f"AutoModel{kind}")
    theirs, info = opener.from_pretrained(tmp_path / "first", output_loading_info=True)
    assert not any(info.values()), "nothing is missing, and nothing is left over"
    wanted = ours(**given, output_hidden_states=True)
    assert torch.equal(theirs(**given)[0], wanted.logits if kind else wanted.hidden_states[-1])
    backbone = transformers.AutoModel.from_pretrained(tmp_path / "first")
    assert torch.equal(backbone(**given).last_hidden_state, wanted.hidden_states[-1])

    for i, model in enumerate((theirs, backbone)):
        model.save_pretrained(tmp_path / f"again-{i}")
        again = load_model(tmp_path / f"again-{i}")
        assert again.config == config
        assert torch.equal(again(**given).logits, wanted.logits)
    assert compare_with_transformers(tmp_path / "first").max_difference == 0


@pytest.mark.parametrize("name", ["norm first, rotary", "decoder", "two stacks", "classes"])
def test_it_learns_there_as_here(name: str, tmp_path: Path) -> None:
    kind, config = MODELS[name]
    ours, given = saved(replace(config, dropout=0.0, attention_dropout=0.0), tmp_path), inputs(config)
    theirs = getattr(transformers, f"AutoModel{kind}").from_pretrained(tmp_path).train()
    labels = {"classes": torch.tensor([0, 1]), "two stacks": given.get("decoder_input_ids")}
    given["labels"] = labels.get(name, given["input_ids"])  # type: ignore[assignment]
    mine, other = ours(**given).loss, theirs(**given).loss
    assert torch.equal(mine, other)
    mine.backward()
    other.backward()
    gradients = {n: p.grad for n, p in ours.named_parameters()}
    assert gradients
    for n, p in theirs.named_parameters():
        assert torch.equal(p.grad, gradients[n]), n


def test_a_decoder_is_told_how_to_begin_by_the_config(tmp_path: Path) -> None:
    texts = ["the cat sat on the mat", "the dog ran to the river", "a heron and an otter"]
    for i, make in enumerate((t5, bart)):
        kind, more = ("unigram", (48,)) if make is t5 else ("byte-bpe", ())
        tokenizer = train_tokenizer(texts * 5, kind, 300)
        config = make(1, 32, 2, *more, tokenizer.vocab.size, position=Rotary())
        model = make_model(config).eval()
        model.tokenizer = tokenizer
        folder = tmp_path / str(i)
        model.save(folder)
        theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
        labels = torch.tensor([[5, 6, 7], [8, 9, -100]])
        given = {"input_ids": torch.arange(10).view(2, 5), "labels": labels}
        with torch.no_grad():
            assert torch.equal(theirs(**given).loss, model(**given).loss)
        assert transformers.AutoTokenizer.from_pretrained(folder)("the cat")["input_ids"]


def test_a_decoder_writes(tmp_path: Path) -> None:
    ours = saved(MODELS["decoder"][1], tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = torch.tensor([[7, 8, 9]])
    wanted = prompt
    for _ in range(4):
        wanted = torch.cat([wanted, ours(wanted).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(theirs.generate(prompt, max_new_tokens=4, do_sample=False), wanted)


def test_a_class_that_does_not_fit_is_said(tmp_path: Path) -> None:
    saved(MODELS["decoder"][1], tmp_path)
    with pytest.raises(UserError, match="opened by AutoModelForCausalLM, not by AutoModelForMaskedLM"):
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)


def test_classes_have_their_names(tmp_path: Path) -> None:
    saved(MODELS["classes"][1], tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.id2label == {0: "no", 1: "yes"}
    assert (config.num_labels, config.vocab_size, config.hidden_size) == (2, V, 32)


def test_a_new_model_begins_as_ours_do(tmp_path: Path) -> None:
    saved(MODELS["norm first, rotary"][1], tmp_path)
    torch.manual_seed(5)
    theirs = transformers.AutoModelForMaskedLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    torch.manual_seed(5)
    ours = make_model(MODELS["norm first, rotary"][1])
    for (name, a), (_, b) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_notes_are_kept(tmp_path: Path) -> None:
    saved(MODELS["norm first, rotary"][1], tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"firth_objective": {"name": "mlm"}}))
    transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert load_model(tmp_path / "again").objective == {"name": "mlm"}


def test_the_check_says_how_it_opens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(MODELS["norm first, rotary"][1], tmp_path)
    assert compare_with_transformers(tmp_path).max_difference == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "it opens with AutoModelForMaskedLM after `import firth.hf`" in said
