"""Whether a model is being exported (to ONNX, say), not compiled: an exported graph must serve every length."""

from __future__ import annotations

import torch


def is_exporting() -> bool:
    """Return what `torch.compiler.is_exporting` promises: torch 2.11 says True in all that it compiles."""
    return torch.compiler.is_exporting() and getattr(torch.compiler, "_is_exporting_flag", True)
