"""Attention weights of a text, by layer and head.

    weights = compute_attention(model, "The cat sleeps.")
    weights.tokens                  # ["[CLS]", "the", "cat", "sleeps", ".", "[SEP]"]
    weights.matrices["encoder"]     # (layers, heads, queries, keys): each row sums to 1

An encoder-decoder has three kinds: the encoder's own, the decoder's own, and those of the decoder over the encoder's
tokens. The last two need a target text.

XLNet is pretrained in random orders (Yang et al. 2019, section 2.2): a token attends to itself and to those before it
in the order, wherever they stand. `permutation` is the number of such an order; without it all tokens attend to all, as
in fine-tuning. The weights are those of the content stream, which knows its own token.

L layers, H heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from firth.core.errors import UserError
from firth.generate.decode_state import eval_mode, require_tokenizer
from firth.models import Encoder, EncoderDecoder, Model, make_sequence_template
from firth.models.config import MultipleChoiceHead
from firth.objectives import CounterRNG
from firth.objectives.visibility import sample_permutation_ranks

MAX_ATTENTION_WEIGHTS = 2_000_000  # of one answer: 12 layers of 12 heads over 117 tokens
MAX_COMPUTED_WEIGHTS = 2**26  # of all layers and heads of a text, in memory: 256 MiB

Range = tuple[int, int]  # positions [start, end)


class AttentionWeights(NamedTuple):
    """Tokens of the text and of the target, the layers and heads that were asked for, and (L, H, T, S) by kind."""

    tokens: list[str]
    target_tokens: list[str]
    layers: list[int]
    heads: list[int]
    matrices: dict[str, np.ndarray]


class AttendedText(NamedTuple):
    """Token ids of a text and of the target, and the weights (1, H, T, S) of every layer, by kind."""

    input_ids: list[int]
    target_ids: list[int]
    weights: dict[str, Sequence[Tensor]]


def compute_attention(
    model: Model,
    text: str | Sequence[int],
    target: str | Sequence[int] = "",
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    queries: Range | None = None,
    keys: Range | None = None,
    permutation: int | None = None,
) -> AttentionWeights:
    """Return the attention weights of a text with its special tokens, or of the ids that a model reads.

    `layers` and `heads` select some of them, `queries` and `keys` a window of the positions. `permutation` numbers a
    random order, for XLNet.
    """
    config, tokenizer = model.config, require_tokenizer(model)
    check_has_attention(model)
    num_layers = max(config.num_layers, config.decoder_layers if isinstance(model, EncoderDecoder) else 0)
    layers = select_indices("layer", layers, num_layers)
    heads = select_indices("head", heads, config.num_heads)
    ids, target_ids = attention_inputs(model, text, target)
    longest = max(len(ids), len(target_ids))
    num_queries, num_keys = (longest if part is None else max(part[1] - part[0], 0) for part in (queries, keys))
    if (num := len(layers) * len(heads) * num_queries * num_keys) > MAX_ATTENTION_WEIGHTS:
        raise UserError(
            f"{len(layers)} layers of {len(heads)} heads over {longest} tokens are {num:,} weights, more than "
            f"{MAX_ATTENTION_WEIGHTS:,}. Shorten the text, or choose layers, heads or a window."
        )
    found = attend_to_text(model, ids, target_ids, bool(target), permutation).weights
    rows, columns = (slice(None) if part is None else slice(*part) for part in (queries, keys))
    selected = {
        kind: np.stack([weights[i][0, heads, rows, columns].float().cpu().numpy() for i in layers if i < len(weights)])
        for kind, weights in found.items()
    }
    tokens, target_tokens = (
        [str(tokenizer.backend.id_to_token(i)) for i in row] for row in (ids, target_ids if target else ())
    )
    return AttentionWeights(tokens, target_tokens, layers, heads, selected)


def check_has_attention(model: Model) -> None:
    if model.config.recurrent is not None or not model.config.num_layers:
        raise UserError("This model has no attention.")


def attention_inputs(
    model: Model, text: str | Sequence[int], target: str | Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the ids that the model reads of a text, and those of the decoder of an encoder-decoder.

    A text gets its special tokens; ids have theirs. A target gets the start token of the decoder.
    """
    config, tokenizer = model.config, require_tokenizer(model)
    if target and not isinstance(model, EncoderDecoder):
        raise UserError("A target text is for encoder-decoders.")
    template = make_sequence_template(config, tokenizer.vocab)
    target_ids: list[int] = []
    if isinstance(model, EncoderDecoder):
        target_ids = [template.decoder_start_id, *(tokenizer.encode(target) if isinstance(target, str) else target)]
    if not isinstance(text, str):
        ids = list(text)
    elif config.architecture == "decoder":
        ids = [*template.prefix_ids, *tokenizer.encode(text)]
    else:
        ids = list(template.apply(tokenizer.encode(text))[0])
    if not ids:
        raise UserError("The text has no token.")
    return ids, target_ids


