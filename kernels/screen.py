"""A copy of an INT8 LM head in 4 bits, which tells what logits may be the largest (`kernels/cpu/screen.h`).

One stream reads the whole head for each token, and where the answer is the largest logit nobody looks at the others.
The copy is read in its place: it gives each logit within a bound, and those few whose bound reaches the largest are
computed from the head itself. So no answer changes, whatever the copy is; it only decides how many are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penjing.kernels.int4_linear import OFFSET, pack_int4
from penjing.kernels.int8_linear import PackedInt8, prepack_int8
from penjing.kernels.quantize import quantize_per_token
from penjing.kernels.rounding import INT8_LIMIT
from penjing.kernels.stepped import LARGEST_NUMBER, LARGEST_STEP, SteppedInt8, stepped_int8

GROUP = 32
"""Inputs that share a step in the copy: the fewest that kernels take, since it matters how far off the copy is."""
DIRECTIONS = 64
"""Along which the copy is mended, each for 4 bits of a row. With them SmolLM2 computes 110 of 49,152 logits
from the head and Gemma 3 180 of 262,144; with half as many 160 and 235, with none 5,400 and 2,200."""
_LARGEST_SCALE = 1e10  # what screen.cpp multiplies stays finite
_SMALLEST_SCALE = 1e-15  # and of full precision
_ROWS = 4096  # of the head at a time
_ROUNDING = 1e-5  # float32 sums are not further off, relative to the norms of what they multiply


@dataclass(frozen=True, eq=False)
class Screen:
    """See `make_screen`; arrays are float32."""

    rough: PackedInt8
    """(V, E + D) the copy, with the head's scales, and behind it what it lacks along the directions."""
    directions_DE: Tensor  # noqa: N815
    """What one of an input's last D numbers stands for in its first E."""
    factors_D: Tensor  # noqa: N815
    """A direction's product with an input times its factor, rounded, is that number."""
    lost_V: Tensor  # noqa: N815
    """The norm of what the copy lacks, times the head's scale."""
    beside: float
    """The norm of what is lacking along the directions as a share of that, the most of all logits."""


def why_not_screened(head: object, logit_cap: float | None) -> str | None:
    """Why `make_screen` does not take an LM head, or None."""
    if not isinstance(head, PackedInt8) or head.group or head.zero_points:
        return "the LM head is not stored in 8 bits with one scale a token for its input"
    if head.bias_N is not None or logit_cap:
        return "logits have a bias or a cap"
    if head.in_features % GROUP or head.in_features < 2 * DIRECTIONS:
        return f"{head.in_features} inputs of the LM head are too few or no multiple of {GROUP}"
    size_N = head.scale_N.abs()
    if not bool(((size_N == 0) | (size_N > _SMALLEST_SCALE) & (size_N < _LARGEST_SCALE)).all()):
        return "scales of the LM head are too small, too large or no numbers"
    return None


def make_screen(head: PackedInt8, inputs_RE: Tensor) -> Screen:
    """Copy the head.

    Args:
        head: one that `why_not_screened` has nothing against.
        inputs_RE: (R, E) floating, R at least `DIRECTIONS`, inputs of the head: the more alike those to come, the fewer
            logits are computed twice.
    """
    code_RE = quantize_per_token(inputs_RE.float())[0].float()
    # Rows in which inputs are largest, as long as makes the largest of their parts 127.
    vectors_DE = torch.linalg.svd(code_RE, full_matrices=False)[2][:DIRECTIONS]
    lengths_D = (code_RE @ vectors_DE.T).abs().amax(dim=0).clamp_(min=1.0) / INT8_LIMIT
    directions_DE = vectors_DE * lengths_D[:, None]
    copies, lost, beside = [], [], 0.0
    for begin in range(0, head.out_features, _ROWS):
        weight_NE, scale_N = head.weight_NK[begin : begin + _ROWS].float(), head.scale_N[begin : begin + _ROWS]
        copy = _round(weight_NE)
        lacks_NE = weight_NE - copy.expand()
        along_ND = lacks_NE @ directions_DE.T
        part = _round(along_ND)
        norm_N = lacks_NE.double().norm(dim=1)
        beside_N = (along_ND - part.expand()).double().norm(dim=1)
        copies.append((copy, part))
        lost.append((norm_N * scale_N.abs() * (1 + _ROUNDING)).float())
        beside = max(beside, float((beside_N / norm_N.clamp(min=1e-30)).max()))
    rough = SteppedInt8(
        torch.cat([torch.cat([part.packed_NK8 for part in pair], dim=1) for pair in copies]),
        torch.cat([torch.cat([part.step_NG2 for part in pair], dim=1) for pair in copies]),
    )
    return Screen(
        rough=prepack_int8(rough, head.scale_N),
        directions_DE=directions_DE.contiguous(),
        factors_D=lengths_D**-2,
        lost_V=torch.cat(lost),
        beside=beside + _ROUNDING * float(directions_DE.norm()),
    )


def _round(weight_NE: Tensor) -> SteppedInt8:
    """Each group around the middle of its weights."""
    weight_NGB = weight_NE.unflatten(1, (-1, GROUP)).clamp(-INT8_LIMIT, INT8_LIMIT)
    least_NG1, most_NG1 = weight_NGB.amin(-1, keepdim=True), weight_NGB.amax(-1, keepdim=True)
    step_NG1 = ((most_NG1 - least_NG1) / LARGEST_NUMBER).ceil_().clamp_(1, LARGEST_STEP)
    span_NG1 = LARGEST_NUMBER * step_NG1
    offset_NG1 = ((least_NG1 + most_NG1 - span_NG1) / 2).floor_().clamp_(min=-INT8_LIMIT)
    offset_NG1 = torch.minimum(offset_NG1, INT8_LIMIT - span_NG1)
    number_NGB = ((weight_NGB - offset_NG1) / step_NG1).round_().clamp_(0, LARGEST_NUMBER)
    numbers_NE8 = pack_int4((number_NGB - OFFSET).to(torch.int8).flatten(1))
    return stepped_int8(numbers_NE8, step_NG1[..., 0].to(torch.int8), offset_NG1[..., 0].to(torch.int8))
