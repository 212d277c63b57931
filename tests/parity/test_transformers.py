"""The same weights give the same logits, hidden states and gradients as `transformers`, in both directions."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from firth.models import (
    ClassificationHead,
    Extra,
    LMHead,
    Model,
    ModelConfig,
    load_model,
    load_weights,
    make_model,
    read_tensors,
)
from firth.models.config import (
    BottleneckConfig,
    DiscriminatorHead,
    GeneratorConfig,
    LearnedPosition,
    MLPConfig,
    QueryStream,
    SentencePairHead,
    SinusoidalPosition,
    SpanBoundaryHead,
)
from firth.models.hf.checkpoint import write_model
from firth.models.hf.convert import to_hf_tensors
from firth.models.hf.registry import FAMILY_LAYOUTS
from firth.models.position.bias import t5_bucket
from firth.models.presets import (
    afriberta,
    albert,
    bart,
    bert,
    distilbert,
    electra,
    gpt,
    gpt2,
    gpt3,
    labse,
    mobilebert,
    rembert,
    roberta,
    spanbert,
    t5,
    t5_v1_1,
    unilm,
    xlm,
    xlm_roberta,
)
from firth.models.task_heads import with_classification_head
from firth.objectives.batch import Batch

transformers = pytest.importorskip("transformers")
V, T, U = 61, 11, 7
LENGTHS = [11, 6, 9]  # of the three rows, when they are padded
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def tiny_bert(**changes: Any) -> Any:
    return transformers.BertConfig(
        vocab_size=V,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=24,
        **changes,
    )


def tiny_gpt2(**changes: Any) -> Any:
    return transformers.GPT2Config(
        vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_inner=48, n_positions=24, pad_token_id=0, **changes
    )


def tiny_t5(**changes: Any) -> Any:
    return transformers.T5Config(
        vocab_size=V,
        d_model=32,
        d_kv=12,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=10,
        decoder_start_token_id=0,
        initializer_factor=0.5,  # smaller logits, so that rounding stays below the bound
        **changes,
    )


def t5_1_1() -> Any:
    return tiny_t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False)


SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}
THREE = {"num_labels": 3}


def tiny_bart(**changes: Any) -> Any:
    return transformers.BartConfig(
        vocab_size=V,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=24,
        **changes,
    )


def tiny_distilbert(**changes: Any) -> Any:
    return transformers.DistilBertConfig(
        vocab_size=V, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=24, **changes
    )


def tiny_xlm(**changes: Any) -> Any:
    return transformers.XLMConfig(
        **{"n_langs": 3}
        | dict(vocab_size=V, emb_dim=32, n_layers=2, n_heads=4, max_position_embeddings=24, pad_token_id=0)
        | changes
    )


def tiny_gpt(**changes: Any) -> Any:
    return transformers.OpenAIGPTConfig(
        vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=24, pad_token_id=0, **changes
    )


def tiny_electra(**changes: Any) -> Any:
    return transformers.ElectraConfig(**SIZES | {"embedding_size": 16} | changes)


def tiny_albert(**changes: Any) -> Any:
    return transformers.AlbertConfig(**SIZES | {"embedding_size": 16, "num_hidden_layers": 4} | changes)


def tiny_mobilebert(**changes: Any) -> Any:
    sizes = {"intra_bottleneck_size": 16, "embedding_size": 12, "num_feedforward_networks": 3}
    return transformers.MobileBertConfig(**SIZES | sizes | changes)


def tiny_rembert(**changes: Any) -> Any:
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.RemBertConfig(**SIZES | ids, input_embedding_size=16, output_embedding_size=40, **changes)


THEIRS: dict[str, Any] = {
    "bert": lambda: transformers.BertForMaskedLM(tiny_bert()),
    "bert-relu": lambda: transformers.BertForMaskedLM(tiny_bert(hidden_act="relu", layer_norm_eps=1e-3)),
    "bert-classes": lambda: transformers.BertForSequenceClassification(tiny_bert(num_labels=3)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(tiny_gpt2()),
    "gpt2-classes": lambda: transformers.GPT2ForSequenceClassification(tiny_gpt2(num_labels=3)),
    "t5": lambda: transformers.T5ForConditionalGeneration(tiny_t5()),
    "t5.1.1": lambda: transformers.T5ForConditionalGeneration(t5_1_1()),
    "roberta": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SIZES, type_vocab_size=1)),
    "roberta-pad-0": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SIZES, pad_token_id=0)),
    "roberta-classes": lambda: transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**SIZES, **THREE)
    ),
    "xlm-roberta": lambda: transformers.XLMRobertaForMaskedLM(transformers.XLMRobertaConfig(**SIZES)),
    "xlm-roberta-classes": lambda: transformers.XLMRobertaForSequenceClassification(
        transformers.XLMRobertaConfig(**SIZES, **THREE)
    ),
    "bart": lambda: transformers.BartForConditionalGeneration(tiny_bart()),
    "bart-scaled": lambda: transformers.BartForConditionalGeneration(tiny_bart(scale_embedding=True, init_std=0.01)),
    "bart-classes": lambda: transformers.BartForSequenceClassification(tiny_bart(**THREE)),
    "albert": lambda: transformers.AlbertForMaskedLM(tiny_albert()),
    "albert-groups": lambda: transformers.AlbertForMaskedLM(tiny_albert(num_hidden_groups=2)),
    "albert-classes": lambda: transformers.AlbertForSequenceClassification(tiny_albert(**THREE)),
    "electra": lambda: transformers.ElectraForPreTraining(tiny_electra()),
    "electra-wide": lambda: transformers.ElectraForPreTraining(tiny_electra(embedding_size=32)),
    "electra-generator": lambda: transformers.ElectraForMaskedLM(tiny_electra()),
    "electra-classes": lambda: transformers.ElectraForSequenceClassification(tiny_electra(**THREE)),
    "distilbert": lambda: transformers.DistilBertForMaskedLM(tiny_distilbert()),
    "distilbert-classes": lambda: transformers.DistilBertForSequenceClassification(tiny_distilbert(**THREE)),
    "gpt": lambda: transformers.OpenAIGPTLMHeadModel(tiny_gpt()),
    "gpt-classes": lambda: transformers.OpenAIGPTForSequenceClassification(tiny_gpt(**THREE)),
    "mobilebert": lambda: transformers.MobileBertForMaskedLM(tiny_mobilebert()),
    "mobilebert-narrow": lambda: transformers.MobileBertForMaskedLM(
        tiny_mobilebert(use_bottleneck_attention=True, key_query_shared_bottleneck=False, num_feedforward_networks=1)
    ),
    "mobilebert-classes": lambda: transformers.MobileBertForSequenceClassification(tiny_mobilebert(**THREE)),
    "rembert": lambda: transformers.RemBertForMaskedLM(tiny_rembert()),
    "rembert-classes": lambda: transformers.RemBertForSequenceClassification(tiny_rembert(**THREE)),
    "xlm": lambda: transformers.XLMWithLMHeadModel(tiny_xlm()),
    "xlm-relu": lambda: transformers.XLMWithLMHeadModel(tiny_xlm(n_langs=1, gelu_activation=False)),
    "xlm-classes": lambda: transformers.XLMForSequenceClassification(tiny_xlm(**THREE)),
}
SEGMENTS = ("bert", "albert", "electra", "rembert", "mobilebert")  # families that tell two texts apart
ANSWER = ("t5", "bart")  # families with a decoder that reads an encoder


def pad_of(name: str) -> int:
    """The padding id where it matters to the model: RoBERTa's positions start after it."""
    return 1 if "roberta" in name and "pad-0" not in name else 0


