"""Measure a decoder in one process and in several: memory of each, processor time, and that no token differs.

    python benchmarks/run_tensor_parallel.py build/smollm2-int8

Each number of processes runs in processes of its own, one after the other. Memory is what a process holds of its own
(anonymous pages) beyond one that has loaded the libraries alone, and the pages of the weights' file that it has mapped.
Processor time is the sum over all processes, with one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lib.models import ARTIFACT, say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded
from penjing.core.errors import InputError
from penjing.core.text.corpus import heldout_tokens
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.runner.parallel_runner import ParallelRunner
from penjing.serve.sampling.params import SamplingParams

STREAMS, PROMPT, NEW = 4, 128, 32
BLOCKS = 64  # of 16 tokens
MEBIBYTE = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=ARTIFACT, help="an artifact or checkpoint")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)  # measure this number, in this process
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    if arguments.alone is not None:
        print(json.dumps(measure(arguments.model, arguments.alone)))
        return 0
    warn_if_busy()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PENJING_CPU_THREADS": "1"}
    found: dict[int, dict[str, Any]] = {}
    for ranks in arguments.ranks:
        command = [sys.executable, __file__, str(arguments.model), "--alone", str(ranks)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        found[ranks] = json.loads(done.stdout)
        say(f"{ranks} processes: {found[ranks]['memory']} MiB, {found[ranks]['seconds']:.1f} s of processor time")
    append("tensor_parallel", rows(arguments.model.name, found), arguments.results)
    return 0


def measure(model: Path, ranks: int) -> dict[str, Any]:
    """Tokens, MiB of each process and the processor time of some greedy answers, all processes together."""
    libraries = _own_bytes(os.getpid(), model)
    engine = load_engine(model, EngineConfig(num_blocks=BLOCKS, tensor_parallel=ranks, enable_prefix_caching=False))
    tokens = heldout_tokens(engine.tokenizer, STREAMS * PROMPT).view(STREAMS, PROMPT).tolist()
    pids = [os.getpid()]
    if isinstance(engine.runner, ParallelRunner):
        pids += engine.runner.pids
    before = sum(_processor_seconds(pid) for pid in pids)
    for index, prompt in enumerate(tokens):
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        engine.add(Request(str(index), prompt, params))
    answers: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    return {
        "tokens": answers,
        "seconds": sum(_processor_seconds(pid) for pid in pids) - before,
        "memory": [round((_own_bytes(pid, model) - libraries) / MEBIBYTE, 1) for pid in pids],
    }


def rows(name: str, found: dict[int, dict[str, Any]]) -> list[Row]:
    """Raises InputError where the tokens of two numbers of processes differ."""
    (first, one), *others = found.items()
    made = []
    for ranks, each in others:
        if each["tokens"] != one["tokens"]:
            raise InputError(f"{ranks} processes give other tokens than {first}")
        baseline = f"{first} process: {max(one['memory'])} MiB, {one['seconds']:.2f} s; all tokens are equal"
        memory, seconds = f"{name}_memory_of_the_largest_of_{ranks}", f"{name}_processor_time_of_{ranks}"
        largest, alone = max(each["memory"]), max(one["memory"])
        for metric, value, unit, whole in (
            (memory, largest, "MiB", alone),
            (seconds, each["seconds"], "s", one["seconds"]),
        ):
            row = new_row("tensor_parallel", metric, value, unit, runs=1, baseline=baseline, baseline_value=whole)
            made.append(row)
    return made


def _own_bytes(pid: int, model: Path) -> int:
    """Anonymous memory of a process, and what it has mapped of the model's files."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if not name or not name[0].isupper():  # the head of a mapping
            inside = str(model.resolve()) in line
        elif name == "Anonymous" or (inside and name == "Rss"):
            total += 1024 * int(rest.split()[0])
    return total


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(guarded(main))
