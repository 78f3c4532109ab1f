"""What passes between operators, and one operator with what it reads.

A value is a tensor; a `Constant` of the file; or a `Host`: sizes and what is computed from them, which Python holds, so
that a reshape to (batch, -1) stays symbolic when the network is traced.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, fx, nn

from penjing.core.errors import InputError
from penjing.core.graph.network import set_tensor, tensor_at

Size = Any  # an int, or torch's symbol for one
DTYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.BOOL: torch.bool,
}
HOST_SIZE = 4096
"""How many numbers of a constant Python may hold: shapes, pads, indices."""
LARGE = 1e4
"""What masks add to scores is larger; what is trained is not."""


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that does not depend on inputs.

    Attributes:
        numbers: the same for Python, if there are not too many.
        masks: whether it holds values that only say what is left out.
    """

    name: str
    tensor: Tensor
    numbers: np.ndarray | None = field(init=False)
    masks: bool = field(init=False)

    def __post_init__(self) -> None:  # now, because nothing can be read from tensors while a network is traced
        numbers = None
        if self.tensor.numel() <= HOST_SIZE:
            numbers = np.empty(tuple(self.tensor.shape), dtype=object)
            if self.tensor.numel():  # the list of an empty tensor has lost its shape
                numbers[...] = self.tensor.tolist()
        object.__setattr__(self, "numbers", numbers)
        object.__setattr__(
            self, "masks", bool((self.tensor.abs() >= LARGE).any()) if self.tensor.is_floating_point() else False
        )


@dataclass(frozen=True, eq=False)
class Host:
    """Numbers that Python holds; `array` is of objects (ints, floats, bools, torch's symbols)."""

    array: np.ndarray
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """The same as a tensor."""
        values = self.array.reshape(-1).tolist()
        if all(isinstance(value, (bool, int, float)) for value in values):
            return torch.tensor(self.array.tolist(), dtype=self.dtype).reshape(self.array.shape)
        parts = [torch.scalar_tensor(value, dtype=self.dtype) for value in values]
        return parts[0] if not self.array.ndim else torch.stack(parts).reshape(self.array.shape)


Value = Tensor | Constant | Host | None


def host(values: Any, dtype: torch.dtype = torch.int64) -> Host:
    """`values` (nested lists, a number) as a `Host`."""
    return Host(np.array(values, dtype=object), dtype)


class Weights(nn.Module):
    """The tensors of the file that a network computes with, under names that a graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[str, str], str] = {}
        self._same: dict[tuple[Any, ...], str] = {}
        self._taken: set[str] = set()
        self._trained: set[str] = set()
        self._owned: list[Tensor] = []  # so that no address is used twice

    def held(
        self, constant: Constant, trained: bool, tag: str = "", change: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """The constant, or what `change` makes of it, as a weight; `tag` names the change."""
        path = self._places.get((constant.name, tag))
        if path is None:
            value = change(constant.tensor) if change else constant.tensor
            key = (value.data_ptr() or id(value), value.dtype, tuple(value.shape), value.stride())
            path = self._same.get(key)
            if path is None:
                path = self._legal(f"{constant.name}{'_' if tag else ''}{tag}")
                set_tensor(self, path, value.contiguous())
                self._same[key] = path
                self._owned.append(value)
            self._places[constant.name, tag] = path
        value = tensor_at(self, path)
        if trained and path not in self._trained and value.is_floating_point():
            set_tensor(self, path, nn.Parameter(value))
            self._trained.add(path)
            value = tensor_at(self, path)
        return value

    def made(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A constant that an operator needs and the file does not hold, made once."""
        if (name, "made") not in self._places:
            self.held(Constant(name, make()), False, "made")
        return tensor_at(self, self._places[name, "made"])

    def _legal(self, name: str) -> str:
        parts = [re.sub(r"[^A-Za-z0-9_]", "_", part) or "_" for part in name.strip("./").split(".")]
        if any(".".join(parts[: end + 1]) in self._taken for end in range(len(parts))):
            parts = ["_".join(parts)]
        for index, part in enumerate(parts):
            odd = part.isdigit() and index == len(parts) - 1 and index == 0
            if odd or not (part.isidentifier() or part.isdigit()):
                part = f"_{part}"
            if iskeyword(part) or hasattr(fx.GraphModule, part) or part in ("graph", "training"):
                part = f"{part}_"
            parts[index] = part
        legal, number = ".".join(parts), 2
        while legal in self._taken or any(other.startswith(f"{legal}.") for other in self._taken):
            legal, number = f"{'.'.join(parts)}_{number}", number + 1
        self._taken.add(legal)
        return legal


