"""How much a decoder's layers lose when units leave and those that stay are corrected for it.

A channel matters little if others can stand for it. Let X be what a layer reads, W its weight, and let units leave: the
layer's output then changes least if the weights that stay are those of least squares. With H = XᵀX (damped), removing
the columns B of W costs

    tr(W_B ([H⁻¹]_BB)⁻¹ W_Bᵀ),    W ← W − W_B ([H⁻¹]_BB)⁻¹ [H⁻¹]_B,    H⁻¹ ← H⁻¹ − [H⁻¹]_:B ([H⁻¹]_BB)⁻¹ [H⁻¹]_B:

(Optimal Brain Surgeon, https://doi.org/10.1109/ICNN.1993.298572; of structures ZipLM,
https://arxiv.org/abs/2302.04089). Units leave one after the other, the cheapest first, and the score of a unit is the
squared error of the output once it and all before it have left. Rows count by how large the residual stream behind them
is, as the norm there divides by it, so that scores of different layers are on one scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from penjing.compress.decoder.stream import Half, LayerStream
from penjing.compress.prune.graph import Group
from penjing.compress.prune.importance import Scores
from penjing.compress.prune.ranking import MAX_SHARE
from penjing.compress.prune_decoder.reconstruct import DAMPING, MLP, last_layers
from penjing.compress.prune_decoder.subject import kept_layers
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError
from penjing.core.progress import Progress

BLOCK = 16  # units that leave between two updates of the whole H⁻¹: reading it is what takes time
NEAREST = 4  # times as many are looked at


@torch.no_grad()
def obs_scores(
    folder: Path, groups: Sequence[Group], dropped: Sequence[int], windows_WT: Tensor, progress: Progress
) -> Scores:
    """The scores of MLP channels and of heads. One layer and a few matrices of K × K float64 are in memory at a time,
    beside the hidden states of the windows.

    Args:
        folder: the checkpoint, whole.
        groups: each with one place that is the inputs of a down_proj or an o_proj.
        dropped: layers of `folder` that `groups` do not count.
        windows_WT: (W, T) int64 calibration text.

    Raises:
        ConfigError: a group is read by something else.
    """
    stream = LayerStream(open_checkpoint(folder))
    kept = kept_layers(stream.config, dropped)
    readers: dict[tuple[int, str], list[tuple[int, list[Tensor]]]] = {}
    for number, group in enumerate(groups):
        found = [
            (position, name)
            for position, place in enumerate(group.places)
            for name in ("self_attn.o_proj", MLP)
            if place.dim == 1 and place.tensor.endswith(f"{name}.weight")
        ]
        if len(found) != 1:
            raise ConfigError(
                f"method='obs' corrects down_proj and o_proj for what leaves, and {group.name} is read by more; take "
                'another method, or parts = ["ffn"] or ["heads"]'
            )
        position, name = found[0]
        units = [torch.from_numpy(np.asarray(unit[position], np.int64)) for unit in group.units]
        layer = kept[int(group.places[position].tensor.split(".")[2])]
        readers.setdefault((layer, name), []).append((number, units))
    scores: Scores = [np.zeros(len(group)) for group in groups]
    hidden_WTE = stream.embed(windows_WT)
    progress.start("which units others can stand for", stream.config.num_hidden_layers)
    for layer in range(stream.config.num_hidden_layers):
        module = stream.float_layer(layer, stream.weights(layer))
        for name, half in zip(last_layers(module), stream.halves(module, windows_WT.shape[1]), strict=True):
            wanted = readers.get((layer, name), [])
            linear = module.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            gram_KK = _advance(half, linear if wanted else None, hidden_WTE)
            for number, units in wanted:
                assert gram_KK is not None
                scores[number] = leaving(linear.weight, gram_KK, units, int(MAX_SHARE * len(units))).numpy()
        progress.advance()
    return scores


def leaving(
    weight_NK: Tensor,
    gram_KK: Tensor,
    units: Sequence[Tensor],
    count: int,
    damping: float = DAMPING,
    block: int = BLOCK,
) -> Tensor:
    """(units,) float64: the squared error of the output once a unit and all before it have left; of those that stay,
    what it would be if they were next.

    Args:
        weight_NK: of the layer. gram_KK: XᵀX of what it reads, float64.
        units: the columns of each, as many each.
        count: how many leave.
        damping: of the mean of the diagonal of XᵀX, added to the diagonal.
        block: units between two updates of the whole; with 1 each time the cheapest of all leaves.
    """
    size = len(gram_KK)
    damped_KK = gram_KK + damping * float(gram_KK.diagonal().mean()) * torch.eye(size, dtype=torch.float64)
    inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(damped_KK))
    weight_NK = weight_NK.double()
    covariance_KK = weight_NK.t() @ weight_NK
    columns_UB = torch.stack(list(units))
    scores_U = torch.full((len(columns_UB),), torch.inf, dtype=torch.float64)
    stays_U = torch.ones(len(columns_UB), dtype=torch.bool)
    total = 0.0
    while count > 0:
        left_V = stays_U.nonzero().flatten()
        costs_V = _costs(inverse_KK, covariance_KK, columns_UB[left_V])
        near_C = left_V[costs_V.argsort(stable=True)[: 1 if block == 1 else NEAREST * block]]
        errors = _cheapest(inverse_KK, covariance_KK, columns_UB[near_C], min(block, count))
        gone = near_C[list(errors)]
        scores_U[gone] = total + torch.tensor([*errors.values()], dtype=torch.float64)
        total = float(scores_U[gone[-1]])
        stays_U[gone] = False
        count -= len(gone)
        _remove(inverse_KK, covariance_KK, columns_UB[gone].flatten())
    left_V = stays_U.nonzero().flatten()
    scores_U[left_V] = total + _costs(inverse_KK, covariance_KK, columns_UB[left_V])
    return scores_U


def _cheapest(inverse_KK: Tensor, covariance_KK: Tensor, columns_CB: Tensor, count: int) -> dict[int, float]:
    """Which `count` of some units leave, one after the other, by place → the error that has come up by then."""
    picked = columns_CB.flatten()
    inverse, covariance = (matrix[picked][:, picked] for matrix in (inverse_KK, covariance_KK))
    places_CB = torch.arange(len(picked)).reshape(columns_CB.shape)
    left, gone, total = list(range(len(columns_CB))), dict[int, float](), 0.0
    for _ in range(min(count, len(left))):
        costs = _costs(inverse, covariance, places_CB[left])
        unit = left.pop(cheapest := int(costs.argmin()))
        gone[unit] = total = total + max(float(costs[cheapest]), 0.0)
        _remove(inverse, covariance, places_CB[unit])
    return gone


def _costs(inverse_KK: Tensor, covariance_KK: Tensor, columns_UB: Tensor) -> Tensor:
    """(units,) what the removal of each alone costs."""
    rows, columns = columns_UB[:, :, None], columns_UB[:, None, :]
    shares_UBB = torch.linalg.solve(inverse_KK[rows, columns], covariance_KK[rows, columns])
    return shares_UBB.diagonal(dim1=1, dim2=2).sum(1)


def _remove(inverse_KK: Tensor, covariance_KK: Tensor, columns_B: Tensor) -> None:
    """Update H⁻¹ and WᵀW in place for columns that leave. What is left there of those columns is never read again."""
    of_BK = torch.linalg.solve(inverse_KK[columns_B][:, columns_B], inverse_KK[columns_B])
    crossed_KB = covariance_KK[:, columns_B].clone()
    inner_BB = crossed_KB[columns_B].clone()
    inverse_KK.addmm_(inverse_KK[:, columns_B].clone(), of_BK, alpha=-1)
    # (W − W_B P)ᵀ(W − W_B P), with P = ([H⁻¹]_BB)⁻¹ [H⁻¹]_B
    half_KB = crossed_KB - 0.5 * (of_BK.t() @ inner_BB)
    covariance_KK.addmm_(half_KB, of_BK, alpha=-1)
    covariance_KK.addmm_(of_BK.t(), half_KB.t(), alpha=-1)


def _advance(half: Half, linear: nn.Linear | None, hidden_WTE: Tensor) -> Tensor | None:
    """Send hidden states through a half of a layer in place; XᵀX of what `linear`, through which it ends, reads."""
    if linear is None:
        for window_TE in hidden_WTE:
            window_TE.copy_(half(window_TE[None])[0])
        return None
    seen: list[Tensor] = []
    handle = linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    gram_KK = torch.zeros(linear.in_features, linear.in_features, dtype=torch.float64)
    try:
        for window_TE in hidden_WTE:
            window_TE.copy_(half(window_TE[None])[0])
            size_T1 = window_TE.square().mean(-1, keepdim=True)
            x_TK = seen.pop()[0] / size_T1.clamp(min=torch.finfo(torch.float32).tiny).sqrt()
            gram_KK += x_TK.t() @ x_TK
    finally:
        handle.remove()
    return gram_KK
