"""W8A8 linear layer: INT8 weights with a scale a channel, activations quantized on the fly.

These have a scale a token, or a scale and a zero point for each 256 inputs of a token.

The weights may be stored in 4 bits (`kernels.stepped`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from penjing.kernels.dispatch import cpu_extension, gpu_kernels
from penjing.kernels.quantize import ABOVE_INPUTS, quantize_above, quantize_per_token, quantize_per_token_torch
from penjing.kernels.rounding import round_clamp_
from penjing.kernels.swiglu import swiglu_torch

if TYPE_CHECKING:
    from penjing.kernels.cpu.packing import Panels, SteppedPart
    from penjing.kernels.stepped import SteppedInt8

_int_mm = torch.ops.aten._int_mm.default
# 1024 products of magnitudes up to 128 reach 2^24 at most: float32 counts that far.
EXACT_FLOAT32_K = 1024


@dataclass(frozen=True, eq=False)
class PackedInt8:
    """An INT8 weight, checked once at load."""

    stored: torch.Tensor | SteppedInt8
    """(N, K) int8, contiguous, or in 4 bits."""
    scale_N: torch.Tensor  # noqa: N815  float32
    bias_N: torch.Tensor | None  # noqa: N815  float32
    in_features: int
    out_features: int
    zero_points: bool = False
    """Activations have a scale and a zero point for each `quantize.ABOVE_INPUTS` of a token: their range need not lie
    evenly around 0, and what sticks out makes the steps of its neighbours coarser, not those of the whole token."""

    @cached_property
    def panels(self) -> Panels:
        """The weight as the C++ extension wants it, a copy made at the first use (a `DecoderStep` has its own)."""
        from penjing.kernels.cpu import extension

        cpp = extension()
        assert cpp is not None  # asked for by the extension's own path
        if (part := self.stepped_part) is not None:
            return cpp.prepack_stepped([part], self.group, zero_points=self.zero_points)
        return cpp.prepack_int8(self.weight_NK, self.scale_N, self.bias_N, zero_points=self.zero_points)

    @property
    def weight_NK(self) -> torch.Tensor:  # noqa: N802  what it is, as a field is named
        """(N, K) int8, made anew each time where the weight is stored in 4 bits."""
        return self.stored if isinstance(self.stored, torch.Tensor) else self.stored.expand()

    @property
    def group(self) -> int:
        """Inputs that share a step where the weight is stored in 4 bits; else 0."""
        return 0 if isinstance(self.stored, torch.Tensor) else self.stored.group

    @property
    def stepped_part(self) -> SteppedPart | None:
        """What the C++ extension packs where the weight is stored in 4 bits."""
        if isinstance(self.stored, torch.Tensor):
            return None
        return self.stored.packed_NK8, self.scale_N, self.stored.step_NG2, self.bias_N

    @cached_property
    def block_sums(self) -> torch.Tensor:
        """(N, B) int32: the sum of each row of the weight over each block of inputs, which a zero point multiplies."""
        blocks = self.weight_NK.split(ABOVE_INPUTS, dim=1)
        return torch.stack([block.sum(dim=1, dtype=torch.int32) for block in blocks], dim=1)


def prepack_int8(
    weight_NK: torch.Tensor | SteppedInt8,
    scale_N: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    zero_points: bool = False,
) -> PackedInt8:
    """Check an INT8 weight and lay it out for `int8_linear`.

    Args:
        weight_NK: (out_features, in_features) int8, or the same in 4 bits of `kernels.stepped.stepped_int8`.
        scale_N: (N,) or (N, 1) floating; y ≈ x · (weight × scale)ᵀ.
        bias_N: (N,) floating or None.
        zero_points: of activations, see `kernels.quantize.quantize_above`.

    Raises:
        ValueError: a wrong shape, dtype or device, or zero points beside a weight in 4 bits whose groups do not divide
            their blocks.
    """
    if isinstance(weight_NK, torch.Tensor):
        if weight_NK.dim() != 2 or weight_NK.dtype != torch.int8 or 0 in weight_NK.shape:
            raise ValueError(
                f"weight_NK has shape {tuple(weight_NK.shape)} and {weight_NK.dtype}; int8 (N, K) is needed"
            )
        weight_NK = weight_NK.contiguous()
    elif zero_points and ABOVE_INPUTS % weight_NK.group:
        raise ValueError(
            f"groups of {weight_NK.group} inputs: with zero points those of a weight in 4 bits divide {ABOVE_INPUTS}"
        )
    out_features, in_features = weight_NK.shape
    vectors = [("scale_N", scale_N)] + ([("bias_N", bias_N)] if bias_N is not None else [])
    for name, vector in vectors:
        if vector.numel() != out_features or not vector.is_floating_point():
            raise ValueError(
                f"{name} has shape {tuple(vector.shape)} and {vector.dtype}; {out_features} floating values are needed"
            )
        if vector.device != weight_NK.device:
            raise ValueError(f"{name} is on {vector.device}, weight_NK on {weight_NK.device}")
    return PackedInt8(
        stored=weight_NK,
        scale_N=scale_N.detach().reshape(out_features).to(torch.float32).contiguous(),
        bias_N=None if bias_N is None else bias_N.detach().reshape(out_features).to(torch.float32).contiguous(),
        in_features=in_features,
        out_features=out_features,
        zero_points=zero_points,
    )


def int8_linear(x_MK: torch.Tensor, packed: PackedInt8) -> torch.Tensor:
    """y_MN = (q_MK · weight_NKᵀ) × scale_M × scale_N + bias_N with q, scale_M = quantize_per_token(x).

    With zero points z_MB, q, scale_MB, z_MB = quantize_above(x), and y_MN is the sum over blocks b of inputs of
    ((q_Mb − z_Mb) · weight_Nbᵀ) × scale_Mb, in their order, × scale_N + bias_N.
    The sum runs in int32 and is exact, so row i of the result depends on row i of `x_MK` alone, bit by bit.

    Args:
        x_MK: (M, in_features) floating; M may be 0.

    Returns:
        (M, out_features) float32.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    _check_input(x_MK, packed)
    if gpu_kernels("int8_matmul", x_MK, packed.scale_N) is not None:
        if packed.zero_points:
            return scaled_above(x_MK, packed)
        return scaled_int8_matmul(*quantize_per_token(x_MK), packed)
    extension = cpu_extension(x_MK)
    return int8_linear_torch(x_MK, packed) if extension is None else extension.int8_linear(x_MK, packed.panels)


