"""Remote files: fsspec's file system in memory, and a server over HTTP of our own that fails in every way."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penjing.core.cache import cache_dir
from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.core.remote import blocks, files, late
from penjing.core.remote.blocks import BlockReader, Blocks, open_remote
from penjing.core.remote.files import RemoteFile, is_remote, read_remote, remote_file, remote_files
from penjing.core.text.records import Record, read_records
from penjing.core.text.source_files import remote_files_below
from tests.core.remote.server import Files, serving

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

DATA = random.Random(0).randbytes(100_003)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_FIRST_WAIT_S", 0.001)
    files._checked_at.clear()
    fsspec.filesystem("memory").store.clear()
    return tmp_path / "cache" / "remote"


def put(path: str, data: bytes) -> str:
    with fsspec.open(f"memory://{path}", "wb") as file:
        file.write(data)
    return f"memory://{path}"


def test_what_is_an_address() -> None:
    assert all(map(is_remote, ("s3://b/x", "https://h/x", "memory://x", "gs://b/x")))
    assert not any(map(is_remote, ("builtin:prose", "a/b", "C:/x", "", "://x")))


def test_bytes_are_those_of_the_file_from_any_place() -> None:
    file = remote_file(put("/a/data.bin", DATA))
    assert (file.size, file.name, file.suffix, file.stem) == (len(DATA), "data.bin", ".bin", "data")
    reader = io.BufferedReader(BlockReader(file, ahead=3, block=1000), 333)
    assert reader.read() == DATA
    dice = random.Random(1)
    for _ in range(50):
        begin = dice.randrange(len(DATA))
        size = dice.randrange(5000)
        reader.seek(begin)
        assert reader.read(size) == DATA[begin : begin + size]
    reader.seek(-7, io.SEEK_END)
    assert reader.read() == DATA[-7:]


def test_a_block_is_asked_for_once_whoever_reads_it() -> None:
    server = Files({"x": DATA})
    with serving(server) as address:
        file = remote_file(f"{address}/x")
        readers = [Blocks(file, 10_000) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda each: each.read(0, len(DATA)), readers))
        assert found == [DATA] * 4
        assert server.gets["x"] == 11
        readers[0].expect([0, 3, 10, 11, -1])
        assert Blocks(file, 10_000).read(95_000, 100_003) == DATA[95_000:]
        assert server.gets["x"] == 11


def test_a_block_that_was_damaged_on_the_disk_is_fetched_again(cache: Path) -> None:
    file = remote_file(put("/b", DATA))
    assert Blocks(file, 1 << 16).read(0, 10) == DATA[:10]
    (stored,) = cache.glob("*/????????-*")
    stored.write_bytes(b"x" * stored.stat().st_size)
    assert Blocks(file, 1 << 16).read(0, 10) == DATA[:10]
    (stored,) = cache.glob("*/????????-*")
    stored.write_bytes(b"short")
    assert Blocks(file, 1 << 16).read(0, 10) == DATA[:10]


def test_a_connection_that_fails_is_tried_again() -> None:
    server = Files({"x": DATA})
    with serving(server) as address:
        server.failures = [503, 0, 429, 500]
        assert read_remote(f"{address}/x") == DATA
        assert server.gets["x"] == 5
        server.failures = [503] * 6
        files._checked_at.clear()
        with pytest.raises(SetupError, match=r"/x cannot be read: .*after 6 tries; check the network, then run again"):
            remote_file(f"{address}/x").fetch(0, 5)


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (404, InputError, "does not exist"),
        (401, SetupError, r"does not let us in \(status 401\)"),
        (403, SetupError, r"does not let us in \(status 403\)"),
        (400, InputError, "status 400|does not exist"),
    ],
)
def test_what_another_try_does_not_mend_is_said(status: int, error: type[Exception], said: str) -> None:
    server = Files({"x": DATA})
    with serving(server) as address:
        server.status = status
        with pytest.raises(error, match=said):
            remote_file(f"{address}/x")
        server.status = 0
        file = remote_file(f"{address}/x")
        server.failures = [status]
        with pytest.raises(error, match=said):
            file.fetch(0, 10)


def test_nobody_there_and_a_server_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(late, "LATE_S", 0.02)
    with socket.socket() as quiet:
        quiet.bind(("127.0.0.1", 0))
        closed = quiet.getsockname()[1]
    with pytest.raises(SetupError, match="cannot be read"):
        remote_file(f"http://127.0.0.1:{closed}/x")
    monkeypatch.setattr(files, "_READ_S", 0.05)
    monkeypatch.setattr(files, "_TRIES", 2)
    files._store.cache_clear()
    with socket.socket() as quiet:
        quiet.bind(("127.0.0.1", 0))
        quiet.listen()
        store = f"http://127.0.0.1:{quiet.getsockname()[1]}"
        with pytest.raises(SetupError, match=r"cannot be read: .*after 2 tries"):
            remote_file(f"{store}/x")
    assert f"{store} has not answered for 0.02 s; it is waited for, and asked up to 2 times" in capsys.readouterr().err
    files._store.cache_clear()


@pytest.mark.parametrize("other", [DATA[::-1], DATA[:50]])
def test_a_file_that_changes_while_it_is_read_is_refused(other: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Files({"x": DATA})
    with serving(server) as address:
        blocks_of = Blocks(remote_file(f"{address}/x"), 10_000)
        blocks_of.read(0, 10)
        server.files["x"] = other
        monkeypatch.setattr(files, "_ASKED_AGAIN_S", 0.0)
        with pytest.raises(InputError, match="was changed while it was read"):
            blocks_of.read(20_000, 20_010)
        assert read_remote(f"{address}/x") == other  # nothing of the old one is taken


def test_a_server_without_ranges_serves_small_files_alone() -> None:
    server = Files({"x": DATA})
    server.ranges = False
    with serving(server) as address:
        assert read_remote(f"{address}/x") == DATA
        with pytest.raises(InputError, match="sends whole files where a part is asked for; copy the file"):
            Blocks(remote_file(f"{address}/x"), 10_000).read(20_000, 30_000)


def test_a_server_that_compresses_what_it_sends_is_asked_not_to() -> None:
    server = Files({"x": DATA})
    server.compresses = True
    with serving(server) as address:
        assert Blocks(remote_file(f"{address}/x"), 10_000).read(20_000, 30_000) == DATA[20_000:30_000]


def test_addresses_that_nobody_reads() -> None:
    with pytest.raises(InputError, match="sky:// is no kind of address that is read"):
        remote_file("sky://x")
    with pytest.raises(InputError, match="does not exist"):
        remote_file("memory://nowhere/x")
    with pytest.raises(InputError, match=r"holds no files|does not exist"):
        remote_files("memory://nowhere/")
    put("/folder/x", b"1")
    with pytest.raises(InputError, match="is a folder, and a file is needed"):
        remote_file("memory://folder")


def test_old_blocks_make_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENJING_REMOTE_GB", "0.00005")
    blocks._used.clear()
    one = Blocks(remote_file(put("/room", DATA)), 10_000)
    assert one.read(0, len(DATA)) == DATA
    stored = sorted(cache.glob("*/????????-*"))
    assert sum(path.stat().st_size for path in stored) <= 50_000
    assert stored[-1].name.startswith("00000010")  # the newest stays
    monkeypatch.setenv("PENJING_REMOTE_GB", "much")
    with pytest.raises(ConfigError, match="PENJING_REMOTE_GB is 'much'; set it to gigabytes"):
        Blocks(remote_file(put("/room2", DATA))).read(0, 1)


def test_folders_are_listed_in_memory_and_over_http() -> None:
    names = {"corpus/b.jsonl": b"1", "corpus/a.txt": b"22", "corpus/.hidden": b"", "corpus/deep/c.txt": b"333"}
    for name, data in names.items():
        put(f"/{name}", data)
    found = remote_files("memory://corpus/")
    assert [(each.address, each.size) for each in found] == [
        ("memory://corpus/a.txt", 2), ("memory://corpus/b.jsonl", 1), ("memory://corpus/deep/c.txt", 3)
    ]  # fmt: skip
    with serving(Files(names)) as address:
        web = remote_files(f"{address}/corpus/")
        assert [(each.address.removeprefix(address), each.size) for each in web] == [
            ("/corpus/a.txt", 2), ("/corpus/b.jsonl", 1), ("/corpus/deep/c.txt", 3)
        ]  # fmt: skip
        assert remote_files(f"{address}/corpus/a.txt") == [remote_file(f"{address}/corpus/a.txt")]


def test_a_corpus_elsewhere_is_its_shards() -> None:
    for name in ("penjing.json", "shards/0.parquet", "report.json", "quarantine.jsonl"):
        put(f"/made/{name}", b"{}")
    assert [name for _, name in remote_files_below("memory://made")] == ["shards/0.parquet"]
    for name in ("dataset_info.json", "data/train-0.parquet", "data/test-0.parquet"):
        put(f"/hub/{name}", b"{}")
    assert [name for _, name in remote_files_below("memory://hub/")] == ["data/train-0.parquet"]


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.bz2", "jsonl.zst", "parquet", "arrow", "txt.gz", "txt"])
def test_remote_records_are_those_of_the_same_file_here(tmp_path: Path, form: str) -> None:
    rows = [{"text": f"text {n} é 漢", "domain": "d"} for n in range(700)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = tmp_path / f"a.{form}"
    if form in ("parquet", "arrow"):
        arrow = pytest.importorskip("pyarrow")
        table = arrow.Table.from_pylist(rows)
        if form == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        else:
            with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as out:
                out.write_table(table)
    elif form.endswith("zst"):
        path.write_bytes(pytest.importorskip("zstandard").compress(lines))
    else:
        path.write_bytes({"gz": gzip.compress, "bz2": bz2.compress}.get(form.rpartition(".")[2], bytes)(lines))
    file = remote_file(put(f"/records/{path.name}", path.read_bytes()))
    assert list(read_records(file, "n")) == list(read_records(path, "n"))
    assert isinstance(next(read_records(file, "n")), Record)


def test_a_remote_file_that_is_cut_off_is_refused_by_name() -> None:
    file = remote_file(put("/cut.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 100)[:-9]))
    with pytest.raises(InputError, match=r"memory:///?cut.jsonl.gz cannot be read"):
        list(read_records(file, "n"))


def test_an_empty_file_has_no_blocks() -> None:
    file = RemoteFile("memory://none", 0, "")
    with open_remote(file) as stream:
        assert stream.read() == b""
    assert not (cache_dir() / "remote").exists()
