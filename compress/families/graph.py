"""What compression does with graphs: any network as operators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx, nn

from penjing.compress.distill.graph import TRAINING
from penjing.compress.export.as_made import AsMade, write_floating
from penjing.compress.export.record import ExportRecord, Form
from penjing.compress.families.base import Exporter, Family, Pruner, Quantizer, refuse_artifact
from penjing.compress.measure.evaluate import EvaluateSettings, images_judged
from penjing.compress.measure.graph import evaluate_graph, graph_calls
from penjing.compress.measure.skeleton import skeleton_of_graph
from penjing.compress.parity.graph import GraphParity
from penjing.compress.prune_graph.statistics import refresh_graph
from penjing.compress.prune_graph.subject import GraphSubject
from penjing.compress.quantize.targets import TargetName
from penjing.compress.quantizers import graph as quantizer
from penjing.compress.samples.data import DataSettings
from penjing.compress.samples.graph import graph_samples
from penjing.core.artifact.base import is_artifact
from penjing.core.checkpoint.graph import graph_skeleton, load_network
from penjing.core.family import FAMILIES
from penjing.core.graph.network import Network
from penjing.core.manifest import verify
from penjing.core.memory import keep_freed_memory
from penjing.core.progress import Progress


def _hashes(folder: Path) -> dict[str, str]:
    refuse_artifact(folder)
    hashes = verify(folder).sha256
    graph_skeleton(folder)
    return hashes


def _held_out(settings: EvaluateSettings) -> int:
    return 2 * images_judged(settings) if settings.source is not None else 2  # the model answers beside it


def _open(folder: Path, _: Sequence[str], __: Sequence[int], progress: Progress) -> GraphSubject:
    keep_freed_memory()  # gradients of images go through it for each group of samples
    return GraphSubject(folder, progress)


def _as_graph(folder: Path, model: nn.Module) -> Network:
    assert isinstance(model, fx.GraphModule)
    return load_network(folder).with_module(model)


def _refresh(folder: Path, data: DataSettings, progress: Progress) -> dict[str, Any]:
    return refresh_graph(folder, graph_samples(folder, data, progress), progress)


def _export(
    folder: Path, form: Form, out: Path, target: TargetName | None, force: bool, progress: Progress
) -> ExportRecord:
    if is_artifact(folder):
        return AsMade(GraphParity)(folder, form, out, target, force, progress)
    return write_floating(folder, out, target, progress)


FAMILY = Family(
    name="graph",
    said=FAMILIES["graph"],
    hashes=_hashes,
    skeleton=skeleton_of_graph,
    samples=graph_samples,
    quality="similarity",
    evaluate=evaluate_graph,
    held_out=_held_out,
    calls=graph_calls,
    pruner=Pruner(parts=(), open=_open, finish=_refresh),
    training=TRAINING,
    quantizer=Quantizer(quantizer.GraphQuantize, quantizer.check, quantizer.quantize),
    rerun=GraphParity.rerun,
    exporter=Exporter(("onnx",), (), _export),
    as_graph=_as_graph,
)
