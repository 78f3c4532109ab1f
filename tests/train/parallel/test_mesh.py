"""Who has which share of the batch and which part of the model, for meshes of processes that do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from penjing.train.parallel.config import ParallelConfig
from penjing.train.parallel.mesh import build_mesh, describe
from penjing.train.processes.world import World


@pytest.fixture
def sixteen() -> Iterator[World]:
    """Rank 13 of 16 processes."""
    dist.init_process_group("fake", rank=13, world_size=16, store=FakeStore())
    yield World(13, 16)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("parallel", "spread", "part"),
    [
        ({"zero": 3}, list(range(16)), 13),
        ({"zero": 3, "shards": 4}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]], 13),
        ({"zero": 1, "shards": 2, "tp": 2}, [[1, 3], [5, 7], [9, 11], [13, 15]], 6),
        # Processes of a context have the same weights: ZeRO spreads over them too.
        ({"zero": 2, "shards": 2, "cp": 2}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]], 6),
        ({"zero": 3, "shards": 2, "pp": 2}, [[1, 3], [5, 7], [9, 11], [13, 15]], 6),
    ],
)
def test_neighbours_are_shards_and_others_are_copies(
    sixteen: World, parallel: dict[str, Any], spread: list[Any], part: int
) -> None:
    world = build_mesh(sixteen, ParallelConfig(**parallel))
    assert world.fsdp.mesh.tolist() == spread  # (copies, shards)
    assert world.data.rank == part
    assert world.data.size == 16 // max(parallel.get("tp", 1), parallel.get("cp", 1), parallel.get("pp", 1))
    assert (f"over {parallel['shards']} of them, in copies" in describe(world)) if "shards" in parallel else True
