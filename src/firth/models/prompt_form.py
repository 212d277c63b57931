"""The form in which a model reads a prompt and writes after it: that of its pretraining objective.

A model continues a text well only in the form that it was trained on. `config.json` records the objective, and
`read_config` turns it into `ModelConfig.prompt_form`, by which generation, fine-tuning and evaluation build their
inputs and their attention masks:

    causal             every token attends to earlier ones                          CLM (GPT)
    prefix             the prompt attends to all of itself, the rest causally       PrefixLM (T5, section 3.2.1)
    denoising          prompt <extra_id_0> </s> <extra_id_0>, then the answer       DecoderDenoising (T5, section 3.2.4)
    prefix-denoising   the same; the prompt attends to all of itself                DecoderDenoising, prefix=true
    masked             as prefix; each new token is predicted at a [MASK]           MLM, visibility="prefix" (UniLM)
    next-token         as causal, in an encoder too; a [MASK] is predicted at the   MaskedNextToken (GPT-BERT)
                       position before it, with attention to all tokens
    causal-encoder     as causal, in an encoder; a [MASK] is predicted at its own   MLMAndCLM
                       position, with attention to all tokens

A denoising decoder thus fills a blank at the end of the prompt. UniLM (Dong et al. 2019, section 2.3) is an encoder:
its sequence-to-sequence part reads [CLS] prompt with token type 0, and the rest, causal, with token type 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from firth.core.serialization import TYPE_KEY
from firth.models.config import PromptForm

# In a mixture the first of these that one part was trained on: whatever continues a text before what fills blanks.
PROMPT_FORM_ORDER: tuple[PromptForm, ...] = (
    "prefix",
    "next-token",
    "causal-encoder",
    "causal",
    "prefix-denoising",
    "denoising",
    "masked",
)


def prompt_form_of_objective(objective: Any) -> PromptForm:
    """Return the form for an objective as `config.json` records it; "causal" for any other (None: not recorded)."""
    forms = {form for part in single_objectives(objective) if (form := single_prompt_form(part)) is not None}
    return next((form for form in PROMPT_FORM_ORDER if form in forms), "causal")


def single_objectives(objective: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objective, or the parts of a mixture."""
    if not isinstance(objective, Mapping):
        return
    if objective.get(TYPE_KEY) != "Mixture":
        yield objective
        return
    for part in objective.get("parts", ()):
        yield from single_objectives(part.get("objective") if isinstance(part, Mapping) else None)


def single_prompt_form(objective: Mapping[str, Any]) -> PromptForm | None:
    kind = objective.get(TYPE_KEY)
    if kind == "DecoderDenoising":
        return "prefix-denoising" if objective.get("prefix") else "denoising"
    if kind == "MLM":
        return "masked" if objective.get("visibility") == "prefix" else None
    forms: dict[str, PromptForm] = {
        "PrefixLM": "prefix",
        "CLM": "causal",
        "MaskedNextToken": "next-token",
        "MLMAndCLM": "causal-encoder",
        "RTDMLMAndCLM": "causal-encoder",
    }
    return forms.get(str(kind))
