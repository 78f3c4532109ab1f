"""What happened to one document of a corpus."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from penjing.core.errors import InputError
from penjing.core.text.records import arrow_module
from penjing.core.text.source_files import SHARDS
from penjing.curate.run import DROPPED_FOLDER, QUARANTINE

_SHOWN = 10
_COLUMNS = ["id", "domain", "language", "cluster", "changed", "quality", "noise", "made"]


def explain(document: str, corpus: Path) -> list[str]:
    """A line for each document whose id is, or ends with, `document`; at most ten.

    Raises:
        InputError: `corpus` is none, or knows no such document.
    """
    if not (corpus / SHARDS).is_dir():
        raise InputError(f"{corpus} is no corpus: it holds no {SHARDS}/; name the output of 'penjing curate'")
    found = sorted((name != document, name, said) for name, said in _fates(corpus) if name.endswith(document))
    if not found:
        raise InputError(
            f"{corpus} knows no document {document!r}; ids are SOURCE/FILE, with ', line N' or ', row N' for records"
        )
    exact = [each for each in found if not each[0]] or found
    lines = [f"{name}: {said}" for _, name, said in exact[:_SHOWN]]
    return lines + [f"… and {len(exact) - _SHOWN:,} more"] * (len(exact) > _SHOWN)


def _fates(corpus: Path) -> Iterator[tuple[str, str]]:
    for path in sorted((corpus / SHARDS).glob("*.parquet")):
        parquet = arrow_module("parquet", path)
        columns = [name for name in _COLUMNS if name in parquet.read_schema(path).names]  # of older corpora fewer
        for row in parquet.read_table(path, columns=columns).to_pylist():
            changed = json.loads(row["changed"])
            judged = [f"{name} {row[name]:.3f}" for name in ("quality", "noise") if row.get(name) is not None]
            said = f"made by {row['made']} and " if row.get("made") else ""
            said += f"kept, domain {row['domain']}, language {row['language'] or 'not told'}"
            said += f", changed by {', '.join(changed)}" if changed else ", unchanged"
            said += "".join(f", {each}" for each in judged)
            yield row["id"], said + (f", of the cluster of {row['cluster']}" if row["cluster"] != row["id"] else "")
    for path in sorted((corpus / DROPPED_FOLDER).glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                twin = f" of {row['twin']}, which was met first" if row["twin"] else ""
                scores = [f" ({name} {row[name]:.3f})" for name in ("quality", "noise") if row.get(name) is not None]
                twin += "".join(scores)
                yield row["id"], f"dropped by step {row['step']}: {row['rule']}{twin}; it began {row['excerpt'][:80]!r}"
    for line in (corpus / QUARANTINE).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield row["id"], f"damaged: {row['reason']}"
