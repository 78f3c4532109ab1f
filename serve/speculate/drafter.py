"""Who guesses an answer's next tokens, so that one step of the model can check several.

A guess costs rows of a step, never tokens: the engine takes what it would have taken without it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, Protocol

FORCED = 0  # a token that the answer's form asks for
LONGEST_MATCH = 8  # tokens in front of a guess that are compared; a longer match is no surer
AGREED, DIFFERED = LONGEST_MATCH + 1, LONGEST_MATCH + 3  # one more where more than one token matched
OF_OTHERS = LONGEST_MATCH + 4  # added to the kind of a match in other answers
FIRST_CONFIDENCE = 1 + 2 * OF_OTHERS  # kinds from here on are of a draft network, by how sure it is itself
CONFIDENCES = 10
NUM_KINDS = FIRST_CONFIDENCE + CONFIDENCES


class Draft(NamedTuple):
    """Guessed tokens, and what each of them rests on if those before it are right."""

    token_ids: list[int]
    kinds: list[int]
    """FORCED; or how many tokens before it stood before the same token once already, at most LONGEST_MATCH; or AGREED
    or DIFFERED, where as many stood at several places, before the same token everywhere or not; of these OF_OTHERS more
    where that was in other answers; or FIRST_CONFIDENCE + i, where a draft network gives it a probability from
    i / CONFIDENCES on."""


NO_DRAFT = Draft([], [])


class Drafter(Protocol):
    """Guesses for one answer; reads the answer's tokens where the engine keeps them."""

    def draft(self, most: int) -> Draft:
        """At most `most` tokens that may follow the answer's last one; NO_DRAFT where nothing is likely."""
        ...


class Silent:
    """Guesses nothing."""

    def draft(self, most: int) -> Draft:
        return NO_DRAFT


def kinds_behind(length: int, others: int, count: int, base: int = 0) -> list[int]:
    """The kinds of `count` guesses, 1 at least, behind a match.

    Args:
        length: of the match, 1 to LONGEST_MATCH.
        others: AGREED or DIFFERED by other matches of that length; 0 if there are none.
        base: 0 or OF_OTHERS.
    """
    return list(_kinds_behind(length, others, count, base))


@cache
def _kinds_behind(length: int, others: int, count: int, base: int) -> tuple[int, ...]:
    first = base + (others + (length > 1) if others else length)
    return first, *(base + min(length + i, LONGEST_MATCH) for i in range(1, count))
