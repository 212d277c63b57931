"""Rows of token ids to batches of inputs and labels: noise mask, corruption, labels."""

from firth.objectives.batch import IGNORE_INDEX, Batch
from firth.objectives.causal import CLM, BiLM, PermutationLM, PrefixLM, SequenceAutoencoder
from firth.objectives.clm_then_mlm import CLMThenMLM
from firth.objectives.counter_rng import CounterRNG
from firth.objectives.masked import MLM
from firth.objectives.masked_next_token import MaskedNextToken, MLMAndCLM, RTDMLMAndCLM
from firth.objectives.mixture import Mixture, Objective, WeightedObjective
from firth.objectives.noise_mask import NgramMasking, SalientSpanMasking, SpanMasking, TokenMasking, WholeWordMasking
from firth.objectives.registry import OBJECTIVES, held_out_objective
from firth.objectives.seq2seq import (
    BARTDenoising,
    DecoderDenoising,
    EncoderDecoderLM,
    SalientSpanCorruption,
    SpanCorruption,
    SpanCorruptionAndMLM,
)

__all__ = [
    "CLM",
    "IGNORE_INDEX",
    "MLM",
    "OBJECTIVES",
    "BARTDenoising",
    "Batch",
    "BiLM",
    "CLMThenMLM",
    "CounterRNG",
    "DecoderDenoising",
    "EncoderDecoderLM",
    "MLMAndCLM",
    "MaskedNextToken",
    "Mixture",
    "NgramMasking",
    "Objective",
    "PermutationLM",
    "PrefixLM",
    "RTDMLMAndCLM",
    "SalientSpanCorruption",
    "SalientSpanMasking",
    "SequenceAutoencoder",
    "SpanCorruption",
    "SpanCorruptionAndMLM",
    "SpanMasking",
    "TokenMasking",
    "WeightedObjective",
    "WholeWordMasking",
    "held_out_objective",
]
