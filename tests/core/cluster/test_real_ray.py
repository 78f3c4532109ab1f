"""Ray itself, with two nodes of which one is killed: the same corpus, the same front.

Without the package ray these are skipped; starting the cluster alone takes ten seconds to a minute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penjing.compress.search.search import run_joint_search
from penjing.core.errors import SetupError
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
    lines = {"space": "{ widths = [1.0, 0.75, 0.5], bits = [32, 8] }", "combinations": "16"}
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
