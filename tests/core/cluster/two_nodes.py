"""A Ray cluster of this machine: a head that takes no tasks, and nodes of one processor each, that can be killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

STORE_BYTES = 80_000_000


class TwoNodes:
    """Its nodes have the resources `trial` and `penjing_pool`."""

    def __init__(self) -> None:
        utils: Any = import_module("ray.cluster_utils")
        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self._cluster = utils.Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self._node(), self._node()]

    @property
    def address(self) -> str:
        """As `ray.address` takes it."""
        return str(self._cluster.address)

    def kill_one(self) -> None:
        """End a node as a crash would; another takes its place the next time."""
        self._cluster.remove_node(self._nodes.pop(), allow_graceful=False)

    def mend(self) -> None:
        """Give it two nodes again."""
        while len(self._nodes) < 2:
            self._nodes.append(self._node())

    def shutdown(self) -> None:
        """End it."""
        import_module("ray").shutdown()
        self._cluster.shutdown()

    def _node(self) -> Any:
        return self._cluster.add_node(
            num_cpus=1, object_store_memory=STORE_BYTES, resources={"trial": 1, "penjing_pool": 1}
        )


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """A cluster while it is needed."""
    cluster = TwoNodes()
    try:
        yield cluster
    finally:
        cluster.shutdown()
