"""FinetuneRecipe: all settings of a fine-tuning run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

from firth.core.errors import UserError, did_you_mean, quote
from firth.core.files import read_object
from firth.generate.config import GENERATION_BOUNDS
from firth.models import ModelConfig, TaskHead, TokenClassificationHead
from firth.models.config import (
    AuxiliaryLM,
    ClassificationHead,
    EmbeddingHead,
    Extra,
    FeatureEncoderConfig,
    LoRAConfig,
    MultipleChoiceHead,
    RegressionHead,
)
from firth.train.recipe import FreezeSchedule, TrainingConfig, parse_learning_rate, recipe_field

TASK_FILE = "task.json"  # of a fine-tuned checkpoint: its task and labels


@dataclass(frozen=True)
class TaskFile:
    """The keys of task.json that rebuild a task; `tasks` where one model has several."""

    allow_unknown_keys = True

    task: str
    answer: Literal["auto", "head", "text"] = "auto"
    labels: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    texts: int = 1
    unanswerable: bool = False
    threshold: float = 0.0
    max_seq_length: int | None = None
    max_target_length: int | None = None
    prefix: str | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    day: str | None = None
    json_schema: dict[str, Any] | None = None
    head: str | None = None  # in a model with several heads
    chain: tuple[dict[str, Any], ...] = ()  # the fine-tunings that led to the checkpoint
    tasks: dict[str, TaskFile] = field(default_factory=dict)


def read_task_file(checkpoint: Path) -> dict[str, Any]:
    """Return task.json of a fine-tuned checkpoint; empty for any other."""
    file = checkpoint / TASK_FILE
    return read_object(file, TaskFile) if file.is_file() else {}


def check_label_smoothing(label_smoothing: float, loss: str) -> None:
    if label_smoothing and loss not in LABEL_SMOOTHING_LOSSES:
        raise UserError(f"label_smoothing is for {' and '.join(LABEL_SMOOTHING_LOSSES)}, not for {loss}: leave it out.")


def check_mixing_weights(weights: Mapping[str, float], tasks: Collection[str]) -> None:
    """Raise a UserError unless each task has a positive weight."""
    for name, weight in weights.items():
        if name not in tasks:
            raise UserError(f"mix_weights: {quote(name)} is not a task. {did_you_mean(name, tasks)}")
        if not 0 < weight < math.inf:
            raise UserError(
                f"mix_weights: {name}={weight:g} must be above 0. To leave a task out, do not name its files."
            )
    if missing := [name for name in tasks if name not in weights]:
        raise UserError(f"mix_weights has no weight for the task {quote(missing[0])}: add {missing[0]}=1.")


def parse_mix_weights(text: str, option: str) -> dict[str, float]:
    """
    >>> parse_mix_weights("sst2=2,rte=0.5", "--mix-weights")
    {'sst2': 2.0, 'rte': 0.5}
    """
    try:
        return {name.strip(): float(weight) for name, weight in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise UserError(f"{option}: {quote(text)} is not NAME=WEIGHT. Write {option} sst2=2,rte=1.") from None


SIDES = ("train", "dev")
FINETUNE_TASKS = (
    *("classify", "pair", "relation", "word-in-context", "regress", "choice", "tag", "span-qa"),
    *("text-to-text", "extract", "lm", "preference", "reward", "embed"),
)
DISTILLATION_FIELDS = (
    "distill_alpha",
    "distill_temperature",
    "unlabeled",
    "augment",
    "augment_rate",
    "augment_model",
)
LABEL_SMOOTHING_LOSSES = ("dpo", "simpo")  # of preference tuning
# Settings of what another field turns on, by that field and what to add: without it they would change nothing.
DEPENDENT_FIELDS = {
    "lora_rank": ("--lora-rank 8", ("lora_alpha", "lora_dropout", "lora_targets")),
    "augment": ("--augment 20", ("augment_rate", "augment_model")),
    "tasks": ("several tasks, as --train a=FILE --train b=FILE", ("mix_temperature", "mix_cap")),
}
PREFERENCE_FIELDS = ("preference_loss", "beta", "label_smoothing", "simpo_gamma", "orpo_sft")
MIN_SEARCH_SETTINGS = 4
MULTITASK = "multi-task"  # the task of a recipe with several


@dataclass(frozen=True)
class TaskData:
    """One of several tasks that a model learns at once: its files, and the prefix that names it in the input."""

    task: str
    train: str
    dev: str
    prefix: str = ""
    columns: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FinetuneRecipe(TrainingConfig):
    """One task or several at once, one checkpoint, several seeds."""

    checkpoint: str = recipe_field("", "Start from this checkpoint folder, of Firth or from Hugging Face.")
    task: str = recipe_field(
        "classify",
        "classify, pair, regress, choice, tag, relation, span-qa, word-in-context, text-to-text, extract, lm, "
        "preference, reward or embed.",
    )
    train: str = recipe_field("", "Train on this labelled file (.jsonl, .tsv, .csv), or pydocs.")
    dev: str = recipe_field("", "Evaluate on this labelled file, or pydocs.")
    columns: dict[str, str] = recipe_field(None, "Map columns to other names: text=sentence.")  # noqa: RUF009
    encoding: str = recipe_field("utf-8", "Encoding of the labelled files.")
    tasks: dict[str, TaskData] = field(default_factory=dict)  # several tasks, instead of task, train, dev and prefix
    mix_temperature: float = recipe_field(
        1.0,
        "Several tasks: sample each in proportion to its number of examples to this power; 1 is proportional, 0 equal. "
        "T5's T=2 is 0.5.",
    )
    mix_cap: int = recipe_field(2**19, "Several tasks: count at most this many examples of a task (T5's K).")
    mix_weights: dict[str, float] = recipe_field(  # noqa: RUF009
        None,
        "Several tasks: sample them with these weights, instead of by their numbers of examples: sst2=2,rte=1.",
        shown_default="none",
        parse=parse_mix_weights,
    )
    seeds: int = recipe_field(
        3,
        "Train this many times, with another order, head and dropout; report mean and deviation.",
    )
    search: int = recipe_field(
        0,
        "Try this many settings of rate, epochs, batch and layer decay on a split of train; successive halving finds "
        "the best for all seeds. An option that you set is held; warm-up is varied too.",
    )
    shots: int = recipe_field(
        0, "Train on this many examples, sampled per seed and balanced over the labels; 0 uses all."
    )
    from_scratch: bool = recipe_field(False, "Train the same architecture from random weights, as a baseline.")
    baseline: str = recipe_field(
        "", "Compare with this run folder on the same dev file, over seeds and examples. Default: none."
    )
    metric: str = recipe_field(
        "",
        "Select the best step and seed, stop early and compare with --baseline by this dev score: mcc for CoLA, f1 for "
        "MRPC, macro_f1 for imbalanced classes.",
        shown_default="the first score in the table",
    )
    answer: Literal["auto", "head", "text"] = recipe_field(
        "auto",
        "Predict with a task head (head), or let the model generate the answer (text), as T5 was published. auto "
        "chooses text for T5, a head on the encoder for T5Gemma, a head for others.",
    )
    max_target_length: int = recipe_field(
        0,
        "Limit generated answers to this many tokens; longer ones of train are cut.",
        shown_default="32; text-to-text: as long as the longest of train, from 32 to 128",
    )
    json_schema: str = recipe_field(
        "", "Task extract: write objects that this file, a JSON schema, allows. Default: inferred from train."
    )
    prefix: str = recipe_field(
        "", "Prepend this text to every input with generated answers, as T5 does: 'summarize: ', 'sst2 sentence: '."
    )
    num_beams: int = recipe_field(1, "Generate answers with this many beams; 1 decodes greedily.")
    length_penalty: float = recipe_field(
        1.0,
        "Beam score is log-probability / length ** this; above 1 favours longer answers.",
        ge=GENERATION_BOUNDS["length_penalty"][0],
        le=GENERATION_BOUNDS["length_penalty"][1],
    )
    per_device_train_batch_size: int = recipe_field(
        16, "Training examples per device and micro-batch; short ones are packed into one row.", ge=1
    )
    learning_rate: float = recipe_field(
        1e-3,
        "Set the peak learning rate. auto tries three on a split of train; they are around the model's default, each "
        "has a tenth of the steps, and dev is not read.",
        shown_default="auto",
        ge=0,
        parse=parse_learning_rate,
    )
    num_train_epochs: float = recipe_field(
        0.0,
        "Passes over the training examples, if --max-steps is not given.",
        shown_default="3, but at least 200 steps",
    )
    optim: Literal["adamw", "muon", "adafactor", "lamb"] = recipe_field(
        "adamw",
        "Choose the optimizer. Adafactor is T5's, with little memory; Muon orthogonalises each weight matrix's update "
        "and uses AdamW for all other parameters; LAMB scales each update to its matrix's norm.",
        shown_default="adafactor for T5s without LoRA, else adamw",
    )
    weight_decay: float = recipe_field(0.01, "Set the weight decay of matrices; 0 turns it off.", ge=0)
    adam_beta2: float = recipe_field(0.999, "Set beta2 of AdamW and LAMB.", ge=0, lt=1)
    compile: bool | None = recipe_field(
        None,
        "Compile the step (torch.compile) and pad batches to three or four shapes. Default: on for a GPU and at least "
        "10,000 steps per seed.",
    )
    eval_steps: int = recipe_field(
        0, "Evaluate on dev every N steps and at the end; 0: at the end only, or ten times with --early-stopping."
    )
    load_best: bool = recipe_field(
        True, "Keep the weights with the best dev score (the first of equals) instead of the last ones."
    )
    early_stopping: int = recipe_field(0, "Stop after this many evaluations without improvement; 0 trains to the end.")
    class_weights: Literal["none", "balanced"] = recipe_field(
        "none", "Weight the loss of each class by n / (classes * n of the class) (balanced), or equally (none)."
    )
    layer_decay: float = recipe_field(
        1.0,
        "Multiply the learning rate by this factor per layer, from the head down; 1 disables it. ULMFiT: 0.385 "
        "(1/2.6), ELECTRA and DeBERTa: 0.8 to 0.95.",
    )
    lm_loss_weight: float | None = recipe_field(
        None,
        "Add the language-modelling loss with this weight while a decoder's head is trained; 0 disables it.",
        shown_default="0.5 for gpt (GPT-1), 0 for other families",
    )
    freeze: Literal["none", "embeddings", "backbone"] = recipe_field(
        "none",
        "Freeze the embeddings, or the whole backbone (train the head alone: fast, seldom as good); none trains all.",
    )
    unfreeze_every: int = recipe_field(
        0,
        "Train the head first and unfreeze one more layer every N steps, from the top down (ULMFiT); -1: every epoch, "
        "-2: every second epoch; 0 trains all layers from the start.",
    )
    layers: Literal["top", "mix"] = recipe_field(
        "top", "Feed the head the last layer (top), or a learned weighted mean of all layers (mix, as ELMo)."
    )
    pool: Literal["auto", "cls", "mean", "last"] = recipe_field(
        "auto",
        "Pool an encoder's hidden states: the state of [CLS] (cls) or the mean (mean); or take the last one (last) of "
        "a decoder or of T5Gemma's encoder. auto follows the family: mean for ModernBERT and T5Gemma, else [CLS].",
    )
    head_dim: int = recipe_field(
        0,
        "Insert a layer of this many ReLU units before the output of a head with one label per text; 0: as the family.",
        shown_default="0; 512 with --recipe dai-le",
    )
    head_dropout: float | None = recipe_field(
        None, "Dropout probability before the output of such a head.", shown_default="the family's"
    )
    bilstm: int = recipe_field(
        0, "Insert a bidirectional LSTM with this many units per direction before the head; 0 disables it."
    )
    word_dim: int = recipe_field(
        0,
        "Train word vectors of this width for the task, beside the states that biLSTM and head read (ELMo); 0: none.",
        shown_default="0; 50 for ELMo",
    )
    l2_mix: float = recipe_field(
        0.0,
        "With --layers mix: add this times the squared norm of the layer weights to the loss; 0 disables it.",
        shown_default="0; 0.001 for ELMo",
    )
    crf: bool = recipe_field(
        False, "tag: add a CRF, which scores tag transitions and decodes the whole sentence (Viterbi)."
    )
    contrastive_margin: float | None = recipe_field(
        None,
        "embed: subtract this margin from the cosine of each true pair (LaBSE's additive margin); 0 disables it.",
        shown_default="0.3, or the embedder's own",
    )
    contrastive_scale: float | None = recipe_field(
        None,
        "embed: multiply cosines by this scale (inverse temperature) before the softmax over the batch.",
        shown_default="20, or the embedder's own",
    )
    preference_loss: Literal["dpo", "ipo", "hinge", "simpo", "orpo", "kto"] | None = recipe_field(
        None,
        "preference: dpo, ipo and hinge compare with the checkpoint; simpo and orpo do not; kto learns from single "
        "answers that are good or bad.",
        shown_default="dpo; kto where a row has one answer",
    )
    beta: float | None = recipe_field(
        None,
        "preference: strength of the loss; a smaller one lets the model move further from the checkpoint.",
        shown_default="0.1; 2 for simpo",
    )
    label_smoothing: float = recipe_field(
        0.0, "preference: with dpo or simpo, take this share of the pairs to be labelled wrongly; 0: none."
    )
    simpo_gamma: float = recipe_field(1.0, "preference: with simpo, the margin that a chosen answer must have.")
    orpo_sft: Literal["answer", "all"] = recipe_field(
        "answer",
        "preference: with orpo, the supervised loss covers the chosen answer (answer), or its prompt too (all), as "
        "TRL's does.",
    )
    center_rewards_coefficient: float = recipe_field(
        0.0,
        "reward: add this times the squared sum of a pair's rewards to the loss, which keeps rewards around 0; 0.01 is "
        "usual, 0 disables it.",
    )
    lora_rank: int = recipe_field(
        0,
        "LoRA: freeze the weights, train an update of this rank for each. 8 is usual, with a ten times higher rate; 0 "
        "trains the weights.",
    )
    lora_alpha: float = recipe_field(16.0, "LoRA: scale the update by alpha / rank.")
    lora_dropout: float = recipe_field(0.0, "LoRA: dropout probability on the input of the update; 0 disables it.")
    lora_targets: Literal["attention", "all"] = recipe_field(
        "attention", "LoRA: adapt the attention matrices, or all (attention and MLP)."
    )
    teacher: str = recipe_field(
        "",
        "Distill this fine-tuned checkpoint: learn its predictions beside the labels. Its tokenizer may differ.",
        shown_default="none",
    )
    distill_alpha: float = recipe_field(
        0.5, "With --teacher: share of its predictions in the loss; 1 learns from them alone, 0 from the labels alone."
    )
    distill_temperature: float = recipe_field(
        2.0,
        "With --teacher: divide the logits of both by this before the softmax; above 1, small ones count more.",
    )
    unlabeled: str = recipe_field(
        "",
        "With --teacher: learn its predictions on this file too. Format as --train; labels are not read.",
        shown_default="none",
    )
    augment: int = recipe_field(
        0,
        "With --teacher: learn its predictions on this many copies of each example, with words replaced by the "
        "predictions of a masked language model (TinyBERT: 20); 0: none.",
    )
    augment_rate: float = recipe_field(0.4, "With --augment: replace each word of a copy with this probability.")
    augment_model: str = recipe_field(
        "", "With --augment: the masked language model.", shown_default="the checkpoint to fine-tune"
    )
    day: str = recipe_field(
        "", "lm: date (2026-01-31) for chat templates that print the current date. Default: the day the run started."
    )
    # Recorded by the run: checksums of its examples, and per seed the batches skipped by rewinds, as (step, number of
    # steps skipped from there).
    # Rates to try before the first seed, with `learning_rate` as the default among them; empty once one is chosen.
    rate_candidates: tuple[float, ...] = ()
    search_fields: tuple[str, ...] = ()  # what `search` varies; empty once a setting is chosen
    train_checksum: str = ""
    dev_checksum: str = ""
    skips: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("columns", "mix_weights"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, {})
        if self.tasks:  # what messages and reports name
            files = {side: ", ".join(f"{n}={getattr(t, side)}" for n, t in self.tasks.items()) for side in SIDES}
            for name, value in {"task": MULTITASK, **files}.items():
                object.__setattr__(self, name, value)

    def task_recipes(self) -> dict[str, FinetuneRecipe]:
        """Return the recipe of each task by its name; of a single task, this recipe."""
        if not self.tasks:
            return {"": self}
        return {
            name: replace(self, tasks={}, **{**vars(data), "columns": data.columns or self.columns})
            for name, data in self.tasks.items()
        }

    @property
    def label_files(self) -> list[str]:
        return [file for part in self.task_recipes().values() for file in (part.train, part.dev)]

    def check(self) -> None:
        # 0: the default is resolved later
        TrainingConfig.check(replace(self, num_train_epochs=self.num_train_epochs or 1.0))
        minimum = {
            "seeds": 1,
            "search": 0,
            "shots": 0,
            "max_target_length": 0,
            "num_beams": 1,
            "early_stopping": 0,
            "lora_rank": 0,
        }
        minimum |= {"bilstm": 0, "word_dim": 0, "l2_mix": 0, "head_dim": 0, "mix_cap": 1}
        for name, smallest in minimum.items():
            if getattr(self, name) < smallest:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least {smallest}.")
        if self.max_target_length == 1:
            raise UserError("max_target_length is 1; it must be at least 2: a token and the end.")
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"layer_decay is {self.layer_decay}; it must be above 0 and at most 1.")
        if self.head_dropout is not None and not 0 <= self.head_dropout < 1:
            raise UserError(f"head_dropout is {self.head_dropout}; it must be at least 0 and below 1.")
        if not 0 <= self.lora_dropout < 1:
            raise UserError(f"lora_dropout is {self.lora_dropout}; it must be at least 0 and below 1.")
        if self.lm_loss_weight is not None and self.lm_loss_weight < 0:
            raise UserError(f"lm_loss_weight is {self.lm_loss_weight}; it must be at least 0.")
        if not 0 <= self.mix_temperature <= 1:
            raise UserError(f"mix_temperature is {self.mix_temperature:g}; it must be from 0 (equal) to 1 (by size).")
        if self.mix_weights and not self.tasks:
            raise UserError("mix_weights are for several tasks: --train a=FILE --train b=FILE.")
        if self.mix_weights:
            check_mixing_weights(self.mix_weights, self.tasks)
        if self.lora_alpha <= 0:
            raise UserError(f"lora_alpha is {self.lora_alpha}; it must be above 0.")
        if self.day and not is_iso_date(self.day):
            raise UserError(f"day is {quote(self.day)}; it must be a day such as 2026-01-31.")
        if self.contrastive_margin is not None and not 0 <= self.contrastive_margin <= 2:
            raise UserError(f"contrastive_margin is {self.contrastive_margin}; it must be from 0 to 2, as cosines are.")
        if self.contrastive_scale is not None and self.contrastive_scale <= 0:
            raise UserError(f"contrastive_scale is {self.contrastive_scale}; it must be above 0.")
        self.check_combinations()

    def check_combinations(self) -> None:
        """Refuse combinations that exclude each other."""
        if 0 < self.search < MIN_SEARCH_SETTINGS:
            raise UserError(f"search is {self.search}; it must be at least {MIN_SEARCH_SETTINGS}, or 0 for no search.")
        if self.search and self.unfreeze_every:
            raise UserError(
                "search and unfreeze_every exclude each other: the short trials of a search would train the head alone."
            )
        if self.early_stopping and not self.load_best:
            raise UserError("early_stopping returns to the best evaluation: it needs load_best.")
        for needed, (remedy, names) in DEPENDENT_FIELDS.items():
            given = [name for name in names if getattr(self, name) != getattr(FinetuneRecipe, name)]
            if given and not getattr(self, needed):
                raise UserError(f"{given[0]} changes nothing here: add {remedy}, or leave it out.")
        if self.json_schema and "extract" not in (self.task, *(part.task for part in self.tasks.values())):
            raise UserError(f"json_schema is for the task extract, not for {self.task}.")
        if self.lora_rank and self.freeze != "none":
            raise UserError(f"LoRA freezes all weights itself: remove freeze={self.freeze}.")
        if self.crf and self.task != "tag":
            raise UserError(f"crf is for the task tag, not for {self.task}.")
        for name in ("contrastive_margin", "contrastive_scale"):
            if getattr(self, name) is not None and self.task != "embed":
                raise UserError(f"{name} is for the task embed, not for {self.task}.")
        self.check_distillation()
        if self.task == "preference":
            self.check_preference()
        else:
            for name in PREFERENCE_FIELDS:
                if getattr(self, name) != getattr(FinetuneRecipe, name):
                    raise UserError(f"{name} is for the task preference, not for {self.task}.")
        if self.center_rewards_coefficient and self.task != "reward":
            raise UserError(f"center_rewards_coefficient is for the task reward, not for {self.task}.")
        if not 0 <= self.center_rewards_coefficient < math.inf:
            raise UserError(f"center_rewards_coefficient is {self.center_rewards_coefficient}; it must be at least 0.")
        if self.task in ("preference", "reward") and self.engine.weights == "bf16":
            raise UserError(f"engine.weights=bf16 has no loss for the task {self.task}: leave it out, and take --bf16.")
        if self.task == "embed" and self.per_device_train_batch_size < 2:
            raise UserError("embed contrasts the texts of a batch: set per_device_train_batch_size to 2 or more.")
        if self.unfreeze_every and self.freeze == "backbone":
            raise UserError("freeze=backbone trains the head alone, unfreeze_every also the layers: choose one.")

    def check_distillation(self) -> None:
        for name in DISTILLATION_FIELDS:
            if not self.teacher and getattr(self, name) != getattr(FinetuneRecipe, name):
                raise UserError(f"{name} needs a teacher: add --teacher FINETUNED.")
        if self.teacher and self.tasks:
            raise UserError("teacher is for one task, and this run has several.")
        if not 0 <= self.distill_alpha <= 1:
            raise UserError(f"distill_alpha is {self.distill_alpha:g}; it must be from 0 (labels) to 1 (teacher).")
        if not 0 < self.distill_temperature < math.inf:
            raise UserError(f"distill_temperature is {self.distill_temperature:g}; it must be above 0.")
        if self.augment < 0 or not 0 < self.augment_rate <= 1:
            raise UserError("augment must be at least 0, and augment_rate above 0 and at most 1.")
        if self.distill_alpha == 0 and (self.unlabeled or self.augment):
            raise UserError("distill_alpha=0 learns from labels alone: remove unlabeled and augment, which have none.")

    def check_preference(self) -> None:
        if self.from_scratch:
            raise UserError("The task preference compares with the checkpoint: remove from_scratch.")
        if self.beta is not None and not 0 < self.beta < math.inf:
            raise UserError(f"beta is {self.beta}; it must be above 0.")
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(f"label_smoothing is {self.label_smoothing}; it must be at least 0 and below 0.5.")
        if self.preference_loss is not None:
            check_label_smoothing(self.label_smoothing, self.preference_loss)
        if self.orpo_sft != FinetuneRecipe.orpo_sft and self.preference_loss != "orpo":
            raise UserError(f"orpo_sft={self.orpo_sft} is for the loss orpo: add --preference-loss orpo.")
        if self.simpo_gamma < 0:
            raise UserError(f"simpo_gamma is {self.simpo_gamma}; it must be at least 0.")
        if self.simpo_gamma != FinetuneRecipe.simpo_gamma and self.preference_loss != "simpo":
            raise UserError(f"simpo_gamma={self.simpo_gamma:g} is for the loss simpo: add --preference-loss simpo.")

    def apply_head_options(self, config: ModelConfig) -> ModelConfig:
        """Return the config with the losses, CRF, pooling, layer mix and biLSTM that the recipe says."""
        config = replace(config, extras=self.weighted_lm_loss(config))
        if isinstance(config.head, EmbeddingHead):
            margin = config.head.margin if self.contrastive_margin is None else self.contrastive_margin
            scale = config.head.scale if self.contrastive_scale is None else self.contrastive_scale
            config = replace(config, head=replace(config.head, margin=margin, scale=scale))
        if self.crf and isinstance(config.head, TokenClassificationHead):
            config = replace(config, head=replace(config.head, crf=True))
        if self.pool != "auto" or self.head_dim or self.head_dropout is not None:
            config = replace(config, head=self.pooled_head(config))
        options = {"layers": self.layers, "bilstm": self.bilstm, "word_dim": self.word_dim}
        given = [f"{name}={value}" for name, value in options.items() if value not in ("top", 0)]
        if not given:
            return config
        name = given[0]
        features = FeatureEncoderConfig(
            mix_layers=self.layers == "mix",
            bilstm_hidden_size=self.bilstm,
            word_dim=self.word_dim,
            l2_mix=self.l2_mix if self.layers == "mix" else 0.0,
        )
        if config.get_extra("auxiliary") is not None:
            raise UserError(f"{name} and the auxiliary LM loss exclude each other: add --lm-loss-weight 0.")
        if config.architecture == "encoder-decoder" or not isinstance(config.head, TaskHead) or config.extras:
            raise UserError(
                f"{name} needs an encoder with a task head: {config.family} does not support it for this task."
            )
        return replace(config, extras=(*config.extras, features))

    def weighted_lm_loss(self, config: ModelConfig) -> tuple[Extra, ...]:
        """Return the extras with the recipe's weight of the auxiliary LM loss, without the loss where it is 0.

        GPT-1 trains L2 + lambda * L1: the loss of the task, and language modelling with lambda = 0.5 (Radford et al.
        2018, equation 5 and section 4.1; `lm_coef` in its code). Later decoders were published without it.
        """
        auxiliary = config.get_extra("auxiliary")
        if not isinstance(auxiliary, AuxiliaryLM):
            if self.lm_loss_weight:
                raise UserError(
                    f"lm_loss_weight={self.lm_loss_weight} needs a decoder with a head for one label per text: "
                    f"{config.family} does not support it for the task {self.task}. Leave it out."
                )
            return config.extras
        default = auxiliary.weight if config.family == "gpt" else 0.0
        weight = default if self.lm_loss_weight is None else self.lm_loss_weight
        return (replace(auxiliary, weight=weight),) if weight else ()

    def pooled_head(self, config: ModelConfig) -> ClassificationHead | RegressionHead | MultipleChoiceHead:
        """Return the head with the recipe's pooling, hidden layer and dropout."""
        head, options = config.head, {"pool": self.pool, "head_dim": self.head_dim, "head_dropout": self.head_dropout}
        defaults = {"pool": "auto", "head_dim": 0, "head_dropout": None}
        given = next(f"{name}={value}" for name, value in options.items() if value != defaults[name])
        marked = isinstance(head, ClassificationHead) and head.num_marked > 1
        known = {"encoder": ("auto", "mean", "cls"), "decoder": ("auto", "last")}.get(config.architecture, ("auto",))
        if (
            self.pool not in (("auto", "mean", "last") if config.head_reads_encoder else known)
            or marked
            or not isinstance(head, ClassificationHead | RegressionHead | MultipleChoiceHead)
        ):
            model = {"auto": "a head", "last": "a decoder"}.get(self.pool, "an encoder")
            raise UserError(f"{given} needs {model} and a task with one label per text.")
        if self.pool in ("mean", "last"):
            head = replace(head, pool=self.pool)
        elif self.pool == "cls":
            head = replace(head, pool="last" if head.pool == "last" else "first")  # XLNet's [CLS] is the last token
        if self.head_dim:
            head = replace(head, has_pooler=True, pooler_dim=self.head_dim, activation="relu", has_norm=False)
        return head if self.head_dropout is None else replace(head, dropout=self.head_dropout)

    @property
    def lora(self) -> LoRAConfig | None:
        if not self.lora_rank:
            return None
        return LoRAConfig(self.lora_rank, self.lora_alpha, self.lora_dropout, self.lora_targets)

    def freeze_schedule(self, num_examples: int) -> FreezeSchedule:
        """Return which parameters are trained, from which step and at which rate, for epochs of `num_examples`."""
        every = self.unfreeze_every
        if every < 0:
            every = math.ceil(-every * num_examples / self.global_batch_size)
        return FreezeSchedule(self.layer_decay, self.freeze, every)


def is_iso_date(text: str) -> bool:
    """
    >>> is_iso_date("2026-01-31"), is_iso_date("31 January")
    (True, False)
    """
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True
