"""Removing units: weights, statistics and optimizer state lose the same slices, modules know their new sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penjing.compress.prune.graph import Group, Place
from penjing.core.errors import InputError

Selection = Sequence[tuple[Group, Sequence[int]]]  # units, by their place in the group, that go


@dataclass(frozen=True)
class Cut:
    """What stays of one tensor: indices for each dimension that gets shorter."""

    kept: dict[int, Tensor]

    def of(self, tensor: Tensor) -> Tensor:
        """What stays of `tensor`, contiguous."""
        for dim, indices in self.kept.items():
            tensor = tensor.index_select(dim, indices.to(tensor.device))
        return tensor.contiguous()

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what stays of a tensor of `shape`."""
        return tuple(self.kept[dim].numel() if dim in self.kept else size for dim, size in enumerate(shape))


def cuts_of(selection: Selection, shapes: Mapping[str, Sequence[int]]) -> dict[str, Cut]:
    """For each tensor that loses something, what stays of it.

    Args:
        shapes: of all tensors by name, statistics too.

    Raises:
        InputError: a dimension would vanish.
    """
    gone: dict[Place, list[np.ndarray]] = defaultdict(list)
    for group, units in selection:
        for unit in units:
            for place, indices in zip(group.places, group.units[unit], strict=True):
                gone[place].append(indices)
    cuts: dict[str, Cut] = defaultdict(lambda: Cut({}))
    for place, indices in gone.items():
        size = shapes[place.tensor][place.dim]
        stays = np.setdiff1d(np.arange(size), np.concatenate(indices))
        if not stays.size:
            raise InputError(
                f"{place.tensor} would lose all {size} of its dimension {place.dim}; remove less of it, or protect it"
            )
        cuts[place.tensor].kept[place.dim] = torch.from_numpy(stays)
    return dict(cuts)


def remove(model: nn.Module, selection: Selection, optimizer: Optimizer | None = None) -> None:
    """Take the selected units out of `model`, in place.

    The dtype, device, `requires_grad` and ties of the parameters stay. With `optimizer`, its parameters and their state
    (momenta of the parameter's shape) are sliced alike, so that training goes on.

    Raises:
        InputError: a dimension would vanish.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors: dict[str, Tensor] = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    named = cuts_of(selection, {name: tensor.shape for name, tensor in tensors.items()})
    cuts = {id(tensors[name]): cut for name, cut in named.items()}
    _replace(model, tensors, parameters, cuts, optimizer)
    for module in model.modules():
        _resize(module)


def mask(model: nn.Module, selection: Selection) -> None:
    """Set what `remove` would take to zero, in place: the same function in the old shape, up to norms over channels."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for group, units in selection:
            for unit in units:
                for place, indices in zip(group.places, group.units[unit], strict=True):
                    tensors[place.tensor].index_fill_(place.dim, torch.from_numpy(indices), 0)


def _replace(
    model: nn.Module,
    tensors: dict[str, Tensor],
    parameters: dict[str, nn.Parameter],
    cuts: dict[int, Cut],
    optimizer: Optimizer | None,
) -> None:
    made: dict[int, Tensor] = {}  # one new tensor for all names of a tied one
    for name, old in tensors.items():
        if (cut := cuts.get(id(old))) is None:
            continue
        if id(old) not in made:
            new = cut.of(old.detach())
            made[id(old)] = nn.Parameter(new, old.requires_grad) if name in parameters else new
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, made[id(old)])
    if optimizer is not None:
        _slice_optimizer(optimizer, cuts, made)


def _slice_optimizer(optimizer: Optimizer, cuts: dict[int, Cut], made: dict[int, Tensor]) -> None:
    for group in optimizer.param_groups:
        for index, old in enumerate(group["params"]):
            if id(old) not in made:
                continue
            new, cut = made[id(old)], cuts[id(old)]
            group["params"][index] = new
            if (state := optimizer.state.pop(old, None)) is not None:
                optimizer.state[new] = {
                    key: cut.of(value) if isinstance(value, Tensor) and value.shape == old.shape else value
                    for key, value in state.items()
                }


def _resize(module: nn.Module) -> None:
    """Sizes that torch's modules keep beside their weights."""
    if isinstance(module, nn.modules.conv._ConvNd):
        transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
        first, second = module.weight.shape[:2]
        if module.groups == module.in_channels > 1 and not transposed:  # depthwise: a group for each input
            module.groups = first * module.groups // module.out_channels
        module.in_channels = first if transposed else second * module.groups
        module.out_channels = second * module.groups if transposed else first
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = module.weight.shape[1]
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        if module.running_mean is not None:
            module.num_features = module.running_mean.numel()
        elif module.weight is not None:
            module.num_features = module.weight.numel()
    elif isinstance(module, nn.LayerNorm) and module.elementwise_affine:
        module.normalized_shape = tuple(module.weight.shape)
    elif isinstance(module, nn.GroupNorm) and module.affine:
        module.num_channels = module.weight.numel()
