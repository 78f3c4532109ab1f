"""Pools of unlike machines: the choice against brute force, one pool as today's plan, and what is refused."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from penjing.core import cli
from penjing.core.config import dump_toml, load_recipe
from penjing.core.errors import ConfigError
from penjing.train.parallel.config import ParallelConfig
from penjing.train.pipeline.shape import decoder_shape
from penjing.train.plan.cluster import Cluster, Pool, figures, joined, read_cluster
from penjing.train.plan.cost import step_time
from penjing.train.plan.hardware import Hardware, hardware
from penjing.train.plan.memory import Run, rank_memory
from penjing.train.plan.placement import HEADROOM, assign_layers, find_placements, stage_cost
from penjing.train.plan.planner import plan_cluster, plan_recipe
from penjing.train.plan.preflight import recipe_run
from penjing.train.plan.search import Plan
from penjing.train.recipe.recipe import TrainRecipe
from tests.conftest import tiny_config

LARGE = Path(__file__).parents[3] / "recipes" / "decoder-1b.toml"
RECOMPUTE = ("none", "selective", "full")


def device(flops: float, memory: float = 1e9, network: float = 1e9) -> Hardware:
    return Hardware("made up", flops, 0.5, int(memory), flops / 100, network, network, 0.8, "a test")


def pool(name: str, flops: float, count: int = 1, memory: str = "1GiB", **more: Any) -> Pool:
    return Pool(
        kind=name, count=count, per_node=1, flops=flops, efficiency=0.5, memory=memory, memory_bandwidth=flops / 100,
        network=1e9, **more,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(24))
def test_layers_go_where_no_other_split_would_be_faster(seed: int) -> None:
    dice = random.Random(seed)
    shape = decoder_shape(tiny_config(num_hidden_layers=7, sliding_window=8, layer_types=None))
    devices = [(device(dice.uniform(1e9, 8e9), 10 ** dice.uniform(5.6, 7)), 1) for _ in range(3)]
    counts = [dice.randint(1, 2) for _ in devices]
    stages, dp = sum(counts), dice.choice([1, 2])
    run = Run(
        ParallelConfig(dp=dp, pp=stages, zero=1 if dp == 2 else 0),
        dp,
        2,
        dice.choice([1, 2, 8]),
        32,
        dice.choice(RECOMPUTE),
    )
    across = 10 ** dice.uniform(4, 9)
    homes = [each for each, count in zip(devices, counts, strict=True) for _ in range(count)]
    sent = 2 * run.tokens * shape.hidden / across
    best = float("inf")
    for cuts in itertools.combinations(range(1, 7), stages - 1):
        bounds = (0, *cuts, 7)
        costs = [
            stage_cost(shape, run, stage, stages, range(bounds[stage], bounds[stage + 1]), *homes[stage])
            for stage in range(stages)
        ]
        if all(costs):
            seconds, tails, _ = zip(*(cost for cost in costs if cost), strict=True)
            best = min(best, (run.micro_batches - 1) * max(*seconds, sent) + sum(seconds) + max(tails))
    found = assign_layers(shape, run, devices, counts, across)
    assert (float("inf") if found is None else found[0]) == pytest.approx(best)
    if found is not None:
        assert sum(found[1]) == 7
        assert all(size <= home.memory * HEADROOM for size, (home, _) in zip(found[2], homes, strict=True))


@pytest.mark.parametrize(
    "pools",
    [
        (pool("fast", 8e9), pool("slow", 4e9)),
        (pool("fast", 8e9, 2), pool("slow", 1e9, 2), pool("other", 3e9)),
        (pool("small", 8e9, 1, "1200KiB"), pool("large", 2e9), pool("middle", 4e9)),
    ],
)
def test_the_best_of_up_to_three_pools_is_that_of_brute_force(pools: tuple[Pool, ...]) -> None:
    model, batch, length = tiny_config(num_hidden_layers=4), 16, 32
    shape, cluster = decoder_shape(model), Cluster(pools=pools)
    found = find_placements(model, cluster, batch_size=batch, length=length)
    best = {"replicas": float("inf"), "stages": float("inf")}
    for size in range(2, len(pools) + 1):
        for order in itertools.permutations(pools, size):
            total = sum(each.count for each in order)
            for micro, recompute in itertools.product((1, 2, 4, 8, 16), RECOMPUTE):
                best["replicas"] = min(best["replicas"], replicas(shape, order, micro, batch, length, recompute))
                for dp in range(1, total + 1):
                    if all(each.count % dp == 0 for each in order) and batch % (dp * micro) == 0:
                        for zero in (0, 1) if dp > 1 else (0,):
                            seconds = stages(shape, order, dp, zero, micro, batch, length, recompute)
                            best["stages"] = min(best["stages"], seconds)
    for way, seconds in best.items():
        mine = min((each.step for each in found.placements if each.way == way), default=float("inf"))
        assert mine == pytest.approx(seconds), way
    assert found.placements[0].step == min(each.step for each in found.placements)


def replicas(shape: Any, order: tuple[Pool, ...], micro: int, batch: int, length: int, recompute: Any) -> float:
    """Every way to give each device micro-batches."""
    devices = [figures(each) for each in order for _ in range(each.count)]
    pieces = batch // micro
    if batch % micro or pieces % len(devices) or pieces < 2 * len(devices):
        return float("inf")
    mesh = ParallelConfig(dp=len(devices), shares="auto")
    run = Run(mesh, len(devices), micro, 1, length, recompute)
    if any(rank_memory(shape, run, 0, [range(4)]).total > each.memory * HEADROOM for each in devices):
        return float("inf")
    best = float("inf")
    for counts in itertools.product(range(1, pieces), repeat=len(devices)):
        if sum(counts) == pieces:
            runs = [Run(mesh, len(devices), micro, count, length, recompute) for count in counts]
            times = [step_time(shape, one, each, 1).total for one, each in zip(runs, devices, strict=True)]
            best = min(best, max(times))
    return best


def stages(
    shape: Any, order: tuple[Pool, ...], dp: int, zero: Any, micro: int, batch: int, length: int, recompute: Any
) -> float:
    """Every way to give each stage layers."""
    homes = [figures(each) for each in order for _ in range(each.count // dp)]
    passes = batch // dp // micro
    if len(homes) > 4 or passes < len(homes):
        return float("inf")
    run = Run(ParallelConfig(dp=dp, pp=len(homes), zero=zero), dp, micro, passes, length, recompute)
    best = float("inf")
    for cuts in itertools.combinations(range(1, 4), len(homes) - 1):
        bounds = (0, *cuts, 4)
        held = [range(bounds[stage], bounds[stage + 1]) for stage in range(len(homes))]
        costs = [stage_cost(shape, run, i, len(homes), held[i], home, 1) for i, home in enumerate(homes)]
        if all(costs):
            seconds, tails, _ = zip(*(cost for cost in costs if cost), strict=True)
            slowest = max(*seconds, 2 * run.tokens * shape.hidden / 1e9)
            best = min(best, (passes - 1) * slowest + sum(seconds) + max(tails))
    return best


def test_pools_that_do_not_differ_are_planned_as_one(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[[pools]]\nkind = "h100"\ncount = 32\n\n[[pools]]\nkind = "h100"\nname = "more"\ncount = 32\n')
    found = plan_cluster(LARGE, path, out=tmp_path / "a.toml")
    assert isinstance(found, Plan)
    assert found == plan_recipe(LARGE, gpus=64, memory="80GiB", out=tmp_path / "b.toml")
    assert (tmp_path / "a.toml").read_text() == (tmp_path / "b.toml").read_text()


def test_a_pipeline_of_like_devices_takes_what_the_planner_says() -> None:
    shape, gpu = decoder_shape(load_recipe(TrainRecipe, LARGE).model), hardware("h100")
    run = Run(ParallelConfig(dp=4, pp=4), 4, 1, 64, 2048)
    found = assign_layers(shape, run, [(gpu, 8), (gpu, 8)], [2, 2], gpu.network)
    assert found is not None
    assert 0.93 < found[0] / step_time(shape, run, gpu, 8).total < 1.01


def test_the_plan_is_a_recipe_and_says_who_does_what(tmp_path: Path) -> None:
    path, out, rows = tmp_path / "cluster.toml", tmp_path / "planned.toml", tmp_path / "plan.json"
    pools = [{"kind": "h100", "count": 8}, {"kind": "a100", "count": 8}]
    path.write_text(dump_toml({"pools": pools}))
    few = ["--set", "model.num_hidden_layers=4"]
    files = ["--cluster", str(path), "--out", str(out), "--json", str(rows)]
    assert cli._run(["train", "plan", str(LARGE), *files, *few]) == 0
    recipe = load_recipe(TrainRecipe, out)
    best = json.loads(rows.read_text())[0]
    assert "# processes 8 to 15: " in out.read_text()
    assert recipe_run(recipe, 16).dp in (8, 16)
    if best["way"] == "stages":
        assert recipe.parallel.stage_layers == tuple(n for each in best["pools"] for n in each["stage_layers"])
    else:
        assert recipe.parallel.shares == "auto"
        samples = {each["name"]: each["samples"] for each in best["pools"]}
        assert samples["h100"] > 2 * samples["a100"] > 0


GOOD = {"kind": "npu", "count": 8, "flops": 1e14, "memory": "64GiB", "memory_bandwidth": 1e12, "network": 1e10}


@pytest.mark.parametrize(
    ("pools", "says"),
    [
        ([{"kind": "npu", "count": 8}], "of kind 'npu' there are no figures here; give flops, memory, .*a100"),
        ([{"kind": "h100", "count": 8, "memory": "much"}, GOOD], "pool 'h100': memory: 'much' is no size"),
        ([{"kind": "h100", "count": 12}], "count = 12 is no multiple of per_node = 8; machines must be whole"),
        ([{"kind": "h100", "count": 8}] * 2, "two pools are called 'h100'; give each a name"),
        ([{"kind": "h100", "count": 0}], "pools.0.count"),
        ([GOOD | {"speed": 3}], "unknown key"),
        ([GOOD | {"flops": -1}], "flops"),
        ([], "pools"),
        ([{"kind": "h100", "count": 8}, GOOD | {"memory": "100MiB"}], "'npu' can do no part .* 0.1 GiB: .*; leave"),
    ],
)  # fmt: skip
def test_clusters_that_cannot_be_are_one_clear_line(tmp_path: Path, pools: list[Any], says: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(dump_toml({"pools": pools}) if pools else "pools = []\n")
    with pytest.raises(ConfigError, match=says) as raised:
        plan_cluster(LARGE, path, ["model.num_hidden_layers=4"])
    assert "\n" not in str(raised.value)


def test_alike_means_alike_in_every_figure() -> None:
    same = [Pool(kind="h100", name=name, count=8) for name in "ab"]
    assert len(joined(Cluster(pools=tuple(same))).pools) == 1
    less = same[1].model_copy(update={"memory": "40GiB"})
    assert len(joined(Cluster(pools=(same[0], less))).pools) == 2
    assert len(joined(Cluster(pools=tuple(same), between=1e9)).pools) == 2


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--cluster .*nothing\.toml is no file; write one that describes pools"):
        read_cluster(tmp_path / "nothing.toml")
    (tmp_path / "broken.toml").write_text("[[pools]\n")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        read_cluster(tmp_path / "broken.toml")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--cluster", "x.toml", "--gpus", "8"], "leave --gpus and --memory out"),
        (["--gpus", "8", "--memory", "80GiB", "--kubernetes", "x.json"], "give them by --cluster FILE"),
        (["--gpus", "8"], "give --gpus and --memory of GPUs that are alike, or --cluster FILE"),
    ],
)
def test_either_kind_of_cluster_is_given(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["train", "plan", str(LARGE), *flags]) == ConfigError.exit_code
    assert says in capsys.readouterr().err
