"""Token shards that lie elsewhere: read in blocks, ahead of the model, in an order that reads each block once.

A sample anywhere in a remote file would cost a whole block. So samples of a block stay together, and only those of a
few blocks are mixed (`permute_near`): of these the next are read while the model learns from the last.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.cache import cache_dir
from penjing.core.errors import InputError
from penjing.core.files import holding, publish_folder
from penjing.core.manifest import read_json_object
from penjing.core.remote.blocks import BLOCK, Blocks
from penjing.core.remote.files import RemoteFile, read_remote, remote_file, remote_files
from penjing.train.data.order import Order
from penjing.train.data.shards import INDEX_NAME, ShardFile, TokenSequence, TokenShards
from penjing.train.data.stream import OrderedStream, TokenSamples
from penjing.train.objective.objective import Batch

_WINDOW = 16  # groups of samples, each about a block, that are mixed
_ADDRESS = "remote.json"  # in a folder that stands for a remote one


def local_folder(address: str) -> Path:
    """A folder with the small files of the remote folder of token shards at `address`, which are copied here; its
    shards stay where they are.

    Raises:
        InputError: there is none, or no index in it.
        SetupError: its store cannot be reached.
    """
    root = address.rstrip("/")
    try:
        index = remote_file(f"{root}/{INDEX_NAME}")
    except InputError as error:
        raise InputError(f"{root} is no folder of token shards, which data.shards names: {error}") from error
    folder = cache_dir() / "remote-shards" / index.key
    with holding(folder.with_suffix(".lock")):
        if not folder.exists():
            with publish_folder(folder, marker=_ADDRESS) as partial:
                for file in remote_files(f"{root}/"):
                    if file.suffix == ".json" and file.address.rpartition("/")[0] == root:
                        (partial / file.name).write_bytes(read_remote(file.address))
                (partial / INDEX_NAME).write_bytes(read_remote(index.address))  # also where a folder cannot be listed
                (partial / _ADDRESS).write_text(json.dumps({"address": root}), encoding="utf-8")
    return folder


def open_shards(folder: Path, split: str) -> TokenShards:
    """A split of a folder of token shards, or of one that `local_folder` gave."""
    return RemoteShards(folder, split) if (folder / _ADDRESS).exists() else TokenShards(folder, split)


class RemoteShards(TokenShards):
    """Token shards in blocks from elsewhere."""

    def __init__(self, folder: Path, split: str, block: int = BLOCK) -> None:
        self._address = str(read_json_object(folder / _ADDRESS)["address"])
        self.block = block
        self._blocks: list[Blocks] = []
        super().__init__(folder, split)

    def _open(self, file: ShardFile) -> TokenSequence:
        found: RemoteFile = remote_file(f"{self._address}/{file.name}")
        self._check_size(found.address, file, found.size)
        self._blocks.append(Blocks(found, self.block))
        return _Tokens(self._blocks[-1], self.dtype)

    def verify(self) -> None:
        """Not done for remote shards, which would have to be read as a whole: blocks have hashes of their own."""
        raise InputError(f"{self._address} is remote, and its files are not read as a whole; copy them to verify them")

    def expect(self, begin: int, end: int) -> None:
        """Have the blocks of tokens begin … end - 1 read, which will be asked for."""
        starts = np.concatenate([[0], self.ends[:-1]])
        for place, blocks in enumerate(self._blocks):
            low, high = max(begin, int(starts[place])), min(end, int(self.ends[place]))
            if low < high:
                size = self.dtype.itemsize
                first, last = ((each - int(starts[place])) * size // blocks.block for each in (low, high - 1))
                blocks.expect(range(first, last + 1))


class _Tokens:
    """The tokens of a remote file."""

    def __init__(self, blocks: Blocks, dtype: np.dtype[Any]) -> None:
        self._blocks, self._dtype = blocks, dtype

    def __getitem__(self, place: slice, /) -> NDArray[Any]:
        size = self._dtype.itemsize
        begin, end, _ = place.indices(self._blocks.file.size // size)
        return np.frombuffer(self._blocks.read(begin * size, end * size), self._dtype)


class ReadAhead(OrderedStream[Order]):
    """A stream whose order reads ahead: the blocks of the samples of the next groups, for all processes of a machine.

    Args:
        length: tokens of a sample, which begins at `sample · length`.
    """

    num_compared = 2  # each costs a block

    def __init__(self, samples: TokenSamples, shards: RemoteShards, length: int, order: Order, group: int) -> None:
        super().__init__(samples, order)
        self._shards, self._length, self._group = shards, length, group
        self._told = -1

    def __next__(self) -> Batch:
        window = self._group * _WINDOW
        at = int(self.order.state_dict()["taken"])
        if at // window != self._told:
            self._told = at // window
            coming = self.order.coming(2 * window - at % window)  # the rest of this window, and the next
            _, first = np.unique(coming // self._group, return_index=True)
            for group in (coming[np.sort(first)] // self._group).tolist():  # those that are needed first come first
                self._shards.expect(group * self._group * self._length, (group + 1) * self._group * self._length + 1)
        return super().__next__()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `OrderedStream`."""
        super().load_state_dict(state)
        self._told = -1


def read_ahead(
    samples: TokenSamples, shards: RemoteShards, length: int, *, batch_size: int, micro_batch: int, rank: int = 0,
    world_size: int = 1, seed: int = 0,
) -> ReadAhead:  # fmt: skip
    """As `stream.shuffled`, of rows of remote shards; see `ReadAhead`.

    Raises:
        InputError: there are none.
    """
    group = max(1, shards.block // (length * shards.dtype.itemsize))
    order = Order(len(samples), batch_size, micro_batch, rank, world_size, seed, near=(group, _WINDOW))
    return ReadAhead(samples, shards, length, order, group)
