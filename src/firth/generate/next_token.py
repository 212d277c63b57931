"""Look at single decisions of a decoder: the distribution of the next token, and the tree of a beam search.

The distribution is the model's own, before temperature, top-k and top-p. A reader who moves these settings needs no
second forward pass: dividing log-probabilities by a temperature T gives logits of the new distribution. Only its
denominator needs all V tokens, so `rest_logsumexp` has, for each temperature that was asked for, log(sum(exp(logprob /
T))) over the tokens that are not listed.

V vocabulary, K candidates of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from firth.core.errors import UserError
from firth.generate.beams import MASKED_BEAM_SCORE, BeamStep, beam_search
from firth.generate.config import GenerationConfig
from firth.generate.decode_state import check_can_generate, eval_mode, make_decode_state, make_next_logits_fn
from firth.generate.length_budget import make_length_budget
from firth.generate.loop import GeneratedSequence, make_logits_processor
from firth.models import EncoderDecoder, Model
from firth.tokens import TokenIds

BeamFate = Literal["kept", "finished", "dropped"]


class NextTokens(NamedTuple):
    """The likeliest next tokens, and what the others add to the denominator at each temperature."""

    ids: list[int]
    logprobs: list[float]
    num_rest: int
    rest_logsumexp: list[float | None]  # None: there is no other token
    entropy: float  # in nats, at temperature 1


class BeamNode(NamedTuple):
    """A candidate of a beam search. The root, node 0, has no token; `parent` is -1 there."""

    parent: int
    token: int
    logprob: float
    score: float  # sum of log-probabilities from the root
    fate: BeamFate


class BeamTree(NamedTuple):
    """All candidates of a beam search, and the sequences that it returns, with the node in which each ends."""

    nodes: list[BeamNode]
    sequences: list[tuple[int, GeneratedSequence]]


@torch.no_grad()
def next_tokens(
    model: Model, prompt_ids: TokenIds, new_ids: TokenIds, top: int, temperatures: Sequence[float]
) -> NextTokens:
    """Return the `top` likeliest tokens after a prompt (with its special tokens) and the tokens taken so far."""
    check_can_generate(model)
    is_seq2seq = isinstance(model, EncoderDecoder)
    model.check_length(max(len(prompt_ids), 1 + len(new_ids)) if is_seq2seq else len(prompt_ids) + len(new_ids))
    with eval_mode(model):
        logprob_V = make_next_logits_fn(model, [prompt_ids])([0], [list(new_ids)])[0].double().log_softmax(-1).cpu()
    best = logprob_V.topk(min(top, len(logprob_V)))
    is_rest_V = torch.ones(len(logprob_V), dtype=torch.bool)
    is_rest_V[best.indices] = False
    rest = logprob_V[is_rest_V]
    return NextTokens(
        best.indices.tolist(),
        best.values.tolist(),
        len(rest),
        [float((rest / t).logsumexp(0)) if len(rest) else None for t in temperatures],
        float(torch.special.entr(logprob_V.exp()).sum()),
    )


@torch.no_grad()
def search_beam_tree(model: Model, prompt_ids: TokenIds, config: GenerationConfig) -> BeamTree:
    """Run the beam search of `generate` on one prompt and keep every candidate."""
    eos_ids = check_can_generate(model)
    nodes, beams = [BeamNode(-1, -1, 0.0, 0.0, "kept")], [0] * config.num_beams

    def record(step: BeamStep) -> None:
        nonlocal beams
        position = int(step.candidates.length[0, 0]) - 1
        columns = (
            *(step.parent[0].tolist(), step.candidates.token[0, :, position].tolist()),
            *(step.candidates.logprob[0, :, position].tolist(), step.candidates.score[0].tolist()),
            step.ended[0].tolist(),
        )
        continued, number_of_candidate = step.continued[0].tolist(), dict[int, int]()
        for k, (parent, token, logprob, score, ended) in enumerate(zip(*columns, strict=True)):
            if score < MASKED_BEAM_SCORE / 2:  # the first step expands one beam only
                continue
            fate: BeamFate = "dropped"
            if ended and k < config.num_beams:
                fate = "finished"
            elif not ended and k in continued:
                fate = "kept"
            number_of_candidate[k] = len(nodes)
            nodes.append(BeamNode(beams[parent], token, logprob, score, fate))
        beams = [number_of_candidate.get(k, 0) for k in continued]

    with eval_mode(model):
        budget = make_length_budget(model, [prompt_ids], config.max_new_tokens)
        state = make_decode_state(model, budget.prompts, budget.max_new_tokens)
        logits_BV = state.prefill()
        if config.num_beams > logits_BV.shape[1]:
            raise UserError(f"num_beams is {config.num_beams:,}; the vocabulary has {logits_BV.shape[1]:,} tokens.")
        processor = make_logits_processor(model, budget, config, eos_ids, logits_BV)
        (results,) = beam_search(state, logits_BV.float(), processor, None, record)
    child = {(node.parent, node.token): i for i, node in enumerate(nodes)}
    sequences = []
    for result in results:
        sequence, end = GeneratedSequence(*result), 0
        for token in sequence.tokens:
            end = child[end, token]
        if len(sequence.logprobs) > len(sequence.tokens):  # the end token is no part of the text
            end = next(child[end, token] for token in eos_ids if (end, token) in child)
        sequences.append((end, sequence))
    return BeamTree(nodes, sequences)
