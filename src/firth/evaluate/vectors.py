"""Word vectors that do not depend on the text: similar words, analogies.

N words, D numbers of a vector, Q questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch

from firth.core.console import format_count, progress, track
from firth.core.errors import UserError
from firth.evaluate.embed import normalize_rows
from firth.evaluate.evaluation import Evaluation
from firth.generate.decode_state import require_tokenizer
from firth.metrics import accuracy_by_group, analogy_correct, compute_metrics
from firth.models import Model, load_model
from firth.models.recurrent import CharCNNEmbedding
from firth.tasks import Prediction
from firth.text import Example
from firth.text.open_text import DECOMPRESSORS, open_decompressed, read_lines
from firth.text.records import is_numeric_string
from firth.tokens import tokenizer_from_words

ANALOGY_BATCH_QUESTIONS = 256  # analogies that are compared with all words at once
CHAR_ENCODER_BATCH_WORDS = 4096  # words that are read by their characters at once
MAX_WORD_BYTES = 4096  # bytes: what has no space for so long is no binary file of word vectors
MAX_VECTOR_BYTES = 2**26  # bytes, in a compressed file, whose size says little
DEFAULT_SECTION = "all"


class WordVectors:
    """Words and their vectors (N, D). A vocabulary without capitals is asked in small letters."""

    def __init__(self, words: Sequence[str], vectors_ND: np.ndarray) -> None:
        assert len(words) == len(vectors_ND), "one vector for each word"
        self.words = list(words)
        self.vectors_ND = vectors_ND.astype(np.float32)
        self.normalized_ND = normalize_rows(self.vectors_ND)
        self.index_of_word = {word: i for i, word in reversed(list(enumerate(words)))}  # of words said twice, the first

    @cached_property
    def is_lowercase(self) -> bool:
        return all(word == word.lower() for word in self.words)

    def find(self, word: str) -> int | None:
        """The place of a word, or None where it is not known."""
        return self.index_of_word.get(word.lower() if self.is_lowercase else word)


def load_word_vectors(source: Model | str | Path, limit: int = 0) -> WordVectors:
    """The vectors of a file (word2vec's or GloVe's), or the token vectors of a model or a checkpoint folder."""
    if isinstance(source, Model):
        return whole_word_vectors(source)
    if not Path(source).is_dir():
        return read_vectors(source, limit)
    found = whole_word_vectors(load_model(source))
    return WordVectors(found.words[: limit or None], found.vectors_ND[: limit or None])


def vectors_to_model(vectors: WordVectors) -> Model:
    """Word vectors as a model without layers, which `finetune` takes. What has no vector is at 0.

    Text is made lower case where all words of the vectors are. Of a word that stands there twice the first one counts.
    """
    from firth.static.learners import make_bag_model  # which loads numba

    tokenizer = tokenizer_from_words(vectors.words, lowercase=all(word == word.lower() for word in vectors.words))
    vectors_ND = np.zeros((tokenizer.vocab.size, vectors.vectors_ND.shape[1]), np.float32)
    ids = np.array([tokenizer.backend.token_to_id(word) for word in vectors.words])
    vectors_ND[ids[::-1]] = vectors.vectors_ND[::-1]  # the last one that is written stays
    return make_bag_model(tokenizer, vectors_ND, None, 0)


def whole_word_vectors(model: Model) -> WordVectors:
    """What a model begins with: the vectors of those tokens that are whole words. Other words are not known."""
    tokenizer = require_tokenizer(model)
    ids = tokenizer.vocab.non_special_ids
    if tokenizer.kind == "word":
        words = [str(tokenizer.backend.id_to_token(i)) for i in ids.tolist()]
        return WordVectors(words, embed_token_ids(model, ids))
    names = [tokenizer.decode([i]).strip() for i in ids.tolist()]
    read = tokenizer.encode_batch([f" {name}" for name in names])  # as a word stands in a text
    whole = [i for i, (name, found) in enumerate(zip(names, read, strict=True)) if name and found == [ids[i]]]
    return WordVectors([names[i] for i in whole], embed_token_ids(model, ids[whole]))


@torch.no_grad()
def embed_token_ids(model: Model, id_N: np.ndarray) -> np.ndarray:
    """(N, D): the vectors of these tokens; ELMo's are made from their characters."""
    weight_VD = model.embed.tokens.weight
    if not isinstance(model.embed, CharCNNEmbedding):
        return weight_VD.cpu().numpy()[id_N]
    parts = torch.from_numpy(id_N).to(weight_VD.device, torch.long).split(CHAR_ENCODER_BATCH_WORDS)
    return torch.cat([model.embed.embed_unprojected(part).cpu() for part in parts]).numpy()


