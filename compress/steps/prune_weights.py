"""The step `prune_weights`: single weights of a decoder become zero; its shapes stay.

A checkpoint with zeros is as large and as slow as one without in every engine that has no kernels for them, which is
ours, ONNX Runtime and llama.cpp. NVIDIA GPUs multiply 2:4 sparse matrices faster.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from penjing.compress.prune_decoder.weights import WeightMethod
from penjing.compress.steps.base import Context, Step
from penjing.core.errors import ConfigError
from penjing.core.manifest import write_manifest
from penjing.core.work import Places


class PruneWeights(Step):
    """Zeros in place of the weights that matter least. The network keeps its shapes, its bytes and its speed."""

    remedy: ClassVar[str] = "prune less"

    kind: Literal["prune_weights"] = Field(
        default="prune_weights", description="Set the weights of a decoder that matter least to zero."
    )
    method: WeightMethod = Field(
        default="sparsegpt",
        description="Which weights leave: the smallest, the smallest times their input's norm (Wanda), or those that "
        "the others of their row can make up for best, which then do (SparseGPT).",
    )
    ratio: float | None = Field(default=None, gt=0, lt=1, description="Share of the weights that become zero.")
    pattern: str | None = Field(
        default=None, description='How many of how many neighbours stay, instead of a ratio: "2:4" as GPUs like it.'
    )

    @field_validator("pattern")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        if value is not None:
            found = re.fullmatch(r"(\d+):(\d+)", value)
            if found is None or not 0 < int(found[1]) < int(found[2]) or 128 % int(found[2]):
                raise ValueError(f"pattern={value!r}: N:M with N below M, and M a power of two up to 128, such as 2:4")
        return value

    @model_validator(mode="after")
    def _one_measure(self) -> PruneWeights:
        if (self.ratio is None) == (self.pattern is None):
            raise ValueError('give one of ratio (0.5 sets half of the weights to zero) and pattern ("2:4")')
        return self

    def needs_data(self) -> bool:
        """See `Step`."""
        return True

    def check(self, context: Context) -> None:
        """See `Step`."""
        if context.family.need("pruner", "pruned").zero_weights is None:
            raise ConfigError(
                f"prune_weights is for decoders, {context.model} is {context.family.said}; take a step of kind 'prune'"
            )

    def weakens(self) -> dict[str, Any]:
        """See `Step`."""
        return self.model_dump(mode="json", include={"ratio", "pattern"}, exclude_defaults=True)

    def milder(self, factor: float, floor: float) -> PruneWeights:
        """See `Step`; a pattern stays."""
        if self.ratio is None or self.ratio <= floor:
            return self
        return self.model_copy(update={"ratio": max(floor, round(self.ratio * factor, 9))})

    def run(self, places: Places, context: Context) -> dict[str, Any]:
        """See `Step`."""
        zero_weights = context.family.need("pruner", "pruned").zero_weights
        keep, _, of = (self.pattern or "").partition(":")
        pattern = (int(keep), int(of)) if of else None
        samples = context.samples(places.source)
        weights = zero_weights(
            places.source, places.partial, self.method, self.ratio or 0.0, pattern, samples, context.progress
        )
        made = {"command": "penjing compress", "penjing": version("penjing"), "step": self.model_dump(mode="json")}
        write_manifest(places.partial, "checkpoint", made)
        return {"kind": self.kind, "method": self.method, "weights": weights}
