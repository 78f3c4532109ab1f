"""A TensorRT engine of a classifier, built by its Python API from the checked Q/DQ file, strongly typed.

An engine fits the GPU and the version of TensorRT that it was built with. API: NVIDIA TensorRT documentation, Python
API, `Builder`, `OnnxParser`, `IExecutionContext`. Written against it and not yet run on a GPU.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.core.errors import InputError, SetupError
from penjing.core.runtime.onnx_runtime import INPUT, OUTPUT

BATCHES = (1, 8, 64)  # smallest, the one that kernels are chosen for, largest


def check_machine(folder: Path, out: Path, image: tuple[int, ...]) -> None:
    """Refuse a machine that cannot build an engine.

    Args:
        image: (channels, height, width).

    Raises:
        SetupError: says what is missing, and how to go on with the ONNX file.
    """
    missing = [] if find_spec("tensorrt") else ["the tensorrt package is not installed (pip install 'penjing[gpu]')"]
    if not torch.cuda.is_available():
        missing.append("there is no CUDA GPU")
    if not missing:
        return
    sizes = ["x".join(map(str, (batch, *image))) for batch in BATCHES]
    shapes = " ".join(f"--{kind}Shapes={INPUT}:{size}" for kind, size in zip(("min", "opt", "max"), sizes, strict=True))
    raise SetupError(
        f"an engine is built where it will run: {' and '.join(missing)}. Run this command there, or write the checked "
        f"file here, 'penjing export {folder} model.onnx --to onnx --target tensorrt', and build it there: "
        f"trtexec --onnx=model.onnx --stronglyTyped {shapes} --saveEngine={out.name}"
    )


def build_engine(model: bytes, image: tuple[int, ...]) -> bytes:
    """Build an engine of a serialized ONNX `model` for batches of `BATCHES`.

    Raises:
        InputError: TensorRT refuses the model, with its own words.
    """
    import tensorrt as trt  # type: ignore[import-not-found]

    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # the only kind from TensorRT 11 on
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    if not parser.parse(model):
        errors = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise InputError(f"TensorRT {trt.__version__} does not parse the network: {errors}")
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    profile.set_shape(INPUT, *((batch, *image) for batch in BATCHES))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise InputError(f"TensorRT {trt.__version__} builds no engine of the network; its log above says why")
    return bytes(plan)


def run_engine(plan: bytes, images: NDArray[np.float32]) -> NDArray[np.float32]:
    """(N, C, H, W) normalised images → (N, classes) logits, on the current GPU."""
    import tensorrt as trt  # type: ignore[import-not-found]

    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    engine = runtime.deserialize_cuda_engine(plan)
    context: Any = engine.create_execution_context()
    parts = []
    for rows in torch.from_numpy(images).split(BATCHES[-1]):
        given = rows.cuda().contiguous()
        context.set_input_shape(INPUT, tuple(given.shape))
        found = torch.empty(tuple(context.get_tensor_shape(OUTPUT)), device="cuda")
        context.set_tensor_address(INPUT, given.data_ptr())
        context.set_tensor_address(OUTPUT, found.data_ptr())
        stream = torch.cuda.current_stream()
        if not context.execute_async_v3(stream.cuda_stream):
            raise InputError("TensorRT could not run the engine that it built; its log above says why")
        stream.synchronize()
        parts.append(found.cpu())
    return torch.cat(parts).numpy()
