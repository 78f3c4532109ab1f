"""Roles of pools: the choice against brute force, what is written, and what is refused."""

from __future__ import annotations

import itertools
import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import parse_args

from penjing.core import cli
from penjing.core.config import dump_toml, read_recipe
from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.train.launch.ray_nodes import read_ray_run, run_file, torchrun
from penjing.train.pipeline.shape import decoder_shape
from penjing.train.plan.cluster import Cluster, Pool, figures
from penjing.train.plan.placement import find_ways
from penjing.train.plan.planner import plan_cluster
from penjing.train.plan.ray_placement import placement, write_placement
from penjing.train.plan.roles import Sampling, answer_seconds, assign_roles
from penjing.train.plan.search import HEADROOM
from tests.conftest import tiny_config

ANSWERS = Sampling(prompts=8, samples=1, tokens=20, length=12)


def model() -> DecoderConfig:
    return DecoderConfig.model_validate(tiny_config(num_hidden_layers=4).model_dump())


def pool(name: str, flops: float, *roles: str, memory: str = "1GiB", count: int = 1, **more: Any) -> Pool:
    given = {
        "kind": name, "count": count, "per_node": 1, "flops": flops, "memory": memory, "memory_bandwidth": flops / 100,
        "network": 1e9, "efficiency": 0.5,
    }  # fmt: skip
    return Pool.model_validate(given | ({"roles": roles} if roles else {}) | more)


THREE = (
    pool("quick", 8e9, count=2),
    pool("reader", 1e9, "rollout", memory_bandwidth=4e8, count=2),
    pool("slow", 3e9, "learner", "rollout", "data", data_rate=5e4),
)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("small", [None, "0.004GiB"])
def test_roles_of_rollouts_are_those_of_brute_force(size: int, small: str | None) -> None:
    pools = [each if small is None else each.model_copy(update={"memory": small}) for each in THREE[:size]]
    cluster = Cluster(pools=tuple(pools))
    tokens = ANSWERS.length + ANSWERS.tokens
    found = assign_roles(model(), cluster, batch_size=ANSWERS.count, length=tokens, answers=ANSWERS)
    shape, best = decoder_shape(model()), float("inf")
    learning = {frozenset(p.pool.label for p in one.learner.parts): one.learner for one in found}
    for roles in itertools.product(("", "learner", "rollout", "learner rollout", "data"), repeat=size):
        if any(role not in each.roles for each, some in zip(pools, roles, strict=True) for role in some.split()):
            continue
        of = {
            role: [p for p, some in zip(pools, roles, strict=True) if role in some.split()]
            for role in ("learner", "rollout", "data")
        }
        learner = learning.get(frozenset(p.label for p in of["learner"]))
        needs_data = any("data" in p.roles for p in pools)
        if learner is None or not of["rollout"] or (needs_data and not of["data"]):
            continue
        held = {part.pool.label: part.memory for part in learner.parts}
        sampling = float("inf")
        for split in itertools.product(range(1, ANSWERS.count + 1), repeat=len(of["rollout"])):
            if sum(split) != ANSWERS.count:
                continue
            times = [
                answer_seconds(shape, figures(p), ceil(n / p.count), ANSWERS, held.get(p.label, 0.0))
                for p, n in zip(of["rollout"], split, strict=True)
            ]
            if all(time is not None for time in times):
                sampling = min(sampling, max(time or 0.0 for time in times))
        apart = [p for p in of["rollout"] if p not in of["learner"]]
        weights = len(apart) * 2 * shape.parameters / 1e9
        data = 8 * ANSWERS.length / sum(p.count * (p.data_rate or 0) for p in of["data"]) if of["data"] else 0.0
        best = min(best, max(data, sampling + weights + learner.step))
    assert found[0].step == pytest.approx(best)
    assert [one.step for one in found] == sorted(one.step for one in found)


def test_texts_are_learnt_as_without_roles_where_data_costs_nothing() -> None:
    learners = (pool("quick", 8e9, count=2), pool("slow", 3e9))
    readers = pool("cpu", 1e9, "data", data_rate=1e9, memory="1MiB")
    plain = find_ways(model(), Cluster(pools=learners), batch_size=8, length=64).placements[0]
    best = assign_roles(model(), Cluster(pools=(*learners, readers)), batch_size=8, length=64)[0]
    assert (best.learner, best.step, best.data, best.runs) == (plain, plain.step, ("cpu",), True)
    slower = readers.model_copy(update={"data_rate": 8 * 64 / (3 * plain.step)})
    found = assign_roles(model(), Cluster(pools=(*learners, slower)), batch_size=8, length=64)[0]
    assert found.step == pytest.approx(3 * plain.step)  # they wait for it


def test_what_is_more_to_sample_never_takes_less() -> None:
    shape, device = decoder_shape(model()), figures(THREE[1])
    times = [answer_seconds(shape, device, load, ANSWERS, 0.0) or 0.0 for load in range(1, 40)]
    assert times == sorted(times)
    assert answer_seconds(shape, device, 1, ANSWERS, device.memory) is None


