"""Train tokenizers: a new one of each kind, or one like another on other text.

- BPE (Sennrich et al. 2016, section 3.2): start from characters or bytes; merge the most frequent pair of neighbours;
  repeat until the vocabulary is full. WordPiece vocabularies are trained the same way, and differ in how they encode.
- Unigram (Kudo 2018): start from many pieces and drop those that the text misses least (`unigram.py`).
- Words: the most frequent ones.

The same text always gives the same tokenizer. The `tokenizers` library iterates over hash tables whose order changes
from run to run, so every result that would depend on that order is fixed or computed here.
"""

from __future__ import annotations

import heapq
import json
import re
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from firth.core.console import StatusLine, format_count, format_duration, say, track, warn
from firth.core.errors import UserError
from firth.text.normalize import parse_normal_forms
from firth.tokens.builders import METASPACE, TOKENIZER_KINDS, SplitOptions, build_untrained, default_tokenizer_config
from firth.tokens.tokenizer import Tokenizer, is_byte_level

MAX_ALPHABET_CHARS = 1000  # distinct characters with a token, the most frequent; a third of a large vocabulary
CHARACTER_COVERAGE = 0.9995  # share of the text's characters with a piece if bytes can spell the rest, as in T5
SHORT_TEXT_CHARS = 1 << 22  # characters: a shorter text is read twice, to know its alphabet
PASSAGE_CHARS = 1 << 16  # characters: a longer text is sampled in parts
# Bytes of memory per byte of text: measured on some megabytes of documentation, rounded up. Longer texts have fewer new
# words and need less; a text in which every word is new needs up to three times as much.
TRAIN_MEMORY_PER_TEXT_BYTE = {"BPE": 40, "WordPiece": 40, "Unigram": 150, "WordLevel": 20}
MIN_NEW_WORD_COUNT = 2  # occurrences of a word that is added to a vocabulary (`tok2id` of ULMFiT's program)
MAX_NEW_WORDS = 30_000  # words added to a vocabulary at most (the same)
MAX_TRAINING_WORD_CHARS = 1000  # characters: longer words are cut, because a merge scans the whole word
LONG_WORD_REGEX = re.compile(rf"\S{{{MAX_TRAINING_WORD_CHARS + 1},}}")
MAX_TEXT_BYTES = 8e9  # bytes: the library counts pairs in 32 bits
BYTE_FALLBACK_TOKENS = tuple(f"<0x{i:02X}>" for i in range(256))  # one per byte, for byte fallback


def train_tokenizer(
    texts: Iterable[str],
    kind: str,
    vocab_size: int,
    lowercase: bool = False,
    max_memory: int | None = None,
    seed: int = 0,
    pattern: str = "gpt2",
    byte_fallback: bool = False,
    normalize: str | None = None,
) -> Tokenizer:
    """Train a tokenizer on a stream of texts.

    - wordpiece, for BERT: [PAD] [UNK] [CLS] [SEP] [MASK] are ids 0 to 4.
    - bpe, for GPT and XLM: <pad> <unk> <s> </s> <mask> are ids 0 to 4. A word's last piece ends in </w>.
    - byte-bpe, for GPT-2, RoBERTa, BART and Llama: <pad> <s> </s> <mask> <|endoftext|> are ids 0 to 4. <|endoftext|> is
      bos and eos; <s> and </s> are cls and sep. `pattern` is the regex that splits text before any merge.
    - unigram, for T5, ALBERT, XLNet and XLM-R: <pad> </s> <unk> <s> <mask> are ids 0 to 4, and <extra_id_99> ...
      <extra_id_0> the last 100. </s> is eos and sep, <s> is cls. `byte_fallback` spells characters without a piece in
      bytes, so that decoding restores every text exactly.
    - char: one token per Unicode character, spaces included, with the special tokens of bpe.
    - word, for word2vec and AWD-LSTM, and elmo-characters, for ELMo: whole words, with the special tokens of bpe. ELMo
      reads words as characters (see `characters.py`); its vocabulary has the words that it predicts.

    `normalize` lists normal forms ("nfc,apostrophes"): the tokenizer applies them to every text that it encodes, except
    "lookalikes", which only a corpus can. `max_memory` (bytes) trains on a sample of the text if all of it would need
    more; None: no limit. A small text may give fewer than `vocab_size` tokens. A message tells both.
    """
    forms = tuple(parse_normal_forms(normalize))
    backend = build_untrained(kind, SplitOptions(lowercase, pattern, byte_fallback, forms))
    learned = train_backend(backend, texts, kind, vocab_size, max_memory, seed)
    return Tokenizer(learned, TOKENIZER_KINDS[kind].special_tokens, default_tokenizer_config(kind))


