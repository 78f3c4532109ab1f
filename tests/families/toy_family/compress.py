"""What compression does with toys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from toy_family.artifact import (
    OPSET,
    POINTS,
    Layer,
    differences_of,
    open_artifact,
    recorded_points,
    scores,
    ways,
    write_onnx,
)
from toy_family.network import Mlp, load, points, save, widths_of, write_config

from penjing.compress.export.record import ExportRecord, Form, publish_file, source_of
from penjing.compress.families.base import Exporter, Family, Pruner, Quantizer
from penjing.compress.measure.cost import Calls, Case, MeasureSettings
from penjing.compress.measure.evaluate import EvaluateSettings, Quality, accuracy
from penjing.compress.measure.skeleton import BATCH, Skeleton
from penjing.compress.prune.graph import Group
from penjing.compress.prune.ranking import Choice
from penjing.compress.prune.subject import Part, Shapes
from penjing.compress.prune.surgery import Cut
from penjing.compress.quantize.targets import TargetName
from penjing.compress.samples.data import DataSettings
from penjing.core.artifact.base import MODEL_FILE, QUANTIZATION_FILE, is_artifact
from penjing.core.artifact.onnx import ONNX_RUNTIME, Quantization, gate_onnx, recorded
from penjing.core.artifact.parity import FAKE_QUANTIZED, Bound, Difference, Parity, write_parity
from penjing.core.config import Config
from penjing.core.errors import InputError
from penjing.core.manifest import verify, write_manifest
from penjing.core.progress import Progress
from penjing.core.work import Places

CALIBRATION, HELD_OUT = 1000, 2000  # seeds of points; training takes those below 200
HINT = "raise parity_bound if that is acceptable"


class Samples:
    """See penjing's `Samples`."""

    def __init__(self, count: int) -> None:
        self.points, self.classes = points(count, CALIBRATION)

    def inputs(self) -> Iterator[tuple[Tensor, ...]]:
        """One batch of all points."""
        yield (self.points,)

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        """The mean cross-entropy of all points."""
        yield nn.functional.cross_entropy(model(self.points), self.classes)


