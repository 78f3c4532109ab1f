"""Guesses by what other answers of the same engine have said.

Oliaro et al., "SuffixDecoding" (2024) keep the answers of a service in a suffix tree. Here the latest ones lie in two
lists, of which the older one is dropped when the younger one is full. Prompts of others are not kept, and nothing of
another answer is ever given out: a guess is what the model itself would choose, or it is dropped.
"""

from __future__ import annotations

from penjing.serve.speculate.drafter import LONGEST_MATCH, NO_DRAFT, OF_OTHERS, Draft, kinds_behind
from penjing.serve.speculate.lookup import Places

MOST_TOKENS = 1 << 15  # of one list; both take some 15 MB
APART = -1  # between two pieces
PIECE = 32  # tokens of an answer that are told at once, because several answers grow side by side
OVERLAP = 2  # tokens of the answer's piece before, so that what follows a pair is known across pieces


class Told:
    """What answers have said lately; belongs to one engine."""

    _lists: list[Places]

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._lists = [Places([]), Places([])]  # the younger one first

    def add(self, token_ids: list[int]) -> None:
        """Keep a piece of an answer."""
        if len(self._lists[0].token_ids) > MOST_TOKENS:
            self._lists = [Places([]), self._lists[0]]
        self._lists[0].token_ids.extend((*token_ids, APART))
        self._lists[0].note()

    def draft(self, asked: list[int], most: int) -> Draft:
        """What followed the longest match of the last tokens of `asked`."""
        younger, older = self._lists
        told, (length, place, others) = younger.token_ids, younger.find(asked)
        if length < LONGEST_MATCH and older.token_ids:
            found = older.find(asked)
            if found[0] > length:
                told, (length, place, others) = older.token_ids, found
        if most < 1 or not length:
            return NO_DRAFT
        guessed = told[place : place + most]
        if APART in guessed:
            guessed = guessed[: guessed.index(APART)]
        return Draft(guessed, kinds_behind(length, others, len(guessed), OF_OTHERS))


class Telling:
    """One answer that grows: guesses by what others told, and tells them what it said.

    Args:
        token_ids: the sequence's own list, prompt first.
        begin: the first token that is told.
    """

    def __init__(self, told: Told, token_ids: list[int], begin: int) -> None:
        self._told, self._token_ids = told, token_ids
        self._begin = self._first = begin

    def draft(self, most: int) -> Draft:
        if len(self._token_ids) - self._begin >= PIECE:
            self.tell()
        return self._told.draft(self._token_ids, most)

    def tell(self) -> None:
        """What has not been told."""
        if len(self._token_ids) > self._begin:
            self._told.add(self._token_ids[max(self._begin - OVERLAP, self._first) :])
            self._begin = len(self._token_ids)
