"""A process of `penjing train --launch N` is killed: `--resume auto` gives the losses of a run that was left alone,
with as many processes and with others."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penjing.train.launch.launch import launch
from penjing.train.run import train

# What a step does may not depend on how many there are: the run that is killed has no end, its successor a near one.
SETTINGS = [
    "learning_rate.kind=constant", "learning_rate.warmup=0", "learning_rate.peak=0.01", "checkpoint.every=3",
    "checkpoint.keep=2", "evaluation.every=0", "monitor.activations_every=0",
]  # fmt: skip
# Processes, and their mesh; without dp, data parallelism follows their number.
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {}),
    "zero 3": (2, {"zero": 3}),
    "pp 2": (2, {"pp": 2}),
    "tp 2": (2, {"tp": 2}),
    "dp 2, pp 2": (4, {"dp": 2, "pp": 2}),
}
Losses = Callable[[Path], dict[int, float]]


def read(entry: Path) -> str:
    """A file of /proc; nothing when its process has ended."""
    try:
        return entry.read_text()
    except OSError:
        return ""


def rank_of_this_run(rank: int) -> int:
    """The process that torchrun, below this process, started as `rank`."""
    parents = {
        int(entry.parent.name): int(text.rpartition(")")[2].split()[1])
        for entry in Path("/proc").glob("[0-9]*/stat") if (text := read(entry))
    }  # fmt: skip
    below = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= new
    return min(pid for pid in below if f"RANK={rank}" in read(Path(f"/proc/{pid}/environ")).split("\0"))


def kill_after(step: int, rank: int, run: Path) -> threading.Thread:
    """Kills process `rank` once the metrics have `step`; should that not come, all of them."""

    def work() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            path = run / "metrics.jsonl"
            if path.exists() and len(path.read_text().splitlines()) >= step:
                os.kill(rank_of_this_run(rank), signal.SIGKILL)
                return
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)  # `launch` hands it on

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "dp" else pytest.mark.full) for name in MESHES]
)
def test_after_a_killed_process_the_losses_are_the_same(
    name: str, recipe: Path, tmp_path: Path, losses: Losses, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    size, mesh = MESHES[name]
    settings = [*SETTINGS, *(f"parallel.{key}={value}" for key, value in mesh.items())]
    run = tmp_path / "out-run"

    killer = kill_after(10, size - 1, run)
    assert launch(size, recipe, [*settings, "steps=1000000"], []) == 128 + signal.SIGKILL
    killer.join()
    said = capfd.readouterr().err
    assert re.search(rf"error: rank {size - 1} \(.*\) ended at .*--resume auto goes on", said), said
    assert said.count("error:") == 1
    undisturbed = losses(run)
    oldest, *newer = sorted(run.glob("checkpoints/step-*"))
    for later in newer:  # so that some of the steps that were seen are done again
        shutil.rmtree(later)
    begin, last = int(oldest.name.removeprefix("step-")), max(undisturbed)
    assert last - begin >= 3
    shutil.copytree(run, tmp_path / "alone-run")

    assert launch(size, recipe, [*settings, f"steps={last + 2}"], ["--resume", "auto"]) == 0
    resumed, said = losses(run), capfd.readouterr().err
    assert {step: loss for step, loss in resumed.items() if step <= last} == undisturbed
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (recovered,) = [record for record in records if "recovered_s" in record]
    assert recovered["step"] == begin
    assert f"recovered in {recovered['recovered_s']:.1f} s" in said
    if name == "zero 3":
        shutil.rmtree(tmp_path / "out")
        assert launch(3, recipe, [*settings, f"steps={last + 4}"], ["--resume", "auto"]) == 0
        said = capfd.readouterr().err
        assert "planned anew: data parallelism 2 → 3, batch 8 = 3 × 3 × 1 accumulated less 1" in said
        resumed = losses(run)

    # One process, from what many have saved
    train(recipe, [*SETTINGS, f"steps={max(resumed)}", f"output={tmp_path}/alone"], resume="auto")
    alone = losses(tmp_path / "alone-run")
    assert alone.keys() == resumed.keys()
    assert max(abs(alone[step] - resumed[step]) for step in alone) < 1e-5
    assert all(alone[step] == undisturbed[step] for step in range(1, begin + 1))


def below(pid: int) -> list[int]:
    """The children of process `pid`."""
    found = read(Path(f"/proc/{pid}/task/{pid}/children")).split()
    return [int(each) for each in found]


def wait_until(what: Callable[[], Any]) -> None:
    """Until `what` is true."""
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


@pytest.mark.parametrize("killed", ["launcher", "torchrun"])
def test_nothing_goes_on_when_what_started_it_is_killed(killed: str, recipe: Path, tmp_path: Path) -> None:
    """The launcher as soon as there is a torchrun, which has not imported anything then; torchrun in the run."""
    code = f"launch(1, Path({str(recipe)!r}), ['steps=1000000'], [])"
    code = f"from pathlib import Path; from penjing.train.launch.launch import launch; raise SystemExit({code})"
    launcher = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"})
    wait_until(lambda: below(launcher.pid))
    (torchrun,) = below(launcher.pid)
    processes = [torchrun]
    if killed == "launcher":
        launcher.kill()
    else:
        wait_until((tmp_path / "out-run" / "metrics.jsonl").exists)
        processes += below(torchrun)
        assert len(processes) == 2
        os.kill(torchrun, signal.SIGKILL)
    assert launcher.wait() == (-signal.SIGKILL if killed == "launcher" else 128 + signal.SIGKILL)
    try:
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    finally:
        for pid in processes:
            if "penjing.train" in read(Path(f"/proc/{pid}/cmdline")):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def agents(*arguments: str) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts torchrun for a node of an elastic run of one or two; all end at the end."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1",
        "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "x", "--rdzv-endpoint", f"localhost:{port}",
        "--rdzv-conf", "last_call_timeout=3", "-m", "penjing.train", *arguments, "--resume", "auto",
    ]  # fmt: skip
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.communicate(timeout=60)


def wait_for(run: Path, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Until `condition` holds for the records of `run`, of which the newest may be half written."""
    deadline = time.monotonic() + 120
    path = run / "metrics.jsonl"
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines() if path.exists() else []
        if condition([json.loads(line) for line in lines if line.endswith("}")]):
            return
        time.sleep(0.05)
    raise AssertionError(f"it did not come: {read(path)[-500:]}")


