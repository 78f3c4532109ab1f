from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from penjing.core.errors import InputError, SetupError
from penjing.train.processes.world import World
from penjing.train.state import checkpoint, state_shards
from penjing.train.state.checkpoint import Checkpoints, ShardedCheckpoints
from penjing.train.state.state import join_tree, split_tree
from tests.disk import run_in

ALL = (slice(0, 3),)


def tree(value: float) -> dict[str, Any]:
    return {
        "weights": {"a": torch.full((3,), value), "b": torch.ones(2, 2, dtype=torch.bfloat16)},
        "scale": {"value": 1.5, "on": True, "none": None, "name": "x"},
        "list": [1, {"step": torch.tensor(4.0)}],
    }


def test_a_tree_survives_as_tensors_and_json() -> None:
    tensors, plain = split_tree(tree(2.0))
    back = join_tree(tensors, json.loads(json.dumps(plain)))
    assert back["scale"] == tree(2.0)["scale"]
    assert torch.equal(back["weights"]["a"], torch.full((3,), 2.0))
    assert back["list"][1]["step"] == 4.0
    with pytest.raises(TypeError, match="x/y: a set cannot be saved"):
        split_tree({"x": {"y": {1}}})


def test_the_newest_is_found_and_the_oldest_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 15):
        checkpoints.save(step, tree(float(step)))
    checkpoints.wait()
    assert checkpoints.steps() == [10, 15]
    assert (tmp_path / "latest").read_text() == "step-000000015\n"
    found = checkpoints.load_newest()
    assert found is not None
    assert found[0] == 15
    assert found[1]["weights"]["a"][ALL].tolist() == [15.0] * 3
    assert found[1]["weights"]["b"][slice(1, 2), slice(0, 2)].dtype == torch.bfloat16
    assert found[1]["list"][1]["step"][()] == 4.0
    assert Checkpoints(tmp_path / "nothing").load_newest() is None


@pytest.mark.parametrize("kind", ["whole", "parts"])
def test_a_run_that_goes_on_from_an_earlier_state_keeps_its_own(tmp_path: Path, kind: str) -> None:
    make = {"whole": Checkpoints, "parts": ShardedCheckpoints}[kind]
    for keep, kept in ((1, [14]), (3, [8, 12, 14])):
        checkpoints = make(tmp_path / str(keep), keep, World())
        for step in (4, 8, 12, 16, 20):
            make(tmp_path / str(keep), 9, World()).save(step, tree(float(step)), wait=True)
        checkpoints.save(14, tree(14.0), wait=True)  # of a run that was resumed from step 12
        assert checkpoints.steps() == kept
        assert (checkpoints.folder / "latest").read_text() == "step-000000014\n"
        newest = checkpoints.load_newest()
        assert newest is not None
        assert newest[0] == 14


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = checkpoint.save_tensors
    monkeypatch.setattr(checkpoint, "save_tensors", lambda *args: (gate.wait(10), real(*args))[1])
    checkpoints = Checkpoints(tmp_path)
    state = tree(1.0)
    checkpoints.save(1, state)
    assert checkpoints.steps() == []  # still being written, and nothing under the final name
    state["weights"]["a"].zero_()
    gate.set()
    checkpoints.wait()
    assert Checkpoints.load(checkpoints.path(1))[1]["weights"]["a"][ALL].tolist() == [1.0] * 3


