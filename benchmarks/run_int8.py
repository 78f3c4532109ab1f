"""INT8 of image classifiers: accuracy, throughput in ONNX Runtime against FP32 in the same run, export time and size.

python benchmarks/run_int8.py                                     # ResNet-50's shape, synthetic weights
python benchmarks/run_int8.py --sizes                             # its bytes alone: exact on any machine, however busy
python benchmarks/run_int8.py --model build/resnet-fashion --artifact build/resnet-fashion-int8
                                    # and Fashion-MNIST: PTQ, what recipes/resnet-fashion-int8.toml made of the model

Rows in benchmarks/results/int8.jsonl. Contestants take turns (`interleaved`); medians.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime
import torch
from lib.models import warn_if_busy
from lib.rows import RESULTS, Row, append, new_row
from torch import nn

from penjing.compress.export.onnx_graph import export_network
from penjing.compress.graph.own import classifier_network
from penjing.compress.measure.evaluate import EvaluateSettings, evaluate_classifier
from penjing.compress.quantize.targets import TargetName
from penjing.compress.quantizers.classifier import ArtifactSettings, quantize_checkpoint
from penjing.compress.samples.data import DataSettings, ImageData, image_samples
from penjing.core.artifact.onnx_classifier import open_classifier_artifact
from penjing.core.checkpoint.classifier import ClassifierConfig, load_classifier, save_classifier
from penjing.core.cli import guarded
from penjing.core.files import publish_folder
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import BlockConfig, ResNetConfig, StageConfig, cifar_resnet, imagenet_resnet
from penjing.core.progress import Silent
from penjing.core.runtime.onnx_runtime import INPUT, open_session
from penjing.core.runtime.timing import interleaved
from penjing.train.data.images import ImageSet

RUNTIME = f"ONNX Runtime {onnxruntime.__version__} FP32, unpruned"
UNPRUNED = "FP32 ONNX, unpruned"
TARGETS: tuple[TargetName, ...] = ("onnxruntime-cpu", "onnxruntime-avx2")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Fashion-MNIST checkpoint of 'penjing train'")
    parser.add_argument("--artifact", type=Path, help="an INT8 artifact that was made of --model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one turn")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0, help="of ONNX Runtime; 0: one for each core")
    parser.add_argument("--images", type=int, default=10_000, help="test images of Fashion-MNIST")
    parser.add_argument("--tiny", action="store_true", help="a small network in place of ResNet-50")
    parser.add_argument("--quick", action="store_true", help="--tiny and one short round, to try the script")
    parser.add_argument("--sizes", action="store_true", help="no rows of time")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tiny, arguments.rounds, arguments.seconds, arguments.images = True, 1, 0.0, 500
    if not arguments.sizes:
        warn_if_busy()
    with tempfile.TemporaryDirectory() as scratch:
        rows = shape_rows(Path(scratch), arguments)
        if arguments.model is not None:
            rows += fashion_rows(Path(scratch), arguments)
    append("int8", rows, arguments.results)
    return 0


def shape_rows(scratch: Path, arguments: argparse.Namespace) -> list[Row]:
    """ResNet-50's shape and the same with a quarter of its channels gone; weights are synthetic."""
    config = cifar_resnet(8, 10, width=16, in_channels=3) if arguments.tiny else imagenet_resnet(50)
    name, side = ("tiny", 32) if arguments.tiny else ("resnet50", 224)
    full, narrow = synthetic(config, side), synthetic(narrower(config), side)
    data = ImageData(
        ImageSet(np.random.default_rng(0).integers(0, 256, (16, 3, side, side), np.uint8), np.zeros(16, np.uint8), 10),
        (0.5,) * 3,
        (0.25,) * 3,
        8,
    )
    files, options = {}, {}
    files["fp32"] = scratch / f"{name}.onnx"
    size = export_network(classifier_network(full[0], (side, side)), files["fp32"], {})
    rows = [new_row("int8", f"{name}/fp32/size", size, "B", runs=1)]
    files["fp32_narrow"] = scratch / f"{name}-narrow.onnx"
    export_network(classifier_network(narrow[0], (side, side)), files["fp32_narrow"], {})
    for label, (model, vision) in (("int8", full), ("int8_narrow", narrow)):
        source = scratch / f"{name}-{label}-fp32"
        with publish_folder(source) as partial_folder:
            save_classifier(partial_folder, vision, model, {"command": "benchmark"})
        for target in TARGETS:
            began = time.monotonic()
            folder = scratch / f"{name}-{label}-{target}"
            with publish_folder(folder) as partial_folder:
                # synthetic weights tell images apart less than trained ones, so roundings weigh more
                settings = ArtifactSettings(target=target, parity_bound=1000.0, parity_images=2)
                quantize_checkpoint(source, partial_folder, settings, data)
            seconds = time.monotonic() - began
            key = f"{label}/{target}"
            files[key] = folder / "model.onnx"
            options[key] = open_classifier_artifact(folder).quantization.session_options
            smaller = files[key].stat().st_size
            rows.append(
                new_row("int8", f"{name}/{key}/size", smaller, "B", runs=1, baseline=UNPRUNED, baseline_value=size)
            )
            if label == "int8" and not arguments.sizes:
                rows.append(new_row("int8", f"{name}/{target}/fold_quantize_export", seconds, "s", runs=1))
    if arguments.sizes:
        return rows
    images = np.random.default_rng(1).standard_normal((arguments.batch, 3, side, side)).astype(np.float32)
    return rows + throughput_rows(name, files, options, images, arguments)