# --- files --------------------------------------------------------------------------------------------------------


def read_vectors(path: str | Path, limit: int = 0) -> WordVectors:
    """Word vectors from a file, plain or as .gz or .xz; `limit` takes the first words only, the frequent ones.

    A .bin file is word2vec's binary format. Any other has a word and its numbers on each line, with word2vec's header
    (how many words, how many numbers) or, as GloVe has it, without.
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
    """A word and its numbers on each line. A word may have spaces in it, as some of GloVe's do."""
    promised, dim, num, odd = None, 0, 0, ""
    for number, line in enumerate(read_lines(path, "utf-8"), 1):
        where, cells = f"{path}:{number}", line.rstrip().split(" ")
        if number == 1 and len(cells) == 2 and all(cell.isdecimal() for cell in cells):
            promised, dim = int(cells[0]), int(cells[1])
            if not dim:
                raise UserError(f"{where}: the header promises vectors of 0 numbers.")
            continue
        if number == 1 and len(cells) == 2 and all(map(is_numeric_string, cells)):
            odd = line.strip()
        dim = dim or len(cells) - 1
        if odd and len(cells) != 2:
            raise UserError(
                f"{path}:1: {odd!r} is no header, which is how many words and how many numbers (as in 4000 100), and "
                f"no word with its vector either: line {number} has {len(cells) - 1} numbers."
            )
        more = cells[1:-dim] if dim else []
        if len(cells) <= dim or dim < 1 or (more and all(map(is_numeric_string, more))):
            problem = format_count(len(cells) - 1, "number") + " after the word" if len(cells) > 1 else "no numbers"
            raise UserError(
                f"{where}: {problem}, and there should be {dim or 'some'}: a line has a word and its vector."
            )
        num += 1
        if promised is not None and num > promised:
            raise UserError(f"{where}: one word more than the {promised:,} that the first line promises.")
        yield VectorRow(" ".join(cells[:-dim]), parse_vector(cells[-dim:], where))
    if promised is not None and num < promised:
        raise UserError(f"{path}: the first line promises {format_count(promised, 'word')}, and there are {num:,}.")


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
    """word2vec's binary format: a header, then each word, a space and its numbers as 32-bit floats."""
    with open_decompressed(path) as file:
        header = file.readline(100).split()
        if len(header) != 2 or not all(cell.isdigit() for cell in header) or not int(header[1]):
            raise UserError(f"{path}:1: a .bin file of word2vec begins with how many words and how many numbers.")
        promised, dim = int(header[0]), int(header[1])
        if 4 * dim > (MAX_VECTOR_BYTES if path.suffix.lower() in DECOMPRESSORS else path.stat().st_size):
            raise UserError(f"{path}:1: the header promises vectors of {dim:,} numbers, more than this file can hold.")
        for number in range(promised):
            where = f"{path}, word {number + 1:,} of {promised:,}"
            word, data = read_binary_word(file, where), file.read(4 * dim)
            if len(data) < 4 * dim:
                raise UserError(f"{where}: the file ends inside of it.")
            vector = np.frombuffer(data, dtype="<f4")
            if not np.isfinite(vector).all():
                raise UserError(f"{where}: a number of its vector is not finite.")
            yield VectorRow(word, vector)
        if any(piece.strip() for piece in iter(lambda: file.read(MAX_WORD_BYTES), b"")):
            raise UserError(
                f"{path}: something follows the last of the {format_count(promised, 'word')} that the first line promises. "
                "Correct how many words, or how many numbers, it says."
            )


