"""Deterministic kernels: a run on a GPU gives the same bits each time.

Floating-point addition is not associative, and kernels that add with atomics add in the order of arrival. Deterministic
mode makes torch, cuDNN and cuBLAS choose kernels with a fixed order of additions, or raise where there is none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from firth.core.console import say
from firth.core.errors import UserError

CUBLAS_WORKSPACE_ENV = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")  # the values for which cuBLAS is deterministic


@contextmanager
def deterministic_mode(enabled: bool) -> Iterator[None]:
    """Use deterministic kernels inside a `with` block, where `enabled`.

    `kernels/attention.py` reads torch's flag and avoids our kernels that add with atomics. cuDNN attention has no
    deterministic backward pass and is disabled.
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
    """Set torch's flags and restore them afterwards."""
    import torch._inductor.config as inductor  # the first flag imports it anyway

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
    """Set the variable that cuBLAS reads when CUDA starts; once CUDA has started, it stays set."""
    before = os.environ.get(CUBLAS_WORKSPACE_ENV)
    if before not in DETERMINISTIC_WORKSPACES:
        if torch.cuda.is_initialized():
            raise UserError(
                f"deterministic needs {CUBLAS_WORKSPACE_ENV}={DETERMINISTIC_WORKSPACES[0]} before CUDA starts, and "
                "CUDA has started in this process: set the variable in the environment, or run in a new process."
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
