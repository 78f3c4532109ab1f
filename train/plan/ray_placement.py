"""A planned run for a Ray cluster: a placement group with a bundle for each machine, and what starts the run in it.

Machines of a pool offer the custom resource `penjing_POOL`, as many as they have devices, so that a bundle finds its
machine whatever else a cluster holds. NVIDIA's are reserved as GPU too, for Ray hides them from whoever asks for none.
(https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penjing.core.errors import ConfigError
from penjing.core.files import atomic_write_text
from penjing.train.plan.cluster import Pool
from penjing.train.plan.hardware import known_hardware

SCHEMA = 1


def write_placement(path: Path, pools: Sequence[Pool], recipe: Path, data: Sequence[str] = ()) -> list[str]:
    """Write the placement of a run of `recipe` on `pools`, in the order of its processes.

    Args:
        data: names of pools that prepare data beside it.

    Returns:
        The commands that come next, a line each.

    Raises:
        ConfigError: the file's name is not that of a JSON file.
        SetupError: the file cannot be written.
    """
    if path.suffix != ".json":
        raise ConfigError(f"--ray {path}: the placement is JSON; name a file that ends in .json")
    atomic_write_text(path, json.dumps(placement(pools, recipe), indent=1) + "\n")
    starts = [
        f"on each machine of {pool.label}: ray start --address HEAD:6379 "
        f"--resources='{json.dumps({resource(pool.label): pool.node})}'"
        for pool in pools
    ]
    prepares = [
        f"to prepare data on {name}: penjing curate RECIPE --set ray.resources={{{resource(name)}=1}}" for name in data
    ]
    return [
        *starts,
        *prepares,
        f"then, where the recipe's paths begin: python -m penjing.train.launch.ray_nodes {path}",
    ]


def placement(pools: Sequence[Pool], recipe: Path) -> dict[str, Any]:
    """What the file holds: the recipe, and of each machine its pool, processes and what it reserves."""
    nodes = []
    for pool in pools:
        needs = {resource(pool.label): float(pool.node)}
        if pool.kind.lower() in known_hardware() or pool.resource == "nvidia.com/gpu":
            needs["GPU"] = float(pool.node)
        elif pool.resource == "cpu":
            needs["CPU"] = float(pool.node)
        nodes += [{"pool": pool.label, "processes": pool.node, "resources": needs}] * (pool.count // pool.node)
    return {"schema_version": SCHEMA, "recipe": str(recipe), "nodes": nodes}


def resource(label: str) -> str:
    """The custom resource of a pool's machines."""
    return f"penjing_{label}"
