"""The pieces of run_parallel.py that run `penjing train` itself, as a user does, and read what it leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.plot_train import Curve, draw, read_curve
from lib.rows import Row, new_row
from penjing.core.errors import InputError

NAME = "parallel"
ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "decoder-tiny.toml"
FIGURE = ROOT / "docs" / "figures" / "parallel.svg"
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}  # two halves for parallel.tp = 2
MESH = {"dp": 2, "tp": 2, "pp": 2}
CURVE_STEPS = 100  # of the recipe's 1200: eight processes on two cores take minutes for them


def _flags(output: Path, steps: int, parallel: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    given = {
        "output": str(output), "steps": steps, "device": "cpu", "precision.mode": "fp32", "evaluation.every": 0,
        "monitor.every": 1, "monitor.activations_every": 0, "monitor.tensorboard": False,
        **{f"model.{name}": value for name, value in HEADS.items()},
        **{f"parallel.{name}": value for name, value in parallel.items()},
        **settings,
    }  # fmt: skip
    return [flag for key, value in given.items() for flag in ("--set", f"{key}={json.dumps(value)}")]


def train(
    output: Path, steps: int, parallel: dict[str, Any], processes: int, settings: dict[str, Any], *flags: str
) -> Path:
    """Train decoder-tiny in `processes` processes; the run's folder.

    Raises:
        InputError: the command failed; the end of what it said.
    """
    command = [sys.executable, "-m", "penjing.train", str(RECIPE), *flags]
    command += _flags(output, steps, parallel, settings)
    if processes > 1:
        command += ["--launch", str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"penjing train in {processes} processes failed: {done.stderr[-2000:]}")
    return output.with_name(f"{output.name}-run")


def _short(quick: bool) -> dict[str, Any]:
    return {"data.sequence_length": 64 if quick else 256, "data.batch_size": 8 if quick else 16}


def overlap(quick: bool) -> list[Row]:
    """Share of the gradient reduction's time beside arithmetic, and its bandwidth, from profiles of two processes."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, parallel in (("dp 2", {"dp": 2}), ("zero 2", {"zero": 2})):
            settings = _short(quick)
            run = train(Path(scratch) / name.replace(" ", "-"), 6, parallel, 2, settings, "--profile")
            found = json.loads((run / "profile" / "communication-0.json").read_text(encoding="utf-8"))
            value, reached, best = found["overlap"], found["gradients"] / 1e9, max(found["all_reduce"].values()) / 1e9
            rows += [
                new_row(NAME, f"overlap of gradient reduction, {name}, gloo", value, "share", runs=3),
                new_row(
                    NAME, f"bandwidth of gradient reduction, {name}, gloo", reached, "GB/s", runs=3,
                    baseline="fastest all-reduce with nothing else to do", baseline_value=best,
                ),
            ]  # fmt: skip
    return rows


def overhead(quick: bool) -> list[Row]:
    """Seconds of a step of each mesh beside one process on the same cores."""
    meshes = {"dp 2": {"dp": 2}, "zero 3": {"zero": 3}, "tp 2": {"tp": 2}, "pp 2": {"pp": 2}, "cp 2": {"cp": 2}}
    settings, steps = _short(quick), 4 if quick else 12
    with tempfile.TemporaryDirectory() as scratch:
        alone = _step_s(train(Path(scratch) / "one", steps, {}, 1, settings))
        rows = [new_row(NAME, "step: one process", alone, "s", runs=steps - 1)]
        for name, parallel in meshes.items():
            taken = _step_s(train(Path(scratch) / name.replace(" ", "-"), steps, parallel, 2, settings))
            rows.append(
                new_row(NAME, f"step: {name}", taken, "s", runs=steps - 1, baseline="one process", baseline_value=alone)
            )
    return rows


def _step_s(run: Path) -> float:
    """The median step, the first left out."""
    return statistics.median(read_curve(run, "step_s")[1][1:])


