"""Small networks that bring what placement has rules for."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Branches(nn.Module):
    """(batch, 3, 16, 16) → (batch, 6): grouped and plain convolutions, ReLU6, a concatenation, a max pool, SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU6())
        self.left = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.right = nn.Conv2d(16, 8, 1)
        self.pool = nn.MaxPool2d(2)
        self.mixed = nn.Sequential(nn.Conv2d(24, 24, 3, padding=1), nn.SiLU())
        self.shortcut = nn.Conv2d(24, 24, 1)
        self.last = nn.Linear(24, 6)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        x = self.pool(torch.cat([self.left(x), self.right(x)], 1))
        return self.last((self.mixed(x) + self.shortcut(x)).mean((2, 3)))


class Block(nn.Module):
    """(batch, length, 32) → the same: a block of a transformer, norms first, with a matrix stored the other way."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Parameter(torch.randn(4 * width, width) / 12)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + nn.functional.gelu(self.up(self.second(x))) @ self.down


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """`model` in evaluation mode, its batch norms far from trivial."""
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.uniform_(module.weight, -0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
            nn.init.normal_(module.running_mean, 0, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.eval()
