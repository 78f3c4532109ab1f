"""What a step learned, for the report of a corpus."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penjing.core.config import Config

FACTS = "learned.json"
BARS = 20  # of a histogram


class ReliabilityRow(Config):
    """Examples whose probability lies in one tenth of 0 to 1."""

    expected: float = Field(ge=0, le=1, description="Their mean probability.")
    found: float = Field(ge=0, le=1, description="The share of them that is what the probability speaks of.")
    examples: int = Field(ge=1, description="How many there are.")


class StudentFacts(Config):
    """A fast model that takes the clear cases off a slow one."""

    low: float = Field(description="Below it the student decides alone; below 0 where it never does.")
    high: float = Field(description="From it on the student decides alone; above 1 where it never does.")
    decided: float = Field(ge=0, le=1, description="Share of documents that were held back which it decides.")
    agreement: float = Field(
        ge=0,
        le=1,
        description="Share of documents that were held back on which both together end as the slow one does.",
    )


class Learned(Config):
    """What a step learned, judged on examples that it did not learn from."""

    step: str = Field(default="", description="The step: its place and kind.")
    speaks_of: str = Field(description='What its probability speaks of: "good" or "noise".')
    examples: int = Field(ge=0, description="Examples that it learned from.")
    positive: int = Field(ge=0, description="Those of them that are what it speaks of.")
    sample: int = Field(ge=0, description="Documents of the sources that it looked at before it judged all.")
    auc: float = Field(ge=0, le=1, description="Area under the ROC curve, of examples that were held back.")
    calibration_error: float = Field(
        ge=0, le=1, description="Mean distance of probability and share over the tenths, weighted (ECE)."
    )
    reliability: list[ReliabilityRow] = Field(description="Probability beside share, a row for each tenth.")
    kinds: dict[str, float] = Field(default={}, description="Area under the ROC curve by kind of noise.")
    thresholds: dict[str, float] = Field(description='Threshold by domain; "" for all others.')
    chosen: str = Field(description="How the threshold was chosen, in words.")
    histogram: list[int] = Field(description="Documents of the sample by probability, in equal steps from 0 to 1.")
    student: StudentFacts | None = Field(default=None, description="The fast student, where there is one.")
    decided: dict[str, int] = Field(default={}, description="Documents by what judged them.")


def histogram(scores: NDArray[np.float64]) -> list[int]:
    """Counts of (n,) `scores` of 0 to 1 in `BARS` equal steps."""
    return np.histogram(scores, BARS, (0, 1))[0].tolist()
