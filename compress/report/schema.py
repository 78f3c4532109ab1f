"""`report.json`, schema 2: what a run made of a network of any family, checked when it is written and when it is read.

    {schema_version, family, recipe, command, versions, processor, stages: [...], decisions: [...], seconds, ...}

The model that a run begins with is the first stage, its result the last. A run that only quantizes has two.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penjing.compress.measure.evaluate import Change, Quality, compare
from penjing.core.artifact.base import REPORT_FILE
from penjing.core.artifact.parity import Bound, Difference
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text
from penjing.core.manifest import read_json_object

SCHEMA_VERSION = 2


class _Record(BaseModel):
    """Fields that a later version adds are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Size(_Record):
    """What a checkpoint takes and costs."""

    parameters: int = Field(gt=0, description="Numbers that were learned.")
    bytes: int = Field(gt=0, description="Of the weights on disk.")
    macs: int | None = Field(default=None, gt=0, description="Multiply-accumulates for one `macs_per`.")
    macs_per: str = Field(default="", description='What the multiply-accumulates are for: "image", "token", "text".')


class Latency(_Record):
    """One case of `cost.measure`: seconds a call, and the speed against the first stage, with their spreads."""

    runtime: str = Field(description="What ran it.")
    case: str = Field(description='What was run, such as "batch 64".')
    unit: str = Field(description="What the throughput counts.")
    seconds: float = Field(gt=0, description="Median of a call.")
    low: float = Field(gt=0, description="Seconds of the fast end of its spread.")
    high: float = Field(gt=0, description="Seconds of the slow end of its spread.")
    throughput: float = Field(gt=0, description="Units a second.")
    speedup: float = Field(gt=0, description="Speed against the first stage.")
    speedup_low: float = Field(gt=0, description="Low end of its spread.")
    speedup_high: float = Field(gt=0, description="High end of its spread.")
    runs: int = Field(ge=1, description="Measurements.")


class LayerError(_Record):
    """A quantized layer beside its floating self, given the same input: relative root-mean-square errors."""

    name: str = Field(description="The module's full name, such as model.layers.0.self_attn.q_proj.")
    format: str = Field(description='Of its weight, such as "int8".')
    weight: float = Field(ge=0, description="Of the weight.")
    output: float = Field(ge=0, description="Of the output.")


class Quantized(_Record):
    """How the numbers of a stage were rounded, and what that did to them: of every family alike."""

    target: str = Field(description="The engine that the artifact is for.")
    formats: dict[str, str] = Field(description='What was rounded ("weights", "activations", …) → the format.')
    effective_bits: float | None = Field(default=None, gt=0, description="Bits a weight on average, where counted.")
    kept_for_parity: tuple[str, ...] = Field(
        default=(),
        description="Layers left floating because ONNX Runtime drifted from the network where they were not.",
    )
    training_steps: int = Field(default=0, ge=0, description="Of quantization-aware training; 0: calibrated only.")
    agreement: float | None = Field(
        default=None, ge=0, le=1, description="Share of calibration samples with the same choice as before rounding."
    )
    layers: tuple[LayerError, ...] = Field(default=(), description="Errors of each layer.")
    differences: tuple[Difference, ...] = Field(default=(), description="How far the implementations are apart.")
    bound: Bound | None = Field(default=None, description="What the parity gate asked for.")
    unmeasured: dict[str, str] = Field(default_factory=dict, description="Implementation → why it did not run.")


class Answered(_Record):
    """A figure of what a decoder answered; see `measure.answers.Score`."""

    task: str = Field(description='"greedy", or the name of a file of questions.')
    measure: str = Field(description="What was counted.")
    unit: Literal["share", "tokens"] = Field(description="Of the value.")
    value: float = Field(description="Mean over the samples.")
    low: float = Field(description="Low end of its interval.")
    high: float = Field(description="High end of its interval.")
    samples: int = Field(ge=1, description="Prompts or questions.")
    lost: tuple[float, float, float] | None = Field(
        default=None, description="How much less than the first stage's, with its interval; none for a comparison."
    )


class Stage(_Record):
    """A checkpoint of the run. A quality without a `record` has no interval either."""

    name: str = Field(description='Number and kind, such as "02-distill".')
    kind: str = Field(description='The kind of the step that made it, or "model".')
    record: dict[str, Any] = Field(default_factory=dict, description="What the step decided and measured.")
    quality: Quality = Field(description="How good it is.")
    size: Size = Field(description="What it takes.")
    latency: tuple[Latency, ...] = Field(default=(), description="What was timed.")
    widths: dict[str, int] = Field(default_factory=dict, description="Layer → output channels or features.")
    seconds: float = Field(default=0.0, ge=0, description="Of making it; 0 for the model that the run begins with.")
    peak_memory_bytes: int = Field(default=0, ge=0, description="Resident memory above the start of the run.")
    quantized: Quantized | None = Field(default=None, description="How it was rounded; none for a floating checkpoint.")
    answers: tuple[Answered, ...] = Field(default=(), description="What it answered, where [measure] asks.")

    def by_case(self) -> dict[str, Latency]:
        """What was timed by its name, such as "torch, batch 64", in the order of measurement."""
        return {f"{row.runtime}, {row.case}": row for row in self.latency}


