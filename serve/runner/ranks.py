"""Between the processes of one model: steps go by a socket from the first one, what layers need by torch.distributed.

A socket ends with either process, so that nobody waits for one that is gone; a worker that has nothing to do waits at
it for as long as it takes, which no operation of torch.distributed would allow.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from penjing.core.cluster.start import room_for_process
from penjing.core.errors import BrokenEngineError
from penjing.serve.runner.step_inputs import StepTensors

c10d: Any = torch.distributed  # its stubs lack what gloo takes, and stores are not exported
Store = Any

STALL_SECONDS = 30.0  # between two layers, where a process of the same machine is milliseconds behind another
EXIT_SECONDS = 2.0
_SIZE = struct.Struct("<q")


class Channel:
    """One end of a socket that carries messages of bytes."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: bytes) -> None:
        """Raises OSError: the other end is gone, or has read nothing for STALL_SECONDS."""
        self._socket.settimeout(STALL_SECONDS)
        self._socket.sendall(_SIZE.pack(len(message)) + message)

    def receive(self) -> bytes | None:
        """The next message, however long it takes; None: the other end is gone."""
        self._socket.settimeout(None)
        head = self._read(_SIZE.size)
        return None if head is None else self._read(_SIZE.unpack(head)[0])

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self._socket.recv(count - len(parts))
            except ConnectionError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)


class GlooGather:
    """`core.runtime.tensor_parallel.Gather` over gloo, among processes of one machine."""

    def __init__(self, store: Store, rank: int, ranks: int, seconds: float = STALL_SECONDS) -> None:
        """Connect; every process calls it at about the same time."""
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=seconds)
        self.rank, self.ranks = rank, ranks
        self._group = c10d.ProcessGroupGloo(store, rank, ranks, options)

    def everywhere(self, x_MN: Tensor, sizes: tuple[int, ...]) -> Tensor:
        given_MN = _padded(x_MN, max(sizes))
        rows, width = given_MN.shape
        all_RMN = given_MN.new_empty(self.ranks, rows, width)
        if rows:
            self._group._allgather_base(all_RMN.view(-1, width), given_MN).wait()
        return _beside(all_RMN, sizes)

    def first(self, x_MN: Tensor, sizes: tuple[int, ...]) -> Tensor:
        if not x_MN.shape[0]:
            return x_MN.new_empty(0, sum(sizes)) if self.rank == 0 else x_MN
        given_MN = _padded(x_MN, max(sizes))
        options = c10d.GatherOptions()
        options.rootRank = 0
        if self.rank:
            self._group.gather([], [given_MN], options).wait()
            return x_MN
        all_RMN = given_MN.new_empty(self.ranks, *given_MN.shape)
        self._group.gather([list(all_RMN)], [given_MN], options).wait()
        return _beside(all_RMN, sizes)


def _padded(x_MN: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x_MN, (0, width - x_MN.shape[1])).contiguous()


def _beside(all_RMN: Tensor, sizes: tuple[int, ...]) -> Tensor:
    if len(set(sizes)) == 1:
        return all_RMN.transpose(0, 1).reshape(all_RMN.shape[1], -1)
    return torch.cat([x_MN[:, :size] for x_MN, size in zip(all_RMN, sizes, strict=True)], dim=1)


