"""Benchmark rows: one JSON object a line in benchmarks/results/NAME.jsonl, newest last.

    row = new_row("engine", "one_stream", 180.2, "tok/s", runs=3, baseline="llama.cpp 11434 Q8_0", baseline_value=171.0)
    append("engine", [row])    # checks, appends, prints a table, then one JSON line

A row that could not be measured where it was written has `value=None` and a reason.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AwareDatetime, Field, model_validator

from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.info import processor, versions

RESULTS = Path(__file__).resolve().parents[1] / "results"
Text = Annotated[str, Field(min_length=1)]


class Row(Config):
    """One measurement. Larger is better unless the unit is a time or a size."""

    benchmark: Text
    metric: Text
    value: float | None
    unit: Text
    baseline: str | None = None
    """The peer or ceiling that `ratio` divides by, with its version."""
    ratio: Annotated[float, Field(gt=0)] | None = None
    """value ÷ what the baseline reached in the same run."""
    share_of_limit: Annotated[float, Field(gt=0)] | None = None
    """value ÷ what the measured ceilings of the machine allow."""
    device: Text
    cores: Annotated[int, Field(ge=1)]
    versions: dict[str, str]
    runs: Annotated[int, Field(ge=0)]
    command: Text
    date: AwareDatetime
    reason: Text | None = None

    @model_validator(mode="after")
    def _a_value_or_a_reason(self) -> Row:
        if (self.value is None) != (self.reason is not None):
            raise ValueError("a row has either a value or the reason why there is none")
        if self.ratio is not None and not self.baseline:
            raise ValueError("a ratio needs the baseline that it divides by")
        return self


def new_row(
    benchmark: str,
    metric: str,
    value: float | None,
    unit: str,
    *,
    runs: int,
    baseline: str | None = None,
    baseline_value: float | None = None,
    share_of_limit: float | None = None,
    reason: str | None = None,
    more_versions: dict[str, str] | None = None,
    device: str | None = None,
) -> Row:
    """A row of this machine, this environment, this command and this minute.

    Args:
        device: what it was measured on, where that is not the processor.

    Raises:
        ConfigError: the values do not make a row, each named.
    """
    here = processor()
    ratio = value / baseline_value if value is not None and baseline_value else None
    values = {
        "benchmark": benchmark,
        "metric": metric,
        "value": _significant(value),
        "unit": unit,
        "baseline": baseline,
        "ratio": _significant(ratio),
        "share_of_limit": _significant(share_of_limit),
        "device": device or f"{here['name']}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": here["cores"],
        "versions": versions() | (more_versions or {}),
        "runs": runs,
        "command": _command(),
        "date": datetime.now(UTC).replace(microsecond=0),
        "reason": reason,
    }
    return parse_config(Row, values, f"row {benchmark}/{metric}")


def append(name: str, rows: Sequence[Row], folder: Path = RESULTS) -> Path:
    """As `write`; then print them as a table and end with one JSON line.

    Raises:
        InputError: there are no rows.
    """
    path = write(name, rows, folder)
    show(rows)
    summary = [row.model_dump(include={"metric", "value", "unit", "baseline", "ratio", "reason"}) for row in rows]
    print(json.dumps({"benchmark": name, "rows": summary}, ensure_ascii=False), flush=True)
    return path


def write(name: str, rows: Sequence[Row], folder: Path = RESULTS) -> Path:
    """Append `rows` to `folder/NAME.jsonl` in one write.

    Raises:
        InputError: there are no rows.
    """
    if not rows:
        raise InputError(f"benchmark {name} has no rows to write")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{to_json(row)}\n" for row in rows))
    return path


def read(name: str, folder: Path = RESULTS) -> list[Row]:
    """All rows of NAME.jsonl, oldest first; none if the file does not exist.

    Raises:
        ConfigError: a line is no row; names file and line.
    """
    path = folder / f"{name}.jsonl"
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            values: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number}: not JSON ({error})") from None
        found.append(parse_config(Row, values, f"{path}, line {number}"))
    return found


def latest(rows: Sequence[Row]) -> list[Row]:
    """The newest row of each benchmark, metric and kind of baseline (its name without the version), in file order."""
    newest = {(row.benchmark, row.metric, kind(row.baseline)): row for row in rows}
    return [row for row in rows if newest[row.benchmark, row.metric, kind(row.baseline)] is row]


def kind(baseline: str | None) -> str:
    """`"llama.cpp 11434 Q8_0"` → `"llama.cpp Q8_0"`: the words that are no version number."""
    return " ".join(word for word in (baseline or "").split() if not word[0].isdigit())


def to_json(row: Row) -> str:
    """The row as it stands in the file; `reason` only where there is one."""
    return row.model_dump_json(exclude={"reason"} if row.reason is None else None)


def show(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("benchmark", "metric")
    for header in ("value", "ratio", "of limit"):
        table.add_column(header, justify="right")
    table.add_column("baseline")
    for row in rows:
        value = f"not measured: {row.reason}" if row.value is None else f"{row.value:g} {row.unit}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}×"
        share = "" if row.share_of_limit is None else f"{row.share_of_limit:.0%}"
        table.add_row(row.benchmark, row.metric, value, ratio, share, row.baseline or "")
    width = None if sys.stdout.isatty() else 140
    Console(width=width).print(table)


def _significant(value: float | None) -> float | None:
    """Four digits: no benchmark here repeats to more."""
    return None if value is None else float(f"{value:.4g}")


def _command() -> str:
    """What was typed, with the script's path from the repository's root."""
    script = Path(sys.argv[0]).resolve()
    root = RESULTS.parents[1]
    shown = script.relative_to(root) if script.is_relative_to(root) else script.name
    return shlex.join(["python", str(shown), *sys.argv[1:]])