def extend_word_tokenizer(tokenizer: Tokenizer, texts: Iterable[str]) -> Tokenizer:
    """Return a word tokenizer with the words of another text added, the most frequent first (ULMFiT's second stage).

    A word must occur twice, and at most 30,000 are added, as in the published program. Known words keep their ids.
    """
    layout = read_vocab_layout(json.loads(tokenizer.backend.to_str()))
    counts, known = count_split_words(layout, texts), tokenizer.backend.get_vocab()
    unknown = [(word, n) for word, n in sort_by_count(counts) if word not in known]
    new = [word for word, n in unknown if n >= MIN_NEW_WORD_COUNT][:MAX_NEW_WORDS]
    total, missing = sum(counts.values()), sum(n for _, n in unknown)
    left = missing - sum(counts[word] for word in new)
    shares = f"{missing / max(total, 1):.1%} of the text was unknown, now {left / max(total, 1):.1%}"
    say(f"{format_count(len(new), 'word')} of the text added to the vocabulary of {tokenizer.vocab.size:,}: {shares}.")
    return tokenizer.with_words(new)


def tokenizer_from_words(words: Iterable[str], lowercase: bool = False) -> Tokenizer:
    """Return a tokenizer of kind word with these words; a word that equals a special token is that token."""
    layout = read_vocab_layout(json.loads(build_untrained("word", SplitOptions(lowercase)).to_str()))
    vocab = TrainedVocab([word for word in dict.fromkeys(words) if word not in layout.special_tokens])
    backend = assemble_backend(layout, vocab)
    return Tokenizer(backend, TOKENIZER_KINDS["word"].special_tokens, default_tokenizer_config("word"))


def retrain_tokenizer(
    like: Tokenizer, texts: Iterable[str], vocab_size: int, max_memory: int | None = None, seed: int = 0
) -> Tokenizer:
    """Train a tokenizer like another one on other texts: same kind, special tokens, normalizer and pre-tokenizer.

    Special tokens that had the last ids get the last ids again; the others get the first.
    """
    learned = train_backend(like.backend, texts, like.kind, vocab_size, max_memory, seed)
    names = [token["content"] for token in json.loads(learned.to_str())["added_tokens"]]
    others = [name for name in names if name not in like.special_tokens.values()]
    kept = {name: like.config[name] for name in KEPT_CONFIG_KEYS if name in like.config}
    extra = {"additional_special_tokens": others} if others else {}
    return Tokenizer(learned, like.special_tokens, {**default_tokenizer_config(like.kind), **kept, **extra})


# Fields of tokenizer_config.json that do not depend on the vocabulary.
KEPT_CONFIG_KEYS = (
    *("model_input_names", "model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces"),
    *("chat_template", "max_word_length"),
)


