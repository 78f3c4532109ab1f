"""`cluster.toml`: pools of machines, each of one kind, and what a device of each can do."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from penjing.core.config import Config, parse_config, read_recipe
from penjing.core.errors import ConfigError
from penjing.train.plan.hardware import Hardware, hardware, known_hardware
from penjing.train.recipe.recipe import parse_size

_NEEDED = ("flops", "memory", "memory_bandwidth", "network")  # of a kind without figures of its own
_MOST = 4  # pools: every subset is tried, in every order


class Pool(Config):
    """Machines of one kind. What is left out is what is known of the kind."""

    name: str = Field(default="", description="What messages and manifests call it; by default its kind.")
    kind: str = Field(min_length=1, description="A GPU of the planner's list, or any word, such as 'npu' or 'cpu'.")
    count: int = Field(ge=1, description="Devices of the pool: GPUs, NPUs or processors, a process each.")
    per_node: int | None = Field(default=None, ge=1, description="Devices of a machine; by default 8, or all.")
    flops: float | None = Field(default=None, gt=0, description="FLOP/s of a device, dense bfloat16.")
    efficiency: float = Field(
        default=0.0, ge=0, le=1, description="Share of flops that training reaches; 0: the kind's, or a half."
    )
    memory: str | None = Field(default=None, description="Of a device that a process may use, such as '80GiB'.")
    memory_bandwidth: float | None = Field(default=None, gt=0, description="Bytes/s.")
    node_link: float | None = Field(default=None, gt=0, description="Bytes/s between devices of a machine, for each.")
    network: float | None = Field(default=None, gt=0, description="Bytes/s between machines, for each device.")

    roles: tuple[Literal["learner", "rollout", "data"], ...] = Field(
        default=("learner", "rollout"),
        min_length=1,
        description="What the pool may do: learn, sample answers (recipes of rollouts), prepare texts.",
    )
    data_rate: float | None = Field(
        default=None, gt=0, description="Tokens/s that a device reads, cleans and tokenizes, of a pool for data."
    )
    resource: str = Field(
        default="", description="What Kubernetes counts its devices by; by default 'nvidia.com/gpu' for known kinds."
    )

    @property
    def label(self) -> str:
        """Its name, or its kind."""
        return self.name or self.kind

    @property
    def node(self) -> int:
        """Devices of a machine."""
        return self.per_node or min(8, self.count)


class Cluster(Config):
    """All pools, in any order."""

    pools: tuple[Pool, ...] = Field(min_length=1, max_length=_MOST, description="Each of one kind of device.")
    between: float | None = Field(
        default=None, gt=0, description="Bytes/s between machines of different pools, for each device; by default that "
        "of the slower network.",
    )  # fmt: skip

    prompt_tokens: int = Field(
        default=256, ge=1, description="Tokens of a prompt, where roles of a recipe of rollouts are planned."
    )

    @model_validator(mode="after")
    def _names_differ(self) -> Cluster:
        labels = [pool.label for pool in self.pools]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise ValueError(f"two pools are called {twice!r}; give each a name of its own")
        for pool in self.pools:
            if pool.count % pool.node:
                raise ValueError(
                    f"pool {pool.label!r}: count = {pool.count} is no multiple of per_node = {pool.node}; machines "
                    "must be whole"
                )
            if "data" in pool.roles and pool.data_rate is None:
                raise ValueError(
                    f"pool {pool.label!r}: of a pool for data give data_rate, tokens/s that a device prepares; a trial "
                    "of penjing curate says how many"
                )
        return self


def read_cluster(path: Path) -> Cluster:
    """The pools of a file.

    Raises:
        ConfigError: the file is missing, is no TOML, or holds something else; names the key.
    """
    if not path.is_file():
        raise ConfigError(f"--cluster {path} is no file; write one that describes pools of machines (docs/parallel.md)")
    return parse_config(Cluster, read_recipe(path), str(path))


def figures(pool: Pool) -> Hardware:
    """What one device of the pool can do: the kind's figures, and over them the pool's own.

    Raises:
        ConfigError: a kind that is not known, without its figures; lists what to give.
    """
    memory = None
    if pool.memory is not None:
        try:
            memory = parse_size(pool.memory)
        except ValueError as error:
            raise ConfigError(f"pool {pool.label!r}: memory: {error}") from None
    if pool.kind.lower() in known_hardware():
        known = hardware(pool.kind)
        return replace(
            known,
            flops=pool.flops or known.flops,
            efficiency=pool.efficiency or known.efficiency,
            memory=memory or known.memory,
            memory_bandwidth=pool.memory_bandwidth or known.memory_bandwidth,
            node_link=pool.node_link or known.node_link,
            network=pool.network or known.network,
        )
    if not (pool.flops and memory and pool.memory_bandwidth and pool.network):
        missing = [name for name in _NEEDED if getattr(pool, name) is None]
        raise ConfigError(
            f"pool {pool.label!r}: of kind {pool.kind!r} there are no figures here; give {', '.join(missing)}, or "
            f"choose a kind of {', '.join(known_hardware())}"
        )
    return Hardware(
        pool.kind, pool.flops, pool.efficiency or 0.5, memory, pool.memory_bandwidth, pool.node_link or pool.network,
        pool.network, 0.8, "the cluster's file",
    )  # fmt: skip


def joined(cluster: Cluster) -> Cluster:
    """The cluster with pools that do not differ as one: a pool of both."""
    found: list[Pool] = []
    for pool in cluster.pools:
        for place, other in enumerate(found):
            same = (pool.kind, pool.roles, pool.data_rate) == (other.kind, other.roles, other.data_rate)
            if same and figures(pool) == figures(other) and cluster.between is None:
                node = gcd(pool.node, other.node)
                found[place] = other.model_copy(update={"count": pool.count + other.count, "per_node": node})
                break
        else:
            found.append(pool)
    return cluster.model_copy(update={"pools": tuple(found)})
