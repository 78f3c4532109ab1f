"""Prompt lookup: what followed an answer's last tokens when they stood in its prompt or in itself before.

Saxena, "Prompt Lookup Decoding" (2023). Summaries, corrections and answers about a text repeat it; code repeats itself.
"""

from __future__ import annotations

from penjing.serve.speculate.drafter import LONGEST_MATCH, NO_DRAFT, Draft

MOST_PLACES = 8  # places of a pair that are compared, the latest ones


class Places:
    """Where the tokens of a list stand, so that what followed some of them is found.

    Args:
        token_ids: grows at its end. Numbers below 0 stand between texts that do not belong together.
    """

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self._ends: dict[tuple[int, int], list[int]] = {}  # of each pair of tokens: the places behind it
        self._latest: dict[int, int] = {}  # of each token: the last place behind it
        self._num_indexed = 0  # places 1 … this one are noted

    def find(self, asked: list[int]) -> tuple[int, int]:
        """The longest match of the last tokens of `asked`, and the place behind it; of equally long ones the latest.
        A match of 0 tokens is none."""
        self._index()
        longest = found = 0
        for place in self._ends.get((asked[-2], asked[-1]), ())[: -MOST_PLACES - 1 : -1] if len(asked) > 1 else ():
            length = self._match(asked, place)
            if length > longest:
                longest, found = length, place
                if length == LONGEST_MATCH:
                    break
        if not longest and (place := self._latest.get(asked[-1])):
            return 1, place
        return longest, found

    def _index(self) -> None:
        """Note all places but that behind the last token, where nothing stands yet."""
        token_ids, ends, latest = self.token_ids, self._ends, self._latest
        for place in range(self._num_indexed + 1, len(token_ids)):
            if token_ids[place] < 0:
                continue
            latest[token_ids[place - 1]] = place
            if place > 1:
                ends.setdefault((token_ids[place - 2], token_ids[place - 1]), []).append(place)
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)

    def _match(self, asked: list[int], place: int) -> int:
        """How many tokens before `place` equal the last ones of `asked`; a pair does already."""
        token_ids, length = self.token_ids, 2
        most = min(LONGEST_MATCH, place, len(asked))
        while length < most and token_ids[place - 1 - length] == asked[-1 - length]:
            length += 1
        return length


class LookupDrafter:
    """Guesses what followed the longest match in the answer's own tokens.

    Args:
        token_ids: the sequence's own list, prompt first, which grows while it is answered.
    """

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids, self._places = token_ids, Places(token_ids)

    def draft(self, most: int) -> Draft:
        token_ids = self._token_ids
        length, found = self._places.find(token_ids)
        if most < 1 or not length:
            return NO_DRAFT
        # A match that reaches the end goes on with what it has itself guessed: the answer repeats itself.
        period = len(token_ids) - found
        guessed = token_ids[found : found + most]
        while len(guessed) < most:
            guessed.append(guessed[len(guessed) - period])
        return Draft(guessed, [min(length + i, LONGEST_MATCH) for i in range(most)])
