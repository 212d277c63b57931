"""Which objective, which tokenizer and which extras a family starts with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from firth.core.errors import UserError
from firth.models import PRESETS, Distillation, get_preset, make_model
from firth.models.config import (
    EXTRA_TYPES,
    DetectorConfig,
    GeneratorConfig,
    MaskDecoder,
    SentencePairHead,
    SpanBoundaryHead,
    make_generator_model_config,
)
from firth.models.presets import bert, gpt2
from firth.objectives import MLM, OBJECTIVES, MaskedNextToken, Mixture, SpanCorruption, WeightedObjective
from firth.recipes import (
    choose_batch,
    complete_recipe,
    default_objective,
    pretraining_recipe,
    scale_rate_to_batch,
    shape_recipe_fields,
    tokenizer_kind,
    update_recipe,
    with_repeated_text,
)
from firth.recipes.pretraining import default_learning_rate

PUBLISHED = {
    "bert": "mlm",
    "roberta": "mlm",
    "xlm-roberta": "mlm",
    "afriberta": "mlm",
    "labse": "mlm",
    "distilbert": "mlm",
    "mobilebert": "mlm",
    "ib-bert": "mlm",
    "rembert": "mlm",
    "xlm": "mlm",
    "spanbert": "span",
    "albert": "albert",
    "electra": "rtd",
    "xlnet": "permutation-lm",
    "deberta": "mlm",
    "deberta-v3": "rtd",
    "unilm": "unilm",
    "gpt": "clm",
    "gpt2": "clm",
    "gpt3": "clm",
    "t5": "span-corruption",
    "bart": "bart",
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_family_starts_as_published(family: str) -> None:
    model = get_preset(f"{family}-tiny")
    assert default_objective(model) == PUBLISHED[family]
    recipe = pretraining_recipe(model)
    assert recipe.objective == OBJECTIVES[PUBLISHED[family]]
    recipe.check()


def test_an_unknown_family_goes_by_its_shape() -> None:
    assert default_objective(replace(get_preset("bert-tiny"), family="mine")) == "mlm"
    assert default_objective(replace(get_preset("gpt2-tiny"), family="mine")) == "clm"
    assert default_objective(replace(get_preset("t5-tiny"), family="mine")) == "span-corruption"


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_recipe_has_what_its_objective_needs_and_no_more(name: str) -> None:
    """Each objective with a model of a shape that can do it, from one without extras and from one with a pair head."""
    objective = OBJECTIVES[name]
    names = {kind: key for key, kind in EXTRA_TYPES.items()}
    shape = objective.architectures[0]
    model = next(config for config in PRESETS.values() if config.architecture == shape)
    starts = [model] if shape != "encoder" else [model, replace(model, extras=(SentencePairHead(),))]
    for start in starts:
        recipe = complete_recipe(replace(pretraining_recipe(start), objective=objective))
        assert {names[type(extra)] for extra in recipe.model.extras} == set(objective.extras)
        assert recipe.model.problems() == []
        assert complete_recipe(recipe) == recipe
        assert pretraining_recipe(start, objective=objective) == recipe


def test_numbers_of_extras_are_kept() -> None:
    model = bert(1, 16, 2, 30, extras=(SpanBoundaryHead(max_span_length=5),))
    assert pretraining_recipe(model, objective=OBJECTIVES["span"]).model.extras == (
        SpanBoundaryHead(max_span_length=5),
    )
    assert pretraining_recipe(model, objective=OBJECTIVES["mlm"]).model.extras == ()
    electra = bert(1, 16, 2, 30, extras=(GeneratorConfig(width_ratio=0.5),))
    assert pretraining_recipe(electra, objective=OBJECTIVES["rtd"]).model.extras == (GeneratorConfig(width_ratio=0.5),)
    make_model(pretraining_recipe(electra, objective=OBJECTIVES["mlm"]).model)


def test_what_deberta_was_pretrained_with_unless_another_objective_is_asked() -> None:
    one, three = get_preset("deberta-tiny"), get_preset("deberta-v3-tiny")
    assert pretraining_recipe(one).model.extras == (MaskDecoder(2, 512),)
    # the published rtd_base.json: 12 layers of 768, and a generator of 6 layers of 768
    half_as_deep = GeneratorConfig(width_ratio=1.0, depth_ratio=0.5, disentangle_embeddings=True)
    assert pretraining_recipe(three).model.extras == (half_as_deep,)
    generator = make_generator_model_config(replace(get_preset("deberta-v3-base"), extras=(half_as_deep,)))
    assert (generator.num_layers, generator.dim, generator.num_heads, generator.mlp.dim) == (6, 768, 12, 3072)
    assert complete_recipe(pretraining_recipe(one)) == pretraining_recipe(one)
    assert pretraining_recipe(one, objective=OBJECTIVES["rtd"]).model.extras == (GeneratorConfig(),)
    assert pretraining_recipe(one, objective=OBJECTIVES["nsp"]).model.extras == (SentencePairHead(),)
    assert pretraining_recipe(three, objective=OBJECTIVES["mlm"]).model.extras == ()
    without = replace(pretraining_recipe(one), model=one)
    assert complete_recipe(without).model.extras == (), "who takes it away keeps it away"
    bert_with = replace(get_preset("bert-tiny"), extras=(MaskDecoder(1),))
    assert pretraining_recipe(bert_with).model.extras == (MaskDecoder(1),)


def test_firth_t5_is_the_encoder_decoder_that_was_measured() -> None:
    """docs/results.md: T5 1.1 with Muon and ModernBERT's parts, 8 layers of 512."""
    parts: dict[str, object] = {
        "model.position.kind": "Rotary",
        "model.init.kind": "NormalInit",
        "model.embed_norm": True,
        "model.head.tied": True,
    }
    sizes = {"model.num_layers": 8, "model.dim": 512, "model.num_heads": 8, "model.mlp.dim": 1344}
    start = pretraining_recipe(get_preset("t5.1.1-small"))
    measured = update_recipe(start, {**sizes, **parts, "model.head_dim": None, "model.family": "firth-t5"})
    assert measured == pretraining_recipe(get_preset("firth-t5-small"))
    assert measured.optim == "muon"
    assert tokenizer_kind(measured.model, measured.objective) == "unigram"


