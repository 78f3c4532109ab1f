"""The gradients that a process holds: their norm, and a factor on them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients that exist: of a sharded parameter, this process's shard."""
    gradients = (parameter.grad for parameter in parameters)
    return [
        gradient.to_local() if isinstance(gradient, DTensor) else gradient
        for gradient in gradients
        if gradient is not None
    ]


def global_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm of all gradients together: a float32 (or wider) scalar, NaN or infinite as soon as one element
    is."""
    norm = nn.utils.get_total_norm(gradients, foreach=True)
    return norm.to(torch.promote_types(norm.dtype, torch.float32))


@torch.no_grad()
def scale_gradients(gradients: list[torch.Tensor], factor: float) -> None:
    """Multiply all gradients by `factor`, in place; nothing is touched when it is 1."""
    if factor != 1.0:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
