"""`import firth.hf` makes `transformers` open the checkpoints that none of its own families describe.

Such a checkpoint has the `model_type` firth. Afterwards `AutoModel...from_pretrained(folder)` opens it with the same
logits, by the `AutoModelFor...` of its architecture and head (`auto_class_for_config`). `firth.load` opens its files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn

from firth.core.errors import UserError
from firth.models import (
    FIRTH_MODEL_TYPE,
    ClassificationHead,
    LMHead,
    Model,
    ModelConfig,
    ModelOutput,
    from_hf_config,
    make_model,
)
from firth.models.embeddings import InputEmbedding
from firth.models.heads import LABEL_IGNORE_INDEX
from firth.models.hf.convert import unique_state_dict
from firth.models.position.bias import AlibiBias
from firth.models.recurrent.elmo import CharCNNEmbedding
from firth.tokens import load_tokenizer

modeling_outputs: Any = transformers.modeling_outputs


class FirthConfig(transformers.PreTrainedConfig):
    """Our own config.json: `firth` holds the whole ModelConfig."""

    model_type = FIRTH_MODEL_TYPE
    firth: dict[str, Any] | None = None
    use_cache: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.firth is not None:
            model = self.model_config
            self.vocab_size, self.hidden_size = model.vocab_size, model.dim
            self.num_hidden_layers, self.num_attention_heads = model.num_layers, model.num_heads
            self.is_encoder_decoder = model.architecture == "encoder-decoder"
            if isinstance(model.head, ClassificationHead):
                kwargs["id2label"] = dict(enumerate(model.head.names))
                kwargs["label2id"] = {name: i for i, name in enumerate(model.head.names)}
        super().__post_init__(**kwargs)

    @property
    def model_config(self) -> ModelConfig:
        return from_hf_config({"model_type": FIRTH_MODEL_TYPE, FIRTH_MODEL_TYPE: self.firth})


class FirthPreTrainedModel(transformers.PreTrainedModel):
    """A Firth model as a `PreTrainedModel`; its modules keep their names.

    `auto_class_name` is the Auto class of `transformers` that opens it; `supports` says which configs it takes.
    """

    config_class = FirthConfig
    base_model_prefix = ""
    auto_class_name = "AutoModel"
    firth_model: Model  # runs the modules; not a registered submodule
    embed: InputEmbedding

    def __init__(self, config: FirthConfig) -> None:
        super().__init__(config)
        if not self.supports(config.model_config):
            raise UserError(
                f"This checkpoint is opened by {auto_class_for_config(config.model_config)}, "
                f"not by {self.auto_class_name}."
            )
        model = make_model(config.model_config)
        for name, part in model.named_children():
            self.add_module(name, part)
        self.__dict__["firth_model"] = model
        if self.device.type != "meta":
            for module in self.modules():
                module.__dict__["_is_hf_initialized"] = True  # make_model has initialised it
        self.post_init()

    @classmethod
    def supports(cls, config: ModelConfig) -> bool:
        return True

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise buffers that no file holds, and modules that a file lacks."""
        if isinstance(module, AlibiBias):
            module.reset_slopes()
        else:
            super()._init_weights(module)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save each tensor once, also where two modules share it."""
        kwargs.setdefault("state_dict", unique_state_dict(self.firth_model))
        super().save_pretrained(save_directory, *args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed.tokens

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **inputs: Any,
    ) -> Any:
        """Return the output class of `transformers`; `inputs` are further arguments of `Model.forward`."""
        config: Any = self.config
        states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        attentions = config.output_attentions if output_attentions is None else output_attentions
        folder = str(self.name_or_path or "")
        if isinstance(self.embed, CharCNNEmbedding) and self.embed.lexicon is None and folder and Path(folder).is_dir():
            self.embed.set_tokenizer(load_tokenizer(folder))
        if config.is_encoder_decoder and inputs.get("decoder_input_ids") is None and labels is not None:
            inputs["decoder_input_ids"] = self.shift_labels_right(labels)
        model_output = self.firth_model(
            input_ids,
            attention_mask,
            labels=labels,
            output_hidden_states=bool(states) or self.auto_class_name == "AutoModel",
            output_attentions=bool(attentions),
            **{name: value for name, value in inputs.items() if value is not None},
        )
        output = self.to_hf_output(model_output, bool(states))
        return output if return_dict or (return_dict is None and config.return_dict) else output.to_tuple()

    def shift_labels_right(self, labels: Tensor) -> Tensor:
        """Return the decoder's input for these labels: the start token, then all labels but the last."""
        pad, start = self.config.pad_token_id or 0, self.config.decoder_start_token_id or 0
        return nn.functional.pad(labels.masked_fill(labels == LABEL_IGNORE_INDEX, pad), (1, -1), value=start)

    def to_hf_output(self, output: ModelOutput, with_hidden_states: bool) -> Any:
        """Return our output as the output class of `transformers`."""
        raise NotImplementedError


