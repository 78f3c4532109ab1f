"""What a run comes to: its stages measured beside each other, as a report and as the files that say so."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import safe_open

from penjing.compress.families.base import Asker, Family
from penjing.compress.measure.answers import CHOICES, PROMPTS
from penjing.compress.measure.cost import MeasureSettings, sizes_of, timed
from penjing.compress.recipe import Recipe
from penjing.compress.report.run_page import run_page
from penjing.compress.report.schema import Answered, Decision, Quantized, Report, Size, Stage, write_report
from penjing.compress.results import Result, Results
from penjing.compress.samples.text import EVALUATE
from penjing.core.artifact.base import REPORT_PAGE, is_artifact
from penjing.core.config import key_of
from penjing.core.files import atomic_write_text
from penjing.core.info import processor, versions
from penjing.core.progress import Progress
from penjing.core.work import WorkFolder


def measured_stages(
    family: Family, results: list[Result], settings: MeasureSettings, work: WorkFolder, progress: Progress
) -> list[dict[str, Any]]:
    """Sizes, widths and times of each result, taken in turns within one run.

    Results of one architecture and format are measured once: training changes no shape.
    """
    architectures = [_architecture(result.folder) for result in results]
    firsts = [architectures.index(architecture) for architecture in architectures]
    distinct = sorted(set(firsts))
    keys = [results[index].key for index in distinct]
    name = f"measured-{key_of(keys, settings.model_dump(mode='json'))[:12]}"
    folders = [results[index].folder for index in distinct]

    def measure() -> dict[str, Any]:
        sizes = [sizes_of(folder, family.skeleton(folder)) for folder in folders]
        latencies = timed(folders, family.calls, settings, progress)
        return {"stages": [size | {"latency": rows} for size, rows in zip(sizes, latencies, strict=True)]}

    record = work.run(name, measure)
    by_stage = dict(zip(distinct, record.result["stages"], strict=True))
    return [by_stage[first] for first in firsts]


def answered_stages(run: Results, results: list[Result]) -> list[list[dict[str, Any]]]:
    """The figures of what each result answers, JSON-ready; none where [measure] asks nothing.

    Args:
        run: whose recipe asks.
        results: the model that the run began with, then others that are compared with it.
    """
    recipe, family = run.recipe, run.context.family
    if not recipe.measure.asks:
        return [[] for _ in results]
    asker: Asker = family.need("asker", "asked questions")
    questions = asker.questions(recipe.model, recipe.measure, recipe.evaluate)
    settings = [recipe.measure.model_dump(mode="json"), recipe.evaluate.model_dump(mode="json")]
    named = key_of(*settings, *(run.hashes.get(each) for each in (PROMPTS, CHOICES, EVALUATE)))[:8]
    first: dict[str, Any] | None = None
    found = []
    for result in results:
        own = run.work.run(
            f"{result.name}-answers-{named}",
            lambda folder=result.folder, first=first: asker.answer(folder, questions, first, run.progress),
        ).result
        found.append([asdict(each) for each in asker.scores(questions, own, first, recipe.evaluate)])
        first = first or own
    return found


def _architecture(folder: Path) -> tuple[bytes, bool, dict[str, list[int]]]:
    """What decides sizes and speeds: config.json, the format, and the shapes of weights, which a graph's config.json
    does not tell."""
    shapes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            shapes |= {f"{path.name}/{name}": list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
    return (folder / "config.json").read_bytes(), is_artifact(folder), shapes


def report_of(
    recipe: Recipe,
    family: Family,
    results: list[Result],
    measured: list[dict[str, Any]],
    answers: list[list[dict[str, Any]]],
    decisions: list[dict[str, Any]],
    command: str,
    work: WorkFolder,
) -> Report:
    """The run's report.

    Args:
        results: the model, then those that lead to the last one; `measured` and `answers` belong to them one by one.
        work: whose records say what everything took, attempts that were not kept and measurements included.
    """
    rows = []
    for result, figures, answered in zip(results, measured, answers, strict=True):
        record = {} if result.record is None else dict(result.record.result)
        quantized = Quantized.model_validate(record.pop("quantized")) if "quantized" in record else None
        rows.append(
            Stage(
                name=result.label,
                kind=result.kind,
                record=record,
                quality=result.quality,
                size=Size.model_validate(figures["size"]),
                latency=figures["latency"],
                widths=figures["widths"],
                seconds=result.record.seconds if result.record is not None else 0.0,
                peak_memory_bytes=result.record.peak_memory_bytes if result.record is not None else 0,
                quantized=quantized,
                answers=tuple(Answered.model_validate(each) for each in answered),
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
