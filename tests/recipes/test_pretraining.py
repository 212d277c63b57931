"""Which objective, which tokenizer and which extras a family starts with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from firth.models import PRESETS, make_model, preset
from firth.models.config import Boundary, Generator, MaskDecoder, Pair
from firth.models.presets import bert, gpt2
from firth.objectives import MLM, NAMED, SpanCorruption
from firth.recipes import changed, complete, default_objective, pretraining, tokenizer_kind
from firth.recipes.pretraining import rate

PUBLISHED = {
    "bert": "mlm",
    "roberta": "mlm",
    "xlm-roberta": "mlm",
    "afriberta": "mlm",
    "labse": "mlm",
    "distilbert": "mlm",
    "rembert": "mlm",
    "xlm": "mlm",
    "spanbert": "span",
    "albert": "sop",
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
    model = preset(f"{family}-tiny")
    assert default_objective(model) == PUBLISHED[family]
    recipe = pretraining(model)
    assert recipe.objective == NAMED[PUBLISHED[family]]
    recipe.check()


def test_an_unknown_family_goes_by_its_shape() -> None:
    assert default_objective(replace(preset("bert-tiny"), family="mine")) == "mlm"
    assert default_objective(replace(preset("gpt2-tiny"), family="mine")) == "clm"
    assert default_objective(replace(preset("t5-tiny"), family="mine")) == "span-corruption"


@pytest.mark.parametrize("name", NAMED)
def test_a_recipe_has_what_its_objective_needs_and_no_more(name: str) -> None:
    """Each objective with a model of a shape that can do it, from one without extras and from one with a pair head."""
    objective = NAMED[name]
    shape = objective.shapes[0]
    model = next(config for config in PRESETS.values() if config.shape == shape)
    starts = [model] if shape != "encoder" else [model, replace(model, extras=(Pair(),))]
    for start in starts:
        recipe = complete(replace(pretraining(start), objective=objective))
        assert {type(extra).__name__.lower() for extra in recipe.model.extras} == set(objective.extras)
        assert recipe.model.problems() == []
        assert complete(recipe) == recipe
        assert pretraining(start, objective=objective) == recipe


def test_numbers_of_extras_are_kept() -> None:
    model = bert(1, 16, 2, 30, extras=(Boundary(longest=5),))
    assert pretraining(model, objective=NAMED["span"]).model.extras == (Boundary(longest=5),)
    assert pretraining(model, objective=NAMED["mlm"]).model.extras == ()
    electra = bert(1, 16, 2, 30, extras=(Generator(size=0.5),))
    assert pretraining(electra, objective=NAMED["rtd"]).model.extras == (Generator(size=0.5),)
    make_model(pretraining(electra, objective=NAMED["mlm"]).model)


def test_what_deberta_was_pretrained_with_unless_another_objective_is_asked() -> None:
    one, three = preset("deberta-tiny"), preset("deberta-v3-tiny")
    assert pretraining(one).model.extras == (MaskDecoder(2, 512),)
    assert pretraining(three).model.extras == (Generator(disentangled=True),)
    assert complete(pretraining(one)) == pretraining(one)
    assert pretraining(one, objective=NAMED["rtd"]).model.extras == (Generator(),)
    assert pretraining(one, objective=NAMED["nsp"]).model.extras == (Pair(),)
    assert pretraining(three, objective=NAMED["mlm"]).model.extras == ()
    without = replace(pretraining(one), model=one)
    assert complete(without).model.extras == (), "who takes it away keeps it away"
    bert_with = replace(preset("bert-tiny"), extras=(MaskDecoder(1),))
    assert pretraining(bert_with).model.extras == (MaskDecoder(1),)


def test_tokenizers() -> None:
    kinds = {name: tokenizer_kind(preset(name), pretraining(preset(name)).objective) for name in PRESETS}
    assert kinds["bert-tiny"] == kinds["albert-tiny"] == kinds["electra-tiny"] == "wordpiece"
    assert kinds["roberta-tiny"] == kinds["bart-tiny"] == kinds["gpt2-tiny"] == "byte-bpe"
    assert kinds["t5-tiny"] == "unigram"
    assert tokenizer_kind(preset("bart-tiny"), SpanCorruption()) == "unigram"
    assert tokenizer_kind(preset("gpt2-tiny"), NAMED["lm-denoising"]) == "unigram"
    assert tokenizer_kind(preset("bart-tiny"), NAMED["denoisers"]) == "unigram"
    assert tokenizer_kind(preset("unilm-tiny"), NAMED["unilm"]) == "wordpiece"
    assert tokenizer_kind(replace(preset("bert-tiny"), family="mine"), MLM()) == "wordpiece"


def test_rates() -> None:
    """As measured for the widths of BERT, GPT-2 and T5; a post-norm decoder takes no more than BERT."""
    tiny = [preset(f"{name}-tiny") for name in ("bert", "gpt2", "t5", "bart")]
    assert [rate(model, "adamw") for model in tiny] == [1e-3, 2e-3, 3e-3, 1e-3]
    assert [rate(model, "muon") for model in tiny] == [4e-3, 8e-3, 8e-3, 4e-3]
    assert rate(preset("modernbert-tiny"), "adamw") == 3e-3
    assert [rate(model, "adafactor") for model in tiny] == [1e-2] * 4
    assert rate(gpt2(1, 768, 12), "adamw") == pytest.approx(5.2e-4)
    assert rate(gpt2(1, 768, 12), "muon") == pytest.approx(3.3e-3)
    assert rate(bert(1, 768, 12), "muon") == pytest.approx(1e-3)


def test_the_optimizer_is_the_models_unless_named() -> None:
    for name, optim in (
        ("bert", "muon"),
        ("gpt2", "muon"),
        ("t5", "adafactor"),
        ("ulmfit", "adamw"),
        ("elmo", "adamw"),
    ):
        assert pretraining(preset(f"{name}-tiny")).optim == optim
    usual = pretraining(preset("bert-tiny"))
    named = changed(usual, {"optim": "adamw"})
    assert (named.optim, named.learning_rate, named.weight_decay) == ("adamw", 1e-3, 0.01)
    assert (usual.weight_decay, changed(usual, {"weight_decay": 0.5}).weight_decay) == (0.2, 0.5)
    in_parts = changed(usual, {"parallel": "fsdp"})
    assert (in_parts.optim, in_parts.learning_rate) == ("adamw", 1e-3)
    in_parts.check()


def test_what_begins_from_nothing_begins_warm() -> None:
    assert {pretraining(preset(name)).warm_start for name in ("bert-tiny", "gpt2-tiny", "t5-tiny")} == {"ppmi"}
    assert {pretraining(preset(name)).warm_start for name in ("elmo-tiny", "ulmfit-tiny")} == {"none"}
    recipe = pretraining(preset("bert-tiny"))
    assert pretraining(preset("bert-tiny"), warm_start="none").warm_start == "none"
    assert changed(recipe, {"seed": 1}).warm_start == "ppmi"
    for change in ({"checkpoint": "x"}, {"teacher": "x"}, {"warm_start": "none"}):
        assert changed(recipe, change).warm_start == "none"


def test_the_rate_is_that_of_the_model_as_it_was_changed() -> None:
    """A tiny preset that is made wide learns as slowly as a wide one, unless a rate is named."""
    tiny = pretraining(preset("bert-tiny"))
    wide = changed(tiny, {"model.dim": 512, "model.num_heads": 8})
    assert wide.learning_rate == rate(wide.model, wide.optim) < tiny.learning_rate
    assert changed(tiny, {"model.dim": 512, "learning_rate": 0.5}).learning_rate == 0.5
    assert changed(tiny, {"max_steps": 3}) == replace(tiny, max_steps=3)