@torch.no_grad()
def attend_to_text(
    model: Model, ids: list[int], target_ids: list[int], has_target: bool, permutation: int | None = None
) -> AttendedText:
    """Run the model over one text and keep the weights of all layers."""
    config, longest = model.config, max(len(ids), len(target_ids))
    if (num := config.num_layers * config.num_heads * longest**2) > MAX_COMPUTED_WEIGHTS:
        raise UserError(
            f"{longest:,} tokens have {num:,} weights, more than {MAX_COMPUTED_WEIGHTS:,}. Shorten the text."
        )
    device = model.embed.tokens.weight.device
    input_ids = torch.tensor([ids], device=device)
    found: dict[str, Any] = {}
    with eval_mode(model):
        if not isinstance(model, EncoderDecoder):
            found = {config.architecture: attend_in_stack(model, input_ids, permutation)}
        elif isinstance(config.head, MultipleChoiceHead):  # reads several texts, and this is one
            attentions: list[Tensor] = []
            model.encoder(model.embed(input_ids), None, attentions=attentions)
            found = {"encoder": attentions}
        else:
            target = torch.tensor([target_ids], device=device)
            output = model(input_ids, decoder_input_ids=target, output_attentions=True)
            found = {"encoder": output.encoder_attentions}
            if has_target:
                found |= {"decoder": output.attentions, "cross": output.cross_attentions}
    # a task head on the encoder has no decoder
    return AttendedText(ids, target_ids, {kind: weights for kind, weights in found.items() if weights is not None})


def can_permute(model: Model) -> bool:
    """Whether a model was made for permutation language modelling: it has a query stream."""
    return isinstance(model, Encoder) and "query" in model.extras


def attend_in_stack(model: Model, input_ids: Tensor, permutation: int | None) -> list[Tensor]:
    """Return the weights (1, H, T, T) of all layers, without the head; with `permutation`, in that random order."""
    if permutation is not None and not can_permute(model):
        raise UserError("A permutation is for models with a query stream (XLNet).")
    assert isinstance(model, Encoder), "models with two stacks are called whole"
    model.check_length(input_ids.shape[1])
    rank = None
    if permutation is not None:
        row = np.ones((1, input_ids.shape[1]), bool)
        rank = torch.from_numpy(sample_permutation_ranks(row, CounterRNG(permutation, np.array([0])))).to(
            input_ids.device
        )
    attentions: list[Tensor] = []
    x_BTD = model.embed.widen(model.embed_backbone_inputs(input_ids, None, None))
    model.stack(x_BTD, None, rank, attentions=attentions)
    return attentions


def select_indices(noun: str, given: Sequence[int] | None, count: int) -> list[int]:
    """Return the given indices, or all of them."""
    if wrong := [i for i in given or () if not 0 <= i < count]:
        raise UserError(f"There is no {noun} {wrong[0]}: they are numbered from 0 to {count - 1}.")
    return list(range(count) if given is None else given)