@pytest.mark.parametrize("damage", ["truncate", "flip", "no seal", "no tree"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, tree(float(step)), wait=True)
    newest = checkpoints.path(2)
    tensors = newest / "state.safetensors"
    if damage == "truncate":
        tensors.write_bytes(tensors.read_bytes()[:-5])
    elif damage == "flip":
        data = bytearray(tensors.read_bytes())
        data[-1] ^= 1
        tensors.write_bytes(data)
    else:
        (newest / {"no seal": "complete.json", "no tree": "state.json"}[damage]).unlink()
    notes: list[str] = []
    found = checkpoints.load_newest(notes.append)
    assert found is not None
    assert found[0] == 1
    assert len(notes) == 1
    assert str(newest) in notes[0]
    with pytest.raises(InputError):
        Checkpoints.load(newest)
    checkpoints.save(2, tree(9.0), wait=True)  # the damaged one makes room
    assert Checkpoints.load(newest)[1]["weights"]["a"][ALL].tolist() == [9.0] * 3


SAVES = """
    import shutil, sys
    from collections import namedtuple
    from pathlib import Path
    import torch
    from penjing.core.errors import SetupError
    from penjing.train.processes.world import World
    from penjing.train.state.checkpoint import Checkpoints, ShardedCheckpoints

    folder, room, usage = Path(sys.argv[1]), sys.argv[2], shutil.disk_usage
    for name in ("whole", "parts"):
        kind = Checkpoints(folder / name) if name == "whole" else ShardedCheckpoints(folder / name, 3, World())
        kind.save(1, {"weight": torch.ones(100)}, wait=True)
        lies = [namedtuple("Usage", "free")(1 << 30)] if room == "taken" else []
        shutil.disk_usage = lambda path: lies.pop() if lies else usage(path)
        try:
            kind.save(2, {"weight": torch.ones(1 << 20)}, wait=True)
        except SetupError as error:
            print(error)
        left = sorted(path.name for path in (folder / name).iterdir())
        assert left == ["latest", "step-000000001"], left
        assert kind.load_newest()[0] == 1
"""


@pytest.mark.parametrize(("place", "room"), [("tiny disk", "seen"), ("tiny disk", "taken"), ("file limit", "seen")])
def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path, place: str, room: str) -> None:
    """ "taken": by another program, after it was looked at; the safetensors package then meets the end of the disk."""
    reason = {
        "tiny disk": r"the disk is full, 4\.19 MB are needed and 1\.0\d MB are free; free some space and run again",
        "file limit": r"the file-size limit is reached; raise it \(ulimit -f\) and run again",
    }[place]
    whole, parts = run_in(place, 1 << 20, tmp_path, SAVES, room, forked=True)
    assert re.fullmatch(rf"cannot write {tmp_path}/whole/step-000000002: {reason}", whole), whole
    assert re.fullmatch(rf"cannot write {tmp_path}/parts/step-000000002: {reason}", parts), parts


def test_a_process_that_does_not_write_its_part_is_waited_for_ten_times_parallel_timeout(tmp_path: Path) -> None:
    class Lonely(World):
        def barrier(self) -> None:
            pass

    checkpoints = ShardedCheckpoints(tmp_path, 3, Lonely(0, 2), timeout_s=0.2)
    began = time.monotonic()
    with pytest.raises(SetupError, match=r"state-00001\.json was not written within 2 s \(10 × parallel\.timeout\)"):
        checkpoints.save(4, {"weight": torch.ones(3)}, wait=True)
    assert time.monotonic() - began >= 2
    assert checkpoints.load_newest() is None


class Together(World):
    """One of several processes, each a thread of this one."""

    barriers: ClassVar[threading.Barrier]
    sums: ClassVar[list[torch.Tensor]]

    def barrier(self) -> None:
        self.barriers.wait(20)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.sums[self.rank] = values.clone()
        self.barrier()
        values.copy_(torch.stack(self.sums).sum(0))
        self.barrier()
        return values


@pytest.mark.parametrize("kind", ["whole", "parts"])
def test_each_file_is_checked_by_one_process_and_all_find_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    size = 3
    Together.barriers, Together.sums = threading.Barrier(size), [torch.empty(0)] * size
    checked: list[str] = []
    for module in (checkpoint, state_shards):
        real = module.sha256_file
        monkeypatch.setattr(module, "sha256_file", lambda path, real=real: (checked.append(path.name), real(path))[1])

    def run(rank: int) -> tuple[int, Any, list[str]]:
        world, notes = Together(rank, size), list[str]()
        checkpoints = Checkpoints(tmp_path, 3, world)
        if kind == "parts":
            checkpoints = ShardedCheckpoints(tmp_path, 3, world)
        for step in (1, 2):
            if checkpoints.sharded or world.is_main:
                checkpoints.save(step, tree(float(step)), wait=True)
            world.barrier()
        damaged = max(checkpoints.path(2).glob("*.safetensors"))  # rank 2's, of parts
        if world.is_main:
            damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
            checked.clear()
        world.barrier()
        found = checkpoints.load_newest(notes.append)
        assert found is not None
        return (*found, notes)

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, range(size)))
    assert [step for step, _, _ in results] == [1] * size
    assert all(state["weights"]["a"][ALL].tolist() == [1.0] * 3 for _, state, _ in results)
    assert all(len(notes) == 1 and "step-000000002" in notes[0] for _, _, notes in results)
    large = sorted(name for name in checked if name.endswith(".safetensors"))
    assert large == sorted(2 * [path.name for path in (tmp_path / "step-000000001").glob("*.safetensors")])
