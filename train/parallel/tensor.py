"""Tensor parallelism of a decoder (Megatron-LM, https://arxiv.org/abs/1909.08053) with torch's plans, and sequence
parallelism (https://arxiv.org/abs/2205.05198).

Heads and the MLP's inner features are split: q, k, v, gate and up by columns, o and down by rows, one sum after each.
The embedding and the head are split by vocabulary; the loss of tokens takes the logits as they are, a part in each
process, and whoever else wants them gets all. Experts are split as an MLP is: all processes route alike, each has a
part of every expert's inner features, and one sum comes after all experts. With `sequence`, what lies between (norms,
residuals) holds a part of the tokens in each process: the sum becomes a reduce-scatter, and an all-gather comes before
the next products. Modules keep computing on local tensors, so that attention and kernels need not know.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from penjing.core.models.decoder import DecoderLayer
from penjing.core.models.mlp import MLP
from penjing.core.models.moe import MoE
from penjing.train.numerics.gradients import gradients_of
from penjing.train.objective.cross_entropy import wants_parts


class SplitHead(nn.Linear):
    """A head whose weight is split: what fuses it with the loss must leave it alone."""


class SplitLinear(nn.Linear):
    """A product of plain tensors with this process's part of a weight: an expert's, which no collective surrounds."""

    is_product = True  # see precision.py

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(rows, in) → (rows, out); either of them may be a part."""
        weight = self.weight
        return F.linear(input, weight.to_local() if isinstance(weight, DTensor) else weight)


class Columns(ColwiseParallel):
    """A layer split by its outputs; of the small matrices beside it the first is in every process, the second split."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _split(module, device_mesh, Replicate() if name == "lora_A" else Shard(0))


class Rows(RowwiseParallel):
    """A layer split by its inputs; of the small matrices beside it the first is split, the second in every process."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _split(module, device_mesh, Replicate() if name == "lora_B" else Shard(1))


