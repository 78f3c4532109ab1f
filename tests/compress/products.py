"""Products of bytes that are exact on every processor, in tests of what ONNX Runtime computes.

Without VNNI they saturate, unless `EXACT_PRODUCTS` is set. ONNX Runtime's optimiser does what it says, so that a file
with products of integers in it cannot be run exactly there as it is written; onnx's own evaluator does that.
"""

from pathlib import Path
from typing import Any

from onnx.reference import ReferenceEvaluator

from penjing.core.runtime.onnx_runtime import EXACT_PRODUCTS, has_vnni, open_graph

EXACT: dict[str, str] = {} if has_vnni() else {EXACT_PRODUCTS: "1"}


def as_written(file: Path, inputs: list[str], outputs: list[str]) -> Any:
    """What runs `file` without changes; it has `run` as a session of ONNX Runtime."""
    if has_vnni():
        return open_graph(file, threads=1, optimise=False, names=(inputs, outputs))
    return ReferenceEvaluator(str(file))
