"""Preference tuning: raise the likelihood of preferred answers over that of others, without a reward model.

A pair is a prompt with a chosen and a rejected answer. Let r(y) = log p(y | prompt) - log p_ref(y | prompt), the change
that training has made to an answer's log-likelihood since the reference, the checkpoint that the run starts from. With
d = r(chosen) - r(rejected), the losses of a pair are

- dpo: -log sigmoid(beta d) (Rafailov et al. 2023, equation 7). With `label_smoothing` e, a share e of the labels is
  taken to be wrong: (1 - e) times this loss + e times that of -d (conservative DPO, Mitchell 2023).
- ipo: (d - 1 / (2 beta)) ** 2, which stops at a margin where dpo goes on (Azar et al. 2023, equation 17). d is that of
  the mean over an answer's tokens, as TRL has it, so that long answers do not need a larger margin.
- hinge: max(0, 1 - beta d) (SLiC, Zhao et al. 2023, with the reference of DPO).
- simpo: -log sigmoid(beta m - gamma), where m is the difference of the mean log-likelihoods of a token: no reference,
  and no reward for length (Meng et al. 2024, equation 6).
- orpo: the SFT loss of the chosen answer, plus beta times -log sigmoid(log odds ratio) of the mean log-likelihoods,
  with odds = p / (1 - p): no reference and no SFT run before (Hong et al. 2024, equations 6 and 7). The SFT loss is the
  mean over the answer's tokens, as the likelihood in equation 2; with `learns_prompt` over those of the prompt too, as
  in TRL.
- kto: for single answers that are labelled as good or bad. With z, an estimate of how far the model has moved, the loss
  is 1 - sigmoid(beta (r - z)) of a good answer and 1 - sigmoid(beta (z - r)) of a bad one (Ethayarajh et al. 2024,
  equation 8). z is the mean r of prompts with another prompt's answer, at least 0, over all examples of the step, and
  has no gradient. A pair gives one answer of each kind. TRL logs z as `kl`; so do we, and on dev for all losses with a
  reference. It is no divergence, which would need answers that the model has written.

The first loss of dpo is ln 2: the model is its own reference. The reference's log-likelihoods are computed once, before
training, and stored in the run folder: no second model is in memory. Under LoRA the reference is the base.

Shapes: B rows, K target slots of a row, S answers (sequences) of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from firth.core.console import progress
from firth.core.errors import UserError, shorten
from firth.models import Model, ModelConfig
from firth.models.heads import LMHeadModule
from firth.objectives import Batch
from firth.tasks.chat import ASSISTANT_ROLE, ChatMessages
from firth.tasks.lm import IdentifiedDialogue, LanguageModelingTask
from firth.tasks.seq2seq_batch import DecoderExample, PackedAnswers, pack_decoder_examples, score_answers
from firth.tasks.task import Prediction
from firth.tasks.text_to_text import AnswerConfig
from firth.text import Example
from firth.tokens import TokenIds, Tokenizer
from firth.train import ComputeConfig

LossName = Literal["dpo", "ipo", "hinge", "simpo", "orpo", "kto"]
DEFAULT_LOSS: LossName = "dpo"
SINGLE_ANSWER_LOSS: LossName = "kto"  # the one that learns from single answers; the others compare two of a prompt
REFERENCE_FREE_LOSSES = ("simpo", "orpo")
MEAN_LOGP_LOSSES = ("ipo", "simpo", "orpo")  # losses of the mean over an answer's tokens, not of the sum
DEFAULT_BETAS: Mapping[str, float] = {"simpo": 2.0}  # the paper's; 0.1 for the others
DEFAULT_BETA = 0.1
DEFAULT_GAMMA = 1.0  # of simpo: half of beta, as in the paper's settings
GOOD, BAD = 0, 1  # sides of a pair, and of a labelled answer: the last bit of its group id


class PreferenceConfig(NamedTuple):
    """A loss and its settings."""

    loss: LossName = DEFAULT_LOSS
    beta: float = DEFAULT_BETA
    label_smoothing: float = 0.0
    gamma: float = DEFAULT_GAMMA
    learns_prompt: bool = False  # orpo: the SFT loss covers prompt and answer

    @property
    def needs_reference(self) -> bool:
        return self.loss not in REFERENCE_FREE_LOSSES


@dataclass(frozen=True)
class EncodedAnswer:
    """A prompt with one answer, whose tokens are the targets."""

    sequence: DecoderExample
    side: int  # GOOD or BAD
    reference_logp: float = 0.0  # of the answer, under the reference


@dataclass(frozen=True)
class EncodedPreference:
    """The answers of an example: chosen and rejected, or one. `mismatched` has another example's answer (for z)."""

    answers: tuple[EncodedAnswer, ...]
    mismatched: EncodedAnswer | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.sequence.ids) for answer in self.answers)


