"""Encoder, Decoder, EncoderDecoder: a batch in, hidden states, logits and loss out.

B rows, T places, U places of the decoder, K asked places, D model width, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.errors import UserError
from firth.models.config import (
    AWDLSTM,
    BiLSTM,
    ELMo,
    FanIn,
    LMHead,
    ModelConfig,
    Normal,
    Seq2Seq,
    TaskHead,
    Uniform,
)
from firth.models.embed import Embedding, Placing
from firth.models.heads import IGNORED, BoundaryHead, PairHead, Verdicts, Vocabulary, pick
from firth.models.mask_decoder import LatePlaces
from firth.models.memory import Memory
from firth.models.recurrent import AWDStack, BothWays, FeatureReader, Spelling
from firth.models.recurrent import Reader as RecurrentReader
from firth.models.recurrent import Writer as RecurrentWriter
from firth.models.recurrent.lstm import bilstm
from firth.models.replaced import Replaced, filled, generator_config, verdict_loss
from firth.models.stack import Stack
from firth.models.task_heads import TASK_HEADS, Answers, ChoiceAnswers, Writer
from firth.models.two_stream import TwoStream
from firth.tokens.lexicon import opened

if TYPE_CHECKING:
    from firth.tokens import Tokenizer
    from firth.tokens import Vocabulary as Ids


@dataclass
class Output:
    """What a call with the Hugging Face input names returns. `loss` is the mean over what was asked."""

    logits: Tensor
    loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    attentions: tuple[Tensor, ...] | None = None  # of each layer (B, H, T, S), those of the decoder where there are two
    encoder_attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None

    @property
    def start_logits(self) -> Tensor:
        """(B, T): where an answer starts (`Span`)."""
        return self.logits[..., 0]

    @property
    def end_logits(self) -> Tensor:
        """(B, T): where it ends."""
        return self.logits[..., 1]


# A batch is anything with the fields of `firth.objectives.Batch`: the two rooms meet by these names alone.
Reads = Any


class Model(nn.Module):
    """What all shapes share: a head on some states, a loss, saving."""

    objective: dict[str, Any] | None = None  # a note on what it was pretrained with, which its checkpoints keep
    forced: Forced | None = None  # as its checkpoint says; None: as its family has it
    ends: tuple[int, ...] | None = None  # what ends its texts, where its checkpoint lists that; None: see `framing`

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if wrong := config.problems():
            raise UserError("; ".join(wrong) + ".")
        self.config = config
        self.embed = make_embedding(config)
        speaker = config if config.extra("generator") is None else generator_config(config)  # who answers in words
        self.head = make_head(speaker)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.__dict__.get("_tokenizer")

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """A model that spells words has no unknown ones: its tokenizer has an id for each."""
        if isinstance(self.embed, Spelling) and tokenizer is not None:
            tokenizer = opened(tokenizer)
            self.embed.read_with(tokenizer)
        self.__dict__["_tokenizer"] = tokenizer

    def read(self, batch: Reads) -> Tensor:
        """The states (B, T or U, D) that the head answers from."""
        raise NotImplementedError

    def asked_states(self, batch: Reads) -> Tensor:
        """The states at the asked places, (B, K, D); all of them when nothing in particular is asked."""
        x_BTD = self.read(batch)
        return x_BTD if batch.asked is None else pick(x_BTD, batch.asked)

    def logits(self, batch: Reads) -> Tensor:
        """(B, K, V) at the asked places, (B, K) verdicts on them, or what the head of a task answers there."""
        if isinstance(self.head, Answers):
            doc = self.doc_read(batch)
            return self.head.settled(self.head(self.read(batch), batch.asked, doc), batch.asked, doc)
        x = self.asked_states(batch)
        return self.head(x, self.embed.tokens.weight) if isinstance(self.head, Vocabulary) else self.head(x)

    def doc_read(self, batch: Reads) -> Tensor | None:
        """Which document each of the states that the head answers from is of."""
        return batch.doc

    def losses(self, batch: Reads) -> dict[str, Tensor]:
        """The parts of the loss as sums, each under the name of the count that divides it (`Batch.counts`).

        The caller takes the counts over the whole global batch, and adds the means up.
        """
        return {"answers": self.loss(batch)}

    def loss(self, batch: Reads) -> Tensor:
        """The loss of the head, summed over what is asked."""
        if isinstance(self.head, Answers):
            return self.task_loss(self.head, self.read(batch), batch)
        return self.loss_of(self.asked_states(batch), batch)

    def loss_of(self, x: Tensor, batch: Reads) -> Tensor:
        """The same from the states at the asked places."""
        assert isinstance(self.head, Vocabulary)
        return self.head.loss(x.flatten(0, -2), batch.labels.flatten(), self.embed.tokens.weight)

    def task_loss(self, head: Answers, x_BTD: Tensor, batch: Reads) -> Tensor:
        doc = self.doc_read(batch)
        return head.loss(head(x_BTD, batch.asked, doc), batch, doc)

    def answer(
        self, x: Tensor, labels: Tensor | None, last: Tensor, doc: Tensor | None, shift: bool
    ) -> tuple[Tensor, Any]:
        """Logits and mean loss for a call with the Hugging Face names. `last` is where the last token of a text is."""
        if isinstance(self.head, Answers):
            first = getattr(self.config.head, "pool", None) == "first"
            return self.head.call(x, torch.zeros_like(last) if first else last, doc, labels)
        if isinstance(self.head, Verdicts):
            logits = self.head(x)
            return logits, None if labels is None else F.binary_cross_entropy_with_logits(logits, labels.float())
        logits = self.head(x, self.embed.tokens.weight)
        if labels is None:
            return logits, None
        scores, wanted = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
        return logits, F.cross_entropy(scores.flatten(0, 1).float(), wanted.flatten(), ignore_index=IGNORED)

    def check_length(self, length: int) -> None:
        limit = self.config.max_length
        if limit is not None and length > limit:
            raise UserError(f"A text of {length} tokens is longer than the {limit} places that this model has learned.")

    def remember(self, length: int) -> None:
        """Read rows that go on where those of the last call stopped, with so many of the states before them."""
        for module in self.modules():
            if isinstance(module, Stack):
                module.memory = Memory(length)

    def take_up(self, carry: Mapping[str, Tensor]) -> None:
        """Begin with what `hand_on` gave for the rows before these; with nothing where they begin a text."""
        for name, memory in self.memories().items():
            memory.take_up({int(k.removeprefix(name)): v for k, v in carry.items() if k.startswith(name)})

    def hand_on(self) -> dict[str, Tensor]:
        """What the next rows need of these, (B, ...) each, and forget it; nothing in a model that does not remember."""
        memories = self.memories().items()
        return {f"{name}{i}": state for name, memory in memories for i, state in memory.hand_on().items()}

    def memories(self) -> dict[str, Memory]:
        """Those of its stacks, by the names of these."""
        stacks = {f"{name}.": m for name, m in self.named_modules() if isinstance(m, Stack)}
        return {name: stack.memory for name, stack in stacks.items() if stack.memory is not None}

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def twin(self) -> Self:
        """A copy with weights of its own, and the same tokenizer."""
        return copy.deepcopy(self, {id(self.tokenizer): self.tokenizer})

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write a Hugging Face folder; the tokenizer goes along when the model has one."""
        from firth.models.weights import save_model

        save_model(self, Path(folder), overwrite)