def read_binary_word(file: IO[bytes], where: str) -> str:
    letters = bytearray()
    while (letter := file.read(1)) != b" ":
        if not letter or len(letters) > MAX_WORD_BYTES:
            raise UserError(f"{where}: the file ends, or has no space after a word: it is cut or damaged.")
        letters += letter
    try:
        return letters.lstrip(b"\n").decode()
    except UnicodeDecodeError:
        raise UserError(f"{where}: its letters are not UTF-8.") from None


# --- what they are good for ---------------------------------------------------------------------------------------


def evaluate_word_similarity(source: WordVectors | Model | str | Path, examples: Sequence[Example]) -> Evaluation:
    """How far the cosines of pairs of words go with what people said, over the pairs that are known."""
    vectors = source if isinstance(source, WordVectors) else load_word_vectors(source)
    cosines = []
    for example in examples:
        a, b = (vectors.find(word) for word in example.texts)
        known = a is not None and b is not None
        cosines.append(float(vectors.normalized_ND[a] @ vectors.normalized_ND[b]) if known else None)
    unknown = cosines.count(None)
    metrics = compute_metrics("word-similarity", cosines, [example.target for example in examples])
    said = [f"{unknown:,} of {len(examples):,} pairs have a word that is not known, and are left out."]
    return Evaluation(
        metrics, [Prediction(cosine) for cosine in cosines], {"unknown": unknown}, said if unknown else []
    )


def evaluate_analogies(source: WordVectors | Model | str | Path, examples: Sequence[Example]) -> Evaluation:
    """a is to b as c is to ...: the word nearest to b - a + c that is none of the three (Mikolov et al. 2013).

    Questions with a word that is not known are left out and counted.
    """
    vectors = source if isinstance(source, WordVectors) else load_word_vectors(source)
    places = [[vectors.find(word) for word in (*example.texts, example.target)] for example in examples]
    known = [i for i, found in enumerate(places) if None not in found]
    predictions: list[str | None] = [None] * len(examples)
    with progress("analogies", "questions", len(known)) as shown:
        for start in range(0, len(known), ANALOGY_BATCH_QUESTIONS):
            chosen = known[start : start + ANALOGY_BATCH_QUESTIONS]
            for i, word in zip(
                chosen, solve_analogies(vectors, np.array([places[i][:3] for i in chosen])), strict=True
            ):
                predictions[i] = word
            shown.advance(len(chosen))
    right = [example.target.lower() if vectors.is_lowercase else example.target for example in examples]
    sections = [example.references[0] if example.references else DEFAULT_SECTION for example in examples]
    metrics = compute_metrics("analogy", predictions, list(zip(right, sections, strict=True)))
    by_section = accuracy_by_group(analogy_correct(predictions, right), sections) if known else {}
    unknown = len(examples) - len(known)
    said = [f"{unknown:,} of {len(examples):,} analogies have a word that is not known, and are left out."]
    facts = {"unknown": unknown, "by_group": by_section}
    return Evaluation(metrics, [Prediction(word) for word in predictions], facts, said if unknown else [])


def solve_analogies(vectors: WordVectors, word_index_Q3: np.ndarray) -> list[str]:
    """For each a, b, c the word nearest to b - a + c, none of these."""
    a_QD, b_QD, c_QD = (vectors.normalized_ND[place_Q] for place_Q in word_index_Q3.T)
    near_QN = (b_QD - a_QD + c_QD) @ vectors.normalized_ND.T
    np.put_along_axis(near_QN, word_index_Q3, -np.inf, 1)
    return [vectors.words[i] for i in near_QN.argmax(1)]
