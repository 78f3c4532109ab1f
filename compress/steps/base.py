"""What every step of a recipe is: frozen settings that say what they need, whom they fit, and what they do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from penjing.compress.families.base import Family, Needs
from penjing.compress.samples.data import DataSettings, Samples
from penjing.core.config import Config
from penjing.core.errors import ConfigError
from penjing.core.progress import Progress
from penjing.core.work import Places


@dataclass(frozen=True)
class Context:
    """The run that a step is part of: the model that it began with, that model's family, and `[data]`."""

    model: Path
    family: Family
    data: DataSettings
    progress: Progress

    def samples(self, folder: Path) -> Samples:
        """Calibration samples for the checkpoint in `folder`."""
        return self.family.samples(folder, self.data, self.progress)


class Step(Config):
    """One entry of `[[steps]]`.

    A result is *guarded* if the network must be within its budget there: after steps that heal and after the last one,
    unless `guard` says otherwise.
    """

    kind: Any = Field(description="What the step does.")  # a literal of each class
    guard: bool | None = Field(default=None, description="Whether the result must keep the budget of [guard].")

    heals: ClassVar[bool] = False  # trains the network back to its quality
    ends: ClassVar[bool] = False  # makes an artifact, after which nothing can follow
    remedy: ClassVar[str]  # what a user can change where the result loses too much

    def check_order(self, before: tuple[Step, ...], after: tuple[Step, ...]) -> None:
        """Refuse a place among the steps of a recipe where this one cannot do what it is for.

        Raises:
            ConfigError: it is such a place.
        """
        if self.ends and after:
            raise ConfigError(f"nothing can follow a {self.kind}, which makes an artifact; put it last")

    def check(self, context: Context) -> None:
        """Refuse what does not fit the model, before anything is done.

        Raises:
            ConfigError: the model's family cannot do it, or a setting does not fit.
            InputError: a folder that the step reads is damaged.
        """

    def needs_data(self) -> bool:
        """Whether calibration samples are looked at."""
        return False

    def teacher_of(self, model: Path) -> Path | None:
        """The other checkpoint that the step reads, which may be the model that the run begins with."""
        return None

    def needs(self, size: dict[str, Any], context: Context) -> Needs:
        """What the step takes.

        Args:
            size: `parameters`, `bytes`, `macs`, `macs_per` of the model.
        """
        return Needs(memory=8 * size["parameters"], disk=size["bytes"])

    def weakens(self) -> dict[str, Any]:
        """How much of the network the step takes away, JSON-ready; empty if nothing."""
        return {}

    def milder(self, factor: float, floor: float) -> Step:
        """The step with less taken away: `factor` times as much, but not below `floor`. Itself where that cannot be."""
        return self

    def decides(self) -> dict[str, Any]:
        """The settings that decide the result, JSON-ready; folders are told apart by their files' hashes instead."""
        return self.model_dump(mode="json", exclude={"guard", "rounds", "teacher"})

    def run(self, places: Places, context: Context) -> dict[str, Any]:
        """Fill `places.partial` with the checkpoint or artifact that the step makes of `places.source`.

        Returns:
            What was decided and measured, JSON-ready.

        Raises:
            PenjingError: see `core.errors`.
        """
        raise AssertionError(f"{type(self).__name__} does nothing")
