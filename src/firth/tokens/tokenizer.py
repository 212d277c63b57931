"""Train, load and save tokenizers: WordPiece, byte-level BPE and Unigram, run by Hugging Face `tokenizers`."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Encoding, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from firth.console import Line, duration, say, track, warn
from firth.errors import UserError, nearest
from firth.files import read_json, write_json, write_text

ROLES = ("pad", "unk", "bos", "eos", "cls", "sep", "mask")
NUM_SENTINELS = 100
MAX_ALPHABET = 1000  # WordPiece keeps this many characters, the most frequent ones; the rest become [UNK]
SPACE_MARK = "▁"


@dataclass(frozen=True)
class Vocabulary:
    """Which id means what. A role that the tokenizer does not have is None."""

    size: int
    pad: int
    unk: int | None
    bos: int | None
    eos: int | None
    cls: int | None
    sep: int | None
    mask: int | None
    sentinels: tuple[int, ...]  # <extra_id_0>, <extra_id_1>, ...
    special: tuple[int, ...]  # every special id, sorted

    @cached_property
    def ordinary(self) -> np.ndarray:
        """The ids that are not special: those of text."""
        return np.setdiff1d(np.arange(self.size), self.special)


class Tokenizer:
    """Text to ids and back, with the names of the special tokens.

    `backend` is the tokenizer of the `tokenizers` library, for whatever else it can do.
    """

    def __init__(self, backend: Backend, roles: Mapping[str, str], config: Mapping[str, Any] | None = None) -> None:
        backend.no_padding()
        backend.no_truncation()
        state = json.loads(backend.to_str())
        self.backend = backend
        self.roles = dict(roles)
        self.kind = kind_of(state)
        self.fingerprint = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]
        self.vocab = read_vocabulary(backend, roles)
        self.config = dict(config) if config is not None else own_config(self.kind)

    def encode(self, text: str, specials: bool = False) -> list[int]:
        """The ids of a text. No special token is added.

        Text that happens to look like a special token ("[MASK]" in a page about BERT) stays text, unless `specials`
        asks to read it as the token.
        """
        reader = self.backend if specials else self._plain
        return reader.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str], specials: bool = False) -> list[list[int]]:
        """`encode` for many texts at once, on all cores."""
        reader = self.backend if specials else self._plain
        return [e.ids for e in reader.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encodings(self, texts: Sequence[str]) -> list[Encoding]:
        """Like `encode_batch`, with the words and the character offsets of the tokens."""
        return self._plain.encode_batch(list(texts), add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def word_starts(self, *encodings: Encoding) -> np.ndarray:
        """For each token: does it start a word, that is a piece of text that the pre-tokenizer keeps together?

        Several encodings give the answers for all their tokens, one encoding after the other.
        """
        if not encodings:
            return np.zeros(0, dtype=bool)
        words = np.array(list(chain.from_iterable(e.word_ids for e in encodings)), dtype=np.float64)
        starts = np.ones(len(words), dtype=bool)
        starts[1:] = words[1:] != words[:-1]  # a token outside of words has None, here NaN, which differs from itself
        first = np.cumsum([0] + [len(e) for e in encodings[:-1]])
        starts[first[first < len(starts)]] = True
        ids = np.fromiter(chain.from_iterable(e.ids for e in encodings), np.int64, len(words))
        starts |= self._space_first[ids]
        return starts

    def save(self, folder: str | Path) -> None:
        """Write the files that `transformers.AutoTokenizer` opens with the same ids."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "tokenizer.json", self.backend.to_str(pretty=True))
        names = {f"{role}_token": token for role, token in self.roles.items()}
        sentinels = [self.backend.id_to_token(i) for i in self.vocab.sentinels]
        extra = {"additional_special_tokens": sentinels} if sentinels else {}
        write_json(folder / "tokenizer_config.json", {**extra, **self.config, **names})

    @cached_property
    def _plain(self) -> Backend:
        """A copy of the backend that reads special tokens in a text as plain text."""
        plain = Backend.from_str(self.backend.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _space_first(self) -> np.ndarray:
        """Which ids begin with the mark for a space: word starts where the pre-tokenizer does not split words."""
        first = np.zeros(self.vocab.size, dtype=bool)
        first[[i for token, i in self.backend.get_vocab().items() if token.startswith(SPACE_MARK)]] = True
        return first


def kind_of(state: Mapping[str, Any]) -> str:
    """The kind of a tokenizer from its tokenizer.json."""
    model = state["model"]["type"]
    if model == "BPE":
        return "byte-bpe" if '"ByteLevel"' in json.dumps(state["pre_tokenizer"]) else "bpe"
    return {"WordPiece": "wordpiece", "Unigram": "unigram", "WordLevel": "word"}[model]


def own_config(kind: str) -> dict[str, Any]:
    """What tokenizer_config.json says beside the special tokens.

    The class is the plain one: those named after a model rebuild parts of the tokenizer in their own way. Segment ids
    are for BERT only; GPT-2 would add them to its embeddings.
    """
    segments = ["token_type_ids"] if kind == "wordpiece" else []
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", *segments, "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }


