"""Best-of-n sampling: draw several answers to a prompt, and keep the one that a reward model scores highest.

It needs no training of the language model. The expected reward of the best of n rises with n; the KL divergence from
the model's own distribution is log n - (n - 1) / n nats (Stiennon et al. 2020, appendix G.3). The reward model reads a
prompt as a user's message and a sample as the answer, with its own tokenizer and chat template, so that it may be of
another family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from firth.core.console import progress
from firth.core.errors import UserError
from firth.generate.config import GenerationConfig
from firth.models import Model, load_model, read_config
from firth.models.config import RegressionHead
from firth.tasks.recipe import read_task_file
from firth.tasks.registry import make_task
from firth.tasks.reward import RewardTask
from firth.text import Example
from firth.train import TrainingConfig, choose_compute

DEFAULT_TEMPERATURE = 1.0  # samples of the model's own distribution
REWARD_BATCH_SIZE = 32  # answers


class RewardModel:
    """A checkpoint of `firth finetune --task reward`, or a published one with one label and a chat template."""

    def __init__(self, checkpoint: str | Path) -> None:
        self.name, facts = str(checkpoint), check_reward_model(checkpoint)
        model: Model = load_model(checkpoint)
        if model.tokenizer is None:
            raise UserError(f"{checkpoint} has no tokenizer.")
        task = make_task(RewardTask.name, facts, model.tokenizer, model.config)
        assert isinstance(task, RewardTask)
        self.task, self.compute = task, choose_compute(TrainingConfig(compile=False))
        self.model = model.to(self.compute.device)

    def score(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
        """Return the reward of each answer to the prompt beside it."""
        examples = [
            Example(i, ("user", prompt), references=(answer,))
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        rewards: list[float] = []
        with progress("scoring", "answers", len(examples)) as shown:
            for first in range(0, len(examples), REWARD_BATCH_SIZE):
                items = self.task.encode(examples[first : first + REWARD_BATCH_SIZE])
                found = self.task.predict(self.model, items, self.compute, REWARD_BATCH_SIZE)
                rewards += [p.prediction[0] for p in found]
                shown.advance(len(items))
        return rewards


def check_reward_model(checkpoint: str | Path) -> dict[str, Any]:
    """Return the task metadata of a reward model; a UserError for any other checkpoint."""
    how = "`firth finetune CHECKPOINT --task reward` makes one."
    facts, config = read_task_file(Path(checkpoint)), read_config(checkpoint)
    if facts and facts["task"] != RewardTask.name:
        raise UserError(f"--reward {checkpoint} was fine-tuned for {facts['task']}, and is no reward model. {how}")
    if not isinstance(config.head, RegressionHead):
        raise UserError(f"--reward {checkpoint} has no head for a reward (one number for a text). {how}")
    return facts or {"task": RewardTask.name, "is_inferred": True}


def best_of_settings(best_of: int, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation settings of best-of-n: what the user gave, the checkpoint's defaults, and n samples."""
    if best_of < 2:
        raise UserError(f"--best-of is {best_of}: it chooses among several samples. Give 2 or more.")
    for name in ("num_return_sequences", "num_beams"):
        if given.get(name, 1) != 1:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"--best-of draws samples, and returns the best one: leave out {option}.")
    if GenerationConfig(temperature=given.get("temperature", DEFAULT_TEMPERATURE)).is_greedy:
        raise UserError("--best-of needs samples that differ: set a --temperature above 0, or leave it out (1).")
    own = {name: value for name, value in defaults.items() if name not in ("num_beams", "length_penalty")}
    return {"temperature": DEFAULT_TEMPERATURE, **own, **given, "num_return_sequences": best_of}


def rank_by_reward(
    results: Sequence[Mapping[str, Any]],
    prompts: Sequence[str],
    score_fn: Callable[[Sequence[str], Sequence[str]], list[float]],
) -> list[dict[str, Any]]:
    """Return the samples with their `reward`, those of each prompt from best to worst, and `best` on the first.

    Of equal rewards, the sample that was drawn first wins.
    """
    rewards = score_fn([prompts[r["prompt"]] for r in results], [r["new"].strip() for r in results])
    scored = [{**result, "reward": reward} for result, reward in zip(results, rewards, strict=True)]
    ranked: list[dict[str, Any]] = []
    for _, own in groupby(scored, key=lambda result: result["prompt"]):
        in_order = sorted(own, key=lambda result: -result["reward"])
        ranked += [{**result, "best": i == 0} for i, result in enumerate(in_order)]
    return ranked
