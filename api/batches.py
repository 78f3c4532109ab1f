"""Samples in memory, as programs have them: batches of a loader become tensors by the names of inputs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from penjing.core.errors import InputError
from penjing.core.graph.config import GraphConfig

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
    for batch in data:
        found.append(_named(batch, names))
        rows += len(next(iter(found[-1].values())))
        if rows >= most:
            break
    if not rows or any(each.keys() != found[0].keys() for each in found):
        raise InputError(f"data gives no batches, or unlike ones; each needs tensors for {', '.join(names)}")
    return {name: torch.cat([each[name] for each in found])[:most].contiguous() for name in found[0]}


def to_learn(data: Mapping[str, Tensor] | Iterable[Any], config: GraphConfig) -> tuple[dict[str, Tensor], int]:
    """All of `data`, of batches as much as `LEARNT` bytes hold; and how many samples of it one update takes."""
    if isinstance(data, Mapping | Tensor):
        return gathered(data, config), BATCH_SIZE
    names = [spec.name for spec in config.inputs]
    batches = iter(data)
    first = next((batch for batch in batches if rows_of(_named(batch, names))), None)
    if first is None:
        return gathered((), config), BATCH_SIZE
    shown = gathered([first], config)
    size = sum(value[0].numel() * value.element_size() for value in shown.values())
    return gathered(chain([first], batches), config, max(SAMPLES, LEARNT // max(size, 1))), rows_of(shown)


def rows_of(values: Mapping[str, Tensor]) -> int:
    return len(next(iter(values.values())))


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
