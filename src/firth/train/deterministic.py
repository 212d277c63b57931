"""One order for every sum: what makes a run on a GPU come out the same each time, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from firth.core.console import say
from firth.core.errors import UserError

CUBLAS_WORKSPACE_ENV = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")  # the settings with which cuBLAS promises one order


@contextmanager
def deterministic_mode(enabled: bool) -> Iterator[None]:
    """Compute in one order only, where that is wanted, and afterwards as before.

    What torch can do in several orders it then does in one, or refuses: `attention.py` asks it, and so leaves out our
    own kernel where that adds up as it comes. Attention by cuDNN, which has no order, is left out.
    """
    if not enabled:
        yield
        return
    with deterministic_cublas(), deterministic_torch():
        if torch.cuda.is_available():
            say(
                "deterministic: every sum has one order, which is slower. Attention by cuDNN is left out, and our own "
                "kernel where it adds up as it comes."
            )
        try:
            yield
        except RuntimeError as e:
            if "does not have a deterministic implementation" not in str(e):
                raise
            what = str(e).split(" does not have")[0]
            raise UserError(f"This run cannot be deterministic: {what} has no fixed order. Leave that out.") from e


@contextmanager
def deterministic_torch() -> Iterator[None]:
    """The switches of torch itself."""
    import torch._inductor.config as inductor  # torch loads it with the first switch

    mode, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn, compiled, by_cudnn = torch.backends.cudnn, inductor.deterministic, torch.backends.cuda.cudnn_sdp_enabled()
    before = cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warns)
        inductor.deterministic = compiled
        cudnn.deterministic, cudnn.benchmark = before
        torch.backends.cuda.enable_cudnn_sdp(by_cudnn)


@contextmanager
def deterministic_cublas() -> Iterator[None]:
    """The setting that cuBLAS reads when CUDA starts. It holds as long as the process then, so it stays written."""
    before = os.environ.get(CUBLAS_WORKSPACE_ENV)
    if before not in DETERMINISTIC_WORKSPACES:
        if torch.cuda.is_initialized():
            raise UserError(
                f"deterministic needs {CUBLAS_WORKSPACE_ENV}={DETERMINISTIC_WORKSPACES[0]} before CUDA starts, and in this process it has started "
                "already: set it in the environment, or begin a process of its own for this run."
            )
        os.environ[CUBLAS_WORKSPACE_ENV] = DETERMINISTIC_WORKSPACES[0]
    try:
        yield
    finally:
        if not torch.cuda.is_initialized():
            if before is None:
                os.environ.pop(CUBLAS_WORKSPACE_ENV, None)
            else:
                os.environ[CUBLAS_WORKSPACE_ENV] = before