def recovery(quick: bool) -> list[Row]:
    """Seconds from the SIGKILL of one of two processes until --resume auto has got past the step it was at."""
    settings = {**_short(True), "checkpoint.every": 2}
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "out"
        metrics = output.with_name("out-run") / "metrics.jsonl"
        command = [sys.executable, "-m", "penjing.train", str(RECIPE), "--launch", "2"]
        command += _flags(output, 10**6, {"zero": 1}, settings)
        began = _killed(command, metrics)
        resumed = subprocess.Popen([*command, "--resume", "auto"], stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            reached = _last_step(metrics)  # the resumed run begins by dropping records after its checkpoint
            while _last_step(metrics) <= reached:
                if resumed.poll() is not None:
                    raise InputError(f"the resumed run ended with {resumed.returncode}")
                time.sleep(0.02)
            seconds = time.perf_counter() - began
        finally:
            resumed.terminate()  # which it hands on; it ends when no process writes into the folder any more
            resumed.wait(timeout=60)
        (command_s,) = read_curve(metrics.parent, "recovered_s")[1]
    return [
        new_row(NAME, "recovery: a process killed, until the run is a step further", seconds, "s", runs=1),
        new_row(NAME, "recovery: of that, the resumed command until it has its state", command_s, "s", runs=1),
    ]


def _killed(command: list[str], metrics: Path) -> float:
    """Start, kill a process after step 5, wait for the end; when it was killed (perf_counter)."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while not metrics.exists() or _last_step(metrics) < 5:
            if process.poll() is not None:
                raise InputError(f"the run ended with {process.returncode} before it could be killed")
            time.sleep(0.02)
        os.kill(_worker(process.pid), signal.SIGKILL)
        began = time.perf_counter()
        process.wait(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return began


def _worker(parent: int) -> int:
    """The last started process of the session below `parent` that trains."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    below, found = {parent}, []
    for line in sorted(listed.splitlines(), key=lambda line: int(line.split()[0])):
        pid, above, arguments = line.split(None, 2)
        if int(above) in below:
            below.add(int(pid))
            if "penjing.train" in arguments and "torch.distributed.run" not in arguments:
                found.append(int(pid))
    if not found:
        raise InputError("no training process was found below torchrun")
    return found[-1]


def _last_step(metrics: Path) -> int:
    complete = metrics.read_text(encoding="utf-8").split("\n")[:-1]  # the run may be in the middle of a line
    return json.loads(complete[-1])["step"] if complete else 0


def curves(quick: bool, keep: Path | None = None) -> list[Row]:
    """Losses of decoder-tiny in one process, on 2 × 2 × 2, there with 8-bit gradients, and of rounding; their figure.

    Runs are kept in the folder `keep`: those that are complete are read, others go on from their newest checkpoint.
    """
    steps, settings = (4, _short(True)) if quick else (CURVE_STEPS, {})
    settings |= {"evaluation.every": steps, "checkpoint.every": 20, "checkpoint.keep": 1}
    wanted: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
        "one process": ({}, 1, {}),
        "one process, gradients added in another order": ({}, 1, {"data.micro_batch": 1}),  # what rounding alone does
        "2 × 2 × 2": (MESH, 8, {}),
        "2 × 2 × 2, 8-bit gradients": (MESH | {"zero": 1, "gradients": "int8"}, 8, {}),
    }
    with tempfile.TemporaryDirectory() as scratch:
        runs = {}
        for name, (parallel, processes, more) in wanted.items():
            output = (keep or Path(scratch)) / re.sub("[^a-z0-9]+", "-", name)
            runs[name] = output.with_name(f"{output.name}-run")
            if not (output / "penjing.json").exists():
                train(output, steps, parallel, processes, settings | more, "--resume", "auto")
        figure = Path(scratch) / "parallel.svg"
        rows = compare(runs, figure)
        if not quick:
            shutil.copyfile(figure, FIGURE)
    return rows


def compare(runs: dict[str, Path], figure: Path) -> list[Row]:
    """Rows of `runs`, the first being what the others are compared with; their curves are drawn into `figure`."""
    losses: dict[str, Curve] = {name: read_curve(run, "loss") for name, run in runs.items()}
    draw(losses, figure)
    held_out = {name: read_curve(run, "eval/loss")[1][-1] for name, run in runs.items()}
    (first, (_, alone)), *others = losses.items()
    what = f"decoder-tiny, {len(alone)} steps"
    rows = [new_row(NAME, f"held-out loss: {what}, {first}", held_out[first], "nats", runs=1)]
    for name, (_, values) in others:
        worst = max(abs(a - b) for a, b in zip(alone, values, strict=True))
        mean = statistics.mean(values) - statistics.mean(alone)
        found, base = held_out[name], held_out[first]
        rows += [
            new_row(NAME, f"held-out loss: {what}, {name}", found, "nats", runs=1, baseline=first, baseline_value=base),
            new_row(NAME, f"held-out loss less that of {first}: {what}, {name}", found - base, "nats", runs=1),
            new_row(NAME, f"mean difference of steps' losses: {what}, {name}", mean, "nats", runs=1),
            new_row(NAME, f"largest difference of a step's loss: {what}, {name}", worst, "nats", runs=1),
        ]
    return rows
