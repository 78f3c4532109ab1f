"""Optimisers with weight-decay groups; their state under the parameters' names; averaged weights."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.distributed.tensor import DTensor

from penjing.core.config import Config
from penjing.core.errors import ConfigError, InputError
from penjing.train.optim.adamw_8bit import AdamW8bit, Packed, spread
from penjing.train.optim.muon import MuonWithAdamW, takes_muon
from penjing.train.state.state import fill, is_part, named_parameters

FACTOR = "factor"  # of a group's learning rate, in the optimiser's groups


class RateGroup(Config):
    """Parameters with a learning rate of their own."""

    match: str = Field(description="A pattern of names of parameters, such as 'lm_head.*'.")
    factor: float = Field(ge=0, description="Their learning rate is so many times that of the others.")


class OptimizerConfig(Config):
    """Defaults of AdamW (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101) as used for language models."""

    name: Literal["adamw", "adamw8bit", "sgd", "muon"] = Field(
        default="adamw",
        description='AdamW; "adamw8bit": AdamW with its means in 8 bits; SGD with momentum; or "muon": Muon for the '
        "matrices inside a network, AdamW for all else.",
    )
    not_8bit: tuple[str, ...] = Field(
        default=("*embed*",),
        description="Patterns of names of parameters whose means adamw8bit keeps in 32 bits, as those of small ones.",
    )
    not_muon: tuple[str, ...] = Field(
        default=("*embed*", "*lm_head*", "fc.*", "*.gate.*", "*_gate.*"),
        description="Patterns of names of matrices that Muon leaves to AdamW: embeddings, last layers, routers.",
    )
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="Weights of the past in AdamW's means of gradients and of their squares."
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to AdamW's root mean square, so that it is never 0.")
    weight_decay: float = Field(
        default=0.1, ge=0, description="Times the learning rate, the share of a weight that goes away in a step."
    )
    no_decay: tuple[str, ...] = Field(
        default=(), description="Patterns of names of parameters that do not decay, besides all norms and biases."
    )
    groups: tuple[RateGroup, ...] = Field(
        default=(), description="Parameters with learning rates of their own; the later one wins."
    )
    momentum: float = Field(
        default=0.9, ge=0, lt=1, description="Weight of the past in SGD's and Muon's means of gradients."
    )
    nesterov: bool = Field(default=True, description="SGD and Muon look ahead, as Nesterov's momentum does.")
    fused: bool = Field(default=True, description="One kernel updates many parameters at once.")


def build_optimizer(model: nn.Module, config: OptimizerConfig, learning_rate: float = 1e-3) -> torch.optim.Optimizer:
    """An optimiser over the trainable parameters of `model`: matrices decay, vectors and `no_decay` patterns do not."""
    # torch updates a group at a time, and wants its parameters split alike.
    groups: dict[tuple[bool, bool, bool, float, Any], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in named_parameters(model):
        if parameter.requires_grad:
            plain = parameter.dim() >= 2 and not any(fnmatch.fnmatch(name, pattern) for pattern in config.no_decay)
            muon = config.name == "muon" and takes_muon(name, parameter, config.not_muon)
            packed = config.name == "adamw8bit" and not any(fnmatch.fnmatch(name, each) for each in config.not_8bit)
            factor = next((each.factor for each in config.groups[::-1] if fnmatch.fnmatch(name, each.match)), 1.0)
            groups[plain, muon, packed, factor, getattr(parameter, "device_mesh", None)].append(parameter)
    if not groups:
        raise InputError("the model has no trainable parameter; nothing can be trained")
    parameters: list[dict[str, Any]] = [
        {
            "params": group,
            "weight_decay": config.weight_decay if decays else 0.0,
            "muon": muon,
            "packed": packed,
            FACTOR: factor,
        }
        for (decays, muon, packed, factor, _), group in sorted(groups.items(), key=lambda item: not item[0][0])
    ]
    if config.name == "muon":
        return MuonWithAdamW(
            parameters, learning_rate, config.momentum, config.nesterov, config.betas, config.eps, config.fused
        )
    if config.name == "adamw8bit":
        return AdamW8bit(parameters, learning_rate, config.betas, config.eps)
    if config.name == "adamw":
        return torch.optim.AdamW(parameters, learning_rate, config.betas, config.eps, fused=config.fused)
    # torch has no fused SGD of sharded parameters.
    fused = config.fused and not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    nesterov = config.nesterov and config.momentum > 0
    return torch.optim.SGD(parameters, learning_rate, config.momentum, nesterov=nesterov, fused=fused)


def freeze(model: nn.Module, recipe_freeze: Sequence[str], groups: Sequence[RateGroup] = ()) -> None:
    """Let the parameters of the whole `model` whose names match a pattern of `recipe_freeze` stay as they are.

    Raises:
        ConfigError: a pattern, or one of `groups`, matches no parameter; or nothing is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    patterns = [("freeze", pattern) for pattern in recipe_freeze]
    patterns += [("optimizer.groups", group.match) for group in groups]
    for setting, pattern in patterns:
        if not fnmatch.filter(parameters, pattern):
            names = ", ".join(list(parameters)[:4])
            raise ConfigError(f"{setting}: {pattern!r} matches no parameter; they are called {names} …")
    for pattern in recipe_freeze:
        for name in fnmatch.filter(parameters, pattern):
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError("freeze: its patterns match every parameter, and nothing is left to train; leave some out")


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the rate of this step, times its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(FACTOR, 1.0)


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """Parameter name → the optimiser's tensors and numbers for it; by name, so that other layouts can load it, and
    unpacked, since blocks of 8-bit values end where another layout's do not."""
    return {
        name: {
            key: spread(value.unpack(), parameter) if isinstance(value, Packed) else value
            for key, value in optimizer.state[parameter].items()
        }
        for name, parameter in named_parameters(model)
        if parameter in optimizer.state
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, dict[str, Any]]) -> None:
    """Undo `optimizer_state`; tensors are moved to their parameter's device.

    Raises:
        InputError: state of a parameter that the model does not have.
    """
    parameters = dict(named_parameters(model))
    for name, values in state.items():
        if name not in parameters and is_part(model):
            continue
        if name not in parameters:
            raise InputError(f"the saved optimiser state has {name!r}, which this model lacks; it is of another model")
        parameter = parameters[name]
        # Adam's step counter lives on the CPU unless the optimiser is fused on another device: both layouts load.
        optimizer.state[parameter] = {
            key: _loaded(value, parameter) if hasattr(value, "shape") else value for key, value in values.items()
        }


