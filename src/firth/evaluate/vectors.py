"""Static word vectors: read them from files and models, and score them on word similarity and analogies.

Files: word2vec's binary format (header, then word, space and float32 numbers), and text with a word and its numbers
on each line, with word2vec's header or, like GloVe, without. A damaged file is refused with its line.

N words, D vector dimensions, Q questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch

from firth.core.console import format_count, progress, track
from firth.core.errors import UserError, quote
from firth.evaluate.embed import normalize_rows
from firth.evaluate.evaluation import Evaluation
from firth.generate.decode_state import require_tokenizer
from firth.metrics import accuracy_by_group, analogy_correct, compute_metrics
from firth.models import Model, load_model
from firth.models.recurrent.elmo import CharCNNEmbedding
from firth.tasks import Prediction
from firth.text import Example
from firth.text.open_text import DECOMPRESSORS, open_decompressed
from firth.text.records import is_numeric_string, read_record_lines
from firth.tokens import tokenizer_from_words

ANALOGY_BATCH_QUESTIONS = 256  # analogies per matmul with all word vectors
CHAR_ENCODER_BATCH_WORDS = 4096  # words per batch of ELMo's character encoder
MAX_WORD_BYTES = 4096  # bytes without a space: the file is not word2vec's binary format
MAX_VECTOR_BYTES = 2**26  # bytes of one vector in a compressed file, whose size gives no bound
DEFAULT_SECTION = "all"


class WordVectors:
    """Words and their vectors (N, D). Queries are lowercased if all words are lower case."""

    def __init__(self, words: Sequence[str], vectors_ND: np.ndarray) -> None:
        assert len(words) == len(vectors_ND), "one vector for each word"
        self.words = list(words)
        self.vectors_ND = vectors_ND.astype(np.float32)
        self.normalized_ND = normalize_rows(self.vectors_ND)
        self.index_of_word = {word: i for i, word in reversed(list(enumerate(words)))}  # of a repeated word the first

    @cached_property
    def is_lowercase(self) -> bool:
        return all(word == word.lower() for word in self.words)

    def find(self, word: str) -> int | None:
        """Index of a word; None if it is unknown."""
        return self.index_of_word.get(word.lower() if self.is_lowercase else word)


def load_word_vectors(source: Model | str | Path, limit: int = 0) -> WordVectors:
    """Word vectors of a file (word2vec or GloVe), or the token embeddings of a model or checkpoint folder."""
    if isinstance(source, Model):
        return whole_word_vectors(source)
    if not Path(source).is_dir():
        return read_vectors(source, limit)
    vectors = whole_word_vectors(load_model(source))
    return WordVectors(vectors.words[: limit or None], vectors.vectors_ND[: limit or None])


def vectors_to_model(vectors: WordVectors) -> Model:
    """A model without layers for `finetune`; tokens without a vector have zeros.

    Its tokenizer lowercases text if all words are lower case. Of a repeated word the first vector is kept.
    """
    from firth.static.learners import make_bag_model  # which loads numba

    tokenizer = tokenizer_from_words(vectors.words, lowercase=all(word == word.lower() for word in vectors.words))
    vectors_ND = np.zeros((tokenizer.vocab.size, vectors.vectors_ND.shape[1]), np.float32)
    ids = np.array([tokenizer.backend.token_to_id(word) for word in vectors.words])
    vectors_ND[ids[::-1]] = vectors.vectors_ND[::-1]  # the last assignment wins
    return make_bag_model(tokenizer, vectors_ND, None, 0)


def whole_word_vectors(model: Model) -> WordVectors:
    """Input embeddings of the tokens that are whole words."""
    tokenizer = require_tokenizer(model)
    ids = tokenizer.vocab.non_special_ids
    if tokenizer.kind == "word":
        return WordVectors([str(tokenizer.backend.id_to_token(i)) for i in ids.tolist()], embed_token_ids(model, ids))
    names = [tokenizer.decode([i]).strip() for i in ids.tolist()]
    encoded = tokenizer.encode_batch([f" {name}" for name in names])  # as inside a text
    words = [i for i, (name, pieces) in enumerate(zip(names, encoded, strict=True)) if name and pieces == [ids[i]]]
    return WordVectors([names[i] for i in words], embed_token_ids(model, ids[words]))


@torch.no_grad()
def embed_token_ids(model: Model, id_N: np.ndarray) -> np.ndarray:
    """(N, D): embeddings of tokens; ELMo computes them from characters."""
    weight_VD = model.embed.tokens.weight
    if not isinstance(model.embed, CharCNNEmbedding):
        return weight_VD.float().cpu().numpy()[id_N]
    parts = torch.from_numpy(id_N).to(weight_VD.device, torch.long).split(CHAR_ENCODER_BATCH_WORDS)
    return torch.cat([model.embed.embed_unprojected(part).float().cpu() for part in parts]).numpy()


# --- files --------------------------------------------------------------------------------------------------------


def read_vectors(path: str | Path, limit: int = 0) -> WordVectors:
    """Read word vectors from a file, also .gz or .xz; `limit` reads the first N words, the most frequent ones.

    A .bin file has word2vec's binary format. Any other file has a word and its numbers on each line, with word2vec's
    header (number of words, dimensions) or, like GloVe, without.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    binary = ".bin" in path.suffixes[-2:]
    rows = read_binary_vectors(path) if binary else read_text_vectors(path)
    words, vectors = [], []
    for row in track(rows, "reading vectors", "words"):
        words.append(row.word)
        vectors.append(row.vector)
        if len(words) == limit:
            break
    if not words:
        raise UserError(f"{path}: no word vectors in this file.")
    return WordVectors(words, np.stack(vectors))


