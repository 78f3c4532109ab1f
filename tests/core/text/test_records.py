"""One reader for every file of texts: what comes out, and what is said of what is damaged."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from penjing.core.errors import InputError
from penjing.core.text.records import Damage, Record, open_bytes, read_records
from penjing.core.text.source_files import files_below

LINES = b'{"text": "one"}\n\n{"text": "two", "domain": "code"}\n{"messages": [{"role": "user", "content": "hi"}]}\n'


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd,
}  # fmt: skip


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("suffix", COMPRESS)
def test_json_lines_are_documents_with_their_other_fields(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.jsonl{suffix}", COMPRESS[suffix](LINES))
    assert list(read_records(path, "a")) == [
        Record("a, line 1", "one"),
        Record("a, line 3", "two", fields={"domain": "code"}),
        Record("a, line 4", None, [{"role": "user", "content": "hi"}]),
    ]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_frames_one_after_another_are_one_file(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.txt{suffix}", COMPRESS[suffix](b"one\n") + COMPRESS[suffix](b"two\n"))
    assert list(read_records(path, "a")) == [Record("a", "one\ntwo\n")]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_compressed_file_that_is_cut_off_is_refused(tmp_path: Path, suffix: str) -> None:
    import random

    lines = [json.dumps({"text": f"{random.Random(number).random()}"}).encode() + b"\n" for number in range(2000)]
    whole = COMPRESS[suffix](b"".join(lines))
    path = write(tmp_path / f"a.jsonl{suffix}", whole[: len(whole) * 2 // 3])
    with pytest.raises(InputError, match=rf"a.jsonl{suffix} cannot be read.*cut off or damaged"):
        list(read_records(path, "a"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a', "not JSON (Invalid control character at column 12)"),
        (b'{"text": "\xff"}', "cannot be read as UTF-8: byte 0xff at place 10"),
        (b'{"text": "a\\u0000b"}', "NUL"),
        (b'{"text": "a\\ud800b"}', "half a surrogate pair"),
        (b'["text"]', "an object"),
        (b'{"text": 3}', "the field 'text' holds no text but a number"),
        (b'{"text": {}}', "the field 'text' holds no text but an object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"messages": null}', "messages must be a list of objects"),
        (b'{"messages": ["hi"]}', "messages must be a list of objects"),
        (b'{"messages": [{"role": "user", "content": "a\\ud800b"}]}', "half a surrogate pair"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a\\u0000b"}]}]}', "NUL"),
    ],
)
def test_a_damaged_line_costs_itself_alone(tmp_path: Path, line: bytes, reason: str) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n')
    first, damage, last = read_records(path, "a")
    assert [first, last] == [Record("a, line 1", "one"), Record("a, line 3", "two")]
    assert isinstance(damage, Damage)
    assert damage.name == "a, line 2"
    assert reason in damage.reason


def test_what_a_line_without_a_text_holds_is_not_told(tmp_path: Path) -> None:
    lines: list[object] = [
        {"name": "Somebody with a name of many letters", "mail": "jane@firm.org"},
        {"jane" * 20 + "@firm.org": 1, "a": 2},
        {f"{number}": number for number in range(100_000)},
        {},
        [1],
        None,
    ]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)).encode())
    wanted = 'an object with "text" or "messages" is needed (this has'
    assert [each.reason for each in read_records(path, "a") if isinstance(each, Damage)] == [
        f"{wanted} 'name', 'mail')",
        f"{wanted} a long name, 'a')",
        f"{wanted} '0', '1', '2', '3', '4', '5', '6', '7' and 99,992 more)",
        f"{wanted} no fields)",
        "an object is needed (this is a list)",
        "an object is needed (this is null)",
    ]


def test_a_line_that_is_too_long_is_skipped_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penjing.core.text import records

    monkeypatch.setattr(records, "LONGEST_LINE", 1 << 20)
    long = json.dumps({"text": "x" * (3 << 20)}).encode()
    path = write(tmp_path / "a.jsonl", long + b'\n{"text": "two"}\n')
    assert list(read_records(path, "a")) == [Damage("a, line 1", "longer than 1 MB"), Record("a, line 2", "two")]


def test_one_bad_byte_costs_its_line_and_another_encoding_the_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\ntw\xff\nthree\n")
    damage, record = read_records(path, "a.txt")
    assert damage == Damage("a.txt, line 2", "cannot be read as UTF-8: byte 0xff at place 2", part=True)
    assert record == Record("a.txt", "one\nthree\n")
    write(path, "né\n".encode("latin-1") * 5)
    (damage,) = read_records(path, "a.txt")
    assert isinstance(damage, Damage)
    assert not damage.part
    assert "in line 1, and 5 of 6 lines are so; convert it" in damage.reason
    write(path, "né\n".encode("utf-16"))
    (damage,) = read_records(path, "a.txt")
    reason = "cannot be read as UTF-8: it is UTF-16; convert it, for example by iconv -f utf-16 -t utf-8"
    assert damage == Damage("a.txt", reason)
    assert list(read_records(write(tmp_path / "empty.txt", b"\n"), "e")) == []


def test_the_column_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"body": "one", "text": "no"}\n{"text": "two"}\n')
    record, damage = read_records(path, "a", "body")
    assert record == Record("a, line 1", "one", fields={"text": "no"})
    assert damage == Damage("a, line 2", "has no field 'body' (it has 'text')")


def test_tables_give_the_same_documents(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"text": ["one", "two"], "domain": ["a", "b"], "vector": [[1.0], [2.0]], "image": [b"a", b"b"]})
    pq.write_table(table, tmp_path / "a.parquet")
    for kind, opener in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
        with pa.OSFile(str(tmp_path / f"{kind}.arrow"), "wb") as sink, opener(sink, table.schema) as writer:
            writer.write_table(table)
    for name in ("a.parquet", "stream.arrow", "file.arrow"):
        assert list(read_records(tmp_path / name, "a")) == [
            Record("a, row 1", "one", fields={"domain": "a"}),
            Record("a, row 2", "two", fields={"domain": "b"}),
        ]
        with pytest.raises(InputError, match="has no column of text 'body'; its columns are"):
            list(read_records(tmp_path / name, "a", "body"))
        whole = (tmp_path / name).read_bytes()
        write(tmp_path / name, whole[: len(whole) // 2])
        with pytest.raises(InputError, match="cut off or damaged"):
            list(read_records(tmp_path / name, "a"))
    pq.write_table(pa.table({"vector": [[1.0]]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="has no column called text or content or messages"):
        list(read_records(tmp_path / "b.parquet", "b"))


def test_a_table_that_is_compressed_as_a_whole_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = write(tmp_path / "a.parquet.gz", gzip.compress(b"a table"))
    with pytest.raises(InputError, match=r"a.parquet.gz is a table that is compressed as a whole.*; unpack it"):
        list(read_records(path, "a"))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_categories_are_texts(tmp_path: Path, name: str) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    categories = {"body": ["one", "two"], "domain": ["a", "a"]}
    columns = {key: pa.array(values).dictionary_encode() for key, values in categories.items()}
    table = pa.table({**columns, "cluster": pa.array(["b", "c"], pa.string_view())})
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        with pa.OSFile(str(tmp_path / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    assert list(read_records(tmp_path / name, "a", "body")) == [
        Record("a, row 1", "one", fields={"domain": "a", "cluster": "b"}),
        Record("a, row 2", "two", fields={"domain": "a", "cluster": "c"}),
    ]


def test_of_a_data_set_the_training_tables_are_taken(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    (hub / "data").mkdir(parents=True)
    write(hub / "README.md", b"---\nlicense: mit\nconfigs:\n- config_name: default\n---\n# About\n")
    for name in ("train-00000-of-00001", "test-00000-of-00001", "validation-00000-of-00001"):
        write(hub / "data" / f"{name}.parquet", b"")
    assert files_below(hub) == [hub / "data" / "train-00000-of-00001.parquet"]
    saved = tmp_path / "saved"
    (saved / "train").mkdir(parents=True)
    write(saved / "dataset_dict.json", b'{"splits": ["train"]}')
    write(saved / "train" / "state.json", b'{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    for name in ("data-00000-of-00001.arrow", "cache-0123.arrow"):
        write(saved / "train" / name, b"")
    assert files_below(saved) == [saved / "train" / "data-00000-of-00001.arrow"]
    write(saved / "train" / "state.json", b'{"_data_files": [{"filename": "../../x.arrow"}]}')
    with pytest.raises(InputError, match="outside its folder"):
        files_below(saved)
    plain = tmp_path / "plain"
    (plain / ".git").mkdir(parents=True)
    write(plain / "README.md", b"# Notes\n")
    write(plain / "test.txt", b"x")
    write(plain / ".git" / "config.txt", b"x")
    assert [path.name for path in files_below(plain)] == ["README.md", "test.txt"]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_text_that_unpacks_without_end_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr("penjing.core.text.records.LONGEST_LINE", 1 << 20)
    bomb = write(tmp_path / f"bomb.txt{suffix}", COMPRESS[suffix](b"a" * (20 << 20)))
    if bomb.stat().st_size * 50 < 20 << 20:
        assert list(read_records(bomb, "bomb")) == [Damage("bomb", "unpacks to more than 1 MB and 50 times its size")]
    honest = write(tmp_path / f"honest.txt{suffix}", COMPRESS[suffix](b"word " * 1000))
    assert list(read_records(honest, "honest")) == [Record("honest", "word " * 1000)]


def test_a_frame_is_unpacked_in_pieces(tmp_path: Path) -> None:
    packer = pytest.importorskip("zstandard").ZstdCompressor().compressobj()
    pieces = [packer.compress(b"a" * (8 << 20)) for _ in range(64)]
    bomb = write(tmp_path / "bomb.txt.zst", b"".join([*pieces, packer.flush()]))  # some kB for 512 MB
    tracemalloc.start()
    try:
        with open_bytes(bomb) as stream:
            assert sum(len(piece) for piece in iter(lambda: stream.read(1 << 20), b"")) == 512 << 20
        assert tracemalloc.get_traced_memory()[1] < 320 << 20
    finally:
        tracemalloc.stop()


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for path in (tmp_path / "pipe.txt", Path("/dev/zero")):
        with pytest.raises(InputError, match="is no regular file, and is not read"):
            list(read_records(path, "pipe"))


def test_a_file_full_of_nul_is_no_text_of_another_encoding(tmp_path: Path) -> None:
    (damage,) = read_records(write(tmp_path / "a.txt", b"a\0b\n" * 4 + b"whole"), "a.txt")
    assert damage == Damage("a.txt", "holds the character NUL in line 1, and 4 of 5 lines are so; leave it out")