def train_backend(
    like: Backend, texts: Iterable[str], kind: str, vocab_size: int, max_memory_bytes: int | None, seed: int
) -> Backend:
    """Return a tokenizer with the special tokens and text processing of `like`, and a new vocabulary."""
    layout = read_vocab_layout(json.loads(like.to_str()))
    model = layout.tokenizer_json["model"]["type"]
    num_tokens = vocab_size - len(layout.first_tokens) - len(layout.last_tokens)
    require_vocab_size(num_tokens, 1, layout, "the special tokens alone")
    stream = iter(texts)
    first = next((text for text in stream if text.strip()), None)
    if first is None:
        raise UserError("There is no text to train a tokenizer on.")
    long_words = Counter[str]()
    stream = (split_long_words(text, long_words) for text in chain([first], stream))
    if max_memory_bytes is not None:
        stream = sample_passages(stream, max_sample_bytes(like, max_memory_bytes), seed)
    with show_heartbeat(f"training a {kind} vocabulary") as heartbeat:
        train_vocab = train_char_vocab if kind == "char" else VOCAB_TRAINERS[model]
        vocab = train_vocab(layout, heartbeat.track_reading(stream), num_tokens, heartbeat.set_status)
    backend = assemble_backend(layout, vocab)
    if num_cut := long_words["cut"]:
        say(f"{format_count(num_cut, 'word')} of more than {MAX_TRAINING_WORD_CHARS:,} characters: cut for training.")
    if (size := backend.get_vocab_size()) < vocab_size and kind != "word":  # whose size is a limit
        say(f"The text gives {size:,} tokens: it is too short for a vocabulary of {vocab_size:,}.")
    return backend


def max_sample_bytes(like: Backend, max_memory_bytes: int) -> int:
    """Return the bytes of text that a tokenizer can be trained on in `max_memory_bytes`."""
    return max_memory_bytes // TRAIN_MEMORY_PER_TEXT_BYTE[json.loads(like.to_str())["model"]["type"]]


def split_long_words(text: str, cut_counts: Counter[str]) -> str:
    """Cut words of more than `MAX_TRAINING_WORD_CHARS`, which would slow training down; count them."""

    def cut(match: re.Match[str]) -> str:
        cut_counts["cut"] += 1
        return " ".join(
            match[0][i : i + MAX_TRAINING_WORD_CHARS] for i in range(0, len(match[0]), MAX_TRAINING_WORD_CHARS)
        )

    return LONG_WORD_REGEX.sub(cut, text) if len(text) > MAX_TRAINING_WORD_CHARS else text


def require_vocab_size(available: int, required: int, layout: VocabLayout, contents: str) -> None:
    """Raise an error if the vocabulary is too small for `contents`."""
    if available < required:
        reserved = len(layout.first_tokens) + len(layout.last_tokens)
        raise UserError(
            f"A vocabulary of {available + reserved:,} tokens is too small: {contents} take {required + reserved:,}. "
            "Choose a larger --vocab-size."
        )


# --- the tokenizer around the vocabulary ----------------------------------------------------------------------------


class VocabLayout(NamedTuple):
    """A tokenizer.json, and the tokens before and after the trained vocabulary."""

    tokenizer_json: dict[str, Any]
    first_tokens: list[str]  # of the first ids: special tokens, and bytes with byte fallback
    last_tokens: list[str]
    special_tokens: dict[str, dict[str, Any]]  # name -> entry of `added_tokens`


class TrainedVocab(NamedTuple):
    """Tokens in the order of their ids, with the merges (BPE) or the scores (Unigram)."""

    tokens: list[str]
    merges: list[tuple[str, str]] | None = None
    scores: list[float] | None = None


ReportFn = Callable[[str], None]


def read_vocab_layout(tokenizer_json: dict[str, Any]) -> VocabLayout:
    model = tokenizer_json["model"]
    tokens = [token for token, _ in model["vocab"]] if model["type"] == "Unigram" else list(model["vocab"])
    added = {token["content"]: token for token in tokenizer_json["added_tokens"] if token["special"]}
    unk = tokens[model["unk_id"]] if model.get("unk_id") is not None else model.get("unk_token")
    ids = {token: i for i, token in enumerate(tokens)} if model["type"] == "Unigram" else model["vocab"]
    final = max((i for token, i in ids.items() if token not in added), default=len(ids))
    names = sorted(added, key=lambda name: added[name]["id"])
    last = [name for name in names if name != unk and (name not in ids or added[name]["id"] > final)]
    first = [name for name in names if name not in last]
    if unk and unk not in first:
        first.append(unk)
    spelled = BYTE_FALLBACK_TOKENS if model.get("byte_fallback") else ()
    return VocabLayout(tokenizer_json, [*first, *spelled], last, added)