def _split(module: nn.Module, mesh: DeviceMesh, placement: Shard | Replicate) -> None:
    """Share the weight of `module` alone, and its bias where there are outputs to split."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = placement if name == "weight" or placement == Shard(0) else Replicate()
        made = distribute_tensor(parameter, mesh, [part])
        module.register_parameter(name, nn.Parameter(made, requires_grad=parameter.requires_grad))


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False, experts: DeviceMesh | None = None
) -> tuple[list[str], list[str]]:
    """Split the decoder `model` (or a stage of one) over the one-dimensional `mesh`.

    Args:
        experts: the same processes, of the mesh that FSDP shares routed experts over, where that is another.

    Returns:
        Names of the parameters whose gradients are partial in each process, to be summed over `mesh` by `sum_partial`
        at the end of a step: norms of heads, and with `sequence` all norms; and names of those whose whole gradient
        every process has.
    """
    between = Shard(1) if sequence else Replicate()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, DecoderLayer):
            _split_layer(layer, mesh, between, experts or mesh)
        elif name.rpartition(".")[2] == "embed_tokens":
            parallelize_module(layer, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=between))
        elif name.rpartition(".")[2] == "lm_head":
            layer.__class__ = SplitHead
            parts = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
            parallelize_module(layer, mesh, parts)
            layer.register_forward_hook(lambda module, inputs, output: output if wants_parts() else _whole(output))
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.register_forward_hook(lambda module, inputs, output: _arrived_output(output))
    for module in model.modules():  # a decoder that sees has its decoder inside
        if hasattr(module, "tie_weights"):
            module.tie_weights()  # pyright: ignore[reportCallIssue]
    norms = ("norm.weight",) if sequence else ("q_norm.weight", "k_norm.weight")
    whole = [name for name, parameter in model.named_parameters() if _is_whole(parameter)]
    partial = [name for name in whole if name.endswith(norms)]
    return partial, [name for name in whole if name not in partial]


def _is_whole(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, DTensor) or all(placement.is_replicate() for placement in parameter.placements)


def _split_layer(layer: DecoderLayer, mesh: DeviceMesh, between: Shard | Replicate, experts: DeviceMesh) -> None:
    attention = layer.self_attn
    # One gather before the products of one input, and one reduction of their input gradients.
    parallelize_module(
        attention,
        mesh,
        {
            "q_proj": Columns(),
            "k_proj": Columns(),
            "v_proj": Columns(),
            "g_proj": Columns(),
            "o_proj": Rows(output_layouts=between),
        },
    )
    attention.register_forward_pre_hook(_arrived)
    gather = {"input_layouts": (between, None, None, None), "desired_input_layouts": (Replicate(), None, None, None)}
    parallelize_module(attention, mesh, PrepareModuleInput(**gather))
    if isinstance(layer.mlp, MoE):
        _split_experts(layer.mlp, mesh, between, experts)
    else:
        _split_mlp(layer.mlp, mesh, between)


def _split_mlp(mlp: MLP, mesh: DeviceMesh, between: Shard | Replicate) -> None:
    parallelize_module(
        mlp,
        mesh,
        {
            "gate_proj": Columns(),
            "up_proj": Columns(),
            "down_proj": Rows(output_layouts=between),
        },
    )
    mlp.register_forward_pre_hook(_arrived)
    parallelize_module(mlp, mesh, PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)))


def _split_experts(moe: MoE, mesh: DeviceMesh, between: Shard | Replicate, experts: DeviceMesh) -> None:
    group = mesh.get_group()
    for index in moe.experts.here:
        for name, dimension in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            linear = moe.experts[index].get_submodule(name)
            linear.__class__ = SplitLinear
            split = distribute_tensor(linear.get_parameter("weight"), experts, [Shard(dimension)])
            linear.weight = nn.Parameter(split)

    def enter(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        # The same in all, each of which sees a part of its gradient.
        x_TE, weight_TK, expert_TK = inputs
        weight_TK = weight_TK.to(torch.promote_types(weight_TK.dtype, x_TE.dtype))
        return _Same.apply(x_TE, group), _Same.apply(weight_TK, group), expert_TK

    moe.experts.register_forward_pre_hook(enter)
    moe.experts.register_forward_hook(lambda module, inputs, output: _Sum.apply(output, group))
    if moe.config.shared_expert_intermediate_size:
        _split_mlp(moe.shared_experts, mesh, Replicate())
    if between != Replicate():  # routing wants whole tokens, so each process has all of them
        gather = PrepareModuleInput(
            input_layouts=(between,), desired_input_layouts=(Replicate(),), use_local_output=True
        )
        parallelize_module(moe, mesh, gather)
        parallelize_module(
            moe, mesh, PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(between,))
        )
        moe.register_forward_pre_hook(_arrived)


@torch.no_grad()
def sum_partial(model: nn.Module, names: list[str], group: dist.ProcessGroup, factor: float = 1.0) -> None:
    """Sum the gradients of the parameters `names` over `group`, times `factor`, in place; all together in one
    exchange."""
    parameters = dict(model.named_parameters())  # FSDP has put others in the place of those that were split
    shards = gradients_of(parameters[name] for name in names)
    if not shards:
        return
    flat = torch.cat([shard.flatten() for shard in shards])
    dist.all_reduce(flat, group=group)
    flat *= factor
    for shard, total in zip(shards, flat.split([shard.numel() for shard in shards]), strict=True):
        shard.copy_(total.view_as(shard))


class _Same(torch.autograd.Function):
    """`x`, the same in every process of a group, each of which finds a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return wait_tensor(all_reduce(gradients[0].contiguous(), "sum", ctx.group)), None


class _Sum(torch.autograd.Function):
    """The sum of `x` over a group; each process's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return wait_tensor(all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0], None


class _Arrived(torch.autograd.Function):
    """What a collective has delivered, as a plain tensor, forward and backward: torch hands out tensors that wait when
    torch uses them, and our kernels would read them before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _wait(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _wait(gradients[0])


def _arrived(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return _Arrived.apply(inputs[0]), *inputs[1:]


def _arrived_output(output: Any) -> Any:
    return output if isinstance(output, DTensor) else _Arrived.apply(output)


def _whole(logits: DTensor) -> torch.Tensor:
    """All logits, which every process has then."""
    return logits.redistribute(placements=[Replicate()]).to_local()


def _wait(x: torch.Tensor) -> torch.Tensor:
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x.view_as(x)
