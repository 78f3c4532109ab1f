"""Post-training INT8 of one classifier by us, ONNX Runtime's static quantizer and NNCF: quality, bytes and speed.

python benchmarks/run_int8_peers.py --model build/resnet-fashion     # of recipes/resnet-fashion.toml
python benchmarks/run_int8_peers.py --quick                          # trains a tiny one first, to try the script

All see the same FP32 network, the same training images for calibration and the same test images of Fashion-MNIST, and
run in ONNX Runtime with the same options, in turns (`interleaved`). Accuracy, agreement with FP32 and KL are those of
the file as it is written, Q/DQ pairs in floating point: the same on any processor. `agreement_here` is that of the
integer kernels of this one, whose products may saturate without VNNI (see `compress/quantize/targets.py`). NNCF has an
environment of its own, which peers/nncf.sh makes. Rows in benchmarks/results/int8_peers.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
from lib.models import ROOT, say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from penjing.compress.export.onnx_graph import export_network
from penjing.compress.graph.own import classifier_network
from penjing.compress.quantize.targets import TARGETS
from penjing.compress.quantizers.classifier import ArtifactSettings, quantize_checkpoint
from penjing.compress.samples.data import DataSettings, ImageData, fitting_images, image_samples
from penjing.core.checkpoint.classifier import load_classifier
from penjing.core.cli import guarded
from penjing.core.errors import SetupError
from penjing.core.files import publish_folder
from penjing.core.images.normalise import normalise
from penjing.core.progress import Silent
from penjing.core.runtime.onnx_runtime import INPUT, open_session
from penjing.core.runtime.timing import interleaved
from penjing.train.run import train

PEERS = Path(__file__).resolve().parent / "peers"
NNCF = ROOT / "build" / "peers" / "nncf" / "venv" / "bin" / "python"
RECIPE = ROOT / "recipes" / "resnet-fashion.toml"
TINY = ("steps=100", "model.width=8", "data.batch_size=32", "evaluation.every=100", "evaluation.samples=100")
RUNTIME = f"ONNX Runtime {onnxruntime.__version__}"
FP32 = "FP32, the same network"
PEER_SECONDS = 1800
Images = NDArray[np.float32]


@dataclass(frozen=True)
class Quantized:
    """A contestant's file, or why there is none."""

    name: str
    version: str
    file: Path | None = None
    reason: str | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Fashion-MNIST checkpoint of 'penjing train'")
    parser.add_argument("--target", choices=("onnxruntime-cpu", "onnxruntime-avx2"), default="onnxruntime-cpu")
    parser.add_argument("--calibrate", type=int, default=512, help="training images")
    parser.add_argument("--images", type=int, default=10_000, help="test images")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one turn")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="of ONNX Runtime; 0: one for each core")
    parser.add_argument("--quick", action="store_true", help="few images and one short round, to try the script")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    if arguments.model is None and not arguments.quick:
        parser.error("--model is missing: 'penjing train recipes/resnet-fashion.toml' makes build/resnet-fashion")
    if arguments.quick:
        arguments.calibrate, arguments.images, arguments.rounds, arguments.seconds = 64, 500, 1, 0.0
    warn_if_busy()
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.model is None:
            arguments.model = Path(scratch) / "tiny"
            train(RECIPE, [*TINY, f"output={arguments.model}"], progress=Silent())
        rows = peer_rows(Path(scratch), arguments)
    append("int8_peers", rows, arguments.results)
    return 0


def peer_rows(scratch: Path, arguments: argparse.Namespace) -> list[Row]:
    """Rows of FP32 and each contestant: accuracy, agreement, divergence, bytes, milliseconds of one batch."""
    model, config = load_classifier(arguments.model)
    fp32 = scratch / "fp32.onnx"
    export_network(classifier_network(model, config.image_size), fp32, {})
    calibration = image_samples(arguments.model, DataSettings(images=arguments.calibrate), Silent())
    seen = np.concatenate([images.numpy() for (images,) in calibration.inputs()])
    contestants = [
        *(ours(scratch, arguments, calibration, observer) for observer in ("minmax", "mse")),
        onnxruntime_static(scratch, arguments, fp32, seen),
        nncf(scratch, arguments, fp32, seen),
    ]
    test = fitting_images(arguments.model, config, "test", Silent())
    mean, std = np.array(config.mean, np.float32), np.array(config.std, np.float32)
    images, labels = normalise(test.images[: arguments.images], mean, std), test.labels[: arguments.images]
    options = TARGETS[arguments.target].session_options
    sessions = {"fp32": open_session(fp32, {}, threads=arguments.threads)}
    sessions |= {
        each.name: open_session(each.file, options, threads=arguments.threads) for each in contestants if each.file
    }
    here = {name: run_all(session, images) for name, session in sessions.items()}
    written = {"fp32": here["fp32"]} | {
        each.name: run_all(open_session(each.file, threads=arguments.threads, optimise=False), images)
        for each in contestants
        if each.file
    }
    batch = images[: arguments.batch]
    calls = [partial(session.run, None, {INPUT: batch}) for session in sessions.values()]
    times = interleaved(calls, rounds=arguments.rounds, seconds=arguments.seconds)
    taken = dict(zip(sessions, map(median, times), strict=True))
    found = {
        name: quality(here["fp32"], answers, labels)
        | {
            "agreement_here": quality(here["fp32"], here[name], labels)["agreement"],
            "milliseconds": 1000 * taken[name],
        }
        for name, answers in written.items()
    }
    found["fp32"]["bytes"] = fp32.stat().st_size
    for each in contestants:
        if each.file:
            found[each.name]["bytes"] = each.file.stat().st_size
    return fp32_rows(found["fp32"], arguments) + [
        row for each in contestants for row in rows_of(each, found.get(each.name), found["fp32"], arguments)
    ]


