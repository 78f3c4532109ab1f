"""`Places` by its definition, without an index."""

from __future__ import annotations

from penjing.serve.speculate.drafter import AGREED, DIFFERED, LONGEST_MATCH
from penjing.serve.speculate.lookup import MOST_PLACES


def find_by_search(ids: list[int], asked: list[int]) -> tuple[int, int, int]:
    """`Places.find` of a list `ids`."""

    def places_of(last: list[int]) -> list[int]:
        ends = range(len(last), len(ids))
        return [end for end in ends if ids[end - len(last) : end] == last and ids[end] >= 0][-MOST_PLACES:]

    longest = places_of(asked[-2:]) if len(asked) > 1 else []
    longest, length = (longest, 2) if longest else (places_of(asked[-1:]), 1)
    if not longest:
        return 0, 0, 0
    while 1 < length < min(LONGEST_MATCH, len(asked)):
        last = asked[-length - 1 :]
        longer = [end for end in longest if end > length and ids[end - length - 1 : end] == last]
        if not longer:
            break
        longest, length = longer, length + 1
    followers = {ids[end] for end in longest}
    return length, longest[-1], 0 if len(longest) == 1 else AGREED if len(followers) == 1 else DIFFERED


class Searched:
    """`Places` without an index."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    def note(self) -> None:
        pass

    def find(self, asked: list[int]) -> tuple[int, int, int]:
        return find_by_search(self.token_ids, asked)