def make_head(config: ModelConfig) -> Vocabulary | Answers | Verdicts:
    if isinstance(config.head, LMHead):
        return Vocabulary(config, config.head)
    if isinstance(config.head, TaskHead):
        return TASK_HEADS[type(config.head)](config, config.head)
    return Verdicts(config)


def make_embedding(config: ModelConfig) -> Embedding:
    if isinstance(config.recurrent, ELMo):
        return cast(Embedding, Spelling(config))  # it does what the others do, and has other parts
    return Embedding(config)


def make_stack(config: ModelConfig, num_layers: int, causal: bool, cross: bool = False) -> Stack:
    if isinstance(config.recurrent, Seq2Seq):
        return RecurrentWriter(config) if cross else RecurrentReader(config)
    if config.recurrent is not None:
        return {AWDLSTM: AWDStack, BiLSTM: bilstm, ELMo: BothWays}[type(config.recurrent)](config)
    return Stack(config, num_layers, causal, cross)


EXTRAS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "pair": PairHead,
    "boundary": BoundaryHead,
    "generator": Replaced,
    "query": TwoStream,
    "decoder": LatePlaces,
    "auxiliary": Writer,
    "features": FeatureReader,
}


class Encoder(Model):
    """One stack in which all see all, with whatever an objective needs beside it (`extras`)."""

    causal = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.stack = make_stack(config, config.num_layers, self.causal)
        self.extras = nn.ModuleDict({n: make(config) for n, make in EXTRAS.items() if config.extra(n) is not None})
        initialise(self)

    @property
    def generator(self) -> Replaced | None:
        found = self.extras["generator"] if "generator" in self.extras else None  # noqa: SIM401, it has no get
        assert found is None or isinstance(found, Replaced)
        return found

    def body(self, batch: Reads, states: list[Tensor] | None = None, asked: Tensor | None = None) -> Tensor:
        """The last states (B, T, D), or (B, 2, T, D) where each row is read in two directions.

        With `asked` (B, K), those of these places, which a stack must be able to compute alone.
        """
        doc, rank = batch.doc, batch.rank
        if isinstance(self.embed, Spelling) and batch.characters is not None:
            vectors_BTE = self.embed.spelled(batch.characters)
        else:
            vectors_BTE = self.body_vectors(batch.tokens, batch.position, batch.segment)
        x_BTD = self.embed.widen(vectors_BTE)
        if isinstance(self.stack, BothWays) and rank is not None:
            return self.stack.apart(self.stack(x_BTD, doc))
        if rank is None or rank.ndim == 2:
            return self.stack(x_BTD, doc, rank, states=states, segment=batch.segment, asked=asked)
        doc, segment = (None if a is None else a.repeat_interleave(2, 0) for a in (doc, batch.segment))
        y = self.stack(x_BTD.repeat_interleave(2, 0), doc, rank.flatten(0, 1), segment=segment)
        return y.unflatten(0, (-1, 2))

    def body_vectors(self, tokens: Tensor, position: Tensor | None, segment: Tensor | None) -> Tensor:
        """What the body begins with, before it is widened: that of the generator, or with a difference of its own."""
        if self.generator is None or self.generator.delta is None:
            return self.embed.vectors(tokens, position, segment)
        x_BTE = self.embed.vectors_of(tokens).detach() + self.generator.delta(tokens)
        return self.embed.place(x_BTE, position, segment)

    def read(self, batch: Reads) -> Tensor:
        if "features" in self.extras:
            states: list[Tensor] = []
            self.body(batch, states)
            return self.extras["features"](states, batch.doc)
        if self.generator is None:
            return self.body(batch)
        vectors_BTE = self.embed.vectors(batch.tokens, batch.position, batch.segment)
        return self.generator(vectors_BTE, batch.doc, batch.rank, batch.segment)

    def asked_states(self, batch: Reads) -> Tensor:
        if isinstance(self.stack, BothWays) and batch.rank is None:  # the way forward tells what comes next
            x_BTP = self.stack.apart(self.read(batch))[:, 0]
            return x_BTP if batch.asked is None else pick(x_BTP, batch.asked)
        if "query" in self.extras and batch.asked is not None:
            return self.extras["query"](self.embed, self.stack, batch)
        if "decoder" in self.extras and batch.asked is not None:
            x_BTD = self.embed(batch.tokens, batch.position, batch.segment)
            return self.extras["decoder"](x_BTD, self.stack, batch)
        plain = self.generator is None and "features" not in self.extras and batch.rank is None
        if plain and batch.asked is not None and type(self.stack) is Stack:
            narrow = self.stack.can_narrow(batch.asked, batch.tokens.shape[1])
            return self.body(batch, asked=batch.asked) if narrow else super().asked_states(batch)
        return super().asked_states(batch)

    def losses(self, batch: Reads) -> dict[str, Tensor]:
        assert batch.pair is None or "pair" in self.extras, "an objective's recipe adds it"
        assert batch.boundary is None or "boundary" in self.extras, "an objective's recipe adds it"
        if self.generator is not None:
            return self.losses_of_both(self.generator, batch)
        if "auxiliary" in self.extras and batch.labels is not None:
            return self.losses_with_words(batch)
        if batch.pair is None and batch.boundary is None:
            return super().losses(batch)
        x_BTD = self.read(batch)
        parts = {"answers": self.loss_of(pick(x_BTD, batch.asked), batch)}
        if batch.boundary is not None:
            assert isinstance(self.head, Vocabulary)
            y_NE, labels_N = self.extras["boundary"](x_BTD, batch.boundary).flatten(0, 1), batch.labels.flatten()
            again = self.head.loss_of_prepared(y_NE, labels_N, self.embed.tokens.weight)
            parts["answers"] = parts["answers"] + again
        if batch.pair is not None:
            parts["pairs"] = F.cross_entropy(self.extras["pair"](x_BTD).float(), batch.pair, reduction="sum")
        return parts

    def losses_with_words(self, batch: Reads) -> dict[str, Tensor]:
        """The answers of a task, and every next token of the texts."""
        writer, x_BTD = self.extras["auxiliary"], self.read(batch)
        assert isinstance(writer, Writer)
        assert isinstance(self.head, Answers)
        words = writer.loss(x_BTD.flatten(0, 1), batch.labels.flatten(), self.embed.tokens.weight)
        return {"answers": self.task_loss(self.head, x_BTD, batch), "words": writer.share * words}

    def losses_of_both(self, generator: Replaced, batch: Reads) -> dict[str, Tensor]:
        """The generator's answers, and the body's verdict on every token of the text that they are put into."""
        logits_BKV, labels_BK = self.logits(batch).float(), batch.labels
        scores_NV = logits_BKV.flatten(0, 1)  # a loss of three dimensions has no fixed order on a GPU
        answers = F.cross_entropy(scores_NV, labels_BK.flatten(), ignore_index=IGNORED, reduction="sum")
        read_BT, replaced_BT = filled(logits_BKV, batch)
        score_BT = generator.verdict(self.body(batch._replace(tokens=read_BT)))
        return {"answers": answers, "tokens": generator.weight * verdict_loss(score_BT, replaced_BT, batch.doc)}

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
    ) -> Output:
        """With a generator the logits are its own, and the hidden states the body's.

        A query stream and a mask decoder answer only in batches that say what is asked; here they take no part.
        Choices are told from `input_ids` (B, choices, T), spans learned from `start_positions` and `end_positions`.
        """
        self.check_length(input_ids.shape[-1])
        *shape, _ = input_ids.shape
        if isinstance(self.head, ChoiceAnswers) and len(shape) == 2:
            given = (input_ids, attention_mask, token_type_ids, position_ids, langs)
            folded = [None if a is None else a.flatten(0, 1) for a in given]
            input_ids, (attention_mask, token_type_ids, position_ids, langs) = input_ids.flatten(0, 1), folded[1:]
        states: list[Tensor] | None = [] if output_hidden_states or "features" in self.extras else None
        seen: list[Tensor] | None = [] if output_attentions else None
        position, segment = self.places(position_ids, attention_mask), token_type_ids if langs is None else langs
        doc = as_doc(attention_mask)
        x = self.embed.widen(self.body_vectors(input_ids, position, segment))
        x = self.stack(x, doc, states=states, position=position, seen=seen, segment=segment)
        if self.generator is not None:
            x = self.generator(self.embed.vectors(input_ids, position, segment), doc, segment=segment)
        if "features" in self.extras:
            x = self.extras["features"](states, doc)
        if isinstance(self.stack, BothWays) and isinstance(self.head, Vocabulary):
            x = self.stack.apart(x)[:, 0]  # the way forward tells what comes next
        last = last_place(input_ids, attention_mask).view(shape)
        shift = self.causal or isinstance(self.stack, BothWays)
        logits, loss = self.answer(x, both(labels, start_positions, end_positions), last, doc, shift=shift)
        return Output(logits, loss, kept(states) if output_hidden_states else None, attentions=kept(seen))

    def places(self, position_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
        """Places from 0. RoBERTa's are counted from its offset on, and padding has none."""
        offset = self.embed.offset
        if position_ids is not None:
            return position_ids - offset
        return None if attention_mask is None or not offset else (attention_mask.long().cumsum(1) - 1).clamp(min=0)


class Decoder(Encoder):
    """One stack in which each sees what came before."""

    causal = True

    def losses(self, batch: Reads) -> dict[str, Tensor]:
        parts = super().losses(batch)
        return self.stack.with_cost(parts) if isinstance(self.stack, AWDStack) else parts


class EncoderDecoder(Model):
    """Two stacks that share their token vectors, not what is added to them; the second reads the first.

    Where a task is answered from the encoder, the second takes no part in it, and T5 has none then.
    """

    decoder_embed: Placing
    decoder: Stack

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if config.has_decoder:
            self.decoder_embed = Placing(config)
        self.encoder = make_stack(config, config.num_layers, causal=False)
        if config.has_decoder:
            self.decoder = make_stack(config, config.decoder_layers, causal=True, cross=True)
        if config.has_decoder and config.share_stacks:
            for mine, encoders in zip(self.decoder.blocks, self.encoder.blocks, strict=True):
                for part in ("attention", "attention_norm", "mlp", "mlp_norm"):
                    setattr(mine, part, getattr(encoders, part))
        initialise(self)

    def doc_read(self, batch: Reads) -> Tensor | None:
        return batch.doc if self.config.reads_encoder else batch.decoder_doc

    def encode(self, batch: Reads) -> Tensor:
        return self.encoder(self.embed(batch.tokens, batch.position, batch.segment), batch.doc, batch.rank)

    def read(self, batch: Reads, encoded: Tensor | None = None, asking: Tensor | None = None) -> Tensor:
        """`encoded` is what is known of the texts already, `asking` the text that each place of the decoder reads."""
        read = self.encode(batch) if encoded is None else encoded
        if self.config.reads_encoder:
            return read
        x = self.embed(batch.decoder_tokens, batch.decoder_position, placing=self.decoder_embed)
        return self.decoder(x, batch.decoder_doc, read=read, read_doc=batch.doc, asking=asking)

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
    ) -> Output:
        """`decoder_input_ids` are made of `labels` when they are not given: the start, then all but the last.

        A task's answers are told from the states of a decoder that reads the text again (BART, section 3).
        """
        task = isinstance(self.head, Answers)
        if isinstance(self.head, ChoiceAnswers):
            raise UserError("An encoder-decoder tells choices only in a batch, as Model.logits takes it.")
        if self.config.reads_encoder:
            return self.answer_from_encoder(input_ids, attention_mask, labels, output_hidden_states, output_attentions)
        written = (input_ids if task else labels) if decoder_input_ids is None else decoder_input_ids
        if written is None:
            raise UserError("An encoder-decoder needs decoder_input_ids or labels.")
        self.check_length(max(input_ids.shape[1], written.shape[1]))
        if decoder_input_ids is None:
            decoder_input_ids = self.begun(written)
        states: list[Tensor] | None = [] if output_hidden_states else None
        lists: list[list[Tensor] | None] = [[] if output_attentions else None for _ in range(3)]
        in_encoder, in_decoder, across = lists
        doc = as_doc(attention_mask)
        read = self.encoder(self.embed(input_ids), doc, seen=in_encoder)
        asking = None if doc is None else torch.zeros_like(decoder_input_ids)
        rank = None if decoder_attention_mask is None else padding_last(decoder_attention_mask)
        x = self.embed(decoder_input_ids, placing=self.decoder_embed)
        x = self.decoder(x, asking, rank, read, doc, states, seen=in_decoder, seen_across=across)
        last = last_place(input_ids, attention_mask)
        logits, loss = self.answer(x, both(labels, start_positions, end_positions), last, asking, shift=False)
        return Output(logits, loss, kept(states), read, kept(in_decoder), kept(in_encoder), kept(across))

    def answer_from_encoder(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        show_states: bool,
        show_seen: bool,
    ) -> Output:
        """What a call returns where the decoder takes no part."""
        self.check_length(input_ids.shape[1])
        states: list[Tensor] | None = [] if show_states else None
        seen: list[Tensor] | None = [] if show_seen else None
        doc = as_doc(attention_mask)
        read = self.encoder(self.embed(input_ids), doc, states=states, seen=seen)
        logits, loss = self.answer(read, labels, last_place(input_ids, attention_mask), doc, shift=False)
        return Output(logits, loss, kept(states), read, encoder_attentions=kept(seen))

    def begun(self, labels: Tensor) -> Tensor:
        """What a decoder reads when it is to answer this."""
        vocab = self.tokenizer.vocab if self.tokenizer is not None else None
        if vocab is None and self.config.framed:
            raise UserError("Without its tokenizer this model does not know how an answer begins: load one.")
        pad, start = (0, 0) if vocab is None else (vocab.pad, framing(self.config, vocab).start)
        return F.pad(labels.masked_fill(labels == IGNORED, pad), (1, -1), value=start)


