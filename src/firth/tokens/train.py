"""Learn tokenizers from text: new ones of each kind, or one like another.

What is learned depends on the text alone. The `tokenizers` library walks over hash tables whose order changes from
run to run, so whatever would depend on that order is fixed here or computed here.
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
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from firth.console import Line, count, duration, say, track, warn
from firth.errors import UserError
from firth.tokens.kinds import KINDS, SPACE_MARK, Cut, blank, own_config
from firth.tokens.tokenizer import Tokenizer, is_byte_level
from firth.tokens.unigram import learn_pieces

MAX_ALPHABET = 1000  # pieces are made of the most frequent characters: so many, or a third of the vocabulary
COVERAGE = 0.9995  # where bytes can spell the rest, the share of a text's characters that has pieces, as in T5
SHORT = 1 << 22  # characters: a shorter text is read twice
PASSAGE = 1 << 16  # characters: a longer text is sampled in parts
# What learning takes for each byte of text: measured on some megabytes of documentation, rounded up. Longer texts have
# fewer new words and take less; a text in which every word is new takes up to three times as much.
MEMORY = {"BPE": 40, "WordPiece": 40, "Unigram": 150, "WordLevel": 20}
LONGEST = 1000  # characters: longer words are learned from in pieces, as a merge goes through all of a word
LONG = re.compile(rf"\S{{{LONGEST + 1},}}")
MAX_TEXT = 8e9  # bytes: the library counts pairs in 32 bits
BYTES = tuple(f"<0x{i:02X}>" for i in range(256))  # of byte fallback


def train_tokenizer(
    texts: Iterable[str],
    kind: str,
    vocab_size: int,
    lowercase: bool = False,
    max_memory: int | None = None,
    seed: int = 0,
    pattern: str = "gpt2",
    byte_fallback: bool = False,
) -> Tokenizer:
    """Learn a tokenizer from a stream of texts; the same texts always give the same tokenizer.

    - wordpiece, for BERT: [PAD] [UNK] [CLS] [SEP] [MASK] are ids 0 to 4.
    - bpe, for GPT and XLM: <pad> <unk> <s> </s> <mask> are ids 0 to 4. A word's last piece ends in </w>.
    - byte-bpe, for GPT-2, RoBERTa, BART and Llama: <pad> <s> </s> <mask> <|endoftext|> are ids 0 to 4. The end of a
      text is <|endoftext|>, which is bos and eos; <s> and </s> are cls and sep. `pattern` says where text is cut first.
    - unigram, for T5, ALBERT, XLNet and XLM-R: <pad> </s> <unk> <s> <mask> are ids 0 to 4, and <extra_id_99> ...
      <extra_id_0> the last 100. The end of a text is </s>, which is sep too; <s> is cls. With `byte_fallback` what has
      no piece is spelled in bytes, and every text can be decoded as it was.
    - word, for word2vec and AWD-LSTM, and char, for ELMo: whole words, with the special tokens of bpe. The words of a
      char tokenizer are read by their characters (see `characters`); its vocabulary is for what is predicted.

    `max_memory` (bytes) learns from a sample of the text where all of it would take more. A small text may give fewer
    than `vocab_size` tokens. Both are said.
    """
    backend = blank(kind, Cut(lowercase, pattern, byte_fallback))
    learned = learn(backend, texts, kind, vocab_size, max_memory, seed)
    return Tokenizer(learned, KINDS[kind].roles, own_config(kind))


def word_tokenizer(words: Iterable[str], lowercase: bool = False) -> Tokenizer:
    """A tokenizer of kind word for words that are known already; what is named as a special token is that token."""
    plan = plan_of(json.loads(blank("word", Cut(lowercase)).to_str()))
    backend = assemble(plan, Learned([word for word in dict.fromkeys(words) if word not in plan.added]))
    return Tokenizer(backend, KINDS["word"].roles, own_config("word"))


def retrain_tokenizer(
    like: Tokenizer, texts: Iterable[str], vocab_size: int, max_memory: int | None = None, seed: int = 0
) -> Tokenizer:
    """Learn a tokenizer like another one from other texts: the same kind, special tokens, and treatment of text.

    Special tokens that came after all others still do, with new ids; the others have the first ids.
    """
    learned = learn(like.backend, texts, like.kind, vocab_size, max_memory, seed)
    names = [token["content"] for token in json.loads(learned.to_str())["added_tokens"]]
    others = [name for name in names if name not in like.roles.values()]
    kept = {name: like.config[name] for name in KEPT if name in like.config}
    extra = {"additional_special_tokens": others} if others else {}
    return Tokenizer(learned, like.roles, {**own_config(like.kind), **kept, **extra})


# Fields of tokenizer_config.json that hold for other text too.
KEPT = (
    *("model_input_names", "model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces"),
    *("chat_template", "max_word_length"),
)


def learn(
    like: Backend, texts: Iterable[str], kind: str, vocab_size: int, max_memory: int | None, seed: int
) -> Backend:
    """A tokenizer with the special tokens of `like`, which treats text in the same way, with new vocabulary."""
    plan = plan_of(json.loads(like.to_str()))
    model = plan.state["model"]["type"]
    room = vocab_size - len(plan.fixed) - len(plan.last)
    require(room, 1, plan, "the special tokens alone")
    stream = iter(texts)
    first = next((text for text in stream if text.strip()), None)
    if first is None:
        raise UserError("There is no text to learn a tokenizer from.")
    long = Counter[str]()
    stream = (short_words(text, long) for text in chain([first], stream))
    if max_memory is not None:
        stream = sample(stream, max_memory // MEMORY[model], seed)
    with heartbeat(f"learning a {kind} vocabulary") as beat:
        learned = LEARNERS[model](plan, beat.after(stream), room, beat.note)
    backend = assemble(plan, learned)
    if long["cut"]:
        say(f"{count(long['cut'], 'word')} of more than {LONGEST:,} characters: they were learned from in pieces.")
    if (size := backend.get_vocab_size()) < vocab_size:
        say(f"The text gives {size:,} tokens: fewer than there is room for ({vocab_size:,}).")
    return backend


def short_words(text: str, long: Counter[str]) -> str:
    """A text in which no word is so long that learning would take forever; those that were cut are counted."""

    def cut(match: re.Match[str]) -> str:
        long["cut"] += 1
        return " ".join(match[0][i : i + LONGEST] for i in range(0, len(match[0]), LONGEST))

    return LONG.sub(cut, text) if len(text) > LONGEST else text


def require(room: int, need: int, plan: Plan, what: str) -> None:
    """Refuse a vocabulary in which `what` does not fit."""
    if room < need:
        reserved = len(plan.fixed) + len(plan.last)
        raise UserError(
            f"A vocabulary of {room + reserved:,} tokens is too small: {what} take {need + reserved:,}. "
            "Ask for more (--vocab-size)."
        )


# --- the tokenizer around the vocabulary ----------------------------------------------------------------------------


class Plan(NamedTuple):
    """A tokenizer.json without its vocabulary: what comes before and after the tokens that are learned."""

    state: dict[str, Any]
    fixed: list[str]  # the first ids: special tokens, and bytes where there is byte fallback
    last: list[str]
    added: dict[str, dict[str, Any]]  # how the special tokens are found in a text


class Learned(NamedTuple):
    """Tokens in the order of their ids, with the pairs to merge (BPE) or the scores (Unigram)."""

    tokens: list[str]
    merges: list[tuple[str, str]] | None = None
    scores: list[float] | None = None


Note = Callable[[str], None]


def plan_of(state: dict[str, Any]) -> Plan:
    model = state["model"]
    tokens = [token for token, _ in model["vocab"]] if model["type"] == "Unigram" else list(model["vocab"])
    added = {token["content"]: token for token in state["added_tokens"] if token["special"]}
    unk = tokens[model["unk_id"]] if model.get("unk_id") is not None else model.get("unk_token")
    ids = {token: i for i, token in enumerate(tokens)} if model["type"] == "Unigram" else model["vocab"]
    final = max((i for token, i in ids.items() if token not in added), default=len(ids))
    names = sorted(added, key=lambda name: added[name]["id"])
    last = [name for name in names if name != unk and (name not in ids or added[name]["id"] > final)]
    first = [name for name in names if name not in last]
    if unk and unk not in first:
        first.append(unk)
    spelled = BYTES if model.get("byte_fallback") else ()
    return Plan(state, [*first, *spelled], last, added)


def assemble(plan: Plan, learned: Learned) -> Backend:
    """The tokenizer with its new vocabulary."""
    tokens = [*plan.fixed, *learned.tokens]
    ids = {token: i for i, token in enumerate([*tokens, *plan.last])}
    model = dict(plan.state["model"])
    if learned.scores is not None:
        # A special token is never the best way to read a text; what looks like one is spelled.
        never = 10 * min(learned.scores)
        scores = [never] * len(plan.fixed) + learned.scores
        if model["unk_id"] is not None:
            model["unk_id"] = ids[plan.state["model"]["vocab"][model["unk_id"]][0]]
        model["vocab"] = list(zip(tokens, scores, strict=True))
    else:
        model["vocab"] = {token: i for i, token in enumerate(tokens)}
    if learned.merges is not None and model["type"] == "BPE":
        model["merges"] = learned.merges
    added = [{**plan.added[name], "id": ids[name]} for name in sorted(plan.added, key=ids.__getitem__)]
    frame = renumber(plan.state["post_processor"], ids)
    return Backend.from_str(json.dumps({**plan.state, "model": model, "added_tokens": added, "post_processor": frame}))


def renumber(frame: Any, ids: Mapping[str, int]) -> Any:
    """A post-processor, which puts special tokens around a text, with their new ids."""
    if frame is None:
        return None
    new = dict(frame)
    if "processors" in frame:
        new["processors"] = [renumber(part, ids) for part in frame["processors"]]
    if frame["type"] == "TemplateProcessing":
        named = frame["special_tokens"]
        new["special_tokens"] = {
            name: {**token, "ids": [ids[part] for part in token["tokens"]]} for name, token in named.items()
        }
    for role in ("cls", "sep"):
        if role in frame:
            new[role] = [frame[role][0], ids[frame[role][0]]]
    return new


# --- what is learned ------------------------------------------------------------------------------------------------


def learn_pairs(plan: Plan, texts: Iterable[str], room: int, note: Note) -> Learned:
    """BPE, which WordPiece is trained by too: characters or bytes, then the most frequent pair, again and again."""
    model = plan.state["model"]
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    bytes_only = is_byte_level(plan.state)
    if bytes_only:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        require(room, len(letters), plan, "the special tokens and the 256 bytes")
    else:
        texts, letters = possible_characters(plan, texts)
    # The trainer numbers "##x" and "x</w>" in the order of a hash table, and breaks ties by number. Naming all that
    # there can be fixes the numbers; those that the text does not need are dropped below.
    around = [] if bytes_only else forms("*", prefix, suffix)[1:]
    named = [form.replace("*", c) for form in around for c in letters]
    affixes: dict[str, Any] = {"continuing_subword_prefix": prefix, "end_of_word_suffix": suffix}
    trainer = trainers.BpeTrainer(
        vocab_size=room + len(named) + len(letters),
        min_frequency=2,
        special_tokens=named,
        initial_alphabet=letters,
        show_progress=False,
        **{name: affix for name, affix in affixes.items() if affix},
    )
    reader = reader_of(plan, models.BPE())
    reader.train_from_iterator(guard(texts), trainer)
    alphabet = letters if bytes_only else used_alphabet(plan, trainer, prefix, suffix, room)
    merges = json.loads(reader.to_str())["model"]["merges"]
    return choose_pairs(alphabet, [(a, b) for a, b in merges], prefix, room)


def choose_pairs(alphabet: list[str], pairs: list[tuple[str, str]], prefix: str, room: int) -> Learned:
    """The first pairs that fit, without those that hold a character that is not in the alphabet."""
    tokens, merges = dict.fromkeys(alphabet), []
    for a, b in pairs:
        token = a + b.removeprefix(prefix)
        if a not in tokens or b not in tokens or (len(tokens) == room and token not in tokens):
            continue
        tokens[token] = None
        merges.append((a, b))
    return Learned(list(tokens), merges)


def forms(c: str, prefix: str, suffix: str) -> list[str]:
    """How a character is written at the begin, inside and at the end of a word.

    >>> forms("a", "##", ""), forms("a", "", "</w>")
    (['a', '##a'], ['a', 'a</w>'])
    """
    return sorted({a + c + b for a in ("", prefix) for b in ("", suffix)}, key=lambda form: (len(form), form))


def possible_characters(plan: Plan, texts: Iterable[str]) -> tuple[Iterable[str], list[str]]:
    """The texts, and all characters that they may have: those of a short text, or all in use of a long one."""
    stream, held, size = iter(texts), [], 0
    for text in stream:
        held.append(text)
        size += len(text)
        if size > SHORT:
            return chain(held, stream), all_characters()
    return held, sorted(filter(in_use, count_characters(count_words(plan, held))))


def in_use(c: str) -> bool:
    """Whether a character is on Unicode's first two planes, which have every script in use, and has a meaning."""
    return ord(c) < 0x20000 and unicodedata.category(c) not in ("Cn", "Cs")


