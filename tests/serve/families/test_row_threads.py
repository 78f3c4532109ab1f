"""Parts of a batch on threads of their own: how rows are cut, which session runs them, that they run together."""

from __future__ import annotations

import threading

import pytest

from penjing.serve.families.row_threads import RowThreads


@pytest.mark.parametrize(
    ("threads", "rows", "sizes"),
    [
        (1, 1, [1]),
        (1, 16, [16]),
        (1, 40, [13, 13, 14]),
        (2, 1, [1]),
        (2, 2, [1, 1]),
        (2, 33, [8, 8, 8, 9]),
        (2, 64, [16, 16, 16, 16]),
        (4, 3, [3]),
        (4, 5, [1, 1, 1, 2]),
    ],
)
def test_rows_are_cut_evenly_for_all_threads(threads: int, rows: int, sizes: list[int]) -> None:
    parts = RowThreads(lambda _: None, threads).parts(rows, largest=16)
    assert [part.stop - part.start for part in parts] == sizes
    assert [row for part in parts for row in range(rows)[part]] == list(range(rows))


def nothing() -> None: ...


def test_one_part_has_all_threads_and_several_have_one_each() -> None:
    together = threading.Barrier(2)

    def work(session: int, part: slice) -> tuple[int, slice]:
        together.wait(60)
        return session, part

    row_threads = RowThreads(lambda threads: threads, 2)
    parts = row_threads.parts(32, largest=16)
    assert row_threads.start(work, parts, nothing)() == [(1, part) for part in parts]
    assert row_threads.start(lambda session, _: session, parts[:1], nothing)() == [2]


def test_a_thread_that_is_done_goes_on_with_the_next_batch() -> None:
    """The first part of the first batch ends only when the second batch has begun on the other thread."""
    row_threads, second = RowThreads(lambda threads: threads, 2), threading.Event()

    def work(_: int, part: slice) -> int:
        if part.start == 0:
            assert second.wait(60)
        return part.start

    first = row_threads.start(work, row_threads.parts(4, largest=2), nothing)
    assert not second.is_set()
    other = row_threads.start(lambda _, part: part.stop, row_threads.parts(4, largest=2), second.set)
    assert (first(), other()) == ([0, 2], [2, 4])


def test_an_error_of_a_part_is_the_callers() -> None:
    row_threads = RowThreads(lambda threads: threads, 2)
    wait = row_threads.start(lambda _, part: 1 // part.start, row_threads.parts(4, largest=2), nothing)
    with pytest.raises(ZeroDivisionError):
        wait()
