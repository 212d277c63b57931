"""Write on, token by token: what a decoder continues, what an encoder-decoder answers.

B rows that are not finished, T places, V vocabulary. Nothing is cached: every step reads the whole row again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from firth.console import warn
from firth.errors import UserError
from firth.models import EncoderDecoder, LMHead, Model, framing
from firth.objectives import Batch, Draw
from firth.tokens import Tokenizer

Ids = Sequence[int]
Ask = Callable[[Sequence[int], Sequence[Ids]], Tensor]  # which rows, what each row has written -> logits (B, V)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the likeliest (`temperature` 0), or a draw among the likeliest.

    `top_k` keeps so many tokens (0: all), `top_p` the likeliest that together have this share. A draw depends on
    the seed, the row and the place in it alone.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature is {self.temperature}, and must not be negative.")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}, and must not be negative; 0 means all.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}, and must be above 0 and at most 1.")


def generate(
    model: Model,
    prompts: Sequence[str],
    max_new_tokens: int = 50,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[str]:
    """Texts that begin with the prompts (decoders), or answers to them (encoder-decoders)."""
    tokenizer = tokenizer_of(model)
    check_writes(model)
    frame, read = framing(model.config, tokenizer.vocab), tokenizer.encode_batch(list(prompts))
    answers = isinstance(model, EncoderDecoder)
    framed = [[*frame.before, *ids, *([frame.end] if answers else [])] for ids in read]  # as in pretraining
    written = generate_ids(model, framed, max_new_tokens, Sampling(temperature, top_k, top_p, seed))
    return [tokenizer.decode(new if answers else [*ids, *new]) for ids, new in zip(read, written, strict=True)]


@torch.no_grad()
def generate_ids(
    model: Model, prompts: Sequence[Ids], max_new_tokens: int = 50, sampling: Sampling | None = None
) -> list[list[int]]:
    """What follows each prompt, up to the end token, which is left out. The prompts have their frame already."""
    end = check_writes(model)
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}, and must be at least 1.")
    if not prompts:
        return []
    sampling = sampling or Sampling()
    written: list[list[int]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    with evaluating(model):
        ask = reader(model, prompts)
        for place in range(max_new_tokens):
            if not live:
                break
            for row, token in zip(live, choose(ask(live, written), sampling, live, place), strict=True):
                written[row].append(token)
            live = [row for row in live if written[row][-1] != end]
    return [ids[:-1] if ids[-1] == end else ids for ids in written]


def choose(logits_BV: Tensor, sampling: Sampling, rows: Sequence[int], place: int) -> list[int]:
    """The next token of each row."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).tolist()
    p_BV, token_BV = (logits_BV.double() / sampling.temperature).softmax(-1).sort(descending=True, stable=True)
    before_BV = p_BV.cumsum(-1) - p_BV
    p_BV[before_BV >= sampling.top_p] = 0
    if sampling.top_k:
        p_BV[:, sampling.top_k :] = 0
    share_BV = p_BV.cumsum(-1)
    u_B1 = torch.from_numpy(Draw(sampling.seed, np.array(rows)).uniform(f"token {place}", 1)).to(share_BV)
    at_B1 = (share_BV <= u_B1 * share_BV[:, -1:]).sum(-1, keepdim=True)
    return token_BV.gather(1, at_B1)[:, 0].tolist()


# --- what a model says about the next token -----------------------------------------------------------------------


def reader(model: Model, prompts: Sequence[Ids]) -> Ask:
    """A function that asks the model for the next token of some of the prompts."""
    return answers(model, prompts) if isinstance(model, EncoderDecoder) else continues(model, prompts)


def continues(model: Model, prompts: Sequence[Ids]) -> Ask:
    """A decoder reads the prompt and what came after it."""
    window, pad = Window(model), tokenizer_of(model).vocab.pad

    def ask(rows: Sequence[int], written: Sequence[Ids]) -> Tensor:
        seen = [window([*prompts[row], *written[row]]) for row in rows]
        tokens, doc = pad_right(seen, pad)
        last = np.array([[len(ids) - 1] for ids in seen])
        batch = Batch(tokens, doc=doc, asked=last).to(model.embed.tokens.weight.device)
        return known(model, model.logits(batch)[:, 0])

    return ask


def answers(model: EncoderDecoder, prompts: Sequence[Ids]) -> Ask:
    """An encoder reads the prompt once; the decoder, after its start token, what it has written."""
    window, vocab = Window(model), tokenizer_of(model).vocab
    pad, start = vocab.pad, framing(model.config, vocab).start
    device = model.embed.tokens.weight.device
    source = Batch(*pad_right([window(ids) for ids in prompts], pad)).to(device)
    encoded = model.encode(source)

    def ask(rows: Sequence[int], written: Sequence[Ids]) -> Tensor:
        at = torch.tensor(rows, device=device)
        tokens = torch.tensor([window([start, *written[row]]) for row in rows], device=device)  # of equal length
        batch = Batch(
            source.tokens[at], doc=source.doc[at], decoder_tokens=tokens, decoder_doc=torch.zeros_like(tokens)
        )
        return known(model, model.head(model.read(batch, encoded[at])[:, -1], model.embed.tokens.weight))

    return ask


def known(model: Model, logits_BV: Tensor) -> Tensor:
    """The logits of tokens that the tokenizer has; some published models have more rows than that."""
    return logits_BV[:, : tokenizer_of(model).vocab.size]


class Window:
    """The latest tokens, as many as the model has places for; that some are left out is said once."""

    def __init__(self, model: Model) -> None:
        self.limit = model.config.max_length
        self.said = False

    def __call__(self, ids: Ids) -> Ids:
        if self.limit is None or len(ids) <= self.limit:
            return ids
        if not self.said:
            warn(f"The text runs past the {self.limit} tokens that this model can read: it sees only the latest ones.")
            self.said = True
        return ids[-self.limit :]


def pad_right(rows: Sequence[Ids], pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows as one array, and their `doc`: 0 for text, -1 for padding."""
    width = max(map(len, rows))
    tokens = np.array([[*ids, *[pad] * (width - len(ids))] for ids in rows])
    doc = np.array([[0] * len(ids) + [-1] * (width - len(ids)) for ids in rows])
    return tokens, doc


# --- can it write at all ------------------------------------------------------------------------------------------


def tokenizer_of(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise UserError("This model has no tokenizer: its folder needs a tokenizer.json.")
    return model.tokenizer


def check_writes(model: Model) -> int:
    """The end token of a model that writes text; a UserError says why another one cannot."""
    if model.config.shape == "encoder":
        raise UserError("An encoder does not write text. It can fill blanks: firth fill CHECKPOINT 'The ___ is red.'")
    check_words(model)
    return framing(model.config, tokenizer_of(model).vocab).end


def check_words(model: Model) -> None:
    if not isinstance(model.config.head, LMHead):
        raise UserError("This model was fine-tuned to choose classes, and has no words. Take the one it came from.")


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Without dropout; the model goes back to training if that is where it was."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)