@cache
def all_characters() -> list[str]:
    return [c for c in map(chr, range(0x20000)) if in_use(c)]


def used_alphabet(plan: Plan, trainer: trainers.BpeTrainer, prefix: str, suffix: str, room: int) -> list[str]:
    """The most frequent characters of the words; one that always stands alone in one form. Says what is lost."""
    counts = counted(trainer, "BpeTrainer")
    characters = count_characters(counts)
    inside = {c for word in counts if len(word) > 1 for c in word}
    unnamed = {c for c in inside if not in_use(c)} if prefix or suffix else set()
    most = max(MAX_ALPHABET, room // 3)
    kept = {c for c, _ in by_count(characters)[:most] if c not in unnamed}
    found = {form for c in kept for form in (forms(c, prefix, suffix) if c in inside else [c + suffix])}
    require(room, len(found), plan, "the special tokens and the characters of this text (in all their forms)")
    say_what_is_lost(plan, characters, kept)
    return sorted(found, key=lambda form: (len(form), form))


def learn_unigram(plan: Plan, texts: Iterable[str], room: int, note: Note) -> Learned:
    """The pieces that read the text best (see `unigram`), all characters among them."""
    counts = count_words(plan, texts)
    characters = count_characters(counts)
    kept = set(characters)
    if plan.state["model"].get("byte_fallback"):
        kept = set(most_of(characters, COVERAGE))
        say_what_is_lost(plan, characters, kept)
    kept |= set("".join(plan.fixed + plan.last)) | {SPACE_MARK}  # so that "</s>" in a text can be spelled
    require(room, len(kept), plan, "the special tokens and the characters of this text")
    pieces = learn_pieces(counts, kept, room, note)
    tokens = [token for token, _ in pieces]
    clash = set(tokens) & {*plan.fixed, *plan.last}  # "</s>" stands in the text so often that it became a piece
    pieces = [(token, score) for token, score in pieces if token not in clash]
    return Learned([token for token, _ in pieces], scores=[round(score, 6) for _, score in pieces])


def learn_words(plan: Plan, texts: Iterable[str], room: int, note: Note) -> Learned:
    """The most frequent words."""
    counts = count_words(plan, texts)
    words = [word for word, _ in by_count(counts) if word not in plan.added][:room]
    share = 1 - sum(counts[word] for word in words) / sum(counts.values())
    if share > 0:
        say(f"{share:.1%} of the text are words that are not in the vocabulary; {len(counts):,} would be all.")
    return Learned(words)


LEARNERS = {"BPE": learn_pairs, "WordPiece": learn_pairs, "Unigram": learn_unigram, "WordLevel": learn_words}


# --- reading --------------------------------------------------------------------------------------------------------


def reader_of(plan: Plan, model: models.Model) -> Backend:
    """A tokenizer that cuts text into words as the plan's does, around another model."""
    reader = Backend(model)
    whole = Backend.from_str(json.dumps({**plan.state, "added_tokens": [], "post_processor": None}))
    if whole.normalizer is not None:
        reader.normalizer = whole.normalizer
    if whole.pre_tokenizer is not None:
        reader.pre_tokenizer = whole.pre_tokenizer
    else:  # Llama 2 merges across a whole text; pairs that cross a space are not worth their time
        mark = SPACE_MARK if SPACE_MARK in json.dumps(plan.state["normalizer"], ensure_ascii=False) else " "
        reader.pre_tokenizer = pre_tokenizers.Split(mark, behavior="merged_with_next")
    return reader


def count_words(plan: Plan, texts: Iterable[str]) -> dict[str, int]:
    """How often each word stands in the texts, counted by the library on all cores."""
    trainer = trainers.WordLevelTrainer(vocab_size=1, min_frequency=0, show_progress=False)
    reader_of(plan, models.WordLevel(unk_token="")).train_from_iterator(texts, trainer)
    return counted(trainer, "WordLevelTrainer")


def counted(trainer: trainers.Trainer, name: str) -> dict[str, int]:
    """The words that a trainer has read: the library keeps them in the trainer's state, and has no other door to it."""
    return json.loads(trainer.__getstate__())[name]["words"]


def count_characters(words: Mapping[str, int]) -> Counter[str]:
    characters: Counter[str] = Counter()
    for word, n in words.items():
        for c in word:
            characters[c] += n
    return characters


def by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """The most frequent first; equally frequent ones in the order of their characters."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def most_of(counts: Mapping[str, int], share: float) -> Iterator[str]:
    """The most frequent ones that make up this share of all."""
    wanted = share * sum(counts.values())
    for name, n in by_count(counts):
        if wanted <= 0:
            return
        wanted -= n
        yield name


def say_what_is_lost(plan: Plan, characters: Mapping[str, int], kept: set[str]) -> None:
    lost = [c for c, _ in by_count(characters) if c not in kept]
    if not lost:
        return
    spelled = plan.state["model"].get("byte_fallback")
    fate = "spelled in bytes" if spelled else f"read as {plan.state['model'].get('unk_token')}"
    some = count(len(lost), "rare character has no token and is", "rare characters have no token and are")
    warn(f"{some} {fate}: {' '.join(lost[:10])}{' ...' if len(lost) > 10 else ''}")


def guard(texts: Iterable[str]) -> Iterator[str]:
    """Pass texts on, and say so where there is more than the library can count."""
    size = 0
    for text in texts:
        if size <= MAX_TEXT < size + len(text):
            warn(f"More than {MAX_TEXT / 1e9:g} GB of text: counts may overflow. Take a sample (--max-memory).")
        size += len(text)
        yield text


def sample(texts: Iterable[str], max_bytes: int, seed: int) -> Iterator[str]:
    """A random share of the texts of at most so many bytes, in their order; all of them where they fit.

    Which are taken depends on the texts and the seed alone. How much was taken is said.
    """
    held: list[tuple[int, int, str]] = []
    total = taken = 0
    for number, passage in enumerate(passages(texts)):
        size = len(passage.encode())
        draw = blake2b(passage.encode(), digest_size=8, key=seed.to_bytes(8, "little", signed=True)).digest()
        heapq.heappush(held, (-int.from_bytes(draw), number, passage))
        total, taken = total + size, taken + size
        while taken > max_bytes:
            taken -= len(heapq.heappop(held)[2].encode())
    if not held:
        raise UserError("--max-memory leaves no room for any text. Allow more.")
    if taken < total:
        share = f"{taken / 1e6:,.1f} of {total / 1e6:,.1f} MB of text ({taken / total:.1%})"
        say(f"Learning from a sample, {share}, to stay within --max-memory.")
    yield from (passage for _, _, passage in sorted(held, key=lambda item: item[1]))


def passages(texts: Iterable[str]) -> Iterator[str]:
    """Texts, long ones in parts that end with a line or a word."""
    for text in texts:
        while len(text) > PASSAGE:
            end = max(text.rfind("\n", 0, PASSAGE), text.rfind(" ", PASSAGE // 2, PASSAGE)) + 1 or PASSAGE
            yield text[:end]
            text = text[end:]
        yield text


class Beat:
    """What a silent phase has to say."""

    def __init__(self) -> None:
        self.text, self.reading = "", False

    def note(self, text: str) -> None:
        self.text = text

    def after(self, texts: Iterable[str]) -> Iterator[str]:
        """The texts, with a line of their own while they are read."""
        self.reading = True
        yield from track(texts, "reading text", "documents")
        self.reading = False


@contextmanager
def heartbeat(what: str, every: float = 10.0) -> Iterator[Beat]:
    """A line now and then while the library, once it has read the texts, works without a word."""
    start, done, line, beat = time.monotonic(), threading.Event(), Line(every), Beat()

    def show() -> None:
        while not done.wait(1.0 if line.live else every):
            if not beat.reading:
                note = f", {beat.text}" if beat.text else ""
                line.show(f"{what}: {duration(time.monotonic() - start)}{note}", force=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield beat
    finally:
        done.set()
        thread.join()
        line.close()
