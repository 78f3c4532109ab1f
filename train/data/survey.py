"""What a first look at the sources finds: which documents are near duplicates, which are held out, which are damaged.

Near duplicates stay on one side: of two releases of the same pages, five of six held-out ones have else a twin in
training. So the unit that is held out is a cluster, by the hash of its first document's name.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.errors import InputError, RequestError
from penjing.core.files import atomic_write_text
from penjing.core.progress import Progress, plural
from penjing.core.text.near_duplicates import Signer, connected
from penjing.core.text.records import Damage, Record
from penjing.train.data.corpora import name_place

QUARANTINE = "quarantine.jsonl"
_PLACES = "survey.npy"
_WHOLE = np.iinfo(np.int64).max
_TOO_MUCH = 0.25  # of the text in one cluster: it is not held out as a whole
_TIMES = 3  # the share that is held out may be so many times what was asked
_LISTED = 10_000  # damages with their names


@dataclass(frozen=True)
class Survey:
    """Where the documents of the sources go.

    Attributes:
        trained: (documents,) int64: so many of its first characters are trained on, the others are held out: 0 of a
            document that is held out, the largest number of one that is not. -1 of one that is left out: it was made of
            one that is held out.
        note: one line about the split for the user.
    """

    trained: NDArray[np.int64]
    note: str = ""

    def parts(self, index: int, text: str) -> tuple[str, str]:
        """(What is trained on, what is held out) of document `index`."""
        if index >= len(self.trained):
            raise InputError("data.sources have grown while they were read; run again when they stay as they are")
        cut = int(self.trained[index])
        if cut < 0:
            return "", ""
        return text[:cut], text[cut:]

    def save(self, folder: Path) -> None:
        """Write it into `folder`, where `load_survey` finds it."""
        with open(folder / f"{_PLACES}.part", "wb") as file:
            np.save(file, self.trained, allow_pickle=False)
        (folder / f"{_PLACES}.part").rename(folder / _PLACES)


def load_survey(folder: Path) -> Survey | None:
    """What `Survey.save` wrote; None where it did not."""
    return Survey(np.load(folder / _PLACES, allow_pickle=False)) if (folder / _PLACES).exists() else None


def forget_survey(folder: Path) -> None:
    """Remove what `Survey.save` wrote."""
    (folder / _PLACES).unlink(missing_ok=True)


def survey(
    records: Iterable[tuple[Record | Damage, str]],
    written: Callable[[Record], str],
    held_out: float,
    most_damaged: float,
    folder: Path,
    progress: Progress,
    domain_of: Callable[[Record, str], str] | None = None,
) -> Survey:
    """Look through `records` once: signatures, clusters, sides, and a list of what is damaged in `folder`.

    Args:
        records: each with the name of its source's domain.
        written: the text of a record; a `RequestError` counts as damage.
        held_out: share of the text that is kept apart.
        most_damaged: share of the documents that may be damaged.
        domain_of: the domain of a record; each of them gets text to train on and held-out text.

    Raises:
        InputError: more of them are.
    """
    signer, damaged = Signer(), Damages()
    keys: list[NDArray[np.uint64]] = []
    places: list[float] = []
    sizes: list[int] = []
    cuts: list[int] = []
    given: dict[str, int] = {}
    groups: list[int] = []  # documents that their source says are of one cluster
    domains: dict[str, list[int]] = {}
    made: list[bool] = []  # by the step `augment` of `penjing curate`, out of another document of its cluster
    for record, source in records:
        if isinstance(record, Damage):
            damaged.add(record)
            continue
        try:
            text = written(record)
        except RequestError as error:
            damaged.add(Damage(record.name, str(error).removeprefix("messages: ")))
            continue
        keys.append(signer.keys(text))
        places.append(name_place(record.name))
        made.append(bool(record.fields.get("made")))
        sizes.append(0 if made[-1] else len(text))  # the share that is held out is of what was read
        cuts.append(_WHOLE if record.text is None else _boundary(text, held_out))  # a conversation is not cut
        cluster = record.fields.get("cluster")
        groups.append(len(sizes) - 1 if cluster in (None, "") else given.setdefault(str(cluster), len(sizes) - 1))
        if domain_of is not None:
            domains.setdefault(domain_of(record, source), []).append(len(sizes) - 1)
        progress.advance(len(text))
    damaged.finish(len(sizes), most_damaged, folder, progress)
    if not sizes:
        return Survey(np.empty(0, np.int64))
    if all(made):
        raise InputError(
            "data.sources hold nothing but documents that 'penjing curate' made of others (augment), which no model is "
            "judged by; add those that they were made of"
        )
    keys_DB = np.stack(keys)
    label = connected([*keys_DB.T, np.array(groups, np.uint64)], len(sizes))
    facts: list[Any] = [label, np.array(places), np.array(sizes, np.int64), np.array(cuts)]
    whole = _split(*facts, share=held_out)
    own = ~np.array(made)
    for members in domains.values():
        trained = whole.trained[members]
        if (trained == _WHOLE).all() or (own[members].any() and not (trained > 0).any()):
            whole.trained[members] = _split(*(each[members] for each in facts), share=held_out).trained
    whole.trained[~own & (whole.trained != _WHOLE)] = -1
    return whole


class Damages:
    """What could not be read, counted by reason."""

    def __init__(self) -> None:
        self.documents, self.parts = 0, 0
        self._reasons: Counter[str] = Counter()
        self._listed: list[Damage] = []

    def add(self, damage: Damage) -> None:
        self.documents += not damage.part
        self.parts += damage.part
        self._reasons[damage.reason.partition(":")[0].partition(" (")[0]] += 1
        if len(self._listed) < _LISTED:
            self._listed.append(damage)

    def finish(self, num_documents: int, most: float, folder: Path, progress: Progress) -> None:
        """Say and list what was left out beside `num_documents` good documents.

        Raises:
            InputError: a share above `most` is damaged.
        """
        if not self._listed:
            return
        first = self._listed[0]
        whole = num_documents + self.documents
        if self.documents > most * whole:
            raise InputError(
                f"data.sources: {self.documents:,} of {whole:,} documents are damaged, more than data.most_damaged = "
                f"{most:g}; the first is {first.name}: {first.reason}. Mend them, or allow more"
            )
        lines = [json.dumps({"name": each.name, "reason": each.reason}) for each in self._listed]
        atomic_write_text(folder / QUARANTINE, "\n".join(lines) + "\n")
        what = [f"{self.documents:,} of {whole:,} documents"] * (self.documents > 0)
        what += [f"{plural(self.parts, 'line')} of texts"] * (self.parts > 0)
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in self._reasons.most_common(5))
        progress.note(
            f"data.sources: left out {' and '.join(what)} that are damaged ({reasons}); the first is {first.name}; "
            f"{QUARANTINE} beside the tokens lists them"
        )


def _split(
    first_D: NDArray[np.int64],
    places_D: NDArray[np.float64],
    sizes_D: NDArray[np.int64],
    cuts_D: NDArray[Any],
    share: float,
) -> Survey:
    clusters, at, of_D = np.unique(first_D, return_index=True, return_inverse=True)
    sizes_C = np.bincount(of_D, weights=sizes_D)
    total = sizes_C.sum()
    held_C = places_D[at] < share
    what = f"{plural(len(sizes_D), 'document')} in {plural(len(clusters), 'cluster')} of near duplicates"
    if not 0 < sizes_C[held_C].sum() <= max(_TIMES * share, 0.05) * total:
        # Few or uneven clusters: the hash holds out none of them, or too much.
        fit = np.flatnonzero(sizes_C <= min(_TOO_MUCH, max(_TIMES * share, 0.05)) * total)
        if len(fit):
            held_C = np.zeros(len(clusters), bool)
            held_C[fit[np.argmin(np.abs(sizes_C[fit] - share * total))]] = True
        else:
            trained = np.full(len(sizes_D), _WHOLE, np.int64)
            members = of_D == np.argmax(sizes_C)
            trained[members] = cuts_D[members]
            return Survey(trained, f"held out: the end of the largest of {what}, which has no small one to hold out")
    trained = np.where(held_C[of_D], 0, _WHOLE)
    return Survey(
        trained, f"held out: {held_C[of_D].sum():,} of {what}, {sizes_C[held_C].sum() / total:.1%} of the text"
    )


def _boundary(text: str, share: float) -> int:
    """Where the last `share` of `text` begins: at a paragraph, a line or a word, whichever is near."""
    wanted = int(len(text) * (1 - share))
    for mark in ("\n\n", "\n", " "):
        found = text.rfind(mark, wanted - len(text) // 20, wanted)
        if found > 0:
            return found + len(mark)
    return wanted
