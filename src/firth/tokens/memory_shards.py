"""Shards of a few documents in memory: rows of training for a text that somebody has just typed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from firth.text import Document, SalientSpanFinder
from firth.tokens.encode import DocumentEncoder
from firth.tokens.shards import Shards
from firth.tokens.tokenizer import Tokenizer


class MemoryShards(Shards):
    """One part of shards that was never written. Arrays that are computed from it are not stored either."""

    stores_arrays = False

    def __init__(
        self, documents: Sequence[Document], tokenizer: Tokenizer, language: str, find_salient: SalientSpanFinder | None
    ) -> None:
        encoded, _ = DocumentEncoder(tokenizer, 0.0, language, find_salient)(documents)
        self.folder = Path("memory", "text")  # for messages
        self.tokenizer_kind = tokenizer.kind
        self.offsets = np.concatenate([[0], np.cumsum(encoded.document_lengths)])
        self._tokens = encoded.tokens
        bits = {"word_start": encoded.words, "sentence_end": encoded.sentences, "salient": encoded.salient}
        self._packed_bits = {name: np.packbits(bit) for name, bit in bits.items() if len(bit) or name != "salient"}
        self._mapped_files = {}
        has_sides = (encoded.first_side_lengths >= 0).any()
        self.__dict__["first_side_lengths"] = encoded.first_side_lengths if has_sides else None
        self.__dict__["fingerprint"] = "memory"

    @property
    def _manifest_facts(self) -> dict[str, Any]:
        return {"tokenizer_kind": self.tokenizer_kind}
