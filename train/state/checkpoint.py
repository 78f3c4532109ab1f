"""Training state on disk, for resume only: complete, hashed and named, or not there.

A checkpoint is a folder `step-000001000` with `state.safetensors` (tensors), `state.json` (the tree around them and
plain values) and `complete.json` (schema version, step, SHA-256 of both). It is filled under a temporary name,
flushed, renamed; then the file `latest` names it, and the oldest beyond `keep` are deleted, as are those of later
steps: a run that went on from an earlier state takes another way. Copying the state out of the model's way is all that
the loop waits for: writing and hashing run in a thread. A model for others to load is exported apart (run.py).
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penjing.core.checkpoint.safetensors_writer import save_tensors
from penjing.core.errors import InputError, SetupError
from penjing.core.files import atomic_write_text, publish_folder, sha256_file, sync_tree, writing
from penjing.core.manifest import read_json_object
from penjing.train.processes.watch import WORK_FACTOR
from penjing.train.processes.world import World
from penjing.train.state.state import Tree, snapshot, split_tree
from penjing.train.state.state_shards import ShardedTree, index_name, read_shards, read_tensors

SCHEMA_VERSION, SHARDED_VERSION = 1, 2
_TENSORS, _TREE, _COMPLETE, _LATEST = "state.safetensors", "state.json", "complete.json", "latest"


class Checkpoints:
    """The checkpoints of one run in `folder`; `keep` of them stay.

    Args:
        world: the processes that load together.

    Attributes:
        stall_s: seconds that the last `save` held up the loop.
    """

    sharded = False  # only the main process saves

    def __init__(self, folder: Path, keep: int = 3, world: World | None = None) -> None:
        self.world = world or World()
        self.folder = folder
        self.keep = keep
        self.stall_s = 0.0
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, step: int, tree: Tree, *, wait: bool = False) -> None:
        """Save the state after `step` updates; returns when it has been copied, or, with `wait`, when it is on disk.

        Raises:
            SetupError: this or the checkpoint before it could not be written (full disk, permission).
        """
        began = time.perf_counter()
        self.wait()
        self._prepare(step)
        copied = self._copy(tree)
        self._writer = threading.Thread(target=self._write_safely, args=(step, copied), name="checkpoint")
        self._writer.start()
        if wait:
            self.wait()
        self.stall_s = time.perf_counter() - began

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            SetupError: the write failed; nothing is left of it.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def steps(self) -> list[int]:
        """Steps that have a folder, whether intact or not, in order."""
        return sorted(
            int(path.name.partition("-")[2]) for path in self.folder.glob("step-*") if path.name[5:].isdecimal()
        )

    def load_newest(self, note: Callable[[str], None] = lambda line: None) -> tuple[int, Tree] | None:
        """The newest intact checkpoint as (step, tree), None when none was ever saved; damaged ones are reported to
        `note`. All processes call it, and find the same.

        Raises:
            InputError: there are checkpoints, and all of them are damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self.load(self.path(step), self.world)
            except InputError as error:
                reason = str(error)
                if step != steps[0]:
                    note(f"{reason}; trying the checkpoint before it")
        if not steps:
            return None
        raise InputError(
            f"no checkpoint in {self.folder} is intact ({len(steps)} tried, the oldest: {reason}); put back a copy of "  # pyright: ignore[reportPossiblyUnboundVariable]
            "one, or delete that folder to train from the beginning"
        )

    @staticmethod
    def load(path: Path, world: World | None = None) -> tuple[int, Tree]:
        """Read one checkpoint folder; its tensors are `SavedTensor`s, read when they are wanted. Every file's hash is
        checked by one of the processes of `world`, which all call this.

        Raises:
            InputError: missing, incomplete, changed, or of a newer schema; in all processes if in one.
        """
        world = world or World()
        found, failure = None, None
        try:
            found = Checkpoints._read(path, world.rank, world.size)
        except InputError as error:
            failure = error
        failures = torch.zeros(world.size, dtype=torch.int64)
        failures[world.rank] = failure is not None
        world.sum(failures)
        if failure is not None:
            raise failure
        if found is None or bool(failures.any()):
            raise InputError(f"checkpoint {path}: process {int(failures.argmax())} found a file missing or damaged")
        return found

    @staticmethod
    def _read(path: Path, rank: int, size: int) -> tuple[int, Tree]:
        if not (path / _COMPLETE).exists():
            raise InputError(
                f"{path} holds no state of a training; those of a run lie in OUTPUT-run/checkpoints/step-…, and "
                "--resume auto goes on from the newest"
            )
        seal = read_json_object(path / _COMPLETE)
        if seal.get("schema_version") == SHARDED_VERSION:
            return int(seal["step"]), read_shards(path, seal["sha256"], rank, size)
        if seal.get("schema_version") != SCHEMA_VERSION:
            raise InputError(
                f"{path / _COMPLETE} has schema_version {seal.get('schema_version')}, this penjing reads "
                f"{SCHEMA_VERSION}"
            )
        for name in (_TREE, _TENSORS)[: 1 if rank else 2]:  # rank 0 checks the large one
            if sha256_file(path / name) != seal.get("sha256", {}).get(name):
                raise InputError(f"checkpoint {path}: {name} is not what was written; it is damaged")
        return int(seal["step"]), read_tensors(path / _TENSORS, read_json_object(path / _TREE))

    def path(self, step: int) -> Path:
        """The folder of `step`."""
        return self.folder / f"step-{step:09d}"

    def _prepare(self, step: int) -> None:
        pass

    def _copy(self, tree: Tree) -> Any:
        return snapshot(tree)

    def _write_safely(self, step: int, tree: Any) -> None:
        try:
            self._write(step, tree)
        except BaseException as error:  # the thread's failure is the loop's: raised by the next save or wait
            self._failure = error

    def _write(self, step: int, tree: Tree) -> None:
        final = self.path(step)
        if final.exists():  # damaged, or of a run that went on from an earlier step
            shutil.rmtree(final)
        tensors, plain = split_tree(tree)
        with publish_folder(final) as partial:
            save_tensors(tensors, partial / _TENSORS)
            (partial / _TREE).write_text(json.dumps(plain), encoding="utf-8")
            hashes = {name: sha256_file(partial / name) for name in (_TENSORS, _TREE)}
            seal = {"schema_version": SCHEMA_VERSION, "kind": "training state", "step": step, "sha256": hashes}
            (partial / _COMPLETE).write_text(json.dumps(seal), encoding="utf-8")
        self._publish(step)

    def _publish(self, step: int) -> None:
        """Name the checkpoint of `step`, which is there, the latest; delete what is not among the `keep` up to it."""
        atomic_write_text(self.folder / _LATEST, self.path(step).name + "\n")
        steps = self.steps()
        kept = [each for each in steps if each <= step][-self.keep :]
        for other in reversed(steps):  # first those beyond, left by a run that this one, begun before them, replaces
            if other not in kept:
                shutil.rmtree(self.path(other))


