"""Long work in pieces, each kept when it is complete, so that a killed run goes on where it stopped.

Beside the output `NAME` lies `.NAME.work`: for each completed task TASK.json (seconds, peak memory, result; comes last)
and what it made. The folder belongs to one key, the hash of input and code; for another key it starts empty.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes

from penjing.core.errors import InputError, SetupError
from penjing.core.files import atomic_write_bytes, atomic_write_text, writing
from penjing.core.manifest import MANIFEST_NAME, read_json_object, read_manifest, verify
from penjing.core.memory import PeakMemory, release_unused
from penjing.core.progress import Progress

KEY_FILE = "key.txt"


@dataclass(frozen=True)
class StepRecord:
    """One completed task."""

    name: str
    seconds: float
    peak_memory_bytes: int  # largest resident memory above what the process held before the run
    result: dict[str, Any]


class Tasks:
    """What is kept of a piece of work in a folder, task by task, so that a killed run goes on where it stopped.

    Args:
        path: an existing folder for this work alone, whose name or place says what it is made of.
        baseline: resident memory, in bytes, that was there before; None takes what there is now.
    """

    def __init__(self, path: Path, baseline: int | None = None) -> None:
        self.path = path
        self.baseline = PeakMemory.resident_bytes() if baseline is None else baseline

    def record(self, name: str) -> StepRecord | None:
        """The record of a completed task, else None."""
        path = self.path / f"{name}.json"
        if not path.exists():
            return None
        try:
            return StepRecord(**read_json_object(path))
        except (TypeError, InputError):
            raise InputError(f"{path} is no record of a step; delete it, and the step is done again") from None

    def run(self, name: str, work: Callable[[], dict[str, Any]]) -> StepRecord:
        """Do `work`, whose result is JSON-ready, unless the task is complete already."""
        if (done := self.record(name)) is not None:
            return done
        release_unused()
        began = time.monotonic()
        with writing(self.path), PeakMemory() as memory:
            result = work()
        record = StepRecord(name, time.monotonic() - began, max(0, memory.peak_bytes - self.baseline), result)
        atomic_write_text(self.path / f"{name}.json", json.dumps(asdict(record), indent=2) + "\n")
        return record

    def num_complete(self) -> int:
        """How many tasks are complete."""
        return sum(1 for _ in self.path.glob("*.json"))

    def forget(self, name: str) -> None:
        """Let the task `name` be done again."""
        (self.path / f"{name}.json").unlink(missing_ok=True)

    def save(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Keep tensors of a task under `name`; complete on disk when this returns."""
        data = to_bytes({key: tensor.contiguous() for key, tensor in tensors.items()})
        atomic_write_bytes(self.path / f"{name}.safetensors", data)

    def load(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors that `save` kept."""
        return load_file(self.path / f"{name}.safetensors")

    def discard(self, name: str) -> None:
        """Forget tensors that no later task needs."""
        (self.path / f"{name}.safetensors").unlink(missing_ok=True)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes that ask for it out of `folder`, made if need be; it goes if nothing was put into it.

    Raises:
        SetupError: one is in it, or it cannot be made.
    """
    lock = None
    while lock is None:
        lock = _locked(folder)
    try:
        yield
    finally:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """A handle that holds the folder; None if who held it before has removed it meanwhile."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(folder)):
            return lock
    except BlockingIOError:
        os.close(lock)
        raise SetupError(f"another process is working in {folder}; wait for it, or choose another output") from None
    except FileNotFoundError:
        pass
    os.close(lock)
    return None


def empty(folder: Path) -> None:
    """Remove all that lies in a folder, which stays: `alone_in` may hold it."""
    for entry in folder.iterdir():
        entry.unlink() if entry.is_symlink() or not entry.is_dir() else shutil.rmtree(entry)


class WorkFolder(Tasks):
    """A context manager that holds the work folder of `output` for this process alone.

    Args:
        output: the folder that the run will publish.
        key: what the folder's content depends on; what another key left there goes.

    Raises:
        SetupError: another process works on the same output, or the disk refuses.
    """

    def __init__(self, output: Path, key: str) -> None:
        output = output.absolute()
        super().__init__(output.with_name(f".{output.name}.work"))
        self.key = key
        self._held = ExitStack()

    def __enter__(self) -> WorkFolder:
        self._held.enter_context(alone_in(self.path))
        key_file = self.path / KEY_FILE
        if not key_file.exists() or key_file.read_text() != self.key:
            empty(self.path)
            atomic_write_text(key_file, self.key)
        return self

    def __exit__(self, *_: tuple[type[BaseException], BaseException, TracebackType]) -> None:
        with self._held:
            if self.path.is_dir() and [entry.name for entry in self.path.iterdir()] == [KEY_FILE]:
                self.remove()  # nothing was done that a later run could go on with

    def remove(self) -> None:
        """Delete the folder: the run is published."""
        shutil.rmtree(self.path)


@dataclass(frozen=True)
class Places:
    """Where a step reads and writes: `source` is a checkpoint, `partial` an empty folder that is published when the
    step is done, `scratch` a folder of its own that outlives a kill and belongs to this very step on this source."""

    source: Path
    partial: Path
    scratch: Path


def already_made(output: Path, key: str, force: bool, check: Callable[[Path], object], progress: Progress) -> bool:
    """Whether `output` already is the result of the run `key`; refuses now what publishing would refuse at the end.

    Args:
        check: raises if the folder is not whole.

    Raises:
        InputError: it is something else, damaged, or made by another run and not to be replaced (`force`).
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    if not (output / MANIFEST_NAME).is_file():
        raise InputError(f"{output} exists and is no penjing folder, so it is not replaced; choose another output")
    if force:
        return False
    if read_manifest(output).extra.get("key") != key:
        raise InputError(
            f"{output} was made from another recipe, input or version; replace it with --force, or set another output"
        )
    check(output)
    progress.note(f"{output} is already done: kept (--force makes it again)")
    return True


def check_kept(folder: Path) -> None:
    """Refuse what an earlier run left in a work folder and what was changed since.

    Raises:
        InputError: names the file, and says what to do.
    """
    if not (folder / MANIFEST_NAME).exists():
        return
    try:
        verify(folder)
    except InputError as error:
        said = str(error).partition(";")[0]
        raise InputError(f"{said}; delete {folder}, and the same command makes it again") from None


def link_or_copy(source: Path, target: Path) -> None:
    """`target` becomes the file `source`, without a second copy on disk where that can be."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
