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

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from penjing.train.parallel.compressed import compress_fsdp
from penjing.train.recompute import blocks


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, zero: int, *, packed: bool = False) -> None:
    """Share `model`'s parameters over `mesh`, a block at a time; parameters become DTensors.

    Args:
        mesh: (shards) or (copies, shards).
        zero: see the module.
        packed: gradients travel in 8 bits.
    """
    # The loss is computed from a model's output out of place, as the warning asks.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
    for part in getattr(model, "parts", [model]):  # a pipeline calls each of its stages
        for block in blocks(part).values():
            fully_shard(block, mesh=mesh, reshard_after_forward=zero == 3)
        # The root's own parameters (embedding, head) are needed again as soon as the backward pass begins.
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if packed:
                compress_fsdp(module)
