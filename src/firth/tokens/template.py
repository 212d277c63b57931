"""Special tokens around a text or a pair of texts.

A model reads a text inside a fixed pattern of special tokens, and reads it well only in the pattern of its pretraining:

    BERT       [CLS] A [SEP]      [CLS] A [SEP] B [SEP]     token types 0 for A, 1 for B (Devlin et al. 2019, section 3)
    RoBERTa    <s> A </s>         <s> A </s></s> B </s>     no token types
    XLNet      A <sep> <cls>      A <sep> B <sep> <cls>     token type 2 for <cls>, which belongs to neither text
    GPT-2      <|endoftext|> A <|endoftext|>                only where a document really begins and ends
    T5         A </s>                                       the decoder starts with <pad>

`SequenceTemplate` is that pattern as data. The same object builds the rows of pretraining (`dataset.py`), the inputs of
fine-tuning and evaluation (`SequenceTemplate.apply`), and the output of the tokenizer that is saved beside the model
(`with_template`), so that `transformers` builds the same inputs from raw texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import processors

from firth.tokens.tokenizer import Tokenizer, copy_backend, tokenizer_errors

TEXT_A, TEXT_B = -1, -2  # placeholder ids for the first and the second text
TOKEN_TYPE_IDS = "token_type_ids"
CLS_TOKEN_TYPE = 2  # of XLNet's [CLS], which belongs to neither text


@dataclass(frozen=True)
class SequenceTemplate:
    """`prefix_ids` A `suffix_ids` for one text, `prefix_ids` A `separator_ids` B `suffix_ids` for two.

    - `document_edges_only`: write the prefix and the suffix only where a document begins and ends (GPT-2), not where
      packing cut it. Rows still reserve their positions at a cut.
    - `has_token_types`: the model reads token type ids, 0 for A and 1 for B with the special token after each.
    - `last_token_type`: the type of the last token, where it belongs to neither text (XLNet's [CLS]).
    - `decoder_start_id`: the first input of a decoder that attends to an encoder; -1 without one.
    """

    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    document_edges_only: bool = False
    separator_ids: tuple[int, ...] = ()
    has_token_types: bool = False
    last_token_type: int | None = None
    decoder_start_id: int = -1

    @property
    def eos_id(self) -> int:
        """The token that ends a text, and that a model learns to write at the end."""
        return self.suffix_ids[0]

    def num_special_tokens(self, num_texts: int = 1) -> int:
        return len(self.prefix_ids) + len(self.separator_ids) * (num_texts - 1) + len(self.suffix_ids)

    def apply(self, a: Sequence[int], b: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """Return the ids and the token type ids of one text or two.

        >>> SequenceTemplate((101,), (102,), separator_ids=(102,)).apply([7, 8], [9])
        ([101, 7, 8, 102, 9, 102], [0, 0, 0, 0, 1, 1])
        """
        first = [*self.prefix_ids, *a, *(self.suffix_ids if b is None else self.separator_ids)]
        second = [] if b is None else [*b, *self.suffix_ids]
        token_type_ids = [0] * len(first) + [1] * len(second)
        if self.last_token_type is not None:
            token_type_ids[-1] = self.last_token_type
        return first + second, token_type_ids


def with_template(tokenizer: Tokenizer, template: SequenceTemplate, pairs: bool = True) -> Tokenizer:
    """Return the tokenizer with a post-processor that applies the template to raw texts, and to pairs if `pairs`.

    Ids of texts do not change. Returns the same tokenizer if it applies the template already, or if it is a subclass
    with its own way to read a text.
    """
    sequences = [template.apply([TEXT_A])] + ([template.apply([TEXT_A], [TEXT_B])] if pairs else [])
    if type(tokenizer) is not Tokenizer or all(
        applies_sequence(tokenizer, *sequence, template.has_token_types) for sequence in sequences
    ):
        return tokenizer
    tokens = {i: str(tokenizer.backend.id_to_token(i)) for ids, _ in sequences for i in ids if i >= 0}
    spelled = {**tokens, TEXT_A: "$A", TEXT_B: "$B"}
    patterns = [[f"{spelled[i]}:{kind}" for i, kind in zip(*sequence, strict=True)] for sequence in sequences]
    processor = processors.TemplateProcessing(
        single=patterns[0],  # ["<s>:0", "$A:0", "</s>:0"]
        pair=patterns[1] if pairs else ["$A:0", "$B:1"],
        special_tokens=[(token, i) for i, token in tokens.items()],
    )
    backend = copy_backend(tokenizer.backend)
    byte_level = find_byte_level_processor(json.loads(backend.to_str())["post_processor"])
    backend.post_processor = processor if byte_level is None else processors.Sequence([byte_level, processor])
    config = dict(tokenizer.config)
    input_names = config.get("model_input_names", [])
    if template.has_token_types and input_names and TOKEN_TYPE_IDS not in input_names:
        config["model_input_names"] = [*input_names, TOKEN_TYPE_IDS]
    return Tokenizer(backend, tokenizer.special_tokens, config)


def applies_sequence(
    tokenizer: Tokenizer, ids: Sequence[int], token_type_ids: Sequence[int], check_token_types: bool
) -> bool:
    """Whether a tokenizer makes this sequence, which has placeholders, of a text "a" and a text "b"."""
    with tokenizer_errors():
        encoding = tokenizer.backend.encode("a", "b" if TEXT_B in ids else None, add_special_tokens=True)
    text_ids = {TEXT_A: tokenizer.encode("a"), TEXT_B: tokenizer.encode("b")}
    expected = [(j, kind) for i, kind in zip(ids, token_type_ids, strict=True) for j in text_ids.get(i, [i])]
    return encoding.ids == [i for i, _ in expected] and (
        not check_token_types or encoding.type_ids == [kind for _, kind in expected]
    )


def find_byte_level_processor(processor: dict[str, Any] | None) -> processors.PostProcessor | None:
    """Return the ByteLevel step of a post-processor: it trims the offsets of a byte-level BPE, and has to stay."""
    for step in [] if processor is None else processor.get("processors", [processor]):
        if step["type"] == "ByteLevel":
            return processors.ByteLevel(**{name: value for name, value in step.items() if name != "type"})
    return None
