"""Trainers of word vectors: word2vec on a CPU and on a GPU, and GloVe.

A step trains on 32 chunks. Chunk c of epoch e is a pure function of (seed, e, c), so that a run resumes at any step.

W words of a chunk of text, N words of the model, D dimensions of a vector, K noise words, R records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from firth.core.console import progress
from firth.core.errors import UserError
from firth.core.files import atomic_folder, find_corruption, read_manifest
from firth.core.hashing import hash_uint64
from firth.models import Model, make_model
from firth.models.presets import bag_of_words
from firth.static import glove, word2vec
from firth.static.recipe import MIN_EPOCHS, GloVeRecipe, Word2VecRecipe, WordVectorRecipe
from firth.static.vocabulary import WORD_CHUNK_TOKENS, WordVocabulary, count_chunks, read_chunk
from firth.static.word2vec_triton import WindowBatch, WindowConfig, max_stable_programs, train_windows
from firth.tokens import Shards, Tokenizer
from firth.tokens.permutation import permute_indices

CHUNKS_PER_STEP = 32  # work units per step; all workers finish before the next step
PREFETCH_STEPS = 4  # steps read ahead of the GPU
RECORDS_PER_CHUNK = 2**16  # GloVe records per chunk
MAX_EVAL_CHUNKS = 50  # chunks of held-out text in the final evaluation


class WordVectorTrainer(Protocol):
    """Trains in steps. A step is a pure function of its number, except for the order of lock-free workers."""

    num_steps: int
    tokens_per_step: int
    total_tokens: int  # tokens of all steps
    untrained_loss: float  # of vectors that are 0: a loss far above it shows that training diverges

    @property
    def recipe(self) -> WordVectorRecipe: ...

    def step(self, step: int, pool: ThreadPoolExecutor) -> tuple[float, int]:
        """Train one step; return the sum of the losses and the number of predictions."""

    def learning_rate(self, step: int) -> float: ...

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of a checkpoint, which steps change in place."""

    def to_model(self) -> Model: ...


