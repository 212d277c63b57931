"""Does the checkpoint open in `transformers` with the same numbers?"""

from __future__ import annotations

from pathlib import Path

import torch

from firth.errors import UserError
from firth.models import OWN, Classes, Encoder, Model, Verdict, family_of, load_model


def largest_difference(folder: Path) -> float:
    """The largest difference between our logits and those of `transformers` on the same folder, over random ids."""
    try:
        import transformers
    except ImportError:
        raise UserError("--check needs transformers: pip install 'firth[hf]'.") from None
    ours = load_model(folder)
    if family_of(ours.config, ours.tokenizer.vocab if ours.tokenizer is not None else None) == OWN:
        raise UserError(f"{folder}: transformers has no such architecture; open it with firth.load.")
    transformers.logging.set_verbosity_error()
    kind = _auto_class(ours)
    theirs = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    length = min(64, ours.config.max_length or 64)
    inputs = {"input_ids": torch.randint(5, ours.config.vocab_size, (4, length))}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    left = ours.config.shape == "encoder" and ours.config.answers_last  # XLNet's class is told at the very end
    inputs["attention_mask"][1, slice(0, length // 2) if left else slice(length // 2, None)] = 0
    if isinstance(ours.config.head, Classes) and ours.config.shape == "decoder":
        inputs["input_ids"][1, length // 2 :] = theirs.config.pad_token_id
    if ours.config.shape == "encoder-decoder":
        inputs["decoder_input_ids"] = torch.randint(5, ours.config.vocab_size, (4, 16))
    with torch.no_grad():
        difference = (_logits(ours, inputs) - theirs(**inputs).logits).abs()
    if not isinstance(ours.config.head, Classes) and ours.config.shape != "encoder-decoder":
        difference = difference[inputs["attention_mask"].bool()]  # what stands at padding means nothing
    return float(difference.max())


def _logits(model: Model, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What `transformers` answers with too; of a model that was trained beside a generator it has the verdict."""
    if not isinstance(model, Encoder) or model.generator is None:
        return model(**inputs).logits
    states = model(**inputs, output_hidden_states=True).hidden_states
    return model.generator.verdict(states[-1])


def _auto_class(model: Model) -> str:
    if isinstance(model.config.head, Classes):
        return "AutoModelForSequenceClassification"
    if isinstance(model.config.head, Verdict) or model.config.extra("generator") is not None:
        return "AutoModelForPreTraining"
    if model.config.family == "xlnet":
        return "AutoModelForCausalLM"
    return {
        "encoder": "AutoModelForMaskedLM",
        "decoder": "AutoModelForCausalLM",
        "encoder-decoder": "AutoModelForSeq2SeqLM",
    }[model.config.shape]
