"""INT8 of an imported image network by us, ONNX Runtime's static quantizer and NNCF: answers, bytes and speed.

    penjing import open-nsfw.onnx build/opennsfw --order BGR --layout NHWC --size 224x224 --scale 1 \\
        --mean 104,117,123 --std 1,1,1 --meaning classes
    python benchmarks/run_graph.py --model build/opennsfw --sources build/sources --nncf build/nncf

All see the same floating network, are calibrated on the same squares of photographs (benchmarks/lib/photos.py says
where they come from), and answer the same held-out ones in ONNX Runtime, in turns (`interleaved`). `agreement` is the
share of the floating network's classes, `kl` the mean divergence from its probabilities, `error` the root mean square
difference of answers over their spread. With `--processor-time`, `processor_milliseconds` is the processor time of
one thread, in place of `milliseconds`. `--nncf` is where `pip install --target build/nncf nncf==3.4.0` put it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from lib.models import say, warn_if_busy
from lib.photos import cut_photos
from lib.processor_time import add_processor_time, clock_of
from lib.rows import RESULTS, Row, append, new_row
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from penjing.compress.export.onnx_graph import export_network
from penjing.compress.quantize.targets import TARGETS
from penjing.compress.quantizers.graph import GraphQuantize, quantize
from penjing.compress.samples.data import DataSettings
from penjing.compress.samples.graph import graph_samples
from penjing.core.artifact.onnx_graph import open_graph_session
from penjing.core.checkpoint.graph import load_network
from penjing.core.cli import guarded
from penjing.core.errors import InputError
from penjing.core.progress import Silent
from penjing.core.runtime.timing import interleaved
from penjing.core.work import Places

BENCH_NNCF = Path(__file__).resolve().parent / "peers" / "bench_nncf.py"
TARGET, FP32 = "onnxruntime-cpu", "FP32, the same network"
PEER_SECONDS = 1800
UNITS = {"agreement": "share", "kl": "nats", "error": "of the spread", "bytes": "B", "milliseconds": "ms"}
COMPARED = ("bytes", "milliseconds")
Values = NDArray[np.float32]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder of 'penjing import' that knows its pixels")
    parser.add_argument("--sources", type=Path, required=True, help="unpacked packages with photographs")
    parser.add_argument("--nncf", type=Path, help="where NNCF was installed")
    parser.add_argument("--calibrate", type=int, default=64, help="images")
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
    with tempfile.TemporaryDirectory() as scratch:
        rows = graph_rows(Path(scratch), arguments)
    append("graph", rows, arguments.results)
    return 0


def graph_rows(scratch: Path, arguments: argparse.Namespace) -> list[Row]:
    """Rows of FP32 and of each contestant."""
    clock = clock_of(arguments)
    network = load_network(arguments.model)
    config, name = network.config, network.config.inputs[0].name
    say("cuts photographs")
    seen, held = cut_photos(arguments.sources, scratch / "photos")
    calibration = DataSettings(source=str(seen), images=arguments.calibrate)
    images = inputs_of(arguments.model, calibration)
    test = inputs_of(arguments.model, DataSettings(source=str(held), images=arguments.images))
    fp32 = scratch / "fp32.onnx"
    export_network(network, fp32, {})
    say("quantizes")
    files: dict[str, Path | str] = {
        "fp32": fp32,
        "penjing": ours(scratch, arguments.model, calibration),
        "onnxruntime_static": onnxruntime_static(scratch, fp32, name, images),
        "nncf": nncf(scratch, arguments.nncf, fp32, images),
    }
    options = TARGETS[TARGET].session_options
    sessions: dict[str, Any] = {}
    for each, file in files.items():
        try:
            entries = {} if each == "fp32" else options
            if isinstance(file, Path):
                sessions[each] = open_graph_session(file, config, entries, threads=arguments.threads)
        except InputError as error:  # what a peer wrote is its own
            if each not in ("nncf", "onnxruntime_static"):
                raise
            files[each] = str(error).removeprefix(f"{file} ")
    say("answers and times")
    answers = {each: run_all(session, name, test, arguments.batch) for each, session in sessions.items()}
    calls = [partial(session.run, None, {name: test[: arguments.batch]}) for session in sessions.values()]
    times = interleaved(calls, rounds=arguments.rounds, seconds=arguments.seconds, now=clock)
    found = {
        each: quality(answers["fp32"], answers[each])
        | {"bytes": Path(files[each]).stat().st_size, "milliseconds": 1000 * median(taken)}
        for each, taken in zip(sessions, times, strict=True)
    }
    return [
        row
        for each, file in files.items()
        for row in rows_of(
            f"{arguments.model.name}/{each}",
            found.get(each),
            found["fp32"],
            file,
            arguments.rounds,
            "processor_" if arguments.processor_time else "",
        )
    ]


def rows_of(
    metric: str, found: dict[str, float] | None, fp32: dict[str, float], file: Path | str, rounds: int, clock: str = ""
) -> list[Row]:
    """A row for each figure of a contestant; without a value where it could not run (`file` is the reason)."""
    plain = metric.endswith("/fp32")
    return [
        new_row(
            "graph",
            f"{metric}/{clock if figure == 'milliseconds' else ''}{figure}",
            None if found is None else found[figure],
            unit,
            runs=0 if found is None else rounds if figure == "milliseconds" else 1,
            baseline=FP32 if figure in COMPARED and not plain else None,
            baseline_value=fp32[figure] if figure in COMPARED and not plain else None,
            reason=None if found is not None else str(file),
        )
        for figure, unit in UNITS.items()
        if figure in COMPARED or not plain
    ]


def quality(reference: Values, answers: Values) -> dict[str, float]:
    """Share of the reference's classes, mean divergence from its probabilities, error over the spread."""
    before, after = (_log_probabilities(each.astype(np.float64)) for each in (reference, answers))
    spread = np.sqrt(np.square(reference - reference.mean(0)).mean())
    return {
        "agreement": float((answers.argmax(1) == reference.argmax(1)).mean()),
        "kl": float((np.exp(before) * (before - after)).sum(1).mean()),
        "error": float(np.sqrt(np.square(answers - reference).mean()) / spread),
    }


