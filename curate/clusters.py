"""Joins the keys that the tasks of a stage wrote into clusters of duplicates: in one process, once all are done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.files import atomic_write_text
from penjing.core.text.near_duplicates import connected
from penjing.core.text.records import arrow_module
from penjing.curate.learned.meaning import leaders
from penjing.curate.plan import Stage
from penjing.curate.steps.dedup import DedupStep
from penjing.curate.task import CLUSTERS, DOCUMENTS, KEYS, task_folder


def join_clusters(stage: Stage, num_tasks: int, step: DedupStep) -> None:
    """Write `CLUSTERS` into the stage's folder, and for each task where its documents begin and the names of those
    that stand for others.

    16 bytes of memory a document, with vectors 4 kB, and the ids of those that stand for others.
    """
    if (stage.folder / CLUSTERS).exists():
        return
    keys = [np.load(task_folder(stage, task) / KEYS, allow_pickle=False, mmap_mode="r") for task in range(num_tasks)]
    sizes = [len(each) for each in keys]
    if step.method == "semantic":
        rows = [each for each in keys if len(each)]
        first = leaders(np.concatenate(rows) if rows else np.empty((0, 1), np.uint64), step.least)
    else:
        first = connected(_columns(keys), sum(sizes))
    heads = np.unique(first[first != np.arange(len(first))])
    begins = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    names: dict[int, str] = {}
    for task in range(num_tasks):
        low, high = begins[task], begins[task + 1]
        mine = heads[(heads >= low) & (heads < high)]
        if len(mine):
            ids = _ids(task_folder(stage, task) / DOCUMENTS)
            names |= {int(head): ids[int(head - low)].as_py() for head in mine}
    for task in range(num_tasks):
        part = np.unique(first[begins[task] : begins[task + 1]])
        of = {str(int(head)): names[int(head)] for head in part if int(head) in names}
        atomic_write_text(stage.folder / f"names-{task:05d}.json", json.dumps({"begin": int(begins[task]), "of": of}))
    with open(stage.folder / f"{CLUSTERS}.part", "wb") as file:
        np.save(file, first, allow_pickle=False)
    (stage.folder / f"{CLUSTERS}.part").rename(stage.folder / CLUSTERS)


def _columns(keys: list[NDArray[np.uint64]]) -> Iterator[NDArray[np.uint64]]:
    width = max((each.shape[1] for each in keys), default=0)
    full = [each for each in keys if len(each)]
    for column in range(width):
        yield np.concatenate([each[:, column] for each in full])


def _ids(path: Path) -> Any:
    return arrow_module("parquet", path).read_table(path, columns=["id"]).column("id")
