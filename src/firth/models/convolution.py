"""DeBERTa version 2's convolution (nGiE) beside the first block: it adds local n-gram information.

Shapes: B rows, T positions, D model width, N kernel size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.config import ConvolutionConfig, ModelConfig
from firth.models.kernels.dropout import Dropout

CONV_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "gelu": F.gelu}


class ConvolutionLayer(nn.Module):
    """`norm(x + activation(dropout(conv(embeddings))))`, with x the first block's output."""

    def __init__(self, config: ModelConfig, spec: ConvolutionConfig) -> None:
        super().__init__()
        self.conv = nn.Conv1d(config.dim, config.dim, spec.kernel_size, padding=spec.kernel_size // 2)
        self.norm = nn.LayerNorm(config.dim, eps=config.norm.eps)
        self.activation = CONV_ACTIVATIONS[spec.activation]
        self.drop = Dropout(config.dropout)

    def forward(self, embeddings_BTD: Tensor, x_BTD: Tensor, document_ids_BT: Tensor | None) -> Tensor:
        y_BTD = (
            self.conv(embeddings_BTD.mT).mT
            if document_ids_BT is None
            else self.conv_within_documents(embeddings_BTD, document_ids_BT)
        )
        y: Tensor = self.norm(x_BTD + self.activation(self.drop(y_BTD)))
        return y.to(x_BTD.dtype)

    def conv_within_documents(self, x_BTD: Tensor, document_ids_BT: Tensor) -> Tensor:
        """Return the convolution with neighbours of other documents zeroed, (B, T, D)."""
        half, T = self.conv.padding[0], x_BTD.shape[1]
        assert isinstance(half, int)
        padded, ids = F.pad(x_BTD, (0, 0, half, half)), F.pad(document_ids_BT, (half, half), value=-2)
        parts = [
            padded[:, i : i + T] * (ids[:, i : i + T] == document_ids_BT)[:, :, None]
            for i in range(self.conv.kernel_size[0])
        ]
        weight = self.conv.weight.transpose(1, 2).flatten(1)  # (D, N x D)
        return F.linear(torch.cat(parts, -1), weight, self.conv.bias)
