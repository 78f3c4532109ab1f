"""What a run comes to: its stages measured beside each other, as a report and as the files that say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.compress.families.base import Family
from penjing.compress.measure.cost import MeasureSettings, sizes_of, timed
from penjing.compress.recipe import Recipe
from penjing.compress.report.run_page import run_page
from penjing.compress.report.schema import Decision, Quantized, Report, Size, write_report
from penjing.compress.report.schema import Stage as StageReport
from penjing.compress.stages import Stage
from penjing.core.artifact.base import REPORT_PAGE, is_artifact
from penjing.core.config import key_of
from penjing.core.files import atomic_write_text
from penjing.core.info import processor, versions
from penjing.core.progress import Progress
from penjing.core.work import WorkFolder


def measured_stages(
    family: Family, stages: list[Stage], settings: MeasureSettings, work: WorkFolder, progress: Progress
) -> list[dict[str, Any]]:
    """Sizes, widths and times of each stage, taken in turns within one run.

    Stages of one architecture and format are measured once: training changes no shape.
    """
    configs = [((stage.folder / "config.json").read_bytes(), is_artifact(stage.folder)) for stage in stages]
    firsts = [configs.index(config) for config in configs]
    distinct = sorted(set(firsts))
    keys = [stages[index].key for index in distinct]
    name = f"measured-{key_of(keys, settings.model_dump(mode='json'))[:12]}"
    folders = [stages[index].folder for index in distinct]

    def measure() -> dict[str, Any]:
        sizes = [sizes_of(folder, family.skeleton(folder)) for folder in folders]
        latencies = timed(folders, family.calls, settings, progress)
        return {"stages": [size | {"latency": rows} for size, rows in zip(sizes, latencies, strict=True)]}

    record = work.run(name, measure)
    by_stage = dict(zip(distinct, record.result["stages"], strict=True))
    return [by_stage[first] for first in firsts]


def report_of(
    recipe: Recipe,
    family: Family,
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
        record = {} if stage.record is None else dict(stage.record.result)
        quantized = Quantized.model_validate(record.pop("quantized")) if "quantized" in record else None
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
        family=family.name,
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
