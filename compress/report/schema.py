"""`report.json` of a compression run in steps: checked when it is written and when it is read.

An INT8 artifact's report has other fields; it is read as two stages, "fp32" and "int8", as far as its figures go.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penjing.compress.measure.evaluate import Change, Part, Quality, compare
from penjing.core.artifact.decoder import REPORT_FILE
from penjing.core.errors import InputError
from penjing.core.manifest import read_json_object

SCHEMA_VERSION = 1


class _Read(BaseModel):
    """Fields that a later version adds are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Size(_Read):
    """`macs`: multiply-accumulates for one image or token, `bytes`: of the weights on disk."""

    parameters: int = Field(gt=0)
    bytes: int = Field(gt=0)
    macs: int | None = Field(default=None, gt=0)


class Latency(_Read):
    """One case of `measure.measure`: seconds a call, and the speed against the first stage, with their spreads."""

    runtime: str
    case: str
    unit: str
    seconds: float = Field(gt=0)
    low: float = Field(gt=0)
    high: float = Field(gt=0)
    throughput: float = Field(gt=0)
    speedup: float = Field(gt=0)
    speedup_low: float = Field(gt=0)
    speedup_high: float = Field(gt=0)
    runs: int = Field(ge=1)


class LayerError(_Read):
    """Relative root-mean-square errors of a quantized layer's weight and of its outputs; see `quant.errors`."""

    name: str
    format: str
    weight: float = Field(ge=0)
    output: float = Field(ge=0)


class ParityRow(_Read):
    """How far two implementations are apart; see `LogitDifference`."""

    between: tuple[str, str]
    largest: float = Field(ge=0)
    mean: float = Field(ge=0)
    same_class: float = Field(ge=0, le=1)


class Quantized(_Read):
    """What a quantize step recorded."""

    target: str
    formats: dict[str, str]
    effective_bits: float = Field(default=8.0, gt=0)
    training_steps: int = Field(default=0, ge=0)
    same_class_as_fp32: float = Field(ge=0, le=1)
    layers: tuple[LayerError, ...]
    parity: tuple[ParityRow, ...]
    parity_unmeasured: dict[str, str] = {}


class Stage(_Read):
    """A checkpoint of the run; a quality without a `record` has no interval either: its report has none."""

    name: str
    kind: str
    record: dict[str, Any] = {}
    quality: Quality
    size: Size
    latency: tuple[Latency, ...] = ()
    widths: dict[str, int] = {}
    seconds: float = Field(default=0.0, ge=0)
    peak_memory_bytes: int = Field(default=0, ge=0)

    def quantized(self) -> Quantized | None:
        """What a quantize step recorded; None of other steps.

        Raises:
            ValidationError: the record is damaged.
        """
        # a decoder's record has none of these
        is_classifiers = self.kind == "quantize" and not self.record.keys().isdisjoint(("target", "formats", "layers"))
        return Quantized.model_validate(self.record) if is_classifiers else None

    def by_case(self) -> dict[str, Latency]:
        """What was timed by its name, such as "torch, batch 64", in the order of measurement."""
        return {f"{row.runtime}, {row.case}": row for row in self.latency}


class Decision(_Read):
    """What the guard found after some steps, and what it did."""

    steps: tuple[str, ...]
    attempt: int
    loss: float
    loss_low: float
    loss_high: float
    budget: float
    unit: str
    outcome: str
    prunes: dict[str, Any] | None = None
    prunes_next: dict[str, Any] | None = None


class Report(_Read):
    """A whole run: the model that it began with is the first stage, its result the last."""

    schema_version: Literal[1]
    recipe: dict[str, Any]
    command: str
    versions: dict[str, str]
    device: dict[str, Any]
    stages: tuple[Stage, ...] = Field(min_length=1)
    decisions: tuple[Decision, ...] = ()

    def lost(self, stage: Stage) -> Change | None:
        """How much worse `stage` is than the first one on the same samples; None where samples were not kept."""
        first = self.stages[0].quality
        if not first.record or not stage.quality.record:
            return None
        return compare(first, stage.quality)


def parse_report(values: dict[str, Any], source: str) -> Report:
    """The report that `values` hold.

    Raises:
        InputError: names `source` and the first field that is wrong.
    """
    version = values.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise InputError(f"{source} has schema_version {version}, this penjing reads {SCHEMA_VERSION}; upgrade penjing")
    try:
        report = Report.model_validate(values if "stages" in values else _of_artifact(values, source))
        for stage in report.stages:
            if stage.quality.name != report.stages[0].quality.name:
                raise InputError(
                    f"{source}: its stages have both {stage.quality.name} and another quality; make it again"
                )
            report.lost(stage)
            stage.quantized()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{source}: {where}: {first['msg']}; the report is damaged, make it again") from None
    return report


def read_report(folder: Path) -> Report:
    """The report of a result folder, or of a `report.json` file itself.

    Raises:
        InputError: missing, damaged, or of a newer schema; one line.
    """
    path = folder if folder.is_file() else folder / REPORT_FILE
    if folder.is_dir() and not path.exists():
        raise InputError(f"{folder} holds no {REPORT_FILE}; give what 'penjing compress' made")
    return parse_report(read_json_object(path), str(path))


def _of_artifact(values: dict[str, Any], source: str) -> dict[str, Any]:
    """An INT8 artifact's report in the form of a run with two stages.

    Raises:
        InputError: it is not one.
    """
    if values.get("kind") == "encoder":
        raise InputError(f"{source} is of a text encoder, which has a page of its own: open report.html beside it")
    if values.get("kind") == "classifier":
        raise InputError(
            f"{source} is of an artifact made by itself, which measures no accuracy; give the result of a recipe whose "
            "last step is quantize"
        )
    try:
        evaluate = values["recipe"]["evaluate"]
        tokens = {"prose": evaluate["prose_tokens"], "code": evaluate["code_tokens"]}
        stages = []
        for name in ("fp32", "int8"):
            found = {text: row[name] for text, row in values["perplexity"].items()}
            windows = {text: tokens[text] // evaluate["window"] for text in found}
            pooled = sum(windows[text] * math.log(value) for text, value in found.items()) / sum(windows.values())
            parts = tuple(Part(text, value, windows[text]) for text, value in found.items())
            whole = math.exp(pooled)
            quality = Quality("perplexity", whole, whole, whole, sum(windows.values()), parts, "")
            size = {"parameters": values["parameters"], "bytes": values[f"bytes_{name}"]}
            stages.append({"name": name, "kind": "model" if name == "fp32" else "quantize", "size": size})
            stages[-1] |= {"quality": asdict(quality)}
        making = values["seconds"] - values.get("seconds_measuring", 0.0)
        stages[-1] |= {"seconds": making, "peak_memory_bytes": values["peak_memory_bytes"]}
        common = {key: values[key] for key in ("schema_version", "recipe", "command", "versions")}
        recipe = {"model": values["model"], **common["recipe"]}
        return common | {"recipe": recipe, "device": values["processor"], "stages": stages}
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"{source} has neither stages nor an artifact's figures ({error!r}); make it again") from None
