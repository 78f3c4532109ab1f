"""Small networks whose graphs show what tests are about."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """(batch, 3, 16, 16) → (batch, 10): in-place activations, a residual, a batch norm, a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        )
        self.second = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        self.dropout = nn.Dropout(0.5, inplace=True)
        self.last = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images)
        hidden = torch.relu_(hidden.add_(self.second(hidden)))
        return self.last(self.dropout(hidden.mean((2, 3))))


class Attention(nn.Module):
    """(batch, length) token ids → (batch, length, 24): sizes of heads in the source."""

    def __init__(self, width: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(50, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.embedding(tokens))
        batch, length, width = hidden.shape
        parts = self.qkv(hidden).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        return {"hidden": hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))}
