"""A sentence with some of its words replaced by synonyms."""

from __future__ import annotations

import re

import numpy as np

from penjing.curate.augment.wordnet import WordNet

_WORD = re.compile(r"(?<![\w'’.-])[a-z]{3,}(?![\w'’-]|\.\w)")
_ARTICLE = re.compile(r"\b[Aa]n? $")


def with_synonyms(sentence: str, wordnet: WordNet, share: float, dice: np.random.Generator) -> str:
    """`sentence` with about `share` of those words replaced that have a synonym; words that begin with a capital, or
    belong to a name of several pieces or a number, stay."""
    parts, end = [], 0
    for found in _WORD.finditer(sentence):
        synonyms = wordnet.synonyms(found[0])
        if not synonyms or dice.random() >= share:
            continue
        synonym = synonyms[int(dice.integers(len(synonyms)))]
        article = _ARTICLE.search(sentence, max(0, found.start() - 4), found.start())
        if article and (synonym[0] in "aeiou") != (found[0][0] in "aeiou"):
            continue
        parts += [sentence[end : found.start()], synonym]
        end = found.end()
    return "".join([*parts, sentence[end:]])
