"""The kinds of tokenizers: normalizer, pre-tokenizer, model, decoder and special tokens of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from firth.core.errors import UserError, did_you_mean, quote
from firth.text.normalize import REPLACEMENTS

METASPACE = "▁"
END_OF_WORD_SUFFIX = "</w>"
NUM_SENTINELS = 100
MAX_ELMO_WORD_CHARS = 50  # characters of a word in ELMo, with those for its beginning and end

SPLIT_PATTERNS = {  # regexes of the words that byte-level BPE never merges across
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}

WORD_LEVEL_REGEX = r"[\w\p{M}]+(?:['’][\w\p{M}]+)*|[^\w\p{M}\s]"
CHAR_WORD_REGEX = rf" ?(?:{WORD_LEVEL_REGEX})|\s"  # words of a character tokenizer, each with the space before it
NON_SPACE_WHITESPACE_REGEX = r"[^\S ]"  # newlines and tabs

# The normal forms of `--normalize` as steps of tokenizer.json, so that the model's later inputs are normalized as its
# training text was, in `transformers` too. "lookalikes" is none: a replacement there cannot depend on the whole word.
NORMAL_FORM_STEPS: dict[str, Callable[[], Any]] = {
    "nfc": normalizers.NFC,
    "nfkc": normalizers.NFKC,
    "lower": normalizers.Lowercase,
    **{name: partial(normalizers.Replace, Regex(regex), content) for name, (regex, content) in REPLACEMENTS.items()},
}


class SplitOptions(NamedTuple):
    """Text processing options of a new tokenizer."""

    lowercase: bool = False
    pattern: str = "gpt2"
    byte_fallback: bool = False
    normal_forms: tuple[str, ...] = ()  # of `firth.text.normalize`


class TokenizerKind(NamedTuple):
    """A kind of tokenizer: `build` makes an empty one; `special_tokens` maps roles to tokens.

    `first_tokens` have the first ids, `last_tokens` the last.
    """

    build: Callable[[dict[str, int], SplitOptions], Backend]
    first_tokens: tuple[str, ...]
    special_tokens: dict[str, str]
    last_tokens: tuple[str, ...] = ()


def build_untrained(kind: str, options: SplitOptions) -> Backend:
    """Return a tokenizer that has only its special tokens."""
    if kind not in TOKENIZER_KINDS:
        raise UserError(f"There is no tokenizer of kind {quote(kind)}. {did_you_mean(kind, TOKENIZER_KINDS)}")
    if options.pattern not in SPLIT_PATTERNS:
        raise UserError(
            f"There is no pattern {quote(options.pattern)} (--pattern). {did_you_mean(options.pattern, SPLIT_PATTERNS)}"
        )
    if options.pattern != "gpt2" and kind != "byte-bpe":
        raise UserError(f"--pattern is for --kind byte-bpe, not for {kind}.")
    if options.byte_fallback and kind != "unigram":
        raise UserError(f"--byte-fallback is for --kind unigram, not for {kind}.")
    make, first, _, last = TOKENIZER_KINDS[kind]
    backend = make({token: i for i, token in enumerate(first)}, options)
    if steps := [NORMAL_FORM_STEPS[name]() for name in options.normal_forms if name in NORMAL_FORM_STEPS]:
        own = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([*steps, *own])
    backend.add_special_tokens([make_special_token(name) for name in (*first, *last)])
    return backend


def make_special_token(name: str) -> AddedToken:
    """Return a special token. A mask or a sentinel replaces a word, so it takes the space before it."""
    return AddedToken(name, special=True, normalized=False, lstrip=name == "<mask>" or name.startswith("<extra_id_"))


# --- one function per kind -------------------------------------------------------------------------------------------


def build_wordpiece(
    vocab: dict[str, int], lowercase: bool, strip_accents: bool | None, handle_chinese_chars: bool = True
) -> Backend:
    """Return BERT's tokenizer. `strip_accents=None` strips them if `lowercase`, as BERT does."""
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=handle_chinese_chars
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    if "[CLS]" in vocab and "[SEP]" in vocab:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")],
        )
    return backend


def build_bpe(
    vocab: dict[str, int], merges: list[tuple[str, str]], lowercase: bool, strip_accents: bool | None = None
) -> Backend:
    """Return GPT's tokenizer: BERT's words, and the last piece of each ends in </w>."""
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", end_of_word_suffix=END_OF_WORD_SUFFIX))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix=END_OF_WORD_SUFFIX)
    return backend


