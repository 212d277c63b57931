"""Commands on vectors of texts and words: `embed`, `similar`, `compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from firth.core.errors import UserError
from firth.text import Corpus

if TYPE_CHECKING:
    import numpy as np

    from firth.evaluate.neighbours import Neighbour
    from firth.models import Model


def embed(
    checkpoint: str | Path | Model,
    texts: str | Sequence[str],
    pool: Literal["auto", "first", "mean", "last"] = "auto",
    layer: int = -1,
    normalize: bool = False,
    max_seq_length: int = 0,
) -> np.ndarray:
    """Embed texts as (texts, width) float32; a single string gives one vector.

    `pool` takes the hidden state of the first or last token, or the mean over all; "auto" pools as the checkpoint was
    fine-tuned (`--task embed`), else by the mean. `layer` 0 is the embedding, -1 the last. `normalize` scales vectors
    to length 1, so that dot products are cosines.
    """
    batch = [texts] if isinstance(texts, str) else list(texts)
    if not batch:
        raise UserError("There is no text to embed.")
    from firth.evaluate import embed_texts

    vectors = embed_texts(checkpoint, batch, pool, layer, normalize, max_seq_length)
    return vectors[0] if isinstance(texts, str) else vectors


def similar(
    vectors: str | Path | Model, words: str | Sequence[str], negative: Sequence[str] = (), top: int = 10
) -> list[Neighbour]:
    """The words nearest to `words` and far from `negative`, by the vectors of a checkpoint or a file."""
    from firth.evaluate.neighbours import most_similar
    from firth.evaluate.vectors import load_word_vectors

    return most_similar(load_word_vectors(vectors), [words] if isinstance(words, str) else words, negative, top)


def compare(
    word: str,
    texts: Sequence[str],
    checkpoints: Sequence[str | Path | Model] | str | Path | Model,
    layer: int = -1,
    among: Sequence[str | Path] = (),
    top: int = 5,
) -> dict[str, Any]:
    """Compare the vectors of a word in several texts, by each checkpoint.

    A checkpoint of word2vec or GloVe, or a file of word vectors, has one vector for all texts. The nearest words are
    searched in the files `among`.
    """
    from firth.evaluate import compare_contexts
    from firth.models import Model

    sources = [checkpoints] if isinstance(checkpoints, str | Path | Model) else list(checkpoints)
    return compare_contexts(word, list(texts), sources, layer, Corpus(among).texts() if among else (), top)
