"""Functions that look into a model: `embed`, `similar`, `compare`, `attention`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from firth.commands.results import ComparisonResult, Vectors
from firth.core.errors import UserError
from firth.text import Corpus

if TYPE_CHECKING:
    from firth.evaluate.attention_view import Attention
    from firth.evaluate.neighbours import Neighbours
    from firth.models import Model


def embed(
    checkpoint: str | Path | Model,
    texts: str | Sequence[str],
    pool: Literal["auto", "first", "mean", "last"] = "auto",
    layer: int = -1,
    normalize: bool = False,
    max_seq_length: int = 0,
) -> Vectors:
    """Embed texts as (texts, width) float32; a single string gives one vector.

    `pool` takes the hidden state of the first or last token, or the mean over all; "auto" pools as the checkpoint was
    fine-tuned (`--task embed`), else by the mean. `layer` 0 is the embedding, -1 the last. `normalize` scales vectors
    to length 1, so that dot products are cosines. Texts are truncated to `max_seq_length` tokens; 0: to the model's
    positions.
    """
    batch = [texts] if isinstance(texts, str) else list(texts)
    if not batch:
        raise UserError("There is no text to embed.")
    from firth.evaluate import embed_texts

    vectors = embed_texts(checkpoint, batch, pool, layer, normalize, max_seq_length)
    return Vectors.of(vectors[0] if isinstance(texts, str) else vectors, batch)


def similar(
    vectors: str | Path | Model, words: str | Sequence[str], negative: Sequence[str] = (), top: int = 10
) -> Neighbours:
    """The `top` words nearest to `words` and far from `negative`, by the `vectors` of a checkpoint or a file."""
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
) -> ComparisonResult:
    """Compare the vectors of a word in several texts, by each checkpoint.

    One of `checkpoints` may be of word2vec or GloVe, or a file of word vectors: it has one vector for all `texts`.
    `layer` chooses the vectors of the others: 0 is the embedding, -1 the last layer. The `top` nearest words are
    searched in the files `among`.
    """
    from firth.evaluate import compare_contexts
    from firth.models import Model

    sources = [checkpoints] if isinstance(checkpoints, str | Path | Model) else list(checkpoints)
    near = Corpus(among).texts() if among else ()
    return ComparisonResult(compare_contexts(word, list(texts), sources, layer, near, top))


def attention(checkpoint: str | Path | Model, text: str, target: str = "") -> Attention:
    """The attention weights of `checkpoint` on a `text`, of every layer and head, with the name of what each head does.

    With `target`, the text of the decoder, an encoder-decoder also has the weights of decoder and cross-attention. In a
    notebook the result is a picture of each head; `head(layer, head)` enlarges one. A checkpoint is computed on the GPU
    where there is one; a model stays where it is.
    """
    from firth.commands.generate import move_for_generation
    from firth.evaluate.attention_view import Attention
    from firth.models import load_model

    if isinstance(checkpoint, str | Path):
        checkpoint = move_for_generation(load_model(checkpoint))
    return Attention(checkpoint, text, target)
