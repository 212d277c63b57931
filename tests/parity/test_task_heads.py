"""The heads of tasks give the logits and the loss of `transformers`, in both directions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.alike import CLOSE, stir
from torch import Tensor
from torch.testing import assert_close

from firth.models import (
    FIRTH_MODEL_TYPE,
    ClassificationHead,
    EmbeddingHead,
    Model,
    ModelConfig,
    MultipleChoiceHead,
    RegressionHead,
    SpanHead,
    TokenClassificationHead,
    head_for_task,
    hf_model_type,
    load_model,
    make_model,
    write_model,
)
from firth.models.config import LearnedPosition, Rotary, SlidingWindow
from firth.models.presets import (
    albert,
    bart,
    bert,
    deberta,
    deberta_v2,
    distilbert,
    electra,
    gpt,
    gpt2,
    labse,
    llama,
    mobilebert,
    modernbert,
    rembert,
    roberta,
    t5,
    t5_v1_1,
    t5gemma,
    xlm,
    xlm_roberta,
    xlnet,
)

transformers = pytest.importorskip("transformers")
V, T, CHOICES = 61, 9, 3
NAMES = ("good", "bad", "so-so")
BODIES: dict[str, ModelConfig] = {
    "bert": bert(1, 16, 2, V, position=LearnedPosition(24)),
    "roberta": roberta(1, 16, 2, V),
    "xlm-roberta": xlm_roberta(1, 16, 2, V),
    "albert": albert(2, 16, 2, 8, V),
    "electra": electra(1, 16, 2, 8, V),
    "distilbert": distilbert(1, 16, 2, V),
    "rembert": rembert(1, 16, 2, 8, 24, V),
    "mobilebert": mobilebert(1, 16, 2, 8, 6, V),
    "xlm": xlm(1, 16, 2, V),
    "xlnet": xlnet(1, 16, 2, V),
    "deberta": deberta(1, 16, 2, V),
    "deberta-v2": deberta_v2(1, 16, 2, V),
    "modernbert": modernbert(
        3, 16, 2, 24, V, position=Rotary(160000.0, 24, local_theta=10000.0), window=SlidingWindow(6, 3)
    ),
    "gpt": gpt(1, 16, 2, V),
    "gpt2": gpt2(1, 16, 2, V),
    "llama": llama(1, 16, 2, 24, V),
    "bart": bart(1, 16, 2, V),
    "t5": t5(2, 16, 2, 24, V),
    "t5.1.1": t5_v1_1(2, 16, 2, 24, V),
    "t5gemma": t5gemma(2, 16, 2, 24, V, position=Rotary(500.0, 24)),
}
TASKS = {
    "classify": ClassificationHead,
    "regress": RegressionHead,
    "choice": MultipleChoiceHead,
    "tag": TokenClassificationHead,
    "span-qa": SpanHead,
}
AUTO = {
    "classify": "SequenceClassification",
    "regress": "SequenceClassification",
    "choice": "MultipleChoice",
    "tag": "TokenClassification",
    "span-qa": "QuestionAnswering",
}
OURS_ALONE = {  # what `transformers` has no class for
    ("xlm", "choice"),
    ("deberta", "choice"),
    ("gpt", "choice"),
    ("gpt", "tag"),
    ("gpt", "span-qa"),
    ("gpt2", "choice"),
    ("llama", "choice"),
    ("bart", "choice"),
    ("bart", "tag"),
    ("t5", "choice"),
    ("t5.1.1", "choice"),
    ("t5gemma", "classify"),  # the mean; `transformers` reads the last token
    ("t5gemma", "regress"),
    ("t5gemma", "choice"),
    ("t5gemma", "span-qa"),
}
BOTH = [(name, task) for name in BODIES for task in TASKS if (name, task) not in OURS_ALONE]


def config_of(name: str, task: str) -> ModelConfig:
    body = BODIES[name]
    return replace(body, head=head_for_task(body, task, NAMES), extras=())


def inputs(name: str, task: str) -> dict[str, Tensor]:
    """Three rows (for a choice, three times three texts), the second one padded where that is all the same."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, V, (3 * CHOICES if task == "choice" else 3, T), generator=g)
    mask = torch.ones_like(ids)
    if name != "xlnet" and task != "span-qa":  # XLNet's class is told at the very end; a span may be in the padding
        mask[1, 6:] = 0
        ids[1, 6:] = 1 if "roberta" in name else 0
    given = {"input_ids": ids, "attention_mask": mask}
    if BODIES[name].num_segments > 1 and "roberta" not in name:
        given["token_type_ids"] = torch.randint(0, 2, ids.shape, generator=g)
    if name == "bart" or (name in ("t5", "t5.1.1") and task != "tag"):  # the head reads the decoder at </s>
        ids[torch.arange(3), mask.sum(1) - 1] = 2 if name == "bart" else 1
        given["decoder_input_ids"] = ids.roll(1, 1)
    return {k: v.unflatten(0, (3, CHOICES)) for k, v in given.items()} if task == "choice" else given


