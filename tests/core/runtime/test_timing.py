"""Computations that are compared take turns, and their ratios are taken round by round."""

from __future__ import annotations

from collections.abc import Callable

from penjing.core.runtime.timing import interleaved, summarise


class Clock:
    """Moves on only by what calls take."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.order: list[str] = []

    def call(self, name: str, *takes: float) -> Callable[[], None]:
        left = list(takes)

        def work() -> None:
            self.order.append(name)
            self.seconds += left.pop(0) if len(left) > 1 else left[0]

        return work


def test_calls_take_turns_and_the_first_changes() -> None:
    clock = Clock()
    times = interleaved(
        [clock.call("a", 9, 9, 1, 3, 2), clock.call("b", 4)], rounds=2, seconds=6, now=lambda: clock.seconds
    )
    assert clock.order == [*"aabb", *"aaa", *"bb", *"bb", *"aaa"]  # two to warm up; then until 6 s have passed
    assert times == [[2, 2], [4, 4]]


def test_a_summary_compares_round_by_round() -> None:
    # The machine was half as fast in the second round: the ratio is 2 all the same.
    row = summarise([1.0, 2.0, 1.0], [2.0, 4.0, 2.0], 64)
    assert (row["seconds"], row["low"], row["high"], row["throughput"]) == (1.0, 1.0, 2.0, 64.0)
    assert (row["speedup"], row["speedup_low"], row["speedup_high"], row["runs"]) == (2.0, 2.0, 2.0, 3)
