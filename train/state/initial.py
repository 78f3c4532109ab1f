"""The weights that a run begins with: every process fills only what it holds, with the numbers that one process would
have.

A model is built without data, split and shared, and only then given memory, so that no process ever holds more than its
part and the tensor that is just being read.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint
from penjing.core.errors import InputError
from penjing.train.state.state import check_finite, fill, named_parameters

_BLOCK = 1 << 16  # numbers drawn at once: 256 KiB


class Values(Protocol):
    """A tensor that is made or read a part at a time."""

    def __getitem__(self, region: tuple[slice, ...], /) -> torch.Tensor: ...


Weights = Callable[[str, tuple[int, ...]], Values]  # (a parameter's name in the whole model, its shape) → its values


class Normal:
    """Normal numbers, float32, of deviation `std`; a number depends on `seed`, `name` and its place alone.

    Blocks of rows come from a counter-based generator (Philox: Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3", 2011), whose key is seed and name and whose counter is the block.

    Args:
        shape: of the whole tensor, two dimensions or more.
    """

    def __init__(self, shape: tuple[int, ...], std: float, seed: int, name: str) -> None:
        self._inner, self._std = shape[1:], std
        self._key = [seed % (1 << 64), int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")]
        self._rows = max(_BLOCK // max(math.prod(self._inner), 1), 1)  # of a block

    def __getitem__(self, region: tuple[slice, ...], /) -> torch.Tensor:
        wanted, inner = region[0], region[1:]
        result = torch.empty([part.stop - part.start for part in region])
        for block in range(wanted.start // self._rows, -(-wanted.stop // self._rows)):
            begin = block * self._rows
            first, last = max(wanted.start - begin, 0), min(wanted.stop - begin, self._rows)
            part = torch.from_numpy(self._draw(block, last))[(slice(first, last), *inner)]
            result[begin + first - wanted.start : begin + last - wanted.start] = part
        return result.mul_(self._std)

    def _draw(self, block: int, rows: int) -> np.ndarray:
        """The first `rows` of a block."""
        generator = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, block, 0]))
        return generator.standard_normal((rows, *self._inner), dtype=np.float32)


class Constant:
    """One value everywhere, float32."""

    def __init__(self, value: float) -> None:
        self._value = value

    def __getitem__(self, region: tuple[slice, ...], /) -> torch.Tensor:
        return torch.full([part.stop - part.start for part in region], self._value)


class Given:
    """A tensor that is there as a whole."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def __getitem__(self, region: tuple[slice, ...], /) -> torch.Tensor:
        return self._values[region]


class _Stored:
    """A tensor of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, name: str, origin: str) -> None:
        self._checkpoint, self._name, self._origin = checkpoint, name, origin

    def __getitem__(self, region: tuple[slice, ...], /) -> torch.Tensor:
        values = self._checkpoint.get(self._name)[region]
        check_finite({self._name: values}, self._origin)
        return values


def decoder_weights(std: float, num_layers: int, seed: int) -> Weights:
    """Normal weights of deviation `std`; those that add to the residual are divided by sqrt(2 × layers), as in GPT-2.
    What sums a few tokens of one channel (`conv.taps`) keeps its size. Norms are one, biases zero."""

    def weights(name: str, shape: tuple[int, ...]) -> Values:
        if len(shape) < 2:
            return Constant(0.0 if name.endswith("bias") else 1.0)
        if name.endswith("conv.taps.weight"):
            return Normal(shape, shape[-1] ** -0.5, seed, name)
        into_residual = name.endswith(("o_proj.weight", "conv.out_proj.weight", "down_proj.weight"))
        return Normal(shape, std / math.sqrt(2 * num_layers) if into_residual else std, seed, name)

    return weights


def checkpoint_weights(folder: Path, role: str = "initial", *, quantized: bool = False) -> Weights:
    """The weights of a checkpoint, opened when the first is wanted; `role` is what messages call it.

    Args:
        quantized: of an artifact too, as they are stored.

    Raises:
        InputError: from what is returned: a tensor is missing, of another shape, or not finite; or the checkpoint is
            quantized, and is not to be.
    """

    @functools.cache
    def opened() -> Checkpoint:
        checkpoint = open_checkpoint(folder)
        if checkpoint.quantization is not None and not quantized:
            raise InputError(f"{role} = {folder} is quantized; take the checkpoint that it was made from")
        return checkpoint

    def weights(name: str, shape: tuple[int, ...]) -> Values:
        if opened().shape(name) != shape:
            raise InputError(
                f"{role} = {folder}: {name} has shape {opened().shape(name)}, this model's is {shape}; "
                "make [model] equal to its config.json"
            )
        return _Stored(opened(), name, f"{role} = {folder}")

    return weights


def fill_weights(model: nn.Module, weights: Weights) -> None:
    """Give every parameter of `model`, or this process's part of it, its values; buffers stay as they are."""
    for name, parameter in named_parameters(model):
        fill(parameter, weights(name, tuple(parameter.shape)))


@contextmanager
def without_data() -> Iterator[None]:
    """Modules made inside have parameters without memory, on the meta device; buffers are made as ever."""

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # a tied one stays the same
            return parameter
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(on_meta)  # pyright: ignore[reportArgumentType]  # it may return one
    try:
        yield
    finally:
        hook.remove()


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give the parameters of `model` that were made `without_data`, or this process's parts of them, memory on
    `device`, not yet filled; move everything else there."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    # Parameters stay the same objects: tied ones stay tied, and FSDP knows them.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