def answers(task: str) -> dict[str, Tensor]:
    labels = {
        "classify": torch.tensor([2, 0, 1]),
        "regress": torch.tensor([0.5, -1.0, 2.0]),
        "choice": torch.tensor([0, 2, 1]),
        "tag": torch.tensor([[0, 1, 2, -100, 1, 0, 2, 2, 1], [0, 1, 2, 1, 1, 0, -100, -100, -100], [2] * T]),
    }
    if task == "span-qa":  # the last answer starts outside of the row
        return {"start_positions": torch.tensor([1, 0, 40]), "end_positions": torch.tensor([3, 2, 5])}
    return {"labels": labels[task]}


def same(ours: Model, theirs: Any, name: str, task: str) -> None:
    given, wanted = inputs(name, task), answers(task)
    mine, other = ours(**given, **wanted), theirs(**given, **wanted)
    assert_close(mine.loss, other.loss, **CLOSE)
    if task == "span-qa":
        assert_close(mine.start_logits, other.start_logits, **CLOSE)
        assert_close(mine.end_logits, other.end_logits, **CLOSE)
    else:
        text = given["attention_mask"].bool() if task == "tag" else ...  # what stands on padding means nothing
        assert_close(mine.logits[text], other.logits[text], **CLOSE)
    assert other.loss.abs() > 0.1


@pytest.mark.parametrize(("name", "task"), BOTH)
def test_both_ways(name: str, task: str, tmp_path: Path) -> None:
    """Ours opens in `transformers` with the same numbers; what that saves opens here, with the right head."""
    config = config_of(name, task)
    assert type(config.head) is TASKS[task]
    ours = stir(make_model(config))
    ours.save(tmp_path / "ours")
    auto = getattr(transformers, f"AutoModelFor{AUTO[task]}")
    theirs, info = auto.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert set(info["missing_keys"]) <= {"transformer.mask_emb"}  # a vector of XLNet's pretraining
    assert not info["unexpected_keys"]
    pad = theirs.config.pad_token_id
    theirs.config.pad_token_id = 0 if pad is None else pad
    same(ours, theirs.eval(), name, task)
    if task in ("classify", "tag"):
        assert tuple(theirs.config.id2label[i] for i in range(3)) == NAMES

    stir(theirs, seed=7).save_pretrained(tmp_path / "theirs")
    again = load_model(tmp_path / "theirs")
    assert again.config == config
    same(again, theirs, name, task)


@pytest.mark.parametrize(("name", "task"), sorted(OURS_ALONE))
def test_a_head_that_transformers_does_not_have_is_our_own(name: str, task: str, tmp_path: Path) -> None:
    config = config_of(name, task)
    ours = stir(make_model(config))
    assert hf_model_type(config) == FIRTH_MODEL_TYPE
    write_model(ours, tmp_path)
    again = load_model(tmp_path)
    assert again.config == config
    assert all(torch.equal(p, again.state_dict()[n]) for n, p in ours.state_dict().items())


@pytest.mark.parametrize("pool", ["first", "mean"])
def test_modernberts_mean(pool: str, tmp_path: Path) -> None:
    config = replace(BODIES["modernbert"], head=head_for_task(BODIES["modernbert"], "classify", NAMES, pool=pool))
    ours = stir(make_model(config))
    write_model(ours, tmp_path)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert theirs.config.classifier_pooling == {"first": "cls", "mean": "mean"}[pool]
    same(ours, theirs, "modernbert", "classify")
    assert load_model(tmp_path).config == config


@pytest.mark.parametrize("task", ["classify", "regress"])
def test_t5gemmas_last_token(task: str, tmp_path: Path) -> None:
    """Its head reads the encoder, and `transformers` builds no decoder either."""
    config = replace(BODIES["t5gemma"], head=replace(config_of("t5gemma", task).head, pool="last"))  # type: ignore[arg-type]
    whole = stir(make_model(BODIES["t5gemma"]))
    whole.save(tmp_path / "whole")
    ours = load_model(tmp_path / "whole", head=config.head)
    assert ours.num_parameters < 0.6 * whole.num_parameters
    ours.save(tmp_path / "ours")
    theirs, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not theirs.config.is_encoder_decoder
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    theirs.config.pad_token_id = 0
    same(ours, theirs.eval(), "t5gemma", task)
    stir(theirs, seed=7).save_pretrained(tmp_path / "theirs")
    assert load_model(tmp_path / "theirs").config == config


