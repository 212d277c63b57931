"""XLNet: both streams, scores by distance and segment, equal to those of `transformers`, in both directions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.alike import CLOSE, mixture, same_gradients, stir
from torch import Tensor
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.models import PRESETS, ClassificationHead, Encoder, count_parameters, hf_model_type, load_model, make_model
from firth.models.config import TransformerXL
from firth.models.hf.checkpoint import write_model
from firth.models.hf.config_io import from_hf_config, to_hf_config
from firth.models.position.xl_memory import XLMemory
from firth.models.presets import xlnet
from firth.models.task_heads import with_classification_head
from firth.objectives.batch import Batch
from firth.tokens import train_tokenizer

transformers = pytest.importorskip("transformers")
V, T = 61, 9
RANK = torch.tensor([[0, 2, 0, 1, 0, 3, 0, 0, 4], [1, 0, 0, 0, 0, 0, 3, 2, 0]])  # 0 comes free, the rest in this order
TARGETS = torch.tensor([[1, 3, 5, 8], [0, 6, 7, 0]])  # the last slot of the second row is not used
SEGMENT = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1, 1]])
TOKENS = torch.randint(2, V, (2, T), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])


def tiny(**changes: Any) -> Any:
    return transformers.XLNetConfig(vocab_size=V, d_model=32, n_layer=3, n_head=4, d_inner=48, **changes)


def pair_of(folder: Path, theirs: Any) -> tuple[Any, Encoder]:
    theirs = stir(theirs)
    theirs.save_pretrained(folder)
    ours = load_model(folder)
    assert isinstance(ours, Encoder)
    return theirs, ours


@pytest.mark.parametrize("segments", [False, True], ids=["one", "segments"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_the_content_stream(padded: bool, segments: bool, tmp_path: Path) -> None:
    theirs, ours = pair_of(tmp_path, transformers.XLNetLMHeadModel(tiny()))
    given = {"input_ids": TOKENS} | ({"attention_mask": MASK} if padded else {})
    given |= {"token_type_ids": SEGMENT} if segments else {}
    a, b = ours(**given, output_hidden_states=True), theirs(**given, output_hidden_states=True)
    text = MASK.bool() if padded else torch.ones_like(MASK).bool()
    assert_close(a.logits[text], b.logits[text], **CLOSE)
    for mine, other in zip(a.hidden_states, b.hidden_states, strict=True):
        assert_close(mine[text], other[text], **CLOSE)
    mixture(a.logits[text]).backward()
    mixture(b.logits[text]).backward()
    same_gradients(ours, theirs)


def as_they_ask(rank: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The order of prediction as `perm_mask`, the target positions as `target_mapping`."""
    sees = (rank[:, None, :] < rank[:, :, None]) | ((rank[:, :, None] == 0) & (rank[:, None, :] == 0))
    return {"perm_mask": (~sees).float(), "target_mapping": torch.nn.functional.one_hot(targets, T).float()}


@pytest.mark.parametrize("segments", [False, True], ids=["one", "segments"])
def test_both_streams(segments: bool, tmp_path: Path) -> None:
    theirs, ours = pair_of(tmp_path, transformers.XLNetLMHeadModel(tiny()))
    segment = SEGMENT if segments else None
    batch = Batch(
        TOKENS, attention_rank=RANK, target_positions=TARGETS, token_type_ids=segment, labels=TOKENS.gather(1, TARGETS)
    )
    used = torch.ones_like(TARGETS).bool()
    used[1, 3] = False
    given = as_they_ask(RANK, TARGETS)
    given["target_mapping"] *= used[:, :, None]
    out = theirs(TOKENS, token_type_ids=segment, **given)
    assert_close(ours.logits(batch)[used], out.logits[used], **CLOSE)

    labels = batch.labels.masked_fill(~used, -100)
    (ours.loss(batch._replace(labels=labels)) / used.sum()).backward()
    torch.nn.functional.cross_entropy(out.logits[used], labels[used]).backward()
    same_gradients(ours, theirs)


def test_packed_documents_are_read_as_if_alone(tmp_path: Path) -> None:
    theirs, ours = pair_of(tmp_path, transformers.XLNetLMHeadModel(tiny()))
    doc = torch.tensor([[0] * 4 + [1] * 5])
    batch = Batch(TOKENS[:1], document_ids=doc, attention_rank=RANK[:1], target_positions=TARGETS[:1])
    first = as_they_ask(RANK[:1, :4], TARGETS[:1, :2])
    second = as_they_ask(RANK[:1, 4:], TARGETS[:1, 2:] - 4)
    for part, given, slots in ((slice(0, 4), first, slice(0, 2)), (slice(4, 9), second, slice(2, 4))):
        given["target_mapping"] = given["target_mapping"][:, :, : part.stop - part.start]
        wanted = theirs(TOKENS[:1, part], **given).logits
        assert_close(ours.logits(batch)[:, slots], wanted, **CLOSE)


