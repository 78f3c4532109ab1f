"""ONNX Runtime sessions on the CPU: one place for options, threads and errors."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.errors import InputError, first_line
from penjing.core.manifest import check_inside

INPUT, OUTPUT = "images", "logits"  # of a classifier
EXACT_PRODUCTS = "session.x64quantprecision"  # products of u8 and s8 in other kernels, which need no VNNI


def open_session(path: Path, entries: dict[str, str] | None = None, *, threads: int = 0, optimise: bool = True) -> Any:
    """An `onnxruntime.InferenceSession` of a classifier's file; see `open_graph`."""
    return open_graph(path, entries, threads=threads, optimise=optimise, names=([INPUT], [OUTPUT]))


def open_graph(
    path: Path,
    entries: dict[str, str] | None = None,
    *,
    threads: int = 0,
    optimise: bool = True,
    names: tuple[list[str], list[str]],
) -> Any:
    """An `onnxruntime.InferenceSession`.

    Args:
        entries: session options by key, such as those an artifact asks for. `EXACT_PRODUCTS` is left out where the
            processor has VNNI: its products are exact, and 1.7 times as fast (MiniLM on Zen 4).
        threads: 0 takes one for each core.
        optimise: False runs the graph as it is written: Q/DQ pairs in floating point, slow and exact.
        names: of the inputs, all of them and in order, and of the first outputs.

    Raises:
        InputError: missing or damaged, not ONNX, without these inputs and outputs, or with constants that lie outside
            its folder.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # warnings on stderr name nodes, not what to do
    for key, value in (entries or {}).items():
        if key != EXACT_PRODUCTS or not has_vnni():
            options.add_session_config_entry(key, value)
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if not path.is_file():
        raise InputError(f"{path} does not exist; give an artifact that 'penjing compress' made")
    check_external_data(path)
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its classes share no base but Exception
        raise InputError(
            f"{path} cannot be loaded by ONNX Runtime ({first_line(error)[:200]}); make it again"
        ) from None
    inputs, outputs = ([value.name for value in values] for values in (session.get_inputs(), session.get_outputs()))
    if inputs != names[0] or outputs[: len(names[1])] != names[1]:
        raise InputError(
            f"{path} has inputs {_some(inputs)} and outputs {_some(outputs)}, not {_some(names[0])} and "
            f"{_some(names[1])}: not ours"
        )
    return session


@cache
def has_vnni() -> bool:
    """Whether this processor adds four products of 8 bits in 32; False where that cannot be found out."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return "avx512_vnni" in flags or "avx_vnni" in flags


def check_external_data(path: Path) -> None:
    """Refuse a file whose constants are not whole, or lie outside its folder.

    Raises:
        InputError: names the constant; or the file is not ONNX.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path), load_external_data=False)
    except DecodeError:
        raise InputError(
            f"{path} cannot be loaded by ONNX Runtime (it is not ONNX, or cut off); make it again"
        ) from None
    for constant in model.graph.initializer:
        if constant.data_location != onnx.TensorProto.EXTERNAL:
            continue
        place = {entry.key: entry.value for entry in constant.external_data}
        check_inside(path, place.get("location", ""))
        data = path.parent / place["location"]
        if data.is_symlink() or not data.is_file():
            raise InputError(f"{path} keeps {constant.name} in {data}, which is no file there; make it again")
        end = int(place.get("offset", 0)) + int(place.get("length", 0))
        if end > data.stat().st_size:
            raise InputError(f"{data} ends before {constant.name} does; it was cut off: make it again")


def _some(names: list[str]) -> str:
    return str(names) if len(names) < 5 else f"[{', '.join(map(repr, names[:4]))}, … {len(names)} in all]"


def run_session(session: Any, images: NDArray[np.float32]) -> NDArray[np.float32]:
    """(N, C, H, W) normalised images → (N, classes) logits.

    Raises:
        InputError: images of another shape.
    """
    wanted = session.get_inputs()[0].shape[1:]
    if list(images.shape[1:]) != list(wanted):
        raise InputError(f"images of shape {images.shape[1:]} were given, the model takes {tuple(wanted)}")
    return np.asarray(session.run(None, {INPUT: images})[0], np.float32)
