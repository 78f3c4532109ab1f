"""`penjing compress quantize`: from a classifier's checkpoint to a published artifact, without training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pydantic import Field

from penjing.compress.measure.data import Calibrate, ImageData, is_classifier, open_data
from penjing.compress.quantize.artifact import ArtifactSettings, quantize_checkpoint
from penjing.compress.quantize.targets import TargetName, resolve
from penjing.core.config import apply_override, parse_config
from penjing.core.errors import InputError
from penjing.core.files import publish_folder
from penjing.core.progress import Progress


class QuantizeCommand(ArtifactSettings):
    """What `--set` reaches."""

    calibrate: Calibrate = Field(default=Calibrate(images=512))


def quantize_to_folder(
    source: Path, out: Path, target: TargetName, overrides: list[str], *, force: bool, progress: Progress
) -> dict[str, Any]:
    """Make the artifact `out` of the classifier in `source`; it appears only when it has passed its parity gate.

    Args:
        overrides: "key=value" of `QuantizeCommand`.

    Returns:
        What `report.json` holds.

    Raises:
        ConfigError: an unknown setting, or one that the target cannot express.
        InputError: `source` is damaged or no classifier of Fashion-MNIST; `out` exists; parity is beyond the bound.
    """
    began = time.monotonic()
    values: dict[str, Any] = {}
    for override in overrides:
        apply_override(values, override)
    settings = parse_config(QuantizeCommand, {"target": target, **values}, "--set")
    resolve(settings.target, settings)
    if not is_classifier(source):
        raise InputError(f"{source} is a decoder; 'penjing compress RECIPE' quantizes it (recipes/smollm2-int8.toml)")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]) and not force:
        raise InputError(f"{out} already exists; replace it with --force, or choose another output folder")
    data = open_data(source, settings.calibrate, progress)
    assert isinstance(data, ImageData)
    with publish_folder(out, replace=force) as partial:
        report = quantize_checkpoint(source, partial, settings, data, progress)
    worst = report["parity"][0]["largest"]
    progress.note(
        f"{out}: {report['bytes_fp32'] / 1e3:.0f} → {report['bytes_int8'] / 1e3:.0f} kB, the class of FP32 on "
        f"{report['same_class_as_fp32']:.2%} of the calibration images, ONNX Runtime within {worst:.2g} of the "
        f"logits' spread, {time.monotonic() - began:.0f} s"
    )
    return report
