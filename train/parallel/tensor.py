"""Tensor parallelism of a decoder (Megatron-LM, https://arxiv.org/abs/1909.08053) with torch's plans, and sequence
parallelism (https://arxiv.org/abs/2205.05198).

Heads and the MLP's inner features are split: q, k, v, gate and up by columns, o and down by rows, one sum after each.
The embedding and the head are split by vocabulary. With `sequence`, what lies between (norms, residuals) holds a part
of the tokens in each process: the sum becomes a reduce-scatter, and an all-gather comes before the next products.
Modules keep computing on local tensors, so that attention and kernels need not know.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from penjing.core.models.decoder import DecoderLayer
from penjing.train.gradients import gradients_of


class SplitHead(nn.Linear):
    """A head whose weight is split: what fuses it with the loss must leave it alone."""


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> list[str]:
    """Split the decoder `model` (or a stage of one) over the one-dimensional `mesh`.

    Returns:
        Names of the parameters whose gradients are partial in each process, to be summed over `mesh` by `sum_partial`
        at the end of a step: norms of heads, and with `sequence` all norms.
    """
    between = Shard(1) if sequence else Replicate()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, DecoderLayer):
            _split_layer(layer, mesh, between)
        elif name.rpartition(".")[2] == "embed_tokens":
            parallelize_module(layer, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=between))
        elif name.rpartition(".")[2] == "lm_head":
            layer.__class__ = SplitHead
            parallelize_module(layer, mesh, ColwiseParallel(input_layouts=between, output_layouts=Replicate()))
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.register_forward_hook(lambda module, inputs, output: _Arrived.apply(output))
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # pyright: ignore[reportCallIssue]
    norms = ("norm.weight",) if sequence else ("q_norm.weight", "k_norm.weight")
    return [name for name, _ in model.named_parameters() if name.endswith(norms)]


def _split_layer(layer: DecoderLayer, mesh: DeviceMesh, between: Shard | Replicate) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    # One gather before the three (two) products, and one reduction of their input gradients.
    parallelize_module(
        attention,
        mesh,
        {
            "q_proj": ColwiseParallel(),
            "k_proj": ColwiseParallel(),
            "v_proj": ColwiseParallel(),
            "o_proj": RowwiseParallel(output_layouts=between),
        },
    )
    parallelize_module(
        mlp,
        mesh,
        {
            "gate_proj": ColwiseParallel(),
            "up_proj": ColwiseParallel(),
            "down_proj": RowwiseParallel(output_layouts=between),
        },
    )
    for module in (attention, mlp):
        module.register_forward_pre_hook(lambda module, inputs: (_Arrived.apply(inputs[0]), *inputs[1:]))
    gather = {"input_layouts": (between, None, None, None), "desired_input_layouts": (Replicate(), None, None, None)}
    parallelize_module(attention, mesh, PrepareModuleInput(**gather))
    parallelize_module(mlp, mesh, PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)))


@torch.no_grad()
def sum_partial(model: nn.Module, names: list[str], group: dist.ProcessGroup) -> None:
    """Sum the gradients of the parameters `names` over `group`, in place; all together in one exchange."""
    parameters = dict(model.named_parameters())  # FSDP has put others in the place of those that were split
    shards = gradients_of(parameters[name] for name in names)
    if not shards:
        return
    flat = torch.cat([shard.flatten() for shard in shards])
    dist.all_reduce(flat, group=group)
    for shard, total in zip(shards, flat.split([shard.numel() for shard in shards]), strict=True):
        shard.copy_(total.view_as(shard))


class _Arrived(torch.autograd.Function):
    """What a collective has delivered, as a plain tensor, forward and backward: torch hands out tensors that wait when
    torch uses them, and our kernels would read them before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _wait(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _wait(gradients[0])


def _wait(x: torch.Tensor) -> torch.Tensor:
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x.view_as(x)
