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
from firth.models.recurrent import CharCNNEmbedding
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
    """The parts of one of our models, under its own names, as `transformers` wants a model to be.

    `auto_class_name` is the class of `transformers` that it is opened by, `supports` says for which models.
    """

    config_class = FirthConfig
    base_model_prefix = ""
    auto_class_name = "AutoModel"
    firth_model: Model  # who knows how the parts work together; not a part itself
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
                module.__dict__["_is_hf_initialized"] = True  # as published for the family, and not again
        self.post_init()

    @classmethod
    def supports(cls, config: ModelConfig) -> bool:
        return True

    def _init_weights(self, module: nn.Module) -> None:
        """Numbers that no file has: those that are not learned, and parts that a file lacks."""
        if isinstance(module, AlibiBias):
            module.reset_slopes()
        else:
            super()._init_weights(module)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Return each tensor once, also where two modules share it."""
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
        """`inputs` are what else our own model of this shape can be called with, such as `token_type_ids`."""
        config: Any = self.config
        states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        seen = config.output_attentions if output_attentions is None else output_attentions
        place = str(self.name_or_path or "")
        if isinstance(self.embed, CharCNNEmbedding) and self.embed.lexicon is None and place and Path(place).is_dir():
            self.embed.set_tokenizer(load_tokenizer(place))
        if config.is_encoder_decoder and inputs.get("decoder_input_ids") is None and labels is not None:
            inputs["decoder_input_ids"] = self.shift_labels_right(labels)
        found = self.firth_model(
            input_ids,
            attention_mask,
            labels=labels,
            output_hidden_states=bool(states) or self.auto_class_name == "AutoModel",
            output_attentions=bool(seen),
            **{name: value for name, value in inputs.items() if value is not None},
        )
        answer = self.to_hf_output(found, bool(states))
        return answer if return_dict or (return_dict is None and config.return_dict) else answer.to_tuple()

    def shift_labels_right(self, labels: Tensor) -> Tensor:
        """What a decoder reads when it is to answer this."""
        pad, start = self.config.pad_token_id or 0, self.config.decoder_start_token_id or 0
        return nn.functional.pad(labels.masked_fill(labels == LABEL_IGNORE_INDEX, pad), (1, -1), value=start)

    def to_hf_output(self, output: ModelOutput, with_hidden_states: bool) -> Any:
        """What our model says, in the words of `transformers`."""
        raise NotImplementedError


class FirthModel(FirthPreTrainedModel):
    """The body of any checkpoint; its head comes along, so that nothing is lost on saving."""

    def to_hf_output(self, output: ModelOutput, with_hidden_states: bool) -> Any:
        assert output.hidden_states is not None
        last, kept = output.hidden_states[-1], output.hidden_states if with_hidden_states else None
        if not self.config.is_encoder_decoder:
            return modeling_outputs.BaseModelOutput(
                last_hidden_state=last, hidden_states=kept, attentions=output.attentions
            )
        return modeling_outputs.Seq2SeqModelOutput(
            last_hidden_state=last, decoder_hidden_states=kept, **seq2seq_output_fields(output)
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
        kept = output.hidden_states
        return modeling_outputs.Seq2SeqLMOutput(
            output.loss, output.logits, decoder_hidden_states=kept, **seq2seq_output_fields(output)
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
    """What two stacks leave, by the names of `transformers`."""
    return {
        "decoder_attentions": output.attentions,
        "cross_attentions": output.cross_attentions,
        "encoder_last_hidden_state": output.encoder_last_hidden_state,
        "encoder_attentions": output.encoder_attentions,
    }


FIRTH_HEAD_MODELS = (FirthForMaskedLM, FirthForCausalLM, FirthForSeq2SeqLM, FirthForSequenceClassification)


def auto_class_for_config(config: ModelConfig) -> str:
    """The class of `transformers` that opens a checkpoint of this model; `AutoModel` (the body) where no other does."""
    return next(
        (kind.auto_class_name for kind in FIRTH_HEAD_MODELS if kind.supports(config)), FirthModel.auto_class_name
    )


transformers.AutoConfig.register(FIRTH_MODEL_TYPE, FirthConfig, exist_ok=True)
for kind in (FirthModel, *FIRTH_HEAD_MODELS):
    getattr(transformers, kind.auto_class_name).register(FirthConfig, kind, exist_ok=True)
