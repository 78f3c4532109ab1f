"""ONNX Runtime sessions on the CPU: one place for options, threads and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.errors import InputError

INPUT, OUTPUT = "images", "logits"  # of a classifier


def open_session(path: Path, entries: dict[str, str] | None = None, *, threads: int = 0, optimise: bool = True) -> Any:
    """An `onnxruntime.InferenceSession` of a classifier's file.

    Args:
        entries: session options by key, such as those an artifact asks for.
        threads: 0 takes one for each core.
        optimise: False runs the graph as it is written: Q/DQ pairs in floating point, slow and exact.

    Raises:
        InputError: missing or damaged, not ONNX, or without the input and output of a classifier.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # warnings on stderr name nodes, not what to do
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if not path.is_file():
        raise InputError(f"{path} does not exist; give an artifact that 'penjing compress' made of a classifier")
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its classes share no base but Exception
        raise InputError(
            f"{path} cannot be loaded by ONNX Runtime ({str(error).splitlines()[0][:200]}); make it again"
        ) from None
    names = [value.name for value in session.get_inputs()], [value.name for value in session.get_outputs()]
    if names != ([INPUT], [OUTPUT]):
        raise InputError(f"{path} has inputs {names[0]} and outputs {names[1]}, not {INPUT!r} and {OUTPUT!r}: not ours")
    return session


def run_session(session: Any, images: NDArray[np.float32]) -> NDArray[np.float32]:
    """(N, C, H, W) normalised images → (N, classes) logits.

    Raises:
        InputError: images of another shape.
    """
    wanted = session.get_inputs()[0].shape[1:]
    if list(images.shape[1:]) != list(wanted):
        raise InputError(f"images of shape {images.shape[1:]} were given, the model takes {tuple(wanted)}")
    return np.asarray(session.run(None, {INPUT: images})[0], np.float32)
