"""Export a checkpoint as a Hugging Face folder, and compare its logits and token ids with those of `transformers`.

The comparison runs both models in float32 on the same random ids, one row half padded, and returns the largest
absolute difference of a logit. Differences above 1e-3 are not rounding: a setting or a tensor was converted wrongly.

Two things cannot be compared, and the check says so. `transformers` has no enhanced mask decoder (DeBERTa, He et al.
2021, section 3.2): it computes the logits of the backbone and the LM head. A model with `model_type` firth runs Firth's
own code in `transformers` too (`firth.hf`), so that an equal result proves only that the files are complete.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from firth.core.console import say
from firth.core.errors import UserError
from firth.core.files import MODEL_CARD_FILE, atomic_folder, copy_file, write_json
from firth.evaluate.token_check import compare_token_ids
from firth.models import (
    FIRTH_MODEL_TYPE,
    ClassificationHead,
    DiscriminatorHead,
    EmbeddingHead,
    Encoder,
    Model,
    ModelConfig,
    MultipleChoiceHead,
    MultiTaskHead,
    RegressionHead,
    SpanHead,
    TaskHead,
    TokenClassificationHead,
    hf_model_type,
    load_model,
    read_config,
    write_model,
)
from firth.models.config import without_detector
from firth.models.hf.checkpoint import with_special_token_template
from firth.models.hf.registry import FAMILY_LAYOUTS
from firth.models.task_heads import MultiTaskHeadModule
from firth.objectives import Batch
from firth.tasks import TASK_FILE
from firth.tasks.embed import SENTENCE_TRANSFORMERS_FILES, write_sentence_transformers_files
from firth.tasks.finetuned import select_task
from firth.tasks.recipe import read_task_file
from firth.text.open_text import import_optional

HF_TASK_CLASSES = {
    ClassificationHead: "AutoModelForSequenceClassification",
    RegressionHead: "AutoModelForSequenceClassification",
    MultipleChoiceHead: "AutoModelForMultipleChoice",
    TokenClassificationHead: "AutoModelForTokenClassification",
    SpanHead: "AutoModelForQuestionAnswering",
    EmbeddingHead: "AutoModel",
}


# files beside the weights: task, model card, sentence-transformers
EXPORTED_EXTRA_FILES = (TASK_FILE, MODEL_CARD_FILE, *SENTENCE_TRANSFORMERS_FILES)


def write_export(checkpoint: Path, folder: Path, task: str = "") -> None:
    """Write a checkpoint without its training state, with its task file and model card.

    `task` names one of several tasks with heads: the export is a model for this task alone.
    """
    model = load_for_export(checkpoint)
    facts = keep_one_head(model, task, checkpoint) if task else None
    with atomic_folder(folder) as temporary:
        write_model(model, temporary)
        if facts is not None:  # the card and task.json are about all tasks
            write_json(temporary / TASK_FILE, facts)
            return
        for name in EXPORTED_EXTRA_FILES:
            if (checkpoint / name).is_file() and not (name == MODEL_CARD_FILE and (folder / name).is_file()):
                copy_file(checkpoint / name, temporary / name, checkpoint)  # a card that is there may have been edited
        head = read_config(checkpoint).head
        if isinstance(head, EmbeddingHead) and not (checkpoint / "modules.json").is_file():
            write_sentence_transformers_files(model, head.max_length or model.config.max_length or 512, temporary)


def keep_one_head(model: Model, task: str, checkpoint: Path) -> dict[str, Any]:
    """Leave a model the head of one task only; return the task.json of that task."""
    facts = read_task_file(checkpoint)
    if not isinstance(model.config.head, MultiTaskHead) or not isinstance(model.head, MultiTaskHeadModule):
        raise UserError(f"{checkpoint} has one head: leave out --task.")
    own = select_task(facts, task, str(checkpoint))
    model.config, model.head = replace(model.config, head=model.config.head[task]), model.head[task]
    chain = {"chain": facts["chain"]} if "chain" in facts else {}
    return {name: value for name, value in own.items() if name != "head"} | chain


def load_for_export(checkpoint: Path) -> Model:
    """Load a checkpoint without what pretraining alone needs, if the family in `transformers` has no such parts.

    That is a detector of replaced tokens, or ELECTRA's generator. `transformers` has a detection head for ELECTRA
    alone, so that other families (DeBERTa version 3) are exported as their encoder. Its embeddings are those that the
    discriminator read.
    """
    config = read_config(checkpoint)
    encoder = encoder_without_generator(config)
    if encoder is None:
        smaller = without_detector(config)
        return load_model(checkpoint) if smaller == config else load_model(checkpoint, config.head, smaller.extras)
    model = load_model(checkpoint, head=encoder.head)
    if model.tokenizer is not None:
        model.tokenizer = with_special_token_template(model.tokenizer, config)
    say(
        f"transformers has no {hf_model_type(encoder)} with a generator or a detection head: the export is the encoder "
        f"alone, for AutoModel. {checkpoint} keeps both."
    )
    return model


def encoder_without_generator(config: ModelConfig) -> ModelConfig | None:
    """Return the encoder as which a model with a generator is exported; None for other models."""
    encoder = replace(config, head=EmbeddingHead("mean"), extras=())
    has_own_type = hf_model_type(config) == FIRTH_MODEL_TYPE
    can_leave_it_out = config.get_extra("generator") is not None and hf_model_type(encoder) != FIRTH_MODEL_TYPE
    return encoder if has_own_type and can_leave_it_out else None


class ExportCheck(NamedTuple):
    """The largest difference of a logit, the other side of the comparison, and texts with other token ids.

    `differing_texts` are those of `token_check.py` of which `transformers` makes other ids; None if it has no such
    tokenizer.
    `mask_decoder_difference` is that at masks between the logits with DeBERTa's enhanced mask decoder and those of
    `transformers`; None for models without one.
    """

    max_difference: float
    compared_with: str
    differing_texts: list[str] | None = None
    mask_decoder_difference: float | None = None


def import_transformers() -> Any:
    """Import `transformers`. Call this before anything is written: the check cannot run without it."""
    return import_optional("transformers", "--check")


def compare_with_transformers(folder: Path) -> ExportCheck:
    """Compute the logits of an exported folder here and in `transformers`, for the same random ids."""
    transformers = import_transformers()
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
    finds_last_by_padding = ours.config.architecture == "decoder" or ours.config.head_reads_encoder
    if isinstance(head, ClassificationHead | RegressionHead) and finds_last_by_padding and not own:
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
    texts = compare_token_ids(ours.tokenizer, folder)
    if own:
        say(
            "This is no independent check: firth.hf runs Firth's own code inside of transformers. It shows only that "
            "the exported files are complete."
        )
        return ExportCheck(float(difference.max()), f"{kind} of firth.hf (Firth's own code)", texts)
    return ExportCheck(float(difference.max()), f"{kind} of transformers", texts, mask_decoder_difference(ours, theirs))


@torch.no_grad()
def mask_decoder_difference(ours: Model, theirs: Any) -> float | None:
    """Return the largest difference at masks between our mask decoder's logits and those of `transformers`."""
    if ours.config.get_extra("decoder") is None or ours.tokenizer is None:
        return None
    input_ids = torch.randint(5, ours.config.vocab_size, (4, min(64, ours.config.max_length or 64)))
    position_BK = torch.arange(0, input_ids.shape[1], 8).expand(4, -1)
    input_ids.scatter_(1, position_BK, ours.tokenizer.vocab.mask or 0)
    decoded = ours.logits(Batch(input_ids, target_positions=position_BK))
    difference = float((decoded - theirs(input_ids).logits[:, ::8]).abs().max())
    say(
        "transformers has no enhanced mask decoder: max_difference is that of the path without it, backbone and LM "
        "head. Pretraining, `firth fill` and pseudo-likelihoods use the decoder: their logits at masks differ from "
        f"those of transformers by up to {difference:.2g}."
    )
    return difference


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
        return FAMILY_LAYOUTS[config.family].base_architecture
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
