"""What a cluster has to say: results as they are done, and one clear line for all that can be wrong with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penjing.core.cluster import ray_cluster
from penjing.core.cluster.ray_cluster import RayCluster, RaySettings
from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError, SetupError
from tests.core.cluster.fake_ray import FakeRay


def use(monkeypatch: pytest.MonkeyPatch, fake: FakeRay) -> FakeRay:
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def double(value: int) -> int:
    if value < 0:
        raise InputError(f"{value} is below 0")
    return 2 * value


def test_results_come_with_their_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = use(monkeypatch, FakeRay({"CPU": 2.0, "npu": 1.0}))
    settings = RaySettings(address="here:1", cpus=2, resources={"npu": 1}, retries=5)
    cluster = RayCluster(settings, double, tmp_path)
    assert fake.address == "here:1"
    assert fake.options == {"num_cpus": 2, "num_gpus": 0, "resources": {"npu": 1}, "max_retries": 5}
    assert dict(cluster.results({name: (value,) for name, value in (("a", 1), ("b", 2), ("c", 3))})) == {
        "a": 2,
        "b": 4,
        "c": 6,
    }
    assert cluster.run("alone", 4) == 8
    assert list(tmp_path.iterdir()) == []  # the mark that the first task looked for is gone
    with pytest.raises(InputError, match="-1 is below 0"):
        dict(cluster.results({"a": (1,), "b": (-1,), "c": (3,), "d": (4,)}))
    assert fake.cancelled == 2  # those that were left
    cluster.stop()
    assert cluster.run("more", 1) is None


def test_a_process_that_is_lost_for_good_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, FakeRay(lost=[2]))
    cluster, done = RayCluster(RaySettings(retries=1), double, tmp_path), []
    with pytest.raises(SetupError, match=r"task 7 was lost .* its 1 repetitions \(WorkerCrashedError: The worker died"):
        done.extend(key for key, _ in cluster.results({6: (1,), 7: (1,), 8: (1,)}))
    assert done == [6]
    assert cluster.run("again", 1) == 2


def test_what_is_wrong_with_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SetupError, match=r"ray, which is not installed: pip install 'penjing\[ray\]'"):
        RayCluster(RaySettings(), double, tmp_path)
    use(monkeypatch, FakeRay())
    with pytest.raises(
        SetupError, match=r"no Ray cluster answers at ray\.address = 'nowhere:1' \(Could not find any run"
    ):
        RayCluster(RaySettings(address="nowhere:1"), double, tmp_path)
    with pytest.raises(SetupError, match=r"none of the 1 nodes of the Ray cluster has CPU = 1, npu = 1, which a task"):
        RayCluster(RaySettings(resources={"npu": 1}), double, tmp_path)
    fake = use(monkeypatch, FakeRay(full=True))
    with pytest.raises(
        SetupError, match=r"the Ray cluster is full: no task was begun within ray\.patience = 0\.01 sec"
    ):
        RayCluster(RaySettings(patience=0.01), double, tmp_path)
    assert fake.cancelled == 1
    use(monkeypatch, FakeRay(broken=True))
    with pytest.raises(SetupError, match=r"cannot run penjing \(ModuleNotFoundError: No module named 'penjing'\)"):
        RayCluster(RaySettings(), double, tmp_path)
    use(monkeypatch, FakeRay())
    with monkeypatch.context() as patch:
        patch.setattr(ray_cluster, "_found", lambda folder, mark: None)
        with pytest.raises(
            SetupError, match=r"does not see .*; choose an output on a file system that all nodes share"
        ):
            RayCluster(RaySettings(), double, tmp_path)
        patch.setattr(ray_cluster, "_found", lambda folder, mark: "0.0.1")
        with pytest.raises(SetupError, match=r"a node of the Ray cluster has penjing 0\.0\.1, and this machine"):
            RayCluster(RaySettings(), double, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_is_lost_while_tasks_wait_ends_the_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = use(monkeypatch, FakeRay())
    monkeypatch.setattr(ray_cluster, "_LOOK_SECONDS", 0.01)
    cluster = RayCluster(RaySettings(patience=0.05), double, tmp_path)
    fake.full, fake.resources = True, {"CPU": 0.0}
    with pytest.raises(SetupError, match="none of the 1 nodes of the Ray cluster has CPU = 1"):
        cluster.run("waits", 1)
    assert fake.cancelled == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"resources": {"gpu": 1}}, "'gpu' has a setting of its own: gpus"),
        ({"resources": {"npu": 0}}, "npu = 0 must be above 0"),
        ({"cpus": -1}, "cpus"),
        ({"node": "x"}, "unknown key"),
    ],
)
def test_settings_that_are_wrong(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(RaySettings, given, "here")