def test_tokenizers() -> None:
    kinds = {name: tokenizer_kind(get_preset(name), pretraining_recipe(get_preset(name)).objective) for name in PRESETS}
    assert kinds["bert-tiny"] == kinds["albert-tiny"] == kinds["electra-tiny"] == "wordpiece"
    assert kinds["roberta-tiny"] == kinds["bart-tiny"] == kinds["gpt2-tiny"] == "byte-bpe"
    assert kinds["t5-tiny"] == "unigram"
    assert tokenizer_kind(get_preset("bart-tiny"), SpanCorruption()) == "unigram"
    assert tokenizer_kind(get_preset("gpt2-tiny"), OBJECTIVES["lm-denoising"]) == "unigram"
    assert tokenizer_kind(get_preset("bart-tiny"), OBJECTIVES["denoisers"]) == "unigram"
    assert tokenizer_kind(get_preset("unilm-tiny"), OBJECTIVES["unilm"]) == "wordpiece"
    assert tokenizer_kind(replace(get_preset("bert-tiny"), family="mine"), MLM()) == "wordpiece"


def test_rates() -> None:
    """As measured for the widths of BERT, GPT-2 and T5; a post-norm decoder takes no more than BERT."""
    tiny = [get_preset(f"{name}-tiny") for name in ("bert", "gpt2", "t5", "bart")]
    assert [default_learning_rate(model, "adamw") for model in tiny] == [1e-3, 2e-3, 3e-3, 1e-3]
    assert [default_learning_rate(model, "muon") for model in tiny] == [4e-3, 8e-3, 8e-3, 4e-3]
    assert default_learning_rate(get_preset("modernbert-tiny"), "adamw") == 3e-3
    assert [default_learning_rate(model, "adafactor") for model in tiny] == [1e-2] * 4
    assert default_learning_rate(gpt2(1, 768, 12), "adamw") == pytest.approx(5.2e-4)
    assert default_learning_rate(gpt2(1, 768, 12), "muon") == pytest.approx(3.3e-3)
    assert default_learning_rate(bert(1, 768, 12), "muon") == pytest.approx(1e-3)


def test_the_optimizer_is_the_models_unless_named() -> None:
    for name, optim in (
        ("bert", "muon"),
        ("gpt2", "muon"),
        ("t5", "adafactor"),
        ("ulmfit", "adamw"),
        ("elmo", "adamw"),
    ):
        assert pretraining_recipe(get_preset(f"{name}-tiny")).optim == optim
    usual = pretraining_recipe(get_preset("bert-tiny"))
    named = update_recipe(usual, {"optim": "adamw"})
    assert (named.optim, named.learning_rate, named.weight_decay) == ("adamw", 1e-3, 0.01)
    assert (usual.weight_decay, update_recipe(usual, {"weight_decay": 0.5}).weight_decay) == (0.2, 0.5)
    in_parts = update_recipe(usual, {"parallel": "fsdp"})
    assert (in_parts.optim, in_parts.learning_rate) == (usual.optim, usual.learning_rate)
    in_parts.check()


