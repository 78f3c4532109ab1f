"""What long work tells the user: one object passed down, a rich bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

# all but tab and line feed: what moves the cursor, colours, renames the window, or turns the direction of writing
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_WIDEST = 1 << 16  # columns of a table that nobody sees on a terminal


def printable(text: str) -> str:
    """`text` with control characters written out, as \\x1b, so that what stands in data cannot steer a terminal."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def typed(word: object) -> str:
    """`word`, such as a folder whose name has a space, as it is typed in a command."""
    return shlex.quote(str(word))


class Progress(Protocol):
    """What a long task reports to. Implementations must be cheap: `advance` is called for every tensor or layer."""

    def start(self, task: str, total: int) -> None:
        """Begin `task`, which takes `total` equal parts; a task begun before it ends."""
        ...

    def advance(self, parts: int = 1) -> None:
        """`parts` more of the current task are done."""
        ...

    def status(self, text: str) -> None:
        """How the current task stands: shown beside the bar in place of the time to go, which `text` then holds."""
        ...

    def note(self, message: str) -> None:
        """Show one line that stays: a result, a decision, a step that was skipped."""
        ...

    def finish(self) -> None:
        """The current task is over, where other work follows that is no task of its own."""
        ...


class Silent:
    """Shows nothing: the default of every library function."""

    def start(self, task: str, total: int) -> None: ...

    def advance(self, parts: int = 1) -> None: ...

    def status(self, text: str) -> None: ...

    def note(self, message: str) -> None: ...

    def finish(self) -> None: ...


_said: WeakKeyDictionary[Progress, set[str]] = WeakKeyDictionary()


def once(progress: Progress) -> Callable[[str], None]:
    """`progress.note`, but for lines that this told it before: what each pass over the same data finds anew."""

    def note(message: str) -> None:
        said = _said.setdefault(progress, set())
        if message not in said:
            said.add(message)
            progress.note(message)

    return note


class PlainProgress:
    """For pipes and logs: a line when a task ends, with its seconds; statuses at most every `every_s` seconds."""

    def __init__(self, every_s: float = 10.0) -> None:
        self.every_s = every_s
        self._task: str | None = None
        self._began = 0.0
        self._held: str | None = None  # the newest status, not shown yet
        self._shown_at = -every_s

    def start(self, task: str, total: int) -> None:
        self.finish()
        self._task, self._began = task, time.monotonic()

    def advance(self, parts: int = 1) -> None: ...

    def status(self, text: str) -> None:
        self._held = text
        if time.monotonic() - self._shown_at >= self.every_s:
            self._show_status()

    def note(self, message: str) -> None:
        self._show_status()
        print(printable(message), file=sys.stderr, flush=True)

    def finish(self) -> None:
        self._show_status()
        if self._task is not None:
            print(f"{self._task}: {time.monotonic() - self._began:.1f} s", file=sys.stderr, flush=True)
        self._task = None

    def _show_status(self) -> None:
        if self._held is not None:
            print(self._held, file=sys.stderr, flush=True)
            self._held, self._shown_at = None, time.monotonic()


class TerminalProgress:
    """A rich bar with share done and elapsed time, then the task's status or the time to go."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, ProgressColumn, Task, TaskProgressColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.text import Text

        class Status(ProgressColumn):
            def render(self, task: Task) -> Text:
                return Text(task.fields["status"] or f"left {time_left(task)}", no_wrap=True, overflow="ellipsis")

        class Elapsed(ProgressColumn):
            def render(self, task: Task) -> Text:
                return Text(clock(task.finished_time or task.elapsed or 0.0), style="progress.elapsed")

        self.bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            Elapsed(),
            Status(),
            console=error_console(),
        )
        self._task: Any = None

    def start(self, task: str, total: int) -> None:
        self.finish()
        self._task = self.bar.add_task(task, total=total, status="")

    def advance(self, parts: int = 1) -> None:
        if self._task is not None:
            self.bar.advance(self._task, parts)

    def status(self, text: str) -> None:
        if self._task is not None:
            self.bar.update(self._task, status=text)

    def note(self, message: str) -> None:
        self.bar.console.print(printable(message), highlight=False)

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


def time_left(task: Any) -> str:
    """The time to go of rich's `task`: by the speed of the last 30 s, or of all parts where one takes longer."""
    seconds = task.time_remaining
    if seconds is None and task.completed and task.elapsed:
        seconds = task.elapsed * (task.total / task.completed - 1)
    return "-:--" if seconds is None else clock(seconds)


def clock(seconds: float) -> str:
    """`seconds` as 0:07, 12:34 or 1:02:03."""
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"


def megabytes(count: int) -> str:
    """Bytes for messages: "3.4 kB", "1.23 MB", "538 MB", "14.2 GB"."""
    if count < 10**5:
        return f"{count / 1e3:.3g} kB"
    if count < 10**7:
        return f"{count / 1e6:.2f} MB"
    return f"{count / 1e9:.1f} GB" if count >= 10**10 else f"{count / 1e6:.0f} MB"


def volume(size: float) -> str:
    """Bytes for tables, in three digits: "280 kB", "1.23 MB", "538 MB"."""
    return f"{count(size)}B" if size >= 1000 else f"{size:.0f} B"


def count(number: float) -> str:
    """1 234 567 as "1.23 M"."""
    rounded = float(f"{number:.3g}")  # 999.9 million are 1 G
    for size, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if rounded >= size:
            return f"{rounded / size:.3g}{letter}"
    return f"{number:.3g}"


def plural(number: int, noun: str, several: str = "") -> str:
    """How many there are in words: "1 step", "1,200 steps", "2 processes" where `several` is no noun with an s."""
    return f"{number:,} {noun if number == 1 else several or noun + 's'}"


def duration(seconds: float) -> str:
    """Seconds for tables: "1.23 ms", "45.6 s", "12 min"."""
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def error_console(**options: Any) -> Any:
    """A `rich.console.Console` on standard error, so that standard output stays machine-readable.

    It shows text as it is: `[brackets]` of a path, a layer or a message are not markup, `:names:` no emoji. Where a
    file or another program reads it no row of a table is folded or cut.
    """
    from rich.console import Console

    width = None if sys.stderr.isatty() else _WIDEST
    return Console(stderr=True, markup=False, emoji=False, width=width, **options)


def print_table(values: dict[str, Any]) -> None:
    """Print nested `values` as a two-column table on standard error; no value is cut short."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    for key, value in _flatten(values):
        table.add_row(printable(key), f"{value:,.4g}" if isinstance(value, float) else printable(str(value)))
    error_console().print(table)


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flatten(value, f"{name}.")
        elif isinstance(value, list) and all(isinstance(each, dict) for each in value):
            for place, each in enumerate(value, 1):
                yield from _flatten(each, f"{name}.{place}.")
        else:
            yield name, value
