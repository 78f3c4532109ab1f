"""What `penjing curate` reads: sources, steps, and where the corpus goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from penjing.core.cluster.ray_cluster import RaySettings
from penjing.core.cluster.slurm import SlurmSettings
from penjing.core.config import Config, OutputFolder
from penjing.curate.documents.settings import SourceConfig
from penjing.curate.steps.augment import AugmentStep
from penjing.curate.steps.clean import CleanStep
from penjing.curate.steps.decontaminate import DecontaminateStep
from penjing.curate.steps.dedup import DedupStep
from penjing.curate.steps.language import LanguageStep
from penjing.curate.steps.noise import NoiseStep
from penjing.curate.steps.pii import PiiStep
from penjing.curate.steps.quality import QualityStep
from penjing.curate.steps.rules import RulesStep

Step = Annotated[
    CleanStep
    | LanguageStep
    | RulesStep
    | PiiStep
    | DedupStep
    | DecontaminateStep
    | QualityStep
    | NoiseStep
    | AugmentStep,
    Field(discriminator="kind"),
]


class CurateRecipe(Config):
    """From sources to a corpus folder."""

    output: OutputFolder = Field(description="The folder that the corpus is written into.")
    work: OutputFolder | None = Field(
        default=None, description="The folder of what is between; by default OUTPUT-work."
    )
    workers: int = Field(default=1, ge=1, description="Processes that read and filter.")
    task_mb: float = Field(
        default=64, gt=0, description="A task takes files of about so many megabytes; a file is never cut."
    )
    ray: RaySettings | None = Field(
        default=None, description="With this section tasks run on a Ray cluster, instead of `workers` processes."
    )
    slurm: SlurmSettings | None = Field(
        default=None, description="With this section tasks run as jobs of Slurm, instead of `workers` processes."
    )
    most_damaged: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Share of the documents that may be damaged; they are left out and listed.",
    )
    sources: tuple[SourceConfig, ...] = Field(min_length=1, description="Where documents come from.")
    steps: tuple[Step, ...] = Field(default=(), description="What is done with them, in this order.")

    @model_validator(mode="after")
    def _one_cluster(self) -> CurateRecipe:
        if self.ray is not None and self.slurm is not None:
            raise ValueError("tasks run on Ray or on Slurm: leave one of [ray] and [slurm] out")
        return self

    @field_validator("sources")
    @classmethod
    def _names_differ(cls, value: tuple[SourceConfig, ...]) -> tuple[SourceConfig, ...]:
        names = [source.name for source in value]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several sources are called {', '.join(twice)}; give each its own name")
        return value

    @field_validator("steps")
    @classmethod
    def _duplicates_before_more(cls, value: tuple[Step, ...]) -> tuple[Step, ...]:
        kinds = [step.kind for step in value]
        if "augment" in kinds and "dedup" in kinds[kinds.index("augment") :]:
            raise ValueError("dedup stands behind augment, and would drop what that makes; put it before")
        return value

    @property
    def work_folder(self) -> Path:
        """Where the files between the steps go."""
        return self.work or self.output.with_name(f"{self.output.name}-work")
