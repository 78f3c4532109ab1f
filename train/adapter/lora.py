"""LoRA (https://arxiv.org/abs/2106.09685): beside each frozen matrix W two small ones learn, W + (alpha / rank) B A.

Applied from outside: a chosen linear layer becomes an `AdaptedLinear` with `lora_A` and `lora_B` under it, whose names
are those of PEFT. B begins at zero, so that the network begins as it was, in every bit.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from penjing.core.config import Config
from penjing.core.errors import ConfigError
from penjing.train.adapter.int8 import FrozenInt8
from penjing.train.state.initial import Constant, Normal, Values, Weights

_PARTS = ("lora_A", "lora_B")


class AdapterConfig(Config):
    """Small matrices that learn beside frozen ones (LoRA); the checkpoint is exported merged, the adapter beside it."""

    rank: int = Field(default=16, ge=1, description="Columns of the first small matrix, rows of the second.")
    alpha: float = Field(default=32.0, gt=0, description="Their product is multiplied by alpha / rank.")
    targets: tuple[str, ...] = Field(
        default=("*_proj",), min_length=1, description="Patterns of names of the linear layers that get an adapter."
    )
    base: Literal["float", "int8"] = Field(
        default="float",
        description='In what the frozen network lies: as it is stored, or in "int8" (QLoRA), where its linear layers '
        "round as a served artifact does. An artifact keeps its own integers, a checkpoint is rounded as it is read.",
    )
    initial: Path | None = Field(
        default=None, description="A folder with an adapter in the format of PEFT that the run begins with."
    )

    @property
    def scale(self) -> float:
        """Of the product."""
        return self.alpha / self.rank


class Adapted(nn.Module):
    """What an adapter makes of a linear layer, which comes behind it among the bases."""

    lora_A: nn.Linear  # noqa: N815 (PEFT's names)
    lora_B: nn.Linear  # noqa: N815
    scale: float

    def forward(self, input: Tensor) -> Tensor:
        """The layer's own output and (alpha / rank) B A x."""
        return super().forward(input) + self.scale * self.lora_B(self.lora_A(input))


class AdaptedLinear(Adapted, nn.Linear):
    """A linear layer and the two small ones beside it."""


class AdaptedInt8(Adapted, FrozenInt8):
    """A frozen layer in INT8 and the two small ones beside it."""


_ADAPTED: Mapping[type[nn.Module], type[Adapted]] = {nn.Linear: AdaptedLinear, FrozenInt8: AdaptedInt8}


def adapt(model: nn.Module, config: AdapterConfig) -> None:
    """Freeze `model` and put an adapter beside each linear layer that a pattern matches.

    Raises:
        ConfigError: a pattern matches none; the rank is no smaller than a layer; or a layer shares its weight, which
            another part of the network would see changed when the adapter is merged.
    """
    every = ((name, module) for name, module in model.named_modules() if type(module) in _ADAPTED)
    linears = {name: module for name, module in every if ".token." not in name}  # beside which none is served
    for pattern in config.targets:
        if not fnmatch.filter(linears, pattern):
            names = ", ".join(list(linears)[:4])
            raise ConfigError(f"adapter.targets: {pattern!r} matches no linear layer; they are called {names} …")
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
        parameter.requires_grad_(False)
    for name, linear in linears.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in config.targets):
            continue
        assert isinstance(linear, nn.Linear | FrozenInt8)
        if config.rank >= min(linear.weight.shape):
            raise ConfigError(
                f"adapter.rank={config.rank} is no smaller than {name}, which is {tuple(linear.weight.shape)}; lower it"
            )
        if len(shared := owners[id(linear.weight)]) > 1:
            raise ConfigError(f"adapter.targets: {' and '.join(shared)} are one matrix; leave {name} out")
        first = nn.Linear(linear.in_features, config.rank, bias=False)
        second = nn.Linear(config.rank, linear.out_features, bias=False)
        linear.__class__ = _ADAPTED[type(linear)]  # pyright: ignore[reportAttributeAccessIssue]  # a subclass of its own
        assert isinstance(linear, Adapted)
        linear.lora_A, linear.lora_B, linear.scale = first, second, config.scale


def adapted_weights(base: Weights, seed: int, known: Mapping[str, Tensor] | None = None) -> Weights:
    """The weights of an adapted network: those of `base`, A as wide as PEFT draws it, and B zero; or both as `known`
    has them."""

    def weights(name: str, shape: tuple[int, ...]) -> Values:
        part = name.split(".")[-2] if name.count(".") else ""
        if part not in _PARTS:
            return base(name, shape)
        if known is not None:
            return known[name]
        return Normal(shape, (3 * shape[1]) ** -0.5, seed, name) if part == "lora_A" else Constant(0.0)

    return weights


def check_adapter(known: Mapping[str, Tensor], model: nn.Module) -> None:
    """Refuse tensors that are not the adapter of `model`, whose parameters may be without data: all of it, and no more.

    Raises:
        ConfigError: names a tensor.
    """
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name.split(".")[-2] in _PARTS}
    if missing := sorted(shapes.keys() - known.keys()):
        raise ConfigError(f"adapter.initial has no {missing[0]}; set adapter.targets to its own")
    if more := sorted(known.keys() - shapes.keys()):
        raise ConfigError(
            f"adapter.initial also has {more[0]}, which would be left out; set adapter.targets to its own, or give an "
            "adapter of this network"
        )
    for name, shape in shapes.items():
        if tuple(known[name].shape) != shape:
            raise ConfigError(
                f"adapter.initial has {name} of shape {tuple(known[name].shape)}, beside this network it is {shape}; "
                "give an adapter of this network"
            )


@torch.no_grad()
def merge(name: str, tensor: Tensor, parameters: Mapping[str, Tensor], scale: float) -> Tensor:
    """`tensor`, the matrix or vector `name` of a network, with the product of its adapter among `parameters` added, in
    float32; the same tensor where it has none."""
    owner, _, leaf = name.rpartition(".")
    first, second = (parameters.get(f"{owner}.{part}.weight") for part in _PARTS)
    if leaf != "weight" or first is None or second is None:
        return tensor
    return tensor + scale * (second @ first)


def merged(parameters: Mapping[str, Tensor], scale: float) -> Iterator[tuple[str, Tensor]]:
    """(Name, tensor) of the network without adapters, each as `merge` makes it when it is asked for."""
    for name, tensor in parameters.items():
        if name.rpartition(".")[0].rpartition(".")[2] not in _PARTS:
            yield name, merge(name, tensor, parameters, scale)