def read_vocabulary(backend: Backend, roles: Mapping[str, str]) -> Vocabulary:
    ids = {role: backend.token_to_id(roles[role]) if role in roles else None for role in ROLES}
    pad = ids.pop("pad")
    if pad is None:
        pad = ids["eos"]  # GPT-2 has no padding token
    if pad is None:
        raise UserError("This tokenizer has neither a padding nor an end token. Name one in tokenizer_config.json.")
    tokens = backend.get_vocab(with_added_tokens=True)
    numbered = [(re.fullmatch(r"<extra_id_(\d+)>", token), i) for token, i in tokens.items()]
    sentinels = [i for _, i in sorted((int(match[1]), i) for match, i in numbered if match)]
    added = [i for i, token in backend.get_added_tokens_decoder().items() if token.special]
    special = {pad, *sentinels, *added, *(i for i in ids.values() if i is not None)}
    return Vocabulary(
        size=max(tokens.values()) + 1, pad=pad, **ids, sentinels=tuple(sentinels), special=tuple(sorted(special))
    )


# --- training -----------------------------------------------------------------------------------------------------


def train_tokenizer(texts: Iterable[str], kind: str, vocab_size: int, lowercase: bool = False) -> Tokenizer:
    """Learn a tokenizer from a stream of texts; the same texts always give the same tokenizer.

    - wordpiece, for BERT: [PAD] [UNK] [CLS] [SEP] [MASK] are ids 0 to 4.
    - byte-bpe, for GPT-2 and RoBERTa: <pad> <s> </s> <mask> <|endoftext|> are ids 0 to 4. The end of a text is
      <|endoftext|>, which is bos and eos; <s> and </s> are cls and sep.
    - unigram, for T5 and XLM-R: <pad> </s> <unk> <s> <mask> are ids 0 to 4, and <extra_id_99> ... <extra_id_0> the
      last 100. The end of a text is </s>, which is sep too; <s> is cls.

    A small text may give fewer than `vocab_size` tokens; that is said.
    """
    if kind not in KINDS:
        raise UserError(f"There is no tokenizer of kind {kind!r}. {nearest(kind, KINDS)}")
    learn, roles = KINDS[kind]
    stream = iter(texts)
    first = next((text for text in stream if text.strip()), None)
    if first is None:
        raise UserError("There is no text to learn a tokenizer from.")
    read = Texts(chain([first], stream))
    with heartbeat(f"learning a {kind} vocabulary", read):
        backend = learn(read, vocab_size, lowercase)
    tokenizer = Tokenizer(backend, roles)
    if tokenizer.vocab.size < vocab_size:
        say(f"The text gives {tokenizer.vocab.size:,} tokens, fewer than the {vocab_size:,} asked for.")
    return tokenizer