def assemble_backend(layout: VocabLayout, vocab: TrainedVocab) -> Backend:
    """Return the tokenizer with its new vocabulary."""
    tokens = [*layout.first_tokens, *vocab.tokens]
    ids = {token: i for i, token in enumerate([*tokens, *layout.last_tokens])}
    model = dict(layout.tokenizer_json["model"])
    if vocab.scores is not None:
        # Text that looks like a special token is spelled: the token's score is too low for the best path.
        lowest = 10 * min(vocab.scores)
        scores = [lowest] * len(layout.first_tokens) + vocab.scores
        if model["unk_id"] is not None:
            model["unk_id"] = ids[layout.tokenizer_json["model"]["vocab"][model["unk_id"]][0]]
        model["vocab"] = list(zip(tokens, scores, strict=True))
    else:
        model["vocab"] = {token: i for i, token in enumerate(tokens)}
    if vocab.merges is not None and model["type"] == "BPE":
        model["merges"] = vocab.merges
    added = [
        {**layout.special_tokens[name], "id": ids[name]} for name in sorted(layout.special_tokens, key=ids.__getitem__)
    ]
    processor = renumber_post_processor(layout.tokenizer_json["post_processor"], ids)
    return Backend.from_str(
        json.dumps({**layout.tokenizer_json, "model": model, "added_tokens": added, "post_processor": processor})
    )


def renumber_post_processor(post_processor: Any, ids: Mapping[str, int]) -> Any:
    """Return a post-processor with the new ids of its special tokens."""
    if post_processor is None:
        return None
    new = dict(post_processor)
    if "processors" in post_processor:
        new["processors"] = [renumber_post_processor(part, ids) for part in post_processor["processors"]]
    if post_processor["type"] == "TemplateProcessing":
        named = post_processor["special_tokens"]
        new["special_tokens"] = {
            name: {**token, "ids": [ids[part] for part in token["tokens"]]} for name, token in named.items()
        }
    for role in ("cls", "sep"):
        if role in post_processor:
            new[role] = [post_processor[role][0], ids[post_processor[role][0]]]
    return new


# --- what is learned ------------------------------------------------------------------------------------------------


def train_bpe_vocab(layout: VocabLayout, texts: Iterable[str], num_tokens: int, report: ReportFn) -> TrainedVocab:
    """Train BPE or WordPiece merges on characters or bytes."""
    model = layout.tokenizer_json["model"]
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    bytes_only = is_byte_level(layout.tokenizer_json)
    if bytes_only:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        require_vocab_size(num_tokens, len(letters), layout, "the special tokens and the 256 bytes")
    else:
        texts, letters = candidate_characters(layout, texts)
    # The trainer numbers "##x" and "x</w>" in the order of a hash table, and breaks ties by number. Passing all
    # possible ones fixes the numbers; those that the text does not need are dropped below.
    forms = [] if bytes_only else affixed_forms("*", prefix, suffix)[1:]
    named = [form.replace("*", c) for form in forms for c in letters]
    affixes: dict[str, Any] = {"continuing_subword_prefix": prefix, "end_of_word_suffix": suffix}
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens + len(named) + len(letters),
        min_frequency=2,
        special_tokens=named,
        initial_alphabet=letters,
        show_progress=False,
        **{name: affix for name, affix in affixes.items() if affix},
    )
    splitter = build_word_splitter(layout, models.BPE())
    splitter.train_from_iterator(warn_if_counts_overflow(texts), trainer)
    alphabet = letters if bytes_only else select_alphabet(layout, trainer, prefix, suffix, num_tokens)
    merges = json.loads(splitter.to_str())["model"]["merges"]
    return select_merges(alphabet, [(a, b) for a, b in merges], prefix, num_tokens)


