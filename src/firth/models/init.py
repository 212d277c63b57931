"""Initial weights, as each family was published: a function of a parameter's name and `ModelConfig.init`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from firth.models.config import FanInInit, ModelConfig, NormalInit, UniformInit

LSTM_WEIGHT_PREFIXES = ("weight_ih_l", "weight_hh_l", "weight_hr_l")
RANDOM_FILLS = (nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_, Tensor.uniform_, Tensor.normal_)

_skips_init: ContextVar[bool] = ContextVar("skips_init", default=False)


class _SkipRandomFills(TorchFunctionMode):
    """Let functions that fill a tensor with random numbers return it as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in RANDOM_FILLS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def skip_init() -> Iterator[None]:
    """Allocate the weights of models that are built inside, and leave them unset: the caller must set every one.

    A model that is read from a file needs no random weights. torch draws them when a layer is made, and `init_weights`
    once more: for BERT-base more than a second on one core. The random number generators are not touched.
    """
    token = _skips_init.set(True)
    try:
        with _SkipRandomFills():
            yield
    finally:
        _skips_init.reset(token)


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig) -> None:
    """Initialise all weights as published for the family: std by `config.init`, biases 0, norms 1."""
    if _skips_init.get():
        return
    init = config.init
    for name, p in model.named_parameters():
        if p.is_meta:  # parameters are only counted
            continue
        if p.ndim < 2:
            if name.endswith("bias") and not isinstance(init, UniformInit):
                p.zero_()
        elif name.endswith(("generator.delta.weight", "attention.gate")):
            p.zero_()
        elif name.rpartition(".")[2].startswith(LSTM_WEIGHT_PREFIXES):
            continue  # torch's initialisation, by their own width
        elif isinstance(init, UniformInit):
            if name == "embed.tokens.weight":
                p.uniform_(-init.bound, init.bound)
            elif name == "head.weight":
                p.normal_(0.0, p.shape[-1] ** -0.5)
        elif isinstance(init, FanInInit):
            p.normal_(0.0, fan_in_init_std(name, p, config))
            if name.endswith(("attention.qkv.weight", "cross.qkv.weight")):
                p[: config.num_heads * config.head_size] *= config.head_size**-0.5  # the scores are not scaled
        else:
            std = normal_init_std(name, init, config)
            if init.cutoff_factor is None:
                p.normal_(0.0, std)
            else:
                nn.init.trunc_normal_(p, 0.0, std, -init.cutoff_factor * std, init.cutoff_factor * std)


def normal_init_std(name: str, init: NormalInit, config: ModelConfig) -> float:
    """Return the std of a weight: embeddings, projections into the residual stream, others."""
    is_embedding = name.endswith(
        ("tokens.weight", "position_embeddings.weight", "positions.weight", "segments.weight", "languages.weight")
    )
    if init.embed_std is not None and is_embedding:
        return init.embed_std
    if init.scale_residual and name.endswith(("attention.out.weight", "mlp.down.weight")):
        return init.std / math.sqrt(2 * config.num_layers)
    return init.std


def fan_in_init_std(name: str, p: Tensor, config: ModelConfig) -> float:
    """Return T5's std: 1 for embeddings, 1/sqrt(fan-in) for matrices, the untied head of T5 1.1 among them.

    The input of the head has a mean square of 1, so the first logits have a variance of 1 at any width. Both published
    programs start so (Mesh TensorFlow and t5x); `transformers` draws the untied head from N(0, 1).
    """
    if name.endswith("embed.tokens.weight"):
        return 1.0
    return (config.dim if name.endswith("score.table.weight") else p.shape[-1]) ** -0.5
