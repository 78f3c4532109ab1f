"""Prompt lookup: what followed an answer's last tokens when they stood in its prompt or in itself before.

Saxena, "Prompt Lookup Decoding" (2023). Summaries, corrections and answers about a text repeat it; code repeats itself.
"""

from __future__ import annotations

from penjing.serve.speculate.drafter import AGREED, DIFFERED, LONGEST_MATCH, NO_DRAFT, Draft, kinds_behind

MOST_PLACES = 8  # places of a token or a pair that are compared, the latest ones


class Places:
    """Where the tokens of a list stand, so that what followed some of them is found.

    Args:
        token_ids: grows at its end. Numbers below 0 stand between texts that do not belong together.
    """

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self._of_token: dict[int, list[int]] = {}  # of each token: the places behind it
        self._of_pair: dict[tuple[int, int], list[int]] = {}  # of each two tokens: the places behind them
        self._num_noted = 0  # places 1 … this one are noted

    def note(self) -> None:
        """The list has grown: note all places but that behind the last token, where nothing stands yet."""
        token_ids, of_token, of_pair = self.token_ids, self._of_token, self._of_pair
        for place in range(self._num_noted + 1, len(token_ids)):
            if token_ids[place] < 0:
                continue
            last = token_ids[place - 1]
            of_token.setdefault(last, []).append(place)
            if place > 1:
                of_pair.setdefault((token_ids[place - 2], last), []).append(place)
        self._num_noted = max(self._num_noted, len(token_ids) - 1)

    def find(self, asked: list[int]) -> tuple[int, int, int]:
        """The longest match of the last tokens of `asked`, the place behind it, of equally long ones the latest, and
        what the others tell: 0, AGREED or DIFFERED. A match of 0 tokens is none."""
        token_ids = self.token_ids
        places = self._of_pair.get((asked[-2], asked[-1])) if len(asked) > 1 else None
        if places is None:
            places = self._of_token.get(asked[-1])
            if places is None:
                return 0, 0, 0
            token_id, *before = [token_ids[place] for place in places[: -MOST_PLACES - 1 : -1]]
            return 1, places[-1], (AGREED if before == [token_id] * len(before) else DIFFERED) if before else 0
        longest = found = others = 0
        for place in places[: -MOST_PLACES - 1 : -1]:
            length, most = 2, min(LONGEST_MATCH, place, len(asked))
            while length < most and token_ids[place - 1 - length] == asked[-1 - length]:
                length += 1
            if length > longest:
                longest, found, others = length, place, 0
            elif length == longest and others != DIFFERED:
                others = AGREED if token_ids[place] == token_ids[found] else DIFFERED
        return longest, found, others


class LookupDrafter:
    """Guesses what followed the longest match in the answer's own tokens.

    Args:
        token_ids: the sequence's own list, prompt first, which grows while it is answered.
    """

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids, self._places = token_ids, Places(token_ids)

    def draft(self, most: int) -> Draft:
        token_ids = self._token_ids
        self._places.note()
        length, found, others = self._places.find(token_ids)
        if most < 1 or not length:
            return NO_DRAFT
        guessed = token_ids[found : found + most]
        if len(guessed) < most:
            # A match that reaches the end goes on with what it has itself guessed: the answer repeats itself.
            guessed = (guessed * (most // len(guessed) + 1))[:most]
        return Draft(guessed, kinds_behind(length, others, most))
