"""Processor time: of one thread, or of processes on this machine: what a call costs, however busy the cores are."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def add_processor_time(parser: argparse.ArgumentParser) -> None:
    """The flag that `clock_of` reads."""
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="of one thread, in place of the clock: for a machine that has other work",
    )


def clock_of(arguments: argparse.Namespace) -> Callable[[], float]:
    """The clock for `interleaved`, in seconds; with the flag that of this process, whose sessions get one thread."""
    if not arguments.processor_time:
        return time.perf_counter
    arguments.threads = 1
    return time.process_time


def below(pid: int) -> dict[int, str]:
    """A process and all that it and its children started: their ids and names."""
    children: dict[int, list[int]] = defaultdict(list)
    names: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                before, _, rest = (folder / "stat").read_text().rpartition(")")
                children[int(rest.split()[1])].append(int(folder.name))
                names[int(folder.name)] = before.partition("(")[2]
    found, left = dict[int, str](), [pid]
    while left:
        last = left.pop()
        found[last] = names.get(last, "")
        left += children[last]
    return found


def seconds(pids: dict[int, str]) -> dict[str, float]:
    """Seconds that threads of these processes have run, by the name of the process."""
    total: dict[str, float] = defaultdict(float)
    for pid, name in pids.items():
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(FileNotFoundError, ProcessLookupError):
                total[name] += int(path.read_text().split()[0]) / 1e9
    return total
