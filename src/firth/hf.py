"""`import firth.hf` makes `transformers` open the checkpoints that none of its own families describe.

Such a checkpoint has the `model_type` firth. Afterwards `AutoModel...from_pretrained(folder)` opens it with the same
numbers, under the `AutoModelFor...` that fits its shape and its head (`auto_class`); what it saves, `firth.load` opens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn

from firth.errors import UserError
from firth.models import OWN, Classes, LMHead, Model, ModelConfig, Output, from_hf_config, make_model
from firth.models.embed import Embedding
from firth.models.heads import IGNORED
from firth.models.position import SlopeScore
from firth.models.recurrent import Spelling
from firth.models.weights import own_state
from firth.tokens import load_tokenizer

outputs: Any = transformers.modeling_outputs


class FirthConfig(transformers.PreTrainedConfig):
    """A config.json of our own: under `firth` it has all that the model is."""

    model_type = OWN
    firth: dict[str, Any] | None = None
    use_cache: bool = False

    def __post_init__(self, **more: Any) -> None:
        if self.firth is not None:
            model = self.model
            self.vocab_size, self.hidden_size = model.vocab_size, model.dim
            self.num_hidden_layers, self.num_attention_heads = model.num_layers, model.num_heads
            self.is_encoder_decoder = model.shape == "encoder-decoder"
            if isinstance(model.head, Classes):
                more["id2label"] = dict(enumerate(model.head.names))
                more["label2id"] = {name: i for i, name in enumerate(model.head.names)}
        super().__post_init__(**more)

    @property
    def model(self) -> ModelConfig:
        return from_hf_config({"model_type": OWN, OWN: self.firth})


class FirthPreTrained(transformers.PreTrainedModel):
    """The parts of one of our models, under its own names, as `transformers` wants a model to be.

    `auto` is the class of `transformers` that it is opened by, `fits` says for which models.
    """

    config_class = FirthConfig
    base_model_prefix = ""
    auto = "AutoModel"
    whole: Model  # who knows how the parts work together; not a part itself
    embed: Embedding

    def __init__(self, config: FirthConfig) -> None:
        super().__init__(config)
        if not self.fits(config.model):
            raise UserError(f"This checkpoint is opened by {auto_class(config.model)}, not by {self.auto}.")
        model = make_model(config.model)
        for name, part in model.named_children():
            self.add_module(name, part)
        self.__dict__["whole"] = model
        if self.device.type != "meta":
            for module in self.modules():
                module.__dict__["_is_hf_initialized"] = True  # as published for the family, and not again
        self.post_init()

    @classmethod
    def fits(cls, config: ModelConfig) -> bool:
        return True

    def _init_weights(self, module: nn.Module) -> None:
        """Numbers that no file has: those that are not learned, and parts that a file lacks."""
        if isinstance(module, SlopeScore):
            module.fill()
        else:
            super()._init_weights(module)

    def save_pretrained(self, save_directory: Any, *args: Any, **more: Any) -> None:
        """Each tensor once, also where two parts share it."""
        more.setdefault("state_dict", own_state(self.whole))
        super().save_pretrained(save_directory, *args, **more)

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
        if isinstance(self.embed, Spelling) and self.embed.lexicon is None and place and Path(place).is_dir():
            self.embed.read_with(load_tokenizer(place))
        if config.is_encoder_decoder and inputs.get("decoder_input_ids") is None and labels is not None:
            inputs["decoder_input_ids"] = self.begun(labels)
        found = self.whole(
            input_ids,
            attention_mask,
            labels=labels,
            output_hidden_states=bool(states) or self.auto == "AutoModel",
            output_attentions=bool(seen),
            **{name: value for name, value in inputs.items() if value is not None},
        )
        answer = self.answer(found, bool(states))
        return answer if return_dict or (return_dict is None and config.return_dict) else answer.to_tuple()

    def begun(self, labels: Tensor) -> Tensor:
        """What a decoder reads when it is to answer this."""
        pad, start = self.config.pad_token_id or 0, self.config.decoder_start_token_id or 0
        return nn.functional.pad(labels.masked_fill(labels == IGNORED, pad), (1, -1), value=start)

    def answer(self, found: Output, states: bool) -> Any:
        """What our model says, in the words of `transformers`."""
        raise NotImplementedError


class FirthModel(FirthPreTrained):
    """The body of any checkpoint; its head comes along, so that nothing is lost on saving."""

    def answer(self, found: Output, states: bool) -> Any:
        assert found.hidden_states is not None
        last, kept = found.hidden_states[-1], found.hidden_states if states else None
        if not self.config.is_encoder_decoder:
            return outputs.BaseModelOutput(last_hidden_state=last, hidden_states=kept, attentions=found.attentions)
        return outputs.Seq2SeqModelOutput(last_hidden_state=last, decoder_hidden_states=kept, **of_both(found))


class FirthForMaskedLM(FirthPreTrained):
    auto = "AutoModelForMaskedLM"

    @classmethod
    def fits(cls, config: ModelConfig) -> bool:
        return config.shape == "encoder" and isinstance(config.head, LMHead)

    def answer(self, found: Output, states: bool) -> Any:
        return outputs.MaskedLMOutput(found.loss, found.logits, found.hidden_states, found.attentions)


class FirthForCausalLM(FirthPreTrained, transformers.GenerationMixin):
    """Writing reads the whole text again for each token: what was read is not kept."""

    auto = "AutoModelForCausalLM"

    @classmethod
    def fits(cls, config: ModelConfig) -> bool:
        return config.shape == "decoder" and isinstance(config.head, LMHead)

    def prepare_inputs_for_generation(self, input_ids: Any, *args: Any, **more: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": more.get("attention_mask")}

    def answer(self, found: Output, states: bool) -> Any:
        return outputs.CausalLMOutput(found.loss, found.logits, found.hidden_states, found.attentions)


class FirthForSeq2SeqLM(FirthPreTrained):
    auto = "AutoModelForSeq2SeqLM"

    @classmethod
    def fits(cls, config: ModelConfig) -> bool:
        return config.shape == "encoder-decoder" and isinstance(config.head, LMHead)

    def answer(self, found: Output, states: bool) -> Any:
        kept = found.hidden_states
        return outputs.Seq2SeqLMOutput(found.loss, found.logits, decoder_hidden_states=kept, **of_both(found))


class FirthForSequenceClassification(FirthPreTrained):
    auto = "AutoModelForSequenceClassification"

    @classmethod
    def fits(cls, config: ModelConfig) -> bool:
        return isinstance(config.head, Classes)

    def answer(self, found: Output, states: bool) -> Any:
        return outputs.SequenceClassifierOutput(found.loss, found.logits, found.hidden_states, found.attentions)


def of_both(found: Output) -> dict[str, Any]:
    """What two stacks leave, by the names of `transformers`."""
    return {
        "decoder_attentions": found.attentions,
        "cross_attentions": found.cross_attentions,
        "encoder_last_hidden_state": found.encoder_last_hidden_state,
        "encoder_attentions": found.encoder_attentions,
    }


HEADED = (FirthForMaskedLM, FirthForCausalLM, FirthForSeq2SeqLM, FirthForSequenceClassification)


def auto_class(config: ModelConfig) -> str:
    """The class of `transformers` that opens a checkpoint of this model; `AutoModel` (the body) where no other does."""
    return next((kind.auto for kind in HEADED if kind.fits(config)), FirthModel.auto)


transformers.AutoConfig.register(OWN, FirthConfig, exist_ok=True)
for kind in (FirthModel, *HEADED):
    getattr(transformers, kind.auto).register(FirthConfig, kind, exist_ok=True)
