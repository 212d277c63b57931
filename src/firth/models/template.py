"""The special tokens that each architecture and family puts around its texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firth.core.errors import UserError
from firth.models.config import ModelConfig, TransformerXL
from firth.tokens.template import CLS_TOKEN_TYPE, SequenceTemplate

if TYPE_CHECKING:
    from firth.tokens import Vocabulary

DOUBLE_SEPARATOR_FAMILIES = ("roberta", "xlm-roberta", "afriberta", "bart")  # <s> A </s></s> B </s>
CLS_LAST_FAMILY = "xlnet"  # A <sep> B <sep> <cls>


def make_sequence_template(config: ModelConfig, vocab: Vocabulary) -> SequenceTemplate:
    """Return the special tokens around the texts of a model, as its pretraining objectives add them.

    Encoders, and encoder-decoders with `adds_bos` (BART), have [CLS] and [SEP]; decoders their begin and end token, if
    they were not trained to denoise; other encoder-decoders (T5) the end token alone. XLNet's [CLS] comes last.
    """
    has_cls = config.adds_bos or config.architecture == "encoder"
    eos = vocab.sep if has_cls else vocab.eos
    if eos is None or (has_cls and vocab.cls is None):
        missing = "[CLS] and [SEP]" if has_cls else "end"
        raise UserError(f"The tokenizer of this model has no {missing} token.")
    bos = vocab.eos if vocab.bos is None else vocab.bos
    has_bos = config.architecture == "decoder" and not config.has_sentinel_prompt  # T5's rows begin with the text
    first = vocab.cls if has_cls else bos if has_bos else None
    prefix_ids = () if first is None else (first,)
    is_last = config.family == CLS_LAST_FAMILY
    relative_segments = isinstance(config.position, TransformerXL) and config.position.relative_segments
    return SequenceTemplate(
        prefix_ids=() if is_last else prefix_ids,
        suffix_ids=(eos, *prefix_ids) if is_last else (eos,),
        separator_ids=(eos,) * (2 if config.family in DOUBLE_SEPARATOR_FAMILIES else 1),
        has_token_types=config.num_segments > 1 or relative_segments or is_last,
        last_token_type=CLS_TOKEN_TYPE if is_last else None,
        decoder_start_id=eos if has_cls else vocab.pad,
    )


def make_prompt_suffix(config: ModelConfig, vocab: Vocabulary) -> tuple[int, ...]:
    """Return the special tokens between a decoder's prompt and its answer: a denoiser's blank, and the answer's start.

    The training row of a denoising decoder is text with sentinels, </s>, then sentinel and span in turn. A prompt that
    ends with a blank is continued by the span of its sentinel.
    """
    if not config.has_sentinel_prompt:
        return ()
    if not vocab.sentinel_ids or vocab.eos is None:
        raise UserError("This decoder was trained to denoise, and its tokenizer has no sentinels (<extra_id_0> ...).")
    return (vocab.sentinel_ids[0], vocab.eos, vocab.sentinel_ids[0])
