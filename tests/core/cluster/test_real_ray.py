"""Ray itself, with two nodes of which one is killed: the same corpus, the same front, the same trials; and
a run that is placed on both.

Without the package ray these are skipped; starting the cluster alone takes ten seconds to a minute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penjing.compress.search.search import run_joint_search
from penjing.core.config import dump_toml, inline_toml, read_recipe
from penjing.core.errors import InputError, SetupError
from penjing.train.launch.ray_nodes import RayMachine, RayRun, run_on_ray
from penjing.train.run import train
from penjing.train.search.search import run_search
from tests.compress.graphs import graph_folder
from tests.compress.prune_graph.traits import image
from tests.compress.search.test_search import Two, write
from tests.core.cluster.two_nodes import TwoNodes, two_nodes
from tests.curate.corpus import kept, recipe, sources

pytest.importorskip("ray")
pytestmark = [pytest.mark.full, pytest.mark.timeout(900), pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    with two_nodes() as found:
        yield found


def killing(cluster: TwoNodes, when: Callable[[], bool]) -> threading.Thread:
    """Kills a node as soon as something is so."""
    cluster.mend()

    def watch() -> None:
        deadline = time.monotonic() + 300
        while not when() and time.monotonic() < deadline:
            time.sleep(0.02)
        cluster.kill_one()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_a_corpus_is_the_same(cluster: TwoNodes, tmp_path: Path) -> None:
    here = sources(tmp_path / "in", 12)
    expected = kept(recipe(tmp_path, here, task_mb=0.001))
    ray = {"address": cluster.address, "resources": {"trial": 1}}
    made = recipe(tmp_path / "ray", here, task_mb=0.001, ray=ray)
    thread = killing(cluster, lambda: len([*made.work_folder.glob("stage-0-*/task-*")]) >= 2)
    assert kept(made) == expected
    thread.join()
    with pytest.raises(SetupError, match=r"none of the 2 nodes of the Ray cluster has CPU = 1, npu = 1"):
        kept(recipe(tmp_path / "npu", here, ray=ray | {"resources": {"npu": 1}}))


def test_a_front_is_the_same(cluster: TwoNodes, tmp_path: Path) -> None:
    network = graph_folder(tmp_path / "dense", Two(), image(12))
    (tmp_path / "ray").mkdir()
    lines = {"space": "{ widths = [1.0, 0.75, 0.5], bits = [32, 8] }", "combinations": "32"}
    expected = run_joint_search(write(tmp_path, network, **lines))
    ray = f'{{ address = "{cluster.address}", resources = {{ trial = 1 }} }}'
    path = write(tmp_path / "ray", network, **lines, ray=ray)
    work = tmp_path / "ray/.search.work"
    thread = killing(cluster, lambda: len([*work.glob("point_*.json")]) >= 2)
    found: dict[str, Any] = run_joint_search(path)
    thread.join()
    assert len(found["rows"]) >= 30
    for name in ("rows", "front", "prediction", "baselines"):
        assert found[name] == expected[name]


def test_trials_are_the_same(cluster: TwoNodes, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "base": "decoder-tiny",
        "trials": 3,
        "first": 4,
        "workers": 2,
        "settings": {"steps": 8, "data.sequence_length": 32, "data.batch_size": 2, "evaluation.samples": 8},
        "space": {"learning_rate.peak": [1e-4, 1e-2]},
    }
    found = []
    for name, more in (("here", {}), ("ray", {"ray": {"address": cluster.address, "resources": {"trial": 1}}})):
        (tmp_path / f"{name}.toml").write_text(dump_toml(values | more | {"output": str(tmp_path / name)}))
        thread = killing(cluster, lambda: bool([*tmp_path.glob("ray/trials/*/log.txt")])) if more else None
        found.append(run_search(tmp_path / f"{name}.toml"))
        if thread is not None:
            thread.join()
    here, ray = found
    assert [trial.evaluations for trial in ray.trials] == [trial.evaluations for trial in here.trials]
    assert ray.winner == here.winner


def placed(folder: Path, output: Path, **settings: Any) -> tuple[Path, list[str]]:
    """A training recipe that writes `output`, and what it changes of decoder-tiny."""
    few = {"data.sequence_length": 32, "data.batch_size": 4, "evaluation.samples": 8}
    given = [f"{key.replace('__', '.')}={value}" for key, value in (few | settings).items()]
    given += ['precision.mode="fp32"', f"output={inline_toml(str(output))}"]
    path = folder / f"{output.name}.toml"
    path.write_text(dump_toml(read_recipe(Path("decoder-tiny"), given)))
    return path, given


def same_weights(one: Path, other: Path) -> None:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-3, atol=1e-4)


def on_two(recipe: Path, cluster: TwoNodes) -> None:
    node = RayMachine(pool="pool", processes=1, resources={"penjing_pool": 1.0})
    run_on_ray(RayRun(schema_version=1, recipe=str(recipe), nodes=(node, node)), cluster.address)


def test_a_placed_run_is_that_of_one_machine(
    cluster: TwoNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.mend()
    _, given = placed(tmp_path, tmp_path / "here", steps=6)
    train(Path("decoder-tiny"), given)
    on_two(placed(tmp_path, tmp_path / "ray", steps=6)[0], cluster)
    same_weights(tmp_path / "here", tmp_path / "ray")
    assert "pool 0: " in capsys.readouterr().out
    damaged = placed(tmp_path, tmp_path / "damaged")[0]
    damaged.write_text(damaged.read_text().replace("steps", "step"))
    with pytest.raises(
        InputError, match=r"failed 4 times; the last time machine \d \(pool\) ended with \d+:\n(.*\n)*.*step"
    ):
        on_two(damaged, cluster)
    wrong = RayMachine(pool="pool", processes=1, resources={"penjing_none": 1.0})
    with pytest.raises(SetupError, match="not all 1 machines are free within 2 seconds"):
        run_on_ray(RayRun(schema_version=1, recipe="run.toml", nodes=(wrong,)), cluster.address, patience=2)


def test_a_placed_run_outlives_a_machine(cluster: TwoNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"steps": 60, "checkpoint__every": 10}
    _, given = placed(tmp_path, tmp_path / "here", **settings)
    train(Path("decoder-tiny"), given)
    recipe, _ = placed(tmp_path, tmp_path / "ray", **settings)
    failed: list[Exception] = []

    def run() -> None:
        try:
            on_two(recipe, cluster)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    killing(cluster, lambda: bool([*tmp_path.glob("ray-run/checkpoints/step*")])).join()
    cluster.mend()  # here: a node ends with the thread that started it
    thread.join()
    assert not failed
    assert "all begin again from the newest checkpoint" in capsys.readouterr().err
    same_weights(tmp_path / "here", tmp_path / "ray")