class Decision(_Record):
    """What the guard found after some steps, and what it did."""

    steps: tuple[str, ...] = Field(description="The steps that it is about.")
    attempt: int = Field(description="Which try it was, from 1.")
    metric: str = Field(description="What was compared.")
    reference: float = Field(description="Of the model that the run began with.")
    value: float = Field(description="After the steps.")
    loss: float = Field(description="How much worse that is.")
    loss_low: float = Field(description="Low end of its interval.")
    loss_high: float = Field(description="High end of its interval.")
    budget: float = Field(description="How much worse it might be.")
    unit: str = Field(description="Of the loss and the budget.")
    outcome: str = Field(description="What the guard did.")
    prunes: dict[str, Any] | None = Field(default=None, description="What was pruned in this try.")
    prunes_next: dict[str, Any] | None = Field(default=None, description="What is pruned in the next one.")


class Report(_Record):
    """A whole run."""

    schema_version: Literal[2] = Field(default=SCHEMA_VERSION, description="Version of this format.")
    family: str = Field(description="Family of the network.")
    recipe: dict[str, Any] = Field(description="The recipe after overrides, defaults included.")
    command: str = Field(description="What was called.")
    versions: dict[str, str] = Field(description="Of the packages that computed.")
    processor: dict[str, Any] = Field(description="What computed.")
    stages: tuple[Stage, ...] = Field(min_length=1, description="The model, then what each step made.")
    decisions: tuple[Decision, ...] = Field(default=(), description="What the guard found.")
    seconds: float = Field(default=0.0, ge=0, description="Of all that was done, attempts and measurements included.")
    peak_memory_bytes: int = Field(default=0, ge=0, description="Resident memory above the start of the run.")

    @property
    def first(self) -> Stage:
        """The model that the run began with."""
        return self.stages[0]

    @property
    def last(self) -> Stage:
        """The result."""
        return self.stages[-1]

    def lost(self, stage: Stage) -> Change | None:
        """How much worse `stage` is than the first one on the same samples; None where samples were not kept."""
        if not self.first.quality.record or not stage.quality.record:
            return None
        return compare(self.first.quality, stage.quality)

    def cases(self) -> list[str]:
        """What was timed in every stage, in the order of measurement."""
        return [case for case in self.first.by_case() if all(case in stage.by_case() for stage in self.stages)]


def parse_report(values: dict[str, Any], source: str) -> Report:
    """The report that `values` hold.

    Raises:
        InputError: another schema; or names `source` and the first field that is wrong.
    """
    if (version := values.get("schema_version")) != SCHEMA_VERSION:
        found = "no schema_version" if version is None else f"schema_version {version!r}"
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        hint = "upgrade penjing" if newer else "run the recipe again"
        raise InputError(f"{source} has {found}, this penjing reads {SCHEMA_VERSION}; {hint}")
    try:
        report = Report.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{source}: {where}: {first['msg']}; the report is damaged, make it again") from None
    for stage in report.stages:
        if stage.quality.name != report.first.quality.name:
            raise InputError(
                f"{source}: its stages have both {report.first.quality.name} and {stage.quality.name}; make it again"
            )
        report.lost(stage)  # raises where the records of samples are damaged
    return report


def read_report(folder: Path) -> Report:
    """The report of a result folder, or of a `report.json` file itself.

    Raises:
        InputError: missing, damaged, or of another schema; one line.
    """
    path = folder if folder.is_file() else folder / REPORT_FILE
    if folder.is_dir() and not path.exists():
        raise InputError(f"{folder} holds no {REPORT_FILE}; give what 'penjing compress' made")
    return parse_report(read_json_object(path), str(path))


def write_report(folder: Path, report: Report) -> None:
    """Write `report.json` into a folder that is not published yet.

    Raises:
        InputError: it could not be read again, such as a figure that is not finite; nothing is written.
    """
    text = json.dumps(report.model_dump(mode="json"), indent=2) + "\n"
    parse_report(json.loads(text), str(folder / REPORT_FILE))
    atomic_write_text(folder / REPORT_FILE, text)