def test_a_mobilebert_with_a_teacher_learns_layer_by_layer() -> None:
    """As published: progressive transfer, half soft and half true targets, LAMB; what is named stays."""
    tiny = pretraining_recipe(get_preset("mobilebert-tiny"))
    taught = update_recipe(tiny, {"teacher": "x"})
    assert (tiny.knowledge_transfer.strategy, taught.knowledge_transfer.strategy) == ("none", "progressive")
    assert taught.distillation == Distillation(temperature=1.0, soft=0.5, hard=0.5, cosine=0.0, soft_at="targets")
    assert (tiny.optim, taught.optim) == ("muon", "lamb")
    named = update_recipe(tiny, {"teacher": "x", "knowledge_transfer.strategy": "none", "distillation.hard": 2.0})
    assert (named.knowledge_transfer.strategy, named.distillation.hard, named.optim) == ("none", 2.0, "adamw")
    other = update_recipe(pretraining_recipe(get_preset("bert-tiny")), {"teacher": "x"})
    assert (other.knowledge_transfer.strategy, other.distillation) == ("none", Distillation())
    with pytest.raises(UserError, match="needs a teacher"):
        update_recipe(tiny, {"knowledge_transfer.strategy": "joint"}).check()


def test_what_begins_from_nothing_begins_warm() -> None:
    assert {pretraining_recipe(get_preset(name)).warm_start for name in ("bert-tiny", "gpt2-tiny", "t5-tiny")} == {
        "ppmi"
    }
    assert {pretraining_recipe(get_preset(name)).warm_start for name in ("elmo-tiny", "ulmfit-tiny")} == {"none"}
    recipe = pretraining_recipe(get_preset("bert-tiny"))
    assert pretraining_recipe(get_preset("bert-tiny"), warm_start="none").warm_start == "none"
    assert update_recipe(recipe, {"seed": 1}).warm_start == "ppmi"
    for change in ({"checkpoint": "x"}, {"teacher": "x"}, {"warm_start": "none"}):
        assert update_recipe(recipe, change).warm_start == "none"


def test_the_rate_is_that_of_the_model_as_it_was_changed() -> None:
    """A tiny preset that is made wide learns as slowly as a wide one, unless a rate is named."""
    tiny = pretraining_recipe(get_preset("bert-tiny"))
    wide = update_recipe(tiny, {"model.dim": 512, "model.num_heads": 8})
    assert wide.learning_rate == default_learning_rate(wide.model, wide.optim) < tiny.learning_rate
    assert update_recipe(tiny, {"model.dim": 512, "learning_rate": 0.5}).learning_rate == 0.5
    assert update_recipe(tiny, {"max_steps": 3}) == replace(tiny, max_steps=3)


@pytest.mark.parametrize(
    ("width", "text_tokens", "fields", "tokens"),
    [
        (128, 10**6, {"max_steps": 300}, 4096),  # a CPU: few steps, and the first that uses it
        (128, 10**6, {"max_steps": 2000}, 8192),
        (128, 2 * 10**6, {"tokens_read": 1.2e6}, 4096),  # five minutes of two cores
        (128, 14 * 10**6, {"tokens_read": 4.2e7}, 8192),  # three passes over 10M words: 0.58 * 40M ** 0.571 = 12,700
        (512, 14 * 10**6, {"tokens_read": 4.65e8, "has_gpu": True}, 32768),  # four minutes of an H200
        (768, 14 * 10**6, {"tokens_read": 1.1e8, "has_gpu": True}, 32768),
        (2048, 10**9, {"tokens_read": 10**9, "has_gpu": True}, 65536),  # Muon's work grows with the width
        (768, 14 * 10**6, {"tokens_read": 2e6, "has_gpu": True}, 4096),  # four minutes of a slow GPU
        (768, 10**11, {"tokens_read": 10**10, "has_gpu": True}, 2**18),  # Step Law: 297,000
        (768, 10**9, {"max_steps": 10, "has_gpu": True}, 32768),
        (768, 10**10, {"tokens_read": 10**9, "has_gpu": True, "num_devices": 6}, 6 * 32768),
    ],
)
def test_the_chosen_batch(width: int, text_tokens: int, fields: dict[str, Any], tokens: int) -> None:
    model = replace(get_preset("bert-tiny"), dim=width)
    choice = choose_batch(model, 128, text_tokens, **{"has_gpu": False} | fields)
    assert choice.tokens == tokens
    longer = choose_batch(model, 512, text_tokens, **{"has_gpu": False} | fields)
    assert longer.tokens == tokens, "in longer rows too"


def test_the_batch_of_an_lstm_has_the_usual_rows() -> None:
    assert choose_batch(get_preset("ulmfit-tiny"), 70, 10**6, has_gpu=False, max_steps=10**4).tokens == 32 * 70


