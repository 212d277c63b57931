"""Which tokens a prediction rests on: gradient times input.

The logit f of the predicted class is a function of the token embeddings x_i. Its first-order change when x_i shrinks to
nothing is -df/dx_i . x_i, so the *salience* df/dx_i . x_i (Shrikumar et al. 2017, "Not Just a Black Box", section 3) is
positive where a token speaks for the class, and negative where it speaks against. It costs one forward and one backward
pass. It is a local, linear account: two tokens that replace each other may both have little.

A multiple choice reads the context with each candidate as one sequence, and a softmax compares their logits. The
salience is that of one candidate's own logit: what in the context and in the candidate makes it likely.

B rows, T positions, E embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from firth.core.errors import UserError, quote
from firth.evaluate.long_inputs import encode_in_windows
from firth.evaluate.predict import Predictor
from firth.evaluate.predict_input import TaskInput
from firth.generate.decode_state import eval_mode
from firth.tasks.choice import ChoiceTask
from firth.tasks.classify import ClassificationTask
from firth.tasks.regress import RegressionTask


class Salience(NamedTuple):
    """Tokens as the model reads them, the salience of each, and the logit that it belongs to.

    `label` is the class or the text of the candidate, "" for a score. A prediction for a text that exceeds a row is the
    mean over `num_windows` windows; the tokens are those of the first.
    """

    token_ids: list[int]
    values: list[float]
    logit: float
    label: str
    num_windows: int


def salience_of_input(predictor: Predictor, task_input: TaskInput, label: str | None = None) -> Salience:
    """Return the salience of each token for a class or a candidate (default: the likeliest), or for a score."""
    task, example = predictor.task, task_input.example
    is_choice = isinstance(task, ChoiceTask)
    if not isinstance(task, ClassificationTask | RegressionTask | ChoiceTask) or task.sequences_per_label > 1:
        raise UserError(f"Salience is for labels, choices and scores, not for the task {task.name}.")
    labels: Sequence[str] = example.texts[1:] if is_choice else task.labels
    if label is not None and label not in labels:
        noun = "choice" if is_choice else "label"
        raise UserError(f"There is no {noun} {quote(label)}. Known: {', '.join(labels) or 'none'}.")
    if is_choice:
        if label is None:
            ((_, record),) = predictor.predict_inputs([task_input])
            label = str(record["text"])
        example = example._replace(texts=(example.texts[0], label), target=0)
    task = copy(task)
    task.has_short_rows = True
    windows = encode_in_windows(task, [example])[0]
    items = windows[:1]
    batch = task.collate(items)
    embedded: list[Tensor] = []

    def watch(module: Any, inputs: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_(True))
        return embedded[-1]

    model = predictor.model
    handle = model.embed.tokens.register_forward_hook(watch)
    try:
        with eval_mode(model), torch.enable_grad():
            logits = model.logits(batch.to(predictor.compute.device)).float()
            logits_C = logits.flatten(0, 1)[task.pack_items(items).label_slots[0]].reshape(-1)
            index = 0 if is_choice else labels.index(label) if label is not None else int(logits_C.argmax())
            logit = logits_C[index]
            gradients = torch.autograd.grad(logit, embedded, allow_unused=True)
    finally:
        handle.remove()
    num_tokens = items[0].num_tokens
    values = torch.zeros(num_tokens)
    for x_BTE, gradient_BTE in zip(embedded, gradients, strict=True):
        if gradient_BTE is not None:  # an encoder-decoder embeds the text twice
            values += (x_BTE * gradient_BTE).sum(-1)[0, :num_tokens].detach().float().cpu()
    token_ids = [int(i) for i in batch.input_ids[0][:num_tokens]]
    shown = label or "" if is_choice else labels[index] if labels else ""
    return Salience(token_ids, values.tolist(), float(logit.detach()), shown, len(windows))
