"""What a run comes to: its stages measured beside each other, as a report and as the files that say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penjing.compress.decoder.parity import BOUND
from penjing.compress.measure.cost import MeasureSettings, measure
from penjing.compress.recipe import FlowRecipe
from penjing.compress.report.run_page import run_page
from penjing.compress.report.schema import Decision, LayerError, Quantized, Report, Size, write_report
from penjing.compress.report.schema import Stage as StageReport
from penjing.compress.stages import Stage
from penjing.compress.work import WorkFolder
from penjing.core.artifact.base import REPORT_PAGE, is_artifact
from penjing.core.artifact.parity import Bound, Difference
from penjing.core.config import key_of
from penjing.core.family import family_of
from penjing.core.files import atomic_write_text
from penjing.core.info import processor, versions
from penjing.core.progress import Progress

NOT_OF_THE_STEP = ("schema_version", "kind", "parameters", "bytes_fp32", "bytes_int8", "versions", "processor")
"""What a classifier's quantize records of the whole run: the report says it elsewhere."""


def measured_stages(
    stages: list[Stage], settings: MeasureSettings, work: WorkFolder, progress: Progress
) -> list[dict[str, Any]]:
    """Sizes and times of each stage (`measure`), taken in turns within one run.

    Stages of one architecture and format are measured once: training changes no shape.
    """
    configs = [((stage.folder / "config.json").read_bytes(), is_artifact(stage.folder)) for stage in stages]
    firsts = [configs.index(config) for config in configs]
    distinct = sorted(set(firsts))
    keys = [stages[index].key for index in distinct]
    name = f"measured-{key_of(keys, settings.model_dump(mode='json'))[:12]}"
    folders = [stages[index].folder for index in distinct]
    record = work.run(name, lambda: {"stages": measure(folders, settings, progress)})
    by_stage = dict(zip(distinct, record.result["stages"], strict=True))
    return [by_stage[first] for first in firsts]


def report_of(
    recipe: FlowRecipe,
    stages: list[Stage],
    measured: list[dict[str, Any]],
    decisions: list[dict[str, Any]],
    command: str,
    work: WorkFolder,
) -> Report:
    """The run's report.

    Args:
        stages: the model, then those that lead to the result; `measured` belongs to them one by one.
        work: whose records say what everything took, attempts that were not kept and measurements included.
    """
    rows = []
    for stage, figures in zip(stages, measured, strict=True):
        quantized, record = split_quantized({} if stage.record is None else stage.record.result)
        rows.append(
            StageReport(
                name=stage.label,
                kind=stage.kind,
                record=record,
                quality=stage.quality,
                size=Size.model_validate(figures["size"]),
                latency=figures["latency"],
                widths=figures["widths"],
                seconds=stage.record.seconds if stage.record is not None else 0.0,
                peak_memory_bytes=stage.record.peak_memory_bytes if stage.record is not None else 0,
                quantized=quantized,
            )
        )
    every = [found for path in sorted(work.path.glob("*.json")) if (found := work.record(path.stem)) is not None]
    return Report(
        family=family_of(recipe.model),
        recipe=recipe.model_dump(mode="json"),
        command=command,
        versions=versions(),
        processor=processor(),
        stages=tuple(rows),
        decisions=tuple(Decision.model_validate(each) for each in decisions),
        seconds=sum(record.seconds for record in every),
        peak_memory_bytes=max((record.peak_memory_bytes for record in every), default=0),
    )


def write_reports(folder: Path, report: Report) -> None:
    """Write `report` into `folder`, not yet published, as report.json and as the page report.html.

    Raises:
        InputError: it could not be read again.
    """
    write_report(folder, report)
    atomic_write_text(folder / REPORT_PAGE, run_page(report))


def split_quantized(record: dict[str, Any]) -> tuple[Quantized | None, dict[str, Any]]:
    """What a quantize step recorded about rounding, and what else it recorded; other steps' records are all else."""
    rest = dict(record)
    if "quantized" in rest:
        return Quantized.model_validate(rest.pop("quantized")), rest
    if "layers" in rest and "target" in rest:  # a classifier's
        between = rest["parity"][0]["between"]
        bound = Bound(between=between, quantity="logits", statistic="largest", value=rest["settings"]["parity_bound"])
        quantized = Quantized(
            target=rest.pop("target"),
            formats=rest.pop("formats"),
            effective_bits=rest.pop("effective_bits"),
            training_steps=rest.pop("training_steps"),
            agreement=rest.pop("same_class_as_fp32"),
            layers=rest.pop("layers"),
            differences=tuple(map(Difference.model_validate, rest.pop("parity"))),
            bound=bound,
            unmeasured=rest.pop("parity_unmeasured"),
        )
        return quantized, {key: value for key, value in rest.items() if key not in NOT_OF_THE_STEP}
    if "errors" in rest and "parity" in rest:  # a decoder's
        quantized = Quantized(
            target="compressed-tensors",
            formats={"weights": "int8", "activations": "int8"},
            training_steps=rest.pop("training_steps"),
            layers=tuple(_decoder_layers(rest.pop("errors"))),
            differences=tuple(map(Difference.model_validate, rest.pop("parity"))),
            bound=BOUND,
        )
        return quantized, rest
    return None, rest


def _decoder_layers(steps: list[dict[str, Any]]) -> Iterator[LayerError]:
    for step in steps:
        found = dict(step)
        place = found.pop("name")
        prefix = f"model.layers.{int(place.removeprefix('layer_'))}." if place.startswith("layer_") else ""
        for name, error in found.items():
            yield LayerError(name=prefix + name, format="int8", **error)
