"""Artifact folders of quantized image classifiers, as `penjing compress` writes and `penjing serve` reads them.

config.json        architecture, labels, normalisation (`VisionConfig`)
model.onnx         explicit Q/DQ, INT8 weights; "images" (batch, C, H, W) float32 → "logits" (batch, classes)
quantization.json  target, formats, options that ONNX Runtime needs for exact integers
report.json        accuracy, sizes, errors a layer
parity.json        images, what each implementation answers, how far these are apart, the bound
penjing.json       kind "artifact", SHA-256 of each file above

`penjing compress verify --served` adds what an endpoint answered as `parity_served_endpoint.json`.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penjing.core.checkpoint.classifier_config import VisionConfig, vision_config
from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text
from penjing.core.manifest import Manifest, read_json_object, verify
from penjing.core.runtime.onnx_runtime import open_session, run_session

MODEL_FILE, QUANTIZATION_FILE, REPORT_FILE, PARITY_FILE = (
    "model.onnx",
    "quantization.json",
    "report.json",
    "parity.json",
)
FAKE_QUANTIZED, ONNX_RUNTIME, SERVED = "fake_quantized", "onnxruntime", "served_endpoint"
ONNX_RUNTIME_DEFAULT, ONNX_RUNTIME_FLOAT = "onnxruntime_default_options", "onnxruntime_as_written"
C = TypeVar("C", bound=Config)


class Quantization(Config):
    """Content of `quantization.json`."""

    schema_version: Literal[1] = 1
    target: str
    activations: str
    weights: str
    opset: int
    optimise: bool = True  # False where ONNX Runtime's optimiser breaks the graph (FP8)
    session_options: dict[str, str]
    session_options_reason: str = ""


class LogitDifference(Config):
    """How far two implementations are apart over all images: absolute differences of logits divided by the standard
    deviation of the first one's from image to image."""

    between: tuple[str, str]
    largest: float
    mean: float
    same_class: float = Field(ge=0, le=1)


class VisionParity(Config):
    """Content of `parity.json`."""

    schema_version: Literal[1] = 1
    images: str  # base64 of uint8
    shape: tuple[int, int, int, int]
    logits: dict[str, tuple[tuple[float, ...], ...]]
    differences: tuple[LogitDifference, ...]
    bound: float  # of `largest` between the fake-quantized model and ONNX Runtime
    unmeasured: dict[str, str] = Field(default_factory=dict)  # implementation → why

    def pixels(self) -> NDArray[np.uint8]:
        """(N, C, H, W).

        Raises:
            InputError: the record is damaged.
        """
        try:
            return np.frombuffer(base64.b64decode(self.images, validate=True), np.uint8).reshape(self.shape)
        except ValueError as error:
            raise InputError(f"{PARITY_FILE} is damaged ({error}); compress the model again") from None


@dataclass(frozen=True)
class VisionArtifact:
    """A verified artifact folder."""

    folder: Path
    config: VisionConfig
    quantization: Quantization
    parity: VisionParity
    report: dict[str, Any]
    manifest: Manifest

    def session(self, threads: int = 0) -> Any:
        """An ONNX Runtime session with the options that the artifact asks for."""
        return open_session(
            self.folder / MODEL_FILE,
            self.quantization.session_options,
            threads=threads,
            optimise=self.quantization.optimise,
        )

    def logits(self, session: Any, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(N, C, H, W) uint8 images, normalised here → (N, classes)."""
        return run_session(session, normalised(pixels, self.config))


def is_vision_artifact(folder: Path) -> bool:
    """Whether `folder` looks like one: by its files, and by `config.json`, which a text encoder's has otherwise."""
    files = (MODEL_FILE, QUANTIZATION_FILE, "config.json")
    return all((folder / name).is_file() for name in files) and "task" in read_json_object(folder / "config.json")


def open_vision_artifact(folder: Path) -> VisionArtifact:
    """Open an artifact and check every hash.

    Raises:
        InputError: missing or damaged files, or a folder of another kind.
    """
    if not is_vision_artifact(folder):
        raise InputError(
            f"{folder} is no artifact of an image classifier (it holds no {MODEL_FILE} and {QUANTIZATION_FILE}); "
            "'penjing compress' makes one"
        )
    manifest = verify(folder)
    files = (MODEL_FILE, QUANTIZATION_FILE, PARITY_FILE, REPORT_FILE, "config.json")
    if missing := [name for name in files if name not in manifest.sha256]:
        raise InputError(f"{folder / missing[0]} is not in the manifest; the folder was changed: make it again")
    return VisionArtifact(
        folder=folder,
        config=vision_config(folder),
        quantization=_read(Quantization, folder / QUANTIZATION_FILE),
        parity=_read(VisionParity, folder / PARITY_FILE),
        report=read_json_object(folder / REPORT_FILE),
        manifest=manifest,
    )


def add_served_logits(
    artifact: VisionArtifact, logits: NDArray[np.float32], differences: tuple[LogitDifference, ...]
) -> None:
    """Record what a served endpoint answered to the images of the parity record, in a file beside the hashed ones.

    Raises:
        SetupError: disk full, no permission.
    """
    record = artifact.parity.model_copy(
        update={"logits": {SERVED: tuple(tuple(row) for row in logits.tolist())}, "differences": differences}
    )
    path = artifact.folder / PARITY_FILE.replace(".json", f"_{SERVED}.json")
    atomic_write_text(path, json.dumps(record.model_dump()) + "\n")


def normalised(pixels: NDArray[np.uint8], config: VisionConfig) -> NDArray[np.float32]:
    """(N, C, H, W) uint8 → float32 (value / 255 − mean) / std, per channel."""
    mean, std = (np.array(values, np.float32).reshape(1, -1, 1, 1) for values in (config.mean, config.std))
    return (pixels.astype(np.float32) / np.float32(255) - mean) / std


def logit_difference(between: tuple[str, str], first: NDArray[Any], second: NDArray[Any]) -> LogitDifference:
    """Compare (N, classes) logits.

    Raises:
        InputError: NaN or infinity.
    """
    one, other = first.astype(np.float64), second.astype(np.float64)
    for name, values in zip(between, (one, other), strict=True):
        if not np.isfinite(values).all():
            raise InputError(f"{name} computes NaN or infinity; compress the model again")
    spread = np.sqrt(np.square(one - one.mean(0)).mean())
    gaps = np.abs(one - other) / max(float(spread), 1e-30)
    same = float((one.argmax(1) == other.argmax(1)).mean())
    return LogitDifference(between=between, largest=float(gaps.max()), mean=float(gaps.mean()), same_class=same)


def _read(kind: type[C], path: Path) -> C:
    try:
        return parse_config(kind, read_json_object(path), str(path))
    except ConfigError as error:
        raise InputError(f"{error}; the file is damaged: compress the model again") from None
