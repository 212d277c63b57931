"""Default pretraining recipes by model family and size: objective, tokenizer, optimizer, learning rate."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from firth.models import MOBILEBERT_DISTILLATION, DiscriminatorHead, Extra, LMHead, ModelConfig, with_extras
from firth.models.config import AWDLSTMConfig, Disentangled, ELMoConfig, FanInInit, GeneratorConfig, MaskDecoder
from firth.models.presets import shape_architecture
from firth.models.prompt_form import prompt_form_of_objective
from firth.objectives import (
    CLM,
    MLM,
    OBJECTIVES,
    MaskedNextToken,
    Mixture,
    MLMAndCLM,
    Objective,
    RTDMLMAndCLM,
    SalientSpanCorruption,
    SequenceAutoencoder,
    SpanCorruption,
)
from firth.objectives.registry import describe_objective
from firth.train import Recipe, apply_overrides

DEFAULT_TOKENIZERS = {"encoder": "wordpiece", "decoder": "byte-bpe", "encoder-decoder": "unigram"}
FAMILY_TOKENIZERS = {
    "roberta": "byte-bpe",
    "xlm-roberta": "unigram",
    "afriberta": "unigram",
    "rembert": "unigram",
    "deberta": "byte-bpe",
    "deberta-v2": "unigram",
    "deberta-v3": "unigram",
    "xlnet": "unigram",
    "bart": "byte-bpe",
    "t5": "unigram",
    "ulmfit": "word",
    "elmo": "elmo-characters",
    "bilstm": "word",
}
MAX_WORDS_BY_KIND = {"word": 30000, "elmo-characters": 2**20}  # vocabulary sizes of tokenizers with one token per word
DEFAULT_OBJECTIVES = {"encoder": "mlm", "decoder": "clm", "encoder-decoder": "span-corruption"}
FAMILY_OBJECTIVES = {  # families published with another objective than their architecture's default
    "spanbert": "span",
    "albert": "albert",
    "electra": "rtd",
    "xlnet": "permutation-lm",
    "deberta-v3": "rtd",
    "unilm": "unilm",
    "bart": "bart",
    "elmo": "bilm",
    "firth-encoder": "mlm-and-clm",
}

# The global batch (`choose_batch`): a starting rule, which a table of measurements can replace.
MIN_BATCH_TOKENS = 4096  # tokens: 85% of a CPU's best speed, and many steps (docs/history.md)
CPU_BATCH_TOKENS = 8192  # tokens: 91% of a CPU's best speed (docs/history.md)
GPU_BATCH_TOKENS = (
    32768  # tokens: 8 layers of 512 and modernbert-base learn well with them on an H200 (docs/results.md)
)
GPU_TOKENS_PER_WIDTH = 32  # tokens per unit of width: see `choose_batch`
MIN_RUN_STEPS = 1000  # steps that a run should have
RECURRENT_BATCH_ROWS = 32  # LSTMs: not measured with others
REPEATS_WORTH_READING = 15.4  # R* of `worth_of_repeats`
MAX_RATE_FACTOR = 2.0  # a learning rate follows the batch up to this factor, up or down


# Recipes of models that are named by their architecture, which no paper fixes (docs/results.md).
SHAPE_RECIPES: dict[str, dict[str, Any]] = {
    "encoder": {"objective": OBJECTIVES["mlm-and-clm"], "split": "sentence"},
    "decoder": {"split": "sentence"},
    "encoder-decoder": {"objective": OBJECTIVES["span-corruption-and-mlm"]},
}
# What a GPU trains instead: it reads enough tokens for detection to pay (docs/history.md, detection beside LM).
GPU_SHAPE_RECIPES: dict[str, dict[str, Any]] = {"encoder": {"objective": OBJECTIVES["rtd-mlm-and-clm"]}}
# Passes over 10M words after which such a model overfits, by objective: causal rows have a label at every position, and
# overfit first. Masked rows alone still learn after 48 passes (docs/history.md, transfer). A smaller text is
# learned by heart after fewer passes: they grow with the fifth root of its tokens (docs/history.md, a small text).
OVERFITTING_TOKENS, OVERFITTING_POWER = 14e6, 0.2
OVERFITTING_PASSES: dict[type, float] = {CLM: 5.0, MLMAndCLM: 12.0, RTDMLMAndCLM: 12.0, MaskedNextToken: 12.0}
REPEATED_TEXT_DROPOUT, DROPOUT_FIELDS = 0.1, ("dropout", "attention_dropout")
# Passes of the causal rows beside masked ones, at most, over 10M words. No more rows are masked than GPT-BERT's, whose
# text of 10M words is read some hundred times.
CAUSAL_PASSES, MAX_MASKED_SHARE = 8.0, 15 / 16


class BatchChoice(NamedTuple):
    """A global batch in tokens, and why."""

    tokens: int
    reason: str


def pretraining_recipe(model: ModelConfig, **fields: Any) -> Recipe:
    """Return the default recipe for a model, with `fields` set on top."""
    objective = OBJECTIVES[default_objective(model)]
    optim = fields.get("optim") or default_optimizer(model)
    model = replace(model, extras=model.extras or default_extras(model))
    defaults = {
        "optim": optim,
        "learning_rate": default_learning_rate(model, optim),
        "weight_decay": default_weight_decay(optim),
        **default_row_fields(model, fields.get("objective", objective)),
    }
    recipe = complete_recipe(Recipe(**{"model": model, "objective": objective} | defaults | fields))
    return recipe if "warm_start" in fields else replace(recipe, warm_start=default_warm_start(recipe))


def shape_recipe_fields(name: str, device_type: str) -> dict[str, Any]:
    """Return the fields of the default recipe of `encoder`, `decoder-8x512` ...; of other models there are none."""
    architecture = shape_architecture(name)
    on_gpu = GPU_SHAPE_RECIPES.get(architecture, {}) if device_type == "cuda" else {}
    return SHAPE_RECIPES.get(architecture, {}) | on_gpu


def update_recipe(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Apply changes to a recipe; optimizer, learning rate, weight decay and warm start follow unless they are set."""
    new = with_transfer_defaults(apply_overrides(recipe, changes), changes)
    if isinstance(new.objective, SequenceAutoencoder) and "order" not in changes:
        new = replace(new, order="packed")
    if "optim" not in changes:
        new = replace(new, optim=taught_optimizer(new) if new.teacher else default_optimizer(new.model))
    if "warm_start" not in changes:
        new = replace(new, warm_start=default_warm_start(new))
    if "weight_decay" not in changes:
        new = replace(new, weight_decay=default_weight_decay(new.optim))
    return complete_recipe(
        new if "learning_rate" in changes else replace(new, learning_rate=default_learning_rate(new.model, new.optim))
    )


