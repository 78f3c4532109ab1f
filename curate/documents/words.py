"""Words and sentences for datatrove's filters: its own splitters load a language's spaCy model each, and take five
times as long as the filter (see docs/data.md)."""

from __future__ import annotations

import re

from datatrove.utils.word_tokenizers import WordTokenizer

from penjing.core.text.near_duplicates import SPACELESS

_TOKEN = re.compile(rf"[^\W{SPACELESS}]+(?:['’][^\W\d_]+)?|[{SPACELESS}]|[^\w\s]+")
_SENTENCE = re.compile(r"[^.!?。！？…]*(?:[.!?。！？…]+[\"'”’)\]]*(?:\s+|$)|[.!?。！？…]+|$)")


class PlainWords(WordTokenizer):
    """Runs of letters and digits, runs of signs, single characters of scripts without spaces."""

    def __init__(self) -> None:
        super().__init__(None)

    def word_tokenize(self, text: str) -> list[str]:
        """The words and signs of `text`, in order."""
        return _TOKEN.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        """Its sentences, without white space around them."""
        return [text[begin:end].strip() for begin, end in self.span_tokenize(text)]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """(Begin, end) of its sentences."""
        return [found.span() for found in _SENTENCE.finditer(text) if found[0].strip()]


WORDS = PlainWords()