def _check_input(x_MK: torch.Tensor, packed: PackedInt8) -> None:
    if x_MK.dim() != 2 or x_MK.shape[1] != packed.in_features or not x_MK.is_floating_point():
        raise ValueError(
            f"x_MK has shape {tuple(x_MK.shape)} and {x_MK.dtype}; floating (M, {packed.in_features}) is needed"
        )
    if x_MK.device != packed.stored.device:
        raise ValueError(f"x_MK is on {x_MK.device}, the weight on {packed.stored.device}")


def int8_linear_torch(x_MK: torch.Tensor, packed: PackedInt8) -> torch.Tensor:
    """The reference of `int8_linear`."""
    if packed.zero_points:
        return scaled_above(x_MK, packed)
    q_MK, scale_M = quantize_per_token_torch(x_MK)
    y_MN = int8_matmul(q_MK, packed.weight_NK).to(torch.float32)
    y_MN.mul_(scale_M[:, None]).mul_(packed.scale_N)
    return y_MN if packed.bias_N is None else y_MN.add_(packed.bias_N)


def scaled_above(
    x_MK: torch.Tensor,
    packed: PackedInt8,
    residual_MN: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`int8_linear` of a layer with zero points, in torch around the INT8 product.

    Args:
        residual_MN: added to the result in float32.
        dtype: of the result.
    """
    q_MK, scale_MB, zero_MB = quantize_above(x_MK)
    y_MN = torch.zeros(len(q_MK), packed.out_features, device=q_MK.device)
    blocks = zip(q_MK.split(ABOVE_INPUTS, dim=1), packed.weight_NK.split(ABOVE_INPUTS, dim=1), strict=True)
    for block, (q_Mb, weight_Nb) in enumerate(blocks):
        sums_MN = int8_matmul(q_Mb.contiguous(), weight_Nb.contiguous())
        sums_MN = sums_MN - zero_MB[:, block, None] * packed.block_sums[:, block]
        y_MN.add_(sums_MN.to(torch.float32).mul_(scale_MB[:, block, None]))
    y_MN.mul_(packed.scale_N)
    if packed.bias_N is not None:
        y_MN.add_(packed.bias_N)
    return (y_MN if residual_MN is None else y_MN + residual_MN).to(dtype)


def scaled_int8_matmul(
    q_MK: torch.Tensor,
    scale_M: torch.Tensor,
    packed: PackedInt8,
    *,
    residual_MN: torch.Tensor | None = None,
    swiglu: bool = False,
    output_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """y_MN = (q_MK · weight_NKᵀ) × scale_M × scale_N + bias_N, and what follows it, in one pass on a GPU.

    Args:
        q_MK, scale_M: from `quantize_per_token`.
        residual_MN: added to the result in float32; of type `dtype`.
        swiglu: the weight's first half are the rows of the gate, the second those of `up`; y = silu(gate) × up.
        output_scale: (1,) float32: y / output_scale is rounded to INT8 (a static scale; a dynamic one needs the
            whole row first: quantize the result).
        dtype: of the result, float32, float16 or bfloat16.

    Returns:
        (M, N) or (M, N / 2) of `dtype`, or int8.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    columns = packed.out_features // 2 if swiglu else packed.out_features
    _check_scaled(q_MK, scale_M, packed, residual_MN, output_scale, swiglu, dtype)
    weight_NK, scale_N, bias_N = packed.weight_NK, packed.scale_N, packed.bias_N
    gpu = gpu_kernels("int8_matmul", q_MK, weight_NK)
    if gpu is not None and gpu.takes(q_MK, weight_NK):
        residual = None if residual_MN is None else residual_MN.contiguous()
        vectors = scale_M.contiguous(), weight_NK, scale_N, bias_N
        return gpu.scaled_int8_matmul(q_MK, *vectors, residual, swiglu, output_scale, dtype)
    y_MN = int8_matmul(q_MK, weight_NK).to(torch.float32).mul_(scale_M[:, None]).mul_(scale_N)
    if bias_N is not None:
        y_MN.add_(bias_N)
    if swiglu:
        y_MN = swiglu_torch(y_MN[:, :columns], y_MN[:, columns:])
    if residual_MN is not None:
        y_MN = y_MN + residual_MN
    return y_MN.to(dtype) if output_scale is None else round_clamp_(y_MN / output_scale).to(torch.int8)


def _check_scaled(
    q_MK: torch.Tensor,
    scale_M: torch.Tensor,
    packed: PackedInt8,
    residual_MN: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    swiglu: bool,
    dtype: torch.dtype,
) -> None:
    rows, columns = len(q_MK), packed.out_features // 2 if swiglu else packed.out_features
    if q_MK.dtype != torch.int8 or q_MK.dim() != 2 or q_MK.shape[1] != packed.in_features:
        raise ValueError(f"q_MK is {tuple(q_MK.shape)} {q_MK.dtype}; int8 (M, {packed.in_features}) is needed")
    if swiglu and packed.out_features % 2:
        raise ValueError(f"swiglu needs an even number of outputs, the weight has {packed.out_features}")
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype is {dtype}; float32, float16 or bfloat16 is needed")
    wanted = [("scale_M", scale_M, (rows,), torch.float32), ("output_scale", output_scale, (1,), torch.float32)]
    for name, tensor, shape, kind in [*wanted, ("residual_MN", residual_MN, (rows, columns), dtype)]:
        if tensor is not None and (tensor.shape != shape or tensor.dtype != kind or tensor.device != q_MK.device):
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; {shape} {kind} on "
                f"{q_MK.device} is needed"
            )


