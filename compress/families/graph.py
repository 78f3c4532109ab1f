"""What compression does with graphs: any network as operators."""

from __future__ import annotations

from pathlib import Path

import torch

from penjing.compress.families.base import Family
from penjing.compress.measure.evaluate import EvaluateSettings, Quality
from penjing.compress.measure.graph import graph_calls, output_similarity, rows_of
from penjing.compress.measure.skeleton import skeleton_of_graph
from penjing.compress.samples.data import DataSettings
from penjing.compress.samples.graph import ExampleData
from penjing.core.artifact.base import is_artifact
from penjing.core.checkpoint.graph import graph_skeleton, load_network
from penjing.core.errors import InputError
from penjing.core.family import FAMILIES
from penjing.core.manifest import verify
from penjing.core.progress import Progress


def _hashes(folder: Path) -> dict[str, str]:
    if is_artifact(folder):
        raise InputError(f"{folder} is quantized already; compress the checkpoint it was made from")
    hashes = verify(folder).sha256
    graph_skeleton(folder)
    return hashes


def _samples(folder: Path, _: DataSettings, __: Progress) -> ExampleData:
    return ExampleData(load_network(folder))


@torch.no_grad()
def _evaluate(folder: Path, model: Path, settings: EvaluateSettings, progress: Progress) -> Quality:
    progress.start("outputs beside those of the model", 2)
    first = load_network(model)
    config, inputs = first.config, first.inputs()
    samples = len(inputs[0]) if config.batched else 1
    before = rows_of(first(*inputs), samples)
    progress.advance()
    after = rows_of(load_network(folder)(*inputs), samples)
    progress.advance()
    size = config.outputs[0].shape[-1] if config.meaning == "classes" else 0
    return output_similarity(before, after, size if isinstance(size, int) else 0, settings)


def _held_out(_: EvaluateSettings) -> int:
    return 2


FAMILY = Family(
    name="graph",
    said=FAMILIES["graph"],
    hashes=_hashes,
    skeleton=skeleton_of_graph,
    samples=_samples,
    quality="similarity",
    evaluate=_evaluate,
    held_out=_held_out,
    calls=graph_calls,
)
