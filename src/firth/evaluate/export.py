"""Export a checkpoint as a Hugging Face folder, and compare its logits with those that `transformers` computes.

The comparison runs both models in float32 on the same random ids, one row half padded, and returns the largest
absolute difference of a logit. Differences above 1e-3 are not rounding: a setting or a tensor was converted wrongly.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from firth.core.console import say
from firth.core.errors import UserError
from firth.core.files import MODEL_CARD_FILE, atomic_folder
from firth.models import (
    FIRTH_MODEL_TYPE,
    ClassificationHead,
    DiscriminatorHead,
    EmbeddingHead,
    Encoder,
    Model,
    ModelConfig,
    MultipleChoiceHead,
    RegressionHead,
    SpanHead,
    TaskHead,
    TokenClassificationHead,
    hf_model_type,
    load_model,
    write_model,
)
from firth.tasks import TASK_FILE

HF_TASK_CLASSES = {
    ClassificationHead: "AutoModelForSequenceClassification",
    RegressionHead: "AutoModelForSequenceClassification",
    MultipleChoiceHead: "AutoModelForMultipleChoice",
    TokenClassificationHead: "AutoModelForTokenClassification",
    SpanHead: "AutoModelForQuestionAnswering",
    EmbeddingHead: "AutoModel",
}


# files beside the weights: task, model card, sentence-transformers
EXPORTED_EXTRA_FILES = (TASK_FILE, MODEL_CARD_FILE, "modules.json", "sentence_bert_config.json", "1_Pooling")


def write_export(checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint without its training state, with its task file and model card."""
    model = load_model(checkpoint)
    with atomic_folder(folder) as temporary:
        write_model(model, temporary)
        for name in EXPORTED_EXTRA_FILES:
            if (checkpoint / name).is_dir():
                shutil.copytree(checkpoint / name, temporary / name)
            elif (checkpoint / name).is_file():
                shutil.copyfile(checkpoint / name, temporary / name)


def max_logit_difference(folder: Path) -> float:
    """Largest absolute difference between our logits and those of `transformers` for the same folder and random ids."""
    try:
        import transformers
    except ImportError:
        raise UserError("--check needs transformers: pip install 'firth[hf]'.") from None
    ours = load_model(folder)
    own = hf_model_type(ours.config, ours.tokenizer.vocab if ours.tokenizer is not None else None) == FIRTH_MODEL_TYPE
    kind = _registered_auto_class(ours) if own else hf_auto_class(ours.config)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    theirs = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    length = min(64, ours.config.max_length or 64)
    inputs = {"input_ids": torch.randint(5, ours.config.vocab_size, (4, length))}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    # XLNet classifies by the last token, so its rows are padded on the left.
    left = ours.config.architecture == "encoder" and ours.config.pools_last_token
    inputs["attention_mask"][1, slice(0, length // 2) if left else slice(length // 2, None)] = 0
    head = ours.config.head
    if isinstance(head, ClassificationHead | RegressionHead) and ours.config.architecture == "decoder" and not own:
        inputs["input_ids"][1, length // 2 :] = theirs.config.pad_token_id
    uses_decoder = ours.config.architecture == "encoder-decoder" and not ours.config.head_reads_encoder
    if ours.config.has_decoder and not uses_decoder and not own:
        theirs = theirs.get_encoder()
    if uses_decoder:
        inputs["decoder_input_ids"] = torch.randint(5, ours.config.vocab_size, (4, 16))
    if uses_decoder and isinstance(head, TaskHead) and not own:  # BART: the decoder reads the text again, up to </s>
        inputs["attention_mask"][:] = 1
        inputs["input_ids"][inputs["input_ids"] == theirs.config.eos_token_id] -= 1
        inputs["input_ids"][:, -1] = theirs.config.eos_token_id
        inputs["decoder_input_ids"] = inputs["input_ids"].roll(1, 1)
    if isinstance(head, MultipleChoiceHead) and not own:
        inputs = {name: value.unflatten(0, (2, 2)) for name, value in inputs.items()}
    with torch.no_grad():
        if own:
            outputs = ours(**inputs, output_hidden_states=True)
            logits = outputs.hidden_states[-1] if kind == "AutoModel" else outputs.logits
            hf_logits = theirs(**inputs)[0]
        else:
            logits, hf_logits = _our_logits(ours, inputs), _hf_logits(theirs(**inputs))
        difference = (logits - hf_logits).abs()
    if not isinstance(head, ClassificationHead | RegressionHead | MultipleChoiceHead) and not uses_decoder:
        difference = difference[inputs["attention_mask"].bool()]  # logits at padding are undefined
    return float(difference.max())


def _our_logits(model: Model, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The output that `transformers` has too: for ELECTRA the discriminator's logits."""
    if isinstance(model.config.head, EmbeddingHead):  # `transformers` has the backbone alone
        return model(**inputs, output_hidden_states=True).hidden_states[-1]
    if not isinstance(model, Encoder) or model.generator is None:
        return model(**inputs).logits
    states = model(**inputs, output_hidden_states=True).hidden_states
    return model.generator.discriminator_head(states[-1])


def _hf_logits(outputs: Any) -> torch.Tensor:
    if "start_logits" in outputs:
        return torch.stack([outputs.start_logits, outputs.end_logits], -1)
    return outputs.logits if "logits" in outputs else outputs.last_hidden_state


def _registered_auto_class(model: Model) -> str:
    """The class that opens an architecture that only `firth.hf` registers."""
    from firth import hf

    kind = hf.auto_class_for_config(model.config)
    say(f"transformers has no such architecture: it opens with {kind} after `import firth.hf`.")
    return kind


def hf_auto_class(config: ModelConfig) -> str:
    """The class of `transformers` that opens a model of one of its families."""
    if isinstance(config.head, EmbeddingHead) and config.architecture == "encoder-decoder" and not config.has_decoder:
        return "T5EncoderModel"
    if isinstance(config.head, TaskHead):
        return HF_TASK_CLASSES[type(config.head)]
    if isinstance(config.head, DiscriminatorHead) or config.get_extra("generator") is not None:
        return "AutoModelForPreTraining"
    if config.family == "xlnet":
        return "AutoModelForCausalLM"
    return {
        "encoder": "AutoModelForMaskedLM",
        "decoder": "AutoModelForCausalLM",
        "encoder-decoder": "AutoModelForSeq2SeqLM",
    }[config.architecture]
