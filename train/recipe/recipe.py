"""What a training recipe says: one frozen section for each seam."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from penjing.core.config import Config, OutputFolder
from penjing.train.adapter.lora import AdapterConfig
from penjing.train.monitor.alarms import AlarmConfig
from penjing.train.monitor.monitor import MonitorConfig
from penjing.train.numerics.precision import PrecisionConfig
from penjing.train.numerics.recompute import Recompute, RecomputeRule
from penjing.train.objective.balancing import BalancingConfig
from penjing.train.optim.clip import ClipConfig
from penjing.train.optim.optimizer import OptimizerConfig
from penjing.train.optim.schedule import LearningRate
from penjing.train.parallel.config import ParallelConfig
from penjing.train.recipe.align import AlgorithmConfig, PromptConfig, RewardConfig
from penjing.train.recipe.data import (
    ChatData,
    FashionData,
    PairData,
    PreferenceData,
    RolloutData,
    SampleData,
    SightData,
    TextData,
)
from penjing.train.recipe.model import DecoderModel, ResNetModel, TowersModel, VisionLanguageModel

Data = Annotated[
    TextData | ChatData | PreferenceData | RolloutData | SightData | PairData | FashionData | SampleData,
    Field(discriminator="kind"),
]
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class ObjectiveConfig(Config):
    """What is minimised, and what it is told."""

    kind: Literal["cross_entropy", "dpo", "reward", "clip", "siglip"] = Field(
        default="cross_entropy",
        description='Cross-entropy of the next token or the class; of preferences "dpo" (direct preference '
        'optimisation) or "reward" (a model that scores answers); of pairs of images and texts "clip" (each among all '
        'others of a step) or "siglip" (each comparison for itself).',
    )
    temperature: float | None = Field(
        default=None,
        gt=0,
        description="Of clip and siglip: what products of vectors are divided by at first, 0.07 or 0.1 by default; it "
        "is learnt.",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of a target's probability that is spread over all classes; of dpo, the share of pairs that "
        "are taken to be the wrong way round.",
    )
    loss: Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "apo_zero"] = Field(
        default="sigmoid",
        description='Of dpo: the loss of a pair; "sigmoid_norm" and "ipo" compare log-probabilities per token.',
    )
    beta: float = Field(default=0.1, gt=0, description="Of dpo: how closely the model is held to the reference.")
    sft: float = Field(default=0.0, ge=0, description="Of dpo: weight of the chosen answers' own loss per token.")
    reference: Path | None = Field(
        default=None, description="Of dpo: the checkpoint that the model is held to; by default `initial`."
    )
    centring: float = Field(
        default=0.0,
        ge=0,
        description="Of reward: weight of the squared sum of a pair's scores, which keeps them near 0.",
    )

    @field_validator("temperature", "label_smoothing", "loss", "beta", "sft", "reference", "centring")
    @classmethod
    def _belongs(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = {
            "label_smoothing": ("cross_entropy", "dpo"),
            "centring": ("reward",),
            "temperature": ("clip", "siglip"),
        }.get(info.field_name or "", ("dpo",))
        kind = info.data.get("kind", kinds[0])
        if kind not in kinds and value != cls.model_fields[info.field_name or ""].default:
            raise ValueError(f"is of kind = {' or '.join(map(repr, kinds))}, not of {kind!r}; leave it out")
        if info.field_name == "label_smoothing" and kind == "dpo" and value >= 0.5:
            raise ValueError("of dpo must be below 0.5, where a pair would say nothing")
        return value


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

    @property
    def kinds(self) -> set[Recompute]:
        """What blocks may compute again, "none" too."""
        return {self.recompute, *(rule.recompute for rule in self.recompute_rules)}

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
    metric: str = Field(default="loss", description="What `best` and `patience` go by, as an evaluation calls it.")
    goal: Literal["lowest", "highest"] = Field(default="lowest", description="Which values of it are better.")
    best: bool = Field(
        default=False, description="The weights of the best evaluation are exported, and not those of the last step."
    )
    patience: int = Field(
        default=0, ge=0, description="The run ends after so many evaluations in a row that are no better; 0: never."
    )
    prompts: tuple[str, ...] = Field(
        default=(), description="Texts that a decoder goes on with at each evaluation, printed and in samples.jsonl."
    )
    max_tokens: int = Field(default=48, ge=1, description="Tokens of such a sample at most.")


class RunRecipe(Config):
    """A run of any task: where it writes, how long, and its parts; only the model is the task's own."""

    output: OutputFolder = Field(description="The folder that the trained checkpoint is written into.")
    run: OutputFolder | None = Field(
        default=None, description="The folder of training state and metrics; by default OUTPUT-run."
    )
    steps: int = Field(default=0, ge=0, description="Updates of the weights; 0: as many as `epochs` make.")
    epochs: float | None = Field(
        default=None, gt=0, validate_default=True, description="In place of steps: passes over the training data."
    )
    seed: int = Field(
        default=0, ge=0, description="First weights, order of the data and all other chance follow from it."
    )
    device: str = Field(
        default="auto",
        description='What computes: "cpu", or the accelerator that torch finds, by its type, such as "cuda", "xpu" or '
        '"npu"; "auto" takes the accelerator where there is one.',
    )
    compile: bool = Field(
        default=False, description="torch.compile is used: on each block of a decoder, on other networks as a whole."
    )
    initial: Path | None = Field(
        default=None, description="A checkpoint that the run begins with: its weights, architecture and tokenizer."
    )
    adapter: AdapterConfig | None = Field(
        default=None, description="Small matrices that learn beside frozen ones; none: the network itself learns."
    )
    freeze: tuple[str, ...] = Field(
        default=(), description="Patterns of names of parameters that stay as they are, such as 'model.embed_tokens.*'."
    )
    average: float | None = Field(
        default=None, gt=0, lt=1, description="Decay of averaged weights, which are then evaluated and exported."
    )
    data: Data = Field(description="What is learnt from, and how a step is cut.")
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

    @field_validator("memory")
    @classmethod
    def _compiler_chooses(cls, value: MemoryConfig, info: ValidationInfo) -> MemoryConfig:
        if info.data.get("compile") and "selective" in value.kinds:
            raise ValueError(
                "compile chooses itself what is cheap to compute again; write recompute = 'none' or 'full', "
                "or compile = false"
            )
        return value

    @field_validator("epochs")
    @classmethod
    def _one_length(cls, value: float | None, info: ValidationInfo) -> float | None:
        if "steps" in info.data and bool(info.data["steps"]) == (value is not None):
            raise ValueError("a run has one length; set steps above 0, or epochs")
        return value

    def num_steps(self, samples: int) -> int:
        """Updates of the weights, where `samples` are there to learn from."""
        return self.steps if self.epochs is None else math.ceil(self.epochs * samples / self.data.batch_size)

    @property
    def run_folder(self) -> Path:
        """Where checkpoints and metrics of the run go."""
        return self.run or self.output.with_name(f"{self.output.name}-run")


