"""Default recipes for fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firth.core.errors import UserError, did_you_mean, quote
from firth.models import ModelConfig
from firth.models.config import BAG_OF_WORDS_FAMILY, ENCODER_HEAD_FAMILIES, AWDLSTMConfig, ELMoConfig, FanInInit
from firth.train.recipe import AUTO_RATE

# ULMFiT (Howard & Ruder 2018, sections 3.2, 3.3 and 4.1): a slanted triangular learning rate that rises for 10% of the
# steps, discriminative fine-tuning (each layer's rate is 1/2.6 of that above it), gradual unfreezing (one more layer
# per epoch).
ULMFIT_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-2,
    "lr_scheduler_type": "slanted-triangle",
    "layer_decay": 1 / 2.6,
    "unfreeze_every": -1,
    "num_train_epochs": 8.0,
    "per_device_train_batch_size": 64,
    "max_seq_length": 512,
    "adam_beta1": 0.7,
    "adam_beta2": 0.99,
}
# Dai & Le 2015: initialize with the weights of a language model or of a sequence autoencoder, then train all layers.
DAI_LE_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "layer_decay": 1.0,
    "unfreeze_every": 0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
}
# Their head: the state of the last token, an affine layer of 512 units with a dropout of 50%, the softmax (section 4).
DAI_LE_HEAD: dict[str, Any] = {"pool": "last", "head_dim": 512, "head_dropout": 0.5}
POOLED_TASKS = ("classify", "pair", "regress", "choice")  # tasks with one label per text
# ELMo (Peters et al. 2018, section 3.3): freeze the backbone; train a weighted sum of its layers, the task's own word
# vectors beside it and a BiLSTM over both. Section 5.1: an L2 weight of 0.001 lets the layers differ.
ELMO_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "freeze": "backbone",
    "layers": "mix",
    "l2_mix": 1e-3,
    "word_dim": 50,
    "bilstm": 128,
}
ADAFACTOR_RATE = 1e-2  # at width 128, relative to the weights; at width 1,024 it is near T5's 1e-3 (section 3.1.2)
# A preference loss moves all answers of a prompt at once, and soon leaves fluent text: it is published with rates far
# below those of supervised fine-tuning.
PREFERENCE_RATE_FACTOR = 0.1
# `learning_rate: auto` tries the default times these factors. LoRA's published rates are 4 to 10 times those of full
# fine-tuning (Hu et al. 2021, appendix D: 2e-4 to 5e-4 at width 768).
RATE_FACTORS, LORA_RATE_FACTORS = (0.4, 1.0, 2.5), (1.0, 4.0, 10.0)
# `search` tries rates from the first to the second factor times the default. A preference loss keeps falling at rates
# where answers stop to be fluent, which no score on pairs shows: so there the range ends early.
SEARCH_RATE_RANGE, LORA_SEARCH_RATE_RANGE, PREFERENCE_SEARCH_RATE_RANGE = (0.2, 5.0), (0.5, 20.0), (0.2, 2.0)
# What `search` varies, and the options that hold each of them fixed: a number of steps also holds the batch size, as
# steps times batch is the length.
SEARCH_DIMENSIONS: dict[str, tuple[str, ...]] = {
    "learning_rate": ("learning_rate",),
    "num_train_epochs": ("num_train_epochs", "max_steps", "minutes"),
    "per_device_train_batch_size": ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps"),
    "layer_decay": ("layer_decay",),
    "warmup_steps": ("warmup_steps",),
}
FINETUNE_RECIPES = {"ulmfit": ULMFIT_DEFAULTS, "dai-le": DAI_LE_DEFAULTS, "elmo": ELMO_DEFAULTS}


def finetuning_defaults(model: ModelConfig, optim: str | None = None, lora: bool = False) -> dict[str, Any]:
    """Return fields of a FinetuneRecipe, for `optim` if that is given.

    AdamW's learning rate is 5e-5 at width 768 and higher for narrower models. T5 is fine-tuned with Adafactor, as
    published: its embeddings start at N(0, 1), which AdamW's steps of one size hardly change, while Adafactor's are
    relative to the weights. The rate falls with the width, as the published one is lower. LoRA needs AdamW.
    """
    relative = isinstance(model.init, FanInInit) and model.recurrent is None and not lora
    if optim == "adafactor" or (optim is None and relative):
        return {"optim": "adafactor", "learning_rate": float(f"{ADAFACTOR_RATE * 128 / max(model.dim, 128):.1e}")}
    is_higher = model.architecture == "encoder-decoder" and model.family not in ENCODER_HEAD_FAMILIES
    rate = 5e-5 * (768 / model.dim) ** 1.5 * (3 if is_higher else 1)
    rate = 5e-3 if model.family == BAG_OF_WORDS_FAMILY else rate  # only word vectors are trained
    if isinstance(model.recurrent, AWDLSTMConfig):
        return dict(ULMFIT_DEFAULTS)
    if isinstance(model.recurrent, ELMoConfig):
        return dict(ELMO_DEFAULTS)
    if model.recurrent is not None:
        return {"learning_rate": 1e-3}
    return {"learning_rate": float(f"{rate:.1e}")}


def preference_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of fine-tuning with the lower learning rate of preference tuning."""
    return fields | {"learning_rate": float(f"{PREFERENCE_RATE_FACTOR * fields['learning_rate']:.1e}")}


