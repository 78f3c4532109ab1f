"""Some of the documents that a stage left: the same ones whatever the number of tasks and processes."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator

from penjing.core.text.records import arrow_module
from penjing.curate.documents.document import Document, stored_documents
from penjing.curate.plan import Stage
from penjing.curate.task import DOCUMENTS, task_folder


def sampled(stage: Stage, num_tasks: int, size: int, domains: tuple[str, ...]) -> list[Document]:
    """At most `size` documents, those with the smallest hashes of their ids, in the order of the hashes.

    Args:
        domains: that they may be of; () for all.
    """
    chosen = heapq.nsmallest(size, _hashes(stage, num_tasks, domains))
    wanted: dict[int, set[int]] = {}
    for _, task, place in chosen:
        wanted.setdefault(task, set()).add(place)
    found: dict[tuple[int, int], Document] = {}
    for task, places in wanted.items():
        for place, document in enumerate(stored_documents(task_folder(stage, task) / DOCUMENTS)):
            if place in places:
                found[task, place] = document
    return [found[task, place] for _, task, place in chosen]


def _hashes(stage: Stage, num_tasks: int, domains: tuple[str, ...]) -> Iterator[tuple[bytes, int, int]]:
    for task in range(num_tasks):
        path = task_folder(stage, task) / DOCUMENTS
        table = arrow_module("parquet", path).read_table(path, columns=["id", "domain"])
        for place, row in enumerate(table.to_pylist()):
            if not domains or row["domain"] in domains:
                yield hashlib.blake2b(row["id"].encode(), digest_size=16).digest(), task, place
