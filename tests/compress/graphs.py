"""Checkpoints of small graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penjing.core.checkpoint.graph import save_graph
from penjing.core.files import publish_folder
from penjing.core.graph.network import Network
from penjing.core.graph.trace import from_torch


def graph_folder(path: Path, model: nn.Module, *example: Tensor, seed: int = 0, **settings: Any) -> Path:
    """The checkpoint of `model` with random weights, at `path`."""
    return write_graph(path, graph(model, *example, seed=seed, **settings))


def graph(model: nn.Module, *example: Tensor, seed: int = 0, **settings: Any) -> Network:
    """`model` with random weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / max(parameter[0].numel(), 1) ** 0.5)
    return from_torch(model.eval(), example, **settings)


def write_graph(path: Path, network: Network) -> Path:
    """The checkpoint of `network`, at `path`."""
    with publish_folder(path) as partial:
        save_graph(partial, network, {"command": "test"})
    return path