class Texts:
    """A stream of texts that shows how far it is and remembers which characters went by."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = texts
        self.characters: set[str] = set()
        self.finished = False

    def __iter__(self) -> Iterator[str]:
        for text in track(self.texts, "reading text", "documents"):
            self.characters.update(text)
            yield text
        self.finished = True


@contextmanager
def heartbeat(what: str, texts: Texts, every: float = 10.0) -> Iterator[None]:
    """A line now and then while the library, once it has read the texts, works without a word."""
    start, done, line = time.monotonic(), threading.Event(), Line(every)

    def beat() -> None:
        while not done.wait(every):
            if texts.finished:
                line.show(f"{what}: {duration(time.monotonic() - start)}", force=True)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        line.close()


def require(vocab_size: int, need: int, what: str) -> None:
    """Refuse a vocabulary in which `what` does not fit."""
    if vocab_size < need:
        raise UserError(
            f"A vocabulary of {vocab_size:,} tokens is too small: {what} take {need:,}. Ask for more (--vocab-size)."
        )


WORDPIECE_SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def learn_wordpiece(texts: Texts, vocab_size: int, lowercase: bool) -> Backend:
    require(vocab_size, len(WORDPIECE_SPECIALS), "the special tokens alone")
    backend = wordpiece({"[UNK]": 0}, lowercase, strip_accents=False)
    # The trainer numbers its "##x" in the order of a hash table that differs from run to run, and breaks ties by
    # number. Naming every "##x" there can be fixes the numbers; those that the text does not need are dropped below.
    inner = [f"##{c}" for c in characters_inside_words(backend)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size + len(inner),
        min_frequency=2,
        limit_alphabet=MAX_ALPHABET,
        special_tokens=WORDPIECE_SPECIALS + inner,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    learned = backend.get_vocab()
    known = set(WORDPIECE_SPECIALS).union(inner)
    alphabet = sorted(token for token in learned if len(token) == 1)
    alphabet += [token for token in inner if token[2:] in learned]
    words = [token for token in sorted(learned, key=learned.__getitem__) if len(token) > 1 and token not in known]
    need = len(WORDPIECE_SPECIALS) + len(alphabet)
    require(vocab_size, need, "the special tokens and the characters of this text (as 'x' and as '##x')")
    say_what_is_lost(backend, texts.characters, learned)
    tokens = (WORDPIECE_SPECIALS + alphabet + words)[:vocab_size]
    backend = wordpiece({token: i for i, token in enumerate(tokens)}, lowercase, strip_accents=False)
    backend.add_special_tokens(WORDPIECE_SPECIALS)
    return backend


def wordpiece(vocab: dict[str, int], lowercase: bool, strip_accents: bool | None, chinese: bool = True) -> Backend:
    """BERT's tokenizer around a vocabulary. `strip_accents=None` strips them where it lowercases, as BERT does."""
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=chinese
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    if "[CLS]" in vocab and "[SEP]" in vocab:
        frame = [("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])]
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=frame
        )
    return backend


def characters_inside_words(backend: Backend) -> list[str]:
    """Every character that can stand in the middle of a word: not spaces, not what is split off, as punctuation is."""
    unassigned = {"Cn", "Co", "Cs"}
    characters = [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) not in unassigned]
    text = backend.normalizer.normalize_str(" ".join(f"a{c}a" for c in characters))
    return sorted({word[1] for word, _ in backend.pre_tokenizer.pre_tokenize_str(text) if len(word) == 3})


def say_what_is_lost(backend: Backend, characters: set[str], vocab: Mapping[str, int]) -> None:
    normal = set("".join(backend.normalizer.normalize_str(c) for c in characters))
    lost = sorted(c for c in normal if not c.isspace() and c not in vocab)
    if lost:
        some = " ".join(lost[:10])
        warn(f"{len(lost):,} rare characters have no token of their own and become [UNK]: {some} ...")


BYTE_SPECIALS = ["<pad>", "<s>", "</s>", "<mask>", "<|endoftext|>"]


