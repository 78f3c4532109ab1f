"""Context parallelism: each process has a stretch of every sequence; keys and values are gathered layer by layer.

All-gather rather than a ring, as in Llama 3 (https://arxiv.org/abs/2407.21783, section 3.3.2): with few key-value heads
the gathered tensors are small beside the attention itself. Of 2n pieces of a sequence, process r of n has the pieces r
and 2n − 1 − r, as there: an early piece attends to little and a late one to much, so that all do the same work.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor, wait_tensor

from penjing.core.models.attention import Attend
from penjing.core.models.config import DecoderConfig
from penjing.kernels.flash_attention import flash_attention
from penjing.train.objective.objective import Batch


@dataclass(frozen=True)
class Context:
    """This process's part of a sequence: it is number `rank` of the `size` processes of `group`."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def part(self, batch: Batch) -> Batch:
        """This process's two pieces of each (B, T) tensor of `batch`."""
        first, second = self._pieces
        pieces = {name: tensor.chunk(2 * self.size, 1) for name, tensor in batch.items()}
        return {name: torch.cat((each[first], each[second]), 1) for name, each in pieces.items()}

    def positions(self, rows: int, length: int, device: torch.device) -> torch.Tensor:
        """(rows, length) int64: where the two pieces, `length` tokens together, lie in their sequence."""
        piece = torch.arange(length // 2, device=device)
        return torch.cat([piece + index * (length // 2) for index in self._pieces]).expand(rows, length)

    def attention(self, config: DecoderConfig) -> Attend:
        """Causal attention of the pieces to all that comes before them, and to themselves; with the layer's window."""
        # torch 2.13 would have them called …_single, which 2.11 does not know.
        warnings.filterwarnings("ignore", r".*(all_gather|reduce_scatter)_tensor` is deprecated", FutureWarning)

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
        ) -> torch.Tensor:
            assert sinks is None, "such a model is refused"
            window, piece = config.layer_window(layer), q.shape[1] // 2
            k, v = (self._in_order(_Gather.apply(x, self.group)) for x in (k, v))
            parts = []
            for index, queries in zip(self._pieces, q.split(piece, 1), strict=True):
                end = (index + 1) * piece
                parts.append(flash_attention(queries, k[:, :end], v[:, :end], window=window))
            return torch.cat(parts, 1)

        def before(layer: int, x: torch.Tensor, count: int) -> list[torch.Tensor]:
            raise AssertionError("such a model is refused")

        return Attend(attend, before)

    @property
    def _pieces(self) -> tuple[int, int]:
        return self.rank, 2 * self.size - 1 - self.rank

    def _in_order(self, x: Any) -> torch.Tensor:
        """(B, T, …) in the order of the processes → in that of the sequence."""
        pieces = x.chunk(2 * self.size, 1)  # process r's are the pieces r and 2n − 1 − r
        return torch.cat((*pieces[::2], *reversed(pieces[1::2])), 1)


class _Gather(torch.autograd.Function):
    """(B, T, …) of each process → (B, T of all, …); backward sums what all processes want of one's part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        whole = all_gather_tensor(x.transpose(0, 1).contiguous(), 0, group)
        return wait_tensor(whole).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        part = reduce_scatter_tensor(gradients[0].transpose(0, 1).contiguous(), "sum", 0, ctx.group)
        return wait_tensor(part).transpose(0, 1), None