SHAPES: dict[str, Callable[[ModelConfig], Model]] = {
    "encoder": Encoder,
    "decoder": Decoder,
    "encoder-decoder": EncoderDecoder,
}


def make_model(config: ModelConfig) -> Model:
    return SHAPES[config.shape](config)


class Forced(NamedTuple):
    """The tokens that all texts which a model writes begin and end with, whatever is likelier; None: no such token.

    `eos` comes only when there is room for no other, so that a text that is cut has its end.
    """

    bos: int | None = None
    eos: int | None = None


def forced_of(model: Model, vocab: Ids) -> Forced:
    """What is forced in the texts of this model: its checkpoint says so, or BART's own way."""
    if model.forced is not None:
        return model.forced
    framed = model.config.framed and model.config.shape == "encoder-decoder"
    return Forced(eos=framing(model.config, vocab).end) if framed else Forced()


def ends_of(model: Model, vocab: Ids) -> tuple[int, ...]:
    """The tokens each of which ends a text that this model writes: those that its checkpoint lists, or its frame's."""
    return model.ends or (framing(model.config, vocab).end,)


class Framing(NamedTuple):
    """What stands around a text as a model reads it; `end` is also what ends a text that it learns to write."""

    before: tuple[int, ...]
    end: int
    start: int  # what a decoder that reads an encoder begins with


