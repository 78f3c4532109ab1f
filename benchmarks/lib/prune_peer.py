"""Torch-Pruning's choice of MLP channels at the widths that ours leaves, written as a checkpoint of ours."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch_pruning
from torch import nn

from penjing.compress.prune.budget import shapes_after
from penjing.compress.prune.graph import Group, dependency_graph
from penjing.compress.prune.ranking import select
from penjing.compress.prune.subject import shapes_of
from penjing.compress.prune.surgery import cuts_of
from penjing.compress.prune_decoder.subject import DecoderSubject
from penjing.core.files import publish_folder
from penjing.core.progress import Progress

NAME = f"Torch-Pruning {version('torch-pruning')} L1"


def prune_by_torch_pruning(source: Path, out: Path, ratio: float, round_to: int, progress: Progress) -> None:
    """Remove `ratio` of every layer's MLP channels of the decoder `source`: those with the least group L1 norm as
    Torch-Pruning computes it (its defaults: mean over the group, over the group's mean)."""
    subject = DecoderSubject(source, ("ffn",), (), progress)
    groups = subject.parts(dependency_graph(subject.model, subject.example).groups)["ffn"]
    progress.start("Torch-Pruning's importance", len(groups))
    scores = []
    for group in groups:
        scores.append(_scores(subject, group))
        progress.advance()
    choice = select(groups, scores, ratio, round_to=round_to)
    shapes = shapes_of(subject.model)
    with publish_folder(out) as partial:
        config = subject.config_of(shapes_after(subject, choice), choice)
        subject.write(partial, config, cuts_of(choice, shapes), {"command": "benchmarks", "selection": NAME})


def _scores(subject: DecoderSubject, group: Group) -> np.ndarray:
    """Its importance of each unit of `group`, (units,)."""
    position, place = next(
        (index, place) for index, place in enumerate(group.places) if place.tensor.endswith("gate_proj.weight")
    )
    prefix = place.tensor.removesuffix("gate_proj.weight")
    weights = [subject.weights(f"{prefix}{name}.weight") for name in ("gate_proj", "up_proj", "down_proj")]
    mlp = _Gated(*(weight.to(torch.float32) for weight in weights if weight is not None))
    graph = torch_pruning.DependencyGraph().build_dependency(mlp, example_inputs=torch.randn(2, mlp.gate.in_features))
    count = mlp.gate.out_features
    theirs = graph.get_pruning_group(mlp.gate, torch_pruning.prune_linear_out_channels, list(range(count)))
    importance = torch_pruning.importance.GroupMagnitudeImportance(p=1)(theirs)
    assert importance is not None
    return np.array([float(importance[unit[position]].sum()) for unit in group.units])


class _Gated(nn.Module):
    """The MLP of a decoder layer in operations that Torch-Pruning can trace: ours runs in one of our own."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(w.shape[1], w.shape[0], bias=False) for w in (gate, up, down))
        for layer, weight in ((self.gate, gate), (self.up, up), (self.down, down)):
            layer.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))