def search_rate_range(task: str, lora: bool) -> tuple[float, float]:
    """Return the lowest and the highest rate that `search` tries, times the default."""
    return (
        PREFERENCE_SEARCH_RATE_RANGE if task == "preference" else LORA_SEARCH_RATE_RANGE if lora else SEARCH_RATE_RANGE
    )


def searched_fields(fields: Mapping[str, Any], changes: Mapping[str, Any], published: Mapping[str, Any]) -> list[str]:
    """Return the dimensions that a search varies: not those that the user or a published recipe sets.

    >>> searched_fields({}, {"search": 12, "learning_rate": 1e-4, "max_steps": 500}, {})
    ['layer_decay', 'warmup_steps']
    """
    held = {name for name, value in changes.items() if (name, value) != ("learning_rate", AUTO_RATE)} | set(published)
    if {**fields, **changes}.get("freeze") == "backbone":
        held.add("layer_decay")  # only the head is trained
    searched = [name for name, options in SEARCH_DIMENSIONS.items() if not held.intersection(options)]
    if not searched:
        raise UserError("search has nothing to vary: every setting that it could try is set. Leave one of them out.")
    return searched


def with_rate_candidates(
    fields: Mapping[str, Any], changes: Mapping[str, Any], published: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return default fields and a user's changes with `learning_rate: auto` (the default) as rates to try.

    With `search` they are the fields to vary instead: those that neither the user nor a `published` recipe sets.

    >>> with_rate_candidates({"learning_rate": 5e-5}, {"seed": 1})
    ({'learning_rate': 5e-05, 'rate_candidates': (2e-05, 5e-05, 0.00013)}, {'seed': 1})
    >>> with_rate_candidates({"learning_rate": 5e-5}, {"learning_rate": 1e-4})
    ({'learning_rate': 5e-05}, {'learning_rate': 0.0001})
    """
    others = {name: value for name, value in changes.items() if (name, value) != ("learning_rate", AUTO_RATE)}
    if changes.get("search") and "search_fields" not in changes:  # a saved recipe has them
        return {**fields, "search_fields": tuple(searched_fields(fields, changes, published or {}))}, others
    if "learning_rate" in others or changes.get("search"):
        return dict(fields), others
    factors, rate = LORA_RATE_FACTORS if changes.get("lora_rank") else RATE_FACTORS, fields["learning_rate"]
    candidates = tuple(float(f"{factor * rate:.1e}") for factor in factors)
    return {**fields, "rate_candidates": candidates}, others


def named_finetuning_defaults(name: str, model: ModelConfig, task: str = "classify") -> dict[str, Any]:
    """Return the fields of a published recipe ("ulmfit", "dai-le", "elmo") for any model; the head is an LSTM's."""
    if name not in FINETUNE_RECIPES:
        raise UserError(f"There is no recipe {quote(name)}. {did_you_mean(name, FINETUNE_RECIPES)}")
    has_own_head = name == "dai-le" and isinstance(model.recurrent, AWDLSTMConfig) and task in POOLED_TASKS
    return {**finetuning_defaults(model), **FINETUNE_RECIPES[name], **(DAI_LE_HEAD if has_own_head else {})}
