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

from firth.console import count, progress, track
from firth.errors import UserError
from firth.evaluate.embed import unit
from firth.evaluate.outcome import Outcome
from firth.generate.reading import tokenizer_of
from firth.metrics import analogy_hits, by_group, score
from firth.models import Model, load_model
from firth.models.recurrent import Spelling
from firth.tasks import Prediction
from firth.text import Example
from firth.text.lines import OPENERS, lines, opened
from firth.text.records import is_number
from firth.tokens import word_tokenizer

BLOCK = 256  # analogies that are compared with all words at once
SPELLED = 4096  # words that are read by their characters at once
LONGEST_WORD = 4096  # bytes: what has no space for so long is no binary file of word vectors
LONGEST_VECTOR = 2**26  # bytes, in a compressed file, whose size says little
NO_SECTION = "all"


class WordVectors:
    """Words and their vectors (N, D). A vocabulary without capitals is asked in small letters."""

    def __init__(self, words: Sequence[str], vectors_ND: np.ndarray) -> None:
        assert len(words) == len(vectors_ND), "one vector for each word"
        self.words = list(words)
        self.vectors_ND = vectors_ND.astype(np.float32)
        self.unit_ND = unit(self.vectors_ND)
        self.place = {word: i for i, word in reversed(list(enumerate(words)))}  # of words said twice, the first

    @cached_property
    def lowercase(self) -> bool:
        return all(word == word.lower() for word in self.words)

    def find(self, word: str) -> int | None:
        """The place of a word, or None where it is not known."""
        return self.place.get(word.lower() if self.lowercase else word)


def word_vectors(source: Model | str | Path, limit: int = 0) -> WordVectors:
    """The vectors of a file (word2vec's or GloVe's), or the token vectors of a model or a checkpoint folder."""
    if isinstance(source, Model):
        return token_vectors(source)
    if not Path(source).is_dir():
        return read_vectors(source, limit)
    found = token_vectors(load_model(source))
    return WordVectors(found.words[: limit or None], found.vectors_ND[: limit or None])


def model_of(vectors: WordVectors) -> Model:
    """Word vectors as a model without layers, which `finetune` takes. What has no vector is at 0.

    Text is made lower case where all words of the vectors are. Of a word that stands there twice the first one counts.
    """
    from firth.train.learners import as_model  # which loads numba

    tokenizer = word_tokenizer(vectors.words, lowercase=all(word == word.lower() for word in vectors.words))
    vectors_ND = np.zeros((tokenizer.vocab.size, vectors.vectors_ND.shape[1]), np.float32)
    ids = np.array([tokenizer.backend.token_to_id(word) for word in vectors.words])
    vectors_ND[ids[::-1]] = vectors.vectors_ND[::-1]  # the last one that is written stays
    return as_model(tokenizer, vectors_ND, None, 0)


def token_vectors(model: Model) -> WordVectors:
    """What a model begins with: the vectors of those tokens that are whole words. Other words are not known."""
    tokenizer = tokenizer_of(model)
    ids = tokenizer.vocab.ordinary
    if tokenizer.kind == "word":
        words = [str(tokenizer.backend.id_to_token(i)) for i in ids.tolist()]
        return WordVectors(words, vectors_by_id(model, ids))
    names = [tokenizer.decode([i]).strip() for i in ids.tolist()]
    read = tokenizer.encode_batch([f" {name}" for name in names])  # as a word stands in a text
    whole = [i for i, (name, found) in enumerate(zip(names, read, strict=True)) if name and found == [ids[i]]]
    return WordVectors([names[i] for i in whole], vectors_by_id(model, ids[whole]))


@torch.no_grad()
def vectors_by_id(model: Model, id_N: np.ndarray) -> np.ndarray:
    """(N, D): the vectors of these tokens; ELMo's are made from their characters."""
    weight_VD = model.embed.tokens.weight
    if not isinstance(model.embed, Spelling):
        return weight_VD.cpu().numpy()[id_N]
    parts = torch.from_numpy(id_N).to(weight_VD.device, torch.long).split(SPELLED)
    return torch.cat([model.embed.vectors(part).cpu() for part in parts]).numpy()


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
    rows = binary_rows(path) if binary else text_rows(path)
    words, vectors = [], []
    for row in track(rows, "reading vectors", "words"):
        words.append(row.word)
        vectors.append(row.vector)
        if len(words) == limit:
            break
    if not words:
        raise UserError(f"{path}: no word vectors in this file.")
    return WordVectors(words, np.stack(vectors))


class Row(NamedTuple):
    word: str
    vector: np.ndarray


def text_rows(path: Path) -> Iterator[Row]:
    """A word and its numbers on each line. A word may have spaces in it, as some of GloVe's do."""
    promised, dim, num, odd = None, 0, 0, ""
    for number, line in enumerate(lines(path, "utf-8"), 1):
        where, cells = f"{path}:{number}", line.rstrip().split(" ")
        if number == 1 and len(cells) == 2 and all(cell.isdecimal() for cell in cells):
            promised, dim = int(cells[0]), int(cells[1])
            if not dim:
                raise UserError(f"{where}: the header promises vectors of 0 numbers.")
            continue
        if number == 1 and len(cells) == 2 and all(map(is_number, cells)):
            odd = line.strip()
        dim = dim or len(cells) - 1
        if odd and len(cells) != 2:
            raise UserError(
                f"{path}:1: {odd!r} is no header, which is how many words and how many numbers (as in 4000 100), and "
                f"no word with its vector either: line {number} has {len(cells) - 1} numbers."
            )
        more = cells[1:-dim] if dim else []
        if len(cells) <= dim or dim < 1 or (more and all(map(is_number, more))):
            problem = count(len(cells) - 1, "number") + " after the word" if len(cells) > 1 else "no numbers"
            raise UserError(
                f"{where}: {problem}, and there should be {dim or 'some'}: a line has a word and its vector."
            )
        num += 1
        if promised is not None and num > promised:
            raise UserError(f"{where}: one word more than the {promised:,} that the first line promises.")
        yield Row(" ".join(cells[:-dim]), numbers(cells[-dim:], where))
    if promised is not None and num < promised:
        raise UserError(f"{path}: the first line promises {count(promised, 'word')}, and there are {num:,}.")


