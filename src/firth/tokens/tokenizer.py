"""Load, use and save tokenizers. Hugging Face's `tokenizers` library does the work."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Encoding, models, processors
from tokenizers import Tokenizer as Backend

from firth.core.console import warn
from firth.core.errors import MAX_REASON_CHARS, UserError, quote, reason, shorten
from firth.core.files import read_object, read_utf8, write_json, write_text
from firth.core.html import HtmlPage
from firth.core.notebook import add_facts, to_notebook_html
from firth.tokens.builders import (
    BERT_SPECIAL_TOKENS,
    CHAR_WORD_REGEX,
    END_OF_WORD_SUFFIX,
    GPT2_SPECIAL_TOKENS,
    GPT_SPECIAL_TOKENS,
    METASPACE,
    ROBERTA_SPECIAL_TOKENS,
    T5_SPECIAL_TOKENS,
    build_bpe,
    build_byte_bpe,
    build_wordpiece,
    default_tokenizer_config,
)
from firth.tokens.tokenized_text import TokenizedText

TokenIds = Sequence[int]
MAX_ID_GAP_RATIO, MAX_ID_GAP = 2, 100_000  # ids may go up to twice the number of tokens plus 100,000
SPECIAL_TOKEN_ROLES = ("pad", "unk", "bos", "eos", "cls", "sep", "mask")


@dataclass(frozen=True)
class Vocabulary:
    """The ids of the special tokens. A role that the tokenizer does not have is None."""

    size: int
    pad: int
    unk: int | None
    bos: int | None
    eos: int | None
    cls: int | None
    sep: int | None
    mask: int | None
    sentinel_ids: tuple[int, ...]  # <extra_id_0>, <extra_id_1>, ...
    special_ids: tuple[int, ...]  # every special id, sorted

    @cached_property
    def non_special_ids(self) -> np.ndarray:
        """The ids of text."""
        return np.setdiff1d(np.arange(self.size), self.special_ids)


@contextmanager
def tokenizer_errors(message: str = "tokenizer.json is damaged") -> Iterator[None]:
    """Raise a UserError where the `tokenizers` library fails: it has no type of its own, and Rust code may panic."""
    try:
        yield
    except BaseException as e:
        if type(e) is not Exception and type(e).__name__ != "PanicException":
            raise
        raise UserError(f"{message} ({shorten(e, MAX_REASON_CHARS)}).") from None


def copy_backend(backend: Backend) -> Backend:
    with tokenizer_errors():
        return Backend.from_str(backend.to_str())


class Tokenizer:
    """Text to ids and back. `special_tokens` maps roles ("cls") to tokens, `config` is tokenizer_config.json.

    `backend` is the tokenizer of the `tokenizers` library. `is_reversed` models read texts from the end.
    """

    def __init__(
        self, backend: Backend, special_tokens: Mapping[str, str], config: Mapping[str, Any] | None = None
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        check_token_ids(backend)  # before `to_str`, which counts from 0 to the largest id
        state = json.loads(backend.to_str())
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.kind = detect_tokenizer_kind(state, config or {})
        self.is_reversed = bool((config or {}).get("backward"))
        state |= {"backward": True} if self.is_reversed else {}
        del state["post_processor"]  # adds special tokens, and changes no id of the text
        self.fingerprint = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]
        self.vocab = read_vocabulary(backend, special_tokens)
        self.config = dict(config) if config is not None else default_tokenizer_config(self.kind)

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Return the ids of a text, without special tokens around it.

        Text that looks like a special token ("[MASK]" in a page about BERT) stays text; `parse_special=True` reads it
        as the token.
        """
        backend = self.backend if parse_special else self._text_only_backend
        with tokenizer_errors():
            return self._apply_direction(backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str], parse_special: bool = False) -> list[list[int]]:
        """Return the ids of many texts, encoded on all cores."""
        backend = self.backend if parse_special else self._text_only_backend
        with tokenizer_errors():
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._apply_direction(e.ids) for e in encodings]

    def _apply_direction(self, ids: Sequence[int]) -> list[int]:
        """Return the ids in the order in which the model reads them."""
        return list(ids[::-1] if self.is_reversed else ids)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoding]:
        """Return encodings with word ids and character offsets; always from left to right."""
        with tokenizer_errors():
            return self._text_only_backend.encode_batch(list(texts), add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        with tokenizer_errors():
            return self.backend.decode(self._apply_direction(ids), skip_special_tokens=skip_special_tokens)

    def tokenize(self, text: str) -> TokenizedText:
        """Return the tokens of a text as the vocabulary writes them; in a notebook the text is coloured by token."""
        encoding = self.encode_with_offsets([text])[0]
        found = TokenizedText(encoding.tokens)
        found.text, found.ids, found.offsets = text, encoding.ids, encoding.offsets
        return found

    def pre_tokenize(self, text: str) -> list[str]:
        """Return the words of a text as the pre-tokenizer splits it."""
        with tokenizer_errors():
            normalized = self.backend.normalizer.normalize_str(text) if self.backend.normalizer is not None else text
            return [word for word, _ in self.backend.pre_tokenizer.pre_tokenize_str(normalized)]

    def __len__(self) -> int:
        return self.vocab.size

    def __repr__(self) -> str:
        reads = ", reversed" if self.is_reversed else ""
        return f"Tokenizer({self.kind}, {self.vocab.size:,} tokens{reads}, {self.fingerprint})"

    def _repr_html_(self) -> str:
        page = HtmlPage(f"Tokenizer: {self.kind}")
        special = [str(self.backend.id_to_token(i)) for i in self.vocab.special_ids]
        add_facts(page, {"tokens": self.vocab.size, "special tokens": special, "fingerprint": self.fingerprint})
        return to_notebook_html(page)

    def word_starts(self, *encodings: Encoding) -> np.ndarray:
        """Return which tokens start a word of the pre-tokenizer, (N,) bool, for all encodings one after the other."""
        if not encodings:
            return np.zeros(0, dtype=bool)
        size, words = sum(map(len, encodings)), list(chain.from_iterable(e.word_ids for e in encodings))
        try:
            words_N = np.fromiter(words, np.int64, size)
        except TypeError:  # None outside of words becomes NaN, which differs from itself
            words_N = np.array(words, dtype=np.float64)
        starts = np.ones(size, dtype=bool)
        starts[1:] = words_N[1:] != words_N[:-1]
        first = np.cumsum([0] + [len(e) for e in encodings[:-1]])
        starts[first[first < len(starts)]] = True
        if self._begins_with_space.any():
            starts |= self._begins_with_space[
                np.fromiter(chain.from_iterable(e.ids for e in encodings), np.int64, size)
            ]
        return starts

    def save(self, folder: str | Path) -> None:
        """Write the files that `transformers.AutoTokenizer` opens, with the same ids."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "tokenizer.json", self.backend.to_str(pretty=True))
        names = {f"{role}_token": token for role, token in self.special_tokens.items()}
        sentinels = [self.backend.id_to_token(i) for i in self.vocab.sentinel_ids]
        extra = {"additional_special_tokens": sentinels} if sentinels else {}
        write_json(folder / "tokenizer_config.json", {**extra, **self.config, **names})

    def with_special_tokens(self, new_tokens: Sequence[str]) -> Tokenizer:
        """Return the tokenizer with more special tokens, at the end; existing ones keep their ids."""
        backend = copy_backend(self.backend)
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in new_tokens])
        key = "additional_special_tokens"
        old_tokens = self.config.get(key) or [self.backend.id_to_token(i) for i in self.vocab.sentinel_ids]
        all_tokens = [*old_tokens, *(token for token in new_tokens if token not in old_tokens)]
        return Tokenizer(backend, self.special_tokens, self.config | {key: all_tokens})

    def with_words(self, new_words: Sequence[str]) -> Tokenizer:
        """Return a word tokenizer with more words, at the end: a text without new words keeps its ids.

        The pre-tokenizer splits first, and each word is looked up as a whole. So only words change that were unknown.
        Pieces of other kinds of tokenizers compete with each other, and a new one would change the ids of known text.
        """
        state = json.loads(self.backend.to_str())
        assert state["model"]["type"] == "WordLevel"
        state["model"]["vocab"] |= {word: self.vocab.size + i for i, word in enumerate(new_words)}
        return Tokenizer(Backend.from_str(json.dumps(state)), self.special_tokens, self.config)

    def to_reversed(self) -> Tokenizer:
        """Return the tokenizer of a model that reads every text from its end to its beginning."""
        return Tokenizer(self.backend, self.special_tokens, self.config | {"backward": True})

    @cached_property
    def _text_only_backend(self) -> Backend:
        """A copy of the backend that treats special tokens in a text as text."""
        plain = copy_backend(self.backend)
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _begins_with_space(self) -> np.ndarray:
        """Which ids begin with a space, (V,) bool: word starts if the pre-tokenizer does not split words."""
        first = np.zeros(self.vocab.size, dtype=bool)
        first[[i for token, i in self.backend.get_vocab().items() if token.startswith(METASPACE)]] = True
        return first


def detect_tokenizer_kind(tokenizer_json: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the kind of a tokenizer from its tokenizer.json and tokenizer_config.json."""
    model = tokenizer_json["model"]["type"]
    if model == "BPE":
        if (tokenizer_json["pre_tokenizer"] or {}).get("pattern") == {"Regex": CHAR_WORD_REGEX}:
            return "char"
        return "byte-bpe" if is_byte_level(tokenizer_json) else "bpe"
    if model == "WordLevel":
        return "elmo-characters" if "max_word_length" in config else "word"
    return {"WordPiece": "wordpiece", "Unigram": "unigram"}[model]


def is_byte_level(tokenizer_json: Mapping[str, Any]) -> bool:
    """Whether a normalizer or pre-tokenizer turns text into bytes."""
    return '"ByteLevel"' in json.dumps([tokenizer_json["normalizer"], tokenizer_json["pre_tokenizer"]])


def check_token_ids(backend: Backend) -> None:
    """Raise a UserError if ids are far apart: arrays over a vocabulary are as long as its largest id.

    Gaps occur in published tokenizers, as between the tokens and those that were added later.
    """
    ids = backend.get_vocab(with_added_tokens=True)
    if not ids:
        raise UserError("This tokenizer has no tokens.")
    token, last = max(ids.items(), key=lambda item: item[1])
    if last >= MAX_ID_GAP_RATIO * len(ids) + MAX_ID_GAP:
        raise UserError(
            f"The token {quote(token)} of this tokenizer has the id {last:,}, and there are only {len(ids):,} tokens. "
            "Number them from 0."
        )


def read_vocabulary(backend: Backend, special_tokens: Mapping[str, str]) -> Vocabulary:
    ids = {
        role: backend.token_to_id(special_tokens[role]) if role in special_tokens else None
        for role in SPECIAL_TOKEN_ROLES
    }
    # GPT-2 has no padding token, and GPT neither a padding nor an end token.
    pad = next((i for i in (ids.pop("pad"), ids["eos"], ids["unk"]) if i is not None), None)
    if pad is None:
        raise UserError("This tokenizer has neither a padding nor an end token. Name one in tokenizer_config.json.")
    tokens = backend.get_vocab(with_added_tokens=True)
    numbered = [(re.fullmatch(r"<extra_id_(\d+)>", token), i) for token, i in tokens.items()]
    sentinels = [i for _, i in sorted((int(match[1]), i) for match, i in numbered if match)]
    added = [i for i, token in backend.get_added_tokens_decoder().items() if token.special]
    special = {pad, *sentinels, *added, *(i for i in ids.values() if i is not None)}
    return Vocabulary(
        size=max(tokens.values()) + 1, pad=pad, **ids, sentinel_ids=tuple(sentinels), special_ids=tuple(sorted(special))
    )


# --- loading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpecialTokenEntry:
    """A special token with its options, as `transformers` writes it; only the text is read."""

    allow_unknown_keys = True

    content: str


@dataclass(frozen=True)
class TokenizerConfigFile:
    """The keys of tokenizer_config.json and special_tokens_map.json that are read here."""

    allow_unknown_keys = True

    bos_token: str | SpecialTokenEntry | None = None
    eos_token: str | SpecialTokenEntry | None = None
    unk_token: str | SpecialTokenEntry | None = None
    sep_token: str | SpecialTokenEntry | None = None
    pad_token: str | SpecialTokenEntry | None = None
    cls_token: str | SpecialTokenEntry | None = None
    mask_token: str | SpecialTokenEntry | None = None
    additional_special_tokens: tuple[str | SpecialTokenEntry, ...] | None = None
    do_lower_case: bool | None = None
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool | None = None
    add_prefix_space: bool | None = None
    backward: bool | None = None
    max_word_length: int | None = None


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Open a tokenizer folder: ours, or a published one of the Hugging Face kind."""
    folder = Path(folder)
    file = folder / "tokenizer_config.json"
    config = read_object(file, TokenizerConfigFile) if file.is_file() else {}
    if (folder / "chat_template.jinja").is_file():
        config["chat_template"] = read_utf8(folder / "chat_template.jinja")
    if (folder / "tokenizer.json").is_file():
        backend = read_tokenizer_json(folder / "tokenizer.json")
        return Tokenizer(backend, find_special_tokens(folder, config, backend), config)
    if (folder / "vocab.txt").is_file():
        backend = read_vocab_txt(folder / "vocab.txt", config)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = read_merges(folder, config)
    else:
        raise missing_tokenizer_error(folder)
    roles = find_special_tokens(folder, config, backend)
    backend.add_special_tokens(sorted(set(roles.values())))
    return Tokenizer(backend, roles)


def missing_tokenizer_error(folder: Path) -> UserError:
    if not folder.is_dir():
        return UserError(f"{folder}: no such folder.")
    models = sorted(path.name for path in folder.glob("*.model"))
    if models:
        return UserError(
            f"{folder} has {models[0]} but no tokenizer.json. Convert it once with transformers: "
            f"AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return UserError(f"{folder} holds no tokenizer: no tokenizer.json, no vocab.txt, no vocab.json with merges.txt.")


def read_tokenizer_json(file: Path) -> Backend:
    text = read_utf8(file)  # from_file opens no name that is not UTF-8
    with tokenizer_errors(f"{file}: not a tokenizer"):
        return Backend.from_str(text)


def read_vocab_txt(file: Path, config: Mapping[str, Any]) -> Backend:
    """Read BERT's old format: one token per line."""
    tokens = read_utf8(file).split("\n")
    vocab = {token.rstrip("\r"): i for i, token in enumerate(tokens) if token}
    if "[UNK]" not in vocab:
        raise UserError(f"{file}: not a WordPiece vocabulary, it has no [UNK].")
    return build_wordpiece(
        vocab,
        lowercase=config.get("do_lower_case", True),
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
    )


def read_merges(folder: Path, config: Mapping[str, Any]) -> Backend:
    """Read GPT's and GPT-2's old format: tokens in vocab.json, merges in merges.txt.

    GPT's last pieces end in </w>; GPT-2's pieces are bytes, and RoBERTa adds <s> and </s>.
    """
    try:
        vocab, merges = models.BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as e:  # the library has no narrower type
        raise UserError(f"{folder}: vocab.json and merges.txt cannot be read ({reason(e)}).") from None
    if any(token.endswith(END_OF_WORD_SUFFIX) for token in vocab):
        return build_bpe(vocab, merges, lowercase=config.get("do_lower_case", True))
    backend = build_byte_bpe(vocab, merges, config.get("add_prefix_space", False))
    if {"<s>", "</s>", "<mask>"} <= vocab.keys():
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> </s> $B </s>",
            special_tokens=[("<s>", vocab["<s>"]), ("</s>", vocab["</s>"])],
        )
    return backend


