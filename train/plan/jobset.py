"""A planned run for Kubernetes: a JobSet with a job for each pool, and Kueue's flavors and queues of its devices.

Processes must be numbered in the order of the pools, so nodes are: the pods of a pool begin where those before it end,
and torchrun is told. A pod is a machine; it goes to the nodes with the label `penjing/pool` of its pool, which is what
the flavor names too. (https://jobset.sigs.k8s.io, https://kueue.sigs.k8s.io/docs/concepts/resource_flavor)
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penjing.core.errors import ConfigError
from penjing.core.files import atomic_write_text
from penjing.train.plan.cluster import Pool
from penjing.train.plan.hardware import known_hardware

_LABEL = "penjing/pool"
_PORT = 29500
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,28}[a-z0-9])?")  # a part of a pod's name, of which 63 characters are allowed


def write_manifests(path: Path, pools: Sequence[Pool], recipe: Path) -> None:
    """Write the resources of a run of `recipe` on `pools`, in the order of its processes, as a list that kubectl takes.

    Raises:
        ConfigError: a name that Kubernetes does not take, or a kind of device whose resource is not known.
        SetupError: the file cannot be written.
    """
    if path.suffix != ".json":
        raise ConfigError(f"--kubernetes {path}: the manifests are a JSON list; name a file that ends in .json")
    items = manifests(pools, recipe)
    atomic_write_text(path, json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=1) + "\n")


def manifests(pools: Sequence[Pool], recipe: Path) -> list[dict[str, Any]]:
    """ResourceFlavors, a ClusterQueue, a LocalQueue, and the JobSet that goes through them.

    Raises:
        ConfigError: see `write_manifests`.
    """
    name = recipe.stem.lower().replace("_", "-").replace(".", "-")
    for given, what in ((name, f"the recipe's name {recipe.stem!r}"), *((p.label, f"pool {p.label!r}") for p in pools)):
        if not _NAME.fullmatch(given):
            raise ConfigError(
                f"{what} becomes a part of names in Kubernetes: up to 30 small letters, digits and hyphens; rename it"
            )
    flavors = [
        _resource("kueue.x-k8s.io/v1beta1", "ResourceFlavor", pool.label, {"nodeLabels": {_LABEL: pool.label}})
        for pool in pools
    ]
    groups: dict[str, list[Pool]] = {}
    for pool in pools:
        groups.setdefault(resource_of(pool), []).append(pool)
    queue = {
        "namespaceSelector": {},
        "resourceGroups": [
            {
                "coveredResources": [resource],
                "flavors": [
                    {"name": pool.label, "resources": [{"name": resource, "nominalQuota": pool.count}]}
                    for pool in members
                ],
            }
            for resource, members in groups.items()
        ],
    }
    local = _resource("kueue.x-k8s.io/v1beta1", "LocalQueue", name, {"clusterQueue": name})
    nodes = [pool.count // pool.node for pool in pools]
    jobs = [
        _job(name, pools[0].label, pool, nodes=count, first=sum(nodes[:place]), total=sum(nodes), recipe=recipe.name)
        for place, (pool, count) in enumerate(zip(pools, nodes, strict=True))
    ]
    jobset = _resource(
        "jobset.x-k8s.io/v1alpha2", "JobSet", name,
        {"network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
         "failurePolicy": {"maxRestarts": 3}, "replicatedJobs": jobs},
    )  # fmt: skip
    jobset["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": name}
    return [*flavors, _resource("kueue.x-k8s.io/v1beta1", "ClusterQueue", name, queue), local, jobset]


def resource_of(pool: Pool) -> str:
    """What Kubernetes counts the pool's devices by.

    Raises:
        ConfigError: a kind whose resource is not known.
    """
    if pool.resource or pool.kind.lower() in known_hardware():
        return pool.resource or "nvidia.com/gpu"
    raise ConfigError(
        f"pool {pool.label!r}: what Kubernetes counts devices of kind {pool.kind!r} by is not known here; give "
        "resource, such as 'amd.com/gpu', or 'cpu' for processors"
    )


def _resource(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _job(name: str, main: str, pool: Pool, *, nodes: int, first: int, total: int, recipe: str) -> dict[str, Any]:
    launch = (
        f"exec python3 -m torch.distributed.run --nnodes={total} --node-rank=$(({first} + JOB_COMPLETION_INDEX)) "
        f"--nproc-per-node={pool.node} --master-addr={name}-{main}-0-0.{name} --master-port={_PORT} "
        f"--module penjing.train /data/{recipe} --resume=auto"
    )
    container = {
        "name": "train",
        "image": "penjing:gpu" if resource_of(pool) == "nvidia.com/gpu" else "penjing:cpu",
        "command": ["/bin/sh", "-c", launch],
        "workingDir": "/data",
        "ports": [{"containerPort": _PORT}],
        "resources": {"requests": {resource_of(pool): pool.node}, "limits": {resource_of(pool): pool.node}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "work", "mountPath": "/data"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 120,  # time to write a last checkpoint
        "nodeSelector": {_LABEL: pool.label},
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "fsGroup": 10001},
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": "penjing-work"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL exchanges buffers there
        ],
    }
    job = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,  # all processes begin again together, by the JobSet
        "template": {"spec": pod},
    }
    return {"name": pool.label, "replicas": 1, "template": {"spec": job}}