class VectorRow(NamedTuple):
    word: str
    vector: np.ndarray


def read_text_vectors(path: Path) -> Iterator[VectorRow]:
    """Yield the word and the vector of each line. Some words of GloVe contain spaces."""
    promised, dim, num, odd = None, 0, 0, ""
    for number, line in enumerate(read_record_lines(path, "utf-8"), 1):
        where, cells = f"{path}:{number}", line.rstrip().split(" ")
        if number == 1 and len(cells) == 2 and all(cell.isdecimal() for cell in cells):
            promised, dim = int(cells[0]), int(cells[1])
            if not dim:
                raise UserError(f"{where}: the header says vectors of 0 numbers.")
            continue
        if number == 1 and len(cells) == 2 and all(map(is_numeric_string, cells)):
            odd = line.strip()
        dim = dim or len(cells) - 1
        if odd and len(cells) != 2:
            raise UserError(
                f"{path}:1: {quote(odd)} is neither a header (words and dimensions, as 4000 100) nor a word vector: "
                f"line {number} has {len(cells) - 1} numbers."
            )
        more = cells[1:-dim] if dim else []
        if len(cells) <= dim or dim < 1 or (more and all(map(is_numeric_string, more))):
            problem = format_count(len(cells) - 1, "number") + " after the word" if len(cells) > 1 else "no numbers"
            raise UserError(f"{where}: {problem}, expected {dim or 'at least one'}: a line has a word and its vector.")
        num += 1
        if promised is not None and num > promised:
            raise UserError(f"{where}: more words than the {promised:,} of the first line.")
        yield VectorRow(" ".join(cells[:-dim]), parse_vector(cells[-dim:], where))
    if promised is not None and num < promised:
        raise UserError(f"{path}: the first line says {format_count(promised, 'word')}, and there are {num:,}.")


def parse_vector(cells: Sequence[str], where: str) -> np.ndarray:
    try:
        vector = np.array(cells, dtype=np.float32)
    except ValueError:
        wrong = next(cell for cell in cells if not is_numeric_string(cell))
        raise UserError(f"{where}: {wrong[:40]!r} is not a number.") from None
    if not np.isfinite(vector).all():
        raise UserError(f"{where}: a number of this vector is not finite.")
    return vector


def read_binary_vectors(path: Path) -> Iterator[VectorRow]:
    """word2vec's binary format: a header, then each word, a space and its float32 numbers."""
    with open_decompressed(path) as file:
        header = file.readline(100).split()
        if len(header) != 2 or not all(cell.isdigit() for cell in header) or not int(header[1]):
            raise UserError(
                f"{path}:1: not word2vec's binary format, which begins with the number of words and of dimensions."
            )
        promised, dim = int(header[0]), int(header[1])
        if 4 * dim > (MAX_VECTOR_BYTES if path.suffix.lower() in DECOMPRESSORS else path.stat().st_size):
            raise UserError(f"{path}:1: the header says vectors of {dim:,} numbers, more than this file can hold.")
        for number in range(promised):
            where = f"{path}, word {number + 1:,} of {promised:,}"
            word, data = read_binary_word(file, where), file.read(4 * dim)
            if len(data) < 4 * dim:
                raise UserError(f"{where}: the file ends inside its vector.")
            vector = np.frombuffer(data, dtype="<f4")
            if not np.isfinite(vector).all():
                raise UserError(f"{where}: a number of its vector is not finite.")
            yield VectorRow(word, vector)
        if any(piece.strip() for piece in iter(lambda: file.read(MAX_WORD_BYTES), b"")):
            raise UserError(
                f"{path}: data follow the last of the {format_count(promised, 'word')} of the first line. Correct its "
                "number of words or of dimensions."
            )


