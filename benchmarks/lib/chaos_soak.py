"""A long load at a share of what the server can do: what grows, leaks, is cut short or changes."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from lib.chaos_server import Patient, wait_until
from lib.models import say
from penjing.core.errors import PenjingError
from penjing.serve.client.client import Client

WARM_SECONDS = 60.0
CAPACITY_SECONDS = 30.0
STREAMS = 16
TOKENS = (16, 96)
WORDS = (4, 120)
LOOK_SECONDS = 5.0
IDLE_SECONDS = 120.0


@dataclass
class Soaked:
    """What a load did."""

    ends: Counter[str] = field(default_factory=Counter)
    """complete, short (complete by its own word, with too few tokens), refused, broken."""
    tokens: int = 0
    memory: list[int] = field(default_factory=list)
    """Resident bytes of all processes, every few seconds."""


def capacity(patient: Patient) -> float:
    """Tokens a second of `STREAMS` streams that never pause."""
    soaked, ending = Soaked(), threading.Event()
    draws = [random.Random(f"capacity {number}") for number in range(STREAMS)]

    def run(draw: random.Random) -> None:
        while not ending.is_set():
            _ask(patient, draw, soaked)

    workers = [threading.Thread(target=run, args=(draw,)) for draw in draws]
    for worker in workers:
        worker.start()
    time.sleep(CAPACITY_SECONDS / 3)
    before, started = soaked.tokens, time.monotonic()
    time.sleep(CAPACITY_SECONDS)
    rate = (soaked.tokens - before) / (time.monotonic() - started)
    ending.set()
    for worker in workers:
        worker.join()
    return rate


def soak(patient: Patient, seconds: float, tokens_per_second: float, seed: int) -> Soaked:
    """Requests at random times (a Poisson process), by their tokens `tokens_per_second` on average."""
    draw, soaked = random.Random(seed), Soaked()
    mean = sum(TOKENS) / 2 / tokens_per_second
    running: list[threading.Thread] = []
    begun = looked = due = time.monotonic()
    while (now := time.monotonic()) < begun + seconds:
        if now >= due:
            due += draw.expovariate(1 / mean)
            worker = threading.Thread(target=_ask, args=(patient, random.Random(draw.random()), soaked))
            worker.start()
            running = [each for each in running if each.is_alive()] + [worker]
        if now >= looked + LOOK_SECONDS:
            looked = now
            soaked.memory.append(patient.memory())
            if len(soaked.memory) % 24 == 0:
                say(
                    f"{now - begun:.0f} s: {dict(soaked.ends)}, {soaked.memory[-1] / 2**20:.0f} MiB, {len(running)} run"
                )
        time.sleep(max(0.0, min(due - time.monotonic(), 0.2)))
    for worker in running:
        worker.join()
    wait_until(lambda: patient.figures()["num_requests_running"] == 0, IDLE_SECONDS)
    soaked.memory.append(patient.memory())
    return soaked


def _ask(patient: Patient, draw: random.Random, soaked: Soaked) -> None:
    length = draw.randint(*TOKENS)
    prompt = " ".join(
        draw.choice(("tree", "leaf", "root", "moss", "stone", "rain")) for _ in range(draw.randint(*WORDS))
    )
    try:
        with Client(patient.address, timeout=300, retries=0) as client:
            result = client.generate(prompt, max_tokens=length, ignore_eos=True, temperature=draw.choice((0.0, 1.0)))
    except PenjingError as error:
        end = "refused" if "overloaded" in str(error) else "broken"
    else:
        end = "complete" if result.num_output_tokens == length else "short"
        soaked.tokens += result.num_output_tokens
    soaked.ends[end] += 1
