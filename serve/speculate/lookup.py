"""Prompt lookup: what followed the answer's last tokens when they stood in prompt or answer before.

Saxena, "Prompt Lookup Decoding" (2023). Summaries, corrections and answers about a text repeat it; code repeats itself.
"""

from __future__ import annotations

from penjing.serve.speculate.drafter import LONGEST_MATCH, NO_DRAFT, Draft

SHORTEST_MATCH = 2  # one token alone comes back too often to say what follows
MOST_PLACES = 8  # places of a pair that are compared, the latest ones


class LookupDrafter:
    """Finds the longest earlier match of the last tokens, of equally long ones the latest.

    Args:
        token_ids: the sequence's own list, prompt first, which grows while it is answered.
    """

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._ends: dict[tuple[int, int], list[int]] = {}  # of each pair of tokens: the places behind it
        self._num_indexed = 1  # of them places 2 … this one are in `_ends`

    def draft(self, most: int) -> Draft:
        token_ids = self._token_ids
        self._index(len(token_ids))
        if most < 1 or len(token_ids) <= SHORTEST_MATCH:
            return NO_DRAFT
        places = self._ends.get((token_ids[-2], token_ids[-1]))
        if places is None:
            return NO_DRAFT
        longest, found = 0, 0
        for place in places[: -MOST_PLACES - 1 : -1]:
            length = self._match(place)
            if length > longest:
                longest, found = length, place
                if length == LONGEST_MATCH:
                    break
        # A match that reaches the end goes on with what it has itself guessed: the answer repeats itself.
        period = len(token_ids) - found
        guessed = token_ids[found : found + most]
        while len(guessed) < most:
            guessed.append(guessed[len(guessed) - period])
        return Draft(guessed, [min(longest + i, LONGEST_MATCH) for i in range(most)])

    def _index(self, num_tokens: int) -> None:
        """Note all pairs but the last, which has nothing behind it."""
        token_ids, ends = self._token_ids, self._ends
        for place in range(self._num_indexed + 1, num_tokens):
            ends.setdefault((token_ids[place - 2], token_ids[place - 1]), []).append(place)
        self._num_indexed = max(self._num_indexed, num_tokens - 1)

    def _match(self, place: int) -> int:
        """How many tokens before `place` equal the last ones; a pair does already."""
        token_ids, length = self._token_ids, SHORTEST_MATCH
        while length < LONGEST_MATCH and length < place and token_ids[place - 1 - length] == token_ids[-1 - length]:
            length += 1
        return length
