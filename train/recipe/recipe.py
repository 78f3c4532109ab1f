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
from penjing.train.recipe.data import FashionData, TextData
from penjing.train.recipe.model import DecoderModel, ResNetModel

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class ObjectiveConfig(Config):
    """What cross-entropy is told."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=1)


class MemoryConfig(Config):
    """`limit`: bytes of one process, such as "6GiB"; None: 90 % of what is free."""

    recompute: Recompute = "none"
    recompute_rules: tuple[RecomputeRule, ...] = ()
    limit: str | None = None

    @field_validator("limit")
    @classmethod
    def _is_size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_size(value)
        return value


class CheckpointConfig(Config):
    """Every `every` steps; the newest `keep` stay."""

    every: int = Field(default=1000, ge=1)
    keep: int = Field(default=3, ge=1)


class EvaluationConfig(Config):
    """Every `every` steps and at the end (0: never), on at most `samples` held-out samples."""

    every: int = Field(default=500, ge=0)
    samples: int = Field(default=256, ge=1)


class RunRecipe(Config):
    """A run of any task: where it writes, how long, and its parts; only the model is the task's own."""

    output: Path
    run: Path | None = None  # checkpoints, metrics; OUTPUT-run by default
    steps: int = Field(gt=0)
    seed: int = Field(default=0, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = False
    initial: Path | None = None  # a checkpoint whose weights the run begins with
    average: float | None = Field(
        default=None, gt=0, lt=1
    )  # decay of averaged weights, which are evaluated and exported
    data: Annotated[TextData | FashionData, Field(discriminator="kind")]
    objective: ObjectiveConfig = ObjectiveConfig()
    balancing: BalancingConfig = BalancingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    learning_rate: LearningRate = LearningRate()
    clip: ClipConfig = ClipConfig()
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    monitor: MonitorConfig = MonitorConfig()
    alarms: AlarmConfig = AlarmConfig()

    @property
    def run_folder(self) -> Path:
        """Where checkpoints and metrics of the run go."""
        return self.run or self.output.with_name(f"{self.output.name}-run")


class TrainRecipe(RunRecipe):
    """What `penjing train` reads: a run and the model that it makes."""

    model: Annotated[DecoderModel | ResNetModel, Field(discriminator="architecture")]


def parse_size(text: str) -> int:
    """Bytes of "6GiB", "500 MB", "1024".

    Raises:
        ValueError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is no size; write for example 6GiB ({', '.join(unit for unit in _UNITS if unit)})")
    return int(float(match[1]) * _UNITS[match[2]])