class AveragedWeights:
    """Exponential moving average of the trainable weights, after each update: average += (1 - decay) × (weight -
    average)."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._live = {name: parameter for name, parameter in named_parameters(model) if parameter.requires_grad}
        self._average = {name: parameter.detach().clone() for name, parameter in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights as they are now."""
        averages = [_local(average) for average in self._average.values()]
        weights = [_local(weight) for weight in self._live.values()]
        torch._foreach_lerp_(averages, weights, 1.0 - self.decay)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the model's weights and the average; a second call undoes the first."""
        for name, parameter in self._live.items():
            kept = parameter.detach().clone()
            parameter.copy_(self._average[name])
            self._average[name].copy_(kept)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Name → average, for a checkpoint."""
        return dict(self._average)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Undo `state_dict`, once the weights are there: the average of one that was frozen before begins with it."""
        for name, average in self._average.items():
            if name in state:
                fill(average, state[name])
            else:
                _local(average).copy_(_local(self._live[name]))


def _loaded(saved: Any, parameter: nn.Parameter) -> torch.Tensor:
    """What was saved of a parameter's state: spread and laid out in memory as the parameter is, which fused optimisers
    take for granted, unless it is a number."""
    if tuple(saved.shape) != tuple(parameter.shape):
        return saved[tuple(slice(0, size) for size in saved.shape)].to(parameter.device)
    tensor = torch.zeros_like(parameter.detach())
    fill(tensor, saved)
    return tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