def stir(model: torch.nn.Module, seed: int = 0) -> Any:
    """Move every weight, so that no bias of 0 and no norm of 1 hides a mistake."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.1)
    return model.eval()


def inputs(name: str, padded: bool) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(2, V, (3, T), generator=g)
    mask = torch.ones_like(ids)
    if padded:
        mask = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]).long()
        ids = torch.where(mask.bool(), ids, pad_of(name))
    given = {"input_ids": ids}
    if padded:
        given["attention_mask"] = mask
    if name.startswith(SEGMENTS):
        given["token_type_ids"] = torch.randint(0, 2, (3, T), generator=g)
    if name in ("xlm", "xlm-classes"):
        given["langs"] = torch.randint(0, 3, (3, T), generator=g)
    if name == "bart-classes":  # a text ends in </s>, and its class is told there
        ids[ids == 2] = 3
        ids[torch.arange(3), mask.sum(1) - 1] = 2
        given["decoder_input_ids"] = ids.roll(1, 1)
    elif name.startswith(ANSWER):
        given["decoder_input_ids"] = torch.randint(2, V, (3, U), generator=g)
    return given


def at_text(x: Tensor, given: dict[str, Tensor]) -> Tensor:
    """States or logits where there is text; what stands on padding means nothing."""
    mask = given.get("attention_mask")
    return x[mask.bool()] if mask is not None and x.shape[:2] == mask.shape else x


def run(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Logits and hidden states where there is text, and gradients of a random mixture of the logits."""
    out = model(**given, output_hidden_states=True)
    states = getattr(out, "decoder_hidden_states", None) or out.hidden_states
    if getattr(out, "encoder_last_hidden_state", None) is not None:
        states = (*states, out.encoder_last_hidden_state)
    logits = at_text(out.logits, given)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).mean().backward()
    return logits.detach(), [at_text(s, given).detach() for s in states]