def select_merges(
    alphabet: list[str], merge_pairs: list[tuple[str, str]], prefix: str, num_tokens: int
) -> TrainedVocab:
    """Return the first merges that fit, without those of a character that is not in the alphabet."""
    tokens, merges = dict.fromkeys(alphabet), []
    for a, b in merge_pairs:
        token = a + b.removeprefix(prefix)
        if a not in tokens or b not in tokens or (len(tokens) == num_tokens and token not in tokens):
            continue
        tokens[token] = None
        merges.append((a, b))
    return TrainedVocab(list(tokens), merges)


def affixed_forms(character: str, prefix: str, suffix: str) -> list[str]:
    """Return a character as it is written at the beginning, inside and at the end of a word.

    >>> affixed_forms("a", "##", ""), affixed_forms("a", "", "</w>")
    (['a', '##a'], ['a', 'a</w>'])
    """
    return sorted({a + character + b for a in ("", prefix) for b in ("", suffix)}, key=lambda form: (len(form), form))


def candidate_characters(layout: VocabLayout, texts: Iterable[str]) -> tuple[Iterable[str], list[str]]:
    """Return the texts and the characters that they may have: those of a short text, or all assigned ones."""
    stream, held, size = iter(texts), [], 0
    for text in stream:
        held.append(text)
        size += len(text)
        if size > SHORT_TEXT_CHARS:
            return chain(held, stream), all_characters_in_use()
    return held, sorted(filter(is_character_in_use, count_characters(count_split_words(layout, held))))


def is_character_in_use(c: str) -> bool:
    """Whether a character is assigned and in Unicode's first two planes, which have all scripts in use."""
    return ord(c) < 0x20000 and unicodedata.category(c) not in ("Cn", "Cs")


@cache
def all_characters_in_use() -> list[str]:
    return [c for c in map(chr, range(0x20000)) if is_character_in_use(c)]


