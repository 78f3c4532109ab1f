"""W4A8 linear layer: 4-bit weights with a scale for each group of inputs, activations quantized with a scale a token.

    y[m, n] = scale[m] × Σ_g (Σ_{k in g} q[m, k] · w[n, k]) × scale[n, g] + bias[n]

With offsets a weight is u × scale + offset for u in [0, 15], as llama.cpp's Q4_1 has it, and activations have a scale
for each group too, as its Q8_1:

    y[m, n] = Σ_g ((Σ_{k in g} q[m, k] · u[n, k]) × scale[n, g] + (Σ_{k in g} q[m, k]) × offset[n, g]) × scale[m, g]
              + bias[n]

The sum of a group is exact. The groups are added in float32 in their order, each product rounded before it is added.
Every implementation does just that: results are equal bit by bit on every processor and for every batch.

Of W4A16 (`activation_bits` = 16) activations are h = bfloat16(x), rounded half to even, in C++ 0 below 2^-119:

    y[m, n] = Σ_g ((Σ_{k in g} h[m, k] · w[n, k]) × scale[n, g] + (Σ_{k in g} h[m, k]) × middle[n, g]) + bias[n]

with w in [−8, 7] and middle = offset + 8 × scale, 0 without offsets. The C++ kernels add the products in the order of
AVX-512's BF16 instruction, so that every instruction set gives the same bits. torch multiplies by widened weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch

from penjing.kernels.cpu.packing import LEAST_GROUP, SCALE_DTYPES
from penjing.kernels.dispatch import cpu_extension, gpu_kernels
from penjing.kernels.int8_linear import int8_matmul
from penjing.kernels.linear import linear_torch
from penjing.kernels.quantize import quantize_per_token, quantize_per_token_torch

if TYPE_CHECKING:
    from penjing.kernels.cpu.packing import Int4Part, Panels

VALUES_A_WORD = 8
OFFSET = 8
FLOATING = 16
"""Bits of activations in bfloat16."""
ActivationBits = Literal[8, 16]


@dataclass(frozen=True, eq=False)
class PackedInt4:
    """A 4-bit weight, checked once at load."""

    packed_NK8: torch.Tensor  # noqa: N815  int32, contiguous: `pack_int4` of values in [−8, 7]
    scale_NG: torch.Tensor  # noqa: N815  float32, bfloat16 or float16, contiguous
    offset_NG: torch.Tensor | None  # noqa: N815  as scale_NG
    bias_N: torch.Tensor | None  # noqa: N815  float32
    in_features: int
    out_features: int
    group: int
    activation_bits: ActivationBits = 8

    @cached_property
    def panels(self) -> Panels:
        """The weight as the C++ extension wants it, a copy made at the first use (a `DecoderStep` has its own)."""
        from penjing.kernels.cpu import extension

        cpp = extension()
        assert cpp is not None  # asked for by the extension's own path
        return cpp.prepack_int4([self.part], self.group, half_inputs=self.activation_bits == FLOATING)

    def dequantize(self) -> torch.Tensor:
        """(N, K) float32."""
        scale_NK = self.scale_NG.to(torch.float32).repeat_interleave(self.group, dim=1)
        weight_NK = unpack_int4(self.packed_NK8).to(torch.float32)
        if self.offset_NG is None:
            return weight_NK.mul_(scale_NK)
        return (weight_NK + OFFSET).mul_(scale_NK).add_(self.offset_NG.float().repeat_interleave(self.group, dim=1))

    @property
    def activation_groups(self) -> int:
        """Scales of a token's activations."""
        return 1 if self.offset_NG is None else self.scale_NG.shape[1]

    @property
    def activation_group(self) -> int:
        """Inputs that share a scale of activations."""
        return self.in_features // self.activation_groups

    @cached_property
    def device_layout(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What a GPU reads: (N, K / 2) uint8, a view, and copies (G, N) of scales and offsets."""
        offset_GN = None if self.offset_NG is None else self.offset_NG.t().contiguous()
        return self.packed_NK8.view(torch.uint8), self.scale_NG.t().contiguous(), offset_GN

    @property
    def part(self) -> Int4Part:
        """What the C++ extension packs."""
        return self.packed_NK8, self.scale_NG, self.offset_NG, self.bias_N


def pack_int4(weight_NK: torch.Tensor) -> torch.Tensor:
    """(N, K / 8) int32 of (N, K) int8 in [−8, 7]: eight values + 8 a word, the first in the lowest bits, which is how
    compressed-tensors' pack-quantized format has them.

    Raises:
        ValueError: another dtype or shape, or a value outside [−8, 7].
    """
    if weight_NK.dim() != 2 or weight_NK.dtype != torch.int8 or 0 in weight_NK.shape:
        raise ValueError(f"weight_NK has shape {tuple(weight_NK.shape)} and {weight_NK.dtype}; int8 (N, K) is needed")
    if weight_NK.shape[1] % VALUES_A_WORD:
        raise ValueError(f"weight_NK has {weight_NK.shape[1]} inputs; a multiple of {VALUES_A_WORD} is needed")
    low, high = (int(value) for value in torch.aminmax(weight_NK))
    if low < -OFFSET or high >= OFFSET:
        raise ValueError(f"weight_NK holds values from {low} to {high}; 4 bits hold −8 to 7")
    words_NK8 = torch.zeros(len(weight_NK), weight_NK.shape[1] // VALUES_A_WORD, dtype=torch.int32)
    for place in range(VALUES_A_WORD):
        words_NK8 |= (weight_NK[:, place::VALUES_A_WORD].to(torch.int32) + OFFSET) << (4 * place)
    return words_NK8


def unpack_int4(packed_NK8: torch.Tensor) -> torch.Tensor:
    """What `pack_int4` packed: (N, K) int8."""
    places = [((packed_NK8 >> (4 * place)) & 15).to(torch.int8) for place in range(VALUES_A_WORD)]
    return torch.stack(places, dim=-1).flatten(1) - OFFSET


def prepack_int4(
    packed_NK8: torch.Tensor,
    scale_NG: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    offset_NG: torch.Tensor | None = None,
    activation_bits: ActivationBits = 8,
) -> PackedInt4:
    """Check a 4-bit weight for `int4_linear`.

    Args:
        packed_NK8: (N, K / 8) int32 of `pack_int4`.
        scale_NG: (N, G) floating, each of K / G inputs that follow each other, a multiple of 32.
        bias_N: (N,) floating or None.
        offset_NG: as `scale_NG`, what each weight of a group lies above; None for values around zero.
        activation_bits: 8, or 16 for activations in bfloat16.

    Raises:
        ValueError: a wrong shape, dtype or device, a scale or an offset that is NaN or infinite, or groups that do not
            fit.
    """
    if packed_NK8.dim() != 2 or packed_NK8.dtype != torch.int32 or 0 in packed_NK8.shape:
        raise ValueError(f"packed_NK8 is {tuple(packed_NK8.shape)} {packed_NK8.dtype}; int32 (N, K / 8) is needed")
    out_features, in_features = packed_NK8.shape[0], VALUES_A_WORD * packed_NK8.shape[1]
    if scale_NG.dim() != 2 or len(scale_NG) != out_features or scale_NG.dtype not in SCALE_DTYPES:
        raise ValueError(
            f"scale_NG is {tuple(scale_NG.shape)} {scale_NG.dtype}; float32, bfloat16 or float16 of shape "
            f"({out_features}, groups) is needed"
        )
    num_groups = scale_NG.shape[1]
    if num_groups == 0 or in_features % num_groups or in_features // num_groups % LEAST_GROUP:
        raise ValueError(
            f"{in_features} inputs in {num_groups} groups: groups of a multiple of {LEAST_GROUP} inputs are needed"
        )
    if not torch.isfinite(scale_NG).all():
        raise ValueError("scale_NG holds values that are NaN or infinite: the scales overflowed when they were stored")
    if offset_NG is not None:
        if offset_NG.shape != scale_NG.shape or offset_NG.dtype != scale_NG.dtype:
            raise ValueError(
                f"offset_NG is {tuple(offset_NG.shape)} {offset_NG.dtype}; shape and type of scale_NG, "
                f"{tuple(scale_NG.shape)} {scale_NG.dtype}, are needed"
            )
        if not torch.isfinite(offset_NG).all():
            raise ValueError("offset_NG holds values that are NaN or infinite: they overflowed when they were stored")
    if bias_N is not None and (bias_N.numel() != out_features or not bias_N.is_floating_point()):
        raise ValueError(f"bias_N is {tuple(bias_N.shape)} {bias_N.dtype}; {out_features} floating values are needed")
    for name, tensor in (("scale_NG", scale_NG), ("offset_NG", offset_NG), ("bias_N", bias_N)):
        if tensor is not None and tensor.device != packed_NK8.device:
            raise ValueError(f"{name} is on {tensor.device}, packed_NK8 on {packed_NK8.device}")
    return PackedInt4(
        packed_NK8=packed_NK8.contiguous(),
        scale_NG=scale_NG.detach().contiguous(),
        offset_NG=None if offset_NG is None else offset_NG.detach().contiguous(),
        bias_N=None if bias_N is None else bias_N.detach().reshape(out_features).to(torch.float32).contiguous(),
        in_features=in_features,
        out_features=out_features,
        group=in_features // num_groups,
        activation_bits=activation_bits,
    )


def int4_linear(x_MK: torch.Tensor, packed: PackedInt4) -> torch.Tensor:
    """The layer at the head of this file, with q, scale_M = quantize_per_token(x), with offsets of each group of x, or
    with x in bfloat16.

    Args:
        x_MK: (M, in_features) floating; M may be 0.

    Returns:
        (M, out_features) float32; row i depends on row i of `x_MK` alone, bit by bit.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    if x_MK.dim() != 2 or x_MK.shape[1] != packed.in_features or not x_MK.is_floating_point():
        raise ValueError(
            f"x_MK has shape {tuple(x_MK.shape)} and {x_MK.dtype}; floating (M, {packed.in_features}) is needed"
        )
    if x_MK.device != packed.packed_NK8.device:
        raise ValueError(f"x_MK is on {x_MK.device}, the weight on {packed.packed_NK8.device}")
    codes = packed.activation_bits != FLOATING
    if codes and gpu_kernels("int4_matmul", x_MK, packed.packed_NK8) is not None:
        return scaled_int4_matmul(*quantize_for_int4(x_MK, packed), packed)
    extension = cpu_extension(x_MK)
    return int4_linear_torch(x_MK, packed) if extension is None else extension.int4_linear(x_MK, packed.panels)


def int4_linear_torch(x_MK: torch.Tensor, packed: PackedInt4) -> torch.Tensor:
    """The reference of `int4_linear`."""
    if packed.activation_bits == FLOATING:
        return linear_torch(x_MK.to(torch.bfloat16).to(torch.float32), packed.dequantize(), packed.bias_N)
    q_RK, scale_R = quantize_per_token_torch(x_MK.reshape(-1, packed.activation_group))
    return _product(q_RK.view(x_MK.shape), scale_R.view(len(x_MK), packed.activation_groups), packed)


def quantize_for_int4(x_MK: torch.Tensor, packed: PackedInt4) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (M, K) int8 of `x_MK` and their scales, float32: (M, G) for a weight with offsets, else (M, 1).

    Raises:
        ValueError: activations beside the weight are floating.
    """
    if packed.activation_bits == FLOATING:
        raise ValueError("activations beside this weight are floating: it has no product of codes")
    q_RK, scale_R = quantize_per_token(x_MK.reshape(-1, packed.activation_group))
    return q_RK.view(x_MK.shape), scale_R.view(len(x_MK), packed.activation_groups)


def scaled_int4_matmul(
    q_MK: torch.Tensor,
    scale_MG: torch.Tensor,
    packed: PackedInt4,
    *,
    residual_MN: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The layer at the head of this file of activations that are rounded already, in one pass on a GPU.

    Args:
        q_MK, scale_MG: of `quantize_for_int4`.
        residual_MN: added to the result in float32; of type `dtype`.
        dtype: of the result, float32, float16 or bfloat16.

    Returns:
        (M, N) of `dtype`.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    _check_scaled(q_MK, scale_MG, packed, residual_MN, dtype)
    gpu = gpu_kernels("int4_matmul", q_MK, packed.packed_NK8)
    if gpu is not None and gpu.takes(q_MK, packed.group):
        residual = None if residual_MN is None else residual_MN.contiguous()
        vectors = scale_MG.contiguous(), *packed.device_layout, packed.bias_N
        return gpu.scaled_int4_matmul(q_MK.contiguous(), *vectors, residual, packed.group, dtype)
    y_MN = _product(q_MK, scale_MG, packed)
    return (y_MN if residual_MN is None else y_MN + residual_MN).to(dtype)


def _check_scaled(
    q_MK: torch.Tensor,
    scale_MG: torch.Tensor,
    packed: PackedInt4,
    residual_MN: torch.Tensor | None,
    dtype: torch.dtype,
) -> None:
    rows, groups = len(q_MK), packed.activation_groups
    if q_MK.dtype != torch.int8 or q_MK.dim() != 2 or q_MK.shape[1] != packed.in_features:
        raise ValueError(f"q_MK is {tuple(q_MK.shape)} {q_MK.dtype}; int8 (M, {packed.in_features}) is needed")
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype is {dtype}; float32, float16 or bfloat16 is needed")
    wanted = [("scale_MG", scale_MG, (rows, groups), torch.float32)]
    if residual_MN is not None:
        wanted.append(("residual_MN", residual_MN, (rows, packed.out_features), dtype))
    for name, tensor, shape, kind in wanted:
        if tensor.shape != shape or tensor.dtype != kind or tensor.device != q_MK.device:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; {shape} {kind} on "
                f"{q_MK.device} is needed"
            )


def _product(q_MK: torch.Tensor, scale_MG: torch.Tensor, packed: PackedInt4) -> torch.Tensor:
    """(M, N) float32, group by group as the kernels add them."""
    weight_NK, scale_NG = unpack_int4(packed.packed_NK8), packed.scale_NG.to(torch.float32)
    offset_NG = None if packed.offset_NG is None else packed.offset_NG.to(torch.float32)
    y_MN = torch.zeros(len(q_MK), packed.out_features, device=q_MK.device)
    for index in range(scale_NG.shape[1]):
        part = slice(index * packed.group, (index + 1) * packed.group)
        q_MG = q_MK[:, part].contiguous()
        acc_MN = int8_matmul(q_MG, weight_NK[:, part].contiguous())
        if offset_NG is None:
            y_MN.add_(acc_MN.to(torch.float32).mul_(scale_NG[:, index]))
            continue
        sum_M1 = q_MG.sum(dim=1, keepdim=True, dtype=torch.int32)
        term_MN = (acc_MN + OFFSET * sum_M1).to(torch.float32).mul_(scale_NG[:, index])
        term_MN.add_(sum_M1.to(torch.float32) * offset_NG[:, index])
        y_MN.add_(term_MN.mul_(scale_MG[:, index, None]))
    if offset_NG is None:
        y_MN.mul_(scale_MG)
    return y_MN if packed.bias_N is None else y_MN.add_(packed.bias_N)
