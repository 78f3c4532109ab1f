"""A decoder that scores what it has read: a linear layer on the last token's hidden state, in place of the head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penjing.core.models.attention import causal_attention
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Backbone


class RewardModel(nn.Module):
    """Parameter names are those of Hugging Face's sequence classifiers, such as `LlamaForSequenceClassification`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.score = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, token_ids: Tensor, last: Tensor) -> Tensor:
        """Scores of texts.

        Args:
            token_ids: (B, T) int64, filled up at their ends.
            last: (B,) int64, the place in the flattened tokens of the last token of each.

        Returns:
            (B,), dtype of the parameters.
        """
        positions = torch.arange(token_ids.shape[-1], device=token_ids.device).expand(token_ids.shape)
        hidden = self.model(token_ids, positions, causal_attention(self.config))
        return self.score(hidden.flatten(0, -2)[last])[:, 0]