def read_binary_word(file: IO[bytes], where: str) -> str:
    letters = bytearray()
    while (letter := file.read(1)) != b" ":
        if not letter or len(letters) > MAX_WORD_BYTES:
            raise UserError(f"{where}: the file ends, or has no space after a word: it is truncated or damaged.")
        letters += letter
    try:
        return letters.lstrip(b"\n").decode()
    except UnicodeDecodeError:
        raise UserError(f"{where}: the word is not UTF-8.") from None


# --- scores -------------------------------------------------------------------------------------------------------


def evaluate_word_similarity(source: WordVectors | Model | str | Path, examples: Sequence[Example]) -> Evaluation:
    """Spearman correlation of the cosines of word pairs with human scores, over the pairs with known words."""
    vectors = source if isinstance(source, WordVectors) else load_word_vectors(source)
    cosines = []
    for example in examples:
        a, b = (vectors.find(word) for word in example.texts)
        known = a is not None and b is not None
        cosines.append(float(vectors.normalized_ND[a] @ vectors.normalized_ND[b]) if known else None)
    unknown = cosines.count(None)
    metrics = compute_metrics("word-similarity", cosines, [example.target for example in examples])
    notice = f"{unknown:,} of {len(examples):,} pairs have an unknown word and are skipped."
    predictions = [Prediction(cosine) for cosine in cosines]
    return Evaluation(metrics, predictions, {"unknown": unknown}, [notice] if unknown else [])


def evaluate_analogies(source: WordVectors | Model | str | Path, examples: Sequence[Example]) -> Evaluation:
    """a is to b as c is to ...: the word nearest to b - a + c, other than these three (Mikolov et al. 2013).

    Questions with an unknown word are skipped and counted.
    """
    vectors = source if isinstance(source, WordVectors) else load_word_vectors(source)
    indices = [[vectors.find(word) for word in (*example.texts, example.target)] for example in examples]
    known = [i for i, words in enumerate(indices) if None not in words]
    predictions: list[str | None] = [None] * len(examples)
    with progress("analogies", "questions", len(known)) as shown:
        for start in range(0, len(known), ANALOGY_BATCH_QUESTIONS):
            batch = known[start : start + ANALOGY_BATCH_QUESTIONS]
            solved = solve_analogies(vectors, np.array([indices[i][:3] for i in batch]))
            for i, word in zip(batch, solved, strict=True):
                predictions[i] = word
            shown.advance(len(batch))
    targets = [example.target.lower() if vectors.is_lowercase else example.target for example in examples]
    sections = [example.references[0] if example.references else DEFAULT_SECTION for example in examples]
    metrics = compute_metrics("analogy", predictions, list(zip(targets, sections, strict=True)))
    by_section = accuracy_by_group(analogy_correct(predictions, targets), sections) if known else {}
    unknown = len(examples) - len(known)
    notice = f"{unknown:,} of {len(examples):,} analogies have an unknown word and are skipped."
    facts = {"unknown": unknown, "by_group": by_section}
    return Evaluation(metrics, [Prediction(word) for word in predictions], facts, [notice] if unknown else [])


def solve_analogies(vectors: WordVectors, word_index_Q3: np.ndarray) -> list[str]:
    """For each a, b, c the word nearest to b - a + c, other than these."""
    a_QD, b_QD, c_QD = (vectors.normalized_ND[index_Q] for index_Q in word_index_Q3.T)
    score_QN = (b_QD - a_QD + c_QD) @ vectors.normalized_ND.T
    np.put_along_axis(score_QN, word_index_Q3, -np.inf, 1)
    return [vectors.words[i] for i in score_QN.argmax(1)]