def gradients_in_their_names(model: Model) -> dict[str, Tensor]:
    mirror = copy.deepcopy(model)
    for p, q in zip(mirror.parameters(), model.parameters(), strict=True):
        assert q.grad is not None
        p.data = q.grad
    return to_hf_tensors(mirror)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", THEIRS)
def test_from_transformers(name: str, padded: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = stir(THEIRS[name]())
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    given = inputs(name, padded)
    logits, states = run(ours, given)
    their_logits, their_states = run(theirs, given)
    assert_close(logits, their_logits, **CLOSE)
    assert len(states) == len(their_states)
    for mine, other in zip(states, their_states, strict=True):
        assert_close(mine, other, **CLOSE)
    gradients = gradients_in_their_names(ours)
    first = {twin: n for n, twins in FAMILY_LAYOUTS[ours.config.family].aliases.items() for twin in twins}
    wanted = {first.get(n, n): p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    assert gradients.keys() == wanted.keys()
    if name.startswith("mobilebert"):  # its trigrams read padding, and `transformers` drops that gradient
        gradients["mobilebert.embeddings.word_embeddings.weight"][0] = 0
        wanted["mobilebert.embeddings.word_embeddings.weight"][0] = 0
    for key, g in wanted.items():
        assert_close(gradients[key], g, **CLOSE, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "xlm"])
def test_left_padding_of_an_encoder(name: str, tmp_path: Path) -> None:
    """RoBERTa counts positions from the first token of the text, the others from the start of the row."""
    theirs = stir(THEIRS[name]())
    theirs.save_pretrained(tmp_path)
    given = inputs(name, padded=True)
    given["attention_mask"] = given["attention_mask"].flip(1)
    given["input_ids"] = given["input_ids"].flip(1)
    assert_close(run(load_model(tmp_path), given)[0], run(theirs, given)[0], **CLOSE)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "xlm", "gpt2"])
def test_places_that_a_caller_names(name: str, tmp_path: Path) -> None:
    """RoBERTa's callers count from 2, as its table does."""
    theirs = stir(THEIRS[name]())
    theirs.save_pretrained(tmp_path)
    given = inputs(name, padded=False)
    given["position_ids"] = (torch.arange(T).flip(0) + 2).expand(3, -1)
    assert_close(run(load_model(tmp_path), given)[0], run(theirs, given)[0], **CLOSE)


