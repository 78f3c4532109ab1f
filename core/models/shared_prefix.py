"""Sequences that begin alike, of which the common tokens are computed once: a prompt, and the answers to it.

All tokens stand in one row, and a table of paths says which of them, in order, each sequence is made of. Whatever
treats tokens one by one (projections, norms, MLPs, the head) then has each token once. Only attention sees sequences:
queries, keys and values are laid out along the paths, attended to as ever, by whatever kind of attention a layer has,
and the results are picked up again. A token that several sequences share has the same tokens before it in each, so that
its output is the same in each, and its gradient is the sum of theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penjing.core.models.attention import Attend, causal_attention
from penjing.core.models.config import DecoderConfig


def positions_and_attention(
    config: DecoderConfig, token_ids: Tensor, paths_NW: Tensor | None = None
) -> tuple[Tensor, Attend]:
    """Where each token stands in its sequence, int64 of the shape of `token_ids`, and what it attends to: itself and
    what comes before it.

    Args:
        token_ids: (…, T) int64; each leading index is a sequence, unless there are paths.
        paths_NW: (N, W) int64, the places in the flattened tokens of which N sequences are made, in order. Each place
            is in one of them at least, and in the same column wherever it is; shorter sequences repeat their last one.
    """
    attend = causal_attention(config)
    if paths_NW is None:
        return torch.arange(token_ids.shape[-1], device=token_ids.device).expand(token_ids.shape), attend
    flat, sequences = paths_NW.flatten(), paths_NW.shape
    order = torch.arange(len(flat), device=flat.device)
    first = torch.full((token_ids.numel(),), len(flat), dtype=torch.int64, device=flat.device)
    first = first.scatter_reduce(0, flat, order, "amin")  # the first place on a path of each token

    def attend_along(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        laid_out = (_rows(x.flatten(0, -3), flat).unflatten(0, sequences) for x in (q, k, v))
        out = attend(layer, *laid_out).flatten(0, 1)
        return _rows(out, first).view(*q.shape[:-1], v.shape[-1])

    return (first % sequences[1]).view(token_ids.shape), attend_along


def _rows(x: Tensor, places: Tensor) -> Tensor:
    # On processors the gradient of indexing goes element by element, and that of a selection row by row; on GPUs the
    # sum of a selection's gradient has no fixed order.
    return x.index_select(0, places) if x.device.type == "cpu" else x[places]
