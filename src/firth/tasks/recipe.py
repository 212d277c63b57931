"""FinetuneRecipe: everything a fine-tuning run depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Literal

from firth.errors import UserError
from firth.models import ModelConfig, Tags, TaskHead
from firth.models.config import Choices, Classes, Features, Score
from firth.models.lora import LoRA
from firth.train.recipe import Training, option
from firth.train.unfreeze import Pace


@dataclass(frozen=True, kw_only=True)
class FinetuneRecipe(Training):
    """One task, one checkpoint, several seeds."""

    checkpoint: str = option("", "Checkpoint folder to start from, ours or a published one.")
    task: str = option(
        "classify",
        "classify, pair, regress, choice, tag, relation, span-qa, word-in-context, text-to-text, lm or embed.",
    )
    train: str = option("", "Labelled file to learn from (.jsonl, .tsv, .csv), or pydocs.")
    dev: str = option("", "Labelled file to score on, or pydocs.")
    columns: dict[str, str] = option(None, "Other names of columns.")  # noqa: RUF009
    encoding: str = option("utf-8", "Encoding of the labelled files.")
    seeds: int = option(
        3,
        "How many times to train, each with its own order, head and dropout; the result is the mean and the deviation.",
    )
    shots: int = option(0, "Learn from so many examples only, drawn by each seed, evenly over the labels; 0 takes all.")
    from_scratch: bool = option(False, "Start the same model from random weights: the untrained twin.")
    baseline: str = option(
        "", "Folder of another run on the same dev file: is the difference to it more than chance (paired bootstrap)?"
    )
    metric: str = option(
        "",
        "The score on dev that decides which step and which seed are best, when to stop early, which seeds learned "
        "nothing and what is compared with --baseline: mcc for CoLA, f1 for MRPC, macro_f1 for uneven classes.",
        shown="the first in the table of scores",
    )
    answer: Literal["head", "words"] = option(
        "head", "head puts a new layer on the model; words lets it write the answer, as T5 always does."
    )
    max_target_length: int = option(32, "Tokens of an answer that is written.")
    prefix: str = option(
        "", "What stands before every text that is answered in words, as in T5: 'summarize: ', 'sst2 sentence: '."
    )
    num_beams: int = option(1, "Answers that are written are searched for with so many beams.")
    length_penalty: float = option(1.0, "Beams: log-probability / length ** this; above 1 favours longer answers.")
    per_device_train_batch_size: int = option(16, "Examples that are computed at once; several share a row.")
    num_train_epochs: float = option(
        0.0,
        "How often the examples are read, when --max-steps is not given.",
        shown="3, and at least 200 steps, as small data need many passes",
    )
    adam_beta2: float = option(0.999, "AdamW's second decay rate.")
    compile: bool | None = option(
        None,
        "Compile the step (torch.compile), with batches that are padded to three or four shapes; by itself on a GPU "
        "where a seed has 10,000 steps or more, which pay for it.",
    )
    eval_steps: int = option(
        0, "Score on dev every so many steps; 0 at the end only, with --early-stopping ten times. Always at the end."
    )
    load_best: bool = option(
        True, "Of several scores on dev the best one's weights are the result (the first of equals), not the last's."
    )
    early_stopping: int = option(
        0, "Stop after so many scores in a row that are no better than the best; 0 trains to the end."
    )
    class_weights: Literal["none", "balanced"] = option(
        "none", "balanced lets a rare class count as much as a common one: each answer n / (classes * n of its class)."
    )
    layer_decay: float = option(
        1.0,
        "Each layer learns so many times as fast as the one above it, the head at the full rate: lower layers know "
        "what is general. ULMFiT has 0.385 (1/2.6), ELECTRA and DeBERTa 0.8 to 0.95.",
    )
    freeze: Literal["none", "embeddings", "body"] = option(
        "none", "What stays as it is: body trains the head alone, on features (fast, and seldom as good)."
    )
    unfreeze_every: int = option(
        0,
        "Begin with the head alone, and let one more layer learn every so many steps, from the top down (ULMFiT); -1 "
        "every epoch, -2 every second epoch; 0 trains all from the start.",
    )
    layers: Literal["top", "mix"] = option(
        "top", "What the head reads: the last layer, or a mean of all layers with learned weights (ELMo)."
    )
    pool: Literal["auto", "cls", "mean"] = option(
        "auto",
        "What an encoder's answer about a whole text is read from: the state of [CLS], or the mean of all states; auto "
        "is as its family was published: ModernBERT by the mean, others by [CLS].",
    )
    bilstm: int = option(0, "Put an LSTM of so many units each way between the body and the head; 0 puts none.")
    crf: bool = option(False, "tag: learn which tag may follow which too, and choose those of a sentence together.")
    lora_rank: int = option(
        0,
        "LoRA: leave the weights as they are, and learn a product of two matrices of this rank beside each, and the "
        "head; 8 is usual, with a rate ten times as high. 0 trains the weights themselves.",
    )
    lora_alpha: float = option(16.0, "LoRA: what is learned counts alpha / rank times.")
    lora_dropout: float = option(0.0, "LoRA: dropout on what the two matrices read.")
    lora_targets: Literal["attention", "all"] = option(
        "attention", "LoRA: beside the matrices of attention, or beside those of the MLP too."
    )
    day: str = option(
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
        Training.check(replace(self, num_train_epochs=self.num_train_epochs or 1.0))  # 0 leaves it open
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
        if self.day and not is_day(self.day):
            raise UserError(f"day is {self.day!r}, and must be a day such as 2026-01-31.")
        self.check_together()

    def check_together(self) -> None:
        """What contradicts itself."""
        if self.early_stopping and not self.load_best:
            raise UserError("early_stopping waits for a better score and goes back to the best: it needs load_best.")
        if self.lora_rank and self.freeze != "none":
            raise UserError(f"LoRA freezes all weights itself: leave freeze={self.freeze} out.")
        if self.crf and self.task != "tag":
            raise UserError(f"crf is for the task tag, not for {self.task}.")
        if self.task == "embed" and self.per_device_train_batch_size < 2:
            raise UserError("The texts of a batch are told apart from each other: take a batch of two or more.")
        if self.unfreeze_every and self.freeze == "body":
            raise UserError("freeze=body trains the head alone, and unfreeze_every does not: choose one.")

    def on_top(self, model: ModelConfig) -> ModelConfig:
        """The model with what is put between its body and its head, and with a chain of tags."""
        if self.crf and isinstance(model.head, Tags):
            model = replace(model, head=replace(model.head, crf=True))
        if self.pool != "auto":
            model = replace(model, head=self.pooled(model))
        if self.layers == "top" and not self.bilstm:
            return model
        features = Features(mix=self.layers == "mix", bilstm=self.bilstm)
        if model.shape == "encoder-decoder" or not isinstance(model.head, TaskHead) or model.extras:
            name = "layers=mix" if features.mix else f"bilstm={self.bilstm}"
            raise UserError(f"{name} stands between an encoder and the head of its task, and not in {model.family}.")
        return replace(model, extras=(*model.extras, features))

    def pooled(self, model: ModelConfig) -> Classes | Score | Choices:
        """The model's head, which reads what the recipe says of a text."""
        head = model.head
        marked = isinstance(head, Classes) and head.marks > 1
        if model.shape != "encoder" or marked or not isinstance(head, Classes | Score | Choices):
            raise UserError(f"pool={self.pool} is for one answer about a whole text of an encoder, and not for this.")
        cls: Literal["first", "last"] = "last" if head.pool == "last" else "first"  # XLNet's [CLS] stands last
        return replace(head, pool="mean" if self.pool == "mean" else cls)

    @property
    def lora(self) -> LoRA | None:
        if not self.lora_rank:
            return None
        return LoRA(self.lora_rank, self.lora_alpha, self.lora_dropout, self.lora_targets)

    def pace(self, num_examples: int) -> Pace:
        """Which parts learn, from when on and how fast, where an epoch has so many examples."""
        every = self.unfreeze_every
        if every < 0:
            every = math.ceil(-every * num_examples / self.global_batch)
        return Pace(self.layer_decay, self.freeze, every)


def is_day(text: str) -> bool:
    """
    >>> is_day("2026-01-31"), is_day("31 January")
    (True, False)
    """
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True