def learn_byte_bpe(texts: Texts, vocab_size: int, lowercase: bool) -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    require(vocab_size, len(BYTE_SPECIALS) + len(alphabet), "the special tokens and the 256 bytes")
    backend = byte_bpe({}, [])
    backend.normalizer = normalizers.Lowercase() if lowercase else None
    specials = [AddedToken(token, special=True, lstrip=token == "<mask>") for token in BYTE_SPECIALS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def byte_bpe(vocab: dict[str, int], merges: list[tuple[str, str]], add_prefix_space: bool = False) -> Backend:
    """GPT-2's tokenizer around a vocabulary: any text is a string of bytes, so nothing is unknown."""
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


UNIGRAM_SPECIALS = ["<pad>", "</s>", "<unk>", "<s>", "<mask>"]


def learn_unigram(texts: Texts, vocab_size: int, lowercase: bool) -> Backend:
    reserved = len(UNIGRAM_SPECIALS) + NUM_SENTINELS
    require(vocab_size, reserved, "the special tokens alone")
    backend = unigram([("<unk>", 0.0)], 0, lowercase)
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - NUM_SENTINELS,
        unk_token="<unk>",
        special_tokens=UNIGRAM_SPECIALS,
        initial_alphabet=sorted(set("".join(UNIGRAM_SPECIALS))),  # so that "</s>" in a text can be spelled
        show_progress=False,
    )
    try:
        backend.train_from_iterator(texts, trainer)
    except Exception:
        need = reserved + len(texts.characters - {" "} | set(SPACE_MARK).union(*UNIGRAM_SPECIALS))
        require(vocab_size, need, f"the special tokens, {NUM_SENTINELS} sentinels and the characters of this text")
        raise
    learned = json.loads(backend.to_str())["model"]["vocab"][len(UNIGRAM_SPECIALS) :]
    pieces = steady_scores(learned)
    # A special token is never the best way to read a text; what looks like one is spelled.
    never = 10 * min(score for _, score in pieces)
    backend = unigram([(token, never) for token in UNIGRAM_SPECIALS] + pieces, 2, lowercase)
    backend.add_special_tokens([AddedToken(name, special=True, lstrip=name == "<mask>") for name in UNIGRAM_SPECIALS])
    names = [f"<extra_id_{i}>" for i in reversed(range(NUM_SENTINELS))]
    backend.add_special_tokens([AddedToken(name, special=True, lstrip=True) for name in names])
    return backend


def unigram(pieces: list[tuple[str, float]], unk: int, lowercase: bool) -> Backend:
    """T5's tokenizer around scored pieces, but lines stay apart: a newline or a tab is a token, not a space."""
    backend = Backend(models.Unigram(pieces, unk_id=unk))
    backend.normalizer = normalizers.Lowercase() if lowercase else None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^\S ]"), behavior="isolated"),
            pre_tokenizers.Metaspace(replacement=SPACE_MARK, prepend_scheme="first"),
        ]
    )
    backend.decoder = decoders.Metaspace(replacement=SPACE_MARK, prepend_scheme="first")
    if len(pieces) > 1:
        backend.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
        )
    return backend