def _log_probabilities(answers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of (images, classes) logits, or of what already is probabilities."""
    if (answers >= 0).all() and np.allclose(answers.sum(1), 1, atol=1e-3):
        return np.log(np.maximum(answers, 1e-12))
    return answers - np.logaddexp.reduce(answers, axis=1, keepdims=True)


def run_all(session: Any, name: str, images: Values, batch: int) -> Values:
    """(N, classes) answers."""
    parts = np.split(images, range(batch, len(images), batch))
    return np.concatenate([session.run(None, {name: part})[0] for part in parts])


def inputs_of(model: Path, data: DataSettings) -> Values:
    return np.concatenate([inputs[0].numpy() for inputs in graph_samples(model, data, Silent()).inputs()])


def ours(scratch: Path, model: Path, data: DataSettings) -> Path:
    """The step of recipes/graph-int8.toml, its parity gate included."""
    places = Places(source=model, partial=scratch / "penjing", scratch=scratch / "work")
    places.partial.mkdir()
    quantize(places, GraphQuantize(correct_bias=True), data, model, Silent())
    return places.partial / "model.onnx"


class _Reader(CalibrationDataReader):
    def __init__(self, name: str, images: Values) -> None:
        self.left = iter([{name: image[None]} for image in images])

    def get_next(self) -> dict[str, Values]:
        """One image, or None at the end."""
        return next(self.left, None)  # pyright: ignore[reportReturnType]


def onnxruntime_static(scratch: Path, fp32: Path, name: str, images: Values) -> Path:
    """What its documentation advises for x64 with VNNI: Q/DQ, u8 activations, s8 weights a channel."""
    prepared, file = scratch / "prepared.onnx", scratch / "onnxruntime.onnx"
    quant_pre_process(fp32, prepared)
    quantize_static(
        prepared,
        file,
        _Reader(name, images),
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    return file


def nncf(scratch: Path, site: Path | None, fp32: Path, images: Values) -> Path | str:
    """NNCF's file with its defaults, or why there is none."""
    if site is None:
        return "no --nncf"
    np.save(scratch / "images.npy", images)
    file = scratch / "nncf.onnx"
    command = [sys.executable, str(BENCH_NNCF), str(fp32), str(scratch / "images.npy"), str(file), "int8"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site.resolve()), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PEER_SECONDS, check=False, env=environment, cwd=scratch
    )
    if done.returncode:
        return f"NNCF failed: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1][:300]}"
    say(f"NNCF {json.loads(done.stdout.strip().splitlines()[-1])['version']}")
    return file


if __name__ == "__main__":
    sys.exit(guarded(main))
