"""Which tokens have letters of other writing systems than the user's texts."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence
from functools import cache

from penjing.core.errors import ConfigError
from penjing.core.text.tokenizer import Tokenizer

COMMON = frozenset({"", "COMBINING", "MODIFIER", "FEMININE", "MASCULINE", "MICRO"})  # in texts of any system


def foreign_tokens(tokenizer: Tokenizer, scripts: Sequence[str]) -> frozenset[int]:
    """Ids of the tokens with a letter of a writing system that is not among `scripts`; none where that is empty.

    Args:
        scripts: as the names of Unicode's letters begin, in any case: latin, cyrillic, cjk.

    Raises:
        ConfigError: a name with which that of no letter begins.
    """
    if not scripts:
        return frozenset()
    named = {name.upper() for name in scripts}
    if unknown := sorted(named - known_scripts()):
        raise ConfigError(
            f"--script {unknown[0].lower()}: no letter's name in Unicode begins so; take latin, cyrillic, greek, "
            "arabic, hebrew, devanagari, cjk, hiragana, katakana, hangul, thai or another"
        )
    texts = ((number, tokenizer.decode([number], skip_special=False)) for number in range(tokenizer.vocab_size))
    return frozenset(number for number, text in texts if scripts_of(text) - named)


def scripts_of(text: str) -> set[str]:
    """The writing systems of the letters and marks in `text`, by the first word of their names."""
    return {_script(character) for character in text} - COMMON


def _script(character: str) -> str:
    if unicodedata.category(character)[0] not in "LM":
        return ""
    return unicodedata.name(character, "").partition(" ")[0].partition("-")[0]


@cache
def known_scripts() -> set[str]:
    """All that `scripts_of` may say."""
    return scripts_of("".join(map(chr, range(sys.maxunicode + 1))))
