"""What learns word vectors: skip-gram or CBOW on a CPU and on a GPU, and GloVe's factors.

W words of a stretch of text, V ids of the shards, N words of the model, D numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from firth.console import progress
from firth.errors import UserError
from firth.files import damage, whole_folder
from firth.models import Model, glove, make_model, word2vec
from firth.models.presets import bag
from firth.models.windows import How, Windows, learn_windows, steady_programs
from firth.tokens import Shards, Tokenizer
from firth.tokens.rows import mix, permute
from firth.train.counted import GloVe, Vectors, Word2Vec
from firth.train.words import STRETCH, Lexicon, num_stretches, stretch

STRETCHES = 32  # in a step, after which all workers have done what they began
AHEAD = 4  # steps whose text is read early for a GPU
RECORDS = 2**16  # pairs of words that a worker of GloVe reads at once
FEWEST = 5  # epochs, unless said
HELD_OUT = 50  # stretches of held-out text that are scored at the end


class Learner(Protocol):
    """What learns in steps that are a pure function of their number, but for workers that pass each other."""

    steps: int
    tokens_per_step: int
    tokens: int  # that all steps read together

    @property
    def recipe(self) -> Vectors: ...

    def step(self, number: int, pool: ThreadPoolExecutor) -> tuple[float, int]:
        """Learn; the sum of the losses, and of how many guesses."""

    def rate(self, number: int) -> float: ...

    def state(self) -> dict[str, np.ndarray]:
        """The arrays that a resumed run needs, which steps change in place."""

    def model(self) -> Model: ...


class SkipGramOrCBOW:
    """word2vec on the stretches of a text, in another order in each epoch."""

    def __init__(self, shards: Shards, lexicon: Lexicon, recipe: Word2Vec) -> None:
        self.shards, self.lexicon, self.recipe = shards, lexicon, recipe
        num = len(lexicon.counts)
        self.inputs_ND = word2vec.first_vectors(num, recipe.vector_size, recipe.seed)
        self.inputs_ND[lexicon.counts == 0] = 0
        self.outputs_ND = np.zeros_like(self.inputs_ND)
        self.noise = word2vec.noise(lexicon.counts, recipe.ns_exponent)
        self.kept_N = word2vec.kept(lexicon.counts, recipe.sample)
        self.stretches = num_stretches(shards)
        self.total = turns_of(recipe, self.stretches)
        self.steps = -(-self.total // STRETCHES)
        epochs, rest = divmod(self.total, self.stretches)
        self.tokens_per_step, self.tokens = STRETCH * STRETCHES, shards.num_tokens * epochs + rest * STRETCH

    def rate(self, number: int) -> float:
        return self._rate(number * STRETCHES)

    def _rate(self, turn: int) -> float:
        return self.recipe.alpha - (self.recipe.alpha - self.recipe.min_alpha) * turn / self.total

    def stretches_at(self, turns: range) -> list[tuple[np.ndarray, np.ndarray]]:
        """What is to be read at some turns, in another order in each epoch."""
        epochs, numbers = np.divmod(np.array(turns), self.stretches)
        places = permute(numbers, self.stretches, mix(self.recipe.seed, epochs))
        return [stretch(self.shards, self.lexicon.word_of, place) for place in places.tolist()]

    def words(self, turn: int) -> tuple[np.ndarray, np.ndarray, int]:
        """What is read at one turn, frequent words left out at random; and the seed of the rest."""
        [(words_W, doc_W)] = self.stretches_at(range(turn, turn + 1))
        seed = int(mix(self.recipe.seed, 1, turn))
        read = np.random.default_rng(seed).random(len(words_W), np.float32) < self.kept_N[words_W]
        read &= words_W >= 0
        return words_W[read], doc_W[read], seed

    def turn(self, turn: int) -> tuple[float, int]:
        words_W, doc_W, seed = self.words(turn)
        return self.learn(words_W, doc_W, self._rate(turn), seed)

    def learn(self, words_W: np.ndarray, doc_W: np.ndarray, rate: float, seed: int) -> tuple[float, int]:
        r = self.recipe
        how = (r.window, bool(r.sg), r.negative, np.float32(rate), *self.noise, np.uint64(seed))
        return word2vec.learn(words_W, doc_W, self.inputs_ND, self.outputs_ND, *how)

    def step(self, number: int, pool: ThreadPoolExecutor) -> tuple[float, int]:
        turns = range(number * STRETCHES, min((number + 1) * STRETCHES, self.total))
        if self.recipe.workers == 1:
            return added(map(self.turn, turns))
        return added(pool.map(self.turn, turns))

    def held_out_loss(self, shards: Shards) -> float | None:
        """The mean loss on text that was not read: a step at rate 0."""
        parts = []
        for number in range(min(HELD_OUT, num_stretches(shards))):
            words_W, doc_W = stretch(shards, self.lexicon.word_of, number)
            parts.append(self.learn(words_W[words_W >= 0], doc_W[words_W >= 0], 0.0, number))
        total, guesses = added(parts)
        return total / guesses if guesses else None

    def state(self) -> dict[str, np.ndarray]:
        return {"inputs": self.inputs_ND, "outputs": self.outputs_ND}

    def model(self) -> Model:
        return as_model(self.lexicon.tokenizer, self.inputs_ND, self.outputs_ND, self.recipe.bigrams)


class OnGPU(SkipGramOrCBOW):
    """The same with many windows at once. The text of the next steps is read while one learns."""

    def __init__(self, shards: Shards, lexicon: Lexicon, recipe: Word2Vec, device: str = "cuda") -> None:
        super().__init__(shards, lexicon, recipe)
        self.device = torch.device(device)
        self.inputs, self.outputs = (torch.from_numpy(a).to(self.device) for a in (self.inputs_ND, self.outputs_ND))
        of_words = *self.noise, self.kept_N
        self.own_N, self.alias_N, self.kept = (torch.from_numpy(a).to(self.device) for a in of_words)
        read_N, noise_N = lexicon.counts * self.kept_N, word2vec.noise_share(lexicon.counts, recipe.ns_exponent)
        how = recipe.window, bool(recipe.sg), recipe.negative, recipe.alpha
        self.programs = steady_programs(read_N / read_N.sum(), noise_N, *how)
        self.following: dict[int, Future[tuple[np.ndarray, np.ndarray]]] = {}

    def read(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(W,) the words of a step, and which document of which stretch each is of. What is no word is -1."""
        turns = range(number * STRETCHES, min((number + 1) * STRETCHES, self.total))
        words, docs = zip(*self.stretches_at(turns), strict=True)
        doc_W = np.concatenate(docs)
        begins_W = np.diff(doc_W, prepend=-1) != 0
        begins_W[np.cumsum([len(doc) for doc in docs])[:-1]] = True
        return np.concatenate(words), np.cumsum(begins_W, dtype=np.int32)

    def step(self, number: int, pool: ThreadPoolExecutor) -> tuple[float, int]:
        for soon in range(number, min(number + AHEAD, self.steps)):
            if soon not in self.following:
                self.following[soon] = pool.submit(self.read, soon)
        words_W, doc_W = (torch.from_numpy(a).to(self.device) for a in self.following.pop(number).result())
        r = self.recipe
        draw = torch.Generator(self.device).manual_seed(int(mix(r.seed, 2, number)) >> 1)
        how: dict[str, Any] = {"generator": draw, "device": self.device}
        read_W = (words_W >= 0) & (torch.rand(len(words_W), **how) < self.kept[words_W.clamp(min=0)])
        words_W, doc_W = words_W[read_W], doc_W[read_W]
        num = len(words_W)
        size_W = torch.randint(1, r.window + 1, (num,), dtype=torch.int32, **how)
        place_WK = torch.randint(len(self.own_N), (num, r.negative), **how)
        own_WK = torch.rand((num, r.negative), **how) < self.own_N[place_WK]
        noise_WK = torch.where(own_WK, place_WK.int(), self.alias_N[place_WK])
        learned = How(r.window, bool(r.sg), self.rate(number), self.programs)
        text = Windows(words_W, doc_W, size_W, noise_WK)
        total, guesses = learn_windows(text, self.inputs, self.outputs, learned)
        return float(total), int(guesses)

    def state(self) -> dict[str, np.ndarray]:
        for ours, theirs in ((self.inputs_ND, self.inputs), (self.outputs_ND, self.outputs)):
            ours[:] = theirs.cpu().numpy()
        return super().state()

    def model(self) -> Model:
        self.state()
        return super().model()


