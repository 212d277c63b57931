"""Features for a task head over a frozen backbone (ELMo, Peters et al. 2018, section 3.3).

A task reads [x_k; ELMo_k] for each token k: its own word vector x_k, trained with the task, beside the mixture of all
layers of the backbone. A biLSTM reads both. The word vectors learn what the few labels say about single words; the
mixture brings what the language model knows about them in context. The loss may have lambda * ||w||^2 over the weights
w of the mixture: a large lambda keeps it close to the mean of all layers, a small one (0.001) lets it choose (section
5.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from firth.models.config import FeatureEncoderConfig, ModelConfig
from firth.models.kernels.dropout import Dropout
from firth.models.recurrent.lstm import BiLSTMStack
from firth.models.scalar_mix import ScalarMix

WORD_VECTOR_STD = 0.1  # of the task's word vectors before training, where the family's initialisation has no own


class FeatureEncoder(nn.Module):
    """ScalarMix, word vectors and biLSTM that are trained with the head; the backbone may stay frozen."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec = config.get_extra("features")
        assert isinstance(spec, FeatureEncoderConfig)
        self.spec = spec
        self.mix = ScalarMix(config.num_layers + 1) if spec.mix_layers else None
        self.words = nn.Embedding(config.vocab_size, spec.word_dim) if spec.word_dim else None
        if self.words is not None:
            nn.init.normal_(self.words.weight, 0.0, WORD_VECTOR_STD)
        dim = config.dim + spec.word_dim
        self.lstm = BiLSTMStack(config, 1, dim, spec.bilstm_hidden_size, 0.0) if spec.bilstm_hidden_size else None
        self.drop = Dropout(spec.dropout)

    def forward(self, all_hidden_states: Sequence[Tensor], document_ids: Tensor | None, input_ids: Tensor) -> Tensor:
        """Return (B, T, `ModelConfig.head_input_dim`) from the hidden states of all layers and the tokens."""
        x_BTD = all_hidden_states[-1] if self.mix is None else self.mix(all_hidden_states)
        if self.words is not None:
            x_BTD = torch.cat([self.embed_words(input_ids).to(x_BTD), x_BTD], -1)
        x_BTD = self.drop(x_BTD)
        return x_BTD if self.lstm is None else self.drop(self.lstm(x_BTD, document_ids))

    def embed_words(self, input_ids: Tensor) -> Tensor:
        """Return the task's word vectors; words outside of the vocabulary (ELMo reads their characters) have zeros."""
        assert self.words is not None
        is_known = input_ids < self.words.num_embeddings
        return self.words(torch.where(is_known, input_ids, 0)) * is_known[..., None]

    def add_mix_penalty(self, losses: dict[str, Tensor], document_ids: Tensor | None, input_ids: Tensor) -> None:
        """Add l2_mix * ||w||^2 to the loss, times the number of tokens, which divides it: so any split adds up."""
        if self.mix is None or not self.spec.l2_mix:
            return
        num_tokens = input_ids.numel() if document_ids is None else (document_ids >= 0).sum()
        losses["tokens"] = self.spec.l2_mix * self.mix.weights.float().square().sum() * num_tokens
