"""The words that get vectors, and phrases joined into one word.

W words of a chunk of text, V ids of the shards, N words of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer as Backend

from firth.core.console import format_count, progress, say
from firth.core.errors import UserError
from firth.core.files import atomic_folder, create_file, write_npy
from firth.static import glove, word2vec
from firth.static.recipe import Word2VecRecipe
from firth.tokens import Shards, Tokenizer

WORD_CHUNK_TOKENS = 10_000  # tokens per chunk, the unit of work; windows end at its boundary


class WordVocabulary(NamedTuple):
    """The words that have vectors: their tokenizer and counts, and the map from token ids of the shards."""

    tokenizer: Tokenizer
    counts: np.ndarray  # (N,)
    word_ids: np.ndarray  # (V,) word of each token id; -1: special or too rare
    is_word: np.ndarray  # (V,) whether a token id occurs in the text, however rare


def build_word_vocabulary(shards: Shards, tokenizer: Tokenizer, min_count: int) -> WordVocabulary:
    """Return the words with at least `min_count` occurrences; a word tokenizer keeps only these, by frequency."""
    size = tokenizer.vocab.size
    count_V = np.zeros(size, np.int64)
    for start in range(0, shards.num_tokens, 2**24):
        count_V += np.bincount(shards.tokens[start : start + 2**24], minlength=size)
    count_V[list(tokenizer.vocab.special_ids)] = 0
    vocab_ids = np.flatnonzero((count_V >= min_count) & (count_V > 0))
    if len(vocab_ids) < 2:
        raise UserError(
            f"min_count={min_count} leaves {format_count(len(vocab_ids), 'word')} of {np.count_nonzero(count_V):,}: "
            f"the most frequent occurs {format_count(count_V.max(initial=0), 'time')}. "
            "Give more text, or a smaller min_count."
        )
    if tokenizer.kind != "word":
        count_N = np.where(count_V >= min_count, count_V, 0)
        return WordVocabulary(
            tokenizer, count_N, np.where(count_N > 0, np.arange(size), -1).astype(np.int32), count_V > 0
        )
    vocab_ids = vocab_ids[np.argsort(-count_V[vocab_ids], kind="stable")]
    names = [str(tokenizer.backend.id_to_token(i)) for i in vocab_ids.tolist()]
    return make_word_vocabulary(tokenizer, names, count_V, vocab_ids)


def make_word_vocabulary(
    tokenizer: Tokenizer, words: list[str], count_V: np.ndarray, ids: np.ndarray
) -> WordVocabulary:
    """Return a vocabulary of the special tokens and these words; `ids` are their token ids in the shards."""
    state = json.loads(tokenizer.backend.to_str())
    specials = [str(tokenizer.backend.id_to_token(i)) for i in tokenizer.vocab.special_ids]
    state["model"]["vocab"] = {name: i for i, name in enumerate([*specials, *words])}
    for i, name in enumerate(specials):
        next(token for token in state["added_tokens"] if token["content"] == name)["id"] = i
    made = Tokenizer(Backend.from_str(json.dumps(state)), tokenizer.special_tokens, tokenizer.config)
    word_V = np.full(len(count_V), -1, np.int32)
    word_V[ids] = len(specials) + np.arange(len(words))
    return WordVocabulary(made, np.concatenate([np.zeros(len(specials), np.int64), count_V[ids]]), word_V, count_V > 0)


def read_chunk(shards: Shards, word_id_V: np.ndarray, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """(W,) words of one chunk of the text (-1: none), and (W,) their document ids."""
    start, stop = chunk * WORD_CHUNK_TOKENS, min((chunk + 1) * WORD_CHUNK_TOKENS, shards.num_tokens)
    first, last = np.searchsorted(shards.offsets, [start, stop - 1], "right")
    edges = np.concatenate([[start], shards.offsets[first:last], [stop]])
    doc_W = np.repeat(np.arange(first, last + 1, dtype=np.int32), np.diff(edges))
    return word_id_V[shards.tokens[start:stop]], doc_W


def count_chunks(shards: Shards) -> int:
    return -(-shards.num_tokens // WORD_CHUNK_TOKENS)


# --- phrases --------------------------------------------------------------------------------------------------------


def join_phrases(
    shards: Shards, word_vocab: WordVocabulary, recipe: Word2VecRecipe, folder: Path
) -> tuple[Shards, WordVocabulary]:
    """Join word pairs that follow each other far more often than chance; return the new shards and vocabulary.

    Joins the same pairs as gensim's Phrases with this min_count and threshold.
    """
    num, size = len(word_vocab.counts), len(word_vocab.is_word)
    id_V = np.where(word_vocab.is_word, np.arange(size), -1).astype(np.int32)

    def found() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with progress("counting pairs", "tokens", shards.num_tokens) as shown:
            for number in range(count_chunks(shards)):
                words_W, doc_W = read_chunk(shards, id_V, number)
                key, value = np.empty(len(words_W), np.uint64), np.empty(len(words_W), np.float32)
                n = glove.emit_bigrams(words_W, doc_W, size, key, value)
                yield key[:n].copy(), value[:n].copy()
                shown.advance(len(words_W))

    with atomic_folder(folder, "phrases") as temporary:
        records = np.array(glove.open_records(glove.count_records(found(), temporary, "pairs", 2**25)))
        (temporary / "pairs.bin").unlink()
        scale = len(records) + int(word_vocab.is_word.sum())
        records = records[records["value"] >= max(recipe.min_count, 1)]
        first, second = (word_vocab.word_ids[ids].astype(np.int64) for ids in glove.decode_keys(records["key"], size))
        count_N, count = word_vocab.counts, records["value"].astype(np.int64)
        scores = word2vec.phrase_scores(count, count_N[first], count_N[second], recipe.min_count, scale)
        chosen = np.flatnonzero(scores > recipe.threshold)
        key = first[chosen] * num + second[chosen]
        chosen, key = chosen[np.argsort(key)], np.sort(key)
        phrase = num + np.arange(len(key))
        names = [str(word_vocab.tokenizer.backend.id_to_token(i)) for i in range(num)]
        joined = [f"{names[a]}_{names[b]}" for a, b in zip(first[chosen], second[chosen], strict=True)]
        say(f"{len(joined):,} phrases" + (f", such as {', '.join(joined[:5])}" if joined else ""))
        write_phrase_shards(shards, word_vocab.word_ids, key, phrase, num, temporary)
    new = Shards(folder)
    count_N = np.bincount(new.tokens, minlength=num + len(joined))
    special = len(word_vocab.tokenizer.vocab.special_ids)
    all_names, ids = np.array([*names, *joined], dtype=object), np.arange(num + len(joined))
    order = np.array([i for i in ids if i >= special and count_N[i] >= max(recipe.min_count, 1)], np.int64)
    order = order[np.argsort(-count_N[order], kind="stable")]
    return new, make_word_vocabulary(word_vocab.tokenizer, all_names[order].tolist(), count_N, order)


def write_phrase_shards(
    shards: Shards, word_id_V: np.ndarray, key: np.ndarray, phrase: np.ndarray, num: int, folder: Path
) -> None:
    """Write the same documents with their phrases joined, as shards."""
    size_D = np.zeros(shards.num_documents, np.int64)
    with create_file(folder / "tokens.bin") as file:
        for number in range(count_chunks(shards)):
            words_W, doc_W = read_chunk(shards, word_id_V, number)
            out_W = np.empty(len(words_W), np.int64)
            n, index_W = word2vec.merge_phrases(words_W, doc_W, key, phrase, num, out_W)
            is_word = out_W[:n] >= 0
            file.write(out_W[:n][is_word].astype(np.uint32).data)
            np.add.at(size_D, doc_W[index_W[:n][is_word]] - 1, 1)
    write_npy(folder / "offsets.npy", np.concatenate([[0], np.cumsum(size_D)]))
