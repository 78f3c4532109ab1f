"""Search widths and bits of the Fashion-MNIST ResNet together, and heal what it found beside uniform choices; rows.

    python benchmarks/run_joint_search.py                                   # a full model, three seeds: hours
    penjing train recipes/resnet-fashion.toml --set model.width=16 --set steps=900 --set output=build/small
    python benchmarks/run_joint_search.py --model build/small --seeds 1 --images 1024 --random 20 \\
        --healing 200 --test-images 4000                                    # what was run: under half an hour
    python benchmarks/run_joint_search.py --model build/small --seeds 1 --images 1024 --random 60 --only-ranks

    python benchmarks/run_joint_search.py --width 8 --training 600 --images 1024 --healing 100 --heal 4 --random 0 \\
        --combinations 24 --test-images 4000 --folder build/joint       # three seeds, also of the training; short

    python benchmarks/run_joint_search.py --width 8 --training 300 --images 512 --healing 40 --heal 1 --second 0 \\
        --random 0 --combinations 16 --widths 0.875 0.75 0.625 0.5 0.375 --round-to 1 --budget 0.24 --only-bits 8 \\
        --test-images 4000 --folder build/joint         # three seeds beside uniform pruning and uniform INT8 alone

With `--heal N` the search itself heals N points, uniform choices and what it finds beside them, and goes round again
([heal]); the search's best is then chosen by what it measured after healing.

Nothing is timed: costs are multiply-accumulates (an INT8 one counts a quarter) or bytes, so that a busy machine does no
harm. `rank_fitted` is Spearman's correlation of measured divergences with what was predicted of each from the others;
`rank_random` that of fresh random combinations, which nothing was fitted to, beside plain sums of single changes.
`COST/uniform_WIDTH_BITS` is the accuracy on the test images, after equal healing and rounding, of the search's best
within the cost of that uniform choice, beside the uniform choice itself. `mean/COST/uniform_…` are means over seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from lib.models import say
from lib.rows import RESULTS, Row, append, new_row

from penjing.compress.families.base import family_at
from penjing.compress.recipe import load_recipe
from penjing.compress.run import run_recipe
from penjing.compress.search.base import Changes
from penjing.compress.search.draw import scattered
from penjing.compress.search.points import point_recipe
from penjing.compress.search.predict import fit, spearman
from penjing.compress.search.recipe import Choices
from penjing.compress.search.search import run_joint_search
from penjing.compress.search.trial import Trials
from penjing.core.cli import guarded
from penjing.core.config import dump_toml, inline_toml, read_recipe
from penjing.core.progress import PlainProgress
from penjing.train.run import train

BASE = "resnet-fashion-int8"
RANDOM_SEED = 1000  # of the fresh combinations, which no search draws


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint of the ResNet; trained by its recipe if left out")
    parser.add_argument("--folder", type=Path, help="where the search is kept, so that a killed run goes on")
    parser.add_argument("--seeds", type=int, default=3, help="searches, each with combinations of its own")
    parser.add_argument("--cost", choices=("macs", "bytes"), default="macs")
    parser.add_argument("--widths", type=float, nargs="+", help="below 1.0, in place of the search's own")
    parser.add_argument("--round-to", type=int, default=4, help="channels that widths are multiples of")
    parser.add_argument("--budget", type=float, help="most that a point may cost, as a part of the network's")
    parser.add_argument("--only-bits", type=int, choices=(32, 8), help="of the uniform choices that are compared")
    parser.add_argument("--combinations", type=int, default=48, help="that the sum is fitted to")
    parser.add_argument("--random", type=int, default=60, help="fresh combinations that predictions are held against")
    parser.add_argument("--images", type=int, default=2048, help="training images; half of them judge")
    parser.add_argument("--healing", type=int, default=2814, help="steps of distillation; INT8 is calibrated after it")
    parser.add_argument("--heal", type=int, default=0, help="points that the search heals in each round; 0: none")
    parser.add_argument("--second", type=int, help="points of the second round, in place of as many; 0: no such round")
    parser.add_argument("--width", type=int, help="of networks that are trained here, one for each seed")
    parser.add_argument("--training", type=int, default=5625, help="steps of their training")
    parser.add_argument("--test-images", type=int, default=10_000, help="that accuracy is measured on")
    parser.add_argument("--only-ranks", action="store_true", help="heal nothing: how well predictions rank, no more")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, list[Row]] = {}
        for seed in range(arguments.seeds):
            model = arguments.model or trained(folder, arguments, seed)
            rows = measure(model, folder, arguments, seed)
            append("joint_search", rows, arguments.results)
            for row in rows:
                found.setdefault(row.metric.removeprefix(f"seed_{seed}/"), []).append(row)
    if arguments.seeds > 1:
        append("joint_search", means(found, arguments.seeds), arguments.results)
    return 0


def trained(folder: Path, arguments: argparse.Namespace, seed: int) -> Path:
    """A network of this seed, which is kept."""
    model = folder / f"model-{seed}"
    if not model.exists():
        given = [f"output={inline_toml(str(model))}", f"seed={seed + 1}", f"steps={arguments.training}"]
        given += ["evaluation.every=0", *([f"model.width={arguments.width}"] if arguments.width else [])]
        train(Path("resnet-fashion"), given, resume="auto")
    return model


def means(found: dict[str, list[Row]], seeds: int) -> list[Row]:
    """Over the seeds: accuracies of the search's best beside those of each uniform choice, and how many of them it is
    no worse than. Where a seed has no row the uniform choice is the search's best itself."""
    rows, kept = [], 0
    uniform = {name: own for name, own in found.items() if "/uniform_" in name}
    for name, own in uniform.items():
        values, others = [row.value or 0.0 for row in own], [(row.value or 0.0) / (row.ratio or 1.0) for row in own]
        kept += sum(values) >= sum(others)
        rows.append(new_row("joint_search", f"mean/{name}", sum(values) / len(own), "share right", runs=len(own),
                            baseline="the uniform choice", baseline_value=sum(others) / len(own)))  # fmt: skip
    return [*rows, new_row("joint_search", "mean/no_worse", float(kept), "uniform choices", runs=seeds,
                           baseline="all that it does not find itself", baseline_value=len(uniform))]  # fmt: skip


