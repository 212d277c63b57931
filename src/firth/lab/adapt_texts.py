"""The two texts of an adaptation: the domain, and the general text that the model must not forget.

Each has a part to train on and a held-out part, on which the model is measured before and after. The general text is
the corpus of the checkpoint's own run where that still exists: then its held-out documents are those that the model has
never read. The run's source.json names the files; without them its shards are decoded.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from firth.core.console import format_count, track
from firth.core.errors import UserError
from firth.core.files import read_object
from firth.core.serialization import from_dict
from firth.text import CORPUS_OPTIONS, HELD_OUT_FRACTION, Corpus, Document, text_fingerprint
from firth.text.python_docs import PYDOCS_NAME
from firth.tokens import Shards, ShardSet, is_shards_folder, open_shards
from firth.tokens.encode import join_document_sides, split_held_out
from firth.train.recipe import read_yaml_mapping

MAX_DOCUMENT_BYTES = 10_000  # bytes of a held-out document that are measured, so that a sample has many
MIN_MEASURED_BYTES = 2000  # bytes of held-out text below which a figure says nothing
HASH_RANGE = 2**64


class SplitText(Protocol):
    """Documents, each with whether it is held out. Each iteration reads them again."""

    @property
    def held_out(self) -> float:
        """Share that `prepare` has to hold out; 0: held-out documents must not be given to it."""

    def __iter__(self) -> Iterator[tuple[Document, bool]]: ...

    def for_prepare(self) -> Iterator[tuple[Document, bool]]:
        """Documents as `prepare` has to get them: whole where it splits them."""


@dataclass(frozen=True)
class CorpusText:
    """Files, split as `prepare` splits them."""

    corpus: Corpus
    held_out: float = HELD_OUT_FRACTION

    def __iter__(self) -> Iterator[tuple[Document, bool]]:
        return chain.from_iterable(split_held_out(document, self.held_out) for document in self.corpus)

    def for_prepare(self) -> Iterator[tuple[Document, bool]]:
        for document in self.corpus:
            parts = list(split_held_out(document, self.held_out))
            yield document, all(is_out for _, is_out in parts)


@dataclass(frozen=True)
class ShardText:
    """Shards, decoded to text. They keep their split, which a hash of the decoded text would not give."""

    shards: Sequence[ShardSet]
    held_out: float = 0.0

    def __iter__(self) -> Iterator[tuple[Document, bool]]:
        for one in self.shards:
            for part in (one.held_out, one.train):
                if part is not None:
                    yield from ((d, part is one.held_out) for d in decode_documents(one, part))

    def for_prepare(self) -> Iterator[tuple[Document, bool]]:
        return iter(self)


@dataclass(frozen=True)
class JoinedText:
    """Several texts, one after the other."""

    parts: Sequence[SplitText]
    held_out: float = 0.0

    def __iter__(self) -> Iterator[tuple[Document, bool]]:
        return chain.from_iterable(self.parts)

    def for_prepare(self) -> Iterator[tuple[Document, bool]]:
        return iter(self)


def decode_documents(shards: ShardSet, part: Shards) -> Iterator[Document]:
    for number in range(part.num_documents):
        start, stop = (int(offset) for offset in part.offsets[number : number + 2])
        yield Document(shards.tokenizer.decode(part.tokens[start:stop].tolist()), f"{shards.folder}:{number}")


@dataclass
class TextSample:
    """What one pass over a text finds: held-out documents to measure on, and the size of the rest."""

    documents: list[Document] = field(default_factory=list)  # held out
    train_documents: int = 0
    train_bytes: int = 0

    @property
    def texts(self) -> list[str]:
        return [text for document in self.documents for text in document.texts]

    @property
    def num_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.texts)


def sample_held_out(text: SplitText, max_bytes: int, name: str) -> TextSample:
    """Read a text once; return held-out documents of at most about `max_bytes`, chosen by their hash.

    So the choice is random, depends on the text alone, and every document counts once.
    """
    sample, kept, seen, total = TextSample(), list[tuple[int, Document]](), set[bytes](), 0
    for document, held_out in track(text, f"reading {name}", "documents"):
        if not held_out:
            sample.train_documents += 1
            sample.train_bytes += sum(len(side.encode()) for side in document.texts)
            continue
        fingerprint = text_fingerprint(join_document_sides(document))
        if fingerprint in seen:
            continue
        seen.add(fingerprint)
        shortened = shorten_document(document)
        heapq.heappush(kept, (-int.from_bytes(fingerprint[:8], "big"), shortened))
        total += document_bytes(shortened)
        while kept and total - document_bytes(kept[0][1]) >= max_bytes:
            total -= document_bytes(heapq.heappop(kept)[1])
    sample.documents = [document for _, document in sorted(kept, reverse=True)]
    return sample


def document_bytes(document: Document) -> int:
    return sum(len(text.encode()) for text in document.texts)


def shorten_document(document: Document) -> Document:
    """Return a document without listed words, each text cut at a space after `MAX_DOCUMENT_BYTES`."""
    first, *others = (cut_text(text) for text in document.texts)
    return Document(first, document.source, text_pair=others[0] if others else None)


def cut_text(text: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """
    >>> cut_text("one two three", 9), cut_text("one", 9)
    ('one two', 'one')
    """
    if len(text.encode()) <= max_bytes:
        return text
    head = text.encode()[:max_bytes].decode(errors="ignore")
    return head.rsplit(None, 1)[0] if len(head.split()) > 1 else head


def check_sample(sample: TextSample, option: str) -> None:
    """Raise UserError for a text that is too small to train or to measure on."""
    if not sample.train_documents:
        raise UserError(f"{option}: no document is left to train on. Give more text, or lower --held-out.")
    if not sample.documents:
        count = format_count(sample.train_documents, "document")
        raise UserError(
            f"{option}: nothing is held out of {count}, so the model cannot be measured. "
            "Separate documents by blank lines (--documents blank-line), give more text, or raise --held-out."
        )
    if sample.num_bytes < MIN_MEASURED_BYTES:
        raise UserError(
            f"{option}: only {sample.num_bytes:,} bytes are held out, and {MIN_MEASURED_BYTES:,} are the least that "
            "says something. Give more text, or raise --held-out."
        )


# --- the text that a checkpoint was trained on --------------------------------------------------------------------


@dataclass(frozen=True)
class OwnSource:
    """The keys of a run's source.json that name its text and how it was read."""

    allow_unknown_keys = True

    data: tuple[str, ...] = ()
    general: tuple[str, ...] = ()
    general_from: str = ""
    bytes: int | None = None  # of `data`
    held_out: float = HELD_OUT_FRACTION
    documents: str = "auto"
    columns: dict[str, str] | None = None
    encoding: str = "utf-8"
    keep_mail: str = ""
    normalize: str | None = None
    min_words: int = 0
    max_words: int = 0
    min_characters: int = 0
    max_characters: int = 0
    language: str | None = None


