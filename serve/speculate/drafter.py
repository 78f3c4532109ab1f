"""Who guesses an answer's next tokens, so that one step of the model can check several.

A guess costs rows of a step, never tokens: the engine takes what it would have taken without it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

FORCED = 0  # a token that the answer's form asks for
LONGEST_MATCH = 8  # tokens in front of a guess that are compared; a longer match is no surer
OF_OTHERS = LONGEST_MATCH  # added to the length of a match in other answers
FIRST_CONFIDENCE = OF_OTHERS + LONGEST_MATCH + 1  # kinds from here on are of a draft network, by how sure it is itself
CONFIDENCES = 10
NUM_KINDS = FIRST_CONFIDENCE + CONFIDENCES


class Draft(NamedTuple):
    """Guessed tokens, and what each of them rests on if those before it are right."""

    token_ids: list[int]
    kinds: list[int]
    """FORCED; or how many tokens before it stood before the same token once already, at most LONGEST_MATCH, and
    OF_OTHERS more where that was in another answer; or FIRST_CONFIDENCE + i, where a draft network gives it a
    probability from i / CONFIDENCES on."""


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