class TrainRecipe(RunRecipe):
    """What `penjing train` reads: a run and the model that it makes."""

    model: (
        Annotated[DecoderModel | ResNetModel | TowersModel | VisionLanguageModel, Field(discriminator="architecture")]
        | None
    ) = Field(
        default=None, description="What is trained from the beginning; with `initial` it comes from that checkpoint."
    )
    prompts: PromptConfig | None = Field(
        default=None, validate_default=True, description="Of rollouts: what the model is asked."
    )
    algorithm: AlgorithmConfig | None = Field(
        default=None, validate_default=True, description="Of rollouts: how much each answer is learnt."
    )
    reward: RewardConfig | None = Field(
        default=None,
        validate_default=True,
        description="Of rollouts: what an answer is worth; of distill and draft it is only recorded, and may be left "
        "out.",
    )

    @field_validator("prompts", "algorithm", "reward")
    @classmethod
    def _of_rollouts(cls, value: Any, info: ValidationInfo) -> Any:
        kind = getattr(info.data.get("data"), "kind", None)
        if kind == "rollouts" and value is None:
            if info.field_name == "algorithm":
                return AlgorithmConfig()
            algorithm = getattr(info.data.get("algorithm"), "kind", None)
            if info.field_name == "reward" and algorithm in ("distill", "draft"):
                return None
            raise ValueError("is needed with data.kind = 'rollouts'")
        if kind not in (None, "rollouts") and value is not None:
            raise ValueError(f"is of data.kind = 'rollouts', not of {kind!r}; leave it out")
        return value


def parse_size(text: str) -> int:
    """Bytes of "6GiB", "500 MB", "1024".

    Raises:
        ValueError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is no size; write for example 6GiB ({', '.join(unit for unit in _UNITS if unit)})")
    return int(float(match[1]) * _UNITS[match[2]])
