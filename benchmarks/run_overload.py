"""Offer a served model ten times what it can do, and see what it still does and how soon it says no; appends rows.

    python benchmarks/run_overload.py            # six minutes

The server runs 16 answers and lets as many wait as `--waiting` says. What it sustains is measured first: 16 clients
that ask again as soon as they have an answer (`overload/sustained`). Then chats come at times of their own, a Poisson
process, at that rate and at ten times it, in turns. `overload/goodput` are the tokens a second of whole answers while
the load lasts, beside both; `overload/good_share` is the share of answered requests that began within `GOALS`.
`refused_…` is what clients wait for the 429 or 503 at ten times the rate, from the moment at which the request was
meant to be sent, and `late_…` the part by which this script itself was late: client and server share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from lib.chaos_server import Patient, served, wait_until
from lib.models import add_arguments, make_models, say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded
from penjing.serve.bench.load import make_load
from penjing.serve.bench.open_loop import Address, Outcome, bench_open_loop, send

STREAMS = 16
WAITING = 8
TIMES = 10
WARM_SECONDS = 8.0
GOALS = (2.0, 0.2)
"""Seconds to the first token and a token after it, on average."""
SHARES = (50, 99, 100)
IDLE_SECONDS = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each load")
    parser.add_argument("--waiting", type=int, default=WAITING, help="requests that may wait")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    _, artifact = make_models(arguments.checkpoint, arguments.model)
    warn_if_busy()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    settings = f"max_num_sequences={STREAMS}", f"max_waiting_requests={arguments.waiting}"
    closed, even, over, shares, refused, late = [], [], [], [], [], []
    with served(artifact, *settings) as patient:
        rate, _ = asyncio.run(closed_loop(patient, WARM_SECONDS + arguments.seconds))
        for turn in range(arguments.rounds):
            rate, tokens = asyncio.run(closed_loop(patient, WARM_SECONDS + arguments.seconds))
            closed.append(tokens)
            say(f"round {turn + 1}: {rate:.2f} requests and {tokens:.0f} tokens a second by {STREAMS} clients")
            even.append(goodput(offer(patient, rate, arguments.seconds), arguments.seconds))
            outcomes = offer(patient, TIMES * rate, arguments.seconds)
            over.append(goodput(outcomes, arguments.seconds))
            answered = [outcome for outcome in outcomes if outcome.complete]
            shares.append(sum(outcome.good(*GOALS) for outcome in answered) / max(1, len(answered)))
            no = [outcome for outcome in outcomes if outcome.status in (429, 503)]
            refused += [outcome.end for outcome in no]
            late += [outcome.late for outcome in no]
            others = len(outcomes) - len(answered) - len(no)
            say(
                f"  goodput {even[-1]:.0f} at this rate, {over[-1]:.0f} at {TIMES} times it; {len(answered)} answered, "
                f"{shares[-1]:.0%} of them in time, {len(no)} refused, {others} neither; {marks(no)}"
            )
    append("front", overload_rows(closed, even, over, shares, refused, late), arguments.results)
    return 0


async def closed_loop(patient: Patient, seconds: float) -> tuple[float, float]:
    """Requests and tokens of whole answers a second, by clients that never pause."""
    address = Address("127.0.0.1", patient.front_port)
    found: list[tuple[float, Outcome]] = []
    load = iter(make_load("chat", 1.0, 100_000.0, seed=7))
    started = time.monotonic()

    async def ask() -> None:
        while time.monotonic() < started + seconds:
            outcome = Outcome(next(load))
            begun = time.monotonic()
            await send(address, outcome, patient.model, begun)
            found.append((begun - started, outcome))

    await asyncio.gather(*(ask() for _ in range(STREAMS)))
    span = seconds - WARM_SECONDS
    ends = sum(WARM_SECONDS <= at + outcome.end < seconds for at, outcome in found if outcome.complete)
    return ends / span, sum(tokens_within(outcome, at, WARM_SECONDS, seconds) for at, outcome in found) / span


def offer(patient: Patient, rate: float, seconds: float) -> list[Outcome]:
    """What becomes of chats that come so often; returns when the server is idle again."""
    address = f"127.0.0.1:{patient.front_port}"
    _, outcomes = bench_open_loop(address, "chat", rate, WARM_SECONDS + seconds, GOALS)
    wait_until(lambda: patient.figures()["num_requests_running"] == 0, IDLE_SECONDS)
    return outcomes


def goodput(outcomes: Sequence[Outcome], seconds: float) -> float:
    """Tokens a second of whole answers, of those that came while the load lasted and was not new."""
    ends = WARM_SECONDS + seconds
    return sum(tokens_within(outcome, outcome.asked.at, WARM_SECONDS, ends) for outcome in outcomes) / seconds


def tokens_within(outcome: Outcome, due: float, begin: float, end: float) -> float:
    """Tokens of a whole answer, asked for at `due`, that came in a time, by the share of its pieces."""
    if not outcome.complete:
        return 0.0
    return outcome.tokens * sum(begin <= due + after < end for after in outcome.arrivals) / len(outcome.arrivals)


def at_share(seconds: Sequence[float], share: int) -> float:
    """Milliseconds that so many percent do not exceed, by the nearest rank."""
    return 1000 * sorted(seconds)[math.ceil(len(seconds) * share / 100) - 1] if seconds else 0.0


def marks(refused: Sequence[Outcome]) -> str:
    """How soon they were refused, in words."""
    return ", ".join(f"p{share} {at_share([each.end for each in refused], share):.0f} ms" for share in SHARES)


def overload_rows(
    closed: list[float],
    even: list[float],
    over: list[float],
    shares: list[float],
    refused: list[float],
    late: list[float],
) -> list[Row]:
    """Rows from the rounds; see the top of this file."""
    runs = len(closed)
    rows = [
        new_row("front", "overload/sustained", median(closed), "tok/s", runs=runs),
        new_row(
            "front", "overload/goodput", median(over), "tok/s", runs=runs,
            baseline=f"{STREAMS} clients that never pause", baseline_value=median(closed),
        ),
        new_row(
            "front", "overload/goodput", median(over), "tok/s", runs=runs,
            baseline="offered at the sustained rate", baseline_value=median(even),
        ),
        new_row("front", "overload/good_share", 100 * median(shares), "%", runs=runs),
    ]  # fmt: skip
    for name, seconds in {"refused": refused, "late": late}.items():
        for share in SHARES:
            label = "max" if share == 100 else f"p{share}"
            rows.append(new_row("front", f"overload/{name}_{label}", at_share(seconds, share), "ms", runs=len(seconds)))
    return rows


if __name__ == "__main__":
    sys.exit(guarded(main))
