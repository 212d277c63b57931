"""Nearest words by cosine, word vectors as files for other programs, and a report of their run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from firth.core.chart import loss_chart
from firth.core.console import say, track
from firth.core.errors import UserError, did_you_mean, quote
from firth.core.files import atomic_folder, create_file
from firth.core.html import HtmlPage
from firth.core.notebook import ResultList, add_bars
from firth.evaluate.report import format_commands, log_points
from firth.evaluate.vectors import WordVectors, load_word_vectors, vectors_to_model
from firth.models import write_model
from firth.train import last_checkpoint, read_log

MAX_SAMPLE_WORDS = 12  # words whose neighbours a report shows


class Neighbour(NamedTuple):
    word: str
    similarity: float


class Neighbours(ResultList[Neighbour]):
    """The nearest words, in order: a list, in a notebook bars."""

    query: str = ""

    def make_page(self) -> HtmlPage:
        page = HtmlPage(f"Nearest to {self.query}" if self.query else "Nearest words")
        add_bars(page, [(near.word, near.similarity) for near in self], is_share=False)
        return page


def word_index(vectors: WordVectors, word: str) -> int:
    """Index of a word; a UserError if it is unknown."""
    index = vectors.find(word)
    if index is None:
        raise UserError(f"{quote(word)} has no vector. {did_you_mean(word, vectors.words[:20_000])}")
    return index


def most_similar(
    vectors: WordVectors, positive: Sequence[str], negative: Sequence[str] = (), top: int = 10
) -> Neighbours:
    """Words with the highest cosine to the sum of `positive` minus the sum of `negative`, other than these.

    An analogy is positive b and c, negative a: a is to b as c is to the word nearest to b + c - a.
    """
    signs = [(word, 1.0) for word in positive] + [(word, -1.0) for word in negative]
    if not signs:
        raise UserError("No word given: name one to find similar words.")
    indices = [word_index(vectors, word) for word, _ in signs]
    query_D = sum(sign * vectors.normalized_ND[i] for i, (_, sign) in zip(indices, signs, strict=True))
    cosine_N = vectors.normalized_ND @ (query_D / max(float(np.linalg.norm(query_D)), 1e-12))
    cosine_N[indices] = -np.inf
    best = np.argsort(-cosine_N, kind="stable")[:top]
    found = Neighbours(Neighbour(vectors.words[i], float(cosine_N[i])) for i in best if np.isfinite(cosine_N[i]))
    found.query = " + ".join(positive) + "".join(f" - {word}" for word in negative)
    return found


def write_vectors(vectors: WordVectors, folder: Path, file_format: str) -> list[Path]:
    """Write vectors.txt, for word2vec with a header and vectors.bin; "firth" writes a checkpoint for `finetune`."""
    if file_format == "firth":
        with atomic_folder(folder) as temporary:
            write_model(vectors_to_model(vectors), temporary)
        return [folder / "model.safetensors"]
    if spaced := next((word for word in vectors.words if any(c.isspace() for c in word)), None):
        raise UserError(f"{quote(spaced)} contains a space, which ends a word in these formats.")
    names = ["vectors.txt", "vectors.bin"] if file_format == "word2vec" else ["vectors.txt"]
    header = f"{len(vectors.words)} {vectors.vectors_ND.shape[1]}\n"
    rows = zip(vectors.words, vectors.vectors_ND, strict=True)
    with atomic_folder(folder, "vectors") as temporary:
        with create_file(temporary / "vectors.txt") as file:
            file.write(header.encode() if file_format == "word2vec" else b"")
            for word, vector_D in track(rows, "writing vectors", "words", len(vectors.words)):
                file.write((f"{word} " + " ".join(f"{x:.9g}" for x in vector_D.tolist()) + "\n").encode())
        if file_format == "word2vec":
            with create_file(temporary / "vectors.bin") as file_b:
                file_b.write(header.encode())
                for word, vector_D in zip(vectors.words, vectors.vectors_ND, strict=True):
                    file_b.write(f"{word} ".encode() + vector_D.astype("<f4").tobytes() + b"\n")
    return [folder / name for name in names]


def sample_neighbours(vectors: WordVectors) -> dict[str, list[str]]:
    """Neighbours of a few words between the most frequent and the rare ones, spaced geometrically by rank."""
    words = [word for word in vectors.words if len(word) > 3 and word.isalpha()]
    ranks = np.unique(np.geomspace(20, max(len(words) // 2, 21), MAX_SAMPLE_WORDS).astype(int))
    sample = [words[i] for i in ranks if i < len(words)]
    return {word: [near.word for near in most_similar(vectors, [word], top=8)] for word in sample}


def next_vector_commands(folder: Path, neighbours: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return commands to paste after a run of word vectors, by their purpose."""
    model, word = shlex.quote(str(folder / "final")), shlex.quote(next(iter(neighbours), "WORD"))
    return {
        "Find the words nearest to a word": f"firth embed {model} {word} --similar",
        "Score the vectors on pairs of words": f"firth evaluate {model} --task word-similarity --data pairs.tsv",
        "Fine-tune a bag of words on your labels (columns text, label)": (
            f"firth finetune {model} --task classify --train train.csv --dev dev.csv --output-dir tuned"
        ),
        "Write the vectors for gensim": f"firth export {model} --output-dir vectors --format word2vec",
    }


def write_interrupted_vector_report(folder: Path, name: str) -> None:
    """Write the report of an interrupted run from its log and its last checkpoint, if there is one."""
    if (checkpoint := last_checkpoint(folder)) is None:
        return
    vectors, line = load_word_vectors(checkpoint), read_log(folder / "log.jsonl")[-1]
    facts = {"steps": line["step"], "loss": line["loss"], "words": len(vectors.words), "tokens": line["tokens"]}
    report = write_vector_report(folder, name, {**facts, "similar": sample_neighbours(vectors)})
    say(f"The report so far is {report}.")


def write_vector_report(folder: Path, name: str, results: dict[str, Any]) -> Path:
    """Write report.html of a run: its loss, the nearest words of a sample, and the next commands."""
    page = HtmlPage(f"{name}: {results['words']:,} words")
    page.add_paragraph("The words whose vectors have the highest cosine.")
    page.add_table(["word", "nearest words"], [(word, ", ".join(near)) for word, near in results["similar"].items()])
    losses = log_points(read_log(folder / "log.jsonl"), "loss")
    if len(losses) > 1:
        page.add_chart(loss_chart(losses, [], y_name="loss"), "Loss by step.")
    page.add_heading("The run")
    page.add_facts((key, value) for key, value in results.items() if not isinstance(value, dict | list))
    page.add_heading("Next")
    page.add_code(format_commands(next_vector_commands(folder, results["similar"])))
    page.add_heading("Recipe")
    page.add_code((folder / "recipe.yaml").read_text(encoding="utf-8"))
    page.save(folder / "report.html")
    return folder / "report.html"
