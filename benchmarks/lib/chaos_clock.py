"""A time of day that jumps under a server with its front, while clients stream."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from lib.chaos_load import Load
from lib.chaos_server import Patient, served
from lib.models import ROOT, say
from lib.rows import Row, new_row
from penjing.core.errors import SetupError
from penjing.core.files import atomic_write_text

SCRIPT = ROOT / "benchmarks" / "peers" / "libfaketime.sh"
LIBRARY = "venv/lib/python*/site-packages/libfaketime/vendor/libfaketime/src/libfaketime.so.1"
DAY = 86_400
OFFSETS = (DAY, 0, -DAY, 0)
"""Seconds beside the real time, one after the other: each is a jump of a day, two ahead and two back."""
SEEN_SECONDS = 1  # for which libfaketime keeps an offset before it reads the file again
STAY_SECONDS = 8.0
POLL_SECONDS = 0.2


def clock_jumps(model: Path, turns: int) -> list[Row]:
    """Rows of a server of its own, whose processes all have a time of day that jumps by a day, `turns` times over.

    Raises:
        SetupError: one of the processes has the real time, or shows no jump.
    """
    not_ready = jumps = 0
    with faked_clock() as file, served(model) as patient:
        pids, before = patient.pids(), patient.canaries()
        strangers = [name for name, pid in pids.items() if "libfaketime" not in Path(f"/proc/{pid}/maps").read_text()]
        if strangers:
            raise SetupError(f"libfaketime was not loaded into {' and '.join(strangers)}")
        load = Load(patient)
        for offset in OFFSETS * turns:
            atomic_write_text(file, f"{offset:+d}")
            jumps += 1
            until = time.monotonic() + STAY_SECONDS
            while time.monotonic() < until:
                not_ready += not patient.is_ready()
                time.sleep(POLL_SECONDS)
            seen = time_told(patient) - time.time()
            say(f"the time of day is {offset:+d} s off, and {seen:+.0f} s by the front: {dict(load.ends)}")
            if abs(seen - offset) > DAY / 24:
                raise SetupError(f"the front's time of day is {seen:+.0f} s off where it should be {offset:+d} s")
        load.stop()
        different = sum(one != other for one, other in zip(before, patient.canaries(), strict=True))
        restarts = sum(patient.pids()[name] != pid for name, pid in pids.items())
    ends, count = load.ends, sum(load.ends.values())
    rows = {
        "clock/jumps": (jumps, "jumps", 1),
        "clock/streams_complete": (ends["complete"], "streams", count),
        "clock/streams_broken": (ends["broken"], "streams", count),
        "clock/streams_lost": (ends["short"] + ends["hung"], "streams", count),
        "clock/not_ready": (not_ready, "answers", jumps),
        "clock/restarts": (restarts, "processes", jumps),
        "clock/canaries_different": (different, "answers", len(before)),
    }
    versions = {"libfaketime": "3.0.1"}
    return [
        new_row("chaos", name, value, unit, runs=runs, more_versions=versions)
        for name, (value, unit, runs) in rows.items()
    ]


@contextmanager
def faked_clock() -> Iterator[Path]:
    """What is started inside has the time of day that the file says: seconds beside the real one, with their sign.

    Waiting and the monotonic clock go on as they are, as when somebody sets a machine's time.
    """
    subprocess.run(["bash", str(SCRIPT)], check=True)
    peer = ROOT / "build" / "peers" / "libfaketime"
    (library,) = peer.glob(LIBRARY)
    kept = dict(os.environ)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "offset"
        file.write_text("+0")
        os.environ |= {
            "LD_PRELOAD": f"{peer / 'timed_locks.so'}:{library}",
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_CACHE_DURATION": str(SEEN_SECONDS),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        try:
            yield file
        finally:
            os.environ.clear()
            os.environ.update(kept)


def time_told(patient: Patient) -> float:
    """The time of day that the front writes into an answer, seconds since 1970.

    Raises:
        SetupError: it gives none.
    """
    connection = http.client.HTTPConnection("127.0.0.1", patient.front_port, timeout=60)
    body = {"model": patient.model, "prompt": "a", "max_tokens": 1}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    if "created" not in answer:
        raise SetupError(f"the front gives no answer: {json.dumps(answer)[:1000]}")
    return answer["created"]
