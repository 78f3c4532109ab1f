"""INT8 and INT4 weights laid out in panels by the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penjing.kernels.cpu.checks import check
from penjing.kernels.cpu.library import DTYPES, Linear, Part
from penjing.kernels.cpu.pages import empty_pages

Int8Part = tuple[Tensor, Tensor, Tensor | None]
"""weight_NK int8, scale_N float32, bias_N float32 or None."""
Int4Part = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""packed_NK8 int32, scale_NG and offset_NG (or None) float32, bfloat16 or float16, bias_N float32 or None; see
`kernels.int4_linear`."""
SteppedPart = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""packed_NK8 int32, scale_N float32, step_NG2 int8, bias_N float32 or None; see `kernels.stepped`."""
LEAST_GROUP = 32
LARGEST_STEPPED_GROUP = 256
"""The C++ kernels expand so many inputs at a time, as many as share a zero point."""
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Panels:
    """A packed layer; `memory` holds what `linear` points to."""

    linear: Linear
    memory: Tensor
    in_features: int
    out_features: int


def pack_int8(
    library: ctypes.CDLL,
    parts: Sequence[Int8Part],
    swiglu: bool,
    memory: Tensor | None,
    zero_points: bool = False,
) -> Panels:
    """Lay out INT8 weights of one input as one layer; see `CpuExtension.prepack_int8`.

    Raises:
        ValueError: a wrong shape, dtype or layout.
    """
    in_features = parts[0][0].shape[-1]
    for weight_NK, scale_N, bias_N in parts:
        check("weight_NK", weight_NK, torch.int8, (None, in_features))
        if 0 in weight_NK.shape:
            raise ValueError(f"weight_NK has shape {tuple(weight_NK.shape)}; non-empty (N, K) is needed")
        check("scale_N", scale_N, torch.float32, (weight_NK.shape[0],))
        _check_bias(bias_N, weight_NK.shape[0])
    out_features = _out_features([part[0].shape[0] for part in parts], swiglu)
    sizes = out_features, in_features, swiglu, zero_points
    memory = _memory(library, library.pj_packed_bytes(*sizes), memory)
    linear = Linear()
    c_parts = _parts([(weight_NK, scale_N, None, bias_N) for weight_NK, scale_N, bias_N in parts])
    library.pj_pack_int8(c_parts, len(parts), *sizes, memory.data_ptr(), ctypes.byref(linear))
    return Panels(linear, memory, in_features, out_features)


def pack_stepped(
    library: ctypes.CDLL,
    parts: Sequence[SteppedPart],
    group: int,
    swiglu: bool,
    memory: Tensor | None,
    zero_points: bool = False,
) -> Panels:
    """Lay out INT8 weights in steps of one input as one layer; see `CpuExtension.prepack_stepped`.

    Raises:
        ValueError: a wrong shape, dtype or layout.
    """
    words = parts[0][0].shape[-1]
    in_features = 8 * words
    if group < LEAST_GROUP or group % LEAST_GROUP or in_features % group or group > LARGEST_STEPPED_GROUP:
        raise ValueError(
            f"group={group}: a multiple of {LEAST_GROUP} up to {LARGEST_STEPPED_GROUP} that divides the {in_features} "
            "inputs is needed"
        )
    if zero_points and LARGEST_STEPPED_GROUP % group:
        raise ValueError(f"group={group}: with zero points one that divides {LARGEST_STEPPED_GROUP} is needed")
    for packed_NK8, scale_N, step_NG2, bias_N in parts:
        check("packed_NK8", packed_NK8, torch.int32, (None, words))
        if 0 in packed_NK8.shape:
            raise ValueError(f"packed_NK8 has shape {tuple(packed_NK8.shape)}; non-empty (N, K / 8) is needed")
        check("scale_N", scale_N, torch.float32, (packed_NK8.shape[0],))
        check("step_NG2", step_NG2, torch.int8, (packed_NK8.shape[0], in_features // group, 2))
        _check_bias(bias_N, packed_NK8.shape[0])
    out_features = _out_features([part[0].shape[0] for part in parts], swiglu)
    sizes = out_features, in_features, group, swiglu, zero_points
    memory = _memory(library, packed_stepped_bytes(library, *sizes), memory)
    linear = Linear()
    sizes = out_features, in_features, swiglu, group, zero_points
    library.pj_pack_stepped(_parts(parts), len(parts), *sizes, memory.data_ptr(), ctypes.byref(linear))
    return Panels(linear, memory, in_features, out_features)


def packed_stepped_bytes(
    library: ctypes.CDLL, out_features: int, in_features: int, group: int, swiglu: bool, zero_points: bool
) -> int:
    """Bytes that `pack_stepped` needs for a layer."""
    return library.pj_packed_stepped_bytes(out_features, in_features, swiglu, group, zero_points)


def pack_int4(
    library: ctypes.CDLL,
    parts: Sequence[Int4Part],
    group: int,
    swiglu: bool,
    memory: Tensor | None,
    half_inputs: bool = False,
) -> Panels:
    """Lay out INT4 weights of one input as one layer; see `CpuExtension.prepack_int4`.

    Raises:
        ValueError: a wrong shape, dtype or layout.
    """
    words, dtype = parts[0][0].shape[-1], parts[0][1].dtype
    in_features = 8 * words
    if group < LEAST_GROUP or group % LEAST_GROUP or in_features % group:
        raise ValueError(f"group={group}: a multiple of {LEAST_GROUP} that divides the {in_features} inputs is needed")
    if dtype not in SCALE_DTYPES:
        raise ValueError(f"scale_NG is {dtype}; float32, bfloat16 or float16 is needed")
    offsets = parts[0][2] is not None
    for packed_NK8, scale_NG, offset_NG, bias_N in parts:
        check("packed_NK8", packed_NK8, torch.int32, (None, words))
        if 0 in packed_NK8.shape:
            raise ValueError(f"packed_NK8 has shape {tuple(packed_NK8.shape)}; non-empty (N, K / 8) is needed")
        check("scale_NG", scale_NG, dtype, (packed_NK8.shape[0], in_features // group))
        if (offset_NG is not None) != offsets:
            raise ValueError("of weights that are packed as one, all have offsets or none has")
        if offset_NG is not None:
            check("offset_NG", offset_NG, dtype, tuple(scale_NG.shape))
        _check_bias(bias_N, packed_NK8.shape[0])
    out_features = _out_features([part[0].shape[0] for part in parts], swiglu)
    needed = packed_int4_bytes(library, out_features, in_features, group, dtype, swiglu, offsets)
    memory = _memory(library, needed, memory)
    linear, scale_dtype = Linear(), _code(dtype)
    sizes = out_features, in_features, swiglu, group, scale_dtype
    library.pj_pack_int4(_parts(parts), len(parts), *sizes, memory.data_ptr(), ctypes.byref(linear))
    linear.half_inputs = int(half_inputs)
    return Panels(linear, memory, in_features, out_features)


def packed_int4_bytes(
    library: ctypes.CDLL,
    out_features: int,
    in_features: int,
    group: int,
    scale_dtype: torch.dtype,
    swiglu: bool,
    offsets: bool,
) -> int:
    """Bytes that `pack_int4` needs for a layer."""
    return library.pj_packed_int4_bytes(out_features, in_features, swiglu, group, _code(scale_dtype), offsets)


def _code(dtype: torch.dtype) -> int:
    return DTYPES[str(dtype).removeprefix("torch.")]


def _check_bias(bias_N: Tensor | None, out_features: int) -> None:
    if bias_N is not None:
        check("bias_N", bias_N, torch.float32, (out_features,))


def _out_features(rows: Sequence[int], swiglu: bool) -> int:
    num_rows = sum(rows)
    if swiglu and num_rows % 2:
        raise ValueError(f"weight_NK has {num_rows} rows; gate and up have as many each")
    return num_rows // 2 if swiglu else num_rows


def _memory(library: ctypes.CDLL, needed: int, memory: Tensor | None) -> Tensor:
    if memory is None:
        memory = empty_pages(library, (needed,), torch.uint8)
    check("memory", memory, torch.uint8, (needed,))
    if memory.data_ptr() % 64:
        raise ValueError("memory is not aligned to 64 bytes")
    return memory


def _parts(parts: Sequence[Int4Part | SteppedPart]) -> ctypes.Array[Part]:
    c_parts = (Part * len(parts))()
    for c_part, (weight, scale, offset, bias_N) in zip(c_parts, parts, strict=True):
        c_part.weight, c_part.scale, c_part.rows = weight.data_ptr(), scale.data_ptr(), weight.shape[0]
        c_part.offset = None if offset is None else offset.data_ptr()
        c_part.bias = None if bias_N is None else bias_N.data_ptr()
    return c_parts