def taught_optimizer(recipe: Recipe) -> Literal["adamw", "lamb"]:
    """Return the optimizer of a run with a teacher: LAMB for knowledge transfer, as published."""
    return "adamw" if recipe.knowledge_transfer.strategy == "none" else "lamb"


def with_transfer_defaults(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a MobileBERT with a teacher: progressive transfer, then distillation as published.

    `changes` names what the user has set.
    """
    if not recipe.teacher or recipe.model.family != "mobilebert":
        return recipe
    if not {"knowledge_transfer", "knowledge_transfer.strategy"} & changes.keys():
        recipe = replace(recipe, knowledge_transfer=replace(recipe.knowledge_transfer, strategy="progressive"))
    if "distillation" in changes:
        return recipe
    given = {name: value for name, value in vars(recipe.distillation).items() if f"distillation.{name}" in changes}
    return replace(recipe, distillation=replace(MOBILEBERT_DISTILLATION, **given))


def default_warm_start(recipe: Recipe) -> Literal["none", "ppmi"]:
    """Return how the token embeddings are initialized: "ppmi" factorizes the co-occurrences of tokens in the text.

    It speeds up the training of every architecture (docs/results.md). It is off with a checkpoint, a teacher or a data
    mix, and for LSTMs, where it is not tested.
    """
    has_other_init = recipe.checkpoint or recipe.teacher or recipe.sources
    return "none" if has_other_init or recipe.model.recurrent is not None else "ppmi"


def continued_defaults(model: ModelConfig) -> dict[str, Any]:
    """Return the optimizer and learning rate for continued pretraining.

    An AWD-LSTM has the rate of ULMFiT's second stage, 0.004 (Howard & Ruder 2018, section 4.1).
    """
    if isinstance(model.recurrent, AWDLSTMConfig):
        return {"optim": "adamw", "learning_rate": 4e-3}
    return {"optim": "adamw", "learning_rate": scale_rate_to_width(1e-3, model, 0.75)}


def default_row_fields(model: ModelConfig, objective: Objective) -> dict[str, Any]:
    """Return the data order of recurrent families: contiguous streams; AWD-LSTM's rows have the length of its BPTT.

    A sequence autoencoder reads each text from a fresh state.
    """
    if isinstance(model.recurrent, AWDLSTMConfig):
        order = "packed" if isinstance(objective, SequenceAutoencoder) else "stream"
        return {"order": order, "max_seq_length": model.recurrent.bptt}
    return {"order": "stream"} if isinstance(model.recurrent, ELMoConfig) else {}


def default_extras(model: ModelConfig) -> tuple[Extra, ...]:
    """Return modules beside the backbone that the family was pretrained with, beyond those of its objective."""
    if model.family == "deberta-v3":
        return (GeneratorConfig(width_ratio=1.0, depth_ratio=0.5, disentangle_embeddings=True),)
    if model.family in ("deberta", "deberta-v2") and isinstance(model.position, Disentangled):
        return (MaskDecoder(length=model.position.length),)
    return ()


def complete_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with exactly the modules that its objective trains beside the backbone.

    Rows of masked next-token prediction have the special tokens of the model's architecture. The objective also decides
    whether an encoder-decoder's texts start with BOS, and in which form a prompt is read.
    """
    model, needed = recipe.model, recipe.objective.extras
    if model.architecture != "encoder-decoder":
        recipe = replace(recipe, objective=with_architecture(recipe.objective, model.architecture))
    if isinstance(recipe.objective, MLM) and not needed and model.get_extra("decoder") is not None:
        needed = ("decoder",)
    # a published ELECTRA discriminator, which comes without its generator
    if isinstance(model.head, DiscriminatorHead):
        model = replace(model, head=LMHead(transform=True, bias=True))
    extras = tuple(extra for name in needed if (extra := model.get_extra(name)) is not None)
    adds_bos = model.architecture == "encoder-decoder" and recipe.objective.adds_bos
    form = prompt_form_of_objective(describe_objective(recipe.objective))
    model = replace(model, extras=extras, adds_bos=adds_bos, prompt_form=form)
    return replace(recipe, model=with_extras(model, needed))


def with_architecture(objective: Any, architecture: Literal["encoder", "decoder"]) -> Any:
    """Return the objective, or each part of a mixture, for rows with the special tokens of this architecture."""
    if isinstance(objective, Mixture):
        parts = (replace(part, objective=with_architecture(part.objective, architecture)) for part in objective.parts)
        return replace(objective, parts=tuple(parts))
    return replace(objective, architecture=architecture) if isinstance(objective, MaskedNextToken) else objective


def default_objective(model: ModelConfig) -> str:
    """Return the name of the objective that the family was published with."""
    return FAMILY_OBJECTIVES.get(model.family, DEFAULT_OBJECTIVES[model.architecture])


def recommend_rate(recipe: Recipe) -> float | None:
    """Return the default learning rate of this model and batch; None where a run starts from trained weights."""
    if recipe.checkpoint or recipe.teacher:
        return None
    rate, tokens = default_learning_rate(recipe.model, recipe.optim), recipe.global_batch_size * recipe.max_seq_length
    return scale_rate_to_batch(rate, recipe.model, tokens)


def tokenizer_kind(model: ModelConfig, objective: Objective) -> str:
    """Return the kind of tokenizer for a model: unigram if the objective needs sentinels, otherwise the family's."""
    if needs_sentinels(objective):
        return "unigram"
    return FAMILY_TOKENIZERS.get(model.family, DEFAULT_TOKENIZERS[model.architecture])


def needs_sentinels(objective: Objective) -> bool:
    if isinstance(objective, Mixture):
        return any(needs_sentinels(part.objective) for part in objective.parts)
    return isinstance(objective, SpanCorruption | SalientSpanCorruption)


def default_optimizer(model: ModelConfig) -> Literal["adamw", "muon", "adafactor"]:
    """Return Muon, which reaches a lower loss than AdamW in the same time, above all with pre-norm (docs/results.md).

    T5's fan-in initialization works best with Adafactor, with which it was published. LSTMs use AdamW: the others are
    not tested with them.
    """
    if model.recurrent is not None:
        return "adamw"
    return "adafactor" if isinstance(model.init, FanInInit) else "muon"


def default_learning_rate(model: ModelConfig, optim: str) -> float:
    """Return the peak learning rate, tuned by experiment (docs/results.md): lower for wide and for post-norm models.

    Muon's updates have a fixed norm per matrix, so its rate depends less on width (power 0.5 with pre-norm).
    """
    if model.recurrent is not None:
        return 4e-3 if isinstance(model.recurrent, AWDLSTMConfig) else 2e-3
    if optim == "adafactor":
        return 1e-2
    if optim == "lamb":
        return 1e-2
    if optim == "muon":
        peak, power = (8e-3, 0.5) if model.norm_first else (4e-3, 0.75)
    else:
        peak, power = {"encoder": 3e-3, "decoder": 2e-3, "encoder-decoder": 3e-3}[model.architecture], 0.75
        peak = peak if model.norm_first else 1e-3
    return scale_rate_to_width(peak, model, power)


def choose_batch(
    model: ModelConfig,
    max_seq_length: int,
    text_tokens: int,
    has_gpu: bool,
    num_devices: int = 1,
    *,
    tokens_read: float = 0.0,
    max_steps: int = 0,
) -> BatchChoice:
    """Choose the global batch of a run that reads `tokens_read` tokens of a text, or takes `max_steps` steps.

    1. What learns best grows with the tokens that are read: 0.58 * tokens ** 0.571 (Li et al. 2025, "Step Law"), and
       hardly depends on the size of the model (Zhang et al. 2024). A repeated text counts as less.
    2. A GPU needs enough tokens per step to be busy. Muon orthogonalises its updates once per step, whatever the batch:
       15 matmuls of each matrix, about 25 * width operations per weight, where a token takes 6. With 32 * width tokens
       they are an eighth of the step. Below this size a larger batch costs hardly any steps in the same time.
    3. No less than 1,000 steps: with a few hundred, each step is worth more than its gradient is exact.

    A device gets a power of two of rows. With a set number of steps (1) has no answer: a GPU gets the batch of (2).
    """
    if model.recurrent is not None:
        return BatchChoice(RECURRENT_BATCH_ROWS * max_seq_length, "the usual one of an LSTM")
    busy = num_devices * max(GPU_BATCH_TOKENS, GPU_TOKENS_PER_WIDTH * model.dim) if has_gpu else CPU_BATCH_TOKENS
    tokens, reason = busy, f"the least that keeps {'the GPU' if has_gpu else 'a CPU'} busy"
    if max_steps:
        tokens_read = math.inf if has_gpu else max_steps * busy
    else:
        tokens_read = max(tokens_read, 1.0)
        best = round(0.58 * float(worth_of_repeats(tokens_read, text_tokens)) ** 0.571)
        tokens, reason = max((tokens, reason), (best, f"it suits a run that reads {tokens_read:,.0f} tokens"))
    if tokens * MIN_RUN_STEPS > tokens_read:
        tokens = max(round(tokens_read / MIN_RUN_STEPS), MIN_BATCH_TOKENS)
        reason = "small, as a short run learns more from more steps"
    device_rows = max(1, tokens // (max_seq_length * num_devices))
    return BatchChoice((1 << (device_rows.bit_length() - 1)) * num_devices * max_seq_length, reason)


def with_repeated_text(recipe: Recipe, passes: float, text_tokens: int, keeps: Collection[str] = ()) -> Recipe:
    """Return the recipe for so many passes over a text: with what keeps its model from learning the text by heart.

    Dropout; and fewer causal rows beside masked ones, as a masked row has other blanks in each pass, and a causal row
    always the same labels. `keeps` names what must not be chosen: "dropout", "masked_share".
    """
    model, objective = recipe.model, recipe.objective
    passes *= (OVERFITTING_TOKENS / max(text_tokens, 1)) ** OVERFITTING_POWER
    if "dropout" not in keeps and passes > OVERFITTING_PASSES.get(type(objective), math.inf):
        rates = {name: max(getattr(model, name), REPEATED_TEXT_DROPOUT) for name in DROPOUT_FIELDS}
        model = replace(model, **rates)
    if "masked_share" not in keeps and isinstance(objective, MaskedNextToken):
        share = max(objective.masked_share, min(1 - CAUSAL_PASSES / max(passes, CAUSAL_PASSES), MAX_MASKED_SHARE))
        objective = replace(objective, masked_share=round(share, 3))
    return replace(recipe, model=model, objective=objective)


def worth_of_repeats(tokens_read: Any, text_tokens: Any, repeats_worth_reading: float = REPEATS_WORTH_READING) -> Any:
    """Return how many tokens of new text are worth as much as reading this text again and again.

    U' = U + U * R* * (1 - exp(-R / R*)) for R repeats of U tokens (Muennighoff et al. 2023, equation 5). Takes numbers
    or arrays.

    >>> [round(float(worth_of_repeats(tokens, 1000))) for tokens in (500, 4000, 10**6)]
    [500, 3726, 16400]
    """
    unique = np.minimum(tokens_read, np.maximum(text_tokens, 1))
    repeats = tokens_read / unique - 1
    return unique * (1 - repeats_worth_reading * np.expm1(-repeats / repeats_worth_reading))


def scale_rate_to_batch(rate: float, model: ModelConfig, batch_tokens: int) -> float:
    """Scale a learning rate from the batch that it was tuned with: rate * sqrt(batch / tuned batch), at most twofold.

    An update of Adam or Muon is as large as the rate, whatever the gradient. So rate ** 2 / batch, the variance of its
    noise, stays the same (the square root rule of Malladi et al. 2022). Default rates were tuned with 4,096 tokens at
    width 128 and with 32,768 from width 512 on (docs/history.md). LSTMs keep their published rates.
    """
    if model.recurrent is not None:
        return rate
    tuned = min(GPU_BATCH_TOKENS, MIN_BATCH_TOKENS * (max(model.dim, 128) / 128) ** 1.5)
    factor = math.sqrt(batch_tokens / tuned)
    return float(f"{rate * min(max(factor, 1 / MAX_RATE_FACTOR), MAX_RATE_FACTOR):.1e}")


def default_weight_decay(optim: str) -> float:
    """Return the weight decay, which is multiplied by the learning rate.

    Muon's updates have a fixed norm, so without decay the weights keep growing, until fine-tuning hardly changes them
    (docs/results.md).
    """
    return 0.2 if optim == "muon" else 0.01


def scale_rate_to_width(peak: float, model: ModelConfig, power: float) -> float:
    """Scale a learning rate from width 128 to the model's width: rate * (128 / width) ** power."""
    return float(f"{peak * (128 / max(model.dim, 128)) ** power:.1e}")


def default_vocab_size(text_bytes: int, kind: str = "") -> int:
    """Return a vocabulary size for a text of this size: 4,096 for a book, 32,768 for a gigabyte.

    Word tokenizers have ULMFiT's 30,000; character tokenizers, which embed any word, are practically unlimited.
    """
    if kind in MAX_WORDS_BY_KIND:
        return MAX_WORDS_BY_KIND[kind]
    for size, max_bytes in ((4096, 4e6), (8192, 64e6), (16384, 512e6)):
        if text_bytes < max_bytes:
            return size
    return 32768