def has_lone_surrogate(text: str) -> bool:
    """Whether a text holds half of a character, which JSON can write as an escape and UTF-8 cannot encode."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def find_special_tokens(folder: Path, config: Mapping[str, Any], backend: Backend) -> dict[str, str]:
    """Return role -> special token: from the folder's files, else those of a known family."""
    other = folder / "special_tokens_map.json"
    named = {**(read_object(other, TokenizerConfigFile) if other.is_file() else {}), **config}
    roles = {}
    for role in SPECIAL_TOKEN_ROLES:
        token = named.get(f"{role}_token")
        token = token["content"] if isinstance(token, dict) else token
        if token and (has_lone_surrogate(token) or backend.token_to_id(token) is None):
            warn(f"{folder} names {quote(token)} as its {role} token, which its vocabulary does not have.")
        elif token:
            roles[role] = token
    if roles:
        return roles
    for family in (
        BERT_SPECIAL_TOKENS,
        ROBERTA_SPECIAL_TOKENS,
        T5_SPECIAL_TOKENS,
        GPT2_SPECIAL_TOKENS,
        GPT_SPECIAL_TOKENS,
    ):
        if all(backend.token_to_id(token) is not None for token in family.values()):
            return family
    raise UserError(f"{folder} names no special tokens. Name them in tokenizer_config.json (pad_token ...).")
