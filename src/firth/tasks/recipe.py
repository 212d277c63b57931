"""FinetuneRecipe: everything a fine-tuning run depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Literal

from firth.core.errors import UserError
from firth.models import ModelConfig, TaskHead, TokenClassificationHead
from firth.models.config import ClassificationHead, FeatureEncoderConfig, MultipleChoiceHead, RegressionHead
from firth.models.lora import LoRAConfig
from firth.train.recipe import TrainingConfig, recipe_field
from firth.train.unfreeze import FreezeSchedule


@dataclass(frozen=True, kw_only=True)
class FinetuneRecipe(TrainingConfig):
    """One task, one checkpoint, several seeds."""

    checkpoint: str = recipe_field("", "Checkpoint folder to start from, ours or a published one.")
    task: str = recipe_field(
        "classify",
        "classify, pair, regress, choice, tag, relation, span-qa, word-in-context, text-to-text, lm or embed.",
    )
    train: str = recipe_field("", "Labelled file to learn from (.jsonl, .tsv, .csv), or pydocs.")
    dev: str = recipe_field("", "Labelled file to score on, or pydocs.")
    columns: dict[str, str] = recipe_field(None, "Other names of columns.")  # noqa: RUF009
    encoding: str = recipe_field("utf-8", "Encoding of the labelled files.")
    seeds: int = recipe_field(
        3,
        "How many times to train, each with its own order, head and dropout; the result is the mean and the deviation.",
    )
    shots: int = recipe_field(
        0, "Learn from so many examples only, drawn by each seed, evenly over the labels; 0 takes all."
    )
    from_scratch: bool = recipe_field(False, "Start the same model from random weights: the untrained twin.")
    baseline: str = recipe_field(
        "", "Folder of another run on the same dev file: is the difference to it more than chance (paired bootstrap)?"
    )
    metric: str = recipe_field(
        "",
        "The score on dev that decides which step and which seed are best, when to stop early, which seeds learned "
        "nothing and what is compared with --baseline: mcc for CoLA, f1 for MRPC, macro_f1 for uneven classes.",
        shown_default="the first in the table of scores",
    )
    answer: Literal["head", "words"] = recipe_field(
        "head", "head puts a new layer on the model; words lets it write the answer, as T5 always does."
    )
    max_target_length: int = recipe_field(32, "Tokens of an answer that is written.")
    prefix: str = recipe_field(
        "", "What stands before every text that is answered in words, as in T5: 'summarize: ', 'sst2 sentence: '."
    )
    num_beams: int = recipe_field(1, "Answers that are written are searched for with so many beams.")
    length_penalty: float = recipe_field(
        1.0, "Beams: log-probability / length ** this; above 1 favours longer answers."
    )
    per_device_train_batch_size: int = recipe_field(16, "Examples that are computed at once; several share a row.")
    num_train_epochs: float = recipe_field(
        0.0,
        "How often the examples are read, when --max-steps is not given.",
        shown_default="3, and at least 200 steps, as small data need many passes",
    )
    adam_beta2: float = recipe_field(0.999, "AdamW's second decay rate.")
    compile: bool | None = recipe_field(
        None,
        "Compile the step (torch.compile), with batches that are padded to three or four shapes; by itself on a GPU "
        "where a seed has 10,000 steps or more, which pay for it.",
    )
    eval_steps: int = recipe_field(
        0, "Score on dev every so many steps; 0 at the end only, with --early-stopping ten times. Always at the end."
    )
    load_best: bool = recipe_field(
        True, "Of several scores on dev the best one's weights are the result (the first of equals), not the last's."
    )
    early_stopping: int = recipe_field(
        0, "Stop after so many scores in a row that are no better than the best; 0 trains to the end."
    )
    class_weights: Literal["none", "balanced"] = recipe_field(
        "none", "balanced lets a rare class count as much as a common one: each answer n / (classes * n of its class)."
    )
    layer_decay: float = recipe_field(
        1.0,
        "Each layer learns so many times as fast as the one above it, the head at the full rate: lower layers know "
        "what is general. ULMFiT has 0.385 (1/2.6), ELECTRA and DeBERTa 0.8 to 0.95.",
    )
    freeze: Literal["none", "embeddings", "backbone"] = recipe_field(
        "none", "What stays as it is: body trains the head alone, on features (fast, and seldom as good)."
    )
    unfreeze_every: int = recipe_field(
        0,
        "Begin with the head alone, and let one more layer learn every so many steps, from the top down (ULMFiT); -1 "
        "every epoch, -2 every second epoch; 0 trains all from the start.",
    )
    layers: Literal["top", "mix"] = recipe_field(
        "top", "What the head reads: the last layer, or a mean of all layers with learned weights (ELMo)."
    )
    pool: Literal["auto", "cls", "mean"] = recipe_field(
        "auto",
        "What an encoder's answer about a whole text is read from: the state of [CLS], or the mean of all states; auto "
        "is as its family was published: ModernBERT by the mean, others by [CLS].",
    )
    bilstm: int = recipe_field(0, "Put an LSTM of so many units each way between the body and the head; 0 puts none.")
    crf: bool = recipe_field(
        False, "tag: learn which tag may follow which too, and choose those of a sentence together."
    )
    lora_rank: int = recipe_field(
        0,
        "LoRA: leave the weights as they are, and learn a product of two matrices of this rank beside each, and the "
        "head; 8 is usual, with a rate ten times as high. 0 trains the weights themselves.",
    )
    lora_alpha: float = recipe_field(16.0, "LoRA: what is learned counts alpha / rank times.")
    lora_dropout: float = recipe_field(0.0, "LoRA: dropout on what the two matrices read.")
    lora_targets: Literal["attention", "all"] = recipe_field(
        "attention", "LoRA: beside the matrices of attention, or beside those of the MLP too."
    )
    day: str = recipe_field(
        "", "lm: the day (2026-01-31) that a chat template is told which asks for it; that on which the run began."
    )
    # What a run notes of itself: the examples that it began with, and for each seed those that it left out after a
    # rewind, as (step, how many steps of them are passed over from there on).
    train_checksum: str = ""
    dev_checksum: str = ""
    skips: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.columns is None:
            object.__setattr__(self, "columns", {})

    def check(self) -> None:
        TrainingConfig.check(replace(self, num_train_epochs=self.num_train_epochs or 1.0))  # 0 leaves it open
        least = {"seeds": 1, "shots": 0, "max_target_length": 2, "num_beams": 1, "early_stopping": 0, "lora_rank": 0}
        least |= {"bilstm": 0}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise UserError(f"{name} is {getattr(self, name)}, and must be at least {smallest}.")
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"layer_decay is {self.layer_decay}, and must be more than 0 and at most 1.")
        if not 0 <= self.lora_dropout < 1:
            raise UserError(f"lora_dropout is {self.lora_dropout}, and must be at least 0 and less than 1.")
        if self.lora_alpha <= 0:
            raise UserError(f"lora_alpha is {self.lora_alpha}, and must be more than 0.")
        if self.day and not is_iso_date(self.day):
            raise UserError(f"day is {self.day!r}, and must be a day such as 2026-01-31.")
        self.check_combinations()

    def check_combinations(self) -> None:
        """What contradicts itself."""
        if self.early_stopping and not self.load_best:
            raise UserError("early_stopping waits for a better score and goes back to the best: it needs load_best.")
        if self.lora_rank and self.freeze != "none":
            raise UserError(f"LoRA freezes all weights itself: leave freeze={self.freeze} out.")
        if self.crf and self.task != "tag":
            raise UserError(f"crf is for the task tag, not for {self.task}.")
        if self.task == "embed" and self.per_device_train_batch_size < 2:
            raise UserError("The texts of a batch are told apart from each other: take a batch of two or more.")
        if self.unfreeze_every and self.freeze == "backbone":
            raise UserError("freeze=backbone trains the head alone, and unfreeze_every does not: choose one.")

    def apply_head_options(self, config: ModelConfig) -> ModelConfig:
        """The model with what is put between its body and its head, and with a chain of tags."""
        if self.crf and isinstance(config.head, TokenClassificationHead):
            config = replace(config, head=replace(config.head, crf=True))
        if self.pool != "auto":
            config = replace(config, head=self.pooled_head(config))
        if self.layers == "top" and not self.bilstm:
            return config
        features = FeatureEncoderConfig(mix_layers=self.layers == "mix", bilstm_hidden_size=self.bilstm)
        if config.architecture == "encoder-decoder" or not isinstance(config.head, TaskHead) or config.extras:
            name = "layers=mix" if features.mix_layers else f"bilstm={self.bilstm}"
            raise UserError(f"{name} stands between an encoder and the head of its task, and not in {config.family}.")
        return replace(config, extras=(*config.extras, features))

    def pooled_head(self, config: ModelConfig) -> ClassificationHead | RegressionHead | MultipleChoiceHead:
        """The model's head, which reads what the recipe says of a text."""
        head = config.head
        marked = isinstance(head, ClassificationHead) and head.num_marked > 1
        if (
            config.architecture != "encoder"
            or marked
            or not isinstance(head, ClassificationHead | RegressionHead | MultipleChoiceHead)
        ):
            raise UserError(f"pool={self.pool} is for one answer about a whole text of an encoder, and not for this.")
        cls: Literal["first", "last"] = "last" if head.pool == "last" else "first"  # XLNet's [CLS] stands last
        return replace(head, pool="mean" if self.pool == "mean" else cls)

    @property
    def lora(self) -> LoRAConfig | None:
        if not self.lora_rank:
            return None
        return LoRAConfig(self.lora_rank, self.lora_alpha, self.lora_dropout, self.lora_targets)

    def freeze_schedule(self, num_examples: int) -> FreezeSchedule:
        """Which parts learn, from when on and how fast, where an epoch has so many examples."""
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