@pytest.mark.full
def test_a_node_is_lost_and_another_joins(
    recipe: Path, tmp_path: Path, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # see docs/parallel.md
    run, settings = tmp_path / "out-run", [*SETTINGS, "learning_rate.peak=0.001"]
    resumed = lambda records: [record["step"] for record in records if "recovered_s" in record]  # noqa: E731
    with agents(
        str(recipe), *(part for setting in (*settings, "steps=1000000") for part in ("--set", setting))
    ) as start:
        first = start()
        time.sleep(3)  # it serves the rendezvous, and is rank 0
        second = start()
        wait_for(run, lambda records: len(records) >= 12)
        lost = rank_of_this_run(1)
        second.kill()
        os.kill(lost, signal.SIGKILL)
        wait_for(run, lambda records: len(resumed(records)) == 1 and records[-1]["step"] >= resumed(records)[0] + 30)
        start()
        wait_for(run, lambda records: len(resumed(records)) == 2 and records[-1]["step"] >= resumed(records)[1] + 5)
        first.terminate()
        said = first.communicate(timeout=60)[1]
    assert "planned anew: data parallelism 2 → 1, batch 8 = 1 × 4 × 2 accumulated" in said
    assert "planned anew: data parallelism 1 → 2, batch 8 = 2 × 4 × 1 accumulated" in said
    elastic = losses(run)
    assert list(elastic) == list(range(1, len(elastic) + 1))
    train(recipe, [*settings, "steps=30", f"output={tmp_path}/alone"])
    alone = losses(tmp_path / "alone-run")
    assert max(abs(elastic[step] - alone[step]) for step in alone) < 1e-5