def find_own_text(checkpoint: Path, later_runs: tuple[Path, ...] = ()) -> tuple[SplitText, str] | None:
    """Return the text of the run that a checkpoint lies in, and its name; None where it is unknown, gone or changed.

    An adaptation read general text of the run before it; `later_runs` began there.
    """
    run = checkpoint.absolute().parent
    file = run / "source.json"
    stored = read_object(file) if file.is_file() else {}
    source = from_dict(stored, OwnSource, str(file), is_yaml=False)
    given = [strip_source_name(path) for path in (*source.data, *source.general)]
    if given and all(path == PYDOCS_NAME or Path(path).exists() for path in given):
        options = {name: value for name in CORPUS_OPTIONS if (value := getattr(source, name))}
        if not has_recorded_size(given[: len(source.data)], source.bytes, options):
            return None
        text, name = open_given_text(given, options, source.held_out), ", ".join(given)
        runs, before = (*later_runs, run), Path(source.general_from)
        earlier = find_own_text(before / "final", runs) if source.general_from and before not in runs else None
        return (text, name) if earlier is None else (JoinedText([text, earlier[0]]), f"{name}, {earlier[1]}")
    recipe = read_yaml_mapping(run / "recipe.yaml") if (run / "recipe.yaml").is_file() else {}
    sources, data = recipe.get("sources") or {}, recipe.get("data") or ""
    folders = [*sources.values()] if isinstance(sources, dict) and sources else [data]
    paths = [Path(folder) for folder in folders if isinstance(folder, str)]
    moved = [path if path.exists() else run / "data" / path.name for path in paths if path.name]
    if moved and all(is_shards_folder(path) for path in moved):
        return ShardText([open_shards(path) for path in moved]), ", ".join(map(str, moved))
    return None


def has_recorded_size(paths: Sequence[str], num_bytes: int | None, options: dict[str, Any]) -> bool:
    """Whether the text has the size that a run has recorded.

    Text of another size is not what the checkpoint was trained on, and a run folder of somebody else may name any file.
    """
    texts = [path for path in paths if not is_shards_folder(Path(path))]
    return not texts or Corpus(texts, **options).total_bytes == num_bytes


def open_given_text(paths: Sequence[str], options: dict[str, Any], held_out: float) -> SplitText:
    """Open the files of a source.json as its run read them; some of a mix may be shards."""
    shards = [path for path in paths if is_shards_folder(Path(path))]
    texts = [path for path in paths if path not in shards]
    parts: list[SplitText] = []
    if texts:
        parts.append(CorpusText(Corpus(texts, **options), held_out))
    if shards:
        parts.append(ShardText([open_shards(Path(path)) for path in shards]))
    return parts[0] if len(parts) == 1 else JoinedText(parts)


def strip_source_name(path: str) -> str:
    """Return the path of NAME=PATH, as the sources of a mix are written; another path unchanged."""
    return path if Path(path).exists() else path.partition("=")[2] or path


# --- replay ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayDocuments:
    """A random share of a general text, for `prepare`: with its held-out documents where `prepare` splits them off."""

    text: SplitText
    share: float

    def __iter__(self) -> Iterator[Document]:
        for document, held_out in self.text.for_prepare():
            if self.text.held_out if held_out else self.is_chosen(document):
                yield document

    def is_chosen(self, document: Document) -> bool:
        value = int.from_bytes(text_fingerprint(join_document_sides(document))[8:], "big")
        return value < self.share * HASH_RANGE


def replay_epochs(domain_tokens: int, general_tokens: int, replay_share: float) -> dict[str, float]:
    """Return how often each text is read in one epoch: the domain once, and as much general text as the share says.

    >>> replay_epochs(900, 1000, 0.1)
    {'domain': 1.0, 'general': 0.1}
    """
    return {"domain": 1.0, "general": replay_share / (1 - replay_share) * domain_tokens / max(general_tokens, 1)}
