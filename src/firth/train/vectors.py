"""Text to word vectors and n-gram models: what learns by counting and guessing neighbours.

W words of a stretch of text, V ids of the shards, N words of the model, D numbers of a vector.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import yaml
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as Backend

from firth.console import Line, count, duration, progress, say, warn
from firth.errors import UserError
from firth.files import damage, read_json, whole_folder, write_json, write_text
from firth.models import Model, glove, make_model, word2vec, write_model
from firth.models.ngram import Ngram, check_order, count_ngrams, frame_of, possible
from firth.models.presets import bag
from firth.models.windows import How, Windows, learn_windows, steady_programs
from firth.plain import from_plain, to_plain
from firth.tokens import Shards, Tokenizer, Vocabulary, open_shards
from firth.tokens.rows import mix, permute
from firth.train.checkpoint import disk_errors, last_checkpoint, last_writes, list_checkpoints, remove_folder
from firth.train.log import Log, last_loss
from firth.train.loop import Interrupted, Speed, stop_asked
from firth.train.recipe import differences, read_yaml

STRETCH = 10_000  # tokens that a worker reads at once; windows end where a stretch does
STRETCHES = 32  # in a step, after which all workers have done what they began
AHEAD = 4  # steps whose text is read early for a GPU
RECORDS = 2**16  # pairs of words that a worker of GloVe reads at once
HELD_OUT = 50  # stretches of held-out text that are scored at the end
ENOUGH, FEWEST, OFTENEST = 20_000_000, 5, 50  # tokens of word2vec in all, and the bounds of its epochs, unless said
TRIAL = 4.0  # seconds at most that steps are timed for, where a run is to end on time
STATE = "state.safetensors"


# --- recipes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What a run has that learns by counting."""

    output_dir: str = ""
    data: str = ""  # folder of token shards
    tokenizer: str = ""  # fingerprint of the tokenizer that the shards were made with
    seed: int = 0

    def check(self) -> None:
        """Refuse numbers that make no sense before anything is computed."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
                raise UserError(f"{f.name} is {value}, and must be a number that is not negative.")


@dataclass(frozen=True, kw_only=True)
class Vectors(Counted):
    """What word2vec and GloVe share, under gensim's names."""

    vector_size: int = 100
    window: int = 5  # words to each side
    min_count: int = 5  # words that occur less often are left out
    epochs: int = 5
    max_steps: int = 0  # in place of epochs; 0: counted from them
    minutes: float = 0.0  # plan the run to end after so many: some steps are timed, then max_steps is fixed
    workers: int = 0  # 0: one for each core. With 1 a run is the same every time, to the last bit
    bigrams: int = 0  # vectors of two words in a row, shared by their hash, for fine-tuning as fastText does; 0: none
    save_steps: int = 200
    save_total_limit: int = 1

    def check(self) -> None:
        super().check()
        for name in ("vector_size", "window", "epochs", "save_steps"):
            if getattr(self, name) < 1 and not (name == "epochs" and isinstance(self, Word2Vec)):
                raise UserError(f"{name} is {getattr(self, name)}, and must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class Word2Vec(Vectors):
    """Mikolov et al. 2013."""

    epochs: int = 0  # 0: 5, and on a small text as many as make 20 million words, but at most 50
    sg: int = 1  # 1: skip-gram, 0: CBOW
    negative: int = 5  # noise words for each guess; 0: the softmax over all words, for small vocabularies
    ns_exponent: float = 0.75
    sample: float = 1e-3  # the share of the text from which on a word is read less often; 0: all are read
    alpha: float = 0.025
    min_alpha: float = 0.0001
    phrases: int = 0  # how often to join two words that mostly follow each other: new york, then new york times
    threshold: float = 10.0  # how much more often than chance, on gensim's scale
    device: Literal["cpu", "cuda"] = "cpu"

    def check(self) -> None:
        super().check()
        if self.sg not in (0, 1):
            raise UserError(f"sg is {self.sg}, and must be 1 (skip-gram) or 0 (CBOW).")
        if self.device == "cuda" and not (self.negative and torch.cuda.is_available()):
            raise UserError("device=cuda is for learning with noise words (negative=5), on a machine with a GPU.")


@dataclass(frozen=True, kw_only=True)
class GloVe(Vectors):
    """Pennington et al. 2014, under the names of its own program where gensim has none."""

    window: int = 15
    epochs: int = 25
    x_max: float = glove.X_MAX
    alpha: float = glove.EXPONENT  # of the weighting
    eta: float = glove.RATE
    memory: float = 1.0  # gigabytes for counting

    def check(self) -> None:
        super().check()
        for name in ("x_max", "eta"):
            if not getattr(self, name):
                raise UserError(f"{name} is {getattr(self, name):g}, and must be more than 0.")


@dataclass(frozen=True, kw_only=True)
class NgramRecipe(Counted):
    """Interpolated Kneser-Ney."""

    order: int = 3
    discount: float = 0.0  # one for all; 0: three for each order, estimated (modified Kneser-Ney)

    def check(self) -> None:
        super().check()
        check_order(self.order, self.discount)


RECIPES: dict[str, type[Counted]] = {"word2vec": Word2Vec, "glove": GloVe, "ngram": NgramRecipe}
C = TypeVar("C", bound=Counted)
V = TypeVar("V", bound=Vectors)


def same_counted(folder: Path, recipe: C, resume: bool) -> C:
    """The recipe of the run in this folder, stored where it is new; a resumed one that was changed is refused."""
    stored = folder / "recipe.yaml"
    if resume and stored.is_file():
        earlier = from_plain(read_yaml(stored), type(recipe), str(stored))
        moved: dict[str, Any] = {name: getattr(recipe, name) for name in ("output_dir", "data")}
        if isinstance(recipe, Vectors) and isinstance(earlier, Vectors):  # what was left open is as it was settled
            steps = earlier.max_steps if recipe.minutes or not recipe.max_steps else recipe.max_steps
            settled = {name: getattr(recipe, name) or getattr(earlier, name) for name in ("workers", "epochs")}
            recipe = replace(recipe, **settled, max_steps=steps)
        if changed := differences(replace(earlier, **moved), recipe):
            raise UserError(
                "A resumed run keeps its recipe, and this one differs: " + "; ".join(changed) + ". "
                "Leave these options as they were, or start a new run."
            )
        return replace(earlier, **moved)
    if isinstance(recipe, Vectors) and not recipe.workers:
        recipe = replace(recipe, workers=os.cpu_count() or 1)
    store(recipe, stored)
    return recipe


def store(recipe: Counted, place: Path) -> None:
    write_text(place, yaml.safe_dump(to_plain(recipe), sort_keys=False, allow_unicode=True))


# --- the words of a text --------------------------------------------------------------------------------------------


class Lexicon(NamedTuple):
    """The words that have vectors: their tokenizer, how often each occurs, and which one an id of the shards is."""

    tokenizer: Tokenizer
    counts: np.ndarray  # (N,)
    word_of: np.ndarray  # (V,) -1: none, it is special or too rare
    occurs: np.ndarray  # (V,) whether an id is a word of the text, however rare


def read_lexicon(shards: Shards, tokenizer: Tokenizer, min_count: int) -> Lexicon:
    """The ids that occur often enough. A tokenizer of whole words is cut down to these, the frequent first."""
    size = tokenizer.vocab.size
    count_V = np.zeros(size, np.int64)
    for start in range(0, shards.num_tokens, 2**24):
        count_V += np.bincount(shards.tokens[start : start + 2**24], minlength=size)
    count_V[list(tokenizer.vocab.special)] = 0
    kept = np.flatnonzero((count_V >= min_count) & (count_V > 0))
    if len(kept) < 2:
        raise UserError(
            f"min_count={min_count} leaves {count(len(kept), 'word')} of {np.count_nonzero(count_V):,}: the most "
            f"frequent occurs {count(count_V.max(initial=0), 'time')}. Give more text, or a smaller min_count."
        )
    if tokenizer.kind != "word":
        count_N = np.where(count_V >= min_count, count_V, 0)
        return Lexicon(tokenizer, count_N, np.where(count_N > 0, np.arange(size), -1).astype(np.int32), count_V > 0)
    kept = kept[np.argsort(-count_V[kept], kind="stable")]
    names = [str(tokenizer.backend.id_to_token(i)) for i in kept.tolist()]
    return lexicon_of(tokenizer, names, count_V, kept)


def lexicon_of(tokenizer: Tokenizer, names: list[str], count_V: np.ndarray, ids: np.ndarray) -> Lexicon:
    """A tokenizer of these words alone, after its special tokens; `ids` are those of the shards."""
    state = json.loads(tokenizer.backend.to_str())
    specials = [str(tokenizer.backend.id_to_token(i)) for i in tokenizer.vocab.special]
    state["model"]["vocab"] = {name: i for i, name in enumerate([*specials, *names])}
    for i, name in enumerate(specials):
        next(token for token in state["added_tokens"] if token["content"] == name)["id"] = i
    made = Tokenizer(Backend.from_str(json.dumps(state)), tokenizer.roles, tokenizer.config)
    word_V = np.full(len(count_V), -1, np.int32)
    word_V[ids] = len(specials) + np.arange(len(names))
    return Lexicon(made, np.concatenate([np.zeros(len(specials), np.int64), count_V[ids]]), word_V, count_V > 0)


def stretch(shards: Shards, word_V: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(W,) the words of one stretch of the text, and which document each is of. What is no word is -1."""
    start, stop = number * STRETCH, min((number + 1) * STRETCH, shards.num_tokens)
    first, last = np.searchsorted(shards.offsets, [start, stop - 1], "right")
    edges = np.concatenate([[start], shards.offsets[first:last], [stop]])
    doc_W = np.repeat(np.arange(first, last + 1, dtype=np.int32), np.diff(edges))
    return word_V[shards.tokens[start:stop]], doc_W


def num_stretches(shards: Shards) -> int:
    return -(-shards.num_tokens // STRETCH)


# --- phrases --------------------------------------------------------------------------------------------------------


def join_phrases(shards: Shards, lexicon: Lexicon, recipe: Word2Vec, folder: Path) -> tuple[Shards, Lexicon]:
    """The text with each two words joined that follow each other far more often than chance, and its words.

    The same words are joined as by gensim's Phrases with this min_count and threshold.
    """
    num, size = len(lexicon.counts), len(lexicon.occurs)
    id_V = np.where(lexicon.occurs, np.arange(size), -1).astype(np.int32)

    def found() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with progress("counting pairs", "tokens", shards.num_tokens) as shown:
            for number in range(num_stretches(shards)):
                words_W, doc_W = stretch(shards, id_V, number)
                key, value = np.empty(len(words_W), np.uint64), np.empty(len(words_W), np.float32)
                n = glove.follow(words_W, doc_W, size, key, value)
                yield key[:n].copy(), value[:n].copy()
                shown.advance(len(words_W))

    with whole_folder(folder) as temporary:
        records = np.array(glove.opened(glove.count(found(), temporary, "pairs", 2**25)))
        (temporary / "pairs.bin").unlink()
        scale = len(records) + int(lexicon.occurs.sum())
        records = records[records["value"] >= max(recipe.min_count, 1)]
        first, second = (lexicon.word_of[ids].astype(np.int64) for ids in glove.words_of(records["key"], size))
        count_N, count = lexicon.counts, records["value"].astype(np.int64)
        scores = word2vec.phrase_scores(count, count_N[first], count_N[second], recipe.min_count, scale)
        chosen = np.flatnonzero(scores > recipe.threshold)
        key = first[chosen] * num + second[chosen]
        chosen, key = chosen[np.argsort(key)], np.sort(key)
        phrase = num + np.arange(len(key))
        names = [str(lexicon.tokenizer.backend.id_to_token(i)) for i in range(num)]
        joined = [f"{names[a]}_{names[b]}" for a, b in zip(first[chosen], second[chosen], strict=True)]
        say(f"{len(joined):,} phrases" + (f", such as {', '.join(joined[:5])}" if joined else ""))
        rewrite(shards, lexicon.word_of, key, phrase, num, temporary)
    new = Shards(folder)
    count_N = np.bincount(new.tokens, minlength=num + len(joined))
    special = len(lexicon.tokenizer.vocab.special)
    all_names, ids = np.array([*names, *joined], dtype=object), np.arange(num + len(joined))
    order = np.array([i for i in ids if i >= special and count_N[i] >= max(recipe.min_count, 1)], np.int64)
    order = order[np.argsort(-count_N[order], kind="stable")]
    return new, lexicon_of(lexicon.tokenizer, all_names[order].tolist(), count_N, order)


def rewrite(shards: Shards, word_V: np.ndarray, key: np.ndarray, phrase: np.ndarray, num: int, folder: Path) -> None:
    """The same documents with their phrases joined, as shards."""
    size_D = np.zeros(shards.num_documents, np.int64)
    with open(folder / "tokens.bin", "wb") as file:
        for number in range(num_stretches(shards)):
            words_W, doc_W = stretch(shards, word_V, number)
            out_W = np.empty(len(words_W), np.int64)
            n, place_W = word2vec.join(words_W, doc_W, key, phrase, num, out_W)
            kept = out_W[:n] >= 0
            out_W[:n][kept].astype(np.uint32).tofile(file)
            np.add.at(size_D, doc_W[place_W[:n][kept]] - 1, 1)
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(size_D)]))


# --- learning -------------------------------------------------------------------------------------------------------


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


# --- runs -----------------------------------------------------------------------------------------------------------


def pretrain_vectors(folder: Path, recipe: Counted, resume: bool = False, began: float | None = None) -> dict[str, Any]:
    """Run a recipe of word2vec, GloVe or n-grams in a folder that is held already.

    `began` is when the clock of `minutes` started (time.monotonic).
    """
    began = time.monotonic() if began is None else began
    recipe.check()
    recipe = same_counted(folder, recipe, resume)
    if resume and (folder / "results.json").is_file() and damage(folder / "final") is None:
        say(f"{folder} is finished already.")
        return dict(read_json(folder / "results.json"))
    with last_writes(folder):
        if isinstance(recipe, NgramRecipe):
            results = count_text(folder, recipe)
        else:
            assert isinstance(recipe, Vectors)
            results = learn_vectors(folder, recipe, resume, began)
        results["seconds"] = time.monotonic() - began
        write_json(folder / "results.json", results)
    return results


def learn_vectors(folder: Path, recipe: Vectors, resume: bool, began: float) -> dict[str, Any]:
    shards = open_shards(recipe.data)
    text = shards.train
    lexicon = read_lexicon(text, shards.tokenizer, recipe.min_count)
    held_out = shards.held_out
    if isinstance(recipe, Word2Vec):
        if recipe.phrases and shards.tokenizer.kind != "word":
            raise UserError("phrases joins whole words: give text, or shards of a tokenizer of kind word.")
        for number in range(recipe.phrases):
            text, lexicon = join_phrases(text, lexicon, recipe, folder / f"phrases-{number + 1}")
            held_out = None  # its phrases are not joined
        if recipe.phrases:
            say("phrases are words to --similar, --analogy and files of vectors; texts that are read are not joined")
    warn_of_lonely_words(text)
    num = len(lexicon.counts) - len(lexicon.tokenizer.vocab.special)
    recipe = replace(recipe, epochs=recipe.epochs or epochs_for(text.num_tokens))
    say(f"{num:,} words with {recipe.vector_size} numbers each, {count(recipe.workers, 'worker')}")
    if isinstance(recipe, Word2Vec) and recipe.device == "cpu" and recipe.negative and torch.cuda.is_available():
        say("this machine has a GPU: device=cuda learns there, which is faster on a long text")
    if not (recipe.max_steps or recipe.minutes):
        say(f"{text.num_tokens:,} tokens, read {count(recipe.epochs, 'time')}")
    make: Callable[[Any], Learner] = partial(OnGPU if is_on_gpu(recipe) else SkipGramOrCBOW, text, lexicon)
    if isinstance(recipe, GloVe):
        make = partial(Factors, count_meetings(text, lexicon, recipe, folder / "counts"), lexicon)
    if not (folder / "log.jsonl").is_file():  # no step was taken yet
        recipe = settle(recipe, make, held_out, began) if recipe.minutes else recipe
        store(recipe, folder / "recipe.yaml")
    learner = make(recipe)
    loss, speed = fit_vectors(learner, folder, resume)
    model = learner.model()
    if damage(folder / "final") is not None:
        with whole_folder(folder / "final") as temporary:
            write_model(model, temporary)
    eval_loss = None
    if isinstance(learner, SkipGramOrCBOW) and held_out is not None:
        learner.state()
        eval_loss = learner.held_out_loss(held_out)
    return {
        "output_dir": str(folder),
        "steps": learner.steps,
        "loss": loss,
        "eval_loss": eval_loss,
        "words": num,
        "tokens": learner.tokens,
        "tokens_per_second": speed,
        "parameters": model.num_parameters,
    }


def epochs_for(tokens: int) -> int:
    """How often a text is read unless said: 5 times, and a small one oftener.

    >>> epochs_for(10**9), epochs_for(10**6), epochs_for(10**4)
    (5, 20, 50)
    """
    return min(max(FEWEST, -(-ENOUGH // max(tokens, 1))), OFTENEST)


def is_on_gpu(recipe: Vectors) -> bool:
    return isinstance(recipe, Word2Vec) and recipe.device == "cuda"


def settle(recipe: V, make: Callable[[V], Learner], held_out: Shards | None, began: float) -> V:
    """Fix the steps that end with the minutes: some are timed, of a learner that is thrown away.

    The rate of word2vec falls over just these, so that it ends where it should; `max_steps` says how many at most.
    """
    with ThreadPoolExecutor(max(recipe.workers, 1)) as pool:
        learner = make(replace(recipe, max_steps=2**30))
        learner.step(0, pool)  # compiles
        start, done = time.monotonic(), 0
        while not done or time.monotonic() - start < min(TRIAL, 6 * recipe.minutes):  # a tenth of the run at most
            done += 1
            learner.step(done, pool)
        seconds = (time.monotonic() - start) / done
        start = time.monotonic()
        if isinstance(learner, SkipGramOrCBOW) and held_out is not None:
            learner.held_out_loss(held_out)
        left = 60 * recipe.minutes - (time.monotonic() - began) - (time.monotonic() - start)
    steps = min(max(1, int(left / seconds)), recipe.max_steps or 2**30)
    say(f"{seconds:.3f}s a step: {count(steps, 'step takes', 'steps take')} {duration(steps * seconds)}")
    return replace(recipe, max_steps=steps)


def warn_of_lonely_words(text: Shards) -> None:
    """Say how many documents have one word only: nothing stands beside it."""
    lonely = int((np.diff(text.offsets) < 2).sum())
    if lonely == text.num_documents:
        raise UserError("Every document has one word: words are learned from those beside them. Give whole texts.")
    if lonely:
        warn(f"{lonely:,} of {text.num_documents:,} documents have one word or none, from which nothing is learned.")


def fit_vectors(learner: Learner, folder: Path, resume: bool) -> tuple[float, float]:
    """All steps, from the last whole checkpoint on when `resume`; the last loss, and tokens per second."""
    recipe, first = learner.recipe, 0
    if resume and (found := last_checkpoint(folder)):
        first = int(read_json(found / "training" / "state.json")["step"])
        saved = load_file(found / "training" / STATE)
        for name, array in learner.state().items():
            array[:] = saved[name]
        put_back(learner)
        say(f"going on from {found}")
    line, loss, per_second = Line(), math.nan, 0.0
    speed = Speed(first, first * learner.tokens_per_step)
    with (
        Log(folder / "log.jsonl", first) as log,
        stop_asked() as stop,
        ThreadPoolExecutor(max(recipe.workers, 1), thread_name_prefix="words") as pool,
    ):
        for number in range(first, learner.steps):
            total, guesses = learner.step(number, pool)
            loss, step = total / max(guesses, 1), number + 1
            if not math.isfinite(loss):
                raise UserError(f"The loss is {loss} at step {step}. Lower the rate (alpha of word2vec, eta of GloVe).")
            tokens = min(step * learner.tokens_per_step, learner.tokens)
            log.write(step=step, loss=loss, learning_rate=learner.rate(number), tokens=tokens)
            per_second, a_step = speed.until(step, tokens)
            left = duration(a_step * (learner.steps - step))
            line.show(f"step {step:,}/{learner.steps:,}  loss {loss:.3f}  {per_second:,.0f} tokens/s  {left} left")
            speed.settle(step, tokens)
            if step % recipe.save_steps == 0 or stop.is_set():
                try_to_save(learner, folder, step)
            if stop.is_set():
                line.close()
                raise Interrupted(f"stopped at step {step} of {learner.steps}")
    line.close()
    if first == learner.steps:
        loss = last_loss(folder / "log.jsonl")
    return loss, per_second


def put_back(learner: Learner) -> None:
    if isinstance(learner, OnGPU):
        learner.inputs.copy_(torch.from_numpy(learner.inputs_ND))
        learner.outputs.copy_(torch.from_numpy(learner.outputs_ND))


def try_to_save(learner: Learner, folder: Path, step: int) -> None:
    """Write a checkpoint; a disk that is full costs that, which is said, and not the run."""
    try:
        with disk_errors(folder):
            save_vectors(learner, folder, step)
    except OSError as e:
        warn(f"a checkpoint could not be written ({e.strerror or e}): those before it stay, and the run goes on.")


def save_vectors(learner: Learner, folder: Path, step: int) -> None:
    """Write `checkpoint-<step>`, a model with what a resumed run needs beside it, and remove older ones."""
    with whole_folder(folder / f"checkpoint-{step}", step=step) as temporary:
        write_model(learner.model(), temporary)
        training = temporary / "training"
        training.mkdir()
        save_file(learner.state(), training / STATE)
        write_json(training / "state.json", {"step": step, "recipe": to_plain(learner.recipe)})
    if learner.recipe.save_total_limit:
        for old in list_checkpoints(folder)[learner.recipe.save_total_limit :]:
            remove_folder(old)


# --- n-grams --------------------------------------------------------------------------------------------------------


def count_text(folder: Path, recipe: NgramRecipe) -> dict[str, Any]:
    """An n-gram model of the shards, into `final/`."""
    shards = open_shards(recipe.data)
    vocab = shards.tokenizer.vocab
    say(f"counting n-grams up to order {recipe.order}")
    ids_T, starts_T = framed(shards.train, vocab)
    model = count_ngrams(ids_T, starts_T, vocab.size, possible(vocab), recipe.order, recipe.discount)
    if model.order < recipe.order:
        warn(f"no document is long enough for order {recipe.order}: the model has order {model.order}.")
    model = replace(model, tokenizer=shards.tokenizer)
    if damage(folder / "final") is not None:
        with whole_folder(folder / "final") as temporary:
            model.save(temporary)
    parts = {"loss": shards.train, "eval_loss": shards.held_out}
    losses = {name: mean_loss(model, part, vocab) if part is not None else None for name, part in parts.items()}
    with Log(folder / "log.jsonl", 0) as log:
        log.write(step=1, learning_rate=0.0, tokens=shards.train.num_tokens, **losses)
    return {
        "output_dir": str(folder),
        "steps": 1,
        **losses,
        "unigram_entropy": shards.manifest.get("unigram_entropy"),
        "tokens": shards.train.num_tokens,
        "ngrams": [len(level.key) for level in model.levels],
        "parameters": sum(2 * len(level.key) for level in model.levels),
    }


def framed(shards: Shards, vocab: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """All documents end to end, each in its frame, and where each begins."""
    first, end = frame_of(vocab)
    size_D = np.diff(shards.offsets)
    begin_D = np.asarray(shards.offsets[:-1]) + 2 * np.arange(len(size_D))
    ids_T = np.full(shards.num_tokens + 2 * len(size_D), first, np.int64)
    ids_T[begin_D + size_D + 1] = end
    starts_T = np.zeros(len(ids_T), bool)
    starts_T[begin_D] = True
    text = np.ones(len(ids_T), bool)
    text[begin_D] = text[begin_D + size_D + 1] = False
    ids_T[text] = shards.tokens
    return ids_T, starts_T


def mean_loss(model: Ngram, shards: Shards, vocab: Vocabulary) -> float:
    """Nats per token, ends included, over at most a million tokens."""
    ids_T, starts_T = framed(shards, vocab)
    edges = [*np.flatnonzero(starts_T).tolist(), len(ids_T)]
    total, num = 0.0, 0
    for a, b in pairwise(edges):
        total -= float(model.logp(ids_T[a:b]).sum())
        num += b - a - 1
        if num > 1_000_000:
            break
    return total / num
