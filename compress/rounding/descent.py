"""Integers of groups, and the grids that they are on, improved one after the other where others are already rounded.

Compensated rounding (GPTQ) decides each column for good, knowing only those before it. Here each integer is decided
again, knowing all others: it moves to where the squared error of the outputs, tr (W − Ŵ) H (W − Ŵ)ᵀ, is least (cyclic
coordinate descent, https://arxiv.org/abs/2309.01885). Behind the integers of a group its step and offset move to those
that can be stored and lose least, of the integers as they are. No move makes the error larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

NOISE = (
    1e-5  # of what a step and an offset lose apart: where both undo each other, as for equal weights, no more is known
)
PASSES = 3  # over all columns; eight gain half a percent more

Grids = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], Iterable[tuple[Tensor, Tensor]]]
"""step_N of a group, the step_N that would lose least, and which offset_N is best beside a step_N → storable pairs."""


@dataclass
class Lattice:
    """weight ≈ number_NK × step_NG + offset_NG, each step and offset for K / G neighbours; all float32.

    Attributes:
        offset_NG: None: numbers are around 0.
        low, high: of the numbers.
    """

    number_NK: Tensor  # noqa: N815
    step_NG: Tensor  # noqa: N815
    offset_NG: Tensor | None  # noqa: N815
    low: int
    high: int

    def values(self) -> Tensor:
        """(N, K)."""
        group = self.number_NK.shape[1] // self.step_NG.shape[1]
        value_NK = self.number_NK * self.step_NG.repeat_interleave(group, 1)
        return value_NK if self.offset_NG is None else value_NK + self.offset_NG.repeat_interleave(group, 1)


def descend(weight_NK: Tensor, lattice: Lattice, spread_KK: Tensor, grids: Grids | None) -> None:
    """Improve `lattice` in place.

    Args:
        weight_NK: (N, K) float32.
        spread_KK: of `compress.decoder.compensate.error_spread`, for the activations that the weight reads.
        grids: what a group's step and offset can become; None: they stay.
    """
    hessian_KK = torch.cholesky_inverse(spread_KK, upper=True)
    _, exponent = torch.frexp(hessian_KK.diagonal().amax())
    hessian_KK = torch.ldexp(hessian_KK, -exponent)  # exact, so that activations of any size are rounded alike
    pull_NK = (weight_NK - lattice.values()) @ hessian_KK  # minus half of the error's gradient
    groups = lattice.step_NG.shape[1]
    size = weight_NK.shape[1] // groups
    for group in list(range(groups)) * PASSES:
        columns = slice(group * size, (group + 1) * size)
        moved_BN = _descend_group(lattice, group, columns, pull_NK[:, columns], hessian_KK[columns, columns], grids)
        pull_NK -= moved_BN.t() @ hessian_KK[columns]


def _descend_group(
    lattice: Lattice, group: int, columns: slice, pull_NB: Tensor, hessian_BB: Tensor, grids: Grids | None
) -> Tensor:
    """(B, N) how far the values of a group have moved."""
    step_N = lattice.step_NG[:, group].clone()
    offset_N = None if lattice.offset_NG is None else lattice.offset_NG[:, group].clone()
    # Copies, which `contiguous` makes none of where there is one row.
    pull_BN, number_BN = (
        each.t().clone(memory_format=torch.contiguous_format) for each in (pull_NB, lattice.number_NK[:, columns])
    )
    before_BN = number_BN * step_N + (0 if offset_N is None else offset_N)
    for place, most in enumerate(hessian_BB.diagonal()):
        wanted_N = number_BN[place] + (pull_BN[place] / most / step_N).round_()
        by_N = wanted_N.clamp_(lattice.low, lattice.high).sub_(number_BN[place])
        number_BN[place] += by_N
        pull_BN.addr_(hessian_BB[:, place], by_N * step_N, alpha=-1)
    lattice.number_NK[:, columns] = number_BN.t()
    if grids is not None:
        step_N, offset_N = _best(number_BN, step_N, offset_N, pull_BN, hessian_BB, grids)
        lattice.step_NG[:, group] = step_N
        if lattice.offset_NG is not None:
            lattice.offset_NG[:, group] = offset_N
    return number_BN * step_N + (0 if offset_N is None else offset_N) - before_BN


def _best(
    number_BN: Tensor, step_N: Tensor, offset_N: Tensor | None, pull_BN: Tensor, hessian_BB: Tensor, grids: Grids
) -> tuple[Tensor, Tensor]:
    """The step and offset of a group with which the error is least."""
    weight_B = hessian_BB.sum(dim=1)
    square_N, cross_N, ones = (number_BN * (hessian_BB @ number_BN)).sum(0), weight_B @ number_BN, weight_B.sum()
    pull_of_step_N, pull_of_offset_N = (number_BN * pull_BN).sum(0), pull_BN.sum(0)
    if offset_N is None:
        tops_N, bottoms_N, offset_N = pull_of_step_N, square_N, torch.zeros_like(step_N)
        pull_of_offset_N = cross_N = offset_N
    else:
        tops_N, bottoms_N = pull_of_step_N * ones - pull_of_offset_N * cross_N, square_N * ones - cross_N.square()
    best_step_N = step_N + tops_N / bottoms_N.clamp(min=torch.finfo(torch.float32).tiny)

    def best_offset(new_step_N: Tensor) -> Tensor:
        return offset_N + (pull_of_offset_N - (new_step_N - step_N) * cross_N) / ones

    found_step_N, found_offset_N, gained_N = step_N, offset_N, torch.zeros_like(step_N)
    for new_step_N, new_offset_N in grids(step_N, best_step_N, best_offset):
        step_by_N, offset_by_N = new_step_N - step_N, new_offset_N - offset_N
        apart_N = step_by_N.square() * square_N + offset_by_N.square() * ones
        quadratic_N = (1 + NOISE) * apart_N + 2 * step_by_N * offset_by_N * cross_N
        gain_N = 2 * (step_by_N * pull_of_step_N + offset_by_N * pull_of_offset_N) - quadratic_N
        better_N = gain_N > gained_N  # never where something overflowed
        gained_N = torch.where(better_N, gain_N, gained_N)
        found_step_N = torch.where(better_N, new_step_N, found_step_N)
        found_offset_N = torch.where(better_N, new_offset_N, found_offset_N)
    return found_step_N, found_offset_N
