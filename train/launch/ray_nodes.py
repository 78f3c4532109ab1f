"""A run on the machines of a Ray cluster, as `penjing train plan --ray` placed it: a torchrun on each.

    python -m penjing.train.launch.ray_nodes PLACEMENT.json

All bundles of the placement group are reserved together, or none is. When a machine is lost, or a process fails, all
begin again from the newest checkpoint, as often as `RETRIES`.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import Field

from penjing.core.cli import guarded
from penjing.core.cluster.ray_cluster import RaySettings, connected_ray
from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.core.manifest import read_json_object

RETRIES = 3
PATIENCE = 300.0  # seconds for all machines to be free
TAIL = 30  # lines of a machine's output that an error shows
_PR_SET_PDEATHSIG = 1  # prctl(2)


class RayMachine(Config):
    """A machine of the run."""

    pool: str = Field(description="Whose machine it is.")
    processes: int = Field(ge=1, description="That it runs.")
    resources: dict[str, float] = Field(min_length=1, description="What it reserves.")


class RayRun(Config):
    """All machines, in the order of their processes."""

    schema_version: int = Field(ge=1, le=1, description="Of this file.")
    recipe: str = Field(description="The training recipe, at the same path on all machines.")
    nodes: tuple[RayMachine, ...] = Field(min_length=1, description="The machines.")


def run_file(arguments: Sequence[str] | None = None) -> int:
    """Do what a file says."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1:
        raise ConfigError("give the file that 'penjing train plan --ray' wrote")
    run_on_ray(read_ray_run(Path(given[0])))
    return 0


def read_ray_run(path: Path) -> RayRun:
    """What the file says.

    Raises:
        ConfigError: the file holds something else. InputError: it is missing or damaged.
    """
    return parse_config(RayRun, read_json_object(path), str(path))


def torchrun(run: RayRun, rank: int, address: str, port: int) -> list[str]:
    """What the machine `rank` runs."""
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(run.nodes)}", f"--node-rank={rank}",
        f"--nproc-per-node={run.nodes[rank].processes}", f"--master-addr={address}", f"--master-port={port}",
        "--module", "penjing.train", run.recipe, "--resume=auto",
    ]  # fmt: skip


def run_on_ray(run: RayRun, address: str = "auto", patience: float = PATIENCE) -> None:
    """Run until it is done.

    Args:
        address: of the Ray cluster; "auto" is the one that this machine is part of.
        patience: seconds to wait until all machines are free.

    Raises:
        SetupError: Ray is missing, there is no cluster, or not all machines are free in time.
        InputError: the run failed more often than `RETRIES`; shows what the machine said.
    """
    ray = connected_ray(RaySettings(address=address))
    groups = import_module("ray.util.placement_group")
    bundles = [dict(node.resources) for node in run.nodes]
    group = groups.placement_group(bundles, strategy="STRICT_SPREAD")
    try:
        if not group.wait(patience):
            wanted = "; ".join(f"{node.pool}: {node.resources}" for node in run.nodes)
            raise SetupError(
                f"not all {len(bundles)} machines are free within {patience:g} seconds ({wanted}); start them with "
                "'ray start --resources' as the plan said, or wait for other work there"
            )
        said = ""
        for _ in range(RETRIES + 1):
            said = _attempt(ray, group, run)
            if not said:
                return
            print(f"{said}\nall begin again from the newest checkpoint", file=sys.stderr)
            group.wait(patience)
        raise InputError(f"the run failed {RETRIES + 1} times; the last time {said}")
    finally:
        groups.remove_placement_group(group)


def _attempt(ray: Any, group: Any, run: RayRun) -> str:
    """Run once; what went wrong, or nothing."""
    strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy

    def on(rank: int, function: Any) -> Any:
        needs = dict(run.nodes[rank].resources)
        options = {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0), "resources": needs}
        where = strategy(placement_group=group, placement_group_bundle_index=rank)
        return ray.remote(max_retries=0, scheduling_strategy=where, **options)(function)

    refs: dict[Any, int] = {}
    rank = 0
    try:
        address, port = ray.get(on(0, _free_port).remote())
        for rank in range(len(run.nodes)):
            refs[on(rank, _run).remote(torchrun(run, rank, address, port), str(Path.cwd()))] = rank
        left = list(refs)
        while left:
            (done, *_), left = ray.wait(left, num_returns=1)
            rank = refs[done]
            code, tail = ray.get(done)
            if code:
                return f"machine {rank} ({run.nodes[rank].pool}) ended with {code}:\n{tail}"
    except ray.exceptions.RayError as error:
        return f"machine {rank} ({run.nodes[rank].pool}) was lost: {type(error).__name__}"
    finally:
        for ref in refs:
            with suppress(ray.exceptions.RayError):
                ray.cancel(ref, force=True)
    return ""


def _free_port() -> tuple[str, int]:
    """Of this machine: its address among the cluster's, and a port that is free now."""
    address = import_module("ray").util.get_node_ip_address()
    with socket.socket() as found:
        found.bind(("", 0))
        return address, found.getsockname()[1]


def _run(given: list[str], folder: str) -> tuple[int, str]:
    """Run a command in a folder, by a process that ends with this one; its exit status, and its last lines."""
    if not Path(folder).is_dir():
        return SetupError.exit_code, f"{folder} is not there; all machines must see the same files"
    process = subprocess.Popen(
        given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, preexec_fn=_end_with_the_task
    )
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        print(line, end="", flush=True)  # Ray shows it where the job was submitted
        lines = [*lines[1 - TAIL :], line]
    return process.wait(), "".join(lines)


def _end_with_the_task() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(guarded(run_file))
