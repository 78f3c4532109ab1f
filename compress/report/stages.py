"""`report.json` of a run with steps: what each stage is, costs and lost.

    {schema_version, recipe, command, versions, device, stages: [...], decisions: [...]}

A stage is {name, kind, record, quality, size: {parameters, bytes, macs}, latency, widths, seconds,
peak_memory_bytes}: `record` what its step decided, `quality` see `evaluation.Quality`, `size` and `latency` see
`measure`, `widths` the sizes of each layer, `seconds` and `peak_memory_bytes` of making it (0 for the model that the
run begins with). `decisions` are the guard's, see `guard.decision`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penjing.compress.measure.cost import MeasureSettings, measure
from penjing.compress.recipe import FlowRecipe
from penjing.compress.stages import Stage
from penjing.compress.work import WorkFolder
from penjing.core.artifact.classifier import is_vision_artifact
from penjing.core.config import key_of
from penjing.core.info import processor, versions
from penjing.core.progress import Progress, megabytes

SCHEMA_VERSION = 1


def measured_stages(
    stages: list[Stage], settings: MeasureSettings, work: WorkFolder, progress: Progress
) -> list[dict[str, Any]]:
    """Sizes and times of each stage (`measure`), taken in turns within one run.

    Stages of one architecture and format are measured once: training changes no shape.
    """
    configs = [((stage.folder / "config.json").read_bytes(), is_vision_artifact(stage.folder)) for stage in stages]
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
) -> dict[str, Any]:
    """Everything `report.json` holds, JSON-ready.

    Args:
        stages: the model, then those that lead to the result; `measured` belongs to them one by one.
    """
    rows = []
    for stage, figures in zip(stages, measured, strict=True):
        record = stage.record
        rows.append(
            {
                "name": stage.label,
                "kind": stage.kind,
                "record": record.result if record is not None else {},
                "quality": asdict(stage.quality),
                "size": figures["size"],
                "latency": figures["latency"],
                "widths": figures["widths"],
                "seconds": record.seconds if record is not None else 0.0,
                "peak_memory_bytes": record.peak_memory_bytes if record is not None else 0,
            }
        )
    return {
        "schema_version": SCHEMA_VERSION,
        "recipe": recipe.model_dump(mode="json"),
        "command": command,
        "versions": versions(),
        "device": processor(),
        "stages": rows,
        "decisions": decisions,
    }


def summary_line(report: dict[str, Any]) -> str:
    """One line for the terminal: what the run gained and cost."""
    first, last = report["stages"][0], report["stages"][-1]
    sizes = f"{megabytes(first['size']['bytes'])} → {megabytes(last['size']['bytes'])}"
    macs = last["size"]["macs"] / first["size"]["macs"]
    before, after = first["quality"]["value"], last["quality"]["value"]
    if first["quality"]["name"] == "accuracy":
        quality = f"accuracy {before:.2%} → {after:.2%} ({100 * (after - before):+.2f} points)"
    else:
        quality = f"perplexity {before:.2f} → {after:.2f} ({after / before - 1:+.2%})"
    seconds = sum(stage["seconds"] for stage in report["stages"])
    return f"{sizes}, {macs:.0%} of the multiply-accumulates, {quality}, {seconds:.0f} s for the steps"
