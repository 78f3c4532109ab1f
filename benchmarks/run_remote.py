"""Measure how long training waits for token shards that lie on a slow server far away; appends rows.

    pip install 'penjing[remote]'
    python benchmarks/run_remote.py      # two minutes

A server over HTTP of our own, in a process of its own, answers 50 ms after it is asked and sends 1.25 times what the
model needs, over all connections together; both by sleeping. The model sleeps too, for as long as a step takes, so that
a busy machine changes little. `waiting` is the share of the time in which the model waits for its batch, after the
first window of blocks; `waiting_as_on_a_disk` is the same with samples shuffled as those on a disk are, and nothing
read ahead; `waiting_again` is a second epoch, whose blocks lie on the disk. `first_batch` is how long the first batch
takes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from lib.models import say, warn_if_busy
from lib.rows import RESULTS, append, new_row

from penjing.core.cli import guarded
from penjing.train.data.prefetch import Prefetched
from penjing.train.data.shards import ShardIndex, ShardWriter, write_index
from penjing.train.data.stream import Stream, shuffled
from penjing.train.data.tokens import TokenRows
from penjing.train.remote.shards import RemoteShards, local_folder, open_shards, read_ahead

LATENCY, ROOM, PIECE = 0.05, 1.25, 1 << 16
LENGTH, BATCH = 1024, 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=128, help="of token shards")
    parser.add_argument("--step", type=float, default=0.008, help="seconds that the model takes for a step")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    warn_if_busy()
    need = BATCH * LENGTH * 2 / arguments.step
    with tempfile.TemporaryDirectory() as name:
        shards = made(Path(name) / "shards", arguments.megabytes << 19)
        ports = multiprocessing.get_context("spawn").Queue()
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(shards, ROOM * need, ports), daemon=True
        )
        server.start()
        address = f"http://127.0.0.1:{ports.get(timeout=60)}/"
        os.environ["PENJING_CACHE"] = str(Path(name) / "cache")
        steps = arguments.megabytes * (1 << 19) // (LENGTH * BATCH) - 1
        say(f"the model needs {need / 1e6:.1f} MB/s, the server sends {ROOM * need / 1e6:.1f}")
        shares: dict[str, float] = {}
        found = opened(address)
        stream = Prefetched(read_ahead(TokenRows(found, LENGTH), found, LENGTH, batch_size=BATCH, micro_batch=BATCH))
        began = time.perf_counter()
        next(stream)
        first = time.perf_counter() - began
        waiting(stream, 16 * found.block // (BATCH * LENGTH * 2), arguments.step)
        shares["waiting"] = waiting(stream, steps - 16 * found.block // (BATCH * LENGTH * 2), arguments.step)
        shares["waiting_again"] = waiting(stream, steps // 4, arguments.step)
        stream.close()
        os.environ["PENJING_CACHE"] = str(Path(name) / "other")
        plain = Prefetched(shuffled(TokenRows(opened(address), LENGTH), batch_size=BATCH, micro_batch=BATCH))
        shares["waiting_as_on_a_disk"] = waiting(plain, 10, arguments.step)
        server.kill()
    rows = [new_row("remote", metric, 100 * share, "%", runs=1) for metric, share in shares.items()]
    rows.append(new_row("remote", "first_batch", first, "s", runs=1))
    append("remote", rows, arguments.results)
    return 0


def made(folder: Path, tokens: int) -> Path:
    folder.mkdir()
    writer = ShardWriter(folder, "train", 1 << 16)
    writer.add(np.random.default_rng(0).integers(0, 1 << 16, tokens).tolist())
    index = ShardIndex(dtype="uint16", vocab_size=1 << 16, end_of_text=0, splits={"train": writer.close()})
    write_index(folder, index)
    return folder


def opened(address: str) -> RemoteShards:
    found = open_shards(local_folder(address), "train")
    assert isinstance(found, RemoteShards)
    return found


def waiting(stream: Iterator[Any] | Stream, steps: int, step: float) -> float:
    """The share of the time of `steps` in which their batches are waited for."""
    waited, began = 0.0, time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        next(stream)
        waited += time.perf_counter() - asked
        time.sleep(step)
    return waited / (time.perf_counter() - began)


def serve(folder: Path, rate: float, ports: Any) -> None:
    """Answer late, and send `rate` bytes a second over all connections together."""
    lock, free_at = threading.Lock(), [time.monotonic()]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            time.sleep(LATENCY)
            path = folder / self.path.strip("/")
            body = path.read_bytes() if path.is_file() else b"<a href='/index.json'>index.json</a>"
            status = 200 if path.is_file() or self.path == "/" else 404
            if path.suffix == ".bin" and (asked := self.headers.get("Range")):
                begin, end = map(int, asked.removeprefix("bytes=").split("-"))
                body, status = body[begin : end + 1], 206
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for at in range(0, len(body) if self.command == "GET" else 0, PIECE):
                piece = body[at : at + PIECE]
                with lock:
                    free_at[0] = max(free_at[0], time.monotonic() - 0.1) + len(piece) / rate
                    late = free_at[0] - time.monotonic()
                time.sleep(max(0.0, late))
                self.wfile.write(piece)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    ports.put(server.server_port)
    server.serve_forever()


if __name__ == "__main__":
    sys.exit(guarded(main))
