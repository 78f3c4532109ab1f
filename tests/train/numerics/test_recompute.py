from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from penjing.core.errors import ConfigError
from penjing.core.models.decoder import Decoder
from penjing.train.numerics.recompute import RecomputeRule, apply_recompute, blocks
from tests.conftest import tiny_config


def test_blocks_are_the_repeated_parts() -> None:
    assert list(blocks(Decoder(tiny_config()))) == ["model.layers.0", "model.layers.1"]
    assert blocks(nn.Linear(2, 2)) == {}


def test_rules_choose_blocks_by_name() -> None:
    model = Decoder(tiny_config())
    plain = type(model.model.layers[0])
    apply_recompute(model, "none", (RecomputeRule(match="*.1", recompute="full"),))
    assert type(model.model.layers[0]) is plain
    assert type(model.model.layers[1]) is not plain
    with pytest.raises(ConfigError, match=r"'\*.9' matches no block; blocks are model.layers.0, model.layers.1"):
        apply_recompute(model, "none", (RecomputeRule(match="*.9", recompute="full"),))
    with pytest.raises(ConfigError, match="no repeated blocks"):
        apply_recompute(nn.Linear(2, 2), "full")


def test_running_statistics_move_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(_Block(), _Block()))
    twin = copy.deepcopy(model)
    apply_recompute(model, "full")
    x = torch.randn(4, 2, 9, 9)
    gradients = []
    for net in (model, twin):
        torch.manual_seed(5)
        net(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.conv(x)).relu())