def select_alphabet(
    layout: VocabLayout, trainer: trainers.BpeTrainer, prefix: str, suffix: str, num_tokens: int
) -> list[str]:
    """Return the most frequent characters in all their forms, or in one form if never part of a longer word."""
    counts = trainer_word_counts(trainer, "BpeTrainer")
    characters = count_characters(counts)
    inside = {c for word in counts if len(word) > 1 for c in word}
    unnamed = {c for c in inside if not is_character_in_use(c)} if prefix or suffix else set()
    max_characters = max(MAX_ALPHABET_CHARS, num_tokens // 3)
    kept = {c for c, _ in sort_by_count(characters)[:max_characters] if c not in unnamed}
    alphabet = {form for c in kept for form in (affixed_forms(c, prefix, suffix) if c in inside else [c + suffix])}
    require_vocab_size(
        num_tokens, len(alphabet), layout, "the special tokens and the characters of this text (in all their forms)"
    )
    warn_lost_characters(layout, characters, kept)
    return sorted(alphabet, key=lambda form: (len(form), form))


def train_unigram_vocab(layout: VocabLayout, texts: Iterable[str], num_tokens: int, report: ReportFn) -> TrainedVocab:
    """Train the pieces with the highest likelihood of the text (`unigram.py`), all characters among them."""
    from firth.tokens.unigram import train_unigram_pieces  # loads numba

    counts = count_split_words(layout, texts)
    characters = count_characters(counts)
    kept = set(characters)
    if layout.tokenizer_json["model"].get("byte_fallback"):
        kept = set(iter_most_frequent(characters, CHARACTER_COVERAGE))
        warn_lost_characters(layout, characters, kept)
    # The characters of special tokens too, so that "</s>" in a text can be spelled.
    kept |= set("".join(layout.first_tokens + layout.last_tokens)) | {METASPACE}
    require_vocab_size(num_tokens, len(kept), layout, "the special tokens and the characters of this text")
    special = {*layout.first_tokens, *layout.last_tokens}  # a text with many "</s>" would make a piece of it
    pieces = train_unigram_pieces(counts, kept, num_tokens, report, special)
    pieces = [(token, score) for token, score in pieces if token not in special]
    return TrainedVocab([token for token, _ in pieces], scores=[round(score, 6) for _, score in pieces])


def train_word_vocab(layout: VocabLayout, texts: Iterable[str], num_tokens: int, report: ReportFn) -> TrainedVocab:
    """Return the most frequent words."""
    counts = count_split_words(layout, texts)
    words = [word for word, _ in sort_by_count(counts) if word not in layout.special_tokens][:num_tokens]
    share = 1 - sum(counts[word] for word in words) / sum(counts.values())
    if share > 0:
        say(f"{share:.1%} of the words of the text are not in the vocabulary; it has {len(counts):,} different words.")
    return TrainedVocab(words)


def train_char_vocab(layout: VocabLayout, texts: Iterable[str], num_tokens: int, report: ReportFn) -> TrainedVocab:
    """Return the most frequent characters."""
    counts = count_characters(count_split_words(layout, texts))
    characters = [c for c, _ in sort_by_count(counts)[:num_tokens]]
    share = 1 - sum(counts[c] for c in characters) / counts.total()
    if share > 0:
        say(f"{share:.1%} of the characters of the text are not in the vocabulary; it has {len(counts):,} of them.")
    return TrainedVocab(characters)


VOCAB_TRAINERS = {
    "BPE": train_bpe_vocab,
    "WordPiece": train_bpe_vocab,
    "Unigram": train_unigram_vocab,
    "WordLevel": train_word_vocab,
}


# --- reading --------------------------------------------------------------------------------------------------------


def build_word_splitter(layout: VocabLayout, model: models.Model) -> Backend:
    """Return a tokenizer with the normalizer and pre-tokenizer of the layout, around another model."""
    splitter = Backend(model)
    full = Backend.from_str(json.dumps({**layout.tokenizer_json, "added_tokens": [], "post_processor": None}))
    if full.normalizer is not None:
        splitter.normalizer = full.normalizer
    if full.pre_tokenizer is not None:
        splitter.pre_tokenizer = full.pre_tokenizer
    else:  # Llama 2 merges across spaces; training such pairs is slow and gains little
        space = METASPACE if METASPACE in json.dumps(layout.tokenizer_json["normalizer"], ensure_ascii=False) else " "
        splitter.pre_tokenizer = pre_tokenizers.Split(space, behavior="merged_with_next")
    return splitter


def count_split_words(layout: VocabLayout, texts: Iterable[str]) -> dict[str, int]:
    """Number of occurrences of each word, counted by the library on all cores."""
    trainer = trainers.WordLevelTrainer(vocab_size=1, min_frequency=0, show_progress=False)
    build_word_splitter(layout, models.WordLevel(unk_token="")).train_from_iterator(texts, trainer)
    return trainer_word_counts(trainer, "WordLevelTrainer")


def trainer_word_counts(trainer: trainers.Trainer, trainer_class: str) -> dict[str, int]:
    """Return the words that a trainer has counted; the library exposes them only in its pickled state."""
    return json.loads(trainer.__getstate__())[trainer_class]["words"]


def count_characters(words: Mapping[str, int]) -> Counter[str]:
    code_N = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), np.uint32)
    counts, lengths = (np.fromiter(numbers, np.int64, len(words)) for numbers in (words.values(), map(len, words)))
    total_C = np.bincount(code_N, weights=np.repeat(counts, lengths))
    return Counter({chr(code): int(total_C[code]) for code in np.flatnonzero(total_C)})


def sort_by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Sort by falling count, ties by code points."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def iter_most_frequent(counts: Mapping[str, int], share: float) -> Iterator[str]:
    """Yield the most frequent names that together make up this share of all counts."""
    remaining = share * sum(counts.values())
    for name, n in sort_by_count(counts):
        if remaining <= 0:
            return
        remaining -= n
        yield name


def warn_lost_characters(layout: VocabLayout, characters: Mapping[str, int], kept: set[str]) -> None:
    lost = [c for c, _ in sort_by_count(characters) if c not in kept]
    if not lost:
        return
    spelled = layout.tokenizer_json["model"].get("byte_fallback")
    fate = "spelled in bytes" if spelled else f"read as {layout.tokenizer_json['model'].get('unk_token')}"
    some = format_count(len(lost), "rare character has no token and is", "rare characters have no token and are")
    warn(f"{some} {fate}: {' '.join(lost[:10])}{' ...' if len(lost) > 10 else ''}")


