"""AdamW whose two means lie in memory in 8 bits: a quarter of AdamW's state.

Each block of 256 values has its largest magnitude as scale; a value is the nearest of 256 numbers that lie closer the
smaller they are, over seven powers of ten (Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
https://arxiv.org/abs/2110.02861). The arithmetic of an update is float32. As in the paper, small tensors and embeddings
keep float32 means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BLOCK = 256
SMALLEST = 4096  # elements; below it a tensor's state is not worth packing, and its vectors are the sensitive ones
_DECADES = 7


def levels(signed: bool) -> Tensor:
    """The 256 numbers that 8 bits stand for, in rising order: of −1 … 1 when `signed`, else of 0 … 1.

    Each power of ten from 1e-6 to 1 has twice as many numbers as the one below, evenly spread from a tenth of it to it.
    """
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        scale = 10.0 ** (decade - _DECADES + 1)
        found += [scale * (0.1 + 0.9 * (place + 0.5) / count) for place in range(count)]
    if signed:
        found += [-value for value in found if 0 < value < 1]
    return torch.tensor(sorted(found))


@dataclass
class Packed:
    """A tensor in 8 bits. `codes`: uint8 [blocks, 256], places in `levels`; `scales`: float32 [blocks, 1],
    the largest in magnitude of each block."""

    codes: Tensor
    scales: Tensor
    shape: torch.Size
    signed: bool

    @classmethod
    def of(cls, values: Tensor, signed: bool) -> Packed:
        """The nearest that 8 bits can say to `values`, float32 of any shape; a packed tensor is packed to itself."""
        flat = values.reshape(-1)
        blocks = nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        # The largest with its sign: 1 is a level and -1 is none, so that what was packed once packs to itself.
        scales = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
        table = levels(signed).to(values.device)
        shares = blocks / torch.where(scales == 0, 1.0, scales)
        codes = torch.bucketize(shares, (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8)
        return cls(codes, scales, values.shape, signed)

    def unpack(self) -> Tensor:
        """float32 of the shape that was packed."""
        values = levels(self.signed).to(self.codes.device)[self.codes.int()] * self.scales
        return values.view(-1)[: self.shape.numel()].view(self.shape)


class AdamW8bit(torch.optim.Optimizer):
    """torch.optim.AdamW's update; groups say with `"packed"` whether their means are kept in 8 bits."""

    def __init__(
        self, groups: list[dict[str, Any]], learning_rate: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": learning_rate, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        """Update all parameters that have gradients."""
        assert closure is None, "losses are computed by the loop"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter)

    def _update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        weight, gradient = _local(parameter), _local(parameter.grad).float()
        state = self.state[parameter]
        steps = state.setdefault("step", torch.tensor(0.0))
        steps += 1
        means = [_unpacked(state.get(name), weight) for name in ("exp_avg", "exp_avg_sq")]
        mean, squares = means
        (first, second), rate = group["betas"], group["lr"]
        mean.lerp_(gradient, 1 - first)
        squares.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = squares.sqrt().div_((1 - second ** steps.item()) ** 0.5).add_(group["eps"])
        weight.mul_(1 - rate * group["weight_decay"])
        weight.addcdiv_(mean, root, value=-rate / (1 - first ** steps.item()))
        small = not group["packed"] or weight.numel() < SMALLEST
        for name, value in zip(("exp_avg", "exp_avg_sq"), means, strict=True):
            state[name] = spread(value, parameter) if small else Packed.of(value, signed=name == "exp_avg")


def spread(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """`value`, this process's part of a state, as a tensor that is spread over processes as its parameter is."""
    if not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(
        value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def _unpacked(value: Any, weight: Tensor) -> Tensor:
    if value is None:
        return torch.zeros_like(weight, dtype=torch.float32)
    return value.unpack() if isinstance(value, Packed) else _local(value)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