UNITS = {
    "accuracy": "share",
    "agreement": "share",
    "agreement_here": "share",
    "kl": "nats",
    "bytes": "B",
    "milliseconds": "ms",
}


def fp32_rows(found: dict[str, float], arguments: argparse.Namespace) -> list[Row]:
    """What the contestants are compared with."""
    return [
        new_row("int8_peers", f"{arguments.target}/fp32/{name}", found[name], UNITS[name], runs=arguments.rounds)
        for name in ("accuracy", "bytes", "milliseconds")
    ]


def rows_of(
    each: Quantized, found: dict[str, float] | None, fp32: dict[str, float], arguments: argparse.Namespace
) -> list[Row]:
    """A row for each figure of a contestant; without a value where it could not run."""
    return [
        new_row(
            "int8_peers",
            f"{arguments.target}/{each.name}/{name}",
            None if found is None else found[name],
            unit,
            runs=0 if found is None else arguments.rounds if name == "milliseconds" else 1,
            baseline=FP32 if name in ("accuracy", "bytes", "milliseconds") else None,
            baseline_value=fp32[name] if name in ("accuracy", "bytes", "milliseconds") else None,
            reason=each.reason,
            more_versions={each.name: each.version} if each.version else None,
        )
        for name, unit in UNITS.items()
    ]


def quality(reference: Images, answers: Images, labels: NDArray[np.integer[Any]]) -> dict[str, float]:
    """Share of right classes, share of the FP32 network's classes, and mean KL of its softmax from the FP32 one's."""
    before, after = (logits.astype(np.float64) for logits in (reference, answers))
    before, after = (logits - np.logaddexp.reduce(logits, axis=1, keepdims=True) for logits in (before, after))
    return {
        "accuracy": float((answers.argmax(1) == labels).mean()),
        "agreement": float((answers.argmax(1) == reference.argmax(1)).mean()),
        "kl": float((np.exp(before) * (before - after)).sum(1).mean()),
    }


def run_all(session: Any, images: Images) -> Images:
    """(N, classes) logits, 500 images at a time."""
    return np.concatenate(
        [session.run(None, {INPUT: part})[0] for part in np.split(images, range(500, len(images), 500))]
    )


def ours(scratch: Path, arguments: argparse.Namespace, data: ImageData, observer: Any) -> Quantized:
    """`penjing compress` with a quantize step that does not train."""
    folder = scratch / f"penjing-{observer}"
    settings = ArtifactSettings(
        target=arguments.target, observer=observer, parity_bound=1.0 if arguments.quick else 0.1
    )
    with publish_folder(folder) as unfinished:
        quantize_checkpoint(arguments.model, unfinished, settings, data)
    return Quantized(f"penjing_{observer}", "", folder / "model.onnx")


class _Reader(CalibrationDataReader):
    def __init__(self, images: Images) -> None:
        self.left: Iterator[Images] = iter(np.split(images, len(images)))

    def get_next(self) -> dict[str, Images]:
        """One image, or None at the end."""
        image = next(self.left, None)
        return None if image is None else {INPUT: image}  # pyright: ignore[reportReturnType]


def onnxruntime_static(scratch: Path, arguments: argparse.Namespace, fp32: Path, images: Images) -> Quantized:
    """What its documentation advises for x64: Q/DQ, u8 activations, s8 weights a channel, 7 bits without VNNI."""
    prepared, file = scratch / "prepared.onnx", scratch / "onnxruntime.onnx"
    quant_pre_process(fp32, prepared)
    quantize_static(
        prepared,
        file,
        _Reader(images),
        per_channel=True,
        reduce_range=arguments.target == "onnxruntime-avx2",
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    return Quantized("onnxruntime_static", onnxruntime.__version__, file)


def nncf(scratch: Path, arguments: argparse.Namespace, fp32: Path, images: Images) -> Quantized:
    """NNCF with its defaults, in its own environment; without that, rows that say so."""
    try:
        say("nncf.sh: makes NNCF's environment, unless it is there")
        _run(["bash", str(PEERS / "nncf.sh")], "the environment of NNCF")
        np.save(scratch / "images.npy", images)
        file, mode = scratch / "nncf.onnx", "int7" if arguments.target == "onnxruntime-avx2" else "int8"
        command = [str(NNCF), str(PEERS / "bench_nncf.py"), str(fp32), str(scratch / "images.npy"), str(file), mode]
        found = json.loads(_run(command, "NNCF").strip().splitlines()[-1])
    except SetupError as error:
        return Quantized("nncf", "", reason=str(error))
    return Quantized("nncf", found["version"], file)


def _run(command: list[str], what: str) -> str:
    """What the command printed.

    Raises:
        SetupError: it failed, or took more than half an hour.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise SetupError(f"{what} took more than {PEER_SECONDS} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise SetupError(f"{what} failed: {lines[-1][:300]}; 'bash benchmarks/peers/nncf.sh' makes its environment")
    return done.stdout


if __name__ == "__main__":
    sys.exit(guarded(main))
