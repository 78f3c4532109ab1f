"""The step `quantize`: a checkpoint becomes an INT8 artifact, by the quantizer of its family."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, create_model

from penjing.compress.distill.training import TrainingSettings
from penjing.compress.families.base import Family, Needs, Quantizer, family
from penjing.compress.steps.base import Context, Step
from penjing.compress.steps.train import training_needs
from penjing.core.family import FamilyName
from penjing.core.work import Places


class Quantize(Step):
    """INT8, the last step; its other settings are its family's."""

    ends: ClassVar[bool] = True
    remedy: ClassVar[str] = "name layers in quantize's keep"

    kind: Literal["quantize"] = Field(default="quantize", description="Make an INT8 artifact.")

    def check(self, context: Context) -> None:
        """See `Step`."""
        _quantizer(context.family).check(context.model, self, context.data)

    def needs_data(self) -> bool:
        """See `Step`."""
        return True

    def teacher_of(self, model: Path) -> Path | None:
        """See `Step`: whom training learns from."""
        quantizer_learns = getattr(self, "learns_from_model", False) and getattr(self, "steps", 0) > 0
        return getattr(self, "teacher", None) or (model if quantizer_learns else None)

    def needs(self, size: dict[str, Any], context: Context) -> Needs:
        """See `Step`."""
        quantizer = _quantizer(context.family)
        own = quantizer.needs(context.model, self, context.data) if quantizer.needs else super().needs(size, context)
        if isinstance(self, TrainingSettings) and self.steps:
            trained = training_needs(self, size, self.teacher_of(context.model) is not None)
            return Needs(max(own.memory, trained.memory), own.disk, own.scratch + trained.scratch, trained.macs)
        return own

    def run(self, places: Places, context: Context) -> dict[str, Any]:
        """See `Step`."""
        return _quantizer(context.family).run(places, self, context.data, context.model, context.progress)


@cache
def quantize_for(name: FamilyName) -> type[Quantize]:
    """The step with the settings of a family's quantizer.

    Raises:
        ConfigError: the family has none.
    """
    settings = _quantizer(family(name)).settings
    made: Any = create_model("Quantize", __base__=(settings, Quantize), __doc__=settings.__doc__)
    return made


def _quantizer(of: Family) -> Quantizer:
    return of.need("quantizer", "quantized")