class Call:
    """One operator of the file, with what it reads; what it computes is written against this."""

    def __init__(self, node: ir.Node, values: list[Value], version: int, weights: Weights, folding: bool) -> None:
        self.node, self.values, self.version = node, values, version
        self._weights, self._folding = weights, folding

    def __str__(self) -> str:
        return f"{self.node.op_type} {self.node.name or self.node.outputs[0].name}"

    def refused(self, why: str) -> InputError:
        """The error that says which operator cannot be computed, and why."""
        return InputError(f"the network's {self} {why}")

    def has(self, index: int) -> bool:
        """Whether the input is given."""
        return index < len(self.values) and self.values[index] is not None

    def uses(self, index: int) -> bool:
        """Whether anybody may read the output."""
        outputs = self.node.outputs
        return (
            index < len(outputs)
            and bool(outputs[index].name)
            and (bool(outputs[index].uses()) or outputs[index].is_graph_output())
        )

    def attribute(self, name: str, default: Any = None) -> Any:
        """The attribute as a number, a string, a list of them, or a tensor."""
        found = self.node.attributes.get(name)
        if found is None:
            return default
        value = found.value
        if found.type == ir.AttributeType.TENSOR:
            return to_torch(value, f"{self}.{name}")
        return list(value) if isinstance(value, (tuple, list)) else value

    def tensor(self, index: int, trained: bool = False) -> Tensor:
        """The input as a tensor."""
        value = self.values[index] if index < len(self.values) else None
        if value is None:
            raise self.refused(f"misses its input {index}")
        if isinstance(value, Host):
            return value.tensor()
        if isinstance(value, Constant):
            return value.tensor if self._folding else self._weights.held(value, trained)
        return value

    def optional(self, index: int, trained: bool = False) -> Tensor | None:
        """The input as a tensor, or None where it is left out."""
        return self.tensor(index, trained) if self.has(index) else None

    def changed(self, index: int, tag: str, change: Callable[[Tensor], Tensor], trained: bool = True) -> Tensor:
        """What `change` makes of a constant input, kept as a weight instead of it."""
        value = self.values[index]
        assert isinstance(value, Constant)
        return change(value.tensor) if self._folding else self._weights.held(value, trained, tag, change)

    def made(self, tag: str, make: Callable[[], Tensor]) -> Tensor:
        """A constant that the operator needs besides its inputs; `tag` tells it from others of the operator."""
        return make() if self._folding else self._weights.made(f"{self.node.outputs[0].name}_{tag}", make)

    def constant(self, index: int) -> Tensor | None:
        """The input where it does not depend on inputs of the network; only its shape and type may be asked."""
        value = self.values[index] if index < len(self.values) else None
        return value.tensor if isinstance(value, Constant) else None

    def is_weight(self, index: int) -> bool:
        """Whether a constant that is added or multiplied is trained: not where it masks."""
        value = self.values[index]
        return isinstance(value, Constant) and value.tensor.numel() > 1 and not value.masks

    def host(self, index: int) -> Host | None:
        """The input as numbers of Python, or None where it is computed from values of the network's inputs."""
        value = self.values[index] if index < len(self.values) else None
        if isinstance(value, Constant):
            return None if value.numbers is None else Host(value.numbers, value.tensor.dtype)
        return value if isinstance(value, Host) else None

    def sizes(self, index: int, what: str) -> list[Size]:
        """The input as a list of sizes.

        Raises:
            InputError: it depends on the values of the network's inputs.
        """
        found = self.host(index)
        if found is None:
            raise self.refused(f"takes its {what} from values that the network computes; penjing needs fixed shapes")
        return found.array.reshape(-1).tolist()

    def number(self, index: int, what: str) -> Any:
        """The input as one number."""
        values = self.sizes(index, what)
        if len(values) != 1:
            raise self.refused(f"has {len(values)} numbers as its {what}, not one")
        return values[0]

    def operand(self, index: int, trained: bool = False) -> Any:
        """The input for arithmetic: a constant of one element as a number of Python, a tensor otherwise."""
        value = self.values[index]
        if isinstance(value, Constant) and value.tensor.numel() == 1:
            others = [other for place, other in enumerate(self.values) if place != index]
            if all(isinstance(other, Tensor) and other.ndim >= value.tensor.ndim for other in others):
                return value.numbers.item()  # type: ignore[union-attr]
        if isinstance(value, Host) and not value.array.ndim:
            return value.array.item()
        return self.tensor(index, trained)

    def axes(self, index: int = 1, name: str = "axes") -> list[int] | None:
        """Axes of an attribute (older versions) or an input (newer ones); None where none are given."""
        if (found := self.attribute(name)) is not None:
            return found
        return [int(axis) for axis in self.sizes(index, name)] if self.has(index) else None


def to_torch(tensor: ir.TensorProtocol, name: str) -> Tensor:
    """The tensor of a file, in memory of its own.

    Raises:
        InputError: a type that networks do not compute with.
    """
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InputError(f"{name} is of the type {tensor.dtype.name.lower()}, which penjing does not read")
    try:
        array = np.array(tensor.numpy())
    except (ValueError, TypeError, OSError) as error:
        raise InputError(f"{name} cannot be read ({error}); get the file again") from None
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