def numbers(cells: Sequence[str], where: str) -> np.ndarray:
    try:
        vector = np.array(cells, dtype=np.float32)
    except ValueError:
        wrong = next(cell for cell in cells if not is_number(cell))
        raise UserError(f"{where}: {wrong[:40]!r} is not a number.") from None
    if not np.isfinite(vector).all():
        raise UserError(f"{where}: a number of this vector is not finite.")
    return vector


def binary_rows(path: Path) -> Iterator[Row]:
    """word2vec's binary format: a header, then each word, a space and its numbers as 32-bit floats."""
    with opened(path) as file:
        header = file.readline(100).split()
        if len(header) != 2 or not all(cell.isdigit() for cell in header) or not int(header[1]):
            raise UserError(f"{path}:1: a .bin file of word2vec begins with how many words and how many numbers.")
        promised, dim = int(header[0]), int(header[1])
        if 4 * dim > (LONGEST_VECTOR if path.suffix.lower() in OPENERS else path.stat().st_size):
            raise UserError(f"{path}:1: the header promises vectors of {dim:,} numbers, more than this file can hold.")
        for number in range(promised):
            where = f"{path}, word {number + 1:,} of {promised:,}"
            word, data = binary_word(file, where), file.read(4 * dim)
            if len(data) < 4 * dim:
                raise UserError(f"{where}: the file ends inside of it.")
            vector = np.frombuffer(data, dtype="<f4")
            if not np.isfinite(vector).all():
                raise UserError(f"{where}: a number of its vector is not finite.")
            yield Row(word, vector)
        if any(piece.strip() for piece in iter(lambda: file.read(LONGEST_WORD), b"")):
            raise UserError(
                f"{path}: something follows the last of the {count(promised, 'word')} that the first line promises. "
                "Correct how many words, or how many numbers, it says."
            )


def binary_word(file: IO[bytes], where: str) -> str:
    letters = bytearray()
    while (letter := file.read(1)) != b" ":
        if not letter or len(letters) > LONGEST_WORD:
            raise UserError(f"{where}: the file ends, or has no space after a word: it is cut or damaged.")
        letters += letter
    try:
        return letters.lstrip(b"\n").decode()
    except UnicodeDecodeError:
        raise UserError(f"{where}: its letters are not UTF-8.") from None


# --- what they are good for ---------------------------------------------------------------------------------------


def word_similarity(source: WordVectors | Model | str | Path, examples: Sequence[Example]) -> Outcome:
    """How far the cosines of pairs of words go with what people said, over the pairs that are known."""
    vectors = source if isinstance(source, WordVectors) else word_vectors(source)
    cosines = []
    for example in examples:
        a, b = (vectors.find(word) for word in example.texts)
        known = a is not None and b is not None
        cosines.append(float(vectors.unit_ND[a] @ vectors.unit_ND[b]) if known else None)
    unknown = cosines.count(None)
    metrics = score("word-similarity", cosines, [example.target for example in examples])
    said = [f"{unknown:,} of {len(examples):,} pairs have a word that is not known, and are left out."]
    return Outcome(metrics, [Prediction(cosine) for cosine in cosines], {"unknown": unknown}, said if unknown else [])


def analogy(source: WordVectors | Model | str | Path, examples: Sequence[Example]) -> Outcome:
    """a is to b as c is to ...: the word nearest to b - a + c that is none of the three (Mikolov et al. 2013).

    Questions with a word that is not known are left out and counted.
    """
    vectors = source if isinstance(source, WordVectors) else word_vectors(source)
    places = [[vectors.find(word) for word in (*example.texts, example.target)] for example in examples]
    known = [i for i, found in enumerate(places) if None not in found]
    predictions: list[str | None] = [None] * len(examples)
    with progress("analogies", "questions", len(known)) as shown:
        for start in range(0, len(known), BLOCK):
            chosen = known[start : start + BLOCK]
            for i, word in zip(chosen, nearest_words(vectors, np.array([places[i][:3] for i in chosen])), strict=True):
                predictions[i] = word
            shown.advance(len(chosen))
    right = [example.target.lower() if vectors.lowercase else example.target for example in examples]
    sections = [example.references[0] if example.references else NO_SECTION for example in examples]
    metrics = score("analogy", predictions, list(zip(right, sections, strict=True)))
    by_section = by_group(analogy_hits(predictions, right), sections) if known else {}
    unknown = len(examples) - len(known)
    said = [f"{unknown:,} of {len(examples):,} analogies have a word that is not known, and are left out."]
    facts = {"unknown": unknown, "by_group": by_section}
    return Outcome(metrics, [Prediction(word) for word in predictions], facts, said if unknown else [])


def nearest_words(vectors: WordVectors, place_Q3: np.ndarray) -> list[str]:
    """For each a, b, c the word nearest to b - a + c, none of these."""
    a_QD, b_QD, c_QD = (vectors.unit_ND[place_Q] for place_Q in place_Q3.T)
    near_QN = (b_QD - a_QD + c_QD) @ vectors.unit_ND.T
    np.put_along_axis(near_QN, place_Q3, -np.inf, 1)
    return [vectors.words[i] for i in near_QN.argmax(1)]
