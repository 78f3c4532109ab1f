"""How good a graph is: by its own classes, or beside the network that a run began with; and what is timed of it."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from penjing.compress.measure.bootstrap import interval, resampled_means
from penjing.compress.measure.cost import Calls, Case, MeasureSettings
from penjing.compress.measure.evaluate import EvaluateSettings, Part, Quality, QualityName
from penjing.compress.samples.graph import source_data
from penjing.core.artifact.base import is_artifact
from penjing.core.artifact.onnx_graph import open_graph_artifact, run_graph
from penjing.core.checkpoint.graph import load_network
from penjing.core.errors import ConfigError, InputError
from penjing.core.graph.config import graph_config
from penjing.core.graph.network import Network
from penjing.core.imports.user_code import named_errors, user_function
from penjing.core.progress import Progress
from penjing.train.sources.reader import NO_CLASS

BATCH = 64
Answer = Callable[..., tuple[Tensor, ...]]
"""Inputs → outputs, in the order of the graph's configuration."""


@torch.no_grad()
def evaluate_graph(folder: Path, model: Path, settings: EvaluateSettings, progress: Progress) -> Quality:
    """The quality of a graph or its artifact by `settings.metric`, on held-out samples of the source; without a source
    beside the outputs of `model` on its own example.

    Raises:
        ConfigError: the metric needs classes, and the samples have none.
        InputError: damaged, samples that do not fit, or NaN.
    """
    first = answer_of(model)
    second = first if folder == model else answer_of(folder)
    found: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    own = user_function(settings.metric) if ".py:" in settings.metric else None
    for inputs, targets in _batches(model, settings, progress):
        before, after = first(*inputs), second(*inputs)
        for name, values in scores_of(before, after, targets, graph_config(model).batched).items():
            found[name].append(values)
        if own is not None:
            found["score"].append(_own_score(own, settings.metric, after, targets))
        progress.advance()
    every = {name: np.concatenate(parts) for name, parts in found.items()}
    metric = settings.metric if own is None else "score"
    name = _metric(metric, every)
    parts = tuple(
        Part(said, float(every[key].mean()), len(every[key]))
        for key, said in _SAID.items()
        if key in every and key != name
    )
    return quality_of(name, every[name], parts, settings)


_SAID = {
    "accuracy": "class right",
    "top5": "class among the first five",
    "agreement": "class unchanged",
    "similarity": "cosine of outputs",
    "error": "squared error of outputs, relative",
}


def quality_of(
    name: QualityName, values: NDArray[np.float64], parts: tuple[Part, ...], settings: EvaluateSettings
) -> Quality:
    """The quality that the values of each sample, (N,), amount to."""
    low, high = interval(resampled_means([values], resamples=settings.resamples, seed=settings.seed))
    bits = name in ("accuracy", "agreement")
    stored = np.packbits(values.astype(bool)).tobytes() if bits else values.astype(np.float32).tobytes()
    return Quality(name, float(values.mean()), low, high, len(values), parts, base64.b64encode(stored).decode())


def answer_of(folder: Path) -> Answer:
    """What computes the graph in `folder`: torch for a checkpoint, ONNX Runtime for an artifact.

    Raises:
        InputError: damaged.
    """
    if not is_artifact(folder):
        return load_network(folder)
    artifact = open_graph_artifact(folder)
    session = artifact.session(torch.get_num_threads())

    def answer(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = {spec.name: value.numpy() for spec, value in zip(artifact.config.inputs, inputs, strict=True)}
        found = run_graph(session, artifact.config, given)
        return tuple(torch.from_numpy(np.array(found[spec.name])) for spec in artifact.config.outputs)

    return answer


def _batches(
    model: Path, settings: EvaluateSettings, progress: Progress
) -> Iterator[tuple[tuple[Tensor, ...], Tensor | None]]:
    if settings.source is None:
        progress.start("outputs beside those of the model", 1)
        yield load_network(model).inputs(), None
        return
    data = source_data(model, settings, settings.held_out, "test", settings.images, BATCH, progress)
    progress.start("held-out samples", max(data.count // data.batch, 1))
    for inputs, targets in data.labelled():
        yield inputs, None if (targets == NO_CLASS).all() else targets


def _metric(wanted: str, found: dict[str, Any]) -> QualityName:
    if wanted == "auto":
        return "accuracy" if "accuracy" in found else "similarity"
    if wanted not in found:
        missing = "classes of the samples" if wanted == "accuracy" else "a first output of (batch, classes)"
        raise ConfigError(
            f"evaluate.metric = {wanted!r} needs {missing}, which there are none of; use 'similarity', or give "
            "evaluate.source with a folder for each class"
        )
    return wanted  # type: ignore[return-value]


def scores_of(
    before: tuple[Tensor, ...], after: tuple[Tensor, ...], targets: Tensor | None, batched: bool
) -> dict[str, NDArray[np.float64]]:
    """Of each sample: cosine and relative squared error of all outputs, and where the first has classes whether the
    largest is the same, and right."""
    samples = len(before[0]) if batched else 1
    one, other = rows_of(before, samples), rows_of(after, samples)
    cosines = F.cosine_similarity(one, other, dim=1)
    scale = one.square().sum(1)
    found = {
        "similarity": torch.where((one == other).all(1), 1.0, cosines),  # rows of zeros too
        "error": (one - other).square().sum(1) / torch.where(scale > 0, scale, 1.0),
    }
    if before[0].ndim == 2 and before[0].is_floating_point() and before[0].shape[1] > 1:
        choice = after[0].argmax(1)
        found["agreement"] = before[0].argmax(1) == choice
        if targets is not None:
            found["accuracy"] = choice == targets
            found["top5"] = (after[0].topk(min(5, after[0].shape[1]), 1).indices == targets[:, None]).any(1)
    return {name: values.to(torch.float64).numpy() for name, values in found.items()}


def _own_score(function: Any, spec: str, outputs: tuple[Tensor, ...], targets: Tensor | None) -> NDArray[np.float64]:
    with named_errors(spec):
        values = np.asarray(function(outputs, targets), np.float64)
    if values.shape != (len(outputs[0]),) or not np.isfinite(values).all():
        raise InputError(
            f"{spec} gave {values.shape} values for {len(outputs[0])} samples; it has to give one finite number for "
            "each, larger where it is better"
        )
    return values


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


def graph_calls(folders: Sequence[Path], settings: MeasureSettings) -> Calls:
    """Graphs in torch, artifacts in ONNX Runtime, on the example of the first checkpoint: as many samples as
    `settings.batches` say where axis 0 is the batch.

    Raises:
        InputError: a folder is damaged.
    """
    example = load_network(next(folder for folder in folders if not is_artifact(folder)))
    batched = all(graph_config(folder).batched for folder in folders)
    answers = {index: (answer_of(folder), is_artifact(folder)) for index, folder in enumerate(folders)}
    calls: Calls = {}
    for batch in settings.batches if batched else (1,):
        name = f"batch {batch}" if batched else "example"
        inputs = _batch(example, batch) if batched else example.inputs()
        for quantized in (False, True):
            of_case: dict[int, Callable[[], object]] = {
                index: partial(answer, *inputs) for index, (answer, kind) in answers.items() if kind is quantized
            }
            if of_case:
                calls[Case("onnxruntime" if quantized else "torch", name, batch, "samples")] = of_case
    return calls


def _batch(network: Network, size: int) -> tuple[Tensor, ...]:
    rows = torch.arange(size)
    return tuple(value[rows % len(value)] for value in network.inputs())
