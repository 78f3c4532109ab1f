"""What the quantizers of networks that become ONNX files share: how a file is run, its records, what a report says."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from penjing.compress.export.onnx_graph import OPSET
from penjing.compress.graph.bits import graph_bits
from penjing.compress.graph.calibrate import graph_layer_errors
from penjing.compress.quantize.targets import X64_REASON, QuantizeSettings, TargetName, resolve
from penjing.compress.rounding.modes import activation_quantizers
from penjing.core.artifact.base import QUANTIZATION_FILE
from penjing.core.artifact.onnx import Quantization
from penjing.core.artifact.parity import Difference, Parity, write_parity
from penjing.core.files import atomic_write_text
from penjing.core.graph.network import Network
from penjing.core.info import versions
from penjing.core.manifest import write_manifest


def quantization_for(target: TargetName, settings: QuantizeSettings) -> Quantization:
    """How a file for `target` is run.

    Raises:
        ConfigError: the target cannot express the settings.
    """
    engine, activations, weights = resolve(target, settings)
    return Quantization(
        target=target,
        activations=activations,
        weights=weights,
        opset=OPSET,
        optimise=activations != "fp8",  # 1.31 moves a MaxPool between FP8 pairs and then refuses its own graph
        session_options=engine.session_options,
        session_options_reason=X64_REASON if engine.session_options else "",
    )


def write_records(partial: Path, quantization: Quantization, parity: Parity) -> None:
    """Make the folder `partial` an artifact, which lacks nothing else; the manifest hashes what is in it."""
    write_parity(partial, parity)
    atomic_write_text(partial / QUANTIZATION_FILE, json.dumps(quantization.model_dump(), indent=2) + "\n")
    write_manifest(partial, "artifact", {"command": "penjing compress", "versions": versions()})


def said_of_parity(parity: Parity, *besides: Difference) -> dict[str, Any]:
    """What a report says of the gate."""
    return {
        "differences": [each.model_dump() for each in (*parity.differences, *besides)],
        "bound": parity.bound.model_dump(),
        "unmeasured": parity.unmeasured,
    }


def said_of_network(
    network: Network, quantization: Quantization, batches: Iterable[tuple[Tensor, ...]]
) -> dict[str, Any]:
    """What a report says of a quantized network; `batches` of inputs are what errors of layers are measured on."""
    return {
        "target": quantization.target,
        "formats": {"activations": quantization.activations, "weights": quantization.weights},
        "effective_bits": graph_bits(network),
        "layers": graph_layer_errors(network, batches),
        "activations": [
            {"name": each.name, "scale": float(each.positive_scale().detach()), "zero_point": int(each.zero_point)}
            for each in activation_quantizers(network.module)
        ],
    }