def measure(model: Path, folder: Path, arguments: argparse.Namespace, seed: int) -> list[Row]:
    """The rows of one seed."""
    settings: dict[str, Any] = {
        "model": str(model),
        "data.images": arguments.images,
        "steps.0.round_to": arguments.round_to,
        "steps.1.steps": arguments.healing,
        "steps.2.steps": 0,
        "steps.2.teacher": str(model),
        "evaluate.images": arguments.test_images,
        "guard.accuracy_points": 100.0,
        "measure.rounds": 0,
    }
    output = folder / f"{arguments.cost}-{seed}"
    search = {
        "base": BASE,
        "output": str(output),
        "cost": arguments.cost,
        "combinations": arguments.combinations,
        "seed": seed,
        "settings": settings,
    }
    if arguments.widths:
        search["space"] = {"widths": [1.0, *arguments.widths]}
    if arguments.budget:
        search["budget"] = arguments.budget
    if arguments.heal:
        second = arguments.heal if arguments.second is None else arguments.second
        counts = {"points": arguments.heal, "second": second, "steps": arguments.healing}
        search["heal"] = counts | {"uniform": True}
    path = folder / f"{arguments.cost}-{seed}.toml"
    path.write_text(dump_toml(search))
    result = run_joint_search(path, progress=PlainProgress())
    values = read_recipe(Path(BASE), [f"{key}={inline_toml(value)}" for key, value in settings.items()])
    recipe = load_recipe(values)
    choices = Choices.model_validate(search.get("space", {}))
    trials = Trials(recipe, choices, family_at(model), PlainProgress())
    name = f"seed_{seed}/" if arguments.seeds > 1 else ""
    rank, plain = result["prediction"]["rank"], result["prediction"]["plain_rank"]
    runs = arguments.combinations
    sums = "plain sums of single changes"
    rows = [new_row("joint_search", f"{name}rank_fitted", rank, "Spearman", runs=runs, baseline=sums,
                    baseline_value=plain)]  # fmt: skip
    if arguments.random:
        rank, plain = random_ranks(trials, result, arguments.random, RANDOM_SEED + seed)
        rows.append(new_row("joint_search", f"{name}rank_random", rank, "Spearman", runs=arguments.random,
                            baseline=sums, baseline_value=plain))  # fmt: skip
    for entry in [] if arguments.only_ranks else result["baselines"]:
        judged = "healed" if arguments.heal else "best"
        if entry.get(judged, entry["row"]) == entry["row"]:
            continue  # the uniform choice is the front's own, or beyond the budget
        uniform, best = (result["rows"][entry[which]]["choice"] for which in ("row", judged))
        if arguments.only_bits not in (None, *_bits(trials, uniform)):
            continue
        found = []
        for which, choice in (("uniform", uniform), ("best", best)):
            steps = trials.point(values, choice)
            made = point_recipe(values, steps, output, f"front-{which}-{entry['row']}.toml")
            report = run_recipe(made, progress=PlainProgress()) / "report.json"
            found.append(json.loads(report.read_text())["stages"][-1]["quality"]["value"])
            say(f"{which} {choice}: {found[-1]:.4f}")
        said = "_".join(dict.fromkeys(_said(trials, uniform)))
        metric = f"{name}{arguments.cost}/uniform_{said}"
        rows.append(new_row("joint_search", metric, found[1], "share right", runs=1, baseline="the uniform choice",
                            baseline_value=found[0]))  # fmt: skip
    return rows


def random_ranks(trials: Changes, result: dict[str, Any], count: int, seed: int) -> tuple[float, float]:
    """Correlations of the measured divergences of fresh combinations with the fitted and with plain sums."""
    space, rows = trials.space, result["rows"]
    singles = [np.zeros(size) for size in space.sizes]
    for row in rows:
        if row["kind"] == "single":
            place = int(np.flatnonzero(row["choice"])[0])
            singles[place][row["choice"][place]] = row["divergence"]
    fitted = [row for row in rows if row["kind"] in ("combination", "near the front")]
    choices = np.array([row["choice"] for row in fitted])
    prediction = fit(singles, space.pairs(), choices, np.array([row["divergence"] for row in fitted]))
    fresh = scattered(space.sizes, count, seed)
    measured = []
    for number, choice in enumerate(fresh, 1):
        measured.append(trials.divergence(choice))
        say(f"{number} of {count} random combinations: {measured[-1]:.4g}")
    drawn, found = np.array(fresh), np.array(measured)
    plain = np.sum([values[drawn[:, place]] for place, values in enumerate(singles)], axis=0)
    return spearman(prediction.of(drawn), found), spearman(plain, found)


def _bits(trials: Trials, choice: list[int]) -> set[float]:
    own = zip(trials.space.variables, choice, strict=True)
    return {each.options[option] for each, option in own if each.kind == "bits"}


def _said(trials: Trials, choice: list[int]) -> list[str]:
    return [f"{each.options[option]:g}" for each, option in zip(trials.space.variables, choice, strict=True)]


if __name__ == "__main__":
    sys.exit(guarded(main))