@pytest.mark.parametrize(("task", "pool"), [("classify", "mean"), ("regress", "mean"), ("relation", "first")])
def test_modernbert_reads_the_mean_unless_places_are_marked(task: str, pool: str) -> None:
    assert head_for_task(BODIES["modernbert"], task).pool == pool  # type: ignore[union-attr]


def test_a_regression_by_default_is_a_score(tmp_path: Path) -> None:
    """`transformers` takes one label for a regression where nothing is said."""
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    theirs = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=V, **sizes, num_labels=1))
    stir(theirs).save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    assert ours.config.head == RegressionHead(has_pooler=True)
    same(ours, theirs, "bert", "regress")


@pytest.mark.parametrize("name", ["labse", "deberta", "gpt2"])
def test_vectors_open_as_the_body(name: str, tmp_path: Path) -> None:
    body = labse(1, 16, 2, V) if name == "labse" else BODIES[name]
    config = replace(body, head=head_for_task(body, "embed"))
    ours = stir(make_model(config))
    write_model(ours, tmp_path)
    theirs = transformers.AutoModel.from_pretrained(tmp_path).eval()
    given = inputs("bert" if name == "labse" else name, "classify")
    out = theirs(**given)
    states, mask = out.last_hidden_state, given["attention_mask"]
    wanted = {
        "labse": lambda: out.pooler_output,
        "deberta": lambda: (states * mask[..., None]).sum(1) / mask.sum(1)[:, None],
        "gpt2": lambda: states[torch.arange(3), mask.sum(1) - 1],
    }[name]()
    assert_close(ours(**given).logits, torch.nn.functional.normalize(wanted, dim=-1), **CLOSE)
    assert load_model(tmp_path).config == config
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_model(tmp_path / "theirs")
    assert isinstance(again.config.head, EmbeddingHead)
    assert_close(again(**given).logits, ours(**given).logits, **CLOSE)


@pytest.mark.parametrize("name", ["t5", "t5.1.1", "t5gemma", "bart"])
def test_vectors_of_an_encoder_decoder_are_those_of_its_encoder(name: str, tmp_path: Path) -> None:
    """`T5EncoderModel` opens ours, and we open what it saves; of BART all is kept, and the decoder takes no part."""
    config = replace(BODIES[name], head=head_for_task(BODIES[name], "embed"))
    whole = stir(make_model(BODIES[name]))
    whole.save(tmp_path / "whole")
    ours = load_model(tmp_path / "whole", head=config.head)
    ours.save(tmp_path / "ours")
    kinds = {"bart": transformers.BartModel, "t5gemma": transformers.T5GemmaEncoderModel}
    kind = kinds.get(name, transformers.T5EncoderModel)
    theirs, info = kind.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    given = inputs(name if name == "bart" else "bert", "classify")
    ids, mask = given["input_ids"], given["attention_mask"]
    encoder = theirs.eval().encoder if name == "bart" else theirs.eval()
    states = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    wanted = torch.nn.functional.normalize((states * mask[..., None]).sum(1) / mask.sum(1)[:, None], dim=-1)
    found = ours(ids, mask, output_hidden_states=True)
    assert_close(found.logits, wanted, **CLOSE)
    assert_close(found.hidden_states[-1][mask.bool()], states[mask.bool()], **CLOSE)
    assert hasattr(ours, "decoder") == (name == "bart")
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_model(tmp_path / "theirs")
    assert again.config == config
    assert_close(again(ids, mask).logits, wanted, **CLOSE)


def test_t5_encoder_models_are_opened(tmp_path: Path) -> None:
    sizes = dict(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    theirs = stir(transformers.T5EncoderModel(transformers.T5Config(vocab_size=V, **sizes)))
    theirs.save_pretrained(tmp_path)
    ours, given = load_model(tmp_path), inputs("bert", "classify")
    states = theirs(input_ids=given["input_ids"]).last_hidden_state
    assert_close(ours(given["input_ids"], output_hidden_states=True).hidden_states[-1], states, **CLOSE)


@pytest.mark.parametrize("task", [*TASKS, "relation", "embed"])
def test_every_head_goes_on_the_body_of_a_published_model(task: str, tmp_path: Path) -> None:
    """The weights of the body come along, whether or not `transformers` has such a head."""
    ours = stir(make_model(BODIES["bert"]))
    write_model(ours, tmp_path)
    tuned = load_model(tmp_path, head=head_for_task(BODIES["bert"], task, NAMES))
    for name, value in ours.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(tuned.state_dict()[name], value)
