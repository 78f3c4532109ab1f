"""Which tokens of a byte-pair vocabulary stay.

A token can leave when the pairs that only it needs leave with it: its text is then spelled by the tokens that it was
joined from. A token that stays needs all that it is joined from, and is then made as before: pairs that have no part in
its making are never the earliest on the way to it. So a text of tokens that stayed is still the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from penjing.core.errors import InputError
from penjing.core.text.byte_pairs import Pair, Pairs


def staying(
    pairs: Pairs, room: int, used: Mapping[str, int], where: str, last: Collection[int] = frozenset()
) -> tuple[frozenset[str], frozenset[Pair]]:
    """The tokens that stay, at most `room`, and the pairs that make them.

    First come those without which some text has no spelling, then those that `used` counts, the most frequent first.
    Then comes an equal share of the others that are joined from pairs, in the order of learning, and of the characters
    that bytes can spell, in the order of their ids: both are the order of frequency in the text that the vocabulary was
    learnt from. So do, behind them, those of `last`. Whatever a token is joined from comes with it.

    Args:
        room: tokens, added ones too.
        used: token → how often the user's texts have it.
        last: ids of tokens that leave before others.

    Raises:
        InputError: the tokens that must stay are more than `room`.
    """
    if len(pairs.fixed) > room:
        raise InputError(
            f"{where}: {len(pairs.fixed)} tokens cannot be spelled by others (bytes, characters, control tokens), so "
            f"that {room} are too few; keep more"
        )
    made = dict.fromkeys(left + right for left, right in sorted(pairs.places, key=pairs.places.__getitem__))
    single = (token for token in sorted(pairs.ids, key=pairs.ids.__getitem__) if token not in made)
    places: dict[str, float] = {}
    for kind in (list(made), list(single)):
        for foreign in (False, True):
            part = [token for token in kind if token in pairs.ids and (pairs.ids[token] in last) == foreign]
            places |= {token: foreign + place / len(part) for place, token in enumerate(part)}
    order = sorted(
        (token for token in pairs.ids if token not in pairs.fixed and token not in pairs.spare),
        key=lambda token: (-used.get(token, 0), places[token], pairs.ids[token]),
    )
    kept, joined = set(pairs.fixed), set[Pair]()
    for token in [*order, *sorted(pairs.spare)]:
        if len(kept) >= room:
            break
        if token in kept:
            continue
        making = [] if len(token) == 1 or token in pairs.spare else pairs.making(token)
        if making is None:
            if not pairs.whole:
                continue  # no text becomes this token
            making = []
        needed = {part for pair in making for part in (*pair, pair[0] + pair[1])} | {token}
        if len(kept) + len(needed - kept) <= room:
            kept |= needed
            joined.update(making)
    return frozenset(kept), frozenset(joined)
