"""Which Triton-language kernels there are, and every configuration they are launched in, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

OPERATIONS: tuple[str, ...] = (  # modules of this folder with `variants()`
    "block_sparse_attention",
    "cross_entropy",
    "flash_attention",
    "flash_attention_backward",
    "int4_matmul",
    "int8_matmul",
    "linear",
    "moe",
    "paged_attention",
    "quantize",
    "quantize_gradient",
    "rms_norm",
    "rotary",
    "swiglu",
)

MAX_HEAD_DIM = 256  # of attention, whole or paged, forward and backward
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "i8": "int8"}  # Triton language → torch


@dataclass(frozen=True)
class Variant:
    """One kernel in one configuration.

    Attributes:
        label: what distinguishes it within its operation, such as "forward hd128 bf16".
        kernel: the `@triton.jit` function.
        arguments: argument → type as the Triton language writes it: "*fp16:16", "i32", "i32:16", "fp32"; ":16" promises
            a multiple of 16 (an aligned pointer), which is what a launch finds out by itself.
        constants: argument → value of every `tl.constexpr`, and None for a pointer that is not passed.
        num_warps, num_stages: of the launch.
        hot: on the fast path: a spilled register fails the tests.
        fused_multiply_add: whether the compiler may round a product and a sum once instead of twice.
        full: compiled only by `make test-full` and `--full`, to keep the default check short.
    """

    label: str
    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    hot: bool = False
    full: bool = False
    fused_multiply_add: bool = True


def variants(operation: str) -> Iterator[Variant]:
    """The configurations of one operation.

    Raises:
        ValueError: an unknown operation.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation {operation!r} is unknown; one of {', '.join(OPERATIONS)} is needed")
    return import_module(f"penjing.kernels.gpu.{operation}").variants()
