"""Rows to what is read and what is asked."""

from firth.objectives.batch import IGNORED, Batch
from firth.objectives.choose import Salient, Spans, Tokens, Words
from firth.objectives.draw import Draw
from firth.objectives.objectives import (
    BART,
    CLM,
    MLM,
    NAMED,
    BiLM,
    EncoderDecoderLM,
    Mixture,
    Objective,
    OneStack,
    PermutationLM,
    PrefixLM,
    SalientSpans,
    SpanCorruption,
    Weighted,
)

__all__ = [
    "BART",
    "CLM",
    "IGNORED",
    "MLM",
    "NAMED",
    "Batch",
    "BiLM",
    "Draw",
    "EncoderDecoderLM",
    "Mixture",
    "Objective",
    "OneStack",
    "PermutationLM",
    "PrefixLM",
    "Salient",
    "SalientSpans",
    "SpanCorruption",
    "Spans",
    "Tokens",
    "Weighted",
    "Words",
]