def test_memory_of_learning_is_not_there_for_sampling() -> None:
    large = assign_roles(model(), Cluster(pools=(pool("one", 8e9),)), batch_size=8, length=32, answers=ANSWERS)
    need = min(part.memory for one in large for part in one.learner.parts)
    memory = str(int((need + decoder_shape(model()).parameters) / HEADROOM))
    pools = (pool("one", 8e9, memory=memory), pool("other", 8e9, memory=memory))
    found = assign_roles(model(), Cluster(pools=pools), batch_size=8, length=32, answers=ANSWERS)
    assert found
    for one in found:
        assert not one.rollout.keys() & {part.pool.label for part in one.learner.parts}
        assert not one.runs


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    config = {key: value for key, value in model().model_dump(mode="json").items() if value is not None}
    values = {
        "output": "out", "steps": 4, "model": {"architecture": "decoder"} | config,
        "data": {"kind": "text", "sources": ["builtin:calibration"], "batch_size": 8, "sequence_length": 64},
    }  # fmt: skip
    (tmp_path / "train.toml").write_text(dump_toml(values))
    return tmp_path / "train.toml"


def cluster_file(folder: Path, *pools: Pool) -> Path:
    values = [{k: v for k, v in p.model_dump(mode="json").items() if v not in (None, "")} for p in pools]
    (folder / "cluster.toml").write_text(dump_toml({"pools": values}))
    return folder / "cluster.toml"


def test_the_plan_says_who_does_what(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readers = pool("cpu", 1e9, "data", data_rate=1e5, memory="1MiB", count=2)
    cluster = cluster_file(tmp_path, pool("quick", 8e9, count=2), pool("slow", 3e9), readers)
    out, ray = tmp_path / "planned.toml", tmp_path / "ray.json"
    given = ["train", "plan", str(recipe), "--cluster", str(cluster), "--out", str(out), "--ray", str(ray)]
    assert cli._run([*given, "--json", str(tmp_path / "rows.json")]) == 0
    said = capsys.readouterr().err
    assert "data: cpu" in said
    assert "ray.resources={penjing_cpu=1}" in said
    assert "python -m penjing.train.launch.ray_nodes" in said
    (row, *_) = json.loads((tmp_path / "rows.json").read_text())
    assert row["data"] == ["cpu"]
    assert any("data: cpu" in line for line in out.read_text().splitlines()[:6])
    assert read_recipe(out)["parallel"]
    nodes = read_ray_run(ray).nodes
    assert [node.pool for node in nodes] == [
        name for name in row["learner"] for _ in range(2 if name == "quick" else 1)
    ]


def test_a_placement_is_a_torchrun_on_each_machine(tmp_path: Path) -> None:
    pools = [Pool(kind="h100", count=16), pool("npu", 1e9, count=2), pool("cpu", 1e9, resource="cpu")]
    made = placement(pools, Path("build/run.toml"))
    assert [node["resources"] for node in made["nodes"]] == [
        *[{"penjing_h100": 8.0, "GPU": 8.0}] * 2,
        *[{"penjing_npu": 1.0}] * 2,
        {"penjing_cpu": 1.0, "CPU": 1.0},
    ]
    write_placement(tmp_path / "ray.json", pools, Path("build/run.toml"))
    read = read_ray_run(tmp_path / "ray.json")
    for rank, processes in enumerate([8, 8, 1, 1, 1]):
        given = parse_args(torchrun(read, rank, "10.0.0.1", 4000))  # torchrun takes it
        assert (given.nnodes, given.node_rank, given.nproc_per_node) == ("5", rank, str(processes))
        assert (given.module, given.training_script) == (True, "penjing.train")
        assert given.training_script_args == ["build/run.toml", "--resume=auto"]
    with pytest.raises(ConfigError, match=r"name a file that ends in \.json"):
        write_placement(tmp_path / "ray.yaml", pools, Path("run.toml"))
    with pytest.raises(ConfigError, match="give the file that"):
        run_file([])


@pytest.mark.parametrize(
    ("pools", "says"),
    [
        ([pool("cpu", 1e9, "data", data_rate=1.0)], "no pool may be learner"),
        ([pool("tiny", 1e9, memory="1KiB")], "no way to give the pools roles fits"),
        ([pool("slow", 1e9, "learner")], "no pool may be rollout"),
    ],
)
def test_roles_that_nobody_can_have_are_refused(pools: list[Pool], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        assign_roles(model(), Cluster(pools=tuple(pools)), batch_size=8, length=32, answers=ANSWERS)


def test_settings_of_roles_are_checked(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give data_rate, tokens/s that a device prepares"):
        Cluster(pools=(pool("cpu", 1e9, "data"),))
    with pytest.raises(ConfigError, match=r"--ray: what it writes runs the planned recipe"):
        plan_cluster(recipe, cluster_file(tmp_path, *THREE), ray=tmp_path / "ray.json")
