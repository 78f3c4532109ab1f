"""Synonyms of English words out of WordNet's files (Princeton WordNet 3.0; format: its manual pages wndb(5WN) and
cntlist(5WN)).

A word has several senses, and a synonym of a rare one is no synonym in most texts: of "break", WordNet knows 75. So a
word has a synonym here only if nearly all its counted uses are of one part of speech and most of one sense, and only if
that sense is the first of the synonym too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from penjing.core.errors import InputError
from penjing.core.progress import Silent
from penjing.curate.documents.debian import fetch_debian

_PACKAGE, _FOLDER = "wordnet-base", Path("usr/share/wordnet")
_PARTS = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
FILES = tuple(f"{what}.{part}" for part in _PARTS for what in ("index", "data"))
_WORD = re.compile(r"[a-z]{3,}")
_ONE_PART, _ONE_SENSE = 0.9, 0.6  # shares of the counted uses of a word
_FEWEST = 2  # counted uses of a synonym; of rarer ones nobody knows which sense is common
_VOWELS = "aeiou"
_FUNCTION = frozenset(  # words of grammar, of which WordNet knows other uses alone: "but" as in "but a child"
    (
        *("about", "above", "after", "all", "also", "although", "and", "any", "because", "before", "below", "between"),
        *(
            "both",
            "but",
            "can",
            "could",
            "down",
            "each",
            "either",
            "else",
            "even",
            "every",
            "few",
            "for",
            "from",
            "how",
        ),
        *("however", "into", "its", "just", "last", "less", "like", "many", "may", "might", "more", "most", "much"),
        *("must", "near", "neither", "next", "nor", "not", "now", "off", "once", "one", "only", "other", "our", "out"),
        *("over", "own", "past", "per", "round", "same", "shall", "should", "since", "some", "still", "such", "than"),
        *(
            "that",
            "the",
            "their",
            "then",
            "there",
            "these",
            "this",
            "those",
            "though",
            "through",
            "thus",
            "till",
            "too",
        ),
        *("two", "under", "until", "upon", "very", "what", "when", "where", "which", "while", "who", "whom", "whose"),
        *("why", "will", "with", "within", "without", "would", "yet", "you", "your"),
    )
)


@dataclass(frozen=True)
class _Sense:
    """One lemma's best sense in one part of speech."""

    offset: int
    uses: int  # of all its senses in this part
    share: float  # of these uses that are of this sense


class WordNet:
    """Synonyms by lemma and part of speech; `load_wordnet` makes it."""

    def __init__(
        self, synonyms: dict[str, tuple[str, tuple[str, ...]]], irregular: frozenset[str], lemmas: frozenset[str]
    ) -> None:
        self._synonyms, self._irregular, self._lemmas = synonyms, irregular, lemmas

    def __len__(self) -> int:
        return len(self._synonyms)

    def synonyms(self, word: str) -> tuple[str, ...]:
        """What may stand for `word` (in small letters), in its form: plurals of nouns, and -s, -ed, -ing of verbs,
        where both are regular; () where nothing is sure enough."""
        if word in _FUNCTION or word in self._irregular:
            return ()
        stems = [lemma for lemma in _stems(word, "s") if lemma in self._lemmas]
        if found := self._synonyms.get(word):
            return () if stems else found[1]  # "loads" are many, and what somebody does
        for ending in ("s", "ed", "ing"):
            for lemma in _stems(word, ending):
                part, others = self._synonyms.get(lemma, ("", ()))
                if part == "v" or (part == "n" and ending == "s"):
                    return tuple(
                        _inflected(other, ending)
                        for other in others
                        if other not in self._irregular and _inflected(other, ending) not in self._irregular
                    )
        return ()


def load_wordnet(folder: Path | None) -> WordNet:
    """WordNet in `folder`, with its files index.noun, data.noun and so on; by default Debian's, fetched once (29 MB).

    Takes 2 s of a core.

    Raises:
        InputError: `folder` lacks a file, or a file is none of WordNet's.
        SetupError: Debian's package cannot be fetched.
    """
    folder = wordnet_folder(folder)
    counts = _counts(folder)
    senses = {sign: _senses(folder, part, counts) for part, sign in _PARTS.items()}
    used: dict[str, tuple[str, int]] = {}  # lemma → the part of speech that it has most often, and its uses there
    total: dict[str, int] = {}
    for sign, lemmas in senses.items():
        for lemma, sense in lemmas.items():
            total[lemma] = total.get(lemma, 0) + sense.uses
            if sense.uses > used.get(lemma, ("", -1))[1]:
                used[lemma] = sign, sense.uses
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    members = {sign: _members(folder, part) for part, sign in _PARTS.items()}
    for lemma, (sign, uses) in used.items():
        sense = senses[sign][lemma]
        if uses < _ONE_PART * total[lemma] or sense.share < _ONE_SENSE:
            continue
        others = tuple(
            other
            for other in members[sign].get(sense.offset, ())
            if other != lemma and _is_that(senses[sign].get(other), sense.offset, total.get(other, 0))
        )
        if others:
            found[lemma] = sign, others
    return WordNet(found, _irregular(folder), frozenset(total))


