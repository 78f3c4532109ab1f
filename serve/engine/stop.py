"""Stop strings in streamed text: found across token boundaries, and never shown in part."""

from __future__ import annotations


class StopStrings:
    """Cuts a stream of text before the first stop string to be completed.

    The result does not depend on how the text is divided into pieces: of several matches the one that ends first
    counts, and of those that end together the one that began first. Text that may still become a stop string is held
    back.
    """

    def __init__(self, stops: tuple[str, ...], include_in_output: bool = False) -> None:
        self._stops = stops
        self._include = include_in_output
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The part of the stream that is now safe to show, and whether a stop string was met (nothing follows then)."""
        if not text or not self._stops:
            return text, False
        buffer = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if matches:
            end, start = min(matches)
            self._held = ""
            return buffer[: end if self._include else start], True
        hold = max(self._overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - hold :]
        return buffer[: len(buffer) - hold], False

    def flush(self) -> str:
        """What was held back, when the stream ends without a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(buffer: str, stop: str) -> int:
        """Length of the longest end of `buffer` with which `stop` begins."""
        for length in range(min(len(stop) - 1, len(buffer)), 0, -1):
            if buffer.endswith(stop[:length]):
                return length
        return 0
