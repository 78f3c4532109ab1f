"""What a training recipe says: one frozen section for each seam."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from penjing.core.config import Config
from penjing.train.monitor.alarms import AlarmConfig
from penjing.train.monitor.monitor import MonitorConfig
from penjing.train.numerics.precision import PrecisionConfig
from penjing.train.numerics.recompute import Recompute, RecomputeRule
from penjing.train.objective.balancing import BalancingConfig
from penjing.train.optim.clip import ClipConfig
from penjing.train.optim.optimizer import OptimizerConfig
from penjing.train.optim.schedule import LearningRate
from penjing.train.parallel.config import ParallelConfig
from penjing.train.recipe.data import FashionData, SampleData, TextData
from penjing.train.recipe.model import DecoderModel, ResNetModel

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class ObjectiveConfig(Config):
    """What cross-entropy is told."""

    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="Share of a target's probability that is spread over all classes."
    )


class MemoryConfig(Config):
    """Memory of a process, and what is computed again to save it."""

    recompute: Recompute = Field(
        default="none",
        description='What blocks compute again in the backward pass: nothing, all ("full") or '
        'what is cheap ("selective").',
    )
    recompute_rules: tuple[RecomputeRule, ...] = Field(
        default=(), description="Other settings for single blocks; the later rule wins."
    )
    limit: str | None = Field(
        default=None, description='Bytes of one process, such as "6GiB"; by default 90 % of what is free.'
    )

    @field_validator("limit")
    @classmethod
    def _is_size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_size(value)
        return value


class CheckpointConfig(Config):
    """Training state, to resume from."""

    every: int = Field(default=1000, ge=1, description="Steps between two checkpoints.")
    keep: int = Field(default=3, ge=1, description="So many of the newest checkpoints stay.")


class EvaluationConfig(Config):
    """Held-out data."""

    every: int = Field(
        default=500, ge=0, description="Steps between two evaluations; also at the end. 0 evaluates never."
    )
    samples: int = Field(default=256, ge=1, description="At most so many held-out samples are used.")


class RunRecipe(Config):
    """A run of any task: where it writes, how long, and its parts; only the model is the task's own."""

    output: Path = Field(description="The folder that the trained checkpoint is written into.")
    run: Path | None = Field(
        default=None, description="The folder of training state and metrics; by default OUTPUT-run."
    )
    steps: int = Field(gt=0, description="Updates of the weights.")
    seed: int = Field(
        default=0, ge=0, description="First weights, order of the data and all other chance follow from it."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description='What computes; "auto" takes a GPU where there is one.'
    )
    compile: bool = Field(default=False, description="The model is compiled by torch.compile.")
    initial: Path | None = Field(default=None, description="A checkpoint whose weights the run begins with.")
    average: float | None = Field(
        default=None, gt=0, lt=1, description="Decay of averaged weights, which are then evaluated and exported."
    )
    data: Annotated[TextData | FashionData | SampleData, Field(discriminator="kind")] = Field(
        description="What is learnt from, and how a step is cut."
    )
    objective: ObjectiveConfig = Field(default=ObjectiveConfig(), description="What is minimised.")
    balancing: BalancingConfig = Field(
        default=BalancingConfig(), description="How the experts of a mixture are kept equally busy."
    )
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="How gradients change the weights.")
    learning_rate: LearningRate = Field(
        default=LearningRate(), description="The size of an update, as a function of the step."
    )
    clip: ClipConfig = Field(default=ClipConfig(), description="The largest gradient that passes unchanged.")
    precision: PrecisionConfig = Field(
        default=PrecisionConfig(), description="The number formats that modules compute in."
    )
    memory: MemoryConfig = Field(
        default=MemoryConfig(), description="Memory of a process, and what is computed again to save it."
    )
    parallel: ParallelConfig = Field(default=ParallelConfig(), description="How many processes share what.")
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="Training state that is kept to resume from."
    )
    evaluation: EvaluationConfig = Field(
        default=EvaluationConfig(), description="When and on how much held-out data the model is judged."
    )
    monitor: MonitorConfig = Field(default=MonitorConfig(), description="What is recorded, and where it goes.")
    alarms: AlarmConfig = Field(default=AlarmConfig(), description="What rings, when, and what happens then.")

    @property
    def run_folder(self) -> Path:
        """Where checkpoints and metrics of the run go."""
        return self.run or self.output.with_name(f"{self.output.name}-run")


class TrainRecipe(RunRecipe):
    """What `penjing train` reads: a run and the model that it makes."""

    model: Annotated[DecoderModel | ResNetModel, Field(discriminator="architecture")] = Field(
        description="What is trained from the beginning."
    )


def parse_size(text: str) -> int:
    """Bytes of "6GiB", "500 MB", "1024".

    Raises:
        ValueError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is no size; write for example 6GiB ({', '.join(unit for unit in _UNITS if unit)})")
    return int(float(match[1]) * _UNITS[match[2]])