def framing(config: ModelConfig, vocab: Ids) -> Framing:
    """The frame of a text for this model: that of the objectives that its shape is trained with."""
    framed = config.framed or config.shape == "encoder"
    end = vocab.sep if framed else vocab.eos
    first = {"encoder": vocab.cls, "decoder": vocab.eos if vocab.bos is None else vocab.bos}
    before = vocab.cls if framed else first.get(config.shape)
    if end is None or (framed and before is None):
        wanted = "[CLS] and [SEP]" if framed else "end"
        raise UserError(f"The tokenizer of this model has no {wanted} token.")
    return Framing(() if before is None else (before,), end, end if framed else vocab.pad)


TWO_BETWEEN = ("roberta", "xlm-roberta", "afriberta", "bart")  # two separators stand between two texts of these
CLASS_LAST = "xlnet"  # has its [CLS] at the end


def surroundings(config: ModelConfig, vocab: Ids) -> tuple[tuple[int, ...], ...]:
    """What stands before, between and after one text or two, as a model reads them."""
    before, end, _ = framing(config, vocab)
    between = (end,) * (2 if config.family in TWO_BETWEEN else 1)
    return ((), between, (end, *before)) if config.family == CLASS_LAST else (before, between, (end,))


def last_place(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """(B,): where the last token of each text stands."""
    seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return (seen * torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)).argmax(1)


