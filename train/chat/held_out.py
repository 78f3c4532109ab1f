"""Which rows are held out: those of prompts that hash below a share, so that more rows change none that are there."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

from penjing.core.errors import ConfigError
from penjing.train.chat.tokens import Masked


def prompt_key(texts: Iterable[Masked]) -> bytes:
    """What rows of equal prompts share: the tokens of their texts that are not learnt, or all of a text that is learnt
    as a whole, in which nothing tells the prompt apart."""
    return b"".join((text.ids if text.learnt.all() else text.ids[~text.learnt]).tobytes() for text in texts)


def held_out_places(keys: Sequence[bytes], share: float) -> set[int]:
    """The places of the rows that are held out: those whose key, such as their prompt, hashes below `share`, and one at
    least; rows of one key stay together.

    Raises:
        ConfigError: nothing would be left to learn.
    """
    if not share:
        return set()
    hashes = [int.from_bytes(hashlib.sha256(key).digest()[:8], "big") / 2**64 for key in keys]
    edge = max(share, math.nextafter(min(hashes), 1.0))
    held = {place for place, value in enumerate(hashes) if value < edge}
    if len(held) == len(keys):
        raise ConfigError(
            f"data.held_out = {share} holds out all {len(keys)} rows, since their prompts are equal or so few; lower "
            "it, set data.held_out = 0 with evaluation.every = 0, or give more data"
        )
    return held


def judged_places(held: set[int], most: int) -> list[int]:
    """The places of held-out rows that are judged: of more than `most` so many at equal distances, and not the first,
    which may all be of one source."""
    places, count = sorted(held), min(len(held), most)
    return [places[number * len(places) // count] for number in range(count)]