def int8_weight_linear(x_MK: torch.Tensor, packed: PackedInt8) -> torch.Tensor:
    """y_MN = x_MK · (weight_NK × scale_N)ᵀ + bias_N with activations as they are: W8A16.

    For a few rows reading the weight takes the time: a GPU reads it in INT8 (up to 16 rows of float16 or bfloat16;
    otherwise it is widened first).

    Args:
        x_MK: (M, in_features) floating.

    Returns:
        (M, out_features), dtype of `x_MK`.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    _check_input(x_MK, packed)
    gpu = gpu_kernels("int8_matmul", x_MK, packed.weight_NK)
    if gpu is not None and gpu.takes_gemv(x_MK):
        return gpu.int8_weight_linear(x_MK, packed.weight_NK, packed.scale_N, packed.bias_N)
    y_MN = x_MK.to(torch.float32) @ (packed.weight_NK.to(torch.float32) * packed.scale_N[:, None]).t()
    return (y_MN if packed.bias_N is None else y_MN + packed.bias_N).to(x_MK.dtype)


def int8_matmul(q_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """acc_MN int32 = q_MK · weight_NKᵀ of two int8 matrices, exact (K ≤ 133 000 keeps it inside int32)."""
    if q_MK.shape[0] == 0:
        return torch.zeros(0, weight_NK.shape[0], dtype=torch.int32, device=q_MK.device)
    gpu = gpu_kernels("int8_matmul", q_MK, weight_NK)
    if gpu is not None and gpu.takes(q_MK, weight_NK):
        return gpu.int8_matmul(q_MK, weight_NK)
    if q_MK.device.type == "cpu":
        # With one input, strides say both "rows" and "columns": where VNNI exists, torch 2.13 reads beyond the weight.
        exact = q_MK.shape[1] > 1 and _int_mm_is_exact()
        return _int_mm(q_MK, weight_NK.t()) if exact else _float32_matmul(q_MK, weight_NK)
    # cuBLAS: M > 16, and K and N multiples of 8.
    rows, columns = q_MK.shape[0], weight_NK.shape[0]
    pad_rows, pad_k, pad_columns = max(17 - rows, 0), -q_MK.shape[1] % 8, -columns % 8
    q_MK = torch.nn.functional.pad(q_MK, (0, pad_k, 0, pad_rows))
    weight_NK = torch.nn.functional.pad(weight_NK, (0, pad_k, 0, pad_columns))
    return _int_mm(q_MK, weight_NK.t())[:rows, :columns]


@cache
def _int_mm_is_exact() -> bool:
    # Before VNNI, multiply-add instructions saturate at 16 bits; such a processor fails on these extremes.
    with unset_fake_temporarily():  # a rehearsal on tensors without data may be the first to ask
        ones = torch.ones(32, 256, dtype=torch.int8)
        extremes = torch.cat([ones * 127, ones * -127, ones * -128])
        expected = extremes.long() @ extremes.long().t()
        return all(
            torch.equal(_int_mm(rows, extremes.t()).long(), expected[: len(rows)])
            for rows in (extremes, extremes[:1], extremes[:33])
        )


def _float32_matmul(q_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    acc_MN = torch.zeros(q_MK.shape[0], weight_NK.shape[0], dtype=torch.int32)
    for start in range(0, q_MK.shape[1], EXACT_FLOAT32_K):
        part = slice(start, start + EXACT_FLOAT32_K)
        acc_MN += (q_MK[:, part].float() @ weight_NK[:, part].float().t()).to(torch.int32)
    return acc_MN
