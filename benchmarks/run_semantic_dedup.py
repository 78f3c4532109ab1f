"""Measure deduplication by meaning: what is found of texts that were changed, and how many different ones are mistaken.

    python benchmarks/run_semantic_dedup.py build/minilm-int8       # five minutes; appends rows

Of each corpus 150 documents are taken that MinHash finds no two alike of. `found_…` is the share of changed copies
whose cosine with their original is the number behind the name or more, beside the share that MinHash finds: every fifth
word is left out, paragraphs are shuffled, or the first half is kept. `mistaken` is the share of documents that an
earlier one of the same corpus would stand for. The step's own `least` is 0.95.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from lib.models import say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row
from run_curate import CORPORA, texts_of

from penjing.core.cli import guarded
from penjing.core.text.near_duplicates import Signer, connected
from penjing.curate.documents.settings import SourceConfig
from penjing.curate.learned.encoder import DocumentEncoder
from penjing.curate.steps.dedup import DedupStep

NAME = "semantic_dedup"
DOCUMENTS, SHORTEST = 150, 1000
COSINES = (0.9, 0.95)
UNSEEN = {
    "perl": SourceConfig(name="perl", packages=("perl-doc",), path=Path("usr/share/perl"), files=("*.pod",)),
    "reference": SourceConfig(
        name="reference", packages=("debian-reference-en",), path=Path("usr/share"), files=("*.html",)
    ),
    "man": SourceConfig(
        name="man", packages=("manpages", "manpages-dev"), path=Path("usr/share/man"), form="roff"
    ),
}  # fmt: skip


def without_words(text: str) -> str:
    """Every fifth word left out."""
    return " ".join(word for place, word in enumerate(text.split(" ")) if place % 5)


def shuffled(text: str) -> str:
    """The paragraphs in another order."""
    parts = text.split("\n\n")
    random.Random(0).shuffle(parts)
    return "\n\n".join(parts)


def half(text: str) -> str:
    """The first half."""
    return text[: len(text) // 2]


CHANGES: dict[str, Callable[[str], str]] = {"without_words": without_words, "shuffled": shuffled, "half": half}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder", type=Path, help="the artifact of a text encoder")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    options = parser.parse_args()
    warn_if_busy()
    step = DedupStep(kind="dedup", method="semantic", encoder=options.encoder)
    encoder, signer = DocumentEncoder(options.encoder, step.windows), Signer()
    rows: list[Row] = []
    for name in ("kernel", "python", *UNSEEN):
        texts = different(texts_of((CORPORA | UNSEEN)[name]), signer)
        say(f"{name}: {len(texts)} documents")
        rows += corpus_rows(name, texts, encoder, signer)
    append(NAME, rows, options.results)
    return 0


def different(texts: list[str], signer: Signer) -> list[str]:
    """So many long ones that MinHash takes for no other."""
    texts = [text for text in texts if len(text) >= SHORTEST]
    random.Random(0).shuffle(texts)
    texts = texts[: 2 * DOCUMENTS]
    first = connected(iter(np.stack([signer.keys(text) for text in texts]).T), len(texts))
    return [text for place, text in enumerate(texts) if first[place] == place][:DOCUMENTS]


def corpus_rows(name: str, texts: list[str], encoder: DocumentEncoder, signer: Signer) -> list[Row]:
    """What is found and mistaken of a corpus, and how fast one thread embeds it."""
    began = time.process_time()
    vectors = encoder.all(texts)
    took = time.process_time() - began
    size = sum(len(text.encode()) for text in texts) / 1e6
    nearest = np.triu(vectors @ vectors.T, 1).max(0)
    rows = [
        new_row(NAME, f"mistaken_{name}_{least:g}", 100 * float((nearest >= least).mean()), "%", runs=1)
        for least in COSINES
    ]
    rows.append(new_row(NAME, f"speed_{name}", size / took, "MB/s", runs=1))
    for change, changed in CHANGES.items():
        copies = [changed(text) for text in texts]
        cosine = (encoder.all(copies) * vectors).sum(1)
        theirs = [bool((signer.keys(a) == signer.keys(b)).any()) for a, b in zip(texts, copies, strict=True)]
        minhash = 100 * float(np.mean(theirs))
        for least in COSINES:
            metric, found = f"found_{change}_{name}_{least:g}", 100 * float((cosine >= least).mean())
            rows.append(new_row(NAME, metric, found, "%", runs=1, baseline="MinHash", baseline_value=minhash))
    return rows


if __name__ == "__main__":
    sys.exit(guarded(main))