def test_the_rate_follows_the_batch() -> None:
    """As the square root, from the batch that the rate was tuned with; at most twofold."""
    tiny, base = get_preset("bert-tiny"), get_preset("bert-base")
    assert scale_rate_to_batch(4e-3, tiny, 4096) == 4e-3
    assert scale_rate_to_batch(4e-3, tiny, 8192) == 5.7e-3
    assert scale_rate_to_batch(4e-3, tiny, 2**20) == 8e-3
    assert scale_rate_to_batch(3.3e-3, base, 32768) == 3.3e-3
    assert scale_rate_to_batch(2e-3, base, 4096) == 1e-3
    assert scale_rate_to_batch(4e-3, get_preset("ulmfit-tiny"), 2240) == 4e-3, "as published"


@pytest.mark.parametrize(
    ("preset", "objective", "passes", "dropout"),
    [
        ("encoder-2x64", "mlm-and-clm", 10, 0.0),
        ("encoder-2x64", "mlm-and-clm", 20, 0.1),
        ("encoder-2x64", "rtd-mlm-and-clm", 20, 0.1),
        ("encoder-2x64", "mlm", 60, 0.0),  # masked rows alone do not overfit
        ("decoder-2x64", "clm", 4, 0.0),
        ("decoder-2x64", "clm", 6, 0.1),
    ],
)
@pytest.mark.parametrize("tokens", [14_000_000, 437_500])  # 1/32, which is read half as often
def test_dropout_follows_the_passes(preset: str, objective: str, passes: float, dropout: float, tokens: int) -> None:
    recipe = pretraining_recipe(get_preset(preset), objective=OBJECTIVES[objective])
    model = with_repeated_text(recipe, passes * (tokens / 14e6) ** 0.2, tokens).model
    assert (model.dropout, model.attention_dropout) == (dropout, dropout)


@pytest.mark.parametrize(
    ("passes", "tokens", "share"),
    [
        (0.1, 14_000_000, 0.5),
        (16, 14_000_000, 0.5),  # causal rows are read 8 times
        (32, 14_000_000, 0.75),
        (24, 60_000, 0.888),  # 2.7 times
        (10**6, 60_000, 0.938),  # 15 of 16
        (1, 0, 0.702),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_causal_rows_are_read_a_few_times(passes: float, tokens: int, share: float, device: str) -> None:
    recipe = pretraining_recipe(get_preset("encoder-2x64"), **shape_recipe_fields("encoder-2x64", device))
    new = with_repeated_text(recipe, passes, tokens)
    assert new.objective == replace(recipe.objective, masked_share=max(share, 0.5 if device == "cpu" else 0.6))
    new.check()
    assert with_repeated_text(recipe, passes, tokens, {"masked_share", "dropout"}) == recipe
    masked = replace(recipe, objective=replace(OBJECTIVES["mlm-and-clm"], masked_share=0.95))
    assert with_repeated_text(masked, 20, tokens).objective.masked_share == 0.95, "a larger one stays"
    plain = replace(recipe, objective=OBJECTIVES["mlm"])
    assert with_repeated_text(plain, passes, tokens).objective == OBJECTIVES["mlm"]


def test_an_encoder_detects_replaced_tokens_on_a_gpu() -> None:
    names = ("encoder", "encoder-8x512", "firth-encoder-small")
    assert all(shape_recipe_fields(name, "cuda")["objective"] == OBJECTIVES["rtd-mlm-and-clm"] for name in names)
    assert all(shape_recipe_fields(name, "cpu")["objective"] == OBJECTIVES["mlm-and-clm"] for name in names)
    assert shape_recipe_fields("decoder", "cuda") == shape_recipe_fields("decoder", "cpu") == {"split": "sentence"}
    assert shape_recipe_fields("bert-base", "cuda") == {}
    recipe = pretraining_recipe(get_preset("encoder-2x64"), **shape_recipe_fields("encoder-2x64", "cuda"))
    assert recipe.model.extras == (DetectorConfig(),)
    assert not recipe.keeps_best


def test_a_larger_dropout_stays() -> None:
    model = replace(get_preset("decoder-2x64"), dropout=0.3)
    assert with_repeated_text(pretraining_recipe(model), 10, 10**6).model.dropout == 0.3


@pytest.mark.parametrize("preset", ["bert-tiny", "llama-tiny"])
def test_rows_of_a_mixture_have_the_special_tokens_of_the_model(preset: str) -> None:
    parts = (WeightedObjective(MaskedNextToken()), WeightedObjective(MaskedNextToken(mlm=MLM(rate=0.4))))
    model = get_preset(preset)
    mixed = pretraining_recipe(model, objective=Mixture(parts)).objective
    assert isinstance(mixed, Mixture)
    found = {part.objective.architecture for part in mixed.parts if isinstance(part.objective, MaskedNextToken)}
    assert found == {model.architecture}
