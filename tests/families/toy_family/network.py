"""Toys: linear layers with ReLU between them that sort points into classes, and the points that they are made for.

config.json        {"penjing_family": "toy", "widths": [inputs, hidden …, classes]}
model.safetensors  layers.N.weight and layers.N.bias
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from penjing.core.manifest import verify, write_manifest

INPUTS, CLASSES = 8, 3
WEIGHTS = "model.safetensors"


class Mlp(nn.Module):
    """(B, inputs) float32 → (B, classes).

    Args:
        widths: of the input, of each hidden layer, and of the output.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.widths = tuple(widths)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """(count, INPUTS) float32 and their classes, (count,) int64: the largest of the first numbers."""
    x = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :CLASSES].argmax(1)


def widths_of(folder: Path) -> tuple[int, ...]:
    """What `config.json` says."""
    return tuple(json.loads((folder / "config.json").read_text())["widths"])


def write_config(folder: Path, widths: Sequence[int]) -> None:
    """Write `config.json`."""
    (folder / "config.json").write_text(json.dumps({"penjing_family": "toy", "widths": list(widths)}))


def save(folder: Path, model: Mlp, created_by: dict[str, Any]) -> None:
    """Write a checkpoint."""
    write_config(folder, model.widths)
    save_file(model.state_dict(), folder / WEIGHTS)
    write_manifest(folder, "checkpoint", created_by)


def load(folder: Path) -> Mlp:
    """A checkpoint's network, in evaluation mode; every hash is checked."""
    verify(folder)
    model = Mlp(widths_of(folder))
    model.load_state_dict(load_file(folder / WEIGHTS))
    return model.eval()


def trained() -> Mlp:
    """A network that has learnt its task."""
    torch.manual_seed(0)
    model = Mlp((INPUTS, 32, 24, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(200):
        x, labels = points(256, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    return model.eval()


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True)
    save(out, trained(), {"command": "toy"})
