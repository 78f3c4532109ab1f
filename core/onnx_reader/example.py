"""Inputs that show an ONNX network: their types, shapes and axes that may differ, and values that fit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor

from penjing.core.errors import InputError
from penjing.core.onnx_reader.values import DTYPES

LENGTHS = (16, 64, 128, 256, 512, 1024, 4)
"""Lengths that are tried, in this order, for axes that may differ."""
SIDES = (224, 48, 256, 320, 640, 64, 32)
"""The same for height and width of images."""

LARGEST = 1 << 29
"""Most numbers of one input of an example: 2 GB of float32."""


@dataclass(frozen=True)
class Input:
    """An input as the file declares it; None stands for an axis whose size is not fixed."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | None, ...]
    names: dict[int, str]

    @property
    def is_image(self) -> bool:
        """Whether it looks like images: four axes, of which one has the channels."""
        return len(self.shape) == 4 and self.dtype.is_floating_point and bool({1, 3} & {self.shape[1], self.shape[3]})


def inputs_of(model: ir.Model, path: str, shapes: Mapping[str, tuple[int, ...]]) -> list[Input]:
    """The inputs of the file.

    Args:
        shapes: what the user says: it wins where the file leaves an axis open, or says nothing.

    Raises:
        InputError: no tensor, of a type that networks do not compute with, of unknown rank, or of other sizes than
            the user says.
    """
    found = []
    for value in model.graph.inputs:
        name = str(value.name)
        if name in model.graph.initializers:
            continue
        dtype = DTYPES.get(value.dtype) if value.dtype is not None else None
        if not isinstance(value.type, ir.TensorType) or dtype is None:
            kind = value.dtype.name.lower() if value.dtype is not None else type(value.type).__name__
            raise InputError(f"{path}: the input {name} is {kind}; penjing takes tensors of numbers")
        given = shapes.get(name)
        if value.shape is None:
            if given is None:
                raise InputError(
                    f"{path}: the input {name} has no shape, not even a number of axes; say it with "
                    f"--input {name}:1x3x224x224"
                )
            declared: list[int | None] = list(given)
            names: dict[int, str] = {}
        else:
            declared = [size if isinstance(size, int) and size >= 0 else None for size in value.shape]
            names = {axis: _name(value.shape[axis], name, axis) for axis, size in enumerate(declared) if size is None}
        if given is not None and (
            len(given) != len(declared)
            or any(size not in (None, wanted) for size, wanted in zip(declared, given, strict=True))
        ):
            said = "x".join("?" if size is None else str(size) for size in declared)
            raise InputError(f"{path}: --input {name}:{'x'.join(map(str, given))} does not fit {said} of the file")
        found.append(Input(name, dtype, tuple(declared), names))
    if not found:
        raise InputError(f"{path} has no inputs, so there is nothing to compress")
    if odd := sorted(set(shapes) - {one.name for one in found}):
        raise InputError(f"{path} has no input {odd[0]!r}; its inputs are {', '.join(one.name for one in found)}")
    return found


def _name(size: int | ir.SymbolicDim, name: str, axis: int) -> str:
    said = str(getattr(size, "value", "") or "")
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,40}", said) and not said.startswith(("unk__", "None", "dynamic")):
        return said
    return "batch" if axis == 0 else f"{re.sub(r'[^A-Za-z0-9_]', '_', name)}_{axis}"


def candidates(inputs: list[Input], given: Mapping[str, tuple[int, ...]], batch: int) -> Iterator[dict[str, Tensor]]:
    """Examples to try in turn, until one suits the network; axes of one name have one size."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for place in range(max(len(LENGTHS), len(SIDES))):
        sizes: dict[str, int] = {}
        for one in inputs:
            for axis, name in one.names.items():
                if axis == 0 or name == "batch":
                    sizes.setdefault(name, batch)
                choice = SIDES if one.is_image else LENGTHS
                sizes.setdefault(name, choice[place % len(choice)])
        for one in inputs:
            for axis, name in one.names.items():
                if one.name in given:
                    sizes[name] = given[one.name][axis]
        shapes = tuple(
            tuple(sizes[one.names[axis]] if size is None else size for axis, size in enumerate(one.shape))
            for one in inputs
        )
        if shapes not in seen:
            seen.add(shapes)
            yield {one.name: values_for(one, shape) for one, shape in zip(inputs, shapes, strict=True)}


def check_size(name: str, shape: Sequence[int]) -> None:
    """Refuse an example of more than `LARGEST` numbers.

    Raises:
        InputError: it has more.
    """
    if math.prod(shape) > LARGEST:
        raise InputError(
            f"the input {name[:200]} of {'x'.join(map(str, shape))} has more than {LARGEST:,} numbers; say a smaller "
            f"example with --input, or export the network with one"
        )


def values_for(one: Input, shape: tuple[int, ...]) -> Tensor:
    """Numbers of the normal distribution; ids from 0 to 9; ones for a mask.

    Raises:
        InputError: more than `LARGEST` of them.
    """
    check_size(one.name, shape)
    generator = torch.Generator().manual_seed(0)
    if one.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(one.dtype)
    if "mask" in one.name or one.dtype is torch.bool:
        return torch.ones(shape, dtype=one.dtype)
    high = 2 if "type" in one.name or "segment" in one.name else 10
    return torch.randint(high, shape, generator=generator).to(one.dtype)
