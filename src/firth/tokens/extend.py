"""Extend a tokenizer by the words of a domain; text without new words keeps its ids.

A tokenizer splits the words of another domain into many pieces: "kitabu" is "kit", "##ab", "##u" to an English one. A
token of its own makes rows shorter, and gives the model one vector for the word. A trained model keeps its rows, so
old tokens keep their ids, and new ones follow.

**The promise.** A word here is a pre-token: the normalized text between two splits of the pre-tokenizer. A word that
does not contain a new token keeps its ids, and so does every text of such words. How each kind keeps it:

- WordPiece takes the longest token that begins a word. A new token changes only words that begin with it. The rest of
  such a word is spelled by old pieces; if the vocabulary lacks one of its characters as a piece ("##x"), the word is
  unknown. A trained vocabulary has them all.
- BPE: a new merge comes after all old ones, and joins two tokens that they leave. No old merge has the new token as an
  input. So each new token stands exactly where its old pieces stood, and writing them in its place restores the old
  ids of every text. A merge joins two tokens, so a word of four pieces needs three new tokens.
- Byte-level BPE can look up a whole word before any merge (`ignore_merges`, as Llama 3 does). Then one new token is
  enough for a word of any number of pieces, and no other word changes. A word that is a merged token is looked up too,
  and may have had other pieces alone than at the beginning of longer words. The lookup may change old words if there
  are tokens that their own merges do not reach; `can_look_up_words` checks every token. If there are, merges are used.
- Unigram takes the path with the highest sum of scores. A new piece scores as much as its old pieces together, plus
  `SCORE_MARGIN`, so that it wins for its own word and hardly anywhere else. The score of an unknown character depends
  on the worst score of all. It matters only if a character that is unknown by itself is part of a longer piece; then no
  new piece scores below the worst old one.

Longer words that begin with a new token use it too, wherever their own kind says so.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer as Backend

from firth.core.errors import UserError, quote
from firth.tokens.builders import METASPACE
from firth.tokens.extend_search import (
    BpeWords,
    FoundToken,
    PrefixTable,
    search_merges,
    search_prefixes,
    unigram_prefix_table,
    wordpiece_prefix_table,
)
from firth.tokens.token_bytes import BYTE_TOKEN, byte_level_bytes
from firth.tokens.tokenizer import Tokenizer, is_byte_level, tokenizer_errors
from firth.tokens.train import (
    count_split_words,
    is_character_in_use,
    read_vocab_layout,
    sample_passages,
    sort_by_count,
)

MAX_NEW_TOKENS = 1000  # new tokens at most, by default
MIN_TOKEN_COUNT = 10  # occurrences of a new token in the text: a rarer one is hardly trained (Gowda and May 2020)
MIN_SMALL_TEXT_COUNT = 2  # the same in a small text: below 1 MB the minimum falls with the size
MAX_SEARCHED_WORDS = 300_000  # distinct words of the text that are searched for new tokens, the most frequent
MAX_SEARCHED_WORD_CHARS = 64  # characters: a longer word is a code or an address
COUNT_MEMORY_PER_TEXT_BYTE = 20  # bytes of memory, as for a vocabulary of words (`train.py`)
UNKNOWN_PENALTY = 10.0  # nats by which the library scores an unknown character below the worst piece
SCORE_MARGIN = 1e-3  # nats by which a new Unigram piece beats its old pieces: above rounding, below any choice
MAX_PRUNE_ROUNDS = 4  # rounds in which tokens that turn out to be rare are removed again
EXTENDED_KINDS = ("wordpiece", "bpe", "byte-bpe", "unigram")


@dataclass(frozen=True)
class NewToken:
    """A token to add. `saved_tokens` is how many tokens fewer the text has, in all words that use it.

    `unknown` counts its occurrences in words that were unknown before: these save no token, but are read at last.
    """

    token: str  # as the vocabulary spells it: "kitabu", "Ġkitabu", "▁kitabu", "kitabu</w>"
    text: str  # the same without the marks of spaces and word ends
    form: str  # "word", "word start" or "character"
    count: int  # occurrences in the text
    saved_tokens: int
    old_pieces: tuple[str, ...]
    unknown: int = 0
    merge: tuple[str, str] | None = None  # BPE: the tokens that it joins; None: looked up as a whole word


def propose_tokens(
    tokenizer: Tokenizer,
    texts: Iterable[str],
    max_new: int = MAX_NEW_TOKENS,
    min_count: int = MIN_TOKEN_COUNT,
    max_memory: int | None = None,
    seed: int = 0,
) -> list[NewToken]:
    """Return at most `max_new` tokens that save the most tokens on a text, in the order of their ids.

    The search is greedy: it takes the token that saves most, counts again how many tokens the others would still save,
    and takes the next. Candidates are whole words and word starts with a letter. Characters that the tokenizer does not
    know come first, up to half of the new tokens: a word with one of them is unknown. `max_memory` (bytes) counts the
    words of a sample.
    """
    require_extensible(tokenizer)
    if max_memory is not None:
        texts = sample_passages(texts, max_memory // COUNT_MEMORY_PER_TEXT_BYTE, seed)
    words = count_domain_words(tokenizer, texts)
    characters = find_unknown_characters(tokenizer, words, min_count)[: max_new // 2]
    found = [new for new in measure_tokens(tokenizer, characters, words) if new.count >= min_count]
    spelled = extend_tokenizer(tokenizer, found) if found else tokenizer
    found += search_tokens(spelled, words, max_new - len(found), min_count)
    return prune_tokens(tokenizer, found, words, min_count)


def extend_tokenizer(tokenizer: Tokenizer, new_tokens: Sequence[NewToken]) -> Tokenizer:
    """Return the tokenizer with new tokens, of the next free ids, in their order; old tokens keep their ids."""
    require_extensible(tokenizer)
    state, old_size = json.loads(tokenizer.backend.to_str()), tokenizer.vocab.size
    model, names = state["model"], [new.token for new in new_tokens]
    known = tokenizer.backend.get_vocab(with_added_tokens=True)
    if repeated := [name for name, n in Counter([*names, *(set(names) & known.keys())]).items() if n > 1]:
        raise UserError(f"{quote(repeated[0])} is in the vocabulary already, or twice among the new tokens.")
    name_added_tokens(state)
    if model["type"] == "Unigram":
        model["vocab"] += score_new_pieces(model["vocab"], names)
    else:
        model["vocab"] |= {name: old_size + i for i, name in enumerate(names)}
    if model["type"] == "BPE":
        model["merges"] += [list(new.merge) for new in new_tokens if new.merge is not None]
        model["ignore_merges"] |= any(new.merge is None and new.form != "character" for new in new_tokens)
    # The generic class: classes named after a model rebuild the tokenizer, without lookups of whole words.
    config = tokenizer.config | {"tokenizer_class": "PreTrainedTokenizerFast"}
    with tokenizer_errors():
        extended = Tokenizer(Backend.from_str(json.dumps(state)), tokenizer.special_tokens, config)
    check_old_ids(tokenizer, extended)
    return extended


def old_piece_ids(old: Tokenizer, new: Tokenizer) -> dict[int, tuple[int, ...]]:
    """Return the ids of the old pieces of each new token; without unknown ones, so perhaps none."""
    states = [json.loads(tokenizer.backend.to_str())["model"] for tokenizer in (old, new)]
    merges = {}
    if states[1]["type"] == "BPE":
        prefix = states[1].get("continuing_subword_prefix") or ""
        merges = {a + b.removeprefix(prefix): (a, b) for a, b in states[1]["merges"][len(states[0]["merges"]) :]}
    affixes = states[1].get("continuing_subword_prefix") or "", states[1].get("end_of_word_suffix") or ""
    known = old.backend.get_vocab(with_added_tokens=True)

    def expand(token: str) -> tuple[int, ...]:
        if token in known:
            return (known[token],)
        if token in merges:
            return tuple(i for part in merges[token] for i in expand(part))
        with tokenizer_errors():
            pieces = old.backend.model.tokenize(token.removeprefix(affixes[0]).removesuffix(affixes[1]))
        return tuple(piece.id for piece in pieces if piece.id != old.vocab.unk)

    ids = new.backend.get_vocab(with_added_tokens=True)
    return {i: expand(token) for token, i in sorted(ids.items(), key=lambda item: item[1]) if token not in known}


def default_min_count(text_bytes: int) -> int:
    """Return how often a new token must occur in a text: 10 times per megabyte, from 2 to 10.

    >>> [default_min_count(size) for size in (10_000, 500_000, 1_000_000, 10**9)]
    [2, 5, 10, 10]
    """
    return min(max(MIN_TOKEN_COUNT * text_bytes // 1_000_000, MIN_SMALL_TEXT_COUNT), MIN_TOKEN_COUNT)


# --- which tokenizers, which words ----------------------------------------------------------------------------------


def require_extensible(tokenizer: Tokenizer) -> None:
    if tokenizer.kind not in EXTENDED_KINDS:
        remedy = {
            "word": "`firth pretrain --add-words` adds the words of a text to it.",
            "elmo-characters": "It reads every word by its characters, so no word is unknown.",
            "char": "Its tokens are single characters.",
        }[tokenizer.kind]
        raise UserError(f"A tokenizer of kind {tokenizer.kind} cannot be extended (--extend). {remedy}")


def count_domain_words(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, int]:
    """Return the words of a text with their counts, as the tokenizer normalizes and splits it."""
    layout = read_vocab_layout(json.loads(tokenizer.backend.to_str()))
    counts = count_split_words(layout, texts)
    if not counts:
        raise UserError("There is no text to extend the tokenizer by.")
    words = ((word, n) for word, n in sort_by_count(counts) if len(word) <= MAX_SEARCHED_WORD_CHARS)
    return dict(word for word, _ in zip(words, range(MAX_SEARCHED_WORDS), strict=False))


def readable_text(state: Mapping[str, Any], token: str) -> str:
    """Return a token without the marks of spaces and word ends; "" if it ends inside a character.

    >>> byte_level = {"normalizer": None, "pre_tokenizer": {"type": "ByteLevel"}, "model": {}}
    >>> [readable_text(byte_level, token) for token in ("ĠcafÃ©", "ĠcafÃ")]
    ['café', '']
    """
    if is_byte_level(state):
        try:
            return byte_level_bytes(token).decode().strip()
        except UnicodeDecodeError:
            return ""
    prefix, suffix = (state["model"].get(key) or "" for key in ("continuing_subword_prefix", "end_of_word_suffix"))
    return token.removeprefix(prefix).removesuffix(suffix).replace(METASPACE, " ").strip()


def is_word_text(text: str) -> bool:
    """Whether a text is a candidate: two characters or more, without spaces, a letter among them."""
    return len(text) > 1 and any(map(str.isalpha, text)) and not any(map(str.isspace, text))


def find_unknown_characters(tokenizer: Tokenizer, words: Mapping[str, int], min_count: int) -> list[NewToken]:
    """Return the characters of unknown words that have no token, the most frequent first.

    A character has a form for each position: "##ŋ" inside of a WordPiece word, "ŋ</w>" at the end of a BPE word.
    """
    state, unk = json.loads(tokenizer.backend.to_str()), tokenizer.vocab.unk
    model, known = state["model"], tokenizer.backend.get_vocab(with_added_tokens=True)
    if unk is None or model.get("byte_fallback") or is_byte_level(state):
        return []
    prefix, suffix = (model.get(key) or "" for key in ("continuing_subword_prefix", "end_of_word_suffix"))
    counts: Counter[str] = Counter()
    for word, n in words.items():
        if any(piece.id == unk for piece in tokenizer.backend.model.tokenize(word)):
            for i, c in enumerate(word):
                if is_character_in_use(c):
                    counts[prefix * (i > 0) + c + suffix * (i == len(word) - 1)] += n
    unknown = token_name(tokenizer, unk)
    return [
        NewToken(form, readable_text(state, form), "character", n, 0, (unknown,), unknown=n)
        for form, n in sort_by_count(counts)
        if n >= min_count and form not in known
    ]


# --- the search -----------------------------------------------------------------------------------------------------


def search_tokens(tokenizer: Tokenizer, words: Mapping[str, int], max_new: int, min_count: int) -> list[NewToken]:
    """Return the tokens that the greedy search finds; `count` and `saved_tokens` are set by `prune_tokens`."""
    state = json.loads(tokenizer.backend.to_str())
    known = tokenizer.backend.get_vocab(with_added_tokens=True)

    def is_candidate(token: str) -> bool:
        return token not in known and is_word_text(readable_text(state, token))

    found: list[FoundToken]
    if state["model"]["type"] == "BPE":
        pieces = {word: tokenize_word(tokenizer, word) for word in words}
        joiner = state["model"].get("continuing_subword_prefix") or ""
        bpe = BpeWords(words, pieces, joiner, can_look_up_words(tokenizer))
        found = search_merges(bpe, is_candidate, max_new, min_count)
    else:
        found = search_prefixes(prefix_table(tokenizer, state, words), is_candidate, max_new, min_count)
    return [NewToken(t.token, readable_text(state, t.token), "word", 0, 0, (), merge=t.merge) for t in found]


def prefix_table(tokenizer: Tokenizer, state: dict[str, Any], words: Mapping[str, int]) -> PrefixTable:
    model = state["model"]
    if model["type"] == "WordPiece":
        prefix = model["continuing_subword_prefix"]
        return wordpiece_prefix_table(words, model["vocab"], prefix, model["max_input_chars_per_word"])
    # Only a piece that begins with a space stands at word starts alone.
    starts = {word: n for word, n in words.items() if word.startswith(METASPACE)}
    scores = dict(model["vocab"])
    return unigram_prefix_table(starts, scores, unigram_unknown_score(model["vocab"]), unigram_score_floor(scores))


def tokenize_word(tokenizer: Tokenizer, word: str) -> list[str | None]:
    """Return the tokens of a word; None for what no merge may join: an unknown token, or one byte of a character."""
    pieces = []
    for piece in tokenizer.backend.model.tokenize(word):
        name = token_name(tokenizer, piece.id)
        pieces.append(None if piece.id == tokenizer.vocab.unk or BYTE_TOKEN.fullmatch(name) else name)
    return pieces


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    return str(tokenizer.backend.id_to_token(token_id))


def can_look_up_words(tokenizer: Tokenizer) -> bool:
    """Whether BPE can look up whole words before it merges, without a change to any old word.

    A word that is a token must have been that token before. Words with a mark of their end are looked up without it.
    """
    state = json.loads(tokenizer.backend.to_str())
    model = state["model"]
    if model["type"] != "BPE" or model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"):
        return False
    if not is_byte_level(state) or state["pre_tokenizer"] is None:
        return False
    return model["ignore_merges"] or merges_make_all_tokens(tokenizer)


def merges_make_all_tokens(tokenizer: Tokenizer) -> bool:
    """Whether merges alone join each token of BPE: then a lookup of whole words (`ignore_merges`) changes nothing."""
    state = json.loads(tokenizer.backend.to_str())
    model, added = state["model"], added_contents(state)
    model["ignore_merges"] = False
    tokenize = Backend.from_str(json.dumps(state)).model.tokenize
    return all([p.id for p in tokenize(token)] == [i] for token, i in model["vocab"].items() if token not in added)


def added_contents(state: Mapping[str, Any]) -> set[str]:
    return {token["content"] for token in state["added_tokens"]}


# --- what the tokens really save ------------------------------------------------------------------------------------


def prune_tokens(
    tokenizer: Tokenizer, new_tokens: Sequence[NewToken], words: Mapping[str, int], min_count: int
) -> list[NewToken]:
    """Measure each token with the extended tokenizer itself; remove tokens that are rarer than expected.

    A longer token takes words from a shorter one. A token that a merge needs stays, and so do characters: they spell
    words that are not in this text.
    """
    kept = list(new_tokens)
    for _ in range(MAX_PRUNE_ROUNDS):
        if not kept:
            return []
        measured = measure_tokens(tokenizer, kept, words)
        inputs = {part for new in measured if new.merge is not None for part in new.merge}
        kept = [new for new in measured if new.token in inputs or is_worth_adding(new, min_count)]
        if len(kept) == len(measured):
            return kept
    return measure_tokens(tokenizer, kept, words) if kept else []


def is_worth_adding(new: NewToken, min_count: int) -> bool:
    return new.form == "character" or (new.count >= min_count and (new.saved_tokens > 0 or new.unknown > 0))


def measure_tokens(tokenizer: Tokenizer, new_tokens: Sequence[NewToken], words: Mapping[str, int]) -> list[NewToken]:
    """Return the tokens with counts, savings and old pieces, from the ids of all words before and after."""
    extended, unk = extend_tokenizer(tokenizer, new_tokens), tokenizer.vocab.unk
    pieces, first_id = old_piece_ids(tokenizer, extended), tokenizer.vocab.size
    used, whole, unknown = (Counter[int]() for _ in range(3))
    saved: defaultdict[int, float] = defaultdict(float)
    for word, n in words.items():
        after = [piece.id for piece in extended.backend.model.tokenize(word)]
        new_ids = [i for i in after if i >= first_id]
        if not new_ids:
            continue
        before = [piece.id for piece in tokenizer.backend.model.tokenize(word)]
        for i in new_ids:
            used[i] += n
            unknown[i] += n * (unk in before)
        whole[new_ids[0]] += n * (len(after) == 1)
        if unk not in before:  # shared by the tokens of a word in the ratio of their old pieces
            share = (len(before) - len(after)) / max(sum(len(pieces[i]) - 1 for i in new_ids), 1)
            for i in new_ids:
                saved[i] += n * share * (len(pieces[i]) - 1)
    names = {i: token_name(tokenizer, i) for ids in pieces.values() for i in ids}
    return [
        replace(
            new,
            form=new.form if new.form == "character" else "word" if 2 * whole[i] >= used[i] > 0 else "word start",
            count=used[i],
            saved_tokens=round(saved[i]),
            old_pieces=tuple(names[part] for part in pieces[i]),
            unknown=unknown[i],
        )
        for i, new in enumerate(new_tokens, start=first_id)
    ]


# --- tokenizer.json -------------------------------------------------------------------------------------------------


def name_added_tokens(state: dict[str, Any]) -> None:
    """Enter the added tokens into the vocabulary of the model, with their ids.

    The library numbers an added token that the model does not have after the model's tokens: new tokens would move it.
    """
    model = state["model"]
    added = sorted(state["added_tokens"], key=lambda token: token["id"])
    if model["type"] != "Unigram":
        model["vocab"] |= {token["content"]: token["id"] for token in added}
        return
    scores, unknown_score = dict(model["vocab"]), unigram_unknown_score(model["vocab"])
    floor, lowest = unigram_score_floor(scores), min(scores.values())
    for token in added[bisect_left([token["id"] for token in added], len(model["vocab"])) :]:
        # Too low for the best path: text that looks like the token is spelled.
        spelled = best_path_score(token["content"], scores, unknown_score) - 1.0
        model["vocab"].append([token["content"], max(min(lowest, spelled), floor)])


def unigram_unknown_score(vocab: Iterable[Sequence[Any]]) -> float:
    """Return the score of a character without a piece, as the library computes it."""
    return min(score for _, score in vocab) - UNKNOWN_PENALTY


def unigram_score_floor(scores: Mapping[str, float]) -> float:
    """Return the lowest score that a new piece may have without a change to old words.

    The score of an unknown character is set by the worst piece. It decides nothing if each character of each piece is a
    piece too: then every path of a word has the same unknown characters.
    """
    is_spelled = all(c in scores for token in scores for c in token)
    return -math.inf if is_spelled else min(scores.values())


def score_new_pieces(vocab: Sequence[tuple[str, float]], new_tokens: Sequence[str]) -> list[list[Any]]:
    """Return new Unigram pieces with scores, in their order.

    A piece scores as its best path of old and shorter new pieces, plus a margin: so a longer new piece beats a shorter.
    """
    scores = dict(vocab)
    floor, unknown_score, new_scores = unigram_score_floor(scores), unigram_unknown_score(vocab), {}
    for token in sorted(new_tokens, key=lambda token: (len(token), token)):
        best = best_path_score(token, scores, unknown_score)
        new_scores[token] = scores[token] = max(round(best + SCORE_MARGIN, 6), floor)
    return [[token, new_scores[token]] for token in new_tokens]


def best_path_score(token: str, scores: Mapping[str, float], unknown_score: float) -> float:
    """Return the highest sum of scores of pieces that spell a token."""
    best = [0.0]
    for end in range(1, len(token) + 1):
        paths = [best[start] + scores[token[start:end]] for start in range(end) if token[start:end] in scores]
        if token[end - 1] not in scores:
            paths.append(best[end - 1] + unknown_score)
        best.append(max(paths))
    return best[-1]


def check_old_ids(old: Tokenizer, new: Tokenizer) -> None:
    """Raise an error if a token has another id now, or if the text of a special token is read in another way."""
    before, after = (t.backend.get_vocab(with_added_tokens=True) for t in (old, new))
    moved = [token for token, i in before.items() if after.get(token) != i]
    contents = sorted(added_contents(json.loads(old.backend.to_str())))
    moved += [text for text in contents if text and before[text] in set(new.encode(text)) - set(old.encode(text))]
    if moved:
        raise UserError(f"The tokenizer cannot be extended: its token {quote(moved[0])} would be read in another way.")