@pytest.mark.parametrize("segments", [False, True], ids=["one", "segments"])
def test_memory(segments: bool, tmp_path: Path) -> None:
    """Four pieces of a text, of which five states are remembered: content alone, both streams, then content again."""
    theirs, ours = pair_of(tmp_path, transformers.XLNetLMHeadModel(tiny(mem_len=5)))
    ours.stack.memory = XLMemory(5)
    text, mems = torch.randint(2, V, (2, 3 * T), generator=torch.Generator().manual_seed(5)), None
    segment = SEGMENT if segments else None
    for i, piece in enumerate(text.split([3, 6, T, T], 1)):
        seg = None if segment is None else segment[:, : piece.shape[1]]
        ours.zero_grad()
        theirs.zero_grad()
        if i == 2:
            targets = TARGETS[:, :3]
            batch = Batch(piece, attention_rank=RANK, target_positions=targets, token_type_ids=seg)
            out = theirs(piece, token_type_ids=seg, mems=mems, use_mems=True, **as_they_ask(RANK, targets))
            logits = ours.logits(batch)
        else:
            out = theirs(piece, token_type_ids=seg, mems=mems, use_mems=True)
            logits = ours(piece, token_type_ids=seg).logits
        mems = out.mems
        assert ours.stack.memory.num_cached == (3 if i == 0 else 5)
        assert_close(logits, out.logits, **CLOSE)
        for layer, mine in ours.stack.memory.states.items():
            assert_close(mine, mems[layer].transpose(0, 1), **CLOSE)
        mixture(logits).backward()
        mixture(out.logits).backward()
        same_gradients(ours, theirs)


def test_classes_come_from_the_last_token(tmp_path: Path) -> None:
    theirs, ours = pair_of(tmp_path, transformers.XLNetForSequenceClassification(tiny(num_labels=3)))
    assert ours.config.head == ClassificationHead(("LABEL_0", "LABEL_1", "LABEL_2"), has_pooler=True, pool="last")
    left = MASK.flip(1)  # they are padded on the left
    a, b = ours(TOKENS, attention_mask=left), theirs(TOKENS, attention_mask=left)
    assert_close(a.logits, b.logits, **CLOSE)
    mixture(a.logits).backward()
    mixture(b.logits).backward()
    same_gradients(ours, theirs)
    right = ours(torch.roll(TOKENS, -3, 1), attention_mask=MASK)
    assert_close(right.logits[1], a.logits[1], **CLOSE, msg="padding on the right is as good")


@pytest.mark.parametrize("classes", [False, True], ids=["lm", "classes"])
def test_to_transformers(classes: bool, tmp_path: Path) -> None:
    config = xlnet(2, 32, 4, V)
    if classes:
        config = replace(config, head=ClassificationHead(("no", "yes"), has_pooler=True, pool="last"), extras=())
    ours = stir(make_model(config))
    write_model(ours, tmp_path)
    auto = transformers.AutoModelForSequenceClassification if classes else transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == ("XLNetForSequenceClassification" if classes else "XLNetLMHeadModel")
    assert_close(ours(TOKENS).logits, theirs(TOKENS).logits, **CLOSE)
    assert load_model(tmp_path).config == config
    if not classes:
        batch = Batch(TOKENS[:1], attention_rank=RANK[:1], target_positions=TARGETS[:1])
        wanted = theirs(TOKENS[:1], **as_they_ask(RANK[:1], TARGETS[:1])).logits
        assert_close(ours.logits(batch), wanted, **CLOSE)


def test_its_tokenizer_pads_on_the_left(tmp_path: Path) -> None:
    """`transformers` classifies from the last position of a row, whatever token is there."""
    tokenizer = train_tokenizer(["a cat and a dog", "the dog and the cat"], "wordpiece", 40)
    ours = stir(make_model(with_classification_head(xlnet(2, 32, 4, tokenizer.vocab.size), ("no", "yes"))))
    ours.tokenizer = tokenizer
    write_model(ours, tmp_path)
    given = transformers.AutoTokenizer.from_pretrained(tmp_path)(["a cat", "the dog and the cat"], padding=True)
    given = {name: torch.tensor(given[name]) for name in ("input_ids", "attention_mask")}
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    alone = ours(given["input_ids"][:1, given["attention_mask"][0].bool()]).logits
    assert given["attention_mask"][0, 0] == 0
    assert_close(theirs(**given).logits[:1], alone, **CLOSE)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("xlnet")])
def test_presets_have_the_published_size(name: str) -> None:
    settings = to_hf_config(PRESETS[name], None)
    assert settings.pop("architectures") == ["XLNetLMHeadModel"]
    with torch.device("meta"):
        theirs = transformers.XLNetLMHeadModel(transformers.AutoConfig.for_model(**settings))
    assert count_parameters(PRESETS[name]) == theirs.num_parameters()


def test_sizes_of_the_paper() -> None:
    """117M and 360M, the published counts."""
    assert count_parameters(PRESETS["xlnet-base"]) == 116_750_336
    assert count_parameters(PRESETS["xlnet-large"]) == 360_300_800


def test_what_is_not_xlnet_is_said_or_kept_under_our_name() -> None:
    hf = tiny().to_dict() | {"architectures": ["XLNetLMHeadModel"]}
    assert from_hf_config(hf).position == TransformerXL(relative_segments=True)
    for setting, value in (("clamp_len", 5), ("attn_type", "uni"), ("same_length", True)):
        with pytest.raises(UserError, match=setting):
            from_hf_config(hf | {setting: value})
    assert hf_model_type(xlnet(2, 32, 4, V)) == "xlnet"
    assert hf_model_type(xlnet(2, 32, 4, V, position=TransformerXL())) == "firth"
    without = xlnet(2, 32, 4, V, attention_dropout=0.0)  # changes training alone
    assert hf_model_type(without) == "xlnet"
    assert from_hf_config(to_hf_config(without, None)).attention_dropout == 0.0
