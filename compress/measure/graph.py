"""How near the outputs of a graph are to those of the network that a run began with, and what is timed of it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penjing.compress.measure.bootstrap import interval, resampled_means
from penjing.compress.measure.cost import Calls, Case, MeasureSettings
from penjing.compress.measure.evaluate import EvaluateSettings, Part, Quality
from penjing.core.checkpoint.graph import load_network
from penjing.core.errors import InputError
from penjing.core.graph.config import graph_config
from penjing.core.graph.network import Network

Answer = Callable[..., tuple[Tensor, ...]]
"""Inputs → outputs, in the order of the graph's configuration."""


def rows_of(outputs: Sequence[Tensor], samples: int) -> Tensor:
    """Every floating output of each sample as one row, (samples, numbers) float64; other outputs are no directions.

    Raises:
        InputError: none is floating, or one holds NaN or infinity.
    """
    floating = [output for output in outputs if output.is_floating_point()]
    if not floating:
        raise InputError("no output of the network is floating point, so that outputs have no distance")
    rows = torch.cat([output.reshape(samples, -1).to(torch.float64) for output in floating], 1)
    if not bool(torch.isfinite(rows).all()):
        raise InputError("the network computes NaN or infinity: it is damaged, or its training diverged")
    return rows


def output_similarity(before: Tensor, after: Tensor, classes: int, settings: EvaluateSettings) -> Quality:
    """The mean cosine of each sample's outputs to those of the network that the run began with.

    Args:
        before, after: of `rows_of`, (N, numbers).
        classes: how many numbers at the front of a row are those of classes, whose largest is the choice; 0: none are.
    """
    cosines = torch.nn.functional.cosine_similarity(before, after, dim=1).numpy()
    cosines = np.where((before == after).all(1).numpy(), 1.0, cosines)  # rows of zeros too
    parts: tuple[Part, ...] = ()
    if classes:
        same = before[:, :classes].argmax(1) == after[:, :classes].argmax(1)
        parts = (Part("class unchanged", float(same.double().mean()), len(cosines)),)
    low, high = interval(resampled_means([cosines], resamples=settings.resamples, seed=settings.seed))
    record = base64.b64encode(cosines.astype(np.float32).tobytes()).decode()
    return Quality("similarity", float(cosines.mean()), low, high, len(cosines), parts, record)


def graph_calls(folders: Sequence[Path], settings: MeasureSettings) -> Calls:
    """Graphs in torch, on their examples: as many samples as `settings.batches` say where axis 0 is the batch.

    Raises:
        InputError: a folder is damaged.
    """
    networks = {index: load_network(folder) for index, folder in enumerate(folders)}
    batched = all(graph_config(folder).batched for folder in folders)
    calls: Calls = {}
    for batch in settings.batches if batched else (1,):
        name = f"batch {batch}" if batched else "example"
        calls[Case("torch", name, batch, "samples")] = {
            index: partial(network, *(_batch(network, batch) if batched else network.inputs()))
            for index, network in networks.items()
        }
    return calls


def _batch(network: Network, size: int) -> tuple[Tensor, ...]:
    rows = torch.arange(size)
    return tuple(value[rows % len(value)] for value in network.inputs())
