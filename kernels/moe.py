"""The experts of a mixture of experts: sort rows by expert, one grouped product a projection, sum each token's experts.

Shapes: T tokens, E hidden, N experts, K of them for each token, R = T × K rows, I inner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from penjing.kernels.dispatch import gpu_kernels
from penjing.kernels.swiglu import swiglu, swiglu_torch


def experts_mlp(
    x_TE: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    gates: Sequence[torch.Tensor],
    ups: Sequence[torch.Tensor],
    downs: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Σ_k weight[t, k] × down_n(silu(gate_n(x[t])) × up_n(x[t])) with n = expert[t, k]; no token is dropped.

    On a GPU no size leaves the device: nothing waits for it. Differentiable; an expert without tokens has a gradient
    of zeros.

    Args:
        x_TE: (T, E) floating, T ≥ 1.
        weight_TK: (T, K) floating.
        expert_TK: (T, K) int64 in [0, N).
        gates, ups: N matrices (I, E).
        downs: N matrices (E, I).

    Returns:
        (T, E), dtype of `x_TE`.

    Raises:
        ValueError: shapes or types that do not fit; on a CPU also an expert outside [0, N).
    """
    _check(x_TE, weight_TK, expert_TK, gates, ups, downs)
    gpu = gpu_kernels("moe", x_TE, expert_TK)
    if gpu is None or not gpu.takes(x_TE, [*gates, *ups, *downs]):
        return experts_mlp_torch(x_TE, weight_TK, expert_TK, gates, ups, downs)
    num_chosen = expert_TK.shape[1]
    sorted_R, order_R = expert_TK.flatten().sort(stable=True)
    offsets = torch.searchsorted(sorted_R, torch.arange(len(gates) + 1, device=x_TE.device)).to(torch.int32)
    place_TK = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=x_TE.device))
    place_TK = place_TK.view(expert_TK.shape)
    x_RE = gpu.dispatch(x_TE, order_R // num_chosen, place_TK)
    inner_RI = swiglu(gpu.grouped_linear(x_RE, offsets, gates), gpu.grouped_linear(x_RE, offsets, ups))
    return gpu.combine(gpu.grouped_linear(inner_RI, offsets, downs), weight_TK, place_TK)


def experts_mlp_torch(
    x_TE: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    gates: Sequence[torch.Tensor],
    ups: Sequence[torch.Tensor],
    downs: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The reference of `experts_mlp`: one expert after the other."""
    if expert_TK.device.type == "cpu" and (int(expert_TK.min()) < 0 or int(expert_TK.max()) >= len(gates)):
        raise ValueError(f"experts {int(expert_TK.min())} … {int(expert_TK.max())}; there are {len(gates)}")
    sizes = expert_TK.flatten().bincount(minlength=len(gates)).tolist()

    def expert(index: int, part: torch.Tensor) -> torch.Tensor:
        return swiglu_torch(part @ gates[index].t(), part @ ups[index].t()) @ downs[index].t()

    return sorted_by_expert(x_TE, weight_TK, expert_TK, lambda x_RE: one_by_one(x_RE, sizes, expert))


def sorted_by_expert(
    x_TE: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    outputs: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Σ_k weight[t, k] × the output of expert[t, k] for x[t].

    Args:
        x_TE: (T, E); weight_TK: (T, K) floating; expert_TK: (T, K) int64.
        outputs: (R, E), the copies of x for each of its experts in the order of the experts → (R, E).

    Returns:
        (T, E), dtype of what `outputs` returns.
    """
    num_chosen = expert_TK.shape[1]
    order_R = expert_TK.flatten().argsort(stable=True)
    y_RE = outputs(x_TE.index_select(0, order_R // num_chosen))
    y_TKE = y_RE.index_select(0, order_R.argsort()).unflatten(0, (-1, num_chosen))
    return (y_TKE * weight_TK[..., None].to(y_TKE.dtype)).sum(1)


def one_by_one(
    x_RE: torch.Tensor, sizes: Sequence[int], expert: Callable[[int, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """(R, E) rows in the order of the experts, `sizes` of each → (R, E): each expert is one call, (index, (rows, E)) →
    (rows, E).

    With gradients an expert without rows runs too: its gradients are zero, not missing, for who reduces them.
    """
    every = torch.is_grad_enabled() or not len(x_RE)
    parts = enumerate(x_RE.split(list(sizes)))
    return torch.cat([expert(index, part) for index, part in parts if every or part.shape[0]])


def _check(
    x_TE: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    gates: Sequence[torch.Tensor],
    ups: Sequence[torch.Tensor],
    downs: Sequence[torch.Tensor],
) -> None:
    tokens, hidden = x_TE.shape if x_TE.dim() == 2 else (0, 0)
    if tokens == 0 or expert_TK.dim() != 2 or expert_TK.shape != weight_TK.shape or len(expert_TK) != tokens:
        raise ValueError(
            f"x has shape {tuple(x_TE.shape)}, weights {tuple(weight_TK.shape)}, experts {tuple(expert_TK.shape)}; "
            "(T ≥ 1, E), (T, K) and (T, K) are needed"
        )
    if expert_TK.dtype != torch.int64:
        raise ValueError(f"experts are {expert_TK.dtype}; int64 is needed")
    if not gates or not len(gates) == len(ups) == len(downs):
        raise ValueError(f"{len(gates)} gates, {len(ups)} ups and {len(downs)} downs; as many of each are needed")
    inner = gates[0].shape[0]
    wide, narrow = (inner, hidden), (hidden, inner)
    for name, weights, shape in (("gate", gates, wide), ("up", ups, wide), ("down", downs, narrow)):
        for index, weight in enumerate(weights):
            if weight.shape != shape:
                raise ValueError(f"{name} of expert {index} has shape {tuple(weight.shape)}; {shape} is needed")
