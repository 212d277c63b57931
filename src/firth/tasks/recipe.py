"""FinetuneRecipe: everything a fine-tuning run depends on."""

from __future__ import annotations

from dataclasses import dataclass

from firth.errors import UserError
from firth.train.recipe import Training, option


@dataclass(frozen=True, kw_only=True)
class FinetuneRecipe(Training):
    """One task, one checkpoint, several seeds."""

    checkpoint: str = option("", "Checkpoint folder to start from, ours or a published one.")
    task: str = option("classify", "classify or text-to-text.")
    train: str = option("", "Labelled file to learn from (.jsonl, .tsv, .csv), or pydocs.")
    dev: str = option("", "Labelled file to score on, or pydocs.")
    columns: dict[str, str] = option(None, "Other names of columns.")  # noqa: RUF009
    encoding: str = option("utf-8", "Encoding of the labelled files.")
    seeds: int = option(3, "How many times to train; the result is the mean and the deviation.")
    shots: int = option(0, "Learn from so many examples only, drawn evenly over the labels by each seed; 0 takes all.")
    from_scratch: bool = option(False, "Start the same model from random weights: the untrained twin.")
    max_target_length: int = option(32, "Tokens of an answer (text-to-text).")
    per_device_train_batch_size: int = option(16, "Examples that are computed at once.")
    num_train_epochs: float = option(
        3.0, "How often the examples are read, when --max-steps is not given; at least 200 steps are taken."
    )
    adam_beta2: float = option(0.999, "AdamW's second decay rate.")

    def __post_init__(self) -> None:
        if self.columns is None:
            object.__setattr__(self, "columns", {})

    def check(self) -> None:
        super().check()
        if self.seeds < 1:
            raise UserError(f"seeds is {self.seeds}, and must be at least 1.")
        if self.shots < 0:
            raise UserError(f"shots is {self.shots}, and must not be negative.")
        if self.max_target_length < 2:
            raise UserError(f"max_target_length is {self.max_target_length}, and must be at least 2.")