class Factors:
    """GloVe on the counted pairs of words, in another order in each epoch."""

    def __init__(self, records: np.ndarray, lexicon: Lexicon, recipe: GloVe) -> None:
        self.records, self.lexicon, self.recipe = records, lexicon, recipe
        self.arrays = glove.first_state(len(lexicon.counts), recipe.vector_size, recipe.seed)
        self.blocks = -(-len(records) // RECORDS)
        self.total = turns_of(recipe, self.blocks)
        self.steps = -(-self.total // STRETCHES)
        epochs, rest = divmod(self.total, self.blocks)
        self.tokens_per_step, self.tokens = RECORDS * STRETCHES, len(records) * epochs + rest * RECORDS

    def rate(self, number: int) -> float:
        return self.recipe.eta

    def turn(self, turn: int) -> tuple[float, int]:
        epoch, number = divmod(turn, self.blocks)
        number = int(permute(np.array([number]), self.blocks, mix(self.recipe.seed, epoch))[0])
        some = np.array(self.records[number * RECORDS : (number + 1) * RECORDS])
        first_R, second_R = glove.words_of(some["key"], len(self.lexicon.counts))
        how = tuple(map(np.float32, (self.recipe.eta, self.recipe.x_max, self.recipe.alpha)))
        return glove.learn(first_R, second_R, np.ascontiguousarray(some["value"]), *self.arrays.values(), *how)

    def step(self, number: int, pool: ThreadPoolExecutor) -> tuple[float, int]:
        turns = range(number * STRETCHES, min((number + 1) * STRETCHES, self.total))
        return added(map(self.turn, turns) if self.recipe.workers == 1 else pool.map(self.turn, turns))

    def state(self) -> dict[str, np.ndarray]:
        return self.arrays

    def model(self) -> Model:
        """A word's vector is the sum of its two (section 4.2)."""
        sum_ND = self.arrays["words"] + self.arrays["contexts"]
        sum_ND[self.lexicon.counts == 0] = 0
        return as_model(self.lexicon.tokenizer, sum_ND, None, self.recipe.bigrams)


def turns_of(recipe: Vectors, in_epoch: int) -> int:
    """How often a worker takes something to read, where an epoch has so many such turns."""
    return recipe.max_steps * STRETCHES if recipe.max_steps else in_epoch * (recipe.epochs or FEWEST)


def added(parts: Any) -> tuple[float, int]:
    """Sums of losses and numbers of guesses, added up in order."""
    found = list(parts)
    return sum(total for total, _ in found), sum(num for _, num in found)


def as_model(tokenizer: Tokenizer, vectors_ND: np.ndarray, outputs_ND: np.ndarray | None, bigrams: int) -> Model:
    """Word vectors as a model without layers: a text is what its words are. Outputs are its head, where it has any."""
    size, dim = vectors_ND.shape
    model = make_model(bag(size, dim, tied=outputs_ND is None, bigrams=bigrams))
    with torch.no_grad():
        model.embed.tokens.weight.copy_(torch.from_numpy(vectors_ND))
        if outputs_ND is not None:
            model.get_parameter("head.weight").copy_(torch.from_numpy(outputs_ND))
        if model.embed.bigrams is not None:
            model.embed.bigrams.weight.zero_()
    model.tokenizer = tokenizer
    return model


def count_meetings(shards: Shards, lexicon: Lexicon, recipe: GloVe, folder: Path) -> np.ndarray:
    """How often words meet, counted once for a run: the records stay on disk."""
    place, num = folder / "records.bin", len(lexicon.counts)

    def found() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with progress("counting which words meet", "tokens", shards.num_tokens) as shown:
            for number in range(num_stretches(shards)):
                words_W, doc_W = stretch(shards, lexicon.word_of, number)
                key = np.empty(len(words_W) * recipe.window, np.uint64)
                value, known = np.empty(len(key), np.float32), words_W >= 0
                n = glove.meetings(words_W[known], doc_W[known], recipe.window, num, key, value)
                yield key[:n].copy(), value[:n].copy()
                shown.advance(len(words_W))

    if damage(folder) is not None:
        room = max(int(recipe.memory * 2**30 / 64), 2**16)  # sorting holds a record about five times
        with whole_folder(folder) as temporary:
            glove.count(found(), temporary, "records", room)
    if not place.stat().st_size:
        raise UserError(
            "No two words of this text stand in one document: there is nothing that GloVe could learn from."
        )
    return glove.opened(place)