def wordnet_folder(folder: Path | None) -> Path:
    """Where WordNet's files are.

    Raises:
        InputError: one is missing.
        SetupError: Debian's package cannot be fetched.
    """
    folder = fetch_debian(_PACKAGE, Silent()) / _FOLDER if folder is None else folder
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise InputError(
            f"steps.wordnet: {folder} lacks {', '.join(missing)}; name the folder of WordNet 3's files, or leave it "
            f"out, and Debian's {_PACKAGE} is fetched"
        )
    return folder


def _is_that(sense: _Sense | None, offset: int, total: int) -> bool:
    return (
        sense is not None
        and sense.offset == offset
        and sense.uses >= max(_FEWEST, _ONE_PART * total)
        and sense.share >= _ONE_SENSE
    )


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("  ")]
    except UnicodeDecodeError:
        raise InputError(f"steps.wordnet: {path} is no file of WordNet; it is not text") from None


def _senses(folder: Path, part: str, counts: dict[tuple[str, str, int], int]) -> dict[str, _Sense]:
    """Lemma → its most frequent sense; WordNet sorts senses by their uses."""
    found = {}
    path = folder / f"index.{part}"
    for line in _lines(path):
        fields = line.split()
        try:
            lemma, number, num_pointers = fields[0], int(fields[2]), int(fields[3])
            offsets = [int(each) for each in fields[6 + num_pointers : 6 + num_pointers + number]]
        except (IndexError, ValueError):
            offsets, lemma = [], ""
        if not offsets:
            raise InputError(f"steps.wordnet: {path}: {line[:60]!r} is no line of an index of WordNet 3")
        if _WORD.fullmatch(lemma):
            uses = [counts.get((lemma, part, place), 0) for place in range(1, len(offsets) + 1)]
            share = uses[0] / sum(uses) if sum(uses) else float(len(offsets) == 1)
            found[lemma] = _Sense(offsets[0], sum(uses), share)
    return found


def _counts(folder: Path) -> dict[tuple[str, str, int], int]:
    """(Lemma, part, place of the sense) → uses in the texts that WordNet's makers looked through."""
    kinds = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}
    found = {}
    path = folder / "cntlist.rev"
    if not path.is_file():
        raise InputError(f"steps.wordnet: {folder} lacks cntlist.rev, by which common senses are known")
    for line in _lines(path):
        key, _, rest = line.partition("%")
        fields = rest.split()
        if len(fields) == 3 and fields[0][:1] in kinds and fields[1].isdigit() and fields[2].isdigit():
            found[key, kinds[fields[0][0]], int(fields[1])] = int(fields[2])
    return found


def _members(folder: Path, part: str) -> dict[int, tuple[str, ...]]:
    """Offset of a synonym set → its words of one piece, none of them a name."""
    found = {}
    path = folder / f"data.{part}"
    for line in _lines(path):
        fields = line.split(" ", 4 + 2 * 64)
        try:
            words = [fields[4 + 2 * place].partition("(")[0] for place in range(int(fields[3], 16))]
            found[int(fields[0])] = tuple(word for word in words if _WORD.fullmatch(word))
        except (IndexError, ValueError):
            raise InputError(f"steps.wordnet: {path}: {line[:60]!r} is no line of WordNet 3's data") from None
    return found


def _irregular(folder: Path) -> frozenset[str]:
    """Irregular forms, and the words that have any."""
    found: set[str] = set()
    for part in _PARTS:
        if (path := folder / f"{part}.exc").is_file():
            found.update(word for line in _lines(path) for word in line.split())
    return frozenset(found)


def _stems(word: str, ending: str) -> list[str]:
    """What `word` may be a regular form of."""
    if not word.endswith(ending) or word.endswith("ss"):
        return []
    stem = word.removesuffix(ending)
    found = [stem, f"{stem}e"]
    if ending == "s" and stem.endswith("ie"):
        found.append(f"{stem[:-2]}y")
    if ending == "s" and stem.endswith("e"):
        found.append(stem[:-1])
    if ending == "ed" and stem.endswith("i"):
        found.append(f"{stem[:-1]}y")
    if len(stem) > 3 and stem[-1] == stem[-2]:
        found.append(stem[:-1])
    return [each for each in found if _inflected(each, ending) == word]


def _inflected(lemma: str, ending: str) -> str:
    """The regular form of `lemma`."""
    behind_consonant = lemma.endswith("y") and lemma[-2] not in _VOWELS
    if ending == "s":
        if behind_consonant:
            return f"{lemma[:-1]}ies"
        return f"{lemma}es" if lemma.endswith(("s", "x", "z", "ch", "sh")) else f"{lemma}s"
    if lemma.endswith("e"):
        short = lemma if ending == "ing" and lemma.endswith(("ee", "oe", "ye")) else lemma[:-1]
        return f"{short}{ending}"
    if ending == "ed" and behind_consonant:
        return f"{lemma[:-1]}ied"
    # only words of one syllable double their last consonant for sure; for others it hangs on the stress
    if re.fullmatch(r"[^aeiou]*[aeiou][bdfgklmnprt]", lemma):
        return f"{lemma}{lemma[-1]}{ending}"
    return f"{lemma}{ending}"
