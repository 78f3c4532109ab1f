"""The state of a model, and a tree of state ⇄ one dictionary of tensors and one JSON value: no pickle anywhere.

The JSON keeps the shape of the tree; a tensor is replaced in it by {"tensor": its name in the dictionary}.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from penjing.core.errors import InputError

Tree = Any  # nested dict (string keys) / list / tuple of tensors, numbers, strings, booleans and None


def split_tree(tree: Tree) -> tuple[dict[str, torch.Tensor], Any]:
    """Tensors by path, and the JSON value of the rest.

    Raises:
        TypeError: a value that is neither.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _split(tree, "", tensors)


def join_tree(tensors: dict[str, torch.Tensor], plain: Any) -> Tree:
    """Undo `split_tree`; tuples come back as lists.

    Raises:
        InputError: a tensor that the JSON names is not there.
    """
    if isinstance(plain, dict):
        if set(plain) == {"tensor"}:
            if plain["tensor"] not in tensors:
                raise InputError(f"the saved state lacks the tensor {plain['tensor']!r}; it is damaged")
            return tensors[plain["tensor"]]
        return {key: join_tree(tensors, value) for key, value in plain.items()}
    return [join_tree(tensors, value) for value in plain] if isinstance(plain, list) else plain


def snapshot(tree: Tree) -> Tree:
    """A copy of `tree` on the CPU that later changes of its tensors do not reach."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True).contiguous()
    if isinstance(tree, dict):
        return {key: snapshot(value) for key, value in tree.items()}
    return [snapshot(value) for value in tree] if isinstance(tree, list | tuple) else tree


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of `model` under the names of the whole model: stages of a pipeline have a table of them."""
    names: dict[str, str] = getattr(model, "names", {})
    for name, parameter in model.named_parameters():
        yield names.get(name, name), parameter


def model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name → every parameter (tied ones once) and every persistent buffer."""
    parameters = dict(named_parameters(model))
    kept = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**parameters, **buffers}


@torch.no_grad()
def fill(tensor: torch.Tensor, saved: Any) -> None:
    """Copy into `tensor`, or this process's part of it, what `saved` (a tensor, or a `SavedTensor`) has there."""
    local, region = local_part(tensor)
    local.copy_(saved[region])


def load_model_state(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Copy `state` into the tensors of `model`.

    Raises:
        InputError: another model: names the first tensor that is missing, extra, or of another shape.
    """
    tensors = model_state(model)
    different = tensors.keys() - state.keys() if is_part(model) else tensors.keys() ^ state.keys()
    for name in sorted(different):
        where = "lacks" if name in tensors else "has"
        raise InputError(
            f"the checkpoint {where} the tensor {name!r}, unlike this model; it is of another model: check [model]"
        )
    for name, tensor in tensors.items():
        if tensor.shape != tuple(state[name].shape):
            raise InputError(
                f"the checkpoint's {name!r} has shape {tuple(state[name].shape)}, this model's {tuple(tensor.shape)}; "
                "it is of another model: check [model]"
            )
        fill(tensor, state[name])


def is_part(model: nn.Module) -> bool:
    """Whether `model` is a part of a model: a stage of a pipeline, or without the experts of other processes."""
    return getattr(model, "is_part", False)


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """What this process holds of `tensor`, sharing its memory, and where that lies in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    local = tensor.to_local()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(local.shape) == tuple(shape)
    return local, tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))


def first_to_hold(tensor: torch.Tensor) -> bool:
    """Whether this process is the first of those that hold the same part of `tensor`."""
    if not isinstance(tensor, DTensor):
        return True
    place = tensor.device_mesh.get_coordinate()
    assert place is not None
    return all(
        index == 0 or not placement.is_replicate() for index, placement in zip(place, tensor.placements, strict=True)
    )


def check_finite(state: Mapping[str, torch.Tensor], origin: str) -> None:
    """Refuse weights that training could only spread.

    Raises:
        InputError: `origin` holds NaN or infinity; names the tensor.
    """
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise InputError(f"{origin}: {name} holds NaN or infinity; get or make the checkpoint again")


def _split(tree: Tree, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        tensors[path] = tree
        return {"tensor": path}
    if isinstance(tree, dict):
        assert all(isinstance(key, str) for key in tree), f"{path}: keys must be strings"
        return {key: _split(value, f"{path}/{key}" if path else key, tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_split(value, f"{path}/{index}", tensors) for index, value in enumerate(tree)]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"{path}: a {type(tree).__name__} cannot be saved")