class FirthModel(FirthPreTrainedModel):
    """The backbone of any checkpoint; it keeps the head, so that saving loses nothing."""

    def to_hf_output(self, output: ModelOutput, with_hidden_states: bool) -> Any:
        assert output.hidden_states is not None
        last, hidden_states = output.hidden_states[-1], output.hidden_states if with_hidden_states else None
        if not self.config.is_encoder_decoder:
            return modeling_outputs.BaseModelOutput(
                last_hidden_state=last, hidden_states=hidden_states, attentions=output.attentions
            )
        return modeling_outputs.Seq2SeqModelOutput(
            last_hidden_state=last, decoder_hidden_states=hidden_states, **seq2seq_output_fields(output)
        )


class FirthForMaskedLM(FirthPreTrainedModel):
    auto_class_name = "AutoModelForMaskedLM"

    @classmethod
    def supports(cls, config: ModelConfig) -> bool:
        return config.architecture == "encoder" and isinstance(config.head, LMHead)

    def to_hf_output(self, output: ModelOutput, with_hidden_states: bool) -> Any:
        return modeling_outputs.MaskedLMOutput(output.loss, output.logits, output.hidden_states, output.attentions)


class FirthForCausalLM(FirthPreTrainedModel, transformers.GenerationMixin):
    """Generation without a KV cache: each new token runs the whole text again."""

    auto_class_name = "AutoModelForCausalLM"

    @classmethod
    def supports(cls, config: ModelConfig) -> bool:
        return config.architecture == "decoder" and isinstance(config.head, LMHead)

    def prepare_inputs_for_generation(self, input_ids: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": kwargs.get("attention_mask")}

    def to_hf_output(self, output: ModelOutput, with_hidden_states: bool) -> Any:
        return modeling_outputs.CausalLMOutput(output.loss, output.logits, output.hidden_states, output.attentions)


class FirthForSeq2SeqLM(FirthPreTrainedModel):
    auto_class_name = "AutoModelForSeq2SeqLM"

    @classmethod
    def supports(cls, config: ModelConfig) -> bool:
        return config.architecture == "encoder-decoder" and isinstance(config.head, LMHead)

    def to_hf_output(self, output: ModelOutput, with_hidden_states: bool) -> Any:
        hidden_states = output.hidden_states
        return modeling_outputs.Seq2SeqLMOutput(
            output.loss, output.logits, decoder_hidden_states=hidden_states, **seq2seq_output_fields(output)
        )


class FirthForSequenceClassification(FirthPreTrainedModel):
    auto_class_name = "AutoModelForSequenceClassification"

    @classmethod
    def supports(cls, config: ModelConfig) -> bool:
        return isinstance(config.head, ClassificationHead)

    def to_hf_output(self, output: ModelOutput, with_hidden_states: bool) -> Any:
        return modeling_outputs.SequenceClassifierOutput(
            output.loss, output.logits, output.hidden_states, output.attentions
        )


def seq2seq_output_fields(output: ModelOutput) -> dict[str, Any]:
    """Return the fields that both seq2seq outputs of `transformers` have."""
    return {
        "decoder_attentions": output.attentions,
        "cross_attentions": output.cross_attentions,
        "encoder_last_hidden_state": output.encoder_last_hidden_state,
        "encoder_attentions": output.encoder_attentions,
    }


FIRTH_HEAD_MODELS = (FirthForMaskedLM, FirthForCausalLM, FirthForSeq2SeqLM, FirthForSequenceClassification)


def auto_class_for_config(config: ModelConfig) -> str:
    """Return the Auto class that opens a checkpoint of this model; default: `AutoModel` (the backbone)."""
    return next(
        (kind.auto_class_name for kind in FIRTH_HEAD_MODELS if kind.supports(config)), FirthModel.auto_class_name
    )


transformers.AutoConfig.register(FIRTH_MODEL_TYPE, FirthConfig, exist_ok=True)
for kind in (FirthModel, *FIRTH_HEAD_MODELS):
    getattr(transformers, kind.auto_class_name).register(FirthConfig, kind, exist_ok=True)
