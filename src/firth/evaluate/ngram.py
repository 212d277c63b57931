"""Log-likelihood of texts under an n-gram model, with the interface of `likelihood.Scorer`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from firth.core.console import track
from firth.core.errors import UserError, quote
from firth.evaluate.likelihood import Likelihood
from firth.static.ngram import boundary_tokens, load_ngram


class NgramScorer:
    """log p of each token given the n - 1 tokens before it; texts of any length need no window."""

    is_exact, method = True, "left-to-right"
    notices: tuple[str, ...] = ()

    def __init__(self, checkpoint: Path, method: str = "auto") -> None:
        if method not in ("auto", self.method):
            raise UserError(f"method {quote(method)}: an n-gram model has one, left-to-right.")
        self.model = load_ngram(checkpoint)
        assert self.model.tokenizer is not None
        self.tokenizer = self.model.tokenizer
        self.max_length, self.stride = self.model.order, 1

    def score_texts(self, texts: Iterable[str]) -> Iterator[Likelihood]:
        """Yield the likelihood of each text, in order, without that of its end."""
        tokenizer = self.tokenizer
        first, unknown = boundary_tokens(tokenizer.vocab)[0], tokenizer.vocab.unk
        for text in track(texts, "scoring", "texts"):
            ids = tokenizer.encode(text)
            logp = float(self.model.log_probs(np.array([first, *ids])).sum()) if ids else 0.0
            yield Likelihood(
                logp, len(ids), ids.count(unknown) if unknown is not None else 0, len(text.split()), len(text.encode())
            )
