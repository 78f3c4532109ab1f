"""A state of which every process holds a part ⇄ files: each process writes what it holds, whoever reads takes what it
needs, on any other mesh.

Process r writes `state-0000r.safetensors` with its parts and `state-0000r.json` with the tree around them and, for each
tensor, the shape of the whole and where the part begins. (torch.distributed.checkpoint does the same, but keeps its
index in a pickle.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penjing.core.checkpoint.safetensors_writer import save_tensors
from penjing.core.errors import InputError
from penjing.core.files import sha256_file
from penjing.core.manifest import read_json_object
from penjing.train.state.state import Tree, first_to_hold, join_tree, local_part, split_tree


class ShardedTree:
    """This process's parts of a tree, copied to the CPU."""

    def __init__(self, tree: Tree) -> None:
        tensors, self._plain = split_tree(tree)
        self._parts: dict[str, torch.Tensor] = {}
        self._regions: dict[str, dict[str, list[int]]] = {}
        for path, tensor in tensors.items():
            local, region = local_part(tensor)
            if first_to_hold(tensor) and (local.numel() or not tensor.numel()):
                self._parts[path] = local.detach().to("cpu", copy=True).contiguous()
                self._regions[path] = {"shape": list(tensor.shape), "offset": [part.start for part in region]}

    def write(self, folder: Path, rank: int) -> None:
        """Write the parts as those of process `rank`; the JSON, last, holds the hash of the other file."""
        tensors, index = _names(folder, rank)
        save_tensors(self._parts, tensors)
        value = {"tree": self._plain, "regions": self._regions, "sha256": sha256_file(tensors)}
        partial = index.with_suffix(".partial")
        partial.write_text(json.dumps(value), encoding="utf-8")
        partial.rename(index)


class SavedTensor:
    """A tensor in the files of many processes; `saved[slices]` reads what is asked for."""

    def __init__(self, path: str, shape: tuple[int, ...]) -> None:
        self.path = path
        self.shape = shape
        self._parts: list[tuple[Any, list[int]]] = []

    def add(self, file: Any, offset: list[int]) -> None:
        """A part of it lies in the open safetensors `file`."""
        self._parts.append((file, offset))

    def __getitem__(self, region: tuple[slice, ...]) -> torch.Tensor:
        """Raises: InputError: not all of the region is in the files."""
        wanted = [(part.start, part.stop) for part in region]
        result: torch.Tensor | None = None
        missing = 1
        for begin, end in wanted:
            missing *= end - begin
        for file, offset in self._parts:
            stored = file.get_slice(self.path)
            sizes = stored.get_shape()
            common = [
                (max(begin, at), min(end, at + size))
                for (begin, end), at, size in zip(wanted, offset, sizes, strict=True)
            ]
            if any(begin >= end for begin, end in common):
                continue
            from_file = tuple(slice(begin - at, end - at) for (begin, end), at in zip(common, offset, strict=True))
            values = stored[from_file] if from_file else file.get_tensor(self.path)
            if result is None:
                result = torch.empty([end - begin for begin, end in wanted], dtype=values.dtype)
                filled = torch.zeros_like(result, dtype=torch.bool)
            into = tuple(slice(begin - at, end - at) for (begin, end), (at, _) in zip(common, wanted, strict=True))
            missing -= int((~filled[into]).sum())  # pyright: ignore[reportPossiblyUnboundVariable]
            filled[into] = True  # pyright: ignore[reportPossiblyUnboundVariable]
            result[into] = values
        if result is None and missing == 0:
            return torch.empty([end - begin for begin, end in wanted])
        if result is None or missing:
            raise InputError(f"the saved state lacks a part of {self.path!r}; it is damaged")
        return result


def read_shards(folder: Path, hashes: dict[str, str], rank: int = 0, size: int = 1) -> Tree:
    """The tree that `hashes`' processes wrote, its tensors `SavedTensor`s. Of `size` processes that read, `rank` checks
    its share of the tensors' files, and all of the small ones.

    Raises:
        InputError: a file is missing, or not what was written.
    """
    plain: Any = None
    saved: dict[str, SavedTensor] = {}
    for writer in range(len(hashes)):
        tensors, index = _names(folder, writer)
        if sha256_file(index) != hashes.get(index.name):
            raise InputError(f"checkpoint {folder}: {index.name} is not what was written; it is damaged")
        value = read_json_object(index)
        if writer % size == rank and sha256_file(tensors) != value["sha256"]:
            raise InputError(f"checkpoint {folder}: {tensors.name} is not what was written; it is damaged")
        file = _open(tensors)
        for path, region in value["regions"].items():
            saved.setdefault(path, SavedTensor(path, tuple(region["shape"]))).add(file, region["offset"])
        plain = _merge(plain, value["tree"])
    return join_tree(saved, plain)  # type: ignore[arg-type]  # what is joined need not be a tensor


def read_tensors(path: Path, plain: Any) -> Tree:
    """The tree around `plain` whose tensors, `SavedTensor`s, lie whole in the safetensors file `path`.

    Raises:
        InputError: it cannot be read, or lacks a tensor.
    """
    file = _open(path)
    saved: dict[str, SavedTensor] = {}
    for name in file.keys():  # noqa: SIM118  # no dictionary
        shape = file.get_slice(name).get_shape()
        saved[name] = SavedTensor(name, tuple(shape))
        saved[name].add(file, [0] * len(shape))
    return join_tree(saved, plain)  # type: ignore[arg-type]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt").__enter__()
    except (SafetensorError, OSError) as error:
        raise InputError(f"checkpoint {path.parent}: {path.name} cannot be read: {error}") from error


def _names(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"state-{rank:05d}.safetensors", folder / f"state-{rank:05d}.json"


def index_name(rank: int) -> str:
    """The file that is there once process `rank` has written."""
    return f"state-{rank:05d}.json"


def _merge(left: Any, right: Any) -> Any:
    """Stages of a pipeline hold other layers: both dictionaries' keys; else what the first says."""
    if isinstance(left, dict) and isinstance(right, dict):
        return {key: _merge(left.get(key), right.get(key)) for key in {**left, **right}}
    return right if left is None else left
