"""Which sentences of a text are prose that may be said otherwise, and what in them must stay as it is."""

from __future__ import annotations

import re
from collections import Counter

from penjing.core.text.near_duplicates import word_grams

_END = re.compile(r"(?<=[.!?])[\"'”’)]*[ \t\n]+(?=[\"'“‘(]?[A-Z])|\n[ \t]*\n")
_WORDS, _LONGEST = 5, 600  # at least, and characters at most
_WRAPPED = re.compile(r"[ \t]*\n(?! {2,}|\t)")  # a line break within a paragraph, before a line that is not indented
_CODE = re.compile(r"[`{}<>=|\\#*~^\[\]@$_]|::|->|//|\(\)|\t| {2}|\n")
_PROSE = re.compile(r"[\"'“‘(]?[A-Z][^\n]*[.!?][\"'”’)]*")
_MARK = re.compile(
    r"<[A-Z]+_\w+>"  # what the step `pii` writes
    r"|\S*\d\S*"  # numbers, versions, dates
    r"|\b[\w.-]*[a-z][A-Z]\w*|\b[A-Z]{2,}\w*|\w+\.\w+"  # identifiers, capitals, names of files
    r"|(?<=[^.!?\s] )[\"'“‘(]?[A-Z][\w'’-]*"  # names: capitals within a sentence
)
_NEGATION = re.compile(r"\b(?:no|not|never|none|nothing|nobody|nowhere|neither|nor|without|cannot)\b|n['’]t\b", re.I)
_GRAMS = 5


def sentences_of(text: str) -> list[tuple[int, int]]:
    """(Begin, end) of the sentences of prose in `text`, in order; code, tables, headings and lists are left out."""
    found, begin = [], 0
    for end in [*_END.finditer(text), None]:
        stop = len(text) if end is None else end.start() + len(end[0]) - len(end[0].lstrip("\"'”’)"))
        piece = text[begin:stop]
        lead = len(piece) - len(piece.lstrip("\n"))
        if _is_prose(one_line(piece)):
            found.append((begin + lead, begin + len(piece.rstrip())))
        begin = stop if end is None else end.end()
    return found


def one_line(sentence: str) -> str:
    """`sentence` without the breaks of its lines."""
    return _WRAPPED.sub(" ", sentence.strip("\n").rstrip())


def _is_prose(line: str) -> bool:
    return (
        len(line) <= _LONGEST
        and len(line.split()) >= _WORDS
        and not _CODE.search(line)
        and _PROSE.fullmatch(line) is not None
        and sum(each.isalpha() or each == " " for each in line) >= 0.85 * len(line)
    )


def marks_of(sentence: str) -> Counter[str]:
    """What may not change: numbers, names, identifiers and placeholders."""
    return Counter(found.strip("\"'“”‘’().,;:!?") for found in _MARK.findall(sentence))


def negations_of(sentence: str) -> int:
    """How often something is denied: vectors of sentences hardly tell it."""
    return len(_NEGATION.findall(sentence))


def overlap(first: str, second: str) -> float:
    """Of the runs of five words of both texts, the share that both have (Jaccard); 1.0 where neither has one."""
    grams = [set(word_grams(text, _GRAMS).tolist()) for text in (first, second)]
    both = len(grams[0] | grams[1])
    return len(grams[0] & grams[1]) / both if both else 1.0
