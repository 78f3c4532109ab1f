"""Budgets: what a pruned network would cost, counted or timed, before it is made."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from penjing.compress.measure.skeleton import count_macs
from penjing.compress.prune.ranking import MAX_SHARE, Choice, meet
from penjing.compress.prune.subject import Shapes, Subject, shapes_of
from penjing.compress.prune.surgery import cuts_of
from penjing.core.config import Config
from penjing.core.errors import ConfigError
from penjing.core.progress import Progress
from penjing.core.runtime.timing import interleaved

RUNS = 9  # passes of each network, in turns
TIMED_IMAGES, TIMED_WINDOWS = 16, 1
LATENCY_STEPS, LATENCY_TOLERANCE = 7, 0.02  # a median of 9 repeats to about 2 %
LATENCY_MORE = 0.05  # of the units, where a latency that was measured once is not met again


class Budget(Config):
    """One quantity that the pruned network may have: below 1 as a part of what the given network has, else in
    absolute numbers (`latency`: milliseconds)."""

    parameters: float | None = Field(default=None, gt=0, description="Parameters.")
    macs: float | None = Field(default=None, gt=0, description="Multiply-accumulates for one image or token.")
    bytes: float | None = Field(default=None, gt=0, description="Bytes of all tensors as they are stored.")
    latency: float | None = Field(default=None, gt=0, description="Time of a forward pass on the CPU.")

    @model_validator(mode="after")
    def _one(self) -> Budget:
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            raise ValueError(f"name one of parameters, macs, bytes, latency (got {', '.join(given) or 'none'})")
        return self

    def quantity(self) -> tuple[str, float]:
        """Its name and number."""
        return next((name, value) for name, value in self if value is not None)


def sizes(subject: Subject, model: nn.Module, shapes: Shapes) -> dict[str, int]:
    """`parameters`, `bytes` of all tensors as they are stored, and `macs` for one image or token."""
    found = count_macs(model, subject.example)
    macs = found["Global"] if "Global" in found else sum(found.values())  # of a graph, those of each node
    stored = model.state_dict()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(prod(shape) * subject.item_bytes(name) for name, shape in shapes.items() if name in stored),
        "macs": macs // subject.inputs,
    }


def shapes_after(subject: Subject, choice: Choice) -> dict[str, tuple[int, ...]]:
    """Of every tensor when the chosen units are gone."""
    shapes = shapes_of(subject.model)
    cuts = cuts_of(choice, shapes)
    return {name: cuts[name].shape(shape) if name in cuts else shape for name, shape in shapes.items()}


def candidate(subject: Subject, choice: Choice) -> nn.Module:
    """The network without the chosen units, without storage."""
    with torch.device("meta"):
        return subject.build(subject.config_of(shapes_after(subject, choice), choice))


def share_for(
    target: Budget,
    subject: Subject,
    choose: Callable[[float], Choice],
    inputs: tuple[Tensor, ...] | None,
    progress: Progress,
) -> float:
    """The smallest share of units that meets `target`.

    Args:
        choose: share → units.
        inputs: what the networks are timed on; only a latency needs it.

    Raises:
        ConfigError: an absolute target that the network meets as it is.
        InputError: no share reaches it.
    """
    name, value = target.quantity()
    progress.start(f"searching the share for {name}", 1)
    if name == "latency":
        assert inputs is not None
        part = value if value < 1 else value / 1e3 / latency(subject.dense, subject.dense, inputs)["dense_s"]
        _check_below(name, value, part)

        def timed(share: float) -> float:
            return latency(subject.dense, candidate(subject, choose(share)), inputs)["ratio"]

        share = meet(part, timed, steps=LATENCY_STEPS, tolerance=LATENCY_TOLERANCE)
        # One lucky measurement ends the search: what it found is measured again, and more leaves where it was luck.
        while timed(share) > part + LATENCY_TOLERANCE and share < MAX_SHARE:
            share = min(MAX_SHARE, share + LATENCY_MORE)
        return share
    whole = sizes(subject, subject.dense, _dense_shapes(subject))[name]
    part = value if value < 1 else value / whole
    _check_below(name, value, part)

    def counted(share: float) -> float:
        choice = choose(share)
        return sizes(subject, candidate(subject, choice), shapes_after(subject, choice))[name] / whole

    return meet(part, counted)


def dense_sizes(subject: Subject) -> dict[str, int]:
    """`sizes` of the network as it was given."""
    return sizes(subject, subject.dense, _dense_shapes(subject))


def latency(dense: nn.Module, pruned: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """Median seconds of a forward pass of both, timed in turns on the CPU with torch's present threads.

    Args:
        dense, pruned: only their shapes matter: they are filled with one small number.
        inputs: images (B, C, H, W) or tokens (B, T), of which the first 16 images or the first window are taken, or
            several tensors, which are taken whole.
    """
    if len(inputs) == 1:
        inputs = (inputs[0][: TIMED_WINDOWS if inputs[0].dim() == 2 else TIMED_IMAGES],)
    networks = (_filled(dense), _filled(pruned))
    with torch.inference_mode():
        times = interleaved([partial(network, *inputs) for network in networks], rounds=RUNS, seconds=0.0)
    dense_s, pruned_s = map(statistics.median, times)
    return {"dense_s": dense_s, "pruned_s": pruned_s, "ratio": pruned_s / dense_s, "inputs": list(inputs[0].shape)}


def latency_met(target: Budget, found: dict[str, Any]) -> bool:
    """Whether `found` (see `latency`) is within the tolerance of the target's latency."""
    assert target.latency is not None
    asked = target.latency if target.latency < 1 else target.latency / 1e3 / found["dense_s"]
    return found["ratio"] <= asked + LATENCY_TOLERANCE


def _filled(model: nn.Module) -> nn.Module:
    """A copy with storage, whose activations neither overflow nor vanish."""
    copied = copy.deepcopy(model).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*copied.parameters(), *copied.buffers()):
            tensor.fill_(1e-3 if tensor.is_floating_point() else 0)
    return copied.eval()


def _dense_shapes(subject: Subject) -> Shapes:
    return shapes_of(subject.dense)


def _check_below(name: str, value: float, part: float) -> None:
    if part >= 1:
        raise ConfigError(f"target.{name}={value:g} is not below what the network has already; aim lower")