class PreferenceTask(LanguageModelingTask):
    """Preferences over the last answer of a dialogue. A prediction has the log-likelihood of each answer.

    The tuned checkpoint is a language model like any other: task.json names the task `lm`.
    """

    name = "preference"
    metric = "accuracy"

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ModelConfig,
        answer_config: AnswerConfig,
        roles: Sequence[str],
        preference: PreferenceConfig,
    ) -> None:
        if config.architecture != "decoder" or config.has_bidirectional_prompt:
            raise UserError(
                f"The task preference needs a causal decoder (gpt2, llama ...), and this is {config.family}."
            )
        super().__init__(tokenizer, config, answer_config, roles or ("user", ASSISTANT_ROLE))
        self.preference = preference

    def metadata(self) -> dict[str, Any]:
        """Return task.json: that of a language model for dialogues, which it stays; and the loss."""
        return super().metadata() | {"task": LanguageModelingTask.name, "preference": self.preference._asdict()}

    # --- examples to items

    def encode(self, examples: Sequence[Example]) -> list[EncodedPreference]:  # type: ignore[override]
        self.check_pairs(examples)
        prompts = [self.parse_prompt(e) for e in examples]
        sides = [answer_sides(e) for e in examples]
        answers = [(e.id, prompt, text) for e, prompt in zip(examples, prompts, strict=True) for text in e.references]
        sequences = self.encode_answers(answers)
        items = [
            EncodedPreference(tuple(EncodedAnswer(next(sequences), side) for side in of_example))
            for of_example in sides
        ]
        for e, item in zip(examples, items, strict=True):
            check_answers_differ([answer.sequence.ids for answer in item.answers], e.id, self.max_length)
        return self.with_mismatched(items, examples) if self.preference.loss == SINGLE_ANSWER_LOSS else items

    def with_mismatched(
        self, items: Sequence[EncodedPreference], examples: Sequence[Example]
    ) -> list[EncodedPreference]:
        """Return the items of these examples with mismatched answers, where they lack them.

        It is the first answer of the next example in the file that has another prompt: a fixed choice, so that its
        reference is computed once. Files often have a good and a bad answer to one prompt in adjacent rows.
        """
        if all(item.mismatched is not None for item in items):
            return list(items)
        num_noted = len(self.truncated), len(self.joined)
        sequences = list(
            self.encode_answers(
                [
                    (e.id, self.parse_prompt(e), examples[other].references[0])
                    for e, other in zip(examples, other_prompts(examples), strict=True)
                ]
            )
        )
        del self.truncated[num_noted[0] :], self.joined[num_noted[1] :]  # notices are about the examples' own answers
        return [
            replace(item, mismatched=EncodedAnswer(sequence, GOOD))
            for item, sequence in zip(items, sequences, strict=True)
        ]

    def check_pairs(self, examples: Sequence[Example]) -> None:
        """Refuse a single answer where the loss compares two answers of a prompt."""
        loss = self.preference.loss
        single = next((e for e in examples if len(e.references) == 1), None)
        if single is not None and loss != SINGLE_ANSWER_LOSS:
            raise UserError(
                f"Example {shorten(single.id)} has one answer, and the loss {loss} compares two answers of a prompt. "
                f"Add --preference-loss {SINGLE_ANSWER_LOSS}, or give rows of prompt, chosen, rejected."
            )

    def parse_prompt(self, example: Example) -> ChatMessages:
        return list(zip(example.texts[::2], example.texts[1::2], strict=True))

    def encode_answers(self, answers: Sequence[tuple[str | int, ChatMessages, str]]) -> Iterator[DecoderExample]:
        """Encode prompts with an answer each; the answer's tokens and its end are the targets."""
        dialogues: list[IdentifiedDialogue] = []
        for example_id, prompt, text in answers:
            dialogue = [*prompt, (ASSISTANT_ROLE, text)]
            self.chat_template.validate_messages(dialogue, example_id)
            dialogues.append((example_id, dialogue))
        rendered = [self.chat_template.render_with_answers(messages, example_id) for example_id, messages in dialogues]
        encodings = self.tokenizer.backend.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        for (example_id, _), (text, spans), encoding in zip(dialogues, rendered, encodings, strict=True):
            (sequence,) = self.encode_rendered(text, spans[-1:], encoding, example_id).parts
            assert isinstance(sequence, DecoderExample)
            if not len(sequence.target_positions):
                raise UserError(
                    f"Example {shorten(example_id)}: no token of the answer is within {self.max_length} tokens. Raise "
                    "--max-seq-length."
                )
            yield sequence

    # --- items to batches and scores

    def collate(self, items: Sequence[EncodedPreference]) -> Batch:  # type: ignore[override]
        """Pack the answers. `group_ids` number them: 2 i and 2 i + 1 for the good and the bad answer of example i."""
        numbers = [2 * i + answer.side for i, item in enumerate(items) for answer in item.answers]
        answers = [answer for item in items for answer in item.answers]
        return self.pack_answers(answers, numbers, self.preference.learns_prompt).batch

    def collate_mismatched(self, items: Sequence[EncodedPreference]) -> Batch:
        return self.pack_answers([item.mismatched for item in items if item.mismatched is not None]).batch

    def pack_answers(
        self, answers: Sequence[EncodedAnswer], numbers: Sequence[int] | None = None, with_prompts: bool = False
    ) -> PackedAnswers:
        """Pack answers with their numbers as group ids; without numbers, each is an example of its own.

        `with_prompts` makes the other tokens of good answers targets too. Their group id is -2 - the answer's: below 0,
        as they are no part of it.
        """
        sequences = [whole_sequence(a.sequence) if with_prompts and a.side == GOOD else a.sequence for a in answers]
        packed = pack_decoder_examples(sequences, self.max_length, self.pad_id)
        length_S = packed.answer_lengths
        group_BK = np.full_like(packed.batch.labels, -1)
        group_S = [2 * i + answer.side for i, answer in enumerate(answers)] if numbers is None else numbers
        group_A = np.repeat(group_S, length_S)
        if with_prompts:
            is_answer = [
                np.isin(s.target_positions, a.sequence.target_positions)
                for s, a in zip(sequences, answers, strict=True)
            ]
            group_A = np.where(np.concatenate(is_answer), group_A, -2 - group_A)
        group_BK.reshape(-1)[packed.label_slots] = group_A
        reference_BK = np.zeros(group_BK.shape, np.float32)
        reference_BK.reshape(-1)[packed.label_slots] = np.repeat([a.reference_logp for a in answers], length_S)
        return packed._replace(batch=packed.batch._replace(group_ids=group_BK, reference_logps=reference_BK))

    def answer_logps(
        self, model: Model, answers: Sequence[EncodedAnswer], compute: ComputeConfig, batch_size: int
    ) -> np.ndarray:
        """Return the log-likelihood of each answer."""
        model.eval()
        logps = []
        with progress("reading", "answers", len(answers)) as shown:
            for first in range(0, len(answers), batch_size):
                packed = self.pack_answers(answers[first : first + batch_size])
                logp_A, _, _ = score_answers(model, packed, compute)
                logps.append(packed.sum_by_answer(logp_A))
                shown.advance(len(packed.answer_lengths))
        return np.concatenate(logps)

    def predict(  # type: ignore[override]
        self, model: Model, items: Sequence[EncodedPreference], compute: ComputeConfig, batch_size: int
    ) -> list[Prediction]:
        """Return for each example the log-likelihoods of its answers, their tokens, and the rewards.

        `mismatched_change` is the change of log-likelihood of the mismatched answer, where the example has one.
        """
        logps = iter(self.answer_logps(model, list_answers(items), compute, batch_size).tolist())
        predictions = []
        for item in items:
            described = [self.describe_answer(answer, next(logps)) for answer in item.answers]
            if item.mismatched is not None:
                described[0]["mismatched_change"] = next(logps) - item.mismatched.reference_logp
            predictions.append(Prediction(described))
        return predictions

    def describe_answer(self, answer: EncodedAnswer, logp: float) -> dict[str, float | int]:
        """Return an answer's log-likelihood, length and reward: what the loss compares, times beta."""
        tokens = len(answer.sequence.target_positions)
        change = logp - answer.reference_logp if self.preference.needs_reference else logp
        reward = self.preference.beta * (change / tokens if self.preference.loss in MEAN_LOGP_LOSSES else change)
        return {"side": answer.side, "logp": logp, "tokens": tokens, "reward": reward}

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        return preference_scores([p.prediction for p in predictions])


