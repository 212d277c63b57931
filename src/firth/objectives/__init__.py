"""Rows to what is read and what is asked."""

from firth.objectives.batch import IGNORE_INDEX, Batch
from firth.objectives.counter_rng import CounterRNG
from firth.objectives.noise_mask import SalientSpanMasking, SpanMasking, TokenMasking, WholeWordMasking
from firth.objectives.objectives import (
    CLM,
    MLM,
    OBJECTIVES,
    BARTDenoising,
    BiLM,
    DecoderDenoising,
    EncoderDecoderLM,
    Mixture,
    Objective,
    PermutationLM,
    PrefixLM,
    SalientSpanCorruption,
    SpanCorruption,
    WeightedObjective,
)

__all__ = [
    "CLM",
    "IGNORE_INDEX",
    "MLM",
    "OBJECTIVES",
    "BARTDenoising",
    "Batch",
    "BiLM",
    "CounterRNG",
    "DecoderDenoising",
    "EncoderDecoderLM",
    "Mixture",
    "Objective",
    "PermutationLM",
    "PrefixLM",
    "SalientSpanCorruption",
    "SalientSpanMasking",
    "SpanCorruption",
    "SpanMasking",
    "TokenMasking",
    "WeightedObjective",
    "WholeWordMasking",
]
