"""How likely texts are to an n-gram model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from firth.core.console import track
from firth.core.errors import UserError
from firth.evaluate.likelihood import Likelihood
from firth.static.ngram import boundary_tokens, load_ngram


class NgramScorer:
    """Each token after the few before it, exactly; texts of any length are read at once."""

    is_exact, method = True, "left-to-right"
    notices: tuple[str, ...] = ()

    def __init__(self, checkpoint: Path, method: str = "auto") -> None:
        if method not in ("auto", self.method):
            raise UserError(f"method {method!r}: an n-gram model has one, left-to-right.")
        self.model = load_ngram(checkpoint)
        self.max_length, self.stride = self.model.order, 1

    def score_texts(self, texts: Iterable[str]) -> Iterator[Likelihood]:
        """The likelihood of each text, in their order; what ends a text is not asked."""
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        first, unknown = boundary_tokens(tokenizer.vocab)[0], tokenizer.vocab.unk
        for text in track(texts, "scoring", "texts"):
            ids = tokenizer.encode(text)
            logp = float(self.model.log_probs(np.array([first, *ids])).sum()) if ids else 0.0
            yield Likelihood(
                logp, len(ids), ids.count(unknown) if unknown is not None else 0, len(text.split()), len(text.encode())
            )
