"""Encoder, Decoder, EncoderDecoder: a batch in; hidden states, logits and loss out.

Every model is the same pipeline: token ids -> embedding -> stack of blocks -> head -> logits -> loss. A ModelConfig
picks each part (`make_embedding`, `make_stack`, `make_head`); the three classes differ in how stacks connect.

A model is called in two ways:

- Training and evaluation pass a `Batch` of packed rows to `losses` or `logits`. Loss terms are sums over targets; the
  caller divides them by counts over the global batch, so micro-batches and processes do not change the result.
- `forward` takes the Hugging Face input names, one padded text per row, and returns a `ModelOutput` with the mean loss.

B rows, T positions, U decoder positions, K target positions, E embedding width, D model width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.core.errors import UserError
from firth.core.html import HtmlPage
from firth.core.notebook import PARTS, add_facts, to_notebook_html
from firth.models.backbone import Stack
from firth.models.config import (
    AWDLSTMConfig,
    BiLSTMConfig,
    ELMoConfig,
    LMHead,
    ModelConfig,
    Seq2SeqConfig,
    TaskHead,
    make_generator_model_config,
)
from firth.models.electra import ElectraGenerator, ReplacedTokenDetector, discriminator_loss, replace_tokens
from firth.models.embeddings import InputEmbedding, PositionEmbedding
from firth.models.heads import (
    LABEL_IGNORE_INDEX,
    DiscriminatorHeadModule,
    LMHeadModule,
    SentencePairHeadModule,
    SpanBoundaryHeadModule,
    gather_positions,
)
from firth.models.init import init_weights
from firth.models.parameters import check_model_memory
from firth.models.position.mask_decoder import EnhancedMaskDecoder
from firth.models.position.xl_memory import XLMemory
from firth.models.recurrent.awd import AWDLSTMStack
from firth.models.recurrent.elmo import CharCNNEmbedding, ELMoStack
from firth.models.recurrent.features import FeatureEncoder
from firth.models.recurrent.lstm import make_bilstm_stack
from firth.models.recurrent.seq2seq import Seq2SeqDecoder, Seq2SeqEncoder
from firth.models.task_distill import TaskDistillation
from firth.models.task_heads import (
    AuxiliaryLMHeadModule,
    MultipleChoiceHeadModule,
    TaskHeadModule,
    make_task_head,
    select_task_head,
)
from firth.models.template import make_sequence_template
from firth.models.two_stream import TwoStream
from firth.tokens.lexicon import to_open_vocab

if TYPE_CHECKING:
    from firth.tokens import Tokenizer
    from firth.tokens import Vocabulary as Ids


@dataclass
class ModelOutput:
    """The result of a call with the Hugging Face input names. `loss` is the mean over the labels."""

    logits: Tensor
    loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    attentions: tuple[Tensor, ...] | None = None  # per layer (B, H, T, S); of the decoder where there are two stacks
    encoder_attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None

    @property
    def start_logits(self) -> Tensor:
        """(B, T): logits of the answer's start (`SpanHead`)."""
        return self.logits[..., 0]

    @property
    def end_logits(self) -> Tensor:
        """(B, T): logits of the answer's end."""
        return self.logits[..., 1]


# Anything with the fields of `firth.objectives.Batch`: models and objectives do not import each other.
BatchLike = Any