def steady_scores(pieces: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Pieces by falling score, the same in every run.

    The trainer adds up in the order of a hash table, which moves the last digits. And in that order it gives the
    characters that it keeps only for completeness the lowest score, the lowest and 0.0001, and so on: here all of
    them get the lowest.
    """
    pieces = list(pieces)
    lowest = min(score for _, score in pieces)
    reach = lowest + 0.0001 * sum(len(piece) == 1 for piece, _ in pieces)
    steady = [(p, round(lowest if len(p) == 1 and score < reach else score, 6)) for p, score in pieces]
    return sorted(steady, key=lambda pair: (-pair[1], pair[0]))


class Kind(NamedTuple):
    """How a kind of tokenizer is learned, and which special token plays which role."""

    learn: Callable[[Texts, int, bool], Backend]
    roles: dict[str, str]


BERT_ROLES = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
GPT2_ROLES = {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}
T5_ROLES = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
ROBERTA_ROLES = {**T5_ROLES, "bos": "<s>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}

KINDS = {
    "wordpiece": Kind(learn_wordpiece, BERT_ROLES),
    "byte-bpe": Kind(learn_byte_bpe, {**GPT2_ROLES, "pad": "<pad>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}),
    "unigram": Kind(learn_unigram, {**T5_ROLES, "cls": "<s>", "sep": "</s>", "mask": "<mask>"}),
}


# --- loading ------------------------------------------------------------------------------------------------------


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Open a tokenizer folder: ours, or a published one of the Hugging Face kind."""
    folder = Path(folder)
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    if (folder / "tokenizer.json").is_file():
        backend = read_backend(folder / "tokenizer.json")
        return Tokenizer(backend, find_roles(folder, config, backend), config)
    if (folder / "vocab.txt").is_file():
        backend = read_vocab_txt(folder / "vocab.txt", config)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = read_merges(folder, config)
    else:
        raise no_tokenizer(folder)
    roles = find_roles(folder, config, backend)
    backend.add_special_tokens(sorted(set(roles.values())))
    return Tokenizer(backend, roles)


def no_tokenizer(folder: Path) -> UserError:
    if not folder.is_dir():
        return UserError(f"{folder}: no such folder.")
    models = sorted(path.name for path in folder.glob("*.model"))
    if models:
        return UserError(
            f"{folder} has {models[0]} but no tokenizer.json. Convert it once with transformers: "
            f"AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return UserError(f"{folder} holds no tokenizer: no tokenizer.json, no vocab.txt, no vocab.json with merges.txt.")


def read_backend(file: Path) -> Backend:
    try:
        return Backend.from_file(str(file))
    except Exception as e:  # the library has no narrower type
        raise UserError(f"{file}: not a tokenizer ({e}).") from None


def read_vocab_txt(file: Path, config: Mapping[str, Any]) -> Backend:
    """BERT's old format: a token a line."""
    tokens = file.read_text(encoding="utf-8").split("\n")
    vocab = {token.rstrip("\r"): i for i, token in enumerate(tokens) if token}
    if "[UNK]" not in vocab:
        raise UserError(f"{file}: not a WordPiece vocabulary, it has no [UNK].")
    return wordpiece(
        vocab,
        lowercase=config.get("do_lower_case", True),
        strip_accents=config.get("strip_accents"),
        chinese=config.get("tokenize_chinese_chars", True),
    )


def read_merges(folder: Path, config: Mapping[str, Any]) -> Backend:
    """GPT-2's old format: tokens in vocab.json, pairs to merge in merges.txt. RoBERTa puts <s> and </s> around."""
    try:
        vocab, merges = models.BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as e:  # the library has no narrower type
        raise UserError(f"{folder}: vocab.json and merges.txt cannot be read ({e}).") from None
    backend = byte_bpe(vocab, merges, config.get("add_prefix_space", False))
    if {"<s>", "</s>", "<mask>"} <= vocab.keys():
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> </s> $B </s>",
            special_tokens=[("<s>", vocab["<s>"]), ("</s>", vocab["</s>"])],
        )
    return backend


def find_roles(folder: Path, config: Mapping[str, Any], backend: Backend) -> dict[str, str]:
    """Which special token plays which role: as the folder's files say, else by the custom of a known family."""
    other = folder / "special_tokens_map.json"
    named = {**(read_json(other) if other.is_file() else {}), **config}
    roles = {}
    for role in ROLES:
        token = named.get(f"{role}_token")
        token = token["content"] if isinstance(token, dict) else token
        if token and backend.token_to_id(token) is None:
            warn(f"{folder} names {token!r} as its {role} token, but its vocabulary has no such token.")
        elif token:
            roles[role] = token
    if roles:
        return roles
    for family in (BERT_ROLES, ROBERTA_ROLES, T5_ROLES, GPT2_ROLES):
        if all(backend.token_to_id(token) is not None for token in family.values()):
            return family
    raise UserError(
        f"{folder}: nothing says which tokens are special. Name them in tokenizer_config.json (pad_token ...)."
    )
