"""A first look at texts: what there is, in which form and language, how much of it twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from penjing.core.errors import InputError
from penjing.core.progress import Progress, volume
from penjing.core.text.near_duplicates import connected
from penjing.core.text.records import Damage, form_of
from penjing.curate.documents.read import read_source, source_files
from penjing.curate.documents.settings import SourceConfig
from penjing.curate.steps.dedup import DedupStep
from penjing.curate.steps.language import detect, language_model


def inspect_source(path: Path, limit_mb: float, progress: Progress) -> dict[str, Any]:
    """What a table shows of the texts in `path`, of which `limit_mb` megabytes are read.

    Raises:
        InputError: no such path, or nothing in it that is read.
        SetupError: the extra `curate` is not installed, or no network for the language model.
    """
    source = SourceConfig(name=path.name, path=path)
    files = source_files(0, source, progress)
    model, exact, near = (
        language_model(),
        DedupStep(kind="dedup", method="exact").keys(),
        DedupStep(kind="dedup").keys(),
    )
    sizes: list[int] = []
    languages: Counter[str] = Counter()
    damages: list[Damage] = []
    keys: dict[str, list[Any]] = {"exact": [], "near": []}
    read, seen = 0, 0
    progress.start("reading", sum(file.size for file in files))
    for file in files:
        for document in read_source(file, source):
            if isinstance(document, Damage):
                damages.append(document)
                continue
            sizes.append(len(document.text))
            read += len(document.text)
            languages[detect(model, document.text)[0]] += 1
            keys["exact"].append(exact(document))
            keys["near"].append(near(document))
            if read >= limit_mb * 1e6:
                break
        seen += 1
        progress.advance(file.size)
        if read >= limit_mb * 1e6:
            break
    if not sizes and not damages:
        raise InputError(
            f"{path} holds no text that is read; name files of text, JSON lines, Parquet, Arrow, HTML or WARC"
        )
    forms = Counter(form_of(Path(file.path)) or "none" for file in files)
    result: dict[str, Any] = {
        "files": f"{len(files):,} ({', '.join(f'{form} {count:,}' for form, count in forms.most_common(6))})",
        "size": volume(sum(file.size for file in files)),
        "files read": f"{seen:,}",
        "documents": f"{len(sizes):,}",
        "damaged": f"{len(damages):,}" + (f", the first {damages[0].name}: {damages[0].reason}" if damages else ""),
    }
    if sizes:
        low, middle, high = np.percentile(sizes, [10, 50, 90])
        told = ", ".join(
            f"{language or 'none'} {count / len(sizes):.0%}" for language, count in languages.most_common(8)
        )
        result |= {
            "characters": f"{read:,}; of a document {low:,.0f}, {middle:,.0f}, {high:,.0f} (10, 50, 90 %)",
            "languages": told,
        }
        for name, said in (("exact", "equal to an earlier one"), ("near", "near duplicates of an earlier one")):
            first = connected(np.stack(keys[name]).T, len(sizes))
            twins = int((first != np.arange(len(first))).sum())
            result[said] = f"{twins:,} ({twins / len(sizes):.1%})"
    return result
