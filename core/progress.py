"""What long work tells the user: one object passed down, a rich bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Progress(Protocol):
    """What a long task reports to. Implementations must be cheap: `advance` is called for every tensor or layer."""

    def start(self, task: str, total: int) -> None:
        """Begin `task`, which takes `total` equal parts; a task begun before it ends."""
        ...

    def advance(self, parts: int = 1) -> None:
        """`parts` more of the current task are done."""
        ...

    def note(self, message: str) -> None:
        """Show one line that stays: a result, a decision, a step that was skipped."""
        ...


class Silent:
    """Shows nothing: the default of every library function."""

    def start(self, task: str, total: int) -> None: ...

    def advance(self, parts: int = 1) -> None: ...

    def note(self, message: str) -> None: ...


class PlainProgress:
    """For pipes and logs: a line when a task ends, with its seconds."""

    def __init__(self) -> None:
        self._task: str | None = None
        self._began = 0.0

    def start(self, task: str, total: int) -> None:
        self.finish()
        self._task, self._began = task, time.monotonic()

    def advance(self, parts: int = 1) -> None: ...

    def note(self, message: str) -> None:
        self.finish()
        print(message, file=sys.stderr, flush=True)

    def finish(self) -> None:
        if self._task is not None:
            print(f"{self._task}: {time.monotonic() - self._began:.1f} s", file=sys.stderr, flush=True)
        self._task = None


class TerminalProgress:
    """A rich bar with share done, elapsed time and time to go."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: Any = None

    def start(self, task: str, total: int) -> None:
        self.finish()
        self._task = self.bar.add_task(task, total=total)

    def advance(self, parts: int = 1) -> None:
        if self._task is not None:
            self.bar.advance(self._task, parts)

    def note(self, message: str) -> None:
        self.bar.console.print(message, highlight=False, markup=False)

    def finish(self) -> None:
        if self._task is not None:
            self.bar.update(self._task, completed=self.bar.tasks[self._task].total)
        self._task = None


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Progress on standard error: a bar on a terminal, one line a task otherwise."""
    if sys.stderr.isatty():
        terminal = TerminalProgress()
        with terminal.bar:
            yield terminal
            terminal.finish()
    else:
        plain = PlainProgress()
        yield plain
        plain.finish()


def print_table(values: dict[str, Any]) -> None:
    """Print nested `values` as a two-column table on standard error, so that standard output stays machine-readable."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in _flatten(values):
        table.add_row(key, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console(stderr=True).print(table)


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value