def other_prompts(examples: Sequence[Example]) -> list[int]:
    """Return for each example the index of the next one with another prompt, around the end of the file.

    It is the next one where all prompts are equal.

    >>> other_prompts([Example(i, ("user", prompt)) for i, prompt in enumerate("aabca")])
    [2, 2, 3, 4, 2]
    """
    n = len(examples)
    found = [(i + 1) % n for i in range(n)]
    if all(e.texts == examples[0].texts for e in examples):
        return found
    for i in reversed(range(2 * n)):  # twice, since the last examples look beyond the end
        here, after = i % n, (i + 1) % n
        if examples[here].texts == examples[after].texts:
            found[here] = found[after]
    return found


def whole_sequence(sequence: DecoderExample) -> DecoderExample:
    """Return a sequence whose targets are all of its tokens but the first."""
    return sequence._replace(target_positions=range(len(sequence.ids) - 1))


def pair_rewards(prediction: Any) -> tuple[float, float] | None:
    """Return the rewards of chosen and rejected from a prediction of `preference` or `reward`; None of one answer."""
    if len(prediction) != 2:
        return None
    chosen, rejected = (answer["reward"] if isinstance(answer, Mapping) else answer for answer in prediction)
    return chosen, rejected


def is_preferred(answers: Sequence[Mapping[str, float]]) -> bool:
    """Whether the rewards agree with the label: chosen above rejected; a good answer above 0, a bad one below."""
    if len(answers) == 2:
        return answers[GOOD]["reward"] > answers[BAD]["reward"]
    return answers[0]["reward"] > 0 if answers[0]["side"] == GOOD else answers[0]["reward"] < 0


