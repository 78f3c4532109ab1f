"""Samples in memory, as programs have them: batches of a loader become tensors by the names of inputs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from penjing.core.errors import ConfigError, InputError
from penjing.core.graph.config import GraphConfig
from penjing.core.progress import plural

Data = str | os.PathLike[str] | Mapping[str, Tensor] | Iterable[Any]
"""Samples: what `data.source` of a recipe names; or tensors by the names of inputs, a row a sample, or the tensor of a
single input; or batches. A batch is a tensor, a list of tensors in the order of the network's inputs, with or without
labels behind them, or tensors by name."""
SAMPLES = 2048  # of batches that are given, to look at; the rest is not read
LEARNT = 2 << 30  # bytes of batches that are given, to learn from
BATCH_SIZE = 64  # of an update, where batches do not say it
LABELS = "labels"


def gathered(data: Mapping[str, Tensor] | Iterable[Any], config: GraphConfig, most: int = SAMPLES) -> dict[str, Tensor]:
    """Tensors as they are, or at most `most` rows of batches, by the names of inputs; labels under "labels".

    Raises:
        InputError: nothing, or batches that are no tensors or of another number.
    """
    names = [spec.name for spec in config.inputs]
    found: list[dict[str, Tensor]] = []
    rows = 0
    if isinstance(data, Mapping | Tensor):
        return {name: value.contiguous() for name, value in _named(data, names).items()}
    for batch in _batches(data):
        found.append(_named(batch, names))
        rows += len(next(iter(found[-1].values())))
        if rows >= most:
            break
    unlike = any(_kinds(each) != _kinds(found[0]) for each in found)
    if not rows or unlike:
        said = "gives unlike batches" if unlike else "gives no batches"
        raise InputError(f"data {said}; each needs tensors for {', '.join(names)}, of one shape but for their rows")
    return {name: torch.cat([each[name] for each in found])[:most].contiguous() for name in found[0]}


@dataclass(frozen=True)
class Lesson:
    """How much is learnt.

    Attributes:
        rows: samples that were given; 0 of a file or a folder, which is not counted.
        batch_size: samples of an update.
        steps: updates.
    """

    rows: int
    batch_size: int
    steps: int

    @property
    def settings(self) -> dict[str, int]:
        """Those of the step."""
        return {"batch_size": self.batch_size, "steps": self.steps}


def lesson(
    data: Data | None, config: GraphConfig, epochs: float, batch_size: int | None, steps: int | None
) -> tuple[Data | None, Lesson]:
    """The samples to learn from, tensors by name where they were given in memory, and how much is learnt of them.

    Args:
        data: None for what the recipe names.
        batch_size: None for that of the first batch, or else 64.
        steps: None for as many as `epochs` of the samples make.

    Raises:
        ConfigError: a number that cannot be, or steps that nobody tells.
        InputError: see `gathered`.
    """
    if batch_size is not None and (not isinstance(batch_size, Integral) or batch_size < 1):
        raise ConfigError(f"batch_size={batch_size!r} must be a whole number above 0")
    if not isinstance(epochs, Real) or not 0 < epochs < math.inf:
        raise ConfigError(f"epochs={epochs!r} must be a number above 0")
    if data is None or isinstance(data, str | os.PathLike):
        if steps is None:
            where = "the samples" if data is None else f"the samples of data={os.fspath(data)!r}"
            raise ConfigError(f"{where} are not counted; give steps=N, the number of updates")
        return data, Lesson(0, batch_size or BATCH_SIZE, steps)
    found, first = to_learn(data, config)
    rows = rows_of(found)
    size = min(first, rows) if batch_size is None else int(batch_size)
    return found, Lesson(rows, size, max(1, math.ceil(float(epochs) * rows / size)) if steps is None else steps)


def to_learn(data: Mapping[str, Tensor] | Iterable[Any], config: GraphConfig) -> tuple[dict[str, Tensor], int]:
    """All of `data`, of batches as much as `LEARNT` bytes hold; and how many samples of it one update takes."""
    if isinstance(data, Mapping | Tensor):
        return gathered(data, config), BATCH_SIZE
    names = [spec.name for spec in config.inputs]
    batches = _batches(data)
    first = next((batch for batch in batches if rows_of(_named(batch, names))), None)
    if first is None:
        return gathered((), config), BATCH_SIZE
    shown = gathered([first], config)
    size = sum(value[0].numel() * value.element_size() for value in shown.values())
    return gathered(chain([first], batches), config, max(SAMPLES, LEARNT // max(size, 1))), rows_of(shown)


def _batches(data: Iterable[Any]) -> Iterator[Any]:
    if not isinstance(data, Iterable):
        raise InputError(
            f"data is {type(data).__name__}; give a folder or file, tensors by the names of inputs, or batches of them"
        )
    return iter(data)


def _kinds(batch: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """What batches that are joined have alike."""
    return {name: (value.dtype, value.shape[1:]) for name, value in batch.items()}


def rows_of(values: Mapping[str, Tensor]) -> int:
    return len(next(iter(values.values())))


def check_inputs(inputs: Sequence[Any], config: GraphConfig) -> None:
    """Raises InputError unless these are tensors of the inputs' types and shapes; an axis with a name has one size."""
    takes = f"the network takes {', '.join(map(str, config.inputs))}"
    if len(inputs) != len(config.inputs):
        raise InputError(f"{plural(len(inputs), 'input')} given, {takes}")
    sizes: dict[int | str, int] = {}
    for spec, value in zip(config.inputs, inputs, strict=True):
        if not isinstance(value, Tensor):
            raise InputError(f"{spec.name} was given as {type(value).__name__}, which is no tensor; {takes}")
        given = str(value.dtype).removeprefix("torch.")
        wanted = [
            sizes.setdefault(axis, size) if isinstance(axis, str) else axis
            for axis, size in zip(spec.shape, value.shape, strict=False)
        ]
        if given != spec.dtype or value.dim() != len(spec.shape) or wanted != list(value.shape):
            raise InputError(f"{spec.name} was given as {given}[{', '.join(map(str, value.shape))}], {takes}")


def _named(batch: Any, names: list[str]) -> dict[str, Tensor]:
    if isinstance(batch, Mapping):
        given = {name: batch[name] for name in (*names, LABELS) if name in batch}
    else:
        values = [batch] if isinstance(batch, Tensor) else list(batch)
        given = dict(zip([*names, LABELS], values, strict=False)) if len(values) <= len(names) + 1 else {}
    are_rows = all(isinstance(value, Tensor) and value.dim() for value in given.values())
    if any(name not in given for name in names) or not are_rows:
        raise InputError(
            f"a batch of data is {type(batch).__name__} that does not fit; give a tensor for each of "
            f"{', '.join(names)}, in order or by name, and labels behind them if there are any"
        )
    return {name: value.detach().cpu() for name, value in given.items()}
