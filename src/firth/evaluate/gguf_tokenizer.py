"""A tokenizer as llama.cpp reads it: one of its four models, with our vocabulary.

llama.cpp has its own code for each kind of tokenizer. Its converter recognises a pre-tokenizer by a checksum over the
ids of a sample text, so that it refuses every vocabulary that it has not seen. The regular expression decides, not the
vocabulary: a byte-level BPE of your own with GPT-2's expression is `gpt2` with the pre-tokenizer `gpt-2`.

| Firth | llama.cpp | differences |
| --- | --- | --- |
| byte-bpe | gpt2 | none; normal forms are not applied; refused: words that were added to the pattern gpt2 |
| wordpiece | bert | a word with ▁ or of over 100 characters is not [UNK]; some control characters end a word |
| unigram | t5 | a first space becomes two; unknown characters around a tab are one <unk>; no byte fallback: <unk> |
| bpe, char, word | | refused: no model of llama.cpp splits words in this way |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from firth.core.errors import UserError, quote
from firth.evaluate.gguf_writer import Int32s
from firth.models import ModelConfig, make_sequence_template
from firth.tasks.chat import CHAT_TEMPLATE_KEY, get_chat_template
from firth.tokens import Tokenizer
from firth.tokens.builders import METASPACE, SPLIT_PATTERNS
from firth.tokens.extend import merges_make_all_tokens

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
MODELS = {"byte-bpe": "gpt2", "wordpiece": "bert", "unigram": "t5"}
UNUSED_SCORE = -10_000.0
CONTINUATION = "##"


class GGUFTokenizer(NamedTuple):
    """Metadata entries, and sentences on what llama.cpp does otherwise."""

    metadata: dict[str, Any]
    notes: list[str]


def make_gguf_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> GGUFTokenizer:
    """Return the tokenizer's entries; a UserError if llama.cpp has no such tokenizer."""
    if tokenizer.kind not in MODELS or tokenizer.is_reversed:
        what = "that reads backward" if tokenizer.is_reversed else f"of kind {tokenizer.kind}"
        raise UserError(
            f"llama.cpp has no tokenizer {what}: it has byte-bpe, wordpiece and unigram. Export with --format onnx."
        )
    state = json.loads(tokenizer.backend.to_str())
    pieces = list_pieces(tokenizer, state, config.vocab_size)
    entries: dict[str, Any] = {"model": MODELS[tokenizer.kind], "pre": "default"}
    notes = normalizer_notes(tokenizer.kind, state["normalizer"])
    if tokenizer.kind == "byte-bpe":
        entries["pre"] = pre_tokenizer_name(tokenizer, state)
        merges = state["model"]["merges"]
        entries["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    elif tokenizer.kind == "wordpiece":
        pieces = [(as_phantom_space(text, kind), kind) for text, kind in pieces]
        options = state["normalizer"] or {}
        lowercase, strips = options.get("lowercase", False), options.get("strip_accents")
        entries["normalizer.lowercase"] = bool(lowercase)
        entries["normalizer.strip_accents"] = bool(lowercase if strips is None else strips)
        entries["token_type_count"] = max(config.num_segments, 1)
    else:
        score = dict(map(tuple, state["model"]["vocab"]))
        entries["scores"] = [float(score.get(text, UNUSED_SCORE)) for text, _ in pieces]
        entries["add_space_prefix"] = '"prepend_scheme": "never"' not in json.dumps(state["pre_tokenizer"])
        entries["remove_extra_whitespaces"] = False
        if state["model"].get("byte_fallback"):
            notes.append("llama.cpp has no byte fallback for Unigram: a character without a piece becomes <unk>.")
    if config.architecture == "encoder" and "token_type_count" not in entries:
        entries["token_type_count"] = max(config.num_segments, 1)
    texts = [text for text, _ in pieces]
    if len(set(texts)) < len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        raise UserError(f"llama.cpp needs distinct tokens, and {quote(twice)} occurs twice in this vocabulary.")
    entries |= {"tokens": texts, "token_type": Int32s([kind for _, kind in pieces])}
    entries |= special_token_entries(tokenizer, config)
    metadata = {f"tokenizer.ggml.{name}": value for name, value in entries.items()}
    if tokenizer.config.get(CHAT_TEMPLATE_KEY):
        metadata["tokenizer.chat_template"] = get_chat_template(tokenizer)
    return GGUFTokenizer(metadata, notes)


def list_pieces(tokenizer: Tokenizer, state: Mapping[str, Any], size: int) -> list[tuple[str, int]]:
    """Return the text and the type of each id. Ids that the model has and the tokenizer lacks are unused tokens."""
    added = {token["id"]: token["special"] for token in state["added_tokens"]}
    pieces = []
    for token_id in range(size):
        text = tokenizer.backend.id_to_token(token_id) if token_id < tokenizer.vocab.size else None
        kind = NORMAL
        if text is None:
            text, kind = f"[PAD{token_id}]", UNUSED
        elif token_id == tokenizer.vocab.unk:
            kind = UNKNOWN
        elif token_id in added:
            kind = CONTROL if added[token_id] else USER_DEFINED
        elif state["model"].get("byte_fallback") and text.startswith("<0x") and len(text) == len("<0x00>"):
            kind = BYTE
        pieces.append((text, kind))
    return pieces


def pre_tokenizer_name(tokenizer: Tokenizer, state: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of a byte-level pre-tokenizer with our regular expression.

    The name also says whether whole words are looked up before merges (`ignore_merges`), which words that were added to
    a tokenizer need.
    """
    steps = state["pre_tokenizer"]
    steps = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    patterns = (
        [SPLIT_PATTERNS["gpt2"]] if any(s["type"] == "ByteLevel" and s.get("use_regex", True) for s in steps) else []
    )
    patterns += [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    if any(step.get("add_prefix_space") for step in steps):
        raise UserError("llama.cpp has no byte-level BPE that adds a space before the text (add_prefix_space).")
    looks_up_words = bool(state["model"].get("ignore_merges"))
    names = {SPLIT_PATTERNS["gpt2"]: "gpt-2", SPLIT_PATTERNS["llama3"]: "llama-bpe" if looks_up_words else "dbrx"}
    if len(patterns) != 1 or patterns[0] not in names:
        known = ", ".join(SPLIT_PATTERNS)
        raise UserError(
            f"llama.cpp has no name for the regular expression of this tokenizer. Known: {known} (--pattern)."
        )
    name = names[patterns[0]]
    if name == "gpt-2" and looks_up_words and not merges_make_all_tokens(tokenizer):
        raise UserError(
            "llama.cpp looks up whole words before it merges (ignore_merges) with the pattern llama3 alone, so that it "
            "would split the words that were added to this tokenizer of the pattern gpt2. Export with --format onnx."
        )
    return name


def as_phantom_space(text: str, kind: int) -> str:
    """Return a WordPiece as llama.cpp stores it: a word's first piece has a space before it, others lose their ##.

    >>> as_phantom_space("book", NORMAL), as_phantom_space("##s", NORMAL), as_phantom_space("[CLS]", CONTROL)
    ('▁book', 's', '[CLS]')
    """
    if kind in (CONTROL, UNKNOWN, UNUSED):
        return text
    return text.removeprefix(CONTINUATION) if text.startswith(CONTINUATION) else METASPACE + text


def normalizer_notes(kind: str, normalizer: Mapping[str, Any] | None) -> list[str]:
    """Return a sentence if llama.cpp does not apply the tokenizer's normalizer."""
    if normalizer is None:
        always = "llama.cpp removes control characters and separates Chinese ones; this tokenizer does neither."
        return [always] if kind == "wordpiece" else []
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    known = {"wordpiece": "BertNormalizer", "unigram": "Replace"}.get(kind)  # Replace: the escapes of byte fallback
    if kind == "wordpiece" and normalizer["type"] != known:
        raise UserError("llama.cpp applies BERT's normalizer alone: a WordPiece with other normal forms has other ids.")
    other = [step["type"] for step in steps if step["type"] != known]
    if not other:
        return []
    return [f"llama.cpp does not apply the normalizer of this tokenizer ({', '.join(other)}): normalize prompts first."]


def special_token_entries(tokenizer: Tokenizer, config: ModelConfig) -> dict[str, Any]:
    """Return the ids of special tokens, and which of them llama.cpp adds to a text."""
    vocab, template = tokenizer.vocab, make_sequence_template(config, tokenizer.vocab)
    first = template.prefix_ids[0] if template.prefix_ids else vocab.bos
    ids = {
        "bos": first,
        "eos": template.eos_id,
        "unknown": vocab.unk,
        "seperator": vocab.sep,  # llama.cpp's spelling
        "padding": vocab.pad,
        "mask": vocab.mask,
    }
    return {
        **{f"{role}_token_id": int(token) for role, token in ids.items() if token is not None},
        "add_bos_token": bool(template.prefix_ids),
        "add_eos_token": config.architecture != "decoder",
        "add_sep_token": config.architecture == "encoder",
    }
