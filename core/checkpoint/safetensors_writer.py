"""Writes safetensors files one tensor at a time, so that a model is never in memory as a whole.

The format is an 8-byte little-endian header length, a JSON header (which may end in spaces), and the data. The header
is known only at the end, so room for it is kept at the start and padded; a shard that would outgrow it is closed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from penjing.core.files import NoRoomError, atomic_write_text, check_room

HEADER_ROOM = 128 * 1024  # bytes: about 1000 tensors at ~110 bytes each
MAX_SHARD_BYTES = 5_000_000_000
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write contiguous `tensors` of any shapes into the safetensors file `path`, with the rights of any new file;
    nothing is left of it when that fails.

    Raises:
        NoRoomError: the disk has too little room.
        OSError: the operating system's other refusals, which the safetensors package tells as an error of its own.
    """
    needed = sum(tensor.nbytes for tensor in tensors.values())
    check_room(path, needed)
    path.touch()
    rights = path.stat().st_mode & 0o777
    try:
        save_file(tensors, path, metadata)  # leaves a file that its owner alone may read
        path.chmod(rights)
    except SafetensorError as error:
        path.unlink(missing_ok=True)
        if (code := _os_error(error)) == errno.ENOSPC:  # another program took the room
            raise NoRoomError(path, needed, shutil.disk_usage(path.parent).free) from error
        if code is None:
            raise
        raise OSError(code, os.strerror(code), str(path)) from error


def _os_error(error: SafetensorError) -> int | None:
    found = re.search(r"\(os error (\d+)\)", str(error))
    return None if found is None else int(found[1])


class SafetensorsWriter:
    """A context manager: `add` tensors; at the end `folder` holds `model.safetensors`, or shards and their index.

    Args:
        folder: existing folder.
        max_shard_bytes: a new shard begins before a tensor that would pass this.
    """

    def __init__(self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self.folder = folder
        self.max_shard_bytes = max_shard_bytes
        self.total_bytes = 0
        self._shards: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None
        self._offset = 0
        self._header_bytes = 0

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            if self._file is not None:
                self._file.close()
            return
        if not self._shards:
            self._open_shard()
        self._close_shard()
        self._name_files()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append `tensor` (any shape; CPU or copied there) under `name`, which must be new."""
        assert all(name not in shard for shard in self._shards), f"{name} is written twice"
        data = tensor.detach().to("cpu").contiguous()
        size = data.numel() * data.element_size()
        entry = {"dtype": _DTYPES[data.dtype], "shape": list(data.shape)}
        entry_bytes = len(json.dumps({name: entry})) + 64  # 64: the two offsets
        full = self._offset + size > self.max_shard_bytes or self._header_bytes + entry_bytes > HEADER_ROOM - 64
        if self._file is None or (full and self._offset):
            self._close_shard()
            self._open_shard()
        assert self._file is not None
        self._shards[-1][name] = entry | {"data_offsets": [self._offset, self._offset + size]}
        self._header_bytes += entry_bytes
        # view as bytes: numpy has no bfloat16
        if size:
            self._file.write(data.reshape(-1).view(torch.uint8).numpy().data)
        self._offset += size
        self.total_bytes += size

    def _open_shard(self) -> None:
        self._shards.append({})
        self._file = open(self._temporary(len(self._shards)), "xb")  # noqa: SIM115 (closed by _close_shard)
        self._file.write(b"\0" * HEADER_ROOM)
        self._offset = self._header_bytes = 0

    def _close_shard(self) -> None:
        if self._file is None:
            return
        header = json.dumps({"__metadata__": {"format": "pt"}} | self._shards[-1], separators=(",", ":")).encode()
        room = HEADER_ROOM - 8
        assert len(header) <= room, "the header outgrew its room"
        self._file.seek(0)
        self._file.write(struct.pack("<Q", room) + header.ljust(room))
        self._file.close()
        self._file = None

    def _name_files(self) -> None:
        if len(self._shards) == 1:
            self._temporary(1).rename(self.folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(self._shards, start=1):
            name = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            self._temporary(number).rename(self.folder / name)
            weight_map |= dict.fromkeys(shard, name)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        atomic_write_text(self.folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")

    def _temporary(self, number: int) -> Path:
        return self.folder / f".shard-{number}"
