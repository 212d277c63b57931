"""The objectives by the names that `--objective` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from firth.core.serialization import TYPE_KEY, to_dict
from firth.objectives.causal import CLM, BiLM, PermutationLM, PrefixLM, SequenceAutoencoder
from firth.objectives.clm_then_mlm import CLMThenMLM
from firth.objectives.masked import MLM
from firth.objectives.masked_next_token import MaskedNextToken, MLMAndCLM, RTDMLMAndCLM
from firth.objectives.mixture import Mixture, Objective, WeightedObjective
from firth.objectives.noise_mask import NgramMasking, SalientSpanMasking, SpanMasking, WholeWordMasking
from firth.objectives.seq2seq import (
    BARTDenoising,
    DecoderDenoising,
    EncoderDecoderLM,
    SalientSpanCorruption,
    SpanCorruption,
    SpanCorruptionAndMLM,
)

UNILM = Mixture(  # Dong et al. 2019, section 2.4; without its pairs and n-gram masks
    (
        WeightedObjective(MLM(), 1 / 3),
        WeightedObjective(MLM(visibility="prefix"), 1 / 3),
        WeightedObjective(MLM(visibility="forward"), 1 / 6),
        WeightedObjective(MLM(visibility="backward"), 1 / 6),
    )
)
UL2_DENOISERS = Mixture(  # after Tay et al. 2023 (UL2), table 1: regular, extreme and sequential denoising
    (
        WeightedObjective(SpanCorruption(0.15, 3.0)),
        WeightedObjective(SpanCorruption(0.15, 8.0)),
        WeightedObjective(SpanCorruption(0.5, 3.0)),
        WeightedObjective(SpanCorruption(0.5, 8.0)),
        WeightedObjective(EncoderDecoderLM()),
    )
)
OBJECTIVES: dict[str, Objective] = {
    "clm": CLM(),
    "autoencoder": SequenceAutoencoder(),
    "mlm": MLM(),
    "whole-word": MLM(masking=WholeWordMasking()),
    "span": MLM(masking=SpanMasking(), targets="boundary"),
    "salient": MLM(masking=SalientSpanMasking()),
    "static": MLM(num_static_masks=10),
    "nsp": MLM(pair="next"),
    "sop": MLM(pair="order"),
    "albert": MLM(masking=NgramMasking(), pair="order"),
    "tlm": MLM(pair="translation"),
    "rtd": MLM(mask_prob=0.85, random_prob=0.0, targets="replaced"),
    "unilm": UNILM,
    "masked-next-token": MaskedNextToken(),
    "mlm-and-clm": MLMAndCLM(mlm=MLM(rate=0.3, rate_end=0.15)),
    "rtd-mlm-and-clm": RTDMLMAndCLM(mlm=MLM(rate=0.3, rate_end=0.15)),
    "clm-then-mlm": CLMThenMLM(),
    "bilm": BiLM(),
    "permutation-lm": PermutationLM(),
    "prefix-lm": PrefixLM(),
    "encoder-decoder-lm": EncoderDecoderLM(),
    "span-corruption": SpanCorruption(),
    "span-corruption-and-mlm": SpanCorruptionAndMLM(),
    "salient-spans": SalientSpanCorruption(),
    "lm-denoising": DecoderDenoising(),
    "prefix-lm-denoising": DecoderDenoising(prefix=True),
    "bart": BARTDenoising(),
    "denoisers": UL2_DENOISERS,
}


def name_objective(objective: Objective) -> str:
    """Return the name to show: the registered one, whatever the share of masked rows; the type for other settings.

    >>> name_objective(replace(OBJECTIVES["mlm-and-clm"], masked_share=0.9)), name_objective(MLM(rate=0.25))
    ('mlm-and-clm', 'MLM')
    """
    if isinstance(objective, MaskedNextToken):
        objective = replace(objective, masked_share=type(objective)().masked_share)
    return describe_objective(objective)["name"] or type(objective).__name__


def describe_objective(objective: Objective) -> dict[str, Any]:
    """Return the objective as stored in a checkpoint; `name` is None for modified settings."""
    name = next((name for name, known in OBJECTIVES.items() if known == objective), None)
    return {"name": name, TYPE_KEY: type(objective).__name__, **to_dict(objective)}


def name_stored_objective(stored: Mapping[str, Any]) -> str:
    """Return the name to show, as `name_objective`, of an objective in a recipe.yaml."""

    def settings(mapping: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in mapping.items() if key not in ("name", "masked_share")}

    known = {name: settings(describe_objective(objective)) for name, objective in OBJECTIVES.items()}
    return next((name for name, own in known.items() if own == settings(stored)), str(stored.get(TYPE_KEY, "")))


def held_out_objective(objective: Objective) -> Objective:
    """Return the objective of held-out losses: the part of a mixed objective by which its runs compare with others."""
    if isinstance(objective, SpanCorruptionAndMLM):
        return objective.span_corruption
    return objective.without_detection if isinstance(objective, RTDMLMAndCLM) else objective