def preference_scores(predictions: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Return the share of pairs whose chosen answer has the higher reward, the mean rewards, and their difference.

    Single answers count as right where the reward of a good one is above 0, and of a bad one below. Of pairs, the
    difference of the means is the mean margin. `kl` is kto's z, of these examples.
    """
    rewards: tuple[list[float], list[float]] = ([], [])
    hits = []
    for answers in predictions:
        for answer in answers:
            rewards[int(answer["side"])].append(answer["reward"])
        hits.append(is_preferred(answers))
    good, bad = (float(np.mean(values)) if values else float("nan") for values in rewards)
    chosen = [answer for answers in predictions for answer in answers if answer["side"] == GOOD]
    changes = [answers[0]["mismatched_change"] for answers in predictions if "mismatched_change" in answers[0]]
    nats, tokens = -sum(answer["logp"] for answer in chosen), sum(answer["tokens"] for answer in chosen)
    return {
        "accuracy": float(np.mean(hits)),
        "margin": good - bad,
        "reward_chosen": good,
        "reward_rejected": bad,
        "perplexity_chosen": float(np.exp(nats / tokens)) if tokens else float("nan"),
        **({"kl": max(0.0, float(np.mean(changes)))} if changes else {}),
    }


def choose_preference_loss(examples: Sequence[Example]) -> LossName:
    """Return the loss that these examples need where nobody has chosen one.

    Answers of one prompt that are labelled apart are no pair: a label says that an answer is good, not that it is
    better than another one.
    """
    return SINGLE_ANSWER_LOSS if any(len(e.references) == 1 for e in examples) else DEFAULT_LOSS


def check_answers_differ(answers: Sequence[TokenIds], example_id: str | int, max_length: int) -> None:
    """Refuse a pair of equal token ids: many templates trim their messages, so that "yes" and "yes " are the same."""
    if len(answers) != 2 or list(answers[0]) != list(answers[1]):
        return
    if len(answers[0]) >= max_length:
        raise UserError(
            f"Example {shorten(example_id)}: the last {max_length:,} tokens of the chosen and the rejected answer are "
            "equal, and what is before them is cut off: raise --max-seq-length."
        )
    raise UserError(
        f"Example {shorten(example_id)}: the chosen and the rejected answer are the same tokens in the checkpoint's "
        "chat template: there is nothing to prefer. Delete the line."
    )


def answer_sides(example: Example) -> tuple[int, ...]:
    """Return the sides of an example's answers: of a pair chosen and rejected; of one answer its label."""
    return (GOOD, BAD) if len(example.references) == 2 else (GOOD if example.target else BAD,)


class PreferenceLoss:
    """The loss function of a run: a batch of answers -> the summed loss and figures to log.

    It is divided by the number of answers of the step (`Batch.num_targets`). The loss of a pair counts for both of its
    answers, so the result is the mean over pairs.
    """

    def __init__(self, model: Model, config: PreferenceConfig, device: torch.device) -> None:
        self.model, self.config = model, config
        self.kl = torch.zeros((), device=device)  # kto's z, of the current step

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        logp, length, reference, used, sft_logp = (x.view(-1, 2) for x in self.sum_answers(batch))
        # rewards of the answers, (pairs, 2); unused slots are 0
        change = logp - reference if self.config.needs_reference else logp
        score = change / length.clamp(min=1) if self.config.loss in MEAN_LOGP_LOSSES else change
        beta, weight = self.config.beta, used.to(logp.dtype)
        if self.config.loss == SINGLE_ANSWER_LOSS:
            sign = score.new_tensor([1.0, -1.0])
            loss = ((1 - torch.sigmoid(beta * sign * (score - self.kl))) * weight).sum()
        else:
            loss = 2 * (self.pair_losses(score, sft_logp[:, GOOD]) * weight.prod(1)).sum()
        with torch.no_grad():
            figures = self.sum_figures(beta * score, weight)
        return {"targets": loss, **figures}

    def sum_figures(self, reward: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """Return sums to log by NAME/COUNT from the rewards of the answers, (pairs, 2); a missing answer has weight 0.

        A pair is right where the chosen answer has the higher reward, a single answer where the sign of its reward is
        that of its label.
        """
        pair, margin = weight.prod(1), reward[:, GOOD] - reward[:, BAD]
        single = weight * (1 - pair)[:, None]
        right = 2 * ((margin > 0) * pair).sum() + ((reward * reward.new_tensor([1.0, -1.0]) > 0) * single).sum()
        figures = {
            "accuracy/targets": right,
            "margin/answer_pairs": (margin * pair).sum(),
            "reward_chosen/chosen": (reward * weight)[:, GOOD].sum(),
            "reward_rejected/rejected": (reward * weight)[:, BAD].sum(),
        }
        return figures | ({"kl/targets": self.kl * weight.sum()} if self.config.loss == SINGLE_ANSWER_LOSS else {})

    def sum_answers(self, batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return by group id what is known of an answer.

        These are its log-likelihood, number of tokens, log-likelihood under the reference, whether there is one, and
        the mean log-likelihood of its tokens with those of the prompt that are targets.
        """
        head = self.model.head
        assert isinstance(head, LMHeadModule)
        x_ND = self.model.target_hidden_states(batch).flatten(0, -2)
        logits_NV = head(x_ND, self.model.embed.tokens.weight).float()
        label_N, group_N = batch.labels.flatten(), batch.group_ids.flatten()
        is_target = group_N >= 0
        logp_N = -F.cross_entropy(logits_NV, label_N.clamp(min=0), reduction="none")
        size = 2 * group_N.numel() + 2  # a fixed shape: each answer has a slot or more, and two numbers at most
        zero = logp_N.new_zeros(size)

        def sum_where(used_N: Tensor, value_N: Tensor) -> Tensor:
            number_N = torch.where(is_target, group_N, -2 - group_N)
            return zero.index_add(0, torch.where(used_N, number_N, size - 1), value_N * used_N)

        count_S, logp_S = sum_where(is_target, torch.ones_like(logp_N)), sum_where(is_target, logp_N)
        reference_S = sum_where(is_target, batch.reference_logps.flatten()) / count_S.clamp(min=1)
        is_learned_N = group_N != -1
        learned_S = sum_where(is_learned_N, torch.ones_like(logp_N)).clamp(min=1)
        return logp_S, count_S, reference_S, count_S > 0, sum_where(is_learned_N, logp_N) / learned_S

    def pair_losses(self, score: Tensor, sft_logp: Tensor) -> Tensor:
        """Return the loss of each pair from the scores of its answers, (pairs, 2), and the SFT part of orpo."""
        config, d = self.config, score[:, GOOD] - score[:, BAD]
        e = config.label_smoothing
        if config.loss == "ipo":
            return (d - 1 / (2 * config.beta)).square()
        if config.loss == "hinge":
            return F.relu(1 - config.beta * d)
        if config.loss == "orpo":
            log_others = torch.log1p(-score.clamp(max=-1e-7).exp())  # log(1 - p)
            log_odds = d - (log_others[:, GOOD] - log_others[:, BAD])
            return -sft_logp - config.beta * F.logsigmoid(log_odds)
        z = config.beta * d - (config.gamma if config.loss == "simpo" else 0.0)
        return -(1 - e) * F.logsigmoid(z) - e * F.logsigmoid(-z)

    @torch.no_grad()
    def update_kl(self, batches: Iterable[Batch], compute: ComputeConfig) -> None:
        """Set kto's z from the mismatched answers of a step."""
        self.model.eval()
        changes, count = [], 0
        for batch in batches:
            with compute.autocast():
                logp_S, _, reference_S, used_S, _ = self.sum_answers(batch.to(compute.device))
            changes.append(((logp_S - reference_S) * used_S).sum())
            count += int(used_S.sum())
        self.model.train()
        self.kl.copy_((torch.stack(changes).sum() / max(count, 1)).clamp(min=0))


def with_references(items: Sequence[EncodedPreference], logps: Iterable[float]) -> list[EncodedPreference]:
    """Return the items with the reference's log-likelihoods, in the order of `list_answers`."""
    each = iter(logps)

    def with_next(answer: EncodedAnswer) -> EncodedAnswer:
        return replace(answer, reference_logp=next(each))

    return [
        EncodedPreference(
            tuple(with_next(answer) for answer in item.answers),
            None if item.mismatched is None else with_next(item.mismatched),
        )
        for item in items
    ]


def checksum_answers(answers: Sequence[EncodedAnswer]) -> str:
    """Return the CRC-32 of the answers' tokens and targets as hex."""
    crc = 0
    for answer in answers:
        for values in answer.sequence:
            crc = crc32(np.asarray(values, np.int64).tobytes(), crc)
    return f"{crc:08x}"


def list_answers(items: Sequence[EncodedPreference]) -> list[EncodedAnswer]:
    """Return all answers of the items, each item's mismatched one last."""
    return [a for item in items for a in (*item.answers, *([item.mismatched] if item.mismatched else []))]
