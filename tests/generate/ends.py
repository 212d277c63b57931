"""Models that end their texts with another token, or never."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from firth.tokens import Vocabulary


@dataclass
class Ends:
    """Only a vocabulary: a tokenizer for models that no text is wanted of."""

    vocab: Vocabulary

    def save(self, folder: Path) -> None:
        pass


def ending_with(model: Any, token: int) -> Any:
    """The same model, whose end token is another."""
    model.tokenizer = Ends(replace(model.tokenizer.vocab, **{"sep" if model.config.adds_bos else "eos": token}))
    return model


def without_end(model: Any) -> Any:
    """The same model with an end token that no row can write."""
    return ending_with(model, model.tokenizer.vocab.size)
