"""Gradients as 8 bits on the wire: QSGD (https://arxiv.org/abs/1610.02132) with error feedback
(https://arxiv.org/abs/1901.09847): what rounding lost of a step is added to the next.

One codec serves all ways of data parallelism: FSDP's reduce-scatter sends each process its part of everybody's
gradient, packed; the all-reduce of DDP, and of FSDP that shards nothing, is that, and then all parts sent back, packed
again. A byte and 4 / 2048 a value
in place of 4 bytes: 75 % less. What rounding has lost is not in checkpoints: a resumed run begins with none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from penjing.kernels.quantize_gradient import CHUNK, dequantize_gradient, quantize_gradient


class Codec:
    """Packs one gradient step after step, remembering what rounding lost.

    Attributes: sent, plain: bytes packed so far, and what they would be as they were.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.plain = 0
        self._lost: torch.Tensor | None = None
        self._calls = 0

    def pack(self, rows_WN: torch.Tensor) -> torch.Tensor:
        """(W, N) floating, a row for each receiver → (W, bytes) uint8."""
        num_values, chunk = rows_WN.shape[1], _chunk(rows_WN.shape[1])
        wanted = rows_WN.to(torch.float32)
        if self._lost is not None and self._lost.shape == wanted.shape:
            wanted = wanted + self._lost
        packed = torch.stack([quantize_gradient(row, self._seed(), chunk) for row in wanted])
        arrived = torch.stack([dequantize_gradient(row, num_values, chunk) for row in packed])
        # A gradient with inf or NaN makes a step that is not taken: nothing of it is remembered.
        self._lost = torch.nan_to_num(wanted - arrived, nan=0.0, posinf=0.0, neginf=0.0)
        self.sent += packed.numel()
        self.plain += rows_WN.numel() * rows_WN.element_size()
        return packed

    def _seed(self) -> int:
        self._calls += 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        return (self._calls * 0x9E3779B1 + rank * 0x85EBCA6B) & 0xFFFFFFFF


def _chunk(num_values: int) -> int:
    return min(CHUNK, max(16, 1 << (num_values - 1).bit_length()))


def scatter_sum(codec: Codec, rows_WN: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """(N,) float32: the sum over the W processes of `group` of their row for this one."""
    packed = codec.pack(rows_WN)
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed, group=group)
    num_values = rows_WN.shape[1]
    return dequantize_gradient(received, num_values, _chunk(num_values)) * len(rows_WN)


def all_sum(there: Codec, back: Codec, values_N: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """(N,) float32: the sum of `values_N` over the processes of `group`, the same bits in each."""
    size = dist.get_world_size(group)
    part = -(-len(values_N) // size)
    rows = torch.nn.functional.pad(values_N, (0, part * size - len(values_N))).view(size, part)
    packed = back.pack(scatter_sum(there, rows, group)[None])[0]
    everyone = [torch.empty_like(packed) for _ in range(size)]
    dist.all_gather(everyone, packed, group=group)
    return torch.cat([dequantize_gradient(one, part, _chunk(part)) for one in everyone])[: len(values_N)]


class PackedReduceScatter:
    """FSDP2's reduce-scatter through a codec, for one group of parameters (`set_custom_reduce_scatter`)."""

    def __init__(self) -> None:
        self.codec = Codec()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Plain memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Sum; the input holds a part for each process, in order."""
        assert op == dist.ReduceOp.SUM
        output_tensor.copy_(scatter_sum(self.codec, input_tensor.view(group.size(), -1), group))


class PackedAllReduce:
    """FSDP2's hook behind its reduce-scatter, for one group of parameters that `copies` all have whole."""

    def __init__(self, copies: dist.ProcessGroup) -> None:
        self.there, self.back = Codec(), Codec()
        self._copies = copies

    def __call__(self, gradient_N: torch.Tensor) -> None:
        """Sum over the processes, in place."""
        gradient_N.copy_(all_sum(self.there, self.back, gradient_N, self._copies))


def compress_fsdp(module: FSDPModule, copies: dist.ProcessGroup | None = None) -> None:
    """Let the gradients of `module`'s own parameters travel packed: in its reduce-scatter or, where that is over one
    process, between its `copies`."""
    if copies is None:
        module.set_custom_reduce_scatter(PackedReduceScatter())  # pyright: ignore[reportArgumentType]
    elif copies.size() > 1:
        module.set_all_reduce_hook(PackedAllReduce(copies))


class PackedBuckets:
    """The DDP hook: a codec for each bucket."""

    def __init__(self) -> None:
        self.codecs: dict[tuple[int, int], tuple[Codec, Codec]] = {}

    @property
    def bytes(self) -> tuple[int, int]:
        """(sent, as it would be without): of all buckets."""
        both = [codec for pair in self.codecs.values() for codec in pair]
        return sum(codec.sent for codec in both), sum(codec.plain for codec in both)


# Without annotations: torch compares them with its classes, and postponed ones are strings.
def _packed_bucket(state, bucket):
    buffer = bucket.buffer()
    key = (bucket.index(), buffer.numel())  # buckets are formed anew after the first step
    there, back = state.codecs.setdefault(key, (Codec(), Codec()))
    done = torch.futures.Future()
    done.set_result(all_sum(there, back, buffer, None).to(buffer.dtype))
    return done


def _power_sgd_bucket(state, bucket):
    # PowerSGD averages; the loop has divided by the tokens of the world already.
    return powerSGD_hook(state, bucket).then(lambda done: done.value() * dist.get_world_size())


def compress_ddp(replica: DistributedDataParallel, gradients: str) -> None:
    """Let `replica` sum its gradients packed: "int8", or "powersgd", which sends factors of rank 4
    (https://arxiv.org/abs/1905.13727) once the first 10 steps are over."""
    if gradients == "int8":
        replica.register_comm_hook(PackedBuckets(), _packed_bucket)
    else:
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
        replica.register_comm_hook(state, _power_sgd_bucket)
