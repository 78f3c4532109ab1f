"""The part of `penjing curate media` that may be shared out: files read, judged one by one, and made ready to store.

A task is a run of files, and its folder is named by a hash of what it comes from: the files, the settings that tell
here, penjing's code and the libraries' versions. So a run that was ended finds what is done, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from penjing.core.config import key_of
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text, publish_folder, sha256_file
from penjing.core.manifest import read_json_object
from penjing.curate.media import audio, images
from penjing.curate.media.audio import read_recording
from penjing.curate.media.images import NUM_HASHES, THUMB_SHAPE, hexadecimal, read_picture

PLAN_FILE, ROWS, DATA, HASHES, THUMBS = "plan.json", "rows.jsonl", "data.bin", "hashes.npy", "thumbs.npy"
_MOST_BYTES = 256 << 20  # of a file
_MOST_FILES = 256  # of a task: a few seconds
_LIBRARIES = ("pillow", "ImageHash", "numpy", "scipy", "soundfile")


@dataclass(frozen=True)
class MediaFile:
    """A file, and what tells whether it is still the same; sizes of -1: it could not be asked."""

    name: str
    path: str
    size: int
    mtime_ns: int

    def read(self) -> bytes:
        """All of it.

        Raises:
            InputError: empty, too large or unreadable.
        """
        try:
            if (size := Path(self.path).stat().st_size) > _MOST_BYTES:
                raise InputError(f"has {size:,} bytes, more than {_MOST_BYTES:,}")
            if not size:
                raise InputError("is empty")
            return Path(self.path).read_bytes()
        except OSError as error:
            raise InputError(f"cannot be read ({error.strerror})") from None

    def check(self) -> None:
        """Raises:
        InputError: it is not what the plan was made of.
        """
        if _asked(Path(self.path)) != (self.size, self.mtime_ns):
            raise InputError(f"{self.path} was changed while it was read; run again, what is done is kept")


@dataclass(frozen=True)
class MediaPlan:
    """Files, the settings of their reading, and files[begin:end] of each task."""

    work: Path
    files: tuple[MediaFile, ...]
    tasks: tuple[tuple[int, int], ...]
    max_pixels: int
    code: str

    def folder(self, task: int) -> Path:
        """Where the results of a task are."""
        files = [asdict(file) for file in self.files[slice(*self.tasks[task])]]
        return self.work / f"task-{key_of(files, self.max_pixels, self.code)[:24]}"

    def save(self) -> None:
        """Write it for the processes that do the tasks."""
        values = asdict(replace(self, work=Path())) | {"work": str(self.work)}
        atomic_write_text(self.work / PLAN_FILE, json.dumps(values))


@dataclass(frozen=True)
class Found:
    """What a task knows of a file.

    Attributes:
        unread: why its content could not be had.
        damaged: why it is not kept; else `fields` are those of its record.
        data: the bytes to store lie at data[begin:end] of the task's file; `ending`: how their name ends.
        place: row of the task's hashes and small images; -1 of a recording.
    """

    name: str
    path: str
    unread: str = ""
    damaged: str = ""
    bytes: int = 0
    sha256: str = ""
    kind: str = ""
    fields: dict[str, Any] | None = None
    ending: str = ""
    begin: int = 0
    end: int = 0
    place: int = -1


def make_media_plan(work: Path, named: list[tuple[str, Path]], max_pixels: int, task_mb: float) -> MediaPlan:
    """Share out files, each with its name."""
    files = tuple(MediaFile(name, str(path.absolute()), *_asked(path)) for name, path in named)
    tasks, begin, size = [], 0, 0
    for place, file in enumerate(files):
        if place > begin and (size + file.size > task_mb * 1e6 or place - begin == _MOST_FILES):
            tasks.append((begin, place))
            begin, size = place, 0
        size += max(0, file.size)
    own = [sha256_file(Path(str(each))) for each in (__file__, images.__file__, audio.__file__)]
    code = key_of(own, {name: version(name) for name in _LIBRARIES})
    return MediaPlan(work, files, (*tasks, (begin, len(files))), max_pixels, code)


def load_media_plan(path: Path) -> MediaPlan:
    """What `MediaPlan.save` wrote."""
    values = read_json_object(path)
    files = tuple(MediaFile(**file) for file in values["files"])
    tasks = tuple((begin, end) for begin, end in values["tasks"])
    return MediaPlan(Path(values["work"]), files, tasks, values["max_pixels"], values["code"])


def run_media_task(plan: MediaPlan, task: int) -> None:
    """Do a task, unless its results are there.

    Raises:
        InputError: a file was changed since the plan was made.
        SetupError: the disk is full, a package is missing.
    """
    if (folder := plan.folder(task)).exists():
        return
    known: dict[str, Found] = {}
    hashes: list[Any] = []
    thumbs: list[Any] = []
    with publish_folder(folder, marker=ROWS) as partial:
        with open(partial / DATA, "wb") as data, open(partial / ROWS, "w", encoding="utf-8") as rows:
            for file in plan.files[slice(*plan.tasks[task])]:
                try:
                    content = file.read()
                except InputError as error:
                    found = Found(file.name, file.path, unread=str(error))
                else:
                    file.check()
                    digest = hashlib.sha256(content).hexdigest()
                    if digest not in known:
                        known[digest] = _judged(file, content, digest, plan.max_pixels, data, (hashes, thumbs))
                    found = replace(known[digest], name=file.name, path=file.path)
                rows.write(json.dumps(asdict(found)) + "\n")
        np.save(partial / HASHES, np.array(hashes, np.uint64).reshape(-1, NUM_HASHES), allow_pickle=False)
        np.save(partial / THUMBS, np.array(thumbs, np.uint8).reshape(-1, *THUMB_SHAPE), allow_pickle=False)


def _judged(
    file: MediaFile, content: bytes, digest: str, max_pixels: int, data: Any, seen: tuple[list[Any], list[Any]]
) -> Found:
    """What a file is; what is to be stored goes into `data`, how an image looks into `seen`."""
    kind = "image" if Path(file.path).suffix.lower() in images.SUFFIXES else "audio"
    found = Found(file.name, file.path, bytes=len(content), sha256=digest, kind=kind)
    try:
        if kind == "audio":
            recording = read_recording(content)
            fields, stored, ending, place = vars(recording), content, recording.form.lower(), -1
        else:
            picture = read_picture(content, max_pixels)
            fields = {name: getattr(picture, name) for name in ("form", "width", "height", "changed")}
            fields["look"] = hexadecimal(picture.look)
            stored, ending, place = picture.data, picture.ending, len(seen[0])
            for each, row in zip(seen, (picture.hashes, picture.thumb), strict=True):
                each.append(row)
    except InputError as error:
        return replace(found, damaged=str(error))
    begin = data.tell()
    data.write(stored)
    return replace(found, fields=dict(fields), ending=ending, begin=begin, end=data.tell(), place=place)


def _asked(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return -1, -1
    return stat.st_size, stat.st_mtime_ns
