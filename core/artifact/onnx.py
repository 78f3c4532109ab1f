"""What artifact folders that hold their network in ONNX have in common: files, how to run them, how they are opened.

config.json        architecture, and what else the family needs to make inputs of what a user gives
model.onnx         explicit Q/DQ, INT8 weights
quantization.json  target, formats, options that ONNX Runtime needs for exact integers
report.json        quality, sizes, errors a layer; report.html shows them
parity.json        inputs, what each implementation answers, how far these are apart, the bound
penjing.json       kind "artifact", SHA-256 of each file above

`penjing compress verify --served` adds what an endpoint answered as `parity_served_endpoint.json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penjing.core.artifact.base import MODEL_FILE, PARITY_FILE, QUANTIZATION_FILE, is_artifact, read_report_file
from penjing.core.artifact.parity import Bound, Difference, DriftError, Parity, gate, is_within, read_parity
from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import FAMILIES, FamilyName, family_of
from penjing.core.manifest import Manifest, read_json_object, verify
from penjing.core.runtime.onnx_runtime import has_vnni

ONNX_RUNTIME = "onnxruntime"  # with the options that the artifact asks for
ONNX_RUNTIME_DEFAULT, ONNX_RUNTIME_FLOAT = "onnxruntime_default_options", "onnxruntime_as_written"


class Quantization(Config):
    """Content of `quantization.json`."""

    schema_version: Literal[1] = Field(default=1, description="Version of this format.")
    target: str = Field(description="The engine that the file was made for.")
    activations: str = Field(description="Number format of the activations.")
    weights: str = Field(description="Number format of the weights.")
    opset: int = Field(description="Version of ONNX's operators.")
    optimise: bool = Field(default=True, description="False where ONNX Runtime's optimiser breaks the graph (FP8).")
    session_options: dict[str, str] = Field(description="Of ONNX Runtime, needed for exact integers.")
    session_options_reason: str = Field(default="", description="Why they are needed.")

    def ways(self) -> dict[str, tuple[dict[str, str], bool]]:
        """How ONNX Runtime may run the file: implementation → (session options, whether its optimiser runs).

        As the artifact asks for it, with the defaults of ONNX Runtime, and as written, where each Q/DQ pair is
        computed in floating point.
        """
        ways: dict[str, tuple[dict[str, str], bool]] = {ONNX_RUNTIME: (self.session_options, self.optimise)}
        if self.optimise:
            ways[ONNX_RUNTIME_DEFAULT] = ({}, True)
        return ways | {ONNX_RUNTIME_FLOAT: ({}, False)}


@dataclass(frozen=True)
class OnnxArtifact:
    """A verified artifact folder, without what only its family knows."""

    folder: Path
    quantization: Quantization
    parity: Parity
    report: dict[str, Any]
    manifest: Manifest


def open_onnx_artifact(folder: Path, family: FamilyName, *, also: tuple[str, ...] = ()) -> OnnxArtifact:
    """Open an artifact and check every hash.

    Args:
        also: further files that the family needs.

    Raises:
        InputError: missing or damaged files, or a folder of another kind.
    """
    if not is_artifact(folder) or family_of(folder) != family:
        raise InputError(f"{folder} is no artifact of {FAMILIES.get(family, family)}; 'penjing compress' makes one")
    manifest = verify(folder)
    files = (MODEL_FILE, QUANTIZATION_FILE, PARITY_FILE, "config.json", *also)
    if missing := [name for name in files if name not in manifest.sha256]:
        raise InputError(f"{folder / missing[0]} is not in the manifest; the folder was changed: make it again")
    path = folder / QUANTIZATION_FILE
    try:
        quantization = parse_config(Quantization, read_json_object(path), str(path))
    except ConfigError as error:
        raise InputError(f"{error}; the file is damaged: compress the model again") from None
    return OnnxArtifact(folder, quantization, read_parity(folder), read_report_file(folder), manifest)


def gate_onnx(differences: tuple[Difference, ...], bound: Bound, hint: str) -> None:
    """Refuse what ONNX Runtime computes too differently; processors whose integer sums saturate are named.

    Raises:
        InputError: see `gate`; a `DriftError` where not these sums alone are to blame.
    """
    saturates = not has_vnni() and is_within(differences, bound.of(ONNX_RUNTIME_FLOAT))
    if saturates:
        hint = (
            "as written the file agrees, so its integer kernels on this processor do not (without VNNI, 16-bit sums "
            "saturate): use target 'onnxruntime-avx2'"
        )
    gate(differences, bound, hint, InputError if saturates else DriftError)


def recorded(parity: Parity, name: str) -> NDArray[np.float64]:
    """(inputs, numbers) float64 that the implementation `name` answered.

    Raises:
        InputError: the record is damaged, or does not know `name`.
    """
    try:
        rows = np.array(parity.outputs[name], np.float64)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{PARITY_FILE} has no answers of {name} ({error}); compress the model again") from None
    if rows.ndim != 2:
        raise InputError(f"{PARITY_FILE}: the answers of {name} are damaged; compress the model again")
    return rows
