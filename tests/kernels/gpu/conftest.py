"""Run a test of a Triton-language kernel on the GPU, or without one under the interpreter on CPU tensors."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penjing.kernels.dispatch import cuda_refusal, force_triton_language


@pytest.fixture
def gpu_device() -> Iterator[str]:
    """ "cuda", or "cpu" with the kernels interpreted: keep shapes small. bf16 is wrong under the interpreter."""
    if torch.cuda.is_available():
        refusal = cuda_refusal()
        assert refusal is None, refusal
        yield "cuda"
    else:
        pytest.importorskip("triton")
        repair_interpreter()
        with force_triton_language():
            yield "cpu"


def repair_interpreter() -> None:
    """Let loops run to bounds known at run time: numpy ≥ 2.4 turns no array of one value into an int any more, and
    the interpreter of the Triton language 3.6 asks it to.

    And let products in float32 have bits that depend on row and column alone, as those of a device do: the sums of
    numpy's library run in another order for other shapes, on some processors. In float64 that is far below what
    float32 keeps.
    """
    from triton.runtime import interpreter

    if hasattr(interpreter, "penjing_repaired"):
        return
    patch = interpreter._patch_lang_tensor

    def patch_and_repair(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_repair
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def dot_in_float64(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if not a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
            return dot(self, a, b, d, *how)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    builder.create_dot = dot_in_float64  # pyright: ignore[reportAttributeAccessIssue]
    interpreter.penjing_repaired = True  # pyright: ignore[reportAttributeAccessIssue]
