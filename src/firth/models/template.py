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

    Encoders, and encoder-decoders with `adds_bos` (BART), have [CLS] and [SEP]; decoders their begin and end token;
    other encoder-decoders (T5) the end token alone. XLNet's [CLS] comes last.
    """
    has_cls = config.adds_bos or config.architecture == "encoder"
    eos = vocab.sep if has_cls else vocab.eos
    if eos is None or (has_cls and vocab.cls is None):
        missing = "[CLS] and [SEP]" if has_cls else "end"
        raise UserError(f"The tokenizer of this model has no {missing} token.")
    bos = vocab.eos if vocab.bos is None else vocab.bos
    first = vocab.cls if has_cls else bos if config.architecture == "decoder" else None
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
