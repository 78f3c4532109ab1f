"""A torchrun tied to its starter: it ends with the starter, and not with the thread that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from penjing.train.launch.tied import TiedTorchrun

SCRIPT = """
import os, signal, sys, time
def end(*_):
    print("stopped", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("process", os.getpid(), flush=True)
{does}
"""


def script(folder: Path, does: str) -> list[str]:
    (path := folder / "script.py").write_text(SCRIPT.format(does=does))
    return ["--standalone", "--nproc-per-node=1", str(path)]


def first_line(running: TiedTorchrun) -> int:
    lines: list[str] = []
    while not any(line.startswith("process") for line in lines):
        assert running.wait(0.1) is None, lines
        lines += running.said()
    return int(lines[-1].split()[1])


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_it_outlives_the_thread_that_started_it_and_stops_when_told(tmp_path: Path) -> None:
    found: list[TiedTorchrun] = []
    thread = threading.Thread(target=lambda: found.append(TiedTorchrun(script(tmp_path, "time.sleep(60)"), tmp_path)))
    thread.start()
    thread.join()
    pid = first_line(found[0])
    found[0].stop(30.0)
    assert found[0].wait(0) not in (None, 0)
    assert found[0].said()[-1] == "stopped\n"
    assert gone(pid)


def test_it_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    given = script(tmp_path, "time.sleep(60)")
    starter = (
        "import sys, time; from pathlib import Path; from penjing.train.launch.tied import TiedTorchrun\n"
        f"running = TiedTorchrun({given}, Path({str(tmp_path)!r}))\n"
        "while True:\n    running.wait(0.1); print(*running.said(), end='', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = next(int(line.split()[1]) for line in process.stdout if line.startswith("process"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert gone(pid)
