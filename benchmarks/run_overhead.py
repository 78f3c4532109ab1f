"""Measure what the engine costs beside its kernels: start-up, memory of the weights, time of a step outside C++.

    python benchmarks/run_overhead.py          # a minute; appends rows

`first_token` is the wall time from starting `penjing generate` to the first byte it writes, imports included; beside it
stands `import torch` alone. `weights_resident` is what loading and the first tokens add to the resident memory of a
process that has imported everything, against the bytes of the weight files. `outside_kernels_…` is the time of a decode
step that the C++ call does not cover: scheduling, tensors, sampling, text.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from lib.models import add_arguments, make_models, say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded
from penjing.core.errors import SetupError

NEW_TOKENS = 64
CASES = {
    "1": {},
    "16": {},
    "16_top_k": {"temperature": 0.8, "top_k": 50},
    "16_top_p": {"temperature": 0.8, "top_p": 0.9},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_process:
        print(json.dumps(measure_in_process(arguments.model)))
        return 0

    _, artifact = make_models(arguments.checkpoint, arguments.model)
    warn_if_busy()
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
    imports, starts, processes = [], [], []
    for turn in range(arguments.rounds):
        imports.append(seconds_to_first_byte(["-c", "import torch; print(1, flush=True)"], environment))
        code = "from penjing.core.cli import main; main()"
        command = ["-c", code, "generate", str(artifact), "Once upon a time", "--max-tokens", "1"]
        starts.append(seconds_to_first_byte(command, environment))
        processes.append(run_child(artifact, environment))
        say(f"round {turn + 1}/{arguments.rounds}: first token after {starts[-1]:.2f} s")
    append("overhead", overhead_rows(artifact, imports, starts, processes), arguments.results)
    return 0


def seconds_to_first_byte(arguments: list[str], environment: dict[str, str]) -> float:
    """Wall time from starting Python with `arguments` to the first byte of its output.

    Raises:
        SetupError: it wrote nothing.
    """
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - started
    if not first:
        raise SetupError(f"{arguments} wrote nothing")
    return seconds


def run_child(artifact: Path, environment: dict[str, str]) -> dict[str, float]:
    """`measure_in_process` in a process of its own.

    Raises:
        SetupError: it failed; the message has the end of what it said.
    """
    command = [sys.executable, str(Path(__file__).resolve()), str(artifact), "--in-process"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"the measured process failed: {done.stderr[-500:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure_in_process(artifact: Path) -> dict[str, float]:
    """Memory that the weights add, and milliseconds of a decode step in all and inside C++, by case."""
    import torch

    from penjing.serve.engine.config import EngineConfig
    from penjing.serve.engine.request import Request
    from penjing.serve.runner.load import load_engine
    from penjing.serve.runner.runner import Runner
    from penjing.serve.sampling.params import SamplingParams

    torch.empty(1)
    before = resident_bytes()
    engine = load_engine(artifact, EngineConfig(enable_prefix_caching=False, max_num_sequences=16))
    assert isinstance(engine.runner, Runner)  # the CPU's
    fused = engine.runner.fused
    if fused is None:
        raise SetupError("the C++ extension is not built; there is nothing to compare with")

    def run(num_streams: int, new: int, **sampling: float) -> tuple[float, float, int]:
        """Seconds of the decode steps, those inside C++, and how many steps there were."""
        params = SamplingParams.model_validate({"temperature": 0.0, "seed": 1, **sampling, "max_tokens": new})
        params = params.model_copy(update={"ignore_eos": True})
        for i in range(num_streams):
            engine.add(Request(str(i), list(range(100 + 300 * i, 132 + 300 * i)), params))
        engine.step()  # the prompts
        started, inside, steps = time.perf_counter(), fused.seconds, 0
        while engine.has_work():
            engine.step()
            steps += 1
        return time.perf_counter() - started, fused.seconds - inside, steps

    run(1, 4)
    figures = {"resident_bytes": float(resident_bytes() - before)}
    for name, sampling in CASES.items():
        whole, inside, steps = run(int(name.split("_")[0]), NEW_TOKENS, **sampling)
        figures |= {f"step_ms_{name}": 1000 * whole / steps, f"inside_ms_{name}": 1000 * inside / steps}
    return figures


def resident_bytes() -> int:
    """Resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def overhead_rows(
    artifact: Path, imports: list[float], starts: list[float], processes: list[dict[str, float]]
) -> list[Row]:
    """Rows from the rounds' figures; see the top of this file."""
    runs = len(starts)

    def middle(name: str) -> float:
        return median(figures[name] for figures in processes)

    stored = sum(path.stat().st_size for path in artifact.glob("*.safetensors"))
    rows = [
        new_row(
            "overhead", "first_token", median(starts), "s", runs=runs,
            baseline="import torch", baseline_value=median(imports),
        ),
        new_row(
            "overhead", "weights_resident", middle("resident_bytes") / 1e6, "MB", runs=runs,
            baseline="weight files", baseline_value=stored / 1e6,
        ),
    ]  # fmt: skip
    for name in CASES:
        outside = middle(f"step_ms_{name}") - middle(f"inside_ms_{name}")
        rows.append(
            new_row(
                "overhead", f"outside_kernels_{name}", outside, "ms a step", runs=runs,
                baseline="whole step", baseline_value=middle(f"step_ms_{name}"),
            )
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(guarded(main))