@pytest.mark.parametrize("name", [name for name in THEIRS if not name.endswith("classes")])
def test_packed_documents_are_read_as_apart(name: str, tmp_path: Path) -> None:
    """Two documents of 6 and 5 tokens (answers of 4 and 3) in a row, and `transformers` on each of them alone."""
    theirs = stir(THEIRS[name]())
    theirs.save_pretrained(tmp_path)
    ours, given = load_model(tmp_path), {k: v[:1] for k, v in inputs(name, padded=False).items()}
    reads, writes = (slice(0, 6), slice(6, T)), (slice(0, 4), slice(4, U))
    apart = []
    for read, write in zip(reads, writes, strict=True):
        part = {k: v[:, write if k.startswith("decoder") else read] for k, v in given.items()}
        apart.append(theirs(**part).logits)
    doc, position = torch.tensor([[0] * 6 + [1] * 5]), torch.tensor([[*range(6), *range(5)]])
    batch = Batch(given["input_ids"], doc, position, token_type_ids=given.get("token_type_ids", given.get("langs")))
    if name.startswith(ANSWER):
        doc, position = torch.tensor([[0] * 4 + [1] * 3]), torch.tensor([[*range(4), *range(3)]])
        tokens = given["decoder_input_ids"]
        batch = batch._replace(decoder_input_ids=tokens, decoder_document_ids=doc, decoder_position_ids=position)
    assert_close(ours.logits(batch), torch.cat(apart, 1), **CLOSE)


NAMES = ("good", "bad", "so-so")
SHORT = {"position": LearnedPosition(24)}
AUTO = {
    "encoder": "AutoModelForMaskedLM",
    "decoder": "AutoModelForCausalLM",
    "encoder-decoder": "AutoModelForSeq2SeqLM",
    "classes": "AutoModelForSequenceClassification",
    "verdict": "AutoModelForPreTraining",
}
OURS: dict[str, ModelConfig] = {
    "bert": bert(2, 32, 4, V, **SHORT),
    "spanbert": spanbert(2, 32, 4, V),
    "unilm": unilm(2, 32, 4, V),
    "labse": labse(2, 32, 4, V),
    "gpt2": gpt2(2, 32, 4, V, **SHORT, mlp=MLPConfig(48, "gelu-tanh")),
    "gpt3": gpt3(2, 32, 4, V),
    "gpt": gpt(2, 32, 4, V),
    "t5": t5(2, 32, 4, 48, V),
    "t5.1.1": t5_v1_1(2, 32, 4, 48, V, head_dim=12),
    "t5.1.1-tied": t5_v1_1(2, 32, 4, 48, V, head=LMHead()),
    "t5-uneven": t5(1, 32, 4, 48, V, num_decoder_layers=3, head_dim=8),
    "roberta": roberta(2, 32, 4, V),
    "xlm-roberta": xlm_roberta(2, 32, 4, V),
    "afriberta": afriberta(2, 32, 4, V),
    "bart": bart(2, 32, 4, V),
    "bart-uneven": bart(1, 32, 4, V, num_decoder_layers=2, scale_embedding=True, position=LearnedPosition(26, 2)),
    "bart-biased": bart(1, 32, 4, V, head=LMHead(bias=True)),
    "albert": albert(4, 32, 4, 16, V),
    "albert-groups": albert(4, 32, 4, 16, V, num_shared=2),
    "albert-shallower": albert(3, 32, 4, 16, V, num_shared=12),  # `albert-base` with model.num_layers=3
    "electra": electra(2, 32, 4, 16, V, head=DiscriminatorHead()),
    "electra-generator": electra(2, 32, 4, 16, V),
    "distilbert": distilbert(2, 32, 4, V),
    "mobilebert": mobilebert(2, 32, 4, 16, 12, V),
    "mobilebert-narrow": mobilebert(2, 32, 4, 16, 12, V, bottleneck=BottleneckConfig(16, 2, "narrow")),
    "rembert": rembert(2, 32, 4, 16, 40, V),
    "xlm": xlm(2, 32, 4, V, num_languages=3),
    "xlm-sinusoid": xlm(2, 32, 4, V, position=SinusoidalPosition(24)),
}
CLASSED = ("bert", "gpt2", "gpt", "roberta", "xlm-roberta", "albert", "electra", "distilbert", "rembert", "xlm")
CLASSED += ("mobilebert",)
OURS |= {f"{name}-classes": with_classification_head(OURS[name], NAMES) for name in CLASSED}
OURS["bart-classes"] = with_classification_head(bart(2, 32, 4, V), NAMES)