def warn_if_counts_overflow(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts; warn when there is more text than the library can count."""
    size = 0
    for text in texts:
        if size <= MAX_TEXT_BYTES < size + len(text):
            warn(f"More than {MAX_TEXT_BYTES / 1e9:g} GB of text: counts may overflow. Take a sample (--max-memory).")
        size += len(text)
        yield text


def sample_passages(texts: Iterable[str], max_bytes: int, seed: int) -> Iterator[str]:
    """Yield a random sample of passages of at most `max_bytes`, in their order; all of them if they fit.

    The sample depends on the texts and the seed alone: it has the passages with the smallest keyed hashes.
    """
    held = PassageSample[str](max_bytes)
    for passage in split_passages(texts):
        data = passage.encode()
        held.add(passage_key(data, seed), len(data), passage)
    yield from held.finish()


def passage_key(passage: bytes, seed: int) -> int:
    """Return the keyed hash by which passages are drawn."""
    return int.from_bytes(blake2b(passage, digest_size=8, key=seed.to_bytes(8, "little", signed=True)).digest())


PassageT = TypeVar("PassageT")


class PassageSample(Generic[PassageT]):
    """The passages with the smallest keys, of at most `max_bytes`; a passage may stand for itself as its number."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held: list[tuple[int, int, int, PassageT]] = []  # -key, place in the text, size, passage
        self.num_seen = self.seen_bytes = self.held_bytes = 0

    def add(self, key: int, size: int, passage: PassageT) -> None:
        heapq.heappush(self.held, (-key, self.num_seen, size, passage))
        self.num_seen += 1
        self.seen_bytes += size
        self.held_bytes += size
        while self.held_bytes > self.max_bytes:
            self.held_bytes -= heapq.heappop(self.held)[2]

    def finish(self) -> list[PassageT]:
        """Say how large the sample is, and return it in the order of the text."""
        if not self.held:
            raise UserError("--max-memory is too small for any text. Allow more.")
        if self.held_bytes < self.seen_bytes:
            share = f"{self.held_bytes / 1e6:,.1f} of {self.seen_bytes / 1e6:,.1f} MB of text"
            say(
                f"Training on a sample, {share} ({self.held_bytes / self.seen_bytes:.1%}), to stay within --max-memory."
            )
        return [passage for _, _, _, passage in sorted(self.held, key=lambda item: item[1])]


def split_passages(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts, long ones in parts that end with a line or a word."""
    for text in texts:
        while len(text) > PASSAGE_CHARS:
            end = (
                max(text.rfind("\n", 0, PASSAGE_CHARS), text.rfind(" ", PASSAGE_CHARS // 2, PASSAGE_CHARS)) + 1
                or PASSAGE_CHARS
            )
            yield text[:end]
            text = text[end:]
        yield text


class HeartbeatStatus:
    """Status of a phase without output."""

    def __init__(self) -> None:
        self.status, self.is_reading = "", False

    def set_status(self, text: str) -> None:
        self.status = text

    def track_reading(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the texts with a progress line."""
        self.is_reading = True
        yield from track(texts, "reading text", "documents")
        self.is_reading = False


@contextmanager
def show_heartbeat(label: str, every_seconds: float = 10.0) -> Iterator[HeartbeatStatus]:
    """Show a status line every few seconds while the library trains without output."""
    start, done, line, beat = time.monotonic(), threading.Event(), StatusLine(every_seconds), HeartbeatStatus()

    def show() -> None:
        while not done.wait(1.0 if line.is_live else every_seconds):
            if not beat.is_reading:
                note = f", {beat.status}" if beat.status else ""
                line.show(f"{label}: {format_duration(time.monotonic() - start)}{note}", force=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield beat
    finally:
        done.set()
        thread.join()
        line.close()
