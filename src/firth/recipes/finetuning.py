"""Default recipes for fine-tuning."""

from __future__ import annotations

from typing import Any

from firth.core.errors import UserError, did_you_mean
from firth.models import ModelConfig
from firth.models.config import BAG_OF_WORDS_FAMILY, AWDLSTMConfig, ELMoConfig

# Howard & Ruder 2018, sections 3.2, 3.3 and 4.1: the slanted triangle rises for a tenth of the steps, each layer learns
# at 1/2.6 of the rate above it, and one more begins to learn with every epoch.
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
# Dai & Le 2015: the language model's weights, and otherwise plain training of the whole.
DAI_LE_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "layer_decay": 1.0,
    "unfreeze_every": 0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
}
# Peters et al. 2018, section 3.3: the body stays as it is; a mixture of its layers, and an LSTM each way, are learned.
ELMO_DEFAULTS: dict[str, Any] = {"learning_rate": 1e-3, "freeze": "backbone", "layers": "mix", "bilstm": 128}
FINETUNE_RECIPES = {"ulmfit": ULMFIT_DEFAULTS, "dai-le": DAI_LE_DEFAULTS, "elmo": ELMO_DEFAULTS}


def finetuning_defaults(model: ModelConfig) -> dict[str, Any]:
    """Fields of a FinetuneRecipe that suit a model of this size: 5e-5 at BERT-base's width, more for narrow ones."""
    rate = 5e-5 * (768 / model.dim) ** 1.5 * (3 if model.architecture == "encoder-decoder" else 1)
    rate = 5e-3 if model.family == BAG_OF_WORDS_FAMILY else rate  # word vectors alone, which nothing above them scales
    if isinstance(model.recurrent, AWDLSTMConfig):
        return dict(ULMFIT_DEFAULTS)
    if isinstance(model.recurrent, ELMoConfig):
        return dict(ELMO_DEFAULTS)
    if model.recurrent is not None:
        return {"learning_rate": 1e-3}
    return {"learning_rate": float(f"{rate:.1e}")}


def named_finetuning_defaults(name: str, model: ModelConfig) -> dict[str, Any]:
    """The same by the name of a published recipe, for whatever model."""
    if name not in FINETUNE_RECIPES:
        raise UserError(f"There is no recipe {name!r}. {did_you_mean(name, FINETUNE_RECIPES)}")
    return {**finetuning_defaults(model), **FINETUNE_RECIPES[name]}
