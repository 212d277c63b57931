"""Look at single decisions of a decoder: the distribution of the next token, and the tree of a beam search.

The distribution is the model's own, before temperature, top-k and top-p. A reader who moves these settings needs no
second forward pass: dividing log-probabilities by a temperature T gives logits of the new distribution. Only its
denominator needs tokens that are not listed, and it has three forms:

- `rest_logsumexp`: log(sum(exp(logprob / T))) over all of them, for each temperature T;
- `nucleus`: the same over those of them that top-p keeps, for each T and p. A flat distribution (an untrained model, a
  high temperature) reaches p far behind the listed tokens;
- `num_tied`: how many are exactly as likely as the last listed one. Top-k keeps all that tie with the k-th.

V vocabulary, R tokens that are not listed, K candidates of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from firth.core.errors import UserError
from firth.generate.beams import MASKED_BEAM_SCORE, BeamStep, beam_search
from firth.generate.config import GenerationConfig
from firth.generate.decode_state import check_can_generate, eval_mode, make_decode_state, make_next_logits_fn
from firth.generate.length_budget import make_length_budget
from firth.generate.loop import GeneratedSequence, make_logits_processor
from firth.models import EncoderDecoder, Model
from firth.tokens import TokenIds

BeamFate = Literal["kept", "finished", "dropped"]


class KeptRest(NamedTuple):
    """Tokens that are not listed and that top-p keeps."""

    num: int
    logsumexp: float | None  # of logprob / T; None: there is none


class NextTokens(NamedTuple):
    """The likeliest next tokens, and what the others add to the denominator at each temperature."""

    ids: list[int]
    logprobs: list[float]
    num_rest: int
    num_tied: int  # of the rest, with the log-probability of the last listed token
    rest_logsumexp: list[float | None]  # None: there is no other token
    nucleus: list[list[KeptRest]]  # by temperature and top-p
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
    model: Model,
    prompt_ids: TokenIds,
    new_ids: TokenIds,
    top: int,
    temperatures: Sequence[float],
    top_ps: Sequence[float] = (),
) -> NextTokens:
    """Return the `top` likeliest tokens after a prompt (with its special tokens) and the tokens taken so far."""
    check_can_generate(model)
    is_seq2seq = isinstance(model, EncoderDecoder)
    model.check_length(max(len(prompt_ids), 1 + len(new_ids)) if is_seq2seq else len(prompt_ids) + len(new_ids))
    with eval_mode(model):
        logits_V = make_next_logits_fn(model, [prompt_ids])([0], [list(new_ids)])[0]
    return describe_logprobs(logits_V.double().log_softmax(-1).cpu(), top, temperatures, top_ps)


def describe_logprobs(
    logprob_V: Tensor, top: int, temperatures: Sequence[float], top_ps: Sequence[float]
) -> NextTokens:
    """Return the `top` likeliest tokens of a distribution, and the sums over the others."""
    # As in the sampler's `removed_by_top_p`: of equally likely tokens the last one comes first.
    ids_V = logprob_V.argsort(stable=True).flip(0)
    listed, rest_R = logprob_V[ids_V[:top]], logprob_V[ids_V[top:]]
    return NextTokens(
        ids_V[:top].tolist(),
        listed.tolist(),
        len(rest_R),
        int((rest_R == listed[-1]).sum()),
        [float((rest_R / t).logsumexp(0)) if len(rest_R) else None for t in temperatures],
        [keep_rest_by_top_p(listed / t, rest_R / t, top_ps) for t in temperatures],
        float(torch.special.entr(logprob_V.exp()).sum()),
    )


def keep_rest_by_top_p(listed: Tensor, rest_R: Tensor, top_ps: Sequence[float]) -> list[KeptRest]:
    """Return which of the rest each top-p keeps; all scores are divided by the temperature, in descending order.

    Top-p keeps the smallest set of likeliest tokens whose probability reaches p.

    >>> listed, rest = torch.tensor([0.4, 0.2]).log(), torch.tensor([0.2, 0.1, 0.1]).log()
    >>> [kept.num for kept in keep_rest_by_top_p(listed, rest, [0.5, 0.7, 0.95])]
    [0, 1, 3]
    """
    total = torch.cat([listed, rest_R]).logsumexp(0)
    before_R = (listed - total).exp().sum() + (rest_R - total).exp().cumsum(0)
    before_R = torch.cat([(listed - total).exp().sum()[None], before_R[:-1]])  # of the tokens before each
    found = []
    for top_p in top_ps:
        kept = rest_R[: int((before_R < top_p).sum())] if len(rest_R) else rest_R
        found.append(KeptRest(len(kept), float(kept.logsumexp(0)) if len(kept) else None))
    return found


@torch.no_grad()
def search_beam_tree(model: Model, prompt_ids: TokenIds, config: GenerationConfig, new_ids: TokenIds = ()) -> BeamTree:
    """Run the beam search of `generate` on one prompt and keep every candidate.

    The search continues after `new_ids`, which are taken as they are: their text might be tokenized in another way.
    """
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
        budget = make_length_budget(model, [prompt_ids], len(new_ids) + config.max_new_tokens)
        state = make_decode_state(model, budget.prompts, budget.max_new_tokens)
        logits_BV = state.prefill()
        for token in new_ids:
            logits_BV = state.decode_step(torch.tensor([token], device=logits_BV.device))
        if budget.max_new_tokens <= len(new_ids):
            raise UserError(f"{len(new_ids)} tokens were taken, and this model has no position for more.")
        budget = budget._replace(budgets=[budget.max_new_tokens - len(new_ids)])
        if config.num_beams > logits_BV.shape[1]:
            raise UserError(f"num_beams is {config.num_beams:,}; the vocabulary has {logits_BV.shape[1]:,} tokens.")
        processor = make_logits_processor(model, budget, config, eos_ids, logits_BV)
        if new_ids:  # the forced beginning of a text is behind it
            processor.forced = processor.forced._replace(bos=None)
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
