"""A folder of images and recordings → tars as WebDataset has them, and a table of what is known of each.

Files are read in tasks, which several processes may share (`tasks.py`); then one process goes through what they found
in the order of the files, tells which images are there twice, and stores the rest. So the result does not depend on
how many processes there were, nor on how often the run was ended.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from penjing.core.errors import InputError
from penjing.core.files import publish_folder
from penjing.core.manifest import write_manifest
from penjing.core.progress import Progress, Silent
from penjing.core.text.source_files import files_below
from penjing.curate.alone import alone_in
from penjing.curate.documents.needs import needed
from penjing.curate.media.alignment import Alignment
from penjing.curate.media.audio import SUFFIXES as AUDIO
from penjing.curate.media.images import SUFFIXES as IMAGES
from penjing.curate.media.images import Gallery, appearance_of
from penjing.curate.media.record import MediaRecord
from penjing.curate.media.tasks import (
    DATA,
    HASHES,
    PLAN_FILE,
    ROWS,
    THUMBS,
    Found,
    MediaPlan,
    make_media_plan,
    run_media_task,
)
from penjing.curate.media.texts import Texts
from penjing.curate.media.write import Table, Tars
from penjing.curate.workers import run_tasks

RECORDS, QUARANTINE, DROPPED, REPORT = "records.parquet", "quarantine.jsonl", "dropped.jsonl", "report.json"
MAX_PIXELS = 50_000_000
_FOLDERS = {"image": "images", "audio": "audio"}
_COUNTED = ("image", "audio", "with text", "equal file", "looks alike", "damaged")


def curate_media(
    source: Path,
    output: Path,
    *,
    licence: str = "",
    distance: int = 4,
    max_pixels: int = MAX_PIXELS,
    most_damaged: float = 0.05,
    shard_mb: float = 256,
    towers: Path | None = None,
    least_alignment: float | None = None,
    workers: int = 1,
    task_mb: float = 32,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Read a folder of images and recordings, drop what is broken or there twice, and store the rest.

    The text of a file is a .txt of its name, "text" or "caption" of a .json of its name, or its line in a
    metadata.jsonl as Hugging Face's folders have it ("file_name" and "text" or "caption").

    A run that was ended goes on with the tasks that are left: between, they lie in OUTPUT-work.

    Args:
        distance: images whose perceptual hashes differ in so many of 64 bits are one; -1 drops equal files alone.
        max_pixels: a larger image counts as broken, and is not decoded.
        most_damaged: share of the files that may be broken.
        shard_mb: a tar is closed when it has so many megabytes.
        towers: a checkpoint that says how well a text fits its image; see `Alignment`.
        least_alignment: images whose text fits less are dropped.
        workers: processes that read.
        task_mb: a task takes files of about so many megabytes.

    Returns:
        Counts, as report.json has them.

    Raises:
        InputError: nothing to read, `output` exists, too much is broken, or a file changes while it is read.
        SetupError: a package is missing, or the disk is full.
    """
    progress = progress or Silent()
    if not source.exists():
        raise InputError(f"{source} does not exist; name a folder of images or recordings")
    if least_alignment is not None and towers is None:
        raise InputError("--least-alignment needs --towers, a checkpoint that tells how well a text fits its image")
    alignment = None if towers is None else Alignment(towers, max_pixels, least_alignment)
    work = output.with_name(f"{output.name}-work")
    own = (output.absolute(), work.absolute())
    files = [
        (_named(path.relative_to(source) if path != source else Path(path.name)), path)
        for path in files_below(source)
        if path.suffix.lower() in (*IMAGES, *AUDIO)
        and path.is_file()
        and not any(path.absolute().is_relative_to(each) for each in own)
    ]
    if not files:
        raise InputError(f"{source} holds no file that ends with {', '.join((*IMAGES, *AUDIO))}")
    for module in ("imagehash", "soundfile"):
        needed(module)
    with alone_in(work):
        with publish_folder(output, replace=force) as partial:
            plan = make_media_plan(work.absolute(), files, max_pixels, task_mb)
            _read(plan, workers, progress)
            progress.start("keeping each once", len(files))
            told = Texts(source)
            with ExitStack() as stack:
                chosen = _Chosen(partial, stack, shard_mb, distance, licence, alignment)
                for found, content, look in _all_found(plan):
                    chosen.add(found, content, look, told)
                    progress.advance()
            report = {"files": len(files), **{name: chosen.counts[name] for name in _COUNTED}}
            if alignment is not None:
                report |= {"does not fit": chosen.counts["does not fit"], **alignment.summary()}
            _check_damage(report, most_damaged, partial)
            (partial / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            settings = {
                "source": str(source), "distance": distance, "max_pixels": max_pixels, "licence": licence,
                "towers": towers and str(towers), "least_alignment": least_alignment,
            }  # fmt: skip
            write_manifest(partial, "corpus", {"command": "penjing curate media", **settings}, report)
        shutil.rmtree(work)
    return report


def _read(plan: MediaPlan, workers: int, progress: Progress) -> None:
    """Do the tasks that are left, and remove what is of no task any more."""
    folders = [plan.folder(task) for task in range(len(plan.tasks))]
    for other in set(plan.work.glob("task-*")) - set(folders):
        shutil.rmtree(other)
    sizes = [end - begin for begin, end in plan.tasks]
    left = [task for task, folder in enumerate(folders) if not folder.exists()]
    progress.start("reading images and recordings", sum(sizes))
    progress.advance(sum(sizes) - sum(sizes[task] for task in left))
    if workers == 1 or len(left) < 2:
        for task in left:
            run_media_task(plan, task)
            progress.advance(sizes[task])
    else:
        plan.save()

        def done(task: int) -> None:
            progress.advance(sizes[task])

        run_tasks(plan.work / PLAN_FILE, 0, left, workers, done, "penjing.curate.media.worker")
    if missing := [task for task, folder in enumerate(folders) if not folder.exists()]:
        raise InputError(f"tasks {missing} left no result; run again, they are done first")


def _all_found(plan: MediaPlan) -> Iterator[tuple[Found, Callable[[], bytes], Any]]:
    """In the order of the files: what a task found, what reads the bytes to store, and how an image looks or None."""
    for task in range(len(plan.tasks)):
        folder = plan.folder(task)
        hashes, thumbs = (np.load(folder / name, allow_pickle=False) for name in (HASHES, THUMBS))
        with open(folder / DATA, "rb") as data:
            for line in (folder / ROWS).read_text(encoding="utf-8").splitlines():
                found = Found(**json.loads(line))

                def content(found: Found = found) -> bytes:
                    data.seek(found.begin)
                    return data.read(found.end - found.begin)

                look = None if found.place < 0 else appearance_of(hashes[found.place], thumbs[found.place])
                yield found, content, look


class _Chosen:
    """What is kept, dropped and broken, into the files of `folder`, which are closed with `stack`."""

    def __init__(
        self, folder: Path, stack: ExitStack, shard_mb: float, distance: int, licence: str, alignment: Alignment | None
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._kept = {kind: stack.enter_context(Tars(folder / name, shard_mb)) for kind, name in _FOLDERS.items()}
        self._table = stack.enter_context(Table(folder / RECORDS))
        self._broken = stack.enter_context((folder / QUARANTINE).open("w", encoding="utf-8"))
        self._dropped = stack.enter_context((folder / DROPPED).open("w", encoding="utf-8"))
        self._looks, self._seen, self._licence = Gallery(distance), dict[str, str](), licence
        self._alignment = alignment

    def add(self, found: Found, content: Callable[[], bytes], look: Any, told: Texts) -> None:
        """Keep a file or not."""
        text, reason = "", found.unread
        if not reason:
            try:
                text = told.of(Path(found.path))
            except InputError as error:
                reason = str(error)
        if not reason and (twin := self._seen.get(found.sha256)) is not None:
            self._drop(found, "equal file", twin)
            return
        if reason := reason or found.damaged:
            self.counts["damaged"] += 1
            self._broken.write(json.dumps({"id": found.name, "reason": reason}) + "\n")
            return
        if look is not None:
            if (twin := self._looks.twin(look)) is not None:
                self._drop(found, "looks alike", twin)
                return
            self._looks.add(look, found.name)
        self._seen[found.sha256] = found.name
        kind, fits = found.kind, None
        if self._alignment is not None and text and kind == "image":
            fits, least = self._alignment.score(content(), text), self._alignment.least
            if least is not None and fits < least:
                self.counts["does not fit"] += 1
                told_of = {"id": found.name, "rule": "does not fit", "alignment": round(fits, 4)}
                self._dropped.write(json.dumps(told_of) + "\n")
                return
        facts = {"source": found.name, "text": text, "licence": self._licence, "alignment": fits}
        of_file = {"kind": kind, "bytes": found.bytes, "sha256": found.sha256, **(found.fields or {})}
        record = MediaRecord(key=f"{self.counts[kind]:08d}", **facts, **of_file)
        self._kept[kind].add(record, content(), found.ending)
        self._table.add(record)
        self.counts[kind] += 1
        self.counts["with text"] += bool(text)

    def _drop(self, found: Found, rule: str, twin: str) -> None:
        self.counts[rule] += 1
        self._dropped.write(json.dumps({"id": found.name, "rule": rule, "twin": twin}) + "\n")


def _check_damage(report: dict[str, Any], most_damaged: float, folder: Path) -> None:
    damaged, files = report["damaged"], report["files"]
    if damaged > most_damaged * files:
        first = json.loads((folder / QUARANTINE).read_text(encoding="utf-8").splitlines()[0])
        raise InputError(
            f"{damaged:,} of {files:,} files are broken, more than {most_damaged:g} of them; the "
            f"first, {first['id']}, {first['reason']}. Remove them, or allow more (--most-damaged)"
        )


def _named(path: Path) -> str:
    return path.as_posix().encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
