"""Write on, token by token: what a decoder continues, what an encoder-decoder answers.

N rows that are written, B of them not finished, L places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from firth.errors import UserError
from firth.generate.beams import search
from firth.generate.choose import Chooser, Past
from firth.generate.decoding import Decoding
from firth.generate.reading import Ids, check_writes, evaluating, read_prompts, tokenizer_of
from firth.generate.room import FIRST_ROOM, Room, make_room
from firth.models import EncoderDecoder, Forced, Model, forced_of, framing

NEVER = 2**62  # tokens: no text has as many
LOOK_EVERY = 16  # places: how often a GPU is asked whether all rows have ended
Stops = Callable[[int, Ids], bool]  # a prompt, and what was written after it: does this end it?


@dataclass(frozen=True)
class Written:
    """What follows a prompt, without its end token; `finished` where that or a stop string came.

    `logprobs` are of each token (and of the end), by the model alone, whatever narrowed the choice; `score` is their
    sum, in a beam search what it was chosen by.
    """

    tokens: list[int]
    finished: bool
    logprobs: list[float]
    score: float


def generate_ids(
    model: Model,
    prompts: Sequence[Ids],
    max_new_tokens: int | None = None,
    decoding: Decoding | None = None,
    cache: bool = True,
) -> list[list[int]]:
    """What follows each prompt, up to the first end token, which is left out. The prompts have their frame already.

    With `num_return_sequences` those of a prompt follow each other. Strings to stop at are looked for only where texts
    are written (`generate`). Without `cache` everything is read again for each token.
    """
    decoding = decoding or Decoding()
    if max_new_tokens is not None:
        decoding = replace(decoding, max_new_tokens=max_new_tokens)
    return [written.tokens for written in write(model, prompts, decoding, cache, logprobs=False)]


@torch.no_grad()
def write(
    model: Model,
    prompts: Sequence[Ids],
    decoding: Decoding,
    cache: bool = True,
    stops: Stops | None = None,
    logprobs: bool = True,
) -> list[Written]:
    """What follows each prompt, `num_return_sequences` for each, in order."""
    ends = check_writes(model)
    if not prompts:
        return []
    if decoding.num_beams == 1:
        *_, draft = drafts(model, prompts, decoding, cache, stops, logprobs)  # always the same one
        return draft.written()
    with evaluating(model):
        room = make_room(model, prompts, decoding.max_new_tokens)
        reading = read_prompts(model, room.prompts, room.most, cache)
        logits_BV = reading.first()
        if decoding.num_beams > logits_BV.shape[1]:
            raise UserError(f"num_beams is {decoding.num_beams:,}, and there are {logits_BV.shape[1]:,} tokens.")
        past = make_past(model, room, decoding, ends, logits_BV)
        found = search(reading, logits_BV.float(), past, stops)
    return [Written(*text) for texts in found for text in texts]


@torch.no_grad()
def drafts(
    model: Model,
    prompts: Sequence[Ids],
    decoding: Decoding,
    cache: bool = True,
    stops: Stops | None = None,
    logprobs: bool = False,
) -> Iterator[Draft]:
    """The texts as they grow: the same draft after each place."""
    ends, each = check_writes(model), decoding.num_return_sequences
    with evaluating(model):
        room = make_room(model, prompts, decoding.max_new_tokens)
        reading = read_prompts(model, room.prompts, room.most, cache)
        logits_BV = reading.first()
        past, device = make_past(model, room, decoding, ends, logits_BV), logits_BV.device
        choose = Chooser(past, range(len(prompts) * each))
        draft = Draft([n for n in room.new for _ in range(each)], past, device)
        row_B = torch.arange(len(prompts), device=device).repeat_interleave(each)
        if each > 1:
            reading.take(row_B)
            past.take(row_B)
            logits_BV = logits_BV[row_B]
        live_B = torch.arange(len(row_B), device=device)
        for place in range(room.most):
            token_B = choose(logits_BV.float(), place)
            draft.add(live_B, token_B, logits_BV if logprobs else None)
            if stops is not None:
                draft.stop(stops, each)
            yield draft
            if place + 1 == room.most:
                break
            if device.type == "cpu" or stops is not None or place % LOOK_EVERY == LOOK_EVERY - 1:
                open_B = ~draft.done_N[live_B]
                left = int(open_B.sum())
                if not left:
                    break
                if device.type == "cpu" and left <= len(live_B) // 2:  # fewer rows are less work, but cost a copy
                    keep_B = open_B.nonzero()[:, 0]
                    reading.take(keep_B)
                    choose.take(keep_B)
                    live_B, token_B = live_B[keep_B], token_B[keep_B]
            past.add(token_B)
            logits_BV = reading.next(token_B)


class Draft:
    """What is written so far, on the device: a row that is done gets only end tokens.

    A row is done when it has ended, when it has stopped, or when there is room for no more.
    """

    def __init__(self, room: Sequence[int], past: Past, device: torch.device) -> None:
        N, L = len(room), min(max(room), FIRST_ROOM)
        self.past, self.end = past, past.ends[0]
        self.place, self.room_N = 0, torch.tensor(room, device=device)
        self.token_NL = torch.full((N, L), self.end, device=device)
        self.logprob_NL = torch.zeros(N, L, device=device)
        self.done_N = torch.zeros(N, dtype=torch.bool, device=device)
        self.ended_N = torch.zeros_like(self.done_N)
        self.stopped_N = torch.full((N,), NEVER, device=device)  # so many tokens were written before a stop

    def add(self, live_B: Tensor, token_B: Tensor, logits_BV: Tensor | None) -> None:
        """The next token of the rows that are read on."""
        if self.place == self.token_NL.shape[1]:
            self.token_NL = F.pad(self.token_NL, (0, self.place), value=self.end)
            self.logprob_NL = F.pad(self.logprob_NL, (0, self.place))
        done_B, ended_B = self.done_N[live_B], self.past.ended(token_B)
        self.token_NL[live_B, self.place] = token_B.masked_fill(done_B, self.end)
        if logits_BV is not None:
            found_B = logits_BV.float().log_softmax(-1).gather(1, token_B[:, None])[:, 0]
            self.logprob_NL[live_B, self.place] = found_B.masked_fill(done_B, 0.0)
        self.ended_N[live_B] |= ~done_B & ended_B
        self.place += 1
        self.done_N[live_B] = done_B | ended_B | (self.room_N[live_B] <= self.place)

    def stop(self, stops: Stops, each: int) -> None:
        """Rows that end with what they have now."""
        written_N = ~self.ended_N & (self.room_N >= self.place) & (self.stopped_N == NEVER)
        for row in written_N.nonzero()[:, 0].tolist():
            if stops(row // each, self.token_NL[row, : self.place].tolist()):
                self.done_N[row], self.stopped_N[row] = True, self.place

    def ids(self, row: int) -> list[int]:
        """The tokens of a row, up to the end."""
        ids = self.token_NL[row, : min(self.place, int(self.room_N[row]), int(self.stopped_N[row]))].tolist()
        return list(takewhile(lambda token: token not in self.past.ends, ids))

    def written(self) -> list[Written]:
        found = []
        stopped_N = (self.stopped_N < NEVER).tolist()
        for row, (ended, stopped) in enumerate(zip(self.ended_N.tolist(), stopped_N, strict=True)):
            ids = self.ids(row)
            logprobs = self.logprob_NL[row, : len(ids) + (ended and not stopped)].tolist()
            found.append(Written(ids, ended or stopped, logprobs, sum(logprobs)))
        return found


def make_past(model: Model, room: Room, decoding: Decoding, ends: Ids, logits_BV: Tensor) -> Past:
    """What counts as read: the prompt, or what the decoder of an encoder-decoder starts with."""
    vocab, prompts = tokenizer_of(model).vocab, room.prompts
    forced = forced_of(model, vocab)
    if isinstance(model, EncoderDecoder):
        prompts = [[framing(model.config, vocab).start]] * len(prompts)
    else:
        forced = Forced(eos=forced.eos)  # a text begins with its prompt
    return Past(prompts, decoding, ends, logits_BV.shape[1], logits_BV.device, forced, room.new)
