"""Scenarios of processes that die, hang or fail, each in processes forked from one that has imported torch.

Run as a script with a folder: leaves results.json there, scenario → exit codes by rank, what was said, seconds.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from penjing.core.cli import guarded
from penjing.core.errors import ConfigError
from penjing.core.progress import Silent
from penjing.train.processes.marks import Marked
from penjing.train.processes.watch import Watch, watching

SIZE, TIMEOUT_S = 3, 2.0


def end(number: int, victim: int) -> Callable[[Watch], None]:
    def work(watch: Watch) -> None:
        watch.at("step 5")
        if number == signal.SIGTERM:  # the others are not to be taken as hanging before it ends, 3 s later
            watch.timeout_s = 10.0
        time.sleep(1.5)  # the watch tells once a second
        if watch.rank == victim:
            os.kill(os.getpid(), number)
        time.sleep(60)

    return work


def one_raises(watch: Watch) -> None:
    watch.at("step 5")
    if watch.rank == 2:
        raise ValueError("what nobody thought of")
    time.sleep(60)


def all_raise(watch: Watch) -> None:
    time.sleep(0.3 * (SIZE - watch.rank))
    raise ConfigError("data.batch_size=7 is wrong")


def others_follow(watch: Watch) -> None:
    if watch.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("Connection closed by peer")


def one_hangs(watch: Watch) -> None:
    watch.at("step 3, reading its data")
    if watch.rank != 1:
        watch.at("step 3")
    time.sleep(60)


def all_hang(watch: Watch) -> None:
    watch.at("step 3")
    if watch.rank == 2:  # looks less often, and so sees the verdict when the others are through with it
        watch.timeout_s = 10.0
    time.sleep(60)


def one_works(watch: Watch) -> None:
    if watch.rank == 1:
        until = time.monotonic() + 2.5 * TIMEOUT_S
        while time.monotonic() < until:
            pass
    watch.meet()


def one_prepares(watch: Watch) -> None:
    """Data, with the processor idle, as a slow disk has it: longer than all may be idle, in parts that are not."""
    progress = Marked(Silent(), watch)
    if watch.rank == 1:
        progress.start("packing tokens", 10)
        for _ in range(10):
            progress.advance()
            time.sleep(0.25 * TIMEOUT_S)
    watch.meet()


def one_is_late(watch: Watch) -> None:
    watch.meet()
    if watch.rank == 0:
        time.sleep(1)


def nobody_comes(watch: Watch) -> None:
    raise AssertionError


def interrupted(watch: Watch) -> None:
    if watch.rank == 2:
        raise KeyboardInterrupt
    time.sleep(60)


SCENARIOS: dict[str, Callable[[Watch], None]] = {
    "killed": end(signal.SIGKILL, 1),
    "main killed": end(signal.SIGKILL, 0),
    "stopped": end(signal.SIGSTOP, 1),
    "main stopped": end(signal.SIGSTOP, 0),
    "terminated": end(signal.SIGTERM, 1),
    "one raises": one_raises,
    "all raise": all_raise,
    "others follow": others_follow,
    "one hangs": one_hangs,
    "all hang": all_hang,
    "one works": one_works,
    "one prepares": one_prepares,
    "one is late": one_is_late,
    "interrupted": interrupted,
    "port in use": nobody_comes,
}


def child(rank: int, port: int, work: Callable[[Watch], None], log: Path) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip

    def run() -> int:
        # To come together takes time on a busy machine; where another program has the port, nobody comes.
        with watching(60.0 if work is not nobody_comes else TIMEOUT_S) as watch:
            assert watch is not None
            watch.meet()
            watch.timeout_s = TIMEOUT_S
            work(watch)
        return 0

    os._exit(guarded(run))


def main(folder: Path) -> None:
    sockets, started = [], time.monotonic()
    running: dict[int, tuple[str, int]] = {}
    results: dict[str, dict[str, object]] = {}
    for name, work in SCENARIOS.items():
        taken = socket.socket()
        taken.bind(("127.0.0.1", 0))
        if work is nobody_comes:
            taken.listen()
        sockets.append(taken)
        port = taken.getsockname()[1]
        if work is not nobody_comes:
            taken.close()
        results[name] = {"codes": [None] * SIZE, "seconds": 0.0}
        for rank in range(SIZE):
            pid = os.fork()
            if pid == 0:
                child(rank, port, work, folder / name)
            running[pid] = (name, rank)
    signal.alarm(100)  # who started this is told nothing if it hangs, and what is left must not outlive it
    signal.signal(signal.SIGALRM, lambda *_: [os.kill(pid, signal.SIGKILL) for pid in running])
    while running:
        pid, status = os.wait()
        name, rank = running.pop(pid)
        results[name]["codes"][rank] = os.waitstatus_to_exitcode(status)  # type: ignore[index]
        results[name]["seconds"] = time.monotonic() - started
    for name, result in results.items():
        result["said"] = (folder / name).read_text()
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
