"""`parity.json`: the same inputs through every implementation of an artifact, how far they are apart, and the gate.

An artifact is published only if its own runtime answers as the network that was calibrated or trained: floating
numbers that imitate INT8. The family gives the inputs, runs them, and measures the distances; record and gate are the
same for all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from penjing.core.artifact.base import PARITY_FILE
from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text
from penjing.core.manifest import read_json_object

FLOATING, FAKE_QUANTIZED, SERVED = "floating", "fake_quantized", "served_endpoint"
C = TypeVar("C", bound=Config)


class DriftError(InputError):
    """Two implementations answer too differently, in small steps that a deep network enlarges."""


class Difference(Config):
    """How far two implementations are apart over all inputs."""

    between: tuple[str, str] = Field(description="The two implementations.")
    quantity: str = Field(description="What was compared, such as logits; the family says in which unit.")
    num_values: int = Field(default=0, ge=0, description="How many numbers were compared.")
    largest: float = Field(ge=0, description="Largest distance.")
    mean: float = Field(ge=0, description="Mean distance.")
    same: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of equal choices (classes, tokens, documents); none where nothing is chosen.",
    )


class Bound(Config):
    """What the gate asks for: `statistic` of the differences of `quantity` between `between` is at most `value`."""

    between: tuple[str, str] = Field(description="The two implementations.")
    quantity: str = Field(description="Which quantity is held to it.")
    statistic: Literal["largest", "mean"] = Field(description="Which statistic of its differences.")
    value: float = Field(ge=0, description="The most that it may be.")

    def of(self, name: str) -> Bound:
        """The same bound for the implementation `name` in place of the second."""
        return self.model_copy(update={"between": (self.between[0], name)})


class Parity(Config):
    """Content of `parity.json`."""

    schema_version: Literal[2] = Field(default=2, description="Version of this format.")
    family: str = Field(description="Family of the network.")
    inputs: dict[str, Any] = Field(description="What every implementation was given, as the family stores it.")
    outputs: dict[str, Any] = Field(description="Implementation → what it answered, as the family stores it.")
    differences: tuple[Difference, ...] = Field(description="How far the implementations are apart.")
    bound: Bound = Field(description="What the gate asked for.")
    unmeasured: dict[str, str] = Field(default_factory=dict, description="Implementation → why it did not run.")


def measured(
    between: tuple[str, str], quantity: str, num_values: int, largest: float, mean: float, same: float | None = None
) -> Difference:
    """A difference as it was found.

    Raises:
        InputError: NaN or infinity.
    """
    if not (math.isfinite(largest) and math.isfinite(mean)):
        raise InputError(f"parity: {' or '.join(between)} computes NaN or infinity; compress the model again")
    return Difference(between=between, quantity=quantity, num_values=num_values, largest=largest, mean=mean, same=same)


def is_within(differences: Iterable[Difference], bound: Bound) -> bool:
    """Whether what the bound is about was measured and keeps it."""
    found = _found(differences, bound)
    return found is not None and found <= bound.value


def gate(differences: Iterable[Difference], bound: Bound, hint: str, error: type[InputError] = InputError) -> None:
    """Refuse what an implementation computes too differently.

    Args:
        hint: what the user can do about it.
        error: what is raised where the bound is exceeded.

    Raises:
        InputError: the bound is exceeded, or nothing was measured that it is about.
    """
    first, second = bound.between
    found = _found(differences, bound)
    if found is None:
        raise InputError(f"parity: {bound.quantity} of {second} against {first} were not measured; {hint}")
    if not found <= bound.value:
        raise error(
            f"parity: {second} differs from {first} by {found:.3g} ({bound.quantity}, {bound.statistic}), "
            f"the bound is {bound.value:g}; {hint}"
        )


def read_parity(folder: Path) -> Parity:
    """The parity record of an artifact, with what was added to it later (`add_answers`).

    Raises:
        InputError: missing, malformed, or of another schema.
    """
    parity = _read(folder / PARITY_FILE)
    for path in sorted(folder.glob("parity_*.json")):
        added = _read(path)
        outputs, differences = parity.outputs | added.outputs, parity.differences + added.differences
        parity = parity.model_copy(update={"outputs": outputs, "differences": differences})
    return parity


def write_parity(folder: Path, parity: Parity) -> None:
    """Write `parity.json` into a folder that is not published yet."""
    atomic_write_text(folder / PARITY_FILE, json.dumps(parity.model_dump(mode="json")) + "\n")


def add_answers(folder: Path, name: str, answers: Any, differences: tuple[Difference, ...]) -> None:
    """Record what the implementation `name` (a plain word such as "served_endpoint") answered to the record's inputs,
    in a file beside the hashed ones; it replaces what `name` answered before.

    Raises:
        InputError: the record is missing or damaged.
        SetupError: disk full, no permission.
    """
    parity = _read(folder / PARITY_FILE)
    added = parity.model_copy(update={"inputs": {}, "outputs": {name: answers}, "differences": differences})
    path = folder / f"parity_{name}.json"
    atomic_write_text(path, json.dumps(added.model_dump(mode="json")) + "\n")


def parse_stored(config_type: type[C], values: dict[str, Any]) -> C:
    """A part of the record that the family stores in its own way.

    Raises:
        InputError: it is damaged.
    """
    try:
        return parse_config(config_type, values, PARITY_FILE)
    except ConfigError as error:
        raise InputError(f"{error}; the file is damaged: compress the model again") from None


def _found(differences: Iterable[Difference], bound: Bound) -> float | None:
    for each in differences:
        if (each.between, each.quantity) == (bound.between, bound.quantity):
            return getattr(each, bound.statistic)
    return None


def _read(path: Path) -> Parity:
    values = read_json_object(path)
    if values.get("schema_version") != 2:
        found = values.get("schema_version")
        raise InputError(f"{path} has schema_version {found!r}, this penjing reads 2; compress the model again")
    try:
        return parse_config(Parity, values, str(path))
    except ConfigError as error:
        raise InputError(f"{error}; the file is damaged: compress the model again") from None