class Subject:
    """See penjing's `Subject`."""

    unit = "point"
    inputs = BATCH
    dropped: tuple[int, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept_whole: dict[str, str] = {}
        self._loaded = load(folder)
        self.dense: nn.Module = deepcopy(self._loaded).to("meta")
        self.model: nn.Module = self.dense
        self.example = (torch.empty(BATCH, self._loaded.widths[0], device="meta"),)

    def weights(self, name: str) -> Tensor | None:
        """Every tensor is a parameter."""
        return self._loaded.state_dict()[name]

    def network(self) -> nn.Module:
        """A copy."""
        return deepcopy(self._loaded)

    def parts(self, groups: Sequence[Group]) -> dict[Part, list[Group]]:
        """Hidden numbers count as channels."""
        return {"channels": list(groups)}

    def config_of(self, shapes: Shapes, choice: Choice) -> tuple[int, ...]:
        """The widths."""
        rows = [shapes[f"layers.{index}.weight"] for index in range(len(self._loaded.layers))]
        return (rows[0][1], *(shape[0] for shape in rows))

    def build(self, config: Any) -> nn.Module:
        """A network of these widths."""
        return Mlp(config).eval()

    def item_bytes(self, name: str) -> int:
        """All are float32."""
        return self._loaded.state_dict()[name].element_size()

    def write(self, partial: Path, config: Any, cuts: Mapping[str, Cut], created_by: dict[str, Any]) -> None:
        """Write the narrower network."""
        pruned = Mlp(config)
        kept = {name: cuts[name].of(x) if name in cuts else x for name, x in self._loaded.state_dict().items()}
        pruned.load_state_dict(kept)
        save(partial, pruned, created_by)


class ToyQuantize(Config):
    """INT8 weights for a toy."""

    parity_bound: float = Field(default=1e-3, gt=0, description="Largest difference of a score, in their spread.")
    parity_points: int = Field(default=16, ge=2, description="Points that are compared and kept for `verify`.")


def _layer(module: Any) -> Layer:
    scale = module.weight.detach().abs().amax(1) / 127
    weight = (module.weight.detach() / scale[:, None]).round().to(torch.int8)
    return Layer(weight.numpy(), scale.numpy(), module.bias.detach().numpy())


@torch.no_grad()
def _quantize(places: Places, step: ToyQuantize, data: DataSettings, _: Path, progress: Progress) -> dict[str, Any]:
    floating, folder = load(places.source), places.partial
    layers = [_layer(module) for module in floating.layers]
    fake = deepcopy(floating)
    errors = []
    for index, (module, layer) in enumerate(zip(fake.layers, layers, strict=True)):
        assert isinstance(module, nn.Linear)
        before = module.weight.clone()
        module.weight.copy_(torch.from_numpy(layer.weight).float() * torch.from_numpy(layer.scale)[:, None])
        error = float((module.weight - before).norm() / before.norm())
        errors.append({"name": f"layers.{index}", "format": "int8", "weight": error, "output": error})
    progress.start("parity", 1)
    write_onnx(layers, folder / MODEL_FILE)
    quantization = Quantization(
        target="onnxruntime-cpu", activations="float32", weights="int8", opset=OPSET, session_options={}
    )
    x = points(step.parity_points, CALIBRATION)[0]
    known, found = fake(x).numpy(), ways(folder / MODEL_FILE, quantization, x.numpy())
    differences = differences_of(known, found)
    bound = Bound(
        between=(FAKE_QUANTIZED, ONNX_RUNTIME),
        quantity=differences[0].quantity,
        statistic="largest",
        value=step.parity_bound,
    )
    gate_onnx(differences, bound, HINT)
    outputs = {FAKE_QUANTIZED: known} | found
    parity = Parity(
        family="toy",
        inputs={POINTS: x.tolist()},
        outputs={name: rows.tolist() for name, rows in outputs.items()},
        differences=differences,
        bound=bound,
    )
    write_parity(folder, parity)
    write_config(folder, floating.widths)
    (folder / QUANTIZATION_FILE).write_text(json.dumps(quantization.model_dump()))
    write_manifest(folder, "artifact", {"command": "penjing compress"})
    progress.advance()
    samples = Samples(data.images).points
    quantized = {
        "target": quantization.target,
        "formats": {"weights": "int8"},
        "effective_bits": 8.0,
        "agreement": float((fake(samples).argmax(1) == floating(samples).argmax(1)).float().mean()),
        "layers": errors,
        "differences": [each.model_dump() for each in differences],
        "bound": bound.model_dump(),
    }
    return {"kind": "quantize", "quantized": quantized}


def _hashes(folder: Path) -> dict[str, str]:
    if is_artifact(folder):
        raise InputError(f"{folder} is quantized already; compress the checkpoint it was made from")
    return verify(folder).sha256


def _skeleton(folder: Path) -> Skeleton:
    widths = widths_of(folder)
    with torch.device("meta"):
        return Skeleton(Mlp(widths).eval(), (torch.empty(BATCH, widths[0]),), BATCH, "point")


def _runner(folder: Path) -> Any:
    """(B, inputs) → (B, classes) of a checkpoint or an artifact."""
    if not is_artifact(folder):
        return load(folder)
    session = open_artifact(folder).session()
    return lambda x: torch.from_numpy(scores(session, x.numpy()))


@torch.no_grad()
def _evaluate(folder: Path, _: Path, settings: EvaluateSettings, progress: Progress) -> Quality:
    x, classes = points(settings.images, HELD_OUT)
    progress.start("accuracy on held-out points", 1)
    right = (_runner(folder)(x).argmax(1) == classes).numpy()
    progress.advance()
    return accuracy(right, settings)


def _calls(folders: Sequence[Path], settings: MeasureSettings) -> Calls:
    x = points(settings.batches[-1], HELD_OUT)[0]
    case = Case("torch", f"batch {len(x)}", len(x), "points")
    return {case: {index: partial(_runner(folder), x) for index, folder in enumerate(folders)}}


def _compared(folder: Path) -> tuple[Difference, ...]:
    artifact = open_artifact(folder)
    record = artifact.parity
    found = ways(folder / MODEL_FILE, artifact.quantization, recorded_points(record))
    differences = differences_of(recorded(record, FAKE_QUANTIZED), found)
    gate_onnx(differences, record.bound, HINT)
    return differences


def _rerun(folder: Path, progress: Progress) -> tuple[Difference, ...]:
    progress.start("parity", 1)
    differences = _compared(folder)
    progress.advance()
    return differences


def _export(
    folder: Path, form: Form, out: Path, target: TargetName | None, _: bool, progress: Progress
) -> ExportRecord:
    differences = _rerun(folder, progress)
    record = ExportRecord(form=form, target=target, **source_of(folder), differences=differences)
    publish_file(out, record, lambda path: path.write_bytes((folder / MODEL_FILE).read_bytes()))
    return record


FAMILY = Family(
    name="toy",
    said="a toy",
    hashes=_hashes,
    skeleton=_skeleton,
    samples=lambda _, settings, __: Samples(settings.images),
    quality="accuracy",
    evaluate=_evaluate,
    held_out=lambda settings: settings.images,
    calls=_calls,
    pruner=Pruner(parts=(), open=lambda folder, _, __, ___: Subject(folder)),
    quantizer=Quantizer(ToyQuantize, lambda *_: None, _quantize),
    rerun=_rerun,
    exporter=Exporter(("onnx",), (), _export),
)