class Word2VecTrainer:
    """word2vec on chunks of text, permuted anew in each epoch."""

    def __init__(self, shards: Shards, word_vocab: WordVocabulary, recipe: Word2VecRecipe) -> None:
        self.shards, self.word_vocab, self.recipe = shards, word_vocab, recipe
        num = len(word_vocab.counts)
        self.inputs_ND = word2vec.init_word_vectors(num, recipe.vector_size, recipe.seed)
        self.inputs_ND[word_vocab.counts == 0] = 0
        self.outputs_ND = np.zeros_like(self.inputs_ND)
        self.noise_table = word2vec.build_alias_table(word_vocab.counts, recipe.ns_exponent)
        self.keep_prob_N = word2vec.keep_probabilities(word_vocab.counts, recipe.sample)
        self.tree = word2vec.build_huffman_tree(word_vocab.counts) if recipe.hs else word2vec.NO_TREE
        self.untrained_loss = math.log(2) * (recipe.negative + 1) if recipe.negative else math.log(num)
        if recipe.hs:
            self.untrained_loss = math.log(2) * self.tree.mean_path_length(word_vocab.counts)
        self.num_chunks = count_chunks(shards)
        self.total_chunks = count_total_chunks(recipe, self.num_chunks)
        self.num_steps = -(-self.total_chunks // CHUNKS_PER_STEP)
        epochs, rest = divmod(self.total_chunks, self.num_chunks)
        self.tokens_per_step = WORD_CHUNK_TOKENS * CHUNKS_PER_STEP
        self.total_tokens = shards.num_tokens * epochs + rest * WORD_CHUNK_TOKENS

    def learning_rate(self, step: int) -> float:
        return self._learning_rate_at(step * CHUNKS_PER_STEP)

    def _learning_rate_at(self, chunk: int) -> float:
        return self.recipe.alpha - (self.recipe.alpha - self.recipe.min_alpha) * chunk / self.total_chunks

    def read_chunks(self, chunks: range) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return words and document ids of these chunks of the permuted order."""
        epochs, numbers = np.divmod(np.array(chunks), self.num_chunks)
        permuted = permute_indices(numbers, self.num_chunks, hash_uint64(self.recipe.seed, epochs))
        return [read_chunk(self.shards, self.word_vocab.word_ids, number) for number in permuted.tolist()]

    def read_subsampled(self, chunk: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return subsampled words and document ids of one chunk, and the seed of its windows and noise."""
        [(words_W, doc_W)] = self.read_chunks(range(chunk, chunk + 1))
        seed = int(hash_uint64(self.recipe.seed, 1, chunk))
        is_kept = np.random.default_rng(seed).random(len(words_W), np.float32) < self.keep_prob_N[words_W]
        is_kept &= words_W >= 0
        return words_W[is_kept], doc_W[is_kept], seed

    def train_chunk(self, chunk: int) -> tuple[float, int]:
        words_W, doc_W, seed = self.read_subsampled(chunk)
        return self.train_words(words_W, doc_W, self._learning_rate_at(chunk), seed)

    def train_words(self, words_W: np.ndarray, doc_W: np.ndarray, learning_rate: float, seed: int) -> tuple[float, int]:
        r = self.recipe
        settings = (r.window, bool(r.sg), r.num_noise_words, np.float32(learning_rate), self.noise_table, self.tree)
        return word2vec.train_word2vec(words_W, doc_W, self.inputs_ND, self.outputs_ND, *settings, np.uint64(seed))

    def step(self, step: int, pool: ThreadPoolExecutor) -> tuple[float, int]:
        chunks = range(step * CHUNKS_PER_STEP, min((step + 1) * CHUNKS_PER_STEP, self.total_chunks))
        if self.recipe.workers == 1:
            return sum_losses(map(self.train_chunk, chunks))
        return sum_losses(pool.map(self.train_chunk, chunks))

    def held_out_loss(self, shards: Shards) -> float | None:
        """Return the mean loss on held-out text: training with learning rate 0."""
        parts = []
        num_chunks = count_chunks(shards)
        for number in np.sort(permute_indices(np.arange(min(MAX_EVAL_CHUNKS, num_chunks)), num_chunks, 0)).tolist():
            words_W, doc_W = read_chunk(shards, self.word_vocab.word_ids, number)
            parts.append(self.train_words(words_W[words_W >= 0], doc_W[words_W >= 0], 0.0, number))
        total, predictions = sum_losses(parts)
        return total / predictions if predictions else None

    def state_arrays(self) -> dict[str, np.ndarray]:
        return {"inputs": self.inputs_ND, "outputs": self.outputs_ND}

    def to_model(self) -> Model:
        outputs_ND = None if self.recipe.hs else self.outputs_ND  # vectors of inner nodes predict no words
        return make_bag_model(self.word_vocab.tokenizer, self.inputs_ND, outputs_ND, self.recipe.bigrams)


class Word2VecCudaTrainer(Word2VecTrainer):
    """word2vec on a GPU, with many windows in parallel; threads read the text of the next steps meanwhile."""

    def __init__(
        self, shards: Shards, word_vocab: WordVocabulary, recipe: Word2VecRecipe, device: str = "cuda"
    ) -> None:
        super().__init__(shards, word_vocab, recipe)
        self.device = torch.device(device)
        self.inputs, self.outputs = (torch.from_numpy(a).to(self.device) for a in (self.inputs_ND, self.outputs_ND))
        word_tables = *self.noise_table, self.keep_prob_N
        self.accept_prob_N, self.alias_N, self.keep_prob = (torch.from_numpy(a).to(self.device) for a in word_tables)
        read_N = word_vocab.counts * self.keep_prob_N
        noise_N = word2vec.noise_distribution(word_vocab.counts, recipe.ns_exponent)
        window_settings = recipe.window, bool(recipe.sg), recipe.negative, recipe.alpha
        self.num_programs = max_stable_programs(read_N / read_N.sum(), noise_N, *window_settings)
        self.prefetched: dict[int, Future[tuple[np.ndarray, np.ndarray]]] = {}

    def read_step(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(W,) words of a step (-1: none), and (W,) ids that differ between documents and between chunks."""
        chunks = range(step * CHUNKS_PER_STEP, min((step + 1) * CHUNKS_PER_STEP, self.total_chunks))
        words, docs = zip(*self.read_chunks(chunks), strict=True)
        doc_W = np.concatenate(docs)
        is_start_W = np.diff(doc_W, prepend=-1) != 0
        is_start_W[np.cumsum([len(doc) for doc in docs])[:-1]] = True
        return np.concatenate(words), np.cumsum(is_start_W, dtype=np.int32)

    def step(self, step: int, pool: ThreadPoolExecutor) -> tuple[float, int]:
        for next_step in range(step, min(step + PREFETCH_STEPS, self.num_steps)):
            if next_step not in self.prefetched:
                self.prefetched[next_step] = pool.submit(self.read_step, next_step)
        words_W, doc_W = (torch.from_numpy(a).to(self.device) for a in self.prefetched.pop(step).result())
        r = self.recipe
        generator = torch.Generator(self.device).manual_seed(int(hash_uint64(r.seed, 2, step)) >> 1)
        random_args: dict[str, Any] = {"generator": generator, "device": self.device}
        read_W = (words_W >= 0) & (torch.rand(len(words_W), **random_args) < self.keep_prob[words_W.clamp(min=0)])
        words_W, doc_W = words_W[read_W], doc_W[read_W]
        num = len(words_W)
        size_W = torch.randint(1, r.window + 1, (num,), dtype=torch.int32, **random_args)
        slot_WK = torch.randint(len(self.accept_prob_N), (num, r.negative), **random_args)
        accepted_WK = torch.rand((num, r.negative), **random_args) < self.accept_prob_N[slot_WK]
        noise_WK = torch.where(accepted_WK, slot_WK.int(), self.alias_N[slot_WK])
        window_config = WindowConfig(r.window, bool(r.sg), self.learning_rate(step), self.num_programs)
        window_batch = WindowBatch(words_W, doc_W, size_W, noise_WK)
        total, predictions = train_windows(window_batch, self.inputs, self.outputs, window_config)
        return float(total), int(predictions)

    def state_arrays(self) -> dict[str, np.ndarray]:
        for host, device in ((self.inputs_ND, self.inputs), (self.outputs_ND, self.outputs)):
            host[:] = device.cpu().numpy()
        return super().state_arrays()

    def to_model(self) -> Model:
        self.state_arrays()
        return super().to_model()


class GloVeTrainer:
    """GloVe on chunks of co-occurrence records, permuted anew in each epoch."""

    def __init__(self, records: np.ndarray, word_vocab: WordVocabulary, recipe: GloVeRecipe) -> None:
        self.records, self.word_vocab, self.recipe = records, word_vocab, recipe
        self.arrays = glove.init_glove_state(len(word_vocab.counts), recipe.vector_size, recipe.seed)
        self.untrained_loss = glove.untrained_loss(records["value"][:RECORDS_PER_CHUNK], recipe.x_max, recipe.alpha)
        self.num_chunks = -(-len(records) // RECORDS_PER_CHUNK)
        self.total_chunks = count_total_chunks(recipe, self.num_chunks)
        self.num_steps = -(-self.total_chunks // CHUNKS_PER_STEP)
        epochs, rest = divmod(self.total_chunks, self.num_chunks)
        self.tokens_per_step = RECORDS_PER_CHUNK * CHUNKS_PER_STEP
        self.total_tokens = len(records) * epochs + rest * RECORDS_PER_CHUNK

    def learning_rate(self, step: int) -> float:
        return self.recipe.eta

    def train_chunk(self, chunk: int) -> tuple[float, int]:
        epoch, number = divmod(chunk, self.num_chunks)
        number = int(permute_indices(np.array([number]), self.num_chunks, hash_uint64(self.recipe.seed, epoch))[0])
        chunk_records = np.array(self.records[number * RECORDS_PER_CHUNK : (number + 1) * RECORDS_PER_CHUNK])
        first_R, second_R = glove.decode_keys(chunk_records["key"], len(self.word_vocab.counts))
        settings = tuple(map(np.float32, (self.recipe.eta, self.recipe.x_max, self.recipe.alpha)))
        return glove.train_glove(
            first_R, second_R, np.ascontiguousarray(chunk_records["value"]), *self.arrays.values(), *settings
        )

    def step(self, step: int, pool: ThreadPoolExecutor) -> tuple[float, int]:
        chunks = range(step * CHUNKS_PER_STEP, min((step + 1) * CHUNKS_PER_STEP, self.total_chunks))
        return sum_losses(
            map(self.train_chunk, chunks) if self.recipe.workers == 1 else pool.map(self.train_chunk, chunks)
        )

    def state_arrays(self) -> dict[str, np.ndarray]:
        return self.arrays

    def to_model(self) -> Model:
        """A word's vector is the sum of its word and context vectors (section 4.2)."""
        sum_ND = self.arrays["words"] + self.arrays["contexts"]
        sum_ND[self.word_vocab.counts == 0] = 0
        return make_bag_model(self.word_vocab.tokenizer, sum_ND, None, self.recipe.bigrams)


def count_total_chunks(recipe: WordVectorRecipe, chunks_per_epoch: int) -> int:
    """Number of chunks of the whole run."""
    return recipe.max_steps * CHUNKS_PER_STEP if recipe.max_steps else chunks_per_epoch * (recipe.epochs or MIN_EPOCHS)


def sum_losses(parts: Any) -> tuple[float, int]:
    """Add up (loss, predictions) pairs in order."""
    pairs = list(parts)
    return sum(total for total, _ in pairs), sum(num for _, num in pairs)


def make_bag_model(tokenizer: Tokenizer, vectors_ND: np.ndarray, outputs_ND: np.ndarray | None, bigrams: int) -> Model:
    """Return word vectors as a model without layers (bag of words); the output vectors, if any, are its LM head."""
    size, dim = vectors_ND.shape
    model = make_model(bag_of_words(size, dim, tied=outputs_ND is None, num_bigram_buckets=bigrams))
    with torch.no_grad():
        model.embed.tokens.weight.copy_(torch.from_numpy(vectors_ND))
        if outputs_ND is not None:
            model.get_parameter("head.weight").copy_(torch.from_numpy(outputs_ND))
        if model.embed.bigrams is not None:
            model.embed.bigrams.weight.zero_()
    model.tokenizer = tokenizer
    return model


def text_changed_error(folder: Path) -> UserError:
    return UserError(
        f"Cannot resume: the text has changed since {folder} was written, and its words with it. Start a new run."
    )


def count_cooccurrences(shards: Shards, word_vocab: WordVocabulary, recipe: GloVeRecipe, folder: Path) -> np.ndarray:
    """Return the memory-mapped co-occurrence records, counted once per run folder."""
    records_file, num = folder / "records.bin", len(word_vocab.counts)

    def iter_cooccurrences() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with progress("counting which words meet", "tokens", shards.num_tokens) as progress_bar:
            for number in range(count_chunks(shards)):
                words_W, doc_W = read_chunk(shards, word_vocab.word_ids, number)
                key = np.empty(len(words_W) * recipe.window, np.uint64)
                value, in_vocabulary = np.empty(len(key), np.float32), words_W >= 0
                n = glove.emit_cooccurrences(
                    words_W[in_vocabulary], doc_W[in_vocabulary], recipe.window, num, key, value
                )
                yield key[:n].copy(), value[:n].copy()
                progress_bar.advance(len(words_W))

    if find_corruption(folder) is not None:
        max_records = max(int(recipe.memory * 2**30 / 64), 2**16)  # sorting needs about five times a record's size
        with atomic_folder(folder, "counts", text=shards.fingerprint) as temporary:
            glove.count_records(iter_cooccurrences(), temporary, "records", max_records)
    elif read_manifest(folder).get("text") != shards.fingerprint:
        raise text_changed_error(folder)
    if not records_file.stat().st_size:
        raise UserError(
            "No two words of this text stand in one document: there is nothing that GloVe could learn from."
        )
    return glove.open_records(records_file)