def build_byte_bpe(
    vocab: dict[str, int], merges: list[tuple[str, str]], add_prefix_space: bool = False, pattern: str = "gpt2"
) -> Backend:
    """Return GPT-2's tokenizer: text is a string of bytes, so no character is unknown."""
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    if pattern != "gpt2":  # ByteLevel has GPT-2's regex built in, which is faster
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
        split = pre_tokenizers.Split(Regex(SPLIT_PATTERNS[pattern]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


# With byte fallback a "▁" in the text must survive decoding. It is escaped as two noncharacters of Unicode, which texts
# do not contain; the first of these, if a text contains it after all, is escaped as well.
METASPACE_ESCAPES = (("\ufdd0", "\ufdd0\ufdd1"), (METASPACE, "\ufdd0\ufdd2"))


def build_unigram(vocab: dict[str, int], options: SplitOptions) -> Backend:
    """Return T5's tokenizer, except that a newline or a tab is a token and not a space.

    Byte fallback spells a character without a piece in bytes, and adds no space before the first word: decoding
    restores the text exactly.
    """
    pieces = [(token, 0.0) for token in vocab]
    backend = Backend(models.Unigram(pieces, unk_id=vocab["<unk>"], byte_fallback=options.byte_fallback))
    scheme = "never" if options.byte_fallback else "first"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(NON_SPACE_WHITESPACE_REGEX), behavior="isolated"),
            pre_tokenizers.Metaspace(replacement=METASPACE, prepend_scheme=scheme),
        ]
    )
    backend.decoder = decoders.Metaspace(replacement=METASPACE, prepend_scheme=scheme)
    lower = [normalizers.Lowercase()] if options.lowercase else []
    backend.normalizer = lower[0] if lower else None
    if options.byte_fallback:
        backend.normalizer = normalizers.Sequence(lower + [normalizers.Replace(a, b) for a, b in METASPACE_ESCAPES])
        back = [decoders.Replace(b, a) for a, b in reversed(METASPACE_ESCAPES)]
        backend.decoder = decoders.Sequence([backend.decoder, decoders.ByteFallback(), decoders.Fuse(), *back])
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", vocab["</s>"])]
    )
    return backend


def build_word_level(vocab: dict[str, int], options: SplitOptions) -> Backend:
    """Return a tokenizer of whole words (word2vec, ELMo, AWD-LSTM); each punctuation mark is a word."""
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase() if options.lowercase else None
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(WORD_LEVEL_REGEX), behavior="removed", invert=True)
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)  # joins words by spaces, but not before ","
    return backend


def build_char(vocab: dict[str, int], options: SplitOptions) -> Backend:
    """Return a tokenizer with one token per Unicode character, spaces included: BPE without merges.

    Decoding restores every text whose characters are in the vocabulary. The pre-tokenizer changes no token: it tells
    whole-word masking where words begin.
    """
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase() if options.lowercase else None
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(CHAR_WORD_REGEX), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return backend


# --- the table of kinds ---------------------------------------------------------------------------------------------

BERT_SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
GPT2_SPECIAL_TOKENS = {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}
T5_SPECIAL_TOKENS = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
ROBERTA_SPECIAL_TOKENS = {**T5_SPECIAL_TOKENS, "bos": "<s>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
GPT_SPECIAL_TOKENS = {"unk": "<unk>"}

COMMON_SPECIAL_TOKENS = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
SENTINEL_TOKENS = tuple(f"<extra_id_{i}>" for i in reversed(range(NUM_SENTINELS)))

TOKENIZER_KINDS = {
    "wordpiece": TokenizerKind(
        lambda vocab, cut: build_wordpiece(vocab, cut.lowercase, strip_accents=False),
        tuple(BERT_SPECIAL_TOKENS.values()),
        BERT_SPECIAL_TOKENS,
    ),
    "bpe": TokenizerKind(
        lambda vocab, cut: build_bpe(vocab, [], cut.lowercase, strip_accents=False),
        COMMON_SPECIAL_TOKENS,
        ROBERTA_SPECIAL_TOKENS,
    ),
    "byte-bpe": TokenizerKind(
        lambda vocab, cut: with_lowercase(build_byte_bpe(vocab, [], pattern=cut.pattern), cut.lowercase),
        ("<pad>", "<s>", "</s>", "<mask>", "<|endoftext|>"),
        {**GPT2_SPECIAL_TOKENS, "pad": "<pad>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"},
    ),
    "unigram": TokenizerKind(
        build_unigram,
        ("<pad>", "</s>", "<unk>", "<s>", "<mask>"),
        {**T5_SPECIAL_TOKENS, "cls": "<s>", "sep": "</s>", "mask": "<mask>"},
        SENTINEL_TOKENS,
    ),
    "char": TokenizerKind(build_char, COMMON_SPECIAL_TOKENS, ROBERTA_SPECIAL_TOKENS),
    "elmo-characters": TokenizerKind(build_word_level, COMMON_SPECIAL_TOKENS, ROBERTA_SPECIAL_TOKENS),
    "word": TokenizerKind(build_word_level, COMMON_SPECIAL_TOKENS, ROBERTA_SPECIAL_TOKENS),
}


def with_lowercase(backend: Backend, lowercase: bool) -> Backend:
    backend.normalizer = normalizers.Lowercase() if lowercase else None
    return backend


def default_tokenizer_config(kind: str) -> dict[str, Any]:
    """Return tokenizer_config.json without the special tokens.

    The class is the generic one: classes named after a model rebuild parts of the tokenizer. Token type ids are for
    BERT only: GPT-2 would add them to its embeddings.
    """
    segments = ["token_type_ids"] if kind == "wordpiece" else []
    characters = {"max_word_length": MAX_ELMO_WORD_CHARS} if kind == "elmo-characters" else {}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", *segments, "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **characters,
    }
