"""Noise made out of clean text: what optical recognition, wrong encodings, machines and templates do to it.

Each kind is a function of a text, of other texts and of a generator of random numbers.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence

import numpy as np

Corruption = Callable[[str, Sequence[str], np.random.Generator], str]
_CONFUSED = {
    "l": "1", "I": "l", "o": "0", "O": "0", "m": "rn", "rn": "m", "e": "c", "c": "e", "h": "b", "n": "ri", "u": "ii",
    "S": "5", "B": "8", "w": "vv", "d": "cl", "g": "q", "t": "f", "i": "j", "a": "o", "s": "z", ",": ".", ".": ",",
}  # fmt: skip
_MENU = (
    "Home", "About us", "Contact", "Log in", "Sign up", "Search", "Next »", "« Previous", "Share", "Tweet", "Print",
    "Terms of use", "Privacy", "Cookies", "Accept all", "Read more", "Subscribe", "Newsletter", "Sitemap", "Help",
    "FAQ", "All rights reserved", "Back to top", "Leave a comment", "Reply", "Older posts", "Categories", "Tags", "RSS",
)  # fmt: skip
_ADVERTS = (
    "Buy {0} now!!!", "Best {0} online, cheap {0}, {0} free shipping", "{0} {1} discount 50% off today only",
    "Click here for {0} >>>", "{0} | {1} | {0} {1} price", "Order {0} no prescription, {1} best price guaranteed",
    "Top 10 {0} you must see", "WIN a {0}! Limited offer, act fast", "{0} near me, {1} near me, cheap {0} {1}",
)  # fmt: skip


def _shuffled_words(text: str, others: Sequence[str], dice: np.random.Generator) -> str:
    """The words in another order; lines and spaces stay."""
    return _refilled(text, dice.permutation(np.array(text.split(), dtype=object)).tolist())


def _foreign_words(text: str, others: Sequence[str], dice: np.random.Generator) -> str:
    """Words drawn from other texts in place of its own."""
    words = [word for place in dice.choice(len(others), 8) for word in others[int(place)].split()[:300]]
    return _refilled(text, dice.choice(np.array(words or ["word"], dtype=object), len(text.split())).tolist())


def _refilled(text: str, words: list[str]) -> str:
    """`text` with other words between its spaces, one for each."""
    left = iter(words)
    return re.sub(r"\S+", lambda found: next(left), text)


def _wrong_encoding(text: str, others: Sequence[str], dice: np.random.Generator) -> str:
    """UTF-8 read as Windows-1252, twice and again; bytes read two at a time; or what was no ASCII lost."""
    way = int(dice.integers(3))
    if way == 0:
        accents = str.maketrans("aeioun", "àéîöüñ")
        text = "".join(word.translate(accents) if dice.random() < 0.6 else word for word in re.split(r"(\s+)", text))
        for _ in range(int(dice.integers(1, 3))):
            text = text.encode().decode("cp1252", "replace")
        return text
    if way == 1:
        return text.encode("utf-8")[: len(text) // 2 * 2].decode("utf-16-le", "replace")
    return "".join("\ufffd" if dice.random() < 0.2 or ord(sign) > 127 else sign for sign in text)


def _optical(text: str, others: Sequence[str], dice: np.random.Generator) -> str:
    """Letters that look alike, spaces lost and won, words torn at the ends of lines."""
    rate = dice.uniform(0.06, 0.2)
    parts = []
    for sign in text:
        roll = dice.random()
        if sign == " ":
            parts.append("" if roll < rate else sign)
        elif roll < rate:
            parts.append(_CONFUSED.get(sign, "" if roll < rate / 4 else sign + " " if roll < rate / 2 else sign))
        else:
            parts.append(sign)
    return "".join(parts)


def _gibberish(text: str, others: Sequence[str], dice: np.random.Generator) -> str:
    """A part of the letters replaced by any others."""
    rate = dice.uniform(0.25, 0.7)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return "".join(str(dice.choice(letters)) if sign.isalpha() and dice.random() < rate else sign for sign in text)


def _repeated(text: str, others: Sequence[str], dice: np.random.Generator) -> str:
    """A few lines or sentences again and again, with another number or word here and there."""
    pieces = [each for each in re.split(r"(?<=[.!?])\s+|\n+", text) if each.strip()] or [text]
    begin = int(dice.integers(len(pieces)))
    chosen = [each[:200] for each in pieces[begin : begin + int(dice.integers(1, 4))]]
    words = text.split() or [""]
    lines: list[str] = []
    while sum(map(len, lines)) < max(len(text), 400):
        for each in chosen:
            slot = str(dice.integers(1000)) if dice.random() < 0.5 else str(dice.choice(words))
            lines.append(f"{each} {slot}" if dice.random() < 0.5 else each)
    return ("\n" if dice.random() < 0.5 else " ").join(lines)


def _dump(text: str, others: Sequence[str], dice: np.random.Generator) -> str:
    """What machines write for machines: hexadecimal, base64, numbers, paths and keys."""
    way, size = int(dice.integers(4)), max(200, min(len(text), 2000))
    if way == 0:
        return " ".join(f"{byte:02x}" for byte in dice.bytes(size // 3))
    if way == 1:
        return base64.b64encode(dice.bytes(size * 3 // 4)).decode()
    if way == 2:
        return "\n".join(",".join(f"{value:.{int(dice.integers(1, 7))}f}" for value in dice.normal(0, 99, 8))
                         for _ in range(size // 60 + 1))  # fmt: skip
    words = text.split() or ["key"]
    return "\n".join(f"{dice.choice(words)}_{dice.integers(1 << 30):x}={dice.integers(1 << 30)}"
                     for _ in range(size // 25 + 1))  # fmt: skip


def _menus(text: str, others: Sequence[str], dice: np.random.Generator) -> str:
    """What stands around the text of a page, with some of its words as links."""
    words = text.split() or ["page"]
    parts = [
        str(dice.choice(_MENU))
        if dice.random() < 0.6
        else " ".join(dice.choice(words, int(dice.integers(1, 4))).tolist())
        for _ in range(max(20, len(text) // 15))
    ]
    return (" | " if dice.random() < 0.4 else "\n").join(parts)


def _advert(text: str, others: Sequence[str], dice: np.random.Generator) -> str:
    """Offers stuffed with words of the text."""
    words = [word for word in text.split() if len(word) > 4 and word.isalpha()] or ["offer"]
    lines = [str(dice.choice(_ADVERTS)).format(*dice.choice(words, 2).tolist()) for _ in range(max(8, len(text) // 50))]
    return ("\n" if dice.random() < 0.5 else " ").join(lines)


def _cut_lines(text: str, others: Sequence[str], dice: np.random.Generator) -> str:
    """Lines of which a column is missing: their ends, or every other piece."""
    width = int(dice.integers(12, 35))
    flat = " ".join(text.split())
    pieces = [flat[begin : begin + width] for begin in range(0, len(flat), width)]
    return "\n".join(pieces[:: int(dice.integers(2, 4))])


CORRUPTIONS: dict[str, Corruption] = {
    "shuffled words": _shuffled_words,
    "words of other texts": _foreign_words,
    "wrong encoding": _wrong_encoding,
    "optical recognition": _optical,
    "gibberish": _gibberish,
    "repetition": _repeated,
    "machine dump": _dump,
    "menus": _menus,
    "adverts": _advert,
    "cut lines": _cut_lines,
}