@pytest.mark.parametrize("name", OURS)
def test_to_transformers(name: str, tmp_path: Path) -> None:
    config = OURS[name]
    ours = stir(make_model(config))
    write_model(ours, tmp_path)
    kind = {ClassificationHead: "classes", DiscriminatorHead: "verdict"}.get(type(config.head), config.architecture)
    theirs, info = getattr(transformers, AUTO[kind]).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    if config.family == "gpt" or kind == "classes":
        theirs.config.pad_token_id = theirs.config.pad_token_id or 0
    given = inputs(name, padded=False)
    if config.family == "xlm":  # it takes its padding token for padding wherever no mask is given
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    assert_close(run(ours, given)[0], run(theirs.eval(), given)[0], **CLOSE)
    if isinstance(config.head, ClassificationHead):
        assert tuple(theirs.config.id2label[i] for i in range(3)) == NAMES
    again = load_model(tmp_path)
    same = {"t5-uneven": {"head_dim": None}, "albert-shallower": {"num_shared": 3}}  # the same models, said otherwise
    assert again.config == replace(config, **same.get(name, {}))
    assert_close(run(again, given)[0], run(ours, given)[0], atol=0, rtol=0)


PAIRS = {
    "bert": (bert(2, 32, 4, V, **SHORT), "BertForPreTraining", "seq_relationship_logits"),
    "albert": (albert(4, 32, 4, 16, V, **SHORT), "AlbertForPreTraining", "sop_logits"),
    "mobilebert": (mobilebert(2, 32, 4, 16, 12, V), "MobileBertForPreTraining", "seq_relationship_logits"),
}


@pytest.mark.parametrize(
    "extras", [(SentencePairHead(),), (SentencePairHead(), SpanBoundaryHead())], ids=["pair", "pair and boundary"]
)
@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_head_is_theirs(name: str, extras: tuple[Extra, ...], tmp_path: Path) -> None:
    """Both directions; what `transformers` does not know beside that is passed over."""
    config, architecture, answer = PAIRS[name]
    ours = stir(make_model(replace(config, extras=extras)))
    write_model(ours, tmp_path)
    theirs, info = getattr(transformers, architecture).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert all(key.startswith("extras.boundary") for key in info["unexpected_keys"])
    given = inputs(name, padded=True)
    out, x = theirs.eval()(**given), ours(**given, output_hidden_states=True)
    assert_close(at_text(x.logits, given), at_text(out.prediction_logits, given), **CLOSE)
    assert_close(ours.extras["pair"](x.hidden_states[-1]), getattr(out, answer), **CLOSE)
    masked = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert_close(at_text(masked(**given).logits, given), at_text(x.logits, given), **CLOSE)
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_model(tmp_path / "theirs")
    assert again.config.extras[:1] == (SentencePairHead(),)
    assert torch.equal(again.extras["pair"].out.weight, ours.extras["pair"].out.weight)