def fashion_rows(scratch: Path, arguments: argparse.Namespace) -> list[Row]:
    """Accuracy of post-training quantization with each observer, and of the recipe's artifact; throughput."""
    evaluate = EvaluateSettings(images=arguments.images)
    before = evaluate_classifier(arguments.model, arguments.model, evaluate, Silent()).value
    model, config = load_classifier(arguments.model)
    files, options = {"fp32": scratch / "fashion.onnx"}, {}
    size = export_network(classifier_network(model, config.image_size), files["fp32"], {})
    rows = [
        new_row("int8", "fashion/fp32/accuracy", before, "share", runs=1),
        new_row("int8", "fashion/fp32/size", size, "B", runs=1),
    ]
    data = image_samples(arguments.model, DataSettings(images=2048), Silent())
    folders: dict[str, Path] = {}
    for observer in ("minmax", "percentile", "mse", "entropy"):
        folders[f"ptq_{observer}"] = scratch / f"fashion-{observer}"
        with publish_folder(folders[f"ptq_{observer}"]) as partial_folder:
            quantize_checkpoint(arguments.model, partial_folder, ArtifactSettings(observer=observer), data)
    if arguments.artifact is not None:
        folders["recipe"] = arguments.artifact
    for label, folder in folders.items():
        after = evaluate_classifier(folder, arguments.model, evaluate, Silent()).value
        peer = "FP32 checkpoint"
        rows.append(
            new_row("int8", f"fashion/{label}/accuracy", after, "share", runs=1, baseline=peer, baseline_value=before)
        )
        if label in ("ptq_minmax", "recipe"):
            files[label] = folder / "model.onnx"
            smaller = files[label].stat().st_size
            rows.append(
                new_row("int8", f"fashion/{label}/size", smaller, "B", runs=1, baseline=UNPRUNED, baseline_value=size)
            )
            options[label] = open_classifier_artifact(folder).quantization.session_options
    shape = (64, config.model.in_channels, *config.image_size)
    images = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    return rows + throughput_rows("fashion", files, options, images, arguments)


def throughput_rows(
    name: str,
    files: dict[str, Path],
    options: dict[str, dict[str, str]],
    images: np.ndarray,
    arguments: argparse.Namespace,
) -> list[Row]:
    """Images a second of each file, in turns; "fp32" is what the others are compared with."""
    sessions = {
        label: open_session(path, options.get(label, {}), threads=arguments.threads) for label, path in files.items()
    }
    calls = [partial(session.run, None, {INPUT: images}) for session in sessions.values()]
    times = interleaved(calls, rounds=arguments.rounds, seconds=arguments.seconds)
    rates = {label: len(images) / median(each) for label, each in zip(sessions, times, strict=True)}
    return [
        new_row(
            "int8",
            f"{name}/{label}/throughput",
            rate,
            "images/s",
            runs=arguments.rounds,
            baseline=None if label == "fp32" else RUNTIME,
            baseline_value=None if label == "fp32" else rates["fp32"],
        )
        for label, rate in rates.items()
    ]


def synthetic(config: ResNetConfig, side: int) -> tuple[ResNet, ClassifierConfig]:
    """A network with random weights, and statistics of norms that keep its activations of order one."""
    torch.manual_seed(0)
    model = ResNet(config)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.normal_(module.bias, 0.0, 0.2)
    labels = tuple(str(index) for index in range(config.num_classes))
    vision = ClassifierConfig(model=config, image_size=(side, side), mean=(0.5,) * 3, std=(0.25,) * 3, labels=labels)
    return model.eval(), vision


def narrower(config: ResNetConfig, share: float = 0.75) -> ResNetConfig:
    """Every width times `share`, rounded to multiples of 8."""

    def scaled(width: int) -> int:
        return max(8, int(width * share) // 8 * 8)

    stages = tuple(
        StageConfig(
            channels=scaled(stage.channels),
            blocks=tuple(
                BlockConfig(hidden=tuple(scaled(width) for width in block.hidden), stride=block.stride)
                for block in stage.blocks
            ),
        )
        for stage in config.stages
    )
    return config.model_copy(update={"stem_channels": scaled(config.stem_channels), "stages": stages})


if __name__ == "__main__":
    sys.exit(guarded(main))
