"""Data parallelism and ZeRO by FSDP2 (`fully_shard`), applied to a model from outside.

zero   parameters between uses   gradients reduced      optimiser state
0      whole                     after the last         whole
1      whole within a step       after the last         a shard
2      whole within a step       every micro-batch      a shard
3      a shard                   every micro-batch      a shard

Gradients are summed, never averaged: the loop has divided the loss by the tokens of the whole world. That takes a
divide factor of 1 *and* plain sums, since the default premultiplies, which gloo refuses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from penjing.core.errors import SetupError
from penjing.core.models.moe import Experts
from penjing.train.numerics.recompute import blocks
from penjing.train.processes.compressed import compress_fsdp


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    zero: int,
    *,
    experts: DeviceMesh | None = None,
    packed: bool = False,
    copies: dist.ProcessGroup | None = None,
) -> None:
    """Share `model`'s parameters over `mesh`, a block at a time; parameters become DTensors.

    Args:
        mesh: (shards) or (copies, shards).
        experts: the same for the routed experts, where fewer processes have each.
        zero: see the module.
        packed: gradients travel in 8 bits.
        copies: the processes that these gradients are summed over, where `mesh` is of one process.
    """
    # The loss is computed from a model's output out of place, as the warning asks.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
    place = None if experts is None else _placement(model, experts)
    for part in getattr(model, "parts", [model]):  # a pipeline calls each of its stages
        for block in blocks(part).values():
            fully_shard(block, mesh=mesh, reshard_after_forward=zero == 3, shard_placement_fn=place)
        # The root's own parameters (embedding, head) are needed again as soon as the backward pass begins.
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if packed:
                compress_fsdp(module, copies)


@torch.no_grad()
def gather_in(model: nn.Module, formats: Mapping[nn.Module, torch.dtype]) -> None:
    """Collect the parameters of `model`'s blocks in the format that they are read in: half the bytes on the wire and in
    memory, and the same bits, since whoever reads them would round them so. Call it between steps, in all processes.

    FSDP's own policy has one format a module and rounds norms along; here each parameter has its own, and a collective
    takes both. Gradients are summed in the format of the sharded parameters, as autocast's are. What is the root's own
    (embedding, last norm, head) stays as it is: the loss on a GPU sums the head's gradient in float32.

    Torch before 2.12 groups parameters otherwise: there all are collected as they are.

    Args:
        formats: modules whose parameters are read in 16 bits alone; all others are collected as they are.
    """
    if not isinstance(model, FSDPModule):
        return
    model._get_fsdp_state()._lazy_init()  # it would undo what is set before
    for module in model.modules():
        if not isinstance(module, FSDPModule) or module is model:
            continue
        module.reshard()
        for group in getattr(module._get_fsdp_state(), "_fsdp_param_groups", ()):
            changed = [
                parameter for parameter in group.fsdp_params if parameter.param_dtype != _wanted(parameter, formats)
            ]
            for parameter in changed:
                parameter.param_dtype = _wanted(parameter, formats)
                parameter.all_gather_outputs = []
                if hasattr(parameter, "_unsharded_param"):
                    del parameter._unsharded_param
            if changed:
                # Once here, for there to be something to tell the gradient's format. `module.unshard` would begin with
                # the format of FSDP's policy again.
                group.unshard()
                group.wait_for_unshard()
                for parameter in changed:
                    parameter._unsharded_param.grad_dtype = parameter.orig_dtype
        module.reshard()


def _wanted(parameter: Any, formats: Mapping[nn.Module, torch.dtype]) -> torch.dtype | None:
    """What FSDP's `parameter` is to be collected in: the one format of all that read it, or None, as it is."""
    place = parameter._module_info
    found = {formats.get(reader) for reader in (place.module, *place.shared_modules)}
    return found.pop() if len(found) == 1 else None


def _placement(model: nn.Module, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """What tells `fully_shard` to share routed experts over `mesh`. The experts have no FSDP module of their own: one
    inside a block would gather in the middle of what is recomputed.

    Raises:
        SetupError: torch before 2.12 has one mesh a block.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
    except ImportError as error:
        raise SetupError(
            f"parallel.ep above 1 needs torch 2.12 or newer, this is {torch.__version__}; set parallel.ep = 1"
        ) from error
    routed = {
        parameter for module in model.modules() if isinstance(module, Experts) for parameter in module.parameters()
    }
    info = FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return lambda parameter: ShardPlacementResult(None, info) if parameter in routed else None
