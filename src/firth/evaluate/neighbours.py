"""What word vectors know: the words nearest to one, analogies, files that other programs read, a page about them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from firth.core.console import track
from firth.core.errors import UserError, did_you_mean
from firth.core.files import atomic_folder
from firth.core.html import HtmlPage, plot_loss_curve
from firth.evaluate.report import log_points
from firth.evaluate.vectors import WordVectors, vectors_to_model
from firth.models import write_model
from firth.train import read_log

VECTOR_FORMATS = ("word2vec", "glove", "firth")
MAX_SAMPLE_WORDS = 12  # words that a page shows the neighbours of


class Neighbour(NamedTuple):
    word: str
    similarity: float


def word_index(vectors: WordVectors, word: str) -> int:
    """Where a word is; one that is not known is an error."""
    place = vectors.find(word)
    if place is None:
        raise UserError(f"{word!r} has no vector. {did_you_mean(word, vectors.words[:20_000])}")
    return place


def word_cosine(vectors: WordVectors, a: str, b: str) -> float:
    """The cosine of two words."""
    return float(vectors.normalized_ND[word_index(vectors, a)] @ vectors.normalized_ND[word_index(vectors, b)])


def most_similar(
    vectors: WordVectors, positive: Sequence[str], negative: Sequence[str] = (), top: int = 10
) -> list[Neighbour]:
    """The words nearest to the mean of some, away from that of others; none of them.

    An analogy is such a question: a is to b as c is to what lies near b + c, away from a.
    """
    signs = [(word, 1.0) for word in positive] + [(word, -1.0) for word in negative]
    if not signs:
        raise UserError("Name a word to find similar ones to.")
    places = [word_index(vectors, word) for word, _ in signs]
    wanted_D = sum(sign * vectors.normalized_ND[place] for place, (_, sign) in zip(places, signs, strict=True))
    near_N = vectors.normalized_ND @ (wanted_D / max(float(np.linalg.norm(wanted_D)), 1e-12))
    near_N[places] = -np.inf
    best = np.argsort(-near_N, kind="stable")[:top]
    return [Neighbour(vectors.words[i], float(near_N[i])) for i in best if np.isfinite(near_N[i])]


def write_vectors(vectors: WordVectors, folder: Path, file_format: str) -> list[Path]:
    """Word vectors as files that others read: vectors.txt, for word2vec with its header, and there vectors.bin too.

    Our own form is a checkpoint, for `finetune`.
    """
    if file_format not in VECTOR_FORMATS:
        raise UserError(
            f"There is no format {file_format!r}. {did_you_mean(file_format, ('huggingface', *VECTOR_FORMATS))}"
        )
    if file_format == "firth":
        with atomic_folder(folder) as temporary:
            write_model(vectors_to_model(vectors), temporary)
        return [folder / "model.safetensors"]
    if spaced := next((word for word in vectors.words if any(c.isspace() for c in word)), None):
        raise UserError(f"{spaced!r} has a space in it, and a word of such a file ends with one.")
    names = ["vectors.txt", "vectors.bin"] if file_format == "word2vec" else ["vectors.txt"]
    header = f"{len(vectors.words)} {vectors.vectors_ND.shape[1]}\n"
    rows = zip(vectors.words, vectors.vectors_ND, strict=True)
    with atomic_folder(folder) as temporary:
        with open(temporary / "vectors.txt", "w", encoding="utf-8", newline="\n") as file:
            file.write(header if file_format == "word2vec" else "")
            for word, vector_D in track(rows, "writing vectors", "words", len(vectors.words)):
                file.write(f"{word} " + " ".join(f"{x:.9g}" for x in vector_D.tolist()) + "\n")
        if file_format == "word2vec":
            with open(temporary / "vectors.bin", "wb") as file_b:
                file_b.write(header.encode())
                for word, vector_D in zip(vectors.words, vectors.vectors_ND, strict=True):
                    file_b.write(f"{word} ".encode() + vector_D.astype("<f4").tobytes() + b"\n")
    return [folder / name for name in names]


def sample_neighbours(vectors: WordVectors) -> dict[str, list[str]]:
    """The neighbours of some words that are neither the most frequent nor rare, each twice as rare as the last."""
    words = [word for word in vectors.words if len(word) > 3 and word.isalpha()]
    places = np.unique(np.geomspace(20, max(len(words) // 2, 21), MAX_SAMPLE_WORDS).astype(int))
    chosen = [words[i] for i in places if i < len(words)]
    return {word: [found.word for found in most_similar(vectors, [word], top=8)] for word in chosen}


def write_vector_report(folder: Path, name: str, results: dict[str, Any]) -> Path:
    """report.html of a run: its loss, and what its words are similar to."""
    page = HtmlPage(f"{name}: {results['words']:,} words")
    page.add_paragraph("A word is known by the company it keeps: these are the words whose vectors point the same way.")
    page.add_table(["word", "nearest words"], [(word, ", ".join(near)) for word, near in results["similar"].items()])
    losses = log_points(read_log(folder / "log.jsonl"), "loss")
    if len(losses) > 1:
        page.add_figure(plot_loss_curve(losses, []), "The loss of each step.")
    facts = [(key, value) for key, value in results.items() if not isinstance(value, dict | list)]
    page.add_table(["", ""], facts, "The run.")
    place = folder / "report.html"
    page.save(place)
    return place
