"""Measure what Triton server costs a classifier: images a second through it and in ONNX Runtime alone, in turns.

    python benchmarks/run_vision_server.py                  # Fashion-MNIST's ResNet, random weights
    python benchmarks/run_vision_server.py --model build/resnet-fashion-int8

    python benchmarks/run_vision_server.py --network resnet18 --only processor --images 1024 --runs 3

    python benchmarks/run_vision_server.py --only burst     # the last answer of eight requests that come at once
    python benchmarks/run_vision_server.py --only processor # the processor time of a request, process by process

Requests carry the 64 images that ONNX Runtime runs at once alone, then 16, then one, which the server gathers. Rows in
benchmarks/results/vision_server.jsonl; `ratio` is the share of ONNX Runtime's throughput. Client and server share the
machine's cores: `client_cores` is what the client keeps of them.

`processor_…` are milliseconds of processor time of a request, which say the same on a busy machine: of ONNX Runtime in
process on one thread, of Triton server, of the model's process that it runs ("stub"), of our client, and of the least
that a client can do, which sends bytes that were made before and reads none (`client_of_bytes`). `processor_share` is
what ONNX Runtime needs of all that the served request costs but for the client, which has a machine of its own in
earnest. What a request costs beside the computation does not grow with it: `--network resnet18`, for colour images of
224 pixels a side, is a network of a size that is used, where ResNet-8 takes a fifth of a millisecond for an image.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import grpc.aio
import numpy as np
import onnxruntime
from lib.models import warn_if_busy
from lib.processor_time import below, seconds
from lib.rows import RESULTS, Row, append, new_row
from run_int8 import synthetic

from penjing.compress.quantizers.classifier import ArtifactSettings, quantize_checkpoint
from penjing.compress.samples.data import ImageData
from penjing.core.artifact.onnx_classifier import normalised, open_classifier_artifact
from penjing.core.checkpoint.classifier import save_classifier
from penjing.core.cli import guarded
from penjing.core.files import publish_folder
from penjing.core.models.resnet_config import cifar_resnet, imagenet_resnet
from penjing.core.runtime.onnx_runtime import INPUT
from penjing.serve.bench.batched import bench_batched, run_requests
from penjing.serve.client.client import AsyncClient
from penjing.serve.client.protocol import CLASSIFIER, REQUEST_SECONDS
from penjing.serve.client.wire_tensors import build_infer
from penjing.serve.families.classifier import IMAGES_UNDER_WAY
from penjing.serve.supervisor.state import read_state
from penjing.serve.supervisor.temporary import temporary_server
from penjing.train.data.images import ImageSet

NETWORKS = ("resnet8", "resnet18")
REQUEST_IMAGES = (64, 16, 1)
BURST = 8  # requests
CLIENTS = ("client", "client_of_bytes")
NAMES = {"triton_python_b": "stub", "python": "supervisor"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a classifier's INT8 artifact")
    parser.add_argument("--network", choices=NETWORKS, default="resnet8", help="random weights, without --model")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--images", type=int, default=8192, help="of one turn")
    parser.add_argument(
        "--threads", type=int, default=0, help="of ONNX Runtime, alone and served; 0: one for each core"
    )
    parser.add_argument("--only", choices=("throughput", "burst", "processor"))
    parser.add_argument("--quick", action="store_true", help="one short run, to try the script")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs, arguments.images = 1, 512
    warn_if_busy()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model or synthetic_artifact(Path(scratch), arguments.network, arguments.quick)
        with temporary_server(model, [f"threads={arguments.threads}"]) as server:
            made = "random" if arguments.network == "resnet8" else f"random-{arguments.network}"
            name, rows = made if arguments.model is None else arguments.model.name, list[Row]()
            if arguments.only in (None, "throughput"):
                for request_images in REQUEST_IMAGES:
                    found = bench_batched(
                        model,
                        server,
                        arguments.runs,
                        images=arguments.images,
                        threads=arguments.threads,
                        request_images=request_images,
                    )
                    rows += server_rows(name, found)
            if arguments.only in (None, "burst"):
                rows += burst_rows(name, model, server, arguments.runs)
            if arguments.only in (None, "processor"):
                for request_images in REQUEST_IMAGES:
                    rows += processor_rows(name, model, server, arguments, request_images)
    append("vision_server", rows, arguments.results)
    return 0


def burst_rows(name: str, model: Path, server: str, runs: int) -> list[Row]:
    """How long the last of BURST requests waits that come at once, and then nothing: the median burst and the worst."""
    config = open_classifier_artifact(model).config
    shape = (max(REQUEST_IMAGES), config.model.in_channels, *config.image_size)
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)

    async def ask(client: AsyncClient, _: int) -> None:
        await client.classify(images, timeout=REQUEST_SECONDS)

    last = [1000 * max(asyncio.run(run_requests(server, ask, BURST, BURST))[1]) for _ in range(runs + 1)][1:]
    case = f"{name}/burst_of_{BURST}_requests_of_{len(images)}"
    values = {"last": median(last), "last_at_worst": max(last)}
    return [new_row("vision_server", f"{case}/{what}", value, "ms", runs=runs) for what, value in values.items()]


def server_rows(name: str, found: dict[str, Any]) -> list[Row]:
    """A row for each kind of input, beside ONNX Runtime on floats in the same run, and what the client used."""
    speeds = found["images_per_second"]
    case = f"{name}/requests_of_{found['request_images']}"
    rows = [
        new_row(
            "vision_server",
            f"{case}/{kind}",
            speeds[f"server_{kind}"],
            "images/s",
            runs=found["runs"],
            baseline=f"ONNX Runtime {onnxruntime.__version__} in process, batches of 64",
            baseline_value=speeds["onnxruntime"],
        )
        for kind in ("floats", "pixels")
    ]
    return [*rows, new_row("vision_server", f"{case}/client_cores", found["client_cores"], "cores", runs=found["runs"])]


def processor_rows(
    name: str, model: Path, server: str, arguments: argparse.Namespace, request_images: int
) -> list[Row]:
    """Milliseconds of processor time of a request, medians of `--runs` turns; see the module."""
    artifact = open_classifier_artifact(model)
    shape = (request_images, artifact.config.model.in_channels, *artifact.config.image_size)
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    alone, floats = artifact.session(1), normalised(pixels, artifact.config)
    requests, streams = max(16, arguments.images // request_images // 4), max(1, IMAGES_UNDER_WAY // request_images)
    state = read_state(int(server.rpartition(":")[2]))
    assert state is not None, "the server was started by this script"
    processes = below(state.supervisor_pid)
    data = build_infer(CLASSIFIER, {"pixels": pixels}).SerializeToString()

    async def ask(client: AsyncClient, _: int) -> None:
        await client.classify(pixels, timeout=REQUEST_SECONDS)

    async def ask_bytes() -> None:
        async with grpc.aio.insecure_channel(server) as channel:
            call: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            left = iter(range(requests))

            async def stream() -> None:
                for _ in left:
                    await call(data, timeout=REQUEST_SECONDS)

            await asyncio.gather(*(stream() for _ in range(streams)))

    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(arguments.runs + 1):
        marks = [time.process_time()]
        for _ in range(requests):
            alone.run(None, {INPUT: floats})
        marks.append(time.process_time())
        before = seconds(processes)
        asyncio.run(run_requests(server, ask, requests, streams))
        after = seconds(processes)
        marks.append(time.process_time())
        asyncio.run(ask_bytes())
        marks.append(time.process_time())
        took = dict(zip(("onnxruntime", *CLIENTS), np.diff(marks).tolist(), strict=True))
        took |= {NAMES.get(each, each): after[each] - before[each] for each in after}
        for what, value in took.items():
            found[what].append(1000 * value / requests)
    middle = {what: median(values[1:]) for what, values in found.items()}  # the first turn warms memory up
    case = f"{name}/requests_of_{request_images}"
    rows = [
        new_row("vision_server", f"{case}/processor_{what}", value, "ms", runs=arguments.runs)
        for what, value in middle.items()
    ]
    server_alone = sum(value for what, value in middle.items() if what not in ("onnxruntime", *CLIENTS))
    share = middle["onnxruntime"] / server_alone
    return [*rows, new_row("vision_server", f"{case}/processor_share", share, "share", runs=arguments.runs)]


def synthetic_artifact(scratch: Path, network: str, quick: bool) -> Path:
    """An INT8 artifact of random weights: ResNet-8 for 28 × 28 grey images, or ResNet-18 for 224 × 224 in colour."""
    if network == "resnet8":
        shape, side = cifar_resnet(8, 10, width=8 if quick else 32, in_channels=1), 28
    else:
        shape, side = imagenet_resnet(18), 224
    model, config = synthetic(shape, side)
    channels = shape.in_channels
    config = config.model_copy(update={"mean": (0.5,) * channels, "std": (0.25,) * channels})
    images = np.random.default_rng(0).integers(0, 256, (64, channels, side, side), np.uint8)
    data = ImageData(ImageSet(images, np.zeros(64, np.uint8), shape.num_classes), config.mean, config.std, 32)
    with publish_folder(scratch / "fp32") as partial:
        save_classifier(partial, config, model, {"command": "benchmark"})
    with publish_folder(scratch / "int8") as partial:
        # synthetic weights tell images apart less than trained ones, so roundings weigh more
        settings = ArtifactSettings(parity_bound=1000.0, parity_images=2)
        quantize_checkpoint(scratch / "fp32", partial, settings, data)
    return scratch / "int8"


if __name__ == "__main__":
    sys.exit(guarded(main))