class ShardedCheckpoints(Checkpoints):
    """Checkpoints of a run whose processes each hold a part of the state: all save, on a file system that they share.

    A checkpoint holds two files of each process (state_shards.py) and `complete.json`, which the main process writes
    when it has seen all of them, for which it waits as long as the watch would for one that waits for a disk: ten
    times `timeout_s`, the recipe's parallel.timeout. Any mesh reads it.
    """

    sharded = True

    def __init__(self, folder: Path, keep: int, world: World, timeout_s: float = 60.0) -> None:
        super().__init__(folder, keep, world)
        self._timeout_s = WORK_FACTOR * timeout_s

    def _prepare(self, step: int) -> None:
        partial = self._partial(step)
        if self.world.is_main:
            with writing(partial):
                for stale in self.folder.glob(".step-*.partial"):  # of a process that was killed, or had no room
                    shutil.rmtree(stale, ignore_errors=True)
                partial.mkdir(parents=True)
        self.world.barrier()

    def _copy(self, tree: Tree) -> Any:
        return ShardedTree(tree if self.world.saves else {})

    def _write(self, step: int, tree: Any) -> None:
        partial, final = self._partial(step), self.path(step)
        try:
            with writing(final):
                tree.write(partial, self.world.rank)
                if self.world.is_main:
                    self._complete(step, partial, final)
        except BaseException:
            if self.world.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _complete(self, step: int, partial: Path, final: Path) -> None:
        """Wait for the files of all processes, seal them, and give them their name."""
        indices = [index_name(rank) for rank in range(self.world.size)]
        deadline = time.monotonic() + self._timeout_s
        while late := [name for name in indices if not (partial / name).exists()]:
            if time.monotonic() > deadline:
                raise SetupError(
                    f"checkpoint {partial}: {late[0]} was not written within {self._timeout_s:.0f} s "
                    f"({WORK_FACTOR} × parallel.timeout); all processes must see one file system, and have room on it"
                )
            time.sleep(0.02)
        hashes = {name: sha256_file(partial / name) for name in indices}
        seal = {"schema_version": SHARDED_VERSION, "kind": "training state", "step": step, "sha256": hashes}
        atomic_write_text(partial / _COMPLETE, json.dumps(seal))
        if final.exists():
            shutil.rmtree(final)
        sync_tree(partial)
        partial.rename(final)
        self._publish(step)

    def _partial(self, step: int) -> Path:
        return self.folder / f".step-{step:09d}.partial"