def both(labels: Tensor | None, start: Tensor | None, end: Tensor | None) -> Tensor | None:
    """What is to be learned in a call: the labels, or where answers start and end (B, 2)."""
    return labels if start is None or end is None else torch.stack([start.flatten(), end.flatten()], 1)


def kept(states: list[Tensor] | None) -> tuple[Tensor, ...] | None:
    """What was collected on the way through the layers, or None where it was not asked for."""
    return None if states is None else tuple(states)


def as_doc(attention_mask: Tensor | None) -> Tensor | None:
    """Padding as a document of its own (-1), so that text never sees it; None when there is no padding."""
    return None if attention_mask is None else attention_mask.long() - 1


def padding_last(attention_mask: Tensor) -> Tensor:
    """The order of places with padding after all text: text never sees it, and it sees something, as softmax needs."""
    length = attention_mask.shape[1]
    return torch.arange(length, device=attention_mask.device) + length * (1 - attention_mask.long())


def count_parameters(config: ModelConfig) -> int:
    """How many numbers a model of this config has, without making it."""
    with torch.device("meta"):
        return make_model(config).num_parameters


LSTM_WEIGHTS = ("weight_ih_l", "weight_hh_l", "weight_hr_l")


@torch.no_grad()
def initialise(model: Model) -> None:
    """Starting weights as published for the family: the spread by `config.init`, biases 0, norms 1."""
    config, init = model.config, model.config.init
    for name, p in model.named_parameters():
        if p.is_meta:  # weights that are only counted
            continue
        if p.ndim < 2:
            if name.endswith("bias") and not isinstance(init, Uniform):
                p.zero_()
        elif name.endswith("generator.delta.weight"):
            p.zero_()
        elif name.rpartition(".")[2].startswith(LSTM_WEIGHTS):
            continue  # which begin as torch has them, by their own width
        elif isinstance(init, Uniform):
            if name == "embed.tokens.weight":
                p.uniform_(-init.width, init.width)
            elif name == "head.weight":
                p.normal_(0.0, p.shape[-1] ** -0.5)
        elif isinstance(init, FanIn):
            p.normal_(0.0, fan_in_std(name, p, config))
            if name.endswith(("attention.qkv.weight", "cross.qkv.weight")):
                p[: config.num_heads * config.head_size] *= config.head_size**-0.5  # the scores are not scaled
        else:
            std = normal_std(name, init, config)
            if init.cut is None:
                p.normal_(0.0, std)
            else:
                nn.init.trunc_normal_(p, 0.0, std, -init.cut * std, init.cut * std)


def normal_std(name: str, init: Normal, config: ModelConfig) -> float:
    """The spread of vectors that are looked up, of what writes to the residual stream, of the rest."""
    looked_up = name.endswith(("tokens.weight", "places.weight", "segments.weight", "languages.weight"))
    if init.embed_std is not None and looked_up:
        return init.embed_std
    if init.scale_residual and name.endswith(("attention.out.weight", "mlp.down.weight")):
        return init.std / math.sqrt(2 * config.num_layers)
    return init.std


def fan_in_std(name: str, p: Tensor, config: ModelConfig) -> float:
    """T5's spreads: 1 for embeddings and the untied head, 1/sqrt(inputs) for matrices."""
    if name.endswith(("embed.tokens.weight", "head.weight")):
        return 1.0
    return (config.dim if name.endswith("score.table.weight") else p.shape[-1]) ** -0.5
