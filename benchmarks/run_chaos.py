"""Hurt a server in every way that is known, and count what it did to whom.

    python benchmarks/run_chaos.py                    # a quarter of an hour; appends rows
    python benchmarks/run_chaos.py MODEL --fuzzed 1000 --left 50 --turns 1
    python benchmarks/run_chaos.py MODEL --only fuzz --pieces 10 --piece 3       # a tenth of the random requests
    python benchmarks/run_chaos.py MODEL --only soak --minutes 30 --set kv_cache_bytes=268435456

A server with its front takes, one after the other: SIGKILL and SIGSTOP of the model's process, of Triton server and of
the front, alone and together, while clients stream; clients that leave after the first piece, that dawdle, that never
read; and random bodies, headers and protobufs on every port. Each of its ports is taken by somebody else while its
process is away. A second server's time of day jumps ahead and back by a day. Before and after, greedy answers must be
the same. The long load, at 80 % of what the server can do, is asked for by its name alone; a small cache is full before
its memory is looked at first, since pages of the key-value cache count only once they were used.

`lost` counts answers that nobody broke: streams that hung, or said that they were complete and were not. `restarts`
of the fuzzing count processes that had to be started again.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path
from statistics import median

from lib.chaos_clock import clock_jumps
from lib.chaos_fuzz import GrpcFuzz, fuzz, fuzz_front, fuzz_http2, fuzz_metrics
from lib.chaos_load import Load, dawdle, leave
from lib.chaos_server import Patient, served, wait_until
from lib.chaos_soak import WARM_SECONDS, capacity, soak
from lib.models import ARTIFACT, CHECKPOINT, make_models, say
from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded

STOP_SECONDS = 2.0
IDLE_SECONDS = 60.0
PARTS = ("faults", "clients", "fuzz", "ports", "clock")
SOAK = "soak"
SHARE = 0.8
STOLEN_SECONDS = 5.0
KINDS = ("answered", "closed", "hung", "refused", "inside")
FAULTS: dict[str, tuple[tuple[str, ...], int, bool]] = {  # whom, by which signal, and whether they go on by themselves
    "kill stub": (("stub",), signal.SIGKILL, False),
    "kill server": (("server",), signal.SIGKILL, False),
    "kill front": (("front",), signal.SIGKILL, False),
    "kill stub and front": (("stub", "front"), signal.SIGKILL, False),
    "kill server and front": (("server", "front"), signal.SIGKILL, False),
    "pause stub": (("stub",), signal.SIGSTOP, True),
    "pause server": (("server",), signal.SIGSTOP, True),
    "pause front": (("front",), signal.SIGSTOP, True),
    "pause all": (("stub", "server", "front"), signal.SIGSTOP, True),
    "stop stub": (("stub",), signal.SIGSTOP, False),
    "stop server": (("server",), signal.SIGSTOP, False),
    "stop front": (("front",), signal.SIGSTOP, False),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=ARTIFACT, help="a decoder")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="what the artifact was made of")
    parser.add_argument("--turns", type=int, default=2, help="of each fault")
    parser.add_argument("--left", type=int, default=1000, help="clients that leave")
    parser.add_argument("--fuzzed", type=int, default=100_000, help="requests that nobody should send")
    parser.add_argument("--pieces", type=int, default=1, help="into which the random requests are divided")
    parser.add_argument("--piece", type=int, default=1, help="of these, counted from 1")
    parser.add_argument("--minutes", type=float, default=30.0, help="of the long load")
    parser.add_argument("--only", choices=(*PARTS, SOAK), nargs="+", default=PARTS, help="of the parts")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the engine")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    model = arguments.model
    if model == ARTIFACT:
        _, model = make_models(arguments.checkpoint, model)
    rows: list[Row] = clock_jumps(model.absolute(), arguments.turns) if "clock" in arguments.only else []
    if set(arguments.only) != {"clock"}:
        rows += hurt(model, arguments)
    append("chaos", rows, arguments.results)
    return 0


def hurt(model: Path, arguments: argparse.Namespace) -> list[Row]:
    """All parts but the clock, to one server."""
    rows: list[Row] = []
    with served(model, *arguments.set) as patient:
        before = patient.canaries()
        if "faults" in arguments.only:
            rows += faults(patient, arguments.turns)
        if "clients" in arguments.only:
            rows += clients(patient, arguments.left)
        if "fuzz" in arguments.only:
            rows += fuzzing(patient, arguments.fuzzed // arguments.pieces, arguments.piece - 1)
        if "ports" in arguments.only:
            rows += ports(patient)
        if SOAK in arguments.only:
            rows += soaking(patient, 60 * arguments.minutes)
        after = patient.canaries()
        different = sum(one != other for one, other in zip(before, after, strict=True))
        rows.append(new_row("chaos", "canaries/different", different, "answers", runs=len(before)))
    return rows


def faults(patient: Patient, turns: int) -> list[Row]:
    """Each fault while clients stream."""
    seconds: list[float] = []
    lost = 0
    load = Load(patient)
    for turn in range(turns):
        for name, (whom, number, goes_on) in FAULTS.items():
            pids = patient.pids()
            for victim in whom:
                os.kill(pids[victim], number)
            if goes_on:
                time.sleep(STOP_SECONDS)
                for victim in whom:
                    os.kill(pids[victim], signal.SIGCONT)
            elif number == signal.SIGSTOP:  # until it is found: the front's word may be ten seconds old
                changed = wait_until(lambda pids=pids, whom=whom: all(patient.is_over(v, pids[v]) for v in whom), 60)
                say(f"{name}: {'found' if changed else 'not found'}")
            took = patient.seconds_to_recover()
            lost += took is None
            seconds.append(0.0 if took is None else took)
            outcome = "not back" if took is None else f"back after {took:.1f} s"
            say(f"turn {turn + 1}, {name}: {outcome}; {dict(load.ends)}")
            time.sleep(2)
    load.stop()
    ends, count = load.ends, turns * len(FAULTS)
    row = {
        "faults/not_recovered": (lost, "faults", count),
        "faults/recovery_median": (median(seconds), "s", count),
        "faults/recovery_max": (max(seconds), "s", count),
        "faults/streams_complete": (ends["complete"], "streams", sum(ends.values())),
        "faults/streams_broken": (ends["broken"], "streams", sum(ends.values())),
        "faults/streams_lost": (ends["short"] + ends["hung"], "streams", sum(ends.values())),
    }
    return [new_row("chaos", name, value, unit, runs=runs) for name, (value, unit, runs) in row.items()]


def clients(patient: Patient, count: int) -> list[Row]:
    """Clients that leave, dawdle or never read."""
    pids = patient.pids()
    left = leave(patient, count)
    started = time.monotonic()
    idle = wait_until(lambda: patient.figures()["num_requests_running"] == 0, IDLE_SECONDS)
    seconds = time.monotonic() - started if idle else IDLE_SECONDS
    held = patient.figures()["kv_cache_usage_perc"]
    say(f"{left} clients left; idle after {seconds:.1f} s, {held:.1%} of the cache held")
    beside = dawdle(patient, 200, 50)
    wait_until(lambda: patient.figures()["num_requests_running"] == 0, IDLE_SECONDS)
    rows = {
        "clients/left_mid_stream": (left, "clients", count),
        "clients/idle_after": (seconds, "s", 1),
        "clients/cache_held_after": (100 * held, "%", 1),
        "clients/answer_beside_250_slow": (beside, "s", 1),
        "clients/restarts": (sum(patient.pids()[name] != pid for name, pid in pids.items()), "processes", 1),
    }
    return [new_row("chaos", name, value, unit, runs=runs) for name, (value, unit, runs) in rows.items()]


def ports(patient: Patient) -> list[Row]:
    """Somebody listens on a port when the process that had it is started again."""
    lost, seconds = 0, []
    config = patient.config
    doors = {"front": ("front", patient.front_port)}
    doors |= {"grpc": ("server", config.grpc_port), "metrics": ("server", config.metrics_port)}
    for name, (victim, port) in doors.items():
        supervisor, pid = patient.state.supervisor_pid, patient.pids()[victim]
        os.kill(supervisor, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        thief = steal(port)
        os.kill(supervisor, signal.SIGCONT)
        time.sleep(STOLEN_SECONDS)
        thief.close()
        took = patient.seconds_to_recover()
        lost += took is None
        seconds.append(took or 0.0)
        say(f"the port of {name} was stolen: {'not back' if took is None else f'back {took:.1f} s after it was free'}")
    return [
        new_row("chaos", "ports/not_recovered", lost, "ports", runs=len(seconds)),
        new_row("chaos", "ports/recovery_max", max(seconds), "s", runs=len(seconds)),
    ]


def steal(port: int) -> socket.socket:
    """Listen on a port as soon as nobody else does."""
    while True:
        thief = socket.socket()
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            thief.bind(("127.0.0.1", port))
        except OSError:
            thief.close()
            time.sleep(0.01)
            continue
        thief.listen()
        return thief


def soaking(patient: Patient, seconds: float) -> list[Row]:
    """A long load at `SHARE` of what the server can do."""
    pids = patient.pids()
    most = capacity(patient)
    say(f"{most:.0f} tokens a second at most; {SHARE:.0%} of them for {seconds / 60:.0f} minutes")
    soak(patient, WARM_SECONDS, SHARE * most, seed=0)
    soaked = soak(patient, seconds, SHARE * most, seed=1)
    ends, count = soaked.ends, sum(soaked.ends.values())
    quarter = max(1, len(soaked.memory) // 4)
    growth = 100 * (median(soaked.memory[-quarter:]) / median(soaked.memory[:quarter]) - 1)
    rows = {
        "soak/minutes": (seconds / 60, "min", 1),
        "soak/share_of_capacity": (100 * soaked.tokens / seconds / most, "%", count),
        "soak/complete": (ends["complete"], "answers", count),
        "soak/truncated": (ends["short"], "answers", count),
        "soak/broken": (ends["broken"] + ends["refused"], "answers", count),
        "soak/memory_growth": (growth, "%", len(soaked.memory)),
        "soak/blocks_held_after": (100 * patient.figures()["kv_cache_usage_perc"], "%", 1),
        "soak/restarts": (sum(patient.pids()[name] != pid for name, pid in pids.items()), "processes", 1),
    }
    return [new_row("chaos", name, value, unit, runs=runs) for name, (value, unit, runs) in rows.items()]


def fuzzing(patient: Patient, count: int, piece: int = 0) -> list[Row]:
    """Half of the requests for the front, a quarter for gRPC as protobufs, the rest as bytes for gRPC and metrics."""
    pids, rows = patient.pids(), []
    kinds = {"front": (fuzz_front, 2), "grpc": (GrpcFuzz(patient.address), 4), "http2": (fuzz_http2, 8)}
    kinds |= {"metrics": (fuzz_metrics, 8)}
    fuzz(patient, 400, fuzz_front)  # caches and threads that stay
    memory = patient.memory()
    for name, (send, part) in kinds.items():
        counts = fuzz(patient, count // part, send, piece=piece)
        say(f"fuzzed {name}: {dict(counts)}")
        sent = sum(counts.values()) - counts["inside"]
        shown = [what for what in KINDS if counts[what] or what in ("hung", "inside")]
        rows += [new_row("chaos", f"fuzz/{name}/{what}", counts[what], "requests", runs=sent) for what in shown]
    wait_until(lambda: patient.figures()["num_requests_running"] == 0, IDLE_SECONDS)
    restarts = sum(patient.pids()[name] != pid for name, pid in pids.items())
    growth = 100 * (patient.memory() / memory - 1)
    held = 100 * patient.figures()["kv_cache_usage_perc"]
    rows.append(new_row("chaos", "fuzz/restarts", restarts, "processes", runs=count))
    rows.append(new_row("chaos", "fuzz/memory_growth", growth, "%", runs=count))
    rows.append(new_row("chaos", "fuzz/cache_held_after", held, "%", runs=count))
    return rows


if __name__ == "__main__":
    sys.exit(guarded(main))
