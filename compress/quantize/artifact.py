"""A quantized classifier becomes an artifact folder: ONNX file, report, and the parity record that it passed."""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from penjing.compress.export.graph import OPSET
from penjing.compress.export.onnx_classifier import export_onnx
from penjing.compress.measure.data import ImageData
from penjing.compress.quantize.bits import effective_bits, within_bits
from penjing.compress.quantize.errors import layer_errors
from penjing.compress.quantize.parity import measure as measure_parity
from penjing.compress.quantize.place_resnet import activation_quantizers, apply_quantization
from penjing.compress.quantize.prepare import prepare
from penjing.compress.quantize.targets import ClassifierSettings, TargetName, resolve
from penjing.core.artifact.base import MODEL_FILE, QUANTIZATION_FILE, REPORT_FILE
from penjing.core.artifact.onnx import Quantization
from penjing.core.artifact.parity import write_parity
from penjing.core.checkpoint.classifier import ClassifierConfig, load_classifier, save_classifier_config
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text
from penjing.core.info import processor, versions
from penjing.core.manifest import write_manifest
from penjing.core.models.resnet import ResNet
from penjing.core.progress import Progress, Silent

PIXEL_BYTES = 1 << 18  # of the images in the parity record
X64_REASON = (
    "x64 processors without VNNI otherwise add products of u8 and s8 in 16 bits, which saturate; leave it out with VNNI"
)


class ArtifactSettings(ClassifierSettings):
    """How a classifier is quantized and what its artifact must pass.

    Attributes:
        target: the engine; see `targets.py`.
        parity_bound: the largest difference between a logit of the fake-quantized model and of ONNX Runtime, in units
            of how much logits vary from image to image. Values near a tie round either way, so it is never zero.
        parity_images: how many images are compared and kept for `penjing compress verify`.
    """

    target: TargetName = "onnxruntime-cpu"
    parity_bound: float = Field(default=0.1, gt=0)
    parity_images: int = Field(default=32, ge=2)


def quantize_checkpoint(
    source: Path, partial: Path, settings: ArtifactSettings, data: ImageData, progress: Progress | None = None
) -> dict[str, Any]:
    """Post-training quantization: calibrate the classifier in `source` on `data` and write its artifact.

    Args:
        partial: an existing folder, not yet published; it becomes complete.

    Returns:
        What `report.json` holds.

    Raises:
        ConfigError: the target cannot express the settings.
        InputError: the checkpoint is damaged or not finite, the data do not fit, or the parity bound is exceeded.
    """
    progress = progress or Silent()
    began = time.monotonic()
    floating, config = load_classifier(source)
    progress.start("calibrating", 2)
    settings = within_bits(floating, settings.target, settings, data)
    model = apply_quantization(ResNet(config.model).eval(), settings.target, settings)
    prepare(model, floating, settings, data)
    progress.advance()
    report = write_artifact(partial, model, floating, config, settings, data, {"training_steps": 0})
    progress.advance()
    return report | {"seconds": time.monotonic() - began}


def write_artifact(
    partial: Path,
    model: ResNet,
    floating: ResNet,
    config: ClassifierConfig,
    settings: ArtifactSettings,
    data: ImageData,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Fill `partial` with the artifact of `model`: quantized, and calibrated or trained.

    Args:
        floating: the network before quantization, whose answers the report compares with.
        facts: what else `report.json` should say.

    Returns:
        What `report.json` holds.

    Raises:
        InputError: the parity bound is exceeded: the artifact is refused.
    """
    model.eval()
    target, activations, weights = resolve(settings.target, settings)
    quantization = Quantization(
        target=settings.target,
        activations=activations,
        weights=weights,
        opset=OPSET,
        optimise=activations != "fp8",  # 1.31 moves a MaxPool between FP8 pairs and then refuses its own graph
        session_options=target.session_options,
        session_options_reason=X64_REASON if target.session_options else "",
    )
    size = export_onnx(model, config.image_size, settings.target, partial / MODEL_FILE)
    parity = measure_parity(
        model, partial / MODEL_FILE, config, quantization, _pixels(data, settings.parity_images), settings.parity_bound
    )
    parameters = sum(parameter.numel() for parameter in floating.parameters())
    report = {
        "schema_version": 1,
        "kind": "classifier",
        "target": settings.target,
        "formats": {"activations": activations, "weights": weights},
        "effective_bits": effective_bits(model),
        "parameters": parameters,
        "bytes_fp32": 4 * parameters,
        "bytes_int8": size,
        "parity": [difference.model_dump() for difference in parity.differences],
        "parity_unmeasured": parity.unmeasured,
        "same_class_as_fp32": _agreement(model, floating, data),
        "layers": layer_errors(model, islice(data.inputs(), 1)),
        "activations": [
            {"name": each.name, "scale": float(each.positive_scale().detach()), "zero_point": int(each.zero_point)}
            for each in activation_quantizers(model)
        ],
        "settings": settings.model_dump(mode="json"),
        "versions": versions(),
        "processor": processor(),
        **facts,
    }
    save_classifier_config(partial, config)
    write_parity(partial, parity)
    for name, content in ((QUANTIZATION_FILE, quantization.model_dump()), (REPORT_FILE, report)):
        atomic_write_text(partial / name, json.dumps(content, indent=2) + "\n")
    write_manifest(partial, "artifact", {"command": "penjing compress", "versions": versions()})
    return report


def _pixels(data: ImageData, count: int) -> NDArray[np.uint8]:
    images = data.images.images
    if len(images) == 0:
        raise InputError("there is no image to check parity with; raise calibrate.images")
    return images[: min(count, max(2, PIXEL_BYTES // images[0].nbytes))]


@torch.no_grad()
def _agreement(model: ResNet, floating: ResNet, data: ImageData) -> float:
    """Share of the calibration images whose class both choose."""
    same = total = 0
    for (images,) in data.inputs():
        same += int((model(images).argmax(1) == floating(images).argmax(1)).sum())
        total += len(images)
    return same / total
