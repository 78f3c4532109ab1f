"""A run on the machines of a Ray cluster, as `penjing train plan --ray` placed it: a torchrun on each.

    python -m penjing.train.launch.ray_nodes PLACEMENT.json

All bundles of the placement group are reserved together, or none is. On each machine an actor starts torchrun and is
asked every second how it does, so that nothing has to be cancelled by force: when a machine is lost, or a process
fails, the others are told to stop, and all begin again from the newest checkpoint, as often as `RETRIES`.
"""

from __future__ import annotations

import socket
import sys
from collections import deque
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
from penjing.train.launch.tied import TiedTorchrun

RETRIES = 3
PATIENCE = 300.0  # seconds for all machines to be free
TAIL = 30  # lines of a machine's output that an error shows
LOOK = 1.0  # seconds between two looks at all machines
STOP = 90.0  # seconds for a machine to save its state and end, before it is ended


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
    """Arguments of the torchrun of machine `rank`."""
    return [
        f"--nnodes={len(run.nodes)}", f"--node-rank={rank}", f"--nproc-per-node={run.nodes[rank].processes}",
        f"--master-addr={address}", f"--master-port={port}", "--module", "penjing.train", run.recipe, "--resume=auto",
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
    machines: list[Any] = []
    rank = 0

    def lost(error: Exception) -> str:
        return f"machine {rank} ({run.nodes[rank].pool}) was lost: {type(error).__name__}"

    try:
        for rank, node in enumerate(run.nodes):
            needs = dict(node.resources)
            options = {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0), "resources": needs}
            where = strategy(placement_group=group, placement_group_bundle_index=rank)
            # An actor of one thread: what it starts is the child of a thread that lives as long as it.
            machine = ray.remote(max_restarts=0, scheduling_strategy=where, **options)(Machine)
            machines.append(machine.remote())
        rank = 0
        address, port = ray.get(machines[0].free_port.remote())
        for rank, machine in enumerate(machines):
            if wrong := ray.get(machine.start.remote(torchrun(run, rank, address, port), str(Path.cwd()))):
                return f"machine {rank} ({run.nodes[rank].pool}): {wrong}"
        left = dict(enumerate(machines))
        tails = [deque[str](maxlen=TAIL) for _ in machines]
        while left:
            for rank, machine in [*left.items()]:
                code, lines = ray.get(machine.look.remote(LOOK / len(left)))
                for line in lines:
                    print(f"{run.nodes[rank].pool} {rank}: {line}", end="", flush=True)
                tails[rank].extend(lines)
                if code:
                    return f"machine {rank} ({run.nodes[rank].pool}) ended with {code}:\n{''.join(tails[rank])}"
                if code == 0:
                    del left[rank]
    except ray.exceptions.RayError as error:
        return lost(error)
    finally:
        _end(ray, machines)
    return ""


def _end(ray: Any, machines: Sequence[Any]) -> None:
    """Stop what still runs, on all machines at a time, and give them back."""
    stopping = []
    for machine in machines:
        with suppress(ray.exceptions.RayError):
            stopping.append(machine.stop.remote(STOP))
    for each in stopping:
        with suppress(ray.exceptions.RayError):  # its machine is lost
            ray.get(each, timeout=2 * STOP)
    for machine in machines:
        ray.kill(machine)


class Machine:
    """An actor: the torchrun of one machine."""

    def __init__(self) -> None:
        self._torchrun: TiedTorchrun | None = None

    def free_port(self) -> tuple[str, int]:
        """Of this machine: its address among the cluster's, and a port that is free now."""
        address = import_module("ray").util.get_node_ip_address()
        with socket.socket() as found:
            found.bind(("", 0))
            return address, found.getsockname()[1]

    def start(self, arguments: list[str], folder: str) -> str:
        """Start torchrun in a folder; what is wrong with it, or nothing."""
        if not Path(folder).is_dir():
            return f"{folder} is not there; all machines must see the same files"
        try:
            self._torchrun = TiedTorchrun(arguments, Path(folder))
        except SetupError as error:
            return str(error)
        return ""

    def look(self, seconds: float) -> tuple[int | None, list[str]]:
        """Its exit status, None if it still runs after `seconds`, and what it said since the last look."""
        assert self._torchrun is not None
        return self._torchrun.wait(seconds), self._torchrun.said()

    def stop(self, patience: float) -> None:
        """End it."""
        if self._torchrun is not None:
            self._torchrun.stop(patience)


if __name__ == "__main__":
    sys.exit(guarded(run_file))
