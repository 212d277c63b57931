"""Models: configs, presets, architectures, heads and Hugging Face checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firth.core.lazy import make_lazy

if TYPE_CHECKING:
    from firth.models.backbone import Stack
    from firth.models.config import (
        AuxiliaryLM,
        ClassificationHead,
        DiscriminatorHead,
        EmbeddingHead,
        Extra,
        Head,
        LMHead,
        ModelConfig,
        MultipleChoiceHead,
        MultiTaskHead,
        NamedHead,
        RegressionHead,
        SpanHead,
        TaskHead,
        TokenClassificationHead,
        with_extras,
    )
    from firth.models.distill import check_distillation_pair, distillation_losses, init_from_teacher
    from firth.models.distill_config import MOBILEBERT_DISTILLATION, Distillation, KnowledgeTransfer
    from firth.models.hf.checkpoint import (
        load_generation_tokens,
        load_model,
        load_weights,
        make_model_from_tensors,
        write_model,
    )
    from firth.models.hf.config_io import (
        FIRTH_MODEL_TYPE,
        from_hf_config,
        hf_model_type,
        read_config,
        to_hf_config,
        with_vocabulary,
    )
    from firth.models.hf.tensors import read_tensors
    from firth.models.knowledge_transfer import TransferLoss, check_transfer_pair
    from firth.models.model import (
        Decoder,
        Encoder,
        EncoderDecoder,
        ForcedTokens,
        Model,
        ModelOutput,
        get_eos_token_ids,
        get_forced_tokens,
        make_model,
    )
    from firth.models.parameters import count_parameters
    from firth.models.ppmi import ppmi_embeddings, set_token_embeddings, warm_start_embeddings
    from firth.models.presets import (
        ARCHITECTURE_FAMILIES,
        FAMILY_DESCRIPTIONS,
        PRESETS,
        get_preset,
        is_preset,
        shaped_model,
    )
    from firth.models.resize_vocab import grow_embeddings, grow_vocabulary
    from firth.models.scalar_mix import ScalarMix
    from firth.models.sizes import flops_per_token
    from firth.models.task_heads import head_for_task
    from firth.models.template import make_prompt_suffix, make_sequence_template

__all__ = [
    "ARCHITECTURE_FAMILIES",
    "FAMILY_DESCRIPTIONS",
    "FIRTH_MODEL_TYPE",
    "MOBILEBERT_DISTILLATION",
    "PRESETS",
    "AuxiliaryLM",
    "ClassificationHead",
    "Decoder",
    "DiscriminatorHead",
    "Distillation",
    "EmbeddingHead",
    "Encoder",
    "EncoderDecoder",
    "Extra",
    "ForcedTokens",
    "Head",
    "KnowledgeTransfer",
    "LMHead",
    "Model",
    "ModelConfig",
    "ModelOutput",
    "MultiTaskHead",
    "MultipleChoiceHead",
    "NamedHead",
    "RegressionHead",
    "ScalarMix",
    "SpanHead",
    "Stack",
    "TaskHead",
    "TokenClassificationHead",
    "TransferLoss",
    "check_distillation_pair",
    "check_transfer_pair",
    "count_parameters",
    "distillation_losses",
    "flops_per_token",
    "from_hf_config",
    "get_eos_token_ids",
    "get_forced_tokens",
    "get_preset",
    "grow_embeddings",
    "grow_vocabulary",
    "head_for_task",
    "hf_model_type",
    "init_from_teacher",
    "is_preset",
    "load_generation_tokens",
    "load_model",
    "load_weights",
    "make_model",
    "make_model_from_tensors",
    "make_prompt_suffix",
    "make_sequence_template",
    "ppmi_embeddings",
    "read_config",
    "read_tensors",
    "set_token_embeddings",
    "shaped_model",
    "to_hf_config",
    "warm_start_embeddings",
    "with_extras",
    "with_vocabulary",
    "write_model",
]

make_lazy(__name__)
