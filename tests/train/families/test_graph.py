"""Training a graph further on folders of classes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from penjing.core.config import parse_config
from penjing.core.graph.config import Pixels
from penjing.core.progress import Silent
from penjing.train.families.base import build_task
from penjing.train.processes.world import World
from penjing.train.recipe.recipe import TrainRecipe
from tests.compress.graphs import graph_folder
from tests.core.graph.networks import Residual
from tests.train.sources.photos import folder_of


def test_a_part_of_what_is_held_out_has_all_classes(tmp_path: Path) -> None:
    network = Residual()
    network.last = nn.Linear(16, 2)
    pixels = Pixels(height=16, width=16, mean=(0.5,) * 3, std=(0.25,) * 3)
    graph = graph_folder(tmp_path / "net", network, torch.randn(4, 3, 16, 16), meaning="classes", pixels=pixels)
    photos = folder_of(tmp_path / "photos", {"cat": 40, "dog": 40})
    values = {
        "initial": graph,
        "output": tmp_path / "out",
        "steps": 1,
        "data": {"kind": "samples", "source": str(photos), "batch_size": 4, "held_out": 0.3},
        "evaluation": {"every": 1, "samples": 8},
    }
    task = build_task(parse_config(TrainRecipe, values, "recipe"), Silent())
    judged = [int(target) for batch in task.held_out(4, World()) for target in batch["targets"]]
    assert len(judged) == 8
    assert min(judged.count(0), judged.count(1)) >= 2
