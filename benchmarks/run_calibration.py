"""How long INT8 of SmolLM2 takes by calibration alone, step by step, where the goal is less than 60 s.

    python benchmarks/run_calibration.py                       # recipes/smollm2-int8.toml, as many threads as cores
    python benchmarks/run_calibration.py --threads 1 --recipe smollm2-int8-hadamard

Rows are RECIPE/clock, from the text to the artifact that passed its parity gate; RECIPE/processor, the processor time
of all threads meanwhile, which other programs change little; and RECIPE/STEP, the clock's share of each step that takes
a second or more. `versions` of a row has the threads, and the load of the machine before and after (how many programs
wanted a core, over a minute): where it began well above 0, others computed beside it and the clock says little.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
from lib.rows import RESULTS, append, new_row

from penjing.compress.quantizers.decoder import DecoderQuantize, quantize
from penjing.compress.recipe import load_recipe
from penjing.core.cli import guarded
from penjing.core.errors import ConfigError
from penjing.core.progress import PlainProgress
from penjing.core.work import Places

BENCHMARK = "calibration"
GOAL = 60.0  # s
SHORT = 1.0  # s; a step below it gets no row of its own


class Timed(PlainProgress):
    """A Progress that keeps how long each task took by the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}
        self._named, self._from = "reading the text", time.monotonic()

    def start(self, task: str, total: int) -> None:
        """See `Progress`."""
        self.close()
        self._named = task
        super().start(task, total)

    def close(self) -> None:
        """The task that runs is over."""
        now = time.monotonic()
        self.seconds[self._named] = self.seconds.get(self._named, 0.0) + now - self._from
        self._from = now


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smollm2-int8", help="whose last step quantizes a decoder")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the products")
    parser.add_argument("--model", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    loaded = load_recipe(Path("recipes") / f"{arguments.recipe}.toml", [f"model={arguments.model}"])
    step = loaded.steps[-1]
    if not isinstance(step, DecoderQuantize) or step.steps:
        raise ConfigError(f"--recipe {arguments.recipe}: its last step calibrates no decoder; take smollm2-int8")
    torch.set_num_threads(arguments.threads)
    before = os.getloadavg()[0]
    progress = Timed()
    clock, processor = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        partial, scratch = Path(folder) / "partial", Path(folder) / "scratch"
        partial.mkdir()
        scratch.mkdir()
        quantize(Places(arguments.model, partial, scratch), step, loaded.data, arguments.model, progress)
        clock, processor = time.monotonic() - clock, time.process_time() - processor
    progress.close()
    facts = {
        "threads": str(arguments.threads),
        "load before": f"{before:.2f}",
        "load after": f"{os.getloadavg()[0]:.2f}",
    }
    name = arguments.recipe
    rows = [
        new_row(
            BENCHMARK,
            f"{name}/clock",
            clock,
            "s",
            runs=1,
            baseline="the goal",
            baseline_value=GOAL,
            more_versions=facts,
        ),
        new_row(BENCHMARK, f"{name}/processor", processor, "s", runs=1, more_versions=facts),
    ]
    rows += [
        new_row(BENCHMARK, f"{name}/{task}", seconds, "s", runs=1, more_versions=facts)
        for task, seconds in progress.seconds.items()
        if seconds >= SHORT
    ]
    append(BENCHMARK, rows, arguments.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
