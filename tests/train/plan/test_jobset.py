"""Manifests of a planned run: Kubernetes' own schema takes each job, and the parts fit each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from torch.distributed.run import parse_args

from penjing.core.errors import ConfigError
from penjing.train.plan.cluster import Pool
from penjing.train.plan.jobset import manifests, write_manifests

POOLS = [
    Pool(kind="h100", count=16),
    Pool(kind="npu", name="old-npus", count=4, per_node=2, resource="vendor.com/npu"),
    Pool(kind="a100", count=8),
]


def by_kind(pools: list[Pool]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for item in manifests(pools, Path("build/decoder-1b_pools.toml")):
        found.setdefault(item["kind"], []).append(item)
    return found


def test_each_job_is_one_by_kubernetes_schema() -> None:
    for job in by_kind(POOLS)["JobSet"][0]["spec"]["replicatedJobs"]:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        kubernetes_validate.validate(whole, "1.31", strict=True)
        wrong = whole | {"spec": whole["spec"] | {"completion": 3}}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, "1.31", strict=True)


def test_nodes_are_numbered_in_the_order_of_the_pools() -> None:
    jobs = by_kind(POOLS)["JobSet"][0]["spec"]["replicatedJobs"]
    ranks, processes = [], []
    for job in jobs:
        launch = job["template"]["spec"]["template"]["spec"]["containers"][0]["command"][2]
        found = re.search(
            r"--nnodes=5 --node-rank=\$\(\((\d+) \+ JOB_COMPLETION_INDEX\)\) --nproc-per-node=(\d+)", launch
        )
        assert found is not None
        assert "--master-addr=decoder-1b-pools-h100-0-0.decoder-1b-pools " in launch
        given = parse_args(re.sub(r"\$\(\(.*?\)\)", "0", launch).split()[4:])  # torchrun takes it
        assert (given.module, given.training_script) == (True, "penjing.train")
        assert given.training_script_args == ["/data/decoder-1b_pools.toml", "--resume=auto"]
        count = job["template"]["spec"]["completions"]
        ranks += [int(found[1]) + index for index in range(count)]
        processes.append(int(found[2]) * count)
    assert ranks == list(range(5))
    assert processes == [pool.count for pool in POOLS]


def test_flavors_queues_and_pods_name_each_other() -> None:
    found = by_kind(POOLS)
    flavors = {each["metadata"]["name"]: each["spec"]["nodeLabels"] for each in found["ResourceFlavor"]}
    jobset = found["JobSet"][0]
    pods = [job["template"]["spec"]["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]]
    assert [flavors[pool.label] for pool in POOLS] == [pod["nodeSelector"] for pod in pods]
    groups = found["ClusterQueue"][0]["spec"]["resourceGroups"]
    quota = {flavor["name"]: flavor["resources"] for group in groups for flavor in group["flavors"]}
    for group in groups:  # each flavor has what its group covers
        assert all([r["name"] for r in flavor["resources"]] == group["coveredResources"] for flavor in group["flavors"])
    for pool, pod in zip(POOLS, pods, strict=True):
        ((resource, each),) = pod["containers"][0]["resources"]["limits"].items()
        assert quota[pool.label] == [{"name": resource, "nominalQuota": pool.count}]
        assert each == pool.node
    queue = found["LocalQueue"][0]
    assert jobset["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": queue["metadata"]["name"]}
    assert queue["spec"]["clusterQueue"] == found["ClusterQueue"][0]["metadata"]["name"]


@pytest.mark.parametrize(
    ("pool", "recipe", "says"),
    [
        (Pool(kind="npu", count=1), "a.toml", "devices of kind 'npu' by is not known here; give resource"),
        (Pool(kind="h100", name="Big One", count=1), "a.toml", "pool 'Big One' becomes a part of names"),
        (Pool(kind="h100", count=1), "a b.toml", "the recipe's name 'a b' becomes"),
        (Pool(kind="h100", count=1), "x" * 40 + ".toml", "up to 30 small letters"),
    ],
)
def test_what_kubernetes_would_not_take_is_refused(pool: Pool, recipe: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        manifests([pool], Path(recipe))


def test_the_file_is_a_list_that_kubectl_takes(tmp_path: Path) -> None:
    write_manifests(tmp_path / "run.json", POOLS, Path("a.toml"))
    found = json.loads((tmp_path / "run.json").read_text())
    assert (found["apiVersion"], found["kind"], len(found["items"])) == ("v1", "List", 6)
    with pytest.raises(ConfigError, match=r"name a file that ends in \.json"):
        write_manifests(tmp_path / "run.yaml", POOLS, Path("a.toml"))
