"""Work on the data, before processes join, as the watch over them sees it."""

from __future__ import annotations

from penjing.core.progress import Progress
from penjing.train.processes.watch import Watch


class Marked:
    """A progress each of whose parts is a sign for `watch` that this process gets further, however long it all takes;
    those that wait for it are then left alone too."""

    def __init__(self, progress: Progress, watch: Watch) -> None:
        self._progress, self._watch = progress, watch
        self._doing = "its data"
        watch.at(self._doing)

    def start(self, task: str, total: int) -> None:
        """See `Progress`."""
        self._doing = f"its data, {task}"
        self._watch.at(self._doing, everywhere=False)
        self._progress.start(task, total)

    def advance(self, parts: int = 1) -> None:
        """See `Progress`."""
        self._watch.at(self._doing, everywhere=False)
        self._progress.advance(parts)

    def finish(self) -> None:
        """See `Progress`."""
        self._progress.finish()

    def status(self, text: str) -> None:
        """See `Progress`."""
        self._progress.status(text)

    def note(self, message: str) -> None:
        """See `Progress`."""
        self._progress.note(message)
