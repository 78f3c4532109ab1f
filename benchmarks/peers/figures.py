"""The four figures of the engine benchmark, defined once for every contestant.

`seconds(prompts, new)` submits the prompts (lists of token ids) at once and returns the wall time until each has
exactly `new` more tokens, chosen greedily. All figures are tokens per second.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

NEW_16, NEW_1 = 64, 129  # new tokens of each of the 16 streams, and of the single stream


def measure(
    seconds: Callable[[Sequence[Sequence[int]], int], float], prompts: dict[str, list], runs: int = 1
) -> dict[str, float]:
    """Medians over `runs`; `prompts` as `prompts.py` writes them."""
    seconds([prompts["p32"]], 4)  # first calls compile, allocate and fault pages in

    def middle(batch: Sequence[Sequence[int]], new: int) -> float:
        return median(seconds(batch, new) for _ in range(runs))

    prefill_16, full_16 = middle(prompts["p16"], 1), middle(prompts["p16"], NEW_16)
    first, full = middle([prompts["p32"]], 1), middle([prompts["p32"]], NEW_1)
    if full <= first or full_16 <= prefill_16:
        raise SystemExit("error: more tokens took less time; something else uses this machine")
    streams = len(prompts["p16"])
    return {
        "prefill_512": len(prompts["p512"]) / middle([prompts["p512"]], 1),
        "one_stream": (NEW_1 - 1) / (full - first),
        "streams_16": streams * NEW_16 / full_16,
        "decode_only_16": streams * (NEW_16 - 1) / (full_16 - prefill_16),
    }


def read_prompts(path: str) -> dict[str, list]:
    return json.loads(Path(path).read_text())


def report(name: str, figures: dict[str, float]) -> None:
    """Print what `run_engine.py` reads: one JSON line, last."""
    print(json.dumps({"name": name, **{metric: round(value, 2) for metric, value in figures.items()}}), flush=True)