class Model(nn.Module):
    """Base of all architectures: embedding, head, loss, saving."""

    objective: dict[str, Any] | None = None  # the objective of pretraining, kept in checkpoints
    forced_tokens: ForcedTokens | None = None  # from its checkpoint; None: the family's default
    eos_token_ids: tuple[int, ...] | None = None  # the list in its checkpoint; None: the template's end token
    distillation: TaskDistillation | None = None  # of a student that learns a task from a teacher
    has_random_head = False  # its checkpoint had no head

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if wrong := config.problems():
            raise UserError("; ".join(wrong) + ".")
        self.config = config
        self.embed = make_embedding(config)
        # With a generator (ELECTRA), `head` is the generator's: it predicts the tokens.
        has_generator = config.get_extra("generator") is not None
        self.head = make_head(make_generator_model_config(config) if has_generator else config)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.__dict__.get("_tokenizer")

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Set the tokenizer; a character CNN opens its vocabulary, so that no word is unknown."""
        if isinstance(self.embed, CharCNNEmbedding) and tokenizer is not None:
            tokenizer = to_open_vocab(tokenizer)
            self.embed.set_tokenizer(tokenizer)
        self.__dict__["_tokenizer"] = tokenizer

    def _repr_html_(self) -> str:
        """Return the size and the parts of the model for a notebook, and torch's own listing to unfold."""
        config = self.config
        facts: dict[str, Any] = {
            "architecture": config.architecture,
            "parameters": self.num_parameters,
            "layers, width, heads": f"{config.num_layers}, {config.dim}, {config.num_heads}",
            "positions": config.max_length or "unlimited",
            "head": type(config.head).__name__,
        }
        if self.objective:
            facts["pretrained with"] = self.objective.get("kind", "")
        if self.tokenizer is not None:
            facts["tokenizer"] = f"{self.tokenizer.kind}, {self.tokenizer.vocab.size:,} tokens"
        page = HtmlPage(f"Model: {config.family}")
        add_facts(page, facts)
        page.add_fragment(PARTS, "details", "modules", repr(self))
        return to_notebook_html(page)

    def hidden_states(self, batch: BatchLike) -> Tensor:
        """Return the states (B, T or U, D) that the head reads."""
        raise NotImplementedError

    def target_hidden_states(self, batch: BatchLike) -> Tensor:
        """Return the states at the target positions (B, K, D); all of them without `target_positions`."""
        x_BTD = self.hidden_states(batch)
        return x_BTD if batch.target_positions is None else gather_positions(x_BTD, batch.target_positions)

    def logits(self, batch: BatchLike) -> Tensor:
        """Return logits at the target positions: (B, K, V), (B, K) of a discriminator, or those of a task head."""
        if isinstance(self.head, TaskHeadModule):
            head, doc = select_task_head(self.head, batch), self.head_document_ids(batch)
            return head.resolve_dependent_logits(
                head(self.hidden_states(batch), batch.target_positions, doc), batch.target_positions, doc
            )
        x = self.target_hidden_states(batch)
        return self.head(x, self.embed.tokens.weight) if isinstance(self.head, LMHeadModule) else self.head(x)

    def head_document_ids(self, batch: BatchLike) -> Tensor | None:
        """Return the document ids of the states that the head reads."""
        return batch.document_ids

    def losses(self, batch: BatchLike, with_metrics: bool = False) -> dict[str, Tensor]:
        """Return the parts of the loss as sums, each under the name of the count that divides it (`Batch.loss_counts`).

        The caller sums the counts over the global batch, and adds the means. `with_metrics` adds figures to log, sums
        too, under NAME/COUNT: "nsp_accuracy/pairs" is the number of right pairs. They are no part of the loss.
        """
        if isinstance(self.head, LMHeadModule):
            return self.lm_losses(self.target_hidden_states(batch), batch, with_metrics)
        if isinstance(self.head, TaskHeadModule):
            return self.task_losses(self.head, self.hidden_states(batch), batch)
        return {"targets": self.loss(batch)}

    @property
    def lm_loss_name(self) -> str:
        """The name of the loss over tokens in logs: `mlm`, or `lm` for any other objective."""
        return "mlm" if (self.objective or {}).get("kind") in ("MLM", "CLMThenMLM") else "lm"

    def lm_losses(self, target_states: Tensor, batch: BatchLike, with_metrics: bool) -> dict[str, Tensor]:
        """Return the LM loss; in evaluations with the accuracy. Training never holds the logits that it needs."""
        if not with_metrics or torch.is_grad_enabled():
            return {"targets": self.lm_loss(target_states, batch)}
        assert isinstance(self.head, LMHeadModule)
        loss, num_correct = self.head.loss_and_num_correct(
            target_states.flatten(0, -2), batch.labels.flatten(), self.embed.tokens.weight
        )
        return {"targets": loss, f"{self.lm_loss_name}_accuracy/targets": num_correct}

    def loss(self, batch: BatchLike) -> Tensor:
        """Return the loss of the head, summed over the targets."""
        if isinstance(self.head, TaskHeadModule):
            return self.task_losses(self.head, self.hidden_states(batch), batch)["targets"]
        return self.lm_loss(self.target_hidden_states(batch), batch)

    def lm_loss(self, target_states: Tensor, batch: BatchLike) -> Tensor:
        """Return the LM loss from the states at the target positions, summed."""
        assert isinstance(self.head, LMHeadModule)
        return self.head.loss(target_states.flatten(0, -2), batch.labels.flatten(), self.embed.tokens.weight)

    def task_losses(self, head: TaskHeadModule, x_BTD: Tensor, batch: BatchLike) -> dict[str, Tensor]:
        """Return the loss of a task head; of a student in two parts, with figures to log."""
        head, doc = select_task_head(head, batch), self.head_document_ids(batch)
        outputs = head(x_BTD, batch.target_positions, doc)
        if self.distillation is not None:
            return self.distillation.losses(head, outputs, batch, doc)
        return {"targets": head.loss(outputs, batch, doc)}

    def logits_and_loss(
        self, x: Tensor, labels: Tensor | None, last_index: Tensor, document_ids: Tensor | None, shift_labels: bool
    ) -> tuple[Tensor, Any]:
        """Return logits and mean loss of a Hugging Face style call; `last_index` (B,) is each text's last token."""
        if isinstance(self.head, TaskHeadModule):
            first = getattr(self.config.head, "pool", None) == "first"
            return self.head.logits_and_loss(
                x, torch.zeros_like(last_index) if first else last_index, document_ids, labels
            )
        if isinstance(self.head, DiscriminatorHeadModule):
            logits = self.head(x)
            if labels is None:
                return logits, None
            is_token = None if document_ids is None else document_ids >= 0
            num_tokens = labels.numel() if is_token is None else is_token.sum()
            return logits, discriminator_loss(logits, labels, is_token) / num_tokens
        logits = self.head(x, self.embed.tokens.weight)
        if labels is None:
            return logits, None
        scores, targets = (logits[:, :-1], labels[:, 1:]) if shift_labels else (logits, labels)
        return logits, F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten(), ignore_index=LABEL_IGNORE_INDEX)

    def check_length(self, length: int) -> None:
        limit = self.config.max_length
        if limit is not None and length > limit:
            raise UserError(f"A text of {length} tokens is longer than the {limit} positions of this model.")

    def enable_memory(self, length: int, reused_length: int | None = None) -> None:
        """Keep `length` hidden states per layer for the rows that continue these (Transformer-XL's memory).

        With `reused_length` the next rows continue after that many positions of these, and the memory ends there.
        """
        for module in self.modules():
            if isinstance(module, Stack):
                module.memory = XLMemory(length, reused_length)

    def load_state(self, recurrent_state: Mapping[str, Tensor]) -> None:
        """Set the recurrent state that `pop_state` returned for the previous rows; empty at the start of a text."""
        for name, memory in self.stack_memories().items():
            memory.load_state({int(k.removeprefix(name)): v for k, v in recurrent_state.items() if k.startswith(name)})

    def pop_state(self) -> dict[str, Tensor]:
        """Return the recurrent state for the next rows, (B, ...) each, and clear it; empty for stateless models."""
        memories = self.stack_memories().items()
        return {f"{name}{i}": state for name, memory in memories for i, state in memory.pop_state().items()}

    def stack_memories(self) -> dict[str, XLMemory]:
        """Return the memories of the stacks, by stack name."""
        stacks = {f"{name}.": m for name, m in self.named_modules() if isinstance(m, Stack)}
        return {name: stack.memory for name, stack in stacks.items() if stack.memory is not None}

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def clone(self) -> Self:
        """Return a copy with its own weights and the same tokenizer."""
        return copy.deepcopy(self, {id(self.tokenizer): self.tokenizer})

    def clone_as(self, dtype: torch.dtype) -> Self:
        """Return a copy whose weights are cast to `dtype`, with the same tokenizer."""
        cast_tensors: dict[int, Any] = {id(self.tokenizer): self.tokenizer}
        for p in self.parameters():
            cast_tensors[id(p)] = nn.Parameter(p.detach().to(dtype, copy=True), requires_grad=False)
        for b in self.buffers():
            cast_tensors[id(b)] = b.detach().to(dtype if b.is_floating_point() else b.dtype, copy=True)
        return copy.deepcopy(self, cast_tensors)  # the memo has the tensors already: float32 weights are not copied

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write a Hugging Face folder, with the tokenizer if the model has one."""
        from firth.models.hf.checkpoint import save_model

        save_model(self, Path(folder), overwrite)


def make_head(config: ModelConfig) -> LMHeadModule | TaskHeadModule | DiscriminatorHeadModule:
    if isinstance(config.head, LMHead):
        return LMHeadModule(config, config.head)
    if isinstance(config.head, TaskHead):
        return make_task_head(config, config.head)
    return DiscriminatorHeadModule(config)


def make_embedding(config: ModelConfig) -> InputEmbedding:
    if isinstance(config.recurrent, ELMoConfig):
        return cast(InputEmbedding, CharCNNEmbedding(config))  # same interface, other modules
    return InputEmbedding(config)


def make_stack(config: ModelConfig, num_layers: int, is_causal: bool, cross_attention: bool = False) -> Stack:
    if isinstance(config.recurrent, Seq2SeqConfig):
        return Seq2SeqDecoder(config) if cross_attention else Seq2SeqEncoder(config)
    if config.recurrent is not None:
        return {AWDLSTMConfig: AWDLSTMStack, BiLSTMConfig: make_bilstm_stack, ELMoConfig: ELMoStack}[
            type(config.recurrent)
        ](config)
    return Stack(config, num_layers, is_causal, cross_attention)


EXTRA_MODULES: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "pair": SentencePairHeadModule,
    "boundary": SpanBoundaryHeadModule,
    "generator": ElectraGenerator,
    "detector": ReplacedTokenDetector,
    "query": TwoStream,
    "decoder": EnhancedMaskDecoder,
    "auxiliary": AuxiliaryLMHeadModule,
    "features": FeatureEncoder,
}


def make_extras(config: ModelConfig) -> nn.ModuleDict:
    """Return the modules that an objective needs beside backbone and head, by name."""
    return nn.ModuleDict({n: make(config) for n, make in EXTRA_MODULES.items() if config.get_extra(n) is not None})


class Encoder(Model):
    """One bidirectional stack, with the modules that an objective needs beside it (`extras`)."""

    is_causal = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.stack = make_stack(config, config.num_layers, self.is_causal)
        if config.has_bidirectional_decoder:
            self.stack.is_causal = False  # position biases stay those of a decoder, as a prefix LM's prompt has them
        self.extras = make_extras(config)
        init_weights(self, config)

    @property
    def generator(self) -> ElectraGenerator | None:
        generator = self.extras["generator"] if "generator" in self.extras else None  # noqa: SIM401, it has no get
        assert generator is None or isinstance(generator, ElectraGenerator)
        return generator

    def backbone(
        self, batch: BatchLike, all_hidden_states: list[Tensor] | None = None, target_positions: Tensor | None = None
    ) -> Tensor:
        """Return the last hidden states (B, T, D).

        An `attention_rank` (B, 2, T) reads each row in two directions and gives (B, 2, T, D). With `target_positions`
        (B, K) the last layer is computed only there, (B, K, D); see `Stack.can_compute_targets_only`.
        """
        doc, rank = batch.document_ids, batch.attention_rank
        if isinstance(self.embed, CharCNNEmbedding) and batch.char_ids is not None:
            vectors_BTE = self.embed.embed_characters(batch.char_ids)
        else:
            vectors_BTE = self.embed_backbone_inputs(batch.input_ids, batch.position_ids, batch.token_type_ids, doc)
        x_BTD = self.embed.widen(vectors_BTE)
        if isinstance(self.stack, ELMoStack) and rank is not None:
            return self.stack.split_directions(self.stack(x_BTD, doc))
        if rank is None or rank.ndim == 2:
            return self.stack(
                x_BTD,
                doc,
                rank,
                all_hidden_states=all_hidden_states,
                token_type_ids=batch.token_type_ids,
                target_positions=target_positions,
            )
        doc, segment = (None if a is None else a.repeat_interleave(2, 0) for a in (doc, batch.token_type_ids))
        y = self.stack(x_BTD.repeat_interleave(2, 0), doc, rank.flatten(0, 1), token_type_ids=segment)
        return y.unflatten(0, (-1, 2))

    def embed_backbone_inputs(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        token_type_ids: Tensor | None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the backbone's input embeddings (B, T, E), before they are projected to the model width.

        They are the generator's. With gradient-disentangled sharing (DeBERTa-V3, section 3.3) they are its embeddings
        without gradient plus a trained `delta`.
        """
        if self.generator is None or self.generator.delta is None:
            return self.embed.embed_unprojected(input_ids, position_ids, token_type_ids, document_ids)
        x_BTE = self.embed.embed_tokens(input_ids).detach() + self.generator.delta(input_ids)
        return self.embed.add_positions(x_BTE, position_ids, token_type_ids)

    def hidden_states(self, batch: BatchLike) -> Tensor:
        if "features" in self.extras:
            states: list[Tensor] = []
            self.backbone(batch, states)
            return self.extras["features"](states, batch.document_ids, batch.input_ids)
        if self.generator is None:
            return self.backbone(batch)
        vectors_BTE = self.embed.embed_unprojected(batch.input_ids, batch.position_ids, batch.token_type_ids)
        return self.generator(vectors_BTE, batch.document_ids, batch.attention_rank, batch.token_type_ids)

    def target_hidden_states(self, batch: BatchLike) -> Tensor:
        if isinstance(self.stack, ELMoStack) and batch.attention_rank is None:
            # The forward direction predicts the next word.
            x_BTP = self.stack.split_directions(self.hidden_states(batch))[:, 0]
            return x_BTP if batch.target_positions is None else gather_positions(x_BTP, batch.target_positions)
        if "query" in self.extras and batch.target_positions is not None:
            return self.extras["query"](self.embed, self.stack, batch)
        if "decoder" in self.extras and batch.target_positions is not None:
            x_BTD = self.embed(batch.input_ids, batch.position_ids, batch.token_type_ids)
            return self.extras["decoder"](x_BTD, self.stack, batch)
        plain = self.generator is None and "features" not in self.extras and batch.attention_rank is None
        if (
            plain
            and batch.target_positions is not None
            and self.stack.can_compute_targets_only(batch.target_positions, batch.input_ids.shape[1])
        ):
            return self.backbone(batch, target_positions=batch.target_positions)
        return super().target_hidden_states(batch)

    def losses(self, batch: BatchLike, with_metrics: bool = False) -> dict[str, Tensor]:
        assert batch.pair_labels is None or "pair" in self.extras, "the objective adds this extra"
        assert batch.span_boundaries is None or "boundary" in self.extras, "the objective adds this extra"
        if self.generator is not None:
            return self.electra_losses(self.generator, batch, with_metrics)
        if batch.generator_labels is not None:
            return self.losses_with_detection(cast(ReplacedTokenDetector, self.extras["detector"]), batch, with_metrics)
        if "auxiliary" in self.extras and batch.labels is not None:
            return self.losses_with_auxiliary_lm(batch, with_metrics)
        if "features" in self.extras:
            parts = super().losses(batch, with_metrics)
            if self.training:
                cast(FeatureEncoder, self.extras["features"]).add_mix_penalty(
                    parts, batch.document_ids, batch.input_ids
                )
            if with_metrics and "tokens" in parts:
                metrics = {"task_loss/targets": parts["targets"], "l2_mix_loss/tokens": parts["tokens"]}
                parts |= detach_metrics(metrics)
            return parts
        if batch.pair_labels is None and batch.span_boundaries is None:
            return super().losses(batch, with_metrics)
        x_BTD = self.hidden_states(batch)
        parts = self.lm_losses(gather_positions(x_BTD, batch.target_positions), batch, with_metrics)
        metrics = {f"{self.lm_loss_name}_loss/targets": parts["targets"]}
        if batch.span_boundaries is not None:
            assert isinstance(self.head, LMHeadModule)
            y_NE, labels_N = self.extras["boundary"](x_BTD, batch.span_boundaries).flatten(0, 1), batch.labels.flatten()
            boundary_loss = self.head.projection_loss(y_NE, labels_N, self.embed.tokens.weight)
            parts["targets"] = parts["targets"] + boundary_loss
            metrics["boundary_loss/targets"] = boundary_loss
        if batch.pair_labels is not None:
            logits_B2, name = self.extras["pair"](x_BTD).float(), self.pair_loss_name
            parts["pairs"] = F.cross_entropy(logits_B2, batch.pair_labels, reduction="sum")
            metrics[f"{name}_loss/pairs"] = parts["pairs"]
            metrics[f"{name}_accuracy/pairs"] = (logits_B2.argmax(1) == batch.pair_labels).sum()
        return parts | detach_metrics(metrics) if with_metrics else parts

    @property
    def pair_loss_name(self) -> str:
        """The name of the loss over pairs of sentences in logs."""
        return {"next": "nsp", "order": "sop"}.get((self.objective or {}).get("pair", ""), "pair")

    def losses_with_auxiliary_lm(self, batch: BatchLike, with_metrics: bool = False) -> dict[str, Tensor]:
        """Return the loss of the task, and the LM loss over the texts."""
        lm_head, x_BTD = self.extras["auxiliary"], self.hidden_states(batch)
        assert isinstance(lm_head, AuxiliaryLMHeadModule)
        assert isinstance(self.head, TaskHeadModule)
        lm_loss = lm_head.loss(x_BTD.flatten(0, 1), batch.labels.flatten(), self.embed.tokens.weight)
        parts = self.task_losses(self.head, x_BTD, batch) | {"lm_targets": lm_head.loss_weight * lm_loss}
        metrics = {"task_loss/targets": parts["targets"], "lm_loss/lm_targets": lm_loss}
        return parts | detach_metrics(metrics) if with_metrics else parts

    def electra_losses(
        self, generator: ElectraGenerator, batch: BatchLike, with_metrics: bool = False
    ) -> dict[str, Tensor]:
        """Return the generator's MLM loss, and the discriminator's loss over all tokens of the corrupted text."""
        logits_BKV, labels_BK = self.logits(batch).float(), batch.labels
        logits_NV = logits_BKV.flatten(0, 1)  # a 3-D cross-entropy is not deterministic on a GPU
        mlm_loss = F.cross_entropy(logits_NV, labels_BK.flatten(), ignore_index=LABEL_IGNORE_INDEX, reduction="sum")
        corrupted_BT, replaced_BT = replace_tokens(logits_BKV, batch.input_ids, batch.target_positions, labels_BK)
        score_BT = generator.discriminator_head(self.backbone(batch._replace(input_ids=corrupted_BT)))
        is_token_BT = None if batch.document_ids is None else batch.document_ids >= 0
        rtd_loss = discriminator_loss(score_BT, replaced_BT, is_token_BT)
        parts = {"targets": mlm_loss, "tokens": generator.discriminator_weight * rtd_loss}
        if not with_metrics:
            return parts
        right_BT = (score_BT > 0) == replaced_BT
        metrics = {"mlm_loss/targets": mlm_loss, "rtd_loss/tokens": rtd_loss}
        if not torch.is_grad_enabled():
            metrics["mlm_accuracy/targets"] = (logits_BKV.argmax(-1) == labels_BK).sum()
        metrics["rtd_accuracy/tokens"] = (
            right_BT if batch.document_ids is None else right_BT & (batch.document_ids >= 0)
        ).sum()
        metrics["rtd_replaced/tokens"] = replaced_BT.sum()
        return parts | detach_metrics(metrics)

    def losses_with_detection(
        self, detector: ReplacedTokenDetector, batch: BatchLike, with_metrics: bool = False
    ) -> dict[str, Tensor]:
        """Return the LM loss of masked and causal rows, the generator's, and that of detection in the other rows."""
        corrupted_BT, replaced_BT, generator_loss = detector.replace_tokens(self.embed, batch)
        x_BTD = self.backbone(batch._replace(input_ids=corrupted_BT))
        parts = self.lm_losses(x_BTD, batch, with_metrics)
        own_parts, metrics = detector.losses(x_BTD, replaced_BT, generator_loss, batch)
        metrics["lm_loss/targets"] = parts["targets"]
        return parts | own_parts | (detach_metrics(metrics) if with_metrics else {})

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        langs: Tensor | None = None,
        labels: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> ModelOutput:
        """Return logits, hidden states and the mean loss.

        Multiple choice takes `input_ids` (B, choices, T); span heads take `start_positions` and `end_positions`.
        With a generator (ELECTRA) the logits are the generator's and the hidden states the discriminator's. A query
        stream (XLNet) and a mask decoder (DeBERTa) need target positions, so only a `Batch` uses them.
        """
        self.check_length(input_ids.shape[-1])
        *shape, _ = input_ids.shape
        if isinstance(self.head, MultipleChoiceHeadModule) and len(shape) == 2:
            optional = (attention_mask, token_type_ids, position_ids, langs)
            flattened = [None if a is None else a.flatten(0, 1) for a in optional]
            input_ids, (attention_mask, token_type_ids, position_ids, langs) = input_ids.flatten(0, 1), flattened
        states: list[Tensor] | None = [] if output_hidden_states or "features" in self.extras else None
        attentions: list[Tensor] | None = [] if output_attentions else None
        position = self.resolve_position_ids(position_ids, attention_mask)
        segment = token_type_ids if langs is None else langs
        doc = mask_to_document_ids(attention_mask)
        x = self.embed.widen(self.embed_backbone_inputs(input_ids, position, segment))
        x = self.stack(
            x, doc, all_hidden_states=states, position_ids=position, attentions=attentions, token_type_ids=segment
        )
        if self.generator is not None:
            x = self.generator(self.embed.embed_unprojected(input_ids, position, segment), doc, token_type_ids=segment)
        if "features" in self.extras:
            x = self.extras["features"](states, doc, input_ids)
        if isinstance(self.stack, ELMoStack) and isinstance(self.head, LMHeadModule):
            x = self.stack.split_directions(x)[:, 0]  # the forward direction predicts the next word
        last = last_token_index(input_ids, attention_mask).view(shape)
        shift = self.is_causal or isinstance(self.stack, ELMoStack)
        logits, loss = self.logits_and_loss(
            x, labels_or_span_labels(labels, start_positions, end_positions), last, doc, shift_labels=shift
        )
        return ModelOutput(
            logits, loss, tuple_or_none(states) if output_hidden_states else None, attentions=tuple_or_none(attentions)
        )

    def resolve_position_ids(self, position_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
        """Return position ids from 0. RoBERTa counts from its offset and skips padding."""
        offset = self.embed.offset
        if position_ids is not None:
            return position_ids - offset
        return None if attention_mask is None or not offset else (attention_mask.long().cumsum(1) - 1).clamp(min=0)


class Decoder(Encoder):
    """One causal stack. An AWD-LSTM adds its activation regularization (AR, TAR) to the loss."""

    is_causal = True

    def losses(self, batch: BatchLike, with_metrics: bool = False) -> dict[str, Tensor]:
        parts = super().losses(batch, with_metrics)
        if not isinstance(self.stack, AWDLSTMStack) or (penalty := self.stack.regularization) is None:
            return parts
        metrics = {"regularization_loss/tokens": penalty}
        if isinstance(self.head, LMHeadModule):
            metrics["lm_loss/targets"] = parts["targets"]
        return self.stack.add_regularization(parts) | (detach_metrics(metrics) if with_metrics else {})


class EncoderDecoder(Model):
    """An encoder and a decoder with cross-attention. They share token embeddings, not position embeddings.

    A task head on the encoder's states needs no decoder; T5 is built without one then.
    """

    decoder_embed: PositionEmbedding
    decoder: Stack

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if config.has_decoder:
            self.decoder_embed = PositionEmbedding(config)
        self.encoder = make_stack(config, config.num_layers, is_causal=False)
        if config.has_decoder:
            self.decoder = make_stack(config, config.decoder_layers, is_causal=True, cross_attention=True)
        if config.has_decoder and config.share_stacks:
            for decoder_block, encoder_block in zip(self.decoder.blocks, self.encoder.blocks, strict=True):
                for part in ("attention", "attention_norm", "mlp", "mlp_norm"):
                    setattr(decoder_block, part, getattr(encoder_block, part))
        self.extras = make_extras(config)
        init_weights(self, config)

    def head_document_ids(self, batch: BatchLike) -> Tensor | None:
        return batch.document_ids if self.config.head_reads_encoder else batch.decoder_document_ids

    def encode(self, batch: BatchLike) -> Tensor:
        return self.encoder(
            self.embed(batch.input_ids, batch.position_ids, batch.token_type_ids),
            batch.document_ids,
            batch.attention_rank,
        )

    def hidden_states(
        self, batch: BatchLike, encoder_hidden_states: Tensor | None = None, cross_document_ids: Tensor | None = None
    ) -> Tensor:
        """Return the decoder's states (B, U, D), or the encoder's (B, T, D) where the head reads those.

        `encoder_hidden_states` (B, T, D) skips the encoder. `cross_document_ids` (B, U) names the source document that
        each decoder position attends to.
        """
        if encoder_hidden_states is None:
            encoder_hidden_states = self.encode(batch)
        if self.config.head_reads_encoder:
            return encoder_hidden_states
        x = self.embed(batch.decoder_input_ids, batch.decoder_position_ids, position_embedding=self.decoder_embed)
        return self.decoder(
            x,
            batch.decoder_document_ids,
            encoder_hidden_states=encoder_hidden_states,
            encoder_document_ids=batch.document_ids,
            cross_document_ids=cross_document_ids,
        )

    def losses(self, batch: BatchLike, with_metrics: bool = False) -> dict[str, Tensor]:
        if batch.encoder_labels is None:
            return super().losses(batch, with_metrics)
        assert isinstance(self.head, LMHeadModule)
        detector = None
        if batch.generator_labels is not None:
            detector = cast(ReplacedTokenDetector, self.extras["detector"])
            read_BT, replaced_BT, generator_loss = detector.replace_tokens(self.embed, batch)
            batch = batch._replace(input_ids=read_BT)
        encoded_BTD = self.encode(batch)
        parts = self.lm_losses(self.hidden_states(batch, encoded_BTD), batch, with_metrics)
        parts = {name.replace("accuracy/", "accuracy/decoder_"): part for name, part in parts.items()}
        target_NE = gather_positions(encoded_BTD, batch.encoder_target_positions).flatten(0, 1)
        mlm_loss = self.head.loss(target_NE, batch.encoder_labels.flatten(), self.embed.tokens.weight)
        metrics = {"lm_loss/decoder_targets": parts["targets"], "mlm_loss/encoder_targets": mlm_loss}
        parts["targets"] = parts["targets"] + mlm_loss
        if detector is not None:
            own_parts, own_metrics = detector.losses(encoded_BTD, replaced_BT, generator_loss, batch)
            parts, metrics = parts | own_parts, metrics | own_metrics
        return parts | detach_metrics(metrics) if with_metrics else parts

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> ModelOutput:
        """Return logits, decoder states and the mean loss.

        Default of `decoder_input_ids`: `labels` shifted right. A task head reads the states of a decoder that receives
        the encoder's input again (BART, section 3).
        """
        task = isinstance(self.head, TaskHeadModule)
        if isinstance(self.head, MultipleChoiceHeadModule):
            raise UserError("Multiple choice with an encoder-decoder needs a batch: call Model.logits.")
        if self.config.head_reads_encoder:
            return self.forward_encoder_only(input_ids, attention_mask, labels, output_hidden_states, output_attentions)
        if decoder_input_ids is None:
            decoder_targets = input_ids if task else labels
            if decoder_targets is None:
                raise UserError("An encoder-decoder needs decoder_input_ids or labels.")
            self.check_length(max(input_ids.shape[1], decoder_targets.shape[1]))
            decoder_input_ids = self.shift_right(decoder_targets)
        self.check_length(max(input_ids.shape[1], decoder_input_ids.shape[1]))
        states: list[Tensor] | None = [] if output_hidden_states else None
        lists: list[list[Tensor] | None] = [[] if output_attentions else None for _ in range(3)]
        encoder_attentions, decoder_attentions, cross = lists
        doc = mask_to_document_ids(attention_mask)
        encoded = self.encoder(self.embed(input_ids), doc, attentions=encoder_attentions)
        decoder_doc = None if doc is None else torch.zeros_like(decoder_input_ids)
        rank = None if decoder_attention_mask is None else padding_last_rank(decoder_attention_mask)
        x = self.embed(decoder_input_ids, position_embedding=self.decoder_embed)
        x = self.decoder(
            x, decoder_doc, rank, encoded, doc, states, attentions=decoder_attentions, cross_attentions=cross
        )
        last = last_token_index(input_ids, attention_mask)
        logits, loss = self.logits_and_loss(
            x, labels_or_span_labels(labels, start_positions, end_positions), last, decoder_doc, shift_labels=False
        )
        return ModelOutput(
            logits,
            loss,
            tuple_or_none(states),
            encoded,
            tuple_or_none(decoder_attentions),
            tuple_or_none(encoder_attentions),
            tuple_or_none(cross),
        )

    def forward_encoder_only(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        output_hidden_states: bool,
        output_attentions: bool,
    ) -> ModelOutput:
        """Return the output of a task head on the encoder's states."""
        self.check_length(input_ids.shape[1])
        states: list[Tensor] | None = [] if output_hidden_states else None
        attentions: list[Tensor] | None = [] if output_attentions else None
        doc = mask_to_document_ids(attention_mask)
        x = self.encoder(self.embed(input_ids), doc, all_hidden_states=states, attentions=attentions)
        logits, loss = self.logits_and_loss(
            x, labels, last_token_index(input_ids, attention_mask), doc, shift_labels=False
        )
        return ModelOutput(logits, loss, tuple_or_none(states), x, encoder_attentions=tuple_or_none(attentions))

    def shift_right(self, labels: Tensor) -> Tensor:
        """Return the decoder's input for these labels: the start token, then all labels but the last."""
        vocab = self.tokenizer.vocab if self.tokenizer is not None else None
        if vocab is None and self.config.adds_bos:
            raise UserError("The decoder's start token is unknown: this model has no tokenizer. Load one.")
        pad, start = 0, 0  # T5 starts with its padding token
        if vocab is not None:
            pad, start = vocab.pad, make_sequence_template(self.config, vocab).decoder_start_id
        return F.pad(labels.masked_fill(labels == LABEL_IGNORE_INDEX, pad), (1, -1), value=start)


MODEL_CLASSES: dict[str, Callable[[ModelConfig], Model]] = {
    "encoder": Encoder,
    "decoder": Decoder,
    "encoder-decoder": EncoderDecoder,
}


def detach_metrics(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return figures to log: copies without gradient, which no compiled step shares with its losses."""
    return {name: value.detach().to(torch.float32, copy=True) for name, value in metrics.items()}


def make_model(config: ModelConfig) -> Model:
    """Return a model of this config, initialised at random; one that does not fit into memory is a UserError."""
    if not config.problems():
        check_model_memory(config, allocate=torch.get_default_device().type != "meta")
    return MODEL_CLASSES[config.architecture](config)


class ForcedTokens(NamedTuple):
    """Token ids that generation forces (`forced_bos_token_id`, `forced_eos_token_id`); None forces none.

    `bos` is the first generated token. `eos` is the last one of a text that reaches the maximum length.
    """

    bos: int | None = None
    eos: int | None = None


def get_forced_tokens(model: Model, vocab: Ids) -> ForcedTokens:
    """Return the forced tokens of a model: those of its checkpoint, or the default of BART, an end token."""
    if model.forced_tokens is not None:
        return model.forced_tokens
    is_bart = model.config.adds_bos and model.config.architecture == "encoder-decoder"
    return ForcedTokens(eos=make_sequence_template(model.config, vocab).eos_id) if is_bart else ForcedTokens()


def get_eos_token_ids(model: Model, vocab: Ids) -> tuple[int, ...]:
    """Return the tokens that end generation: the list of the checkpoint, or the template's end token.

    A denoiser's answer also ends where the span of another blank begins.
    """
    if model.eos_token_ids:
        return model.eos_token_ids
    next_blanks = vocab.sentinel_ids if model.config.has_sentinel_prompt else ()
    return (make_sequence_template(model.config, vocab).eos_id, *next_blanks)


def last_token_index(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return (B,): the index of the last token of each text, with padding on either side."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return (mask * torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)).argmax(1)


def labels_or_span_labels(
    labels: Tensor | None, start_positions: Tensor | None, end_positions: Tensor | None
) -> Tensor | None:
    """Return start and end positions as labels (B, 2) where both are given, else `labels`."""
    return (
        labels
        if start_positions is None or end_positions is None
        else torch.stack([start_positions.flatten(), end_positions.flatten()], 1)
    )


def tuple_or_none(items: list[Tensor] | None) -> tuple[Tensor, ...] | None:
    return None if items is None else tuple(items)


def mask_to_document_ids(attention_mask: Tensor | None) -> Tensor | None:
    """Return document ids (B, T): 0 for text, -1 for padding, so that text never attends to padding."""
    return None if attention_mask is None else attention_mask.long() - 1


def padding_last_rank(attention_mask: Tensor) -> Tensor:
    """Return the causal attention rank (B, T) with padding after all text.

    Text never attends to padding, and every padding position attends to some position: softmax gives no NaN.
    """
    length = attention_mask.shape[1]
    return torch.arange(length, device=attention_mask.device) + length * (1 - attention_mask.long())
