"""Sensitivity of any graph: its answers beside those of the whole network, in which one part is pruned or rounded.

No classes are needed: a cell's `value` is the mean cosine of a sample's outputs to the whole network's, its `loss`
their squared error relative to their size, and its `agreement`, where the first output has classes, how often the
largest stays. Pruned units are zero, which differs from their removal where a norm runs over them. Rounded are weights
of convolutions and linear layers, one symmetric scale an output channel, batch norms folded into them as in the
artifact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from penjing.compress.graph.place import products
from penjing.compress.graph.prepare import prepared
from penjing.compress.measure.graph import scores_of
from penjing.compress.prune.graph import dependency_graph
from penjing.compress.prune_graph.subject import GraphSubject
from penjing.compress.samples.graph import ExampleData, source_data
from penjing.compress.sensitivity.bits import BASELINE, Widths, round_rows
from penjing.compress.sensitivity.pruning import Ratios, pruning_study
from penjing.compress.sensitivity.study import Study, cut
from penjing.core.checkpoint.graph import load_network
from penjing.core.config import Config
from penjing.core.errors import InputError
from penjing.core.graph.network import Network, tensor_at
from penjing.core.progress import Progress
from penjing.core.work import WorkFolder
from penjing.train.sources.open import fingerprint
from penjing.train.sources.settings import SourceSettings

HELD_OUT = 0.1  # of the source, as by default everywhere
BATCH = 32


class GraphSamples(Config):
    """On what a graph is judged."""

    source: str | None = Field(
        default=None, description="Samples, as data.source of a recipe; none given: the example of the network."
    )
    images: int = Field(default=128, ge=1, description="Samples that the network is judged on.")


class GraphPruning(Ratios, GraphSamples):
    """What is removed from a graph, and on what it is judged then."""


class GraphBits(Widths, GraphSamples):
    """How far layers of a graph are rounded, and on what it is judged then."""


@dataclass(frozen=True)
class Judged:
    """Batches of inputs, and what the whole network answers."""

    batches: list[tuple[Tensor, ...]]
    answers: list[tuple[Tensor, ...]]
    batched: bool

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, Any]:
        """`value`, `loss`, `samples` and perhaps `agreement`; an answer that is no number is the worst of all."""
        sums: dict[str, float] = {}
        samples = 0
        for inputs, before in zip(self.batches, self.answers, strict=True):
            after = model(*inputs)
            if not all(bool(each.isfinite().all()) for each in after if each.is_floating_point()):
                return {"value": 0.0, "loss": cut(torch.nan), "samples": self._count()}
            found = scores_of(before, after, None, self.batched)
            samples += len(found["similarity"])
            for name, values in found.items():
                sums[name] = sums.get(name, 0.0) + float(values.sum())
        means = {name: value / samples for name, value in sums.items()}
        agreement = {"agreement": means["agreement"]} if "agreement" in means else {}
        return {"value": means["similarity"], "loss": cut(means["error"]), "samples": samples} | agreement

    def _count(self) -> int:
        return sum(len(inputs[0]) if self.batched else 1 for inputs in self.batches)


def judged(folder: Path, network: Network, settings: Any, progress: Progress) -> Judged:
    """The samples that `settings`, a `GraphSamples` with `data`, name.

    Raises:
        InputError: they do not fit the network, or it answers NaN or infinity.
    """
    batches = list(ExampleData(network).inputs())
    if settings.source is not None:
        split = "test" if settings.data == "held-out" else "train"
        said = _unlabelled(settings.source)
        batches = list(source_data(folder, said, HELD_OUT, split, settings.images, BATCH, progress).inputs())
    with torch.no_grad():
        answers = [network(*inputs) for inputs in batches]
    for outputs in answers:
        if not all(bool(each.isfinite().all()) for each in outputs if each.is_floating_point()):
            raise InputError(f"{folder} answers NaN or infinity: it is damaged, or its training diverged")
    return Judged(batches, answers, network.config.batched)


def named_files(settings: GraphPruning | GraphBits) -> dict[str, dict[str, str]]:
    """See `Measure.files`."""
    return {} if settings.source is None else {"source": fingerprint(_unlabelled(settings.source))}


def _unlabelled(source: str) -> SourceSettings:
    """No classes are needed, and what is no class is no matter."""
    return SourceSettings(source=source, labels=False)


def to_pruning(folder: Path, settings: GraphPruning, work: WorkFolder, progress: Progress) -> Study:
    """See `Measure.open`."""
    subject = GraphSubject(folder, progress)
    progress.start("analysing the network", 1)
    groups = subject.parts(dependency_graph(subject.model, subject.example).groups)["channels"]
    judge = judged(folder, load_network(folder), settings, progress)
    return pruning_study(subject, groups, judge, "similarity", settings, work)


def to_bits(folder: Path, settings: GraphBits, work: WorkFolder, progress: Progress) -> Study:
    """See `Measure.open`."""
    network = prepared(load_network(folder))
    judge = judged(folder, network, settings, progress)
    layers = {each.name: str(each.weight.target) for each in products(network)}
    if not layers:
        raise InputError(f"{folder}: there is no convolution or linear layer with constant weights")
    baseline = work.run(BASELINE, lambda: judge(network.module)).result

    def cell(name: str, bits: int) -> dict[str, Any]:
        with weight_rounded(network, layers[name], bits):
            found = judge(network.module)
        return {key: value for key, value in found.items() if key != "samples"}

    sizes = {name: tensor_at(network.module, weight).numel() for name, weight in layers.items()}
    return Study("similarity", baseline, sizes, settings.widths, cell, {})


@contextmanager
def weight_rounded(network: Network, weight: str, bits: int) -> Iterator[None]:
    """Inside the block the weight has `bits`, one scale an output channel; afterwards every bit is as before."""
    value = tensor_at(network.module, weight).detach()  # the same memory
    before = value.clone()
    try:
        value.copy_(round_rows(before.flatten(1), bits).view_as(before))
        yield
    finally:
        value.copy_(before)
