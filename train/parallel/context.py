"""Context parallelism: each process has a stretch of every sequence; keys and values are gathered layer by layer.

All-gather rather than a ring, as in Llama 3 (https://arxiv.org/abs/2407.21783, section 3.3.2): with few key-value heads
the gathered tensors are small beside the attention itself, and any mask is possible. Stretches follow each other, so
that later processes have more to do: the last of n does (2n − 1) / n times the mean.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor, wait_tensor

from penjing.core.models.attention import Attend
from penjing.core.models.config import DecoderConfig
from penjing.train.objective.objective import Batch


@dataclass(frozen=True)
class Context:
    """This process's stretch: number `rank` of the `size` processes of `group`."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def part(self, batch: Batch) -> Batch:
        """The stretch of each (B, T) tensor of `batch`."""
        return {name: tensor.chunk(self.size, 1)[self.rank].contiguous() for name, tensor in batch.items()}

    def positions(self, rows: int, length: int, device: torch.device) -> torch.Tensor:
        """(rows, length) int64: where the stretch, `length` tokens, lies in its sequence."""
        return torch.arange(self.rank * length, (self.rank + 1) * length, device=device).expand(rows, length)

    def attention(self, config: DecoderConfig) -> Attend:
        """Causal attention of the stretch to all that comes before it, and to itself; with the layer's window."""
        # torch 2.13 would have them called …_single, which 2.11 does not know.
        warnings.filterwarnings("ignore", r".*(all_gather|reduce_scatter)_tensor` is deprecated", FutureWarning)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            length, window = q.shape[-3], config.layer_window(layer)
            end = (self.rank + 1) * length
            k, v = (_Gather.apply(x, self.group)[:, :end] for x in (k, v))  # pyright: ignore[reportIndexIssue]
            query = torch.arange(end - length, end, device=q.device)[:, None]
            key = torch.arange(end, device=q.device)
            seen = (key <= query) if window is None else (key <= query) & (key > query - window)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)

        return attend


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