def encode_step(tensors: StepTensors, block_size: int) -> bytes:
    """What describes a step, as a message; of the block table the columns that it reads."""
    longest = int(tensors.context_len.max()) if len(tensors.context_len) else 0
    table_SB = tensors.block_table[:, : max(1, -(-longest // block_size))]
    parts = [*tensors[:-2], table_SB, tensors.logit_rows]
    head = np.array([len(tensors.token_ids), *table_SB.shape, len(tensors.logit_rows)], dtype=np.int64)
    return b"".join([head.tobytes(), *(part.contiguous().numpy().tobytes() for part in parts)])


def decode_step(message: bytes) -> StepTensors:
    """What `encode_step` made, in memory of its own."""
    memory = bytearray(message)
    num_tokens, num_sequences, width, num_logits = np.frombuffer(memory, dtype=np.int64, count=4).tolist()
    at = 32

    def take(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        nonlocal at
        made = torch.frombuffer(memory, dtype=dtype, count=count, offset=at) if count else torch.empty(0, dtype=dtype)
        at += count * dtype.itemsize
        return made

    ids, positions, slots = take(num_tokens), take(num_tokens), take(num_tokens, torch.int64)
    cu_query, lengths = take(num_sequences + 1), take(num_sequences)
    table = take(num_sequences * width).view(num_sequences, width)
    return StepTensors(ids, positions, slots, cu_query, lengths, table, take(num_logits))


class Workers:
    """The other processes of a model, and the ways to them. They end with this object, and with this process."""

    def __init__(self, folder: Path, ranks: int, threads: int, context: int | None = None) -> None:
        """Start them; they load their parts of `folder` meanwhile.

        Args:
            ranks: processes in all, this one included.
            threads: of each.
            context: as `load_model` takes it.

        Raises:
            SetupError: the machine has no room for another process.
        """
        self.ranks = ranks
        meeting = tempfile.TemporaryDirectory(prefix="penjing-ranks-")
        self.store_path = Path(meeting.name) / "store"
        environment = os.environ | {"PENJING_CPU_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        self._channels: list[Channel] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.end = weakref.finalize(self, _end, self._processes, self._channels, meeting)
        for rank in range(1, ranks):
            ours, theirs = socket.socketpair()
            with theirs:
                numbers = [str(number) for number in (rank, ranks, theirs.fileno(), context or "")]
                arguments = [str(folder), *numbers, str(self.store_path)]
                command = [_python(), "-m", "penjing.serve.runner.worker", *arguments]
                self._channels.append(Channel(ours))
                with room_for_process():
                    process = subprocess.Popen(
                        command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
                    )
                self._processes.append(process)

    def begin(self, settings: bytes) -> GlooGather:
        """Wait until all have loaded, tell them `settings` and connect.

        Raises:
            BrokenEngineError: one of them ended.
        """
        try:
            for rank, channel in enumerate(self._channels, 1):
                if channel.receive() is None:
                    raise ConnectionResetError(f"process {rank} did not load its part")
            self.send(settings)
            return GlooGather(c10d.FileStore(str(self.store_path), self.ranks), 0, self.ranks)
        except (OSError, RuntimeError) as error:
            raise self.broken(error) from error

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [process.pid for process in self._processes]

    def send(self, message: bytes) -> None:
        """To each of them. Raises OSError: one is gone, or stalls."""
        for channel in self._channels:
            channel.send(message)

    def broken(self, error: Exception) -> BrokenEngineError:
        """End the others; what happened to them, in words."""
        until = time.monotonic() + EXIT_SECONDS
        while not (ended := self._ended()) and time.monotonic() < until:
            time.sleep(0.01)
        self.end()
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        what = ", ".join(ended) or f"one did not answer within {STALL_SECONDS:.0f} s, or failed itself ({reason})"
        return BrokenEngineError(
            f"the model's {self.ranks} processes cannot go on: {what}; what one of them said last is in the log. "
            "Load the model again"
        )

    def _ended(self) -> list[str]:
        codes = [process.poll() for process in self._processes]
        return [
            f"process {rank} of {self.ranks} was killed by signal {-code}"
            if code < 0
            else f"process {rank} of {self.ranks} ended with status {code}"
            for rank, code in enumerate(codes, 1)
            if code is not None
        ]


def _end(processes: list[subprocess.Popen[bytes]], channels: list[Channel], meeting: Any) -> None:
    for channel in channels:
        channel.close()  # which a worker takes as the end
    for process in processes:
        try:
            process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    meeting.cleanup()


def _python() -> str:
    """This environment's interpreter; inside Triton server `sys.executable` is not one."""
    inside = Path(sys.prefix) / "bin" / "python3"
    return str(inside) if inside.exists() else sys.executable