def test_an_electra_and_its_generator(tmp_path: Path) -> None:
    """`transformers` has the discriminator only; here it trains on with a new generator, or is fine-tuned."""
    config = electra(2, 32, 4, 16, V, extras=(GeneratorConfig(0.5),))
    ours = stir(make_model(config))
    write_model(ours, tmp_path)
    theirs, info = transformers.AutoModelForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(theirs, transformers.ElectraForPreTraining)
    assert not info["missing_keys"]
    assert all(key.startswith("extras.generator") for key in info["unexpected_keys"])
    given = inputs("electra", padded=True)
    states = ours(**given, output_hidden_states=True).hidden_states
    verdict = at_text(theirs.eval()(**given).logits, given)
    assert_close(at_text(ours.generator.discriminator_head(states[-1]), given), verdict, **CLOSE)
    again = load_model(tmp_path)
    assert again.config == config
    assert all(torch.equal(p, again.state_dict()[n]) for n, p in ours.state_dict().items())

    theirs.save_pretrained(tmp_path / "theirs")
    discriminator = load_model(tmp_path / "theirs").eval()
    assert discriminator.config.head == DiscriminatorHead()
    labels = torch.arange(given["input_ids"].numel()).view_as(given["input_ids"]) % 2
    assert_close(discriminator(**given, labels=labels).loss, theirs(**given, labels=labels).loss, **CLOSE)
    on = make_model(config)
    load_weights(on, read_tensors(tmp_path / "theirs"), "theirs")
    mine, other = on.state_dict(), ours.state_dict()
    fresh = {n for n, p in other.items() if not torch.equal(p, mine[n])}
    assert all(n.startswith(("head.", "extras.generator.")) and "discriminator_head" not in n for n in fresh)
    tuned = load_model(tmp_path / "theirs", head=with_classification_head(config, NAMES).head)
    assert torch.equal(tuned.state_dict()["stack.blocks.1.mlp.up.weight"], other["stack.blocks.1.mlp.up.weight"])


@pytest.mark.parametrize("extra", [SpanBoundaryHead(), QueryStream()], ids=["boundary", "query"])
def test_other_extras_do_not_keep_transformers_from_opening_it(extra: Extra, tmp_path: Path) -> None:
    ours = stir(make_model(bert(2, 32, 4, V, position=LearnedPosition(24), extras=(extra,))))
    write_model(ours, tmp_path)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    given = inputs("bert", padded=True)
    assert_close(at_text(ours(**given).logits, given), at_text(theirs(**given).logits, given), **CLOSE)


def test_an_untied_head_survives_a_save_by_transformers(tmp_path: Path) -> None:
    """Its config.json then says that the head is tied; the tensors know better."""
    ours = stir(make_model(OURS["t5.1.1"]))
    write_model(ours, tmp_path)
    transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).save_pretrained(tmp_path / "theirs")
    again = load_model(tmp_path / "theirs")
    given = inputs("t5", padded=False)
    assert_close(run(again, given)[0], run(ours, given)[0], atol=0, rtol=0)
    assert isinstance(again.config.head, LMHead)
    assert not again.config.head.tied


@pytest.mark.parametrize("name", [name for name in THEIRS if not name.startswith("bart")])
def test_the_loss_of_a_call_is_theirs(name: str, tmp_path: Path) -> None:
    theirs = stir(THEIRS[name]())
    theirs.save_pretrained(tmp_path)
    given = inputs(name, padded=False)
    given.pop("decoder_input_ids", None)
    labels = torch.randint(2, V, (3, U if name.startswith("t5") else T), generator=torch.Generator().manual_seed(3))
    labels[0, 2:] = -100
    kinds = {"classes": labels[:, 1] % 3, "verdict": labels % 2}
    given["labels"] = kinds["verdict"] if name in ("electra", "electra-wide") else kinds.get(name[-7:], labels)
    assert_close(load_model(tmp_path)(**given).loss, theirs(**given).loss, **CLOSE)


def test_buckets_are_theirs() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-300, 301)
    for num, far in ((32, 128), (8, 10), (16, 1000)):
        for both_ways in (True, False):
            theirs = T5Attention._relative_position_bucket(distance, both_ways, num, far)
            assert torch.equal(t5_bucket(distance, num, far, both_ways), theirs)
