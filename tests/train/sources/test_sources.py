"""Every kind of source gives the same samples; what is wrong with one is said."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import struct
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zstandard
from safetensors.torch import save_file

from penjing.core import files
from penjing.core.errors import InputError, SetupError
from penjing.core.text import records
from penjing.train.sources import packed, tables
from penjing.train.sources.images import class_names
from penjing.train.sources.open import fingerprint, open_source
from penjing.train.sources.pairs import open_pairs
from penjing.train.sources.reader import Form, targets_of
from penjing.train.sources.settings import SourceSettings
from penjing.train.sources.source import Source
from tests.train.sources.photos import folder_of, photo


def opened(path: Path | str, **settings: object) -> Source:
    return open_source(SourceSettings.model_validate({"source": str(path), **settings}))


def test_a_folder_of_each_class(tmp_path: Path) -> None:
    source = opened(folder_of(tmp_path / "photos", {"cat": 3, "dog": 2}))
    assert source.size == 5
    assert source.labels == ["cat"] * 3 + ["dog"] * 2
    assert source.load(0) == photo(0)
    assert source.said(4).endswith("dog/001.png")
    assert opened(tmp_path / "photos", labels=False).labels is None


def test_images_without_classes(tmp_path: Path) -> None:
    source = opened(folder_of(tmp_path / "photos", {"": 4}))
    assert (source.size, source.labels) == (4, None)


def test_folders_for_training_and_testing_are_taken(tmp_path: Path) -> None:
    folder_of(tmp_path / "train", {"cat": 2, "dog": 2})
    folder_of(tmp_path / "val", {"cat": 1, "dog": 1}, seed=9)
    source = opened(tmp_path)
    learnt, held = source.halves(0.5)
    assert [source.labels[index] for index in learnt] == ["cat", "cat", "dog", "dog"]  # type: ignore[index]
    assert len(held) == 2


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        ({}, "no images"),
        ({"cat": 3}, "one class alone"),
        ({"cat": 3, "": 2}, "beside them"),
        ({"cat": 3, "dog": 2, "empty": 0}, "empty has no images"),
    ],
)
def test_a_folder_that_is_wrong(tmp_path: Path, classes: dict[str, int], said: str) -> None:
    path = tmp_path / "photos"
    path.mkdir()
    folder_of(path, classes)
    with pytest.raises(InputError, match=said):
        opened(path)
    if classes:
        assert opened(path, labels=False).size == sum(classes.values())


def test_the_held_out_share_follows_content(tmp_path: Path) -> None:
    folder_of(tmp_path / "a", {"cat": 40, "dog": 40})
    source = opened(tmp_path / "a")
    learnt, held = source.halves(0.25)
    assert sorted([*learnt, *held]) == list(range(80))
    assert 8 <= len(held) <= 32
    copied = Path(source.said(int(held[0]))).read_bytes()
    (tmp_path / "a" / "cat" / "copy.png").write_bytes(copied)
    again = opened(tmp_path / "a")
    places = again.halves(0.25)[1].tolist()
    assert len(places) == len(held) + 1
    assert [index for index in range(again.size) if again.load(index) == copied and index not in places] == []


def test_too_few_to_hold_any_out(tmp_path: Path) -> None:
    folder_of(tmp_path, {"": 1})
    (tmp_path / "copy.png").write_bytes((tmp_path / "000.png").read_bytes())
    with pytest.raises(InputError, match="holds 1 different sample, too few to hold any out"):
        opened(tmp_path).halves(0.5)


def test_json_lines(tmp_path: Path) -> None:
    folder_of(tmp_path, {"images": 3})
    lines = [{"image": f"images/{number:03d}.png", "label": number % 2} for number in range(3)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    source = opened(path)
    assert source.labels == [0, 1, 0]
    assert source.load(1) == photo(1)
    path.write_text(json.dumps({"picture_of": "../../etc/passwd.png"}))
    with pytest.raises(InputError, match=r"name it by data\.column"):
        opened(path)
    with pytest.raises(InputError, match="lies outside"):
        opened(path, column="picture_of").load(0)
    path.write_text("[1]")
    with pytest.raises(InputError, match="no JSON object"):
        opened(path)
    path.write_text(f'{json.dumps(lines[0])}\n\n{{"image": cut\n')
    with pytest.raises(InputError, match=r"JSON lines: line 3 is no JSON \(Expecting value at column 11\); write one"):
        opened(path)


def test_endings_in_capitals_and_byte_order_marks_are_read_as_others(tmp_path: Path) -> None:
    folder_of(tmp_path, {"images": 3})
    lines = [{"image": f"images/{number:03d}.png", "label": number % 2, "text": f"t {number}"} for number in range(3)]
    written = "\n".join(map(json.dumps, lines))
    for name, text in (("A.JSONL", written), ("marked.jsonl", f"\ufeff{written}")):
        (tmp_path / name).write_text(text, encoding="utf-8")
        source = opened(tmp_path / name)
        assert (source.labels, source.load(1)) == ([0, 1, 0], photo(1))
        pairs = open_pairs((str(tmp_path / name),), SourceSettings(), None)
        assert pairs.labels == ["t 0", "t 1", "t 2"]
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3), np.float32))
    (tmp_path / "a.npz").rename(tmp_path / "A.NPZ")
    assert opened(tmp_path / "A.NPZ").size == 2


def test_numbers_of_classes_may_be_of_any_size_and_are_refused(tmp_path: Path) -> None:
    folder_of(tmp_path, {"images": 2})
    rows = [{"image": f"images/{number:03d}.png", "label": number * 10**20} for number in range(2)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match=r"classes from 0 to 100000000000000000000, the network 3 from 0 on"):
        targets_of(opened(path), Form((), None, 3))
    with pytest.raises(InputError, match=r"has class 100000000000000000000, and classes are numbered from 0 on, below"):
        class_names(SourceSettings(source=str(path)))


def test_a_tar(tmp_path: Path) -> None:
    path = tmp_path / "shard-000.tar"
    path.write_bytes(_tar_of(3))
    source = opened(path)
    assert source.labels == [0, 1, 0]
    assert [source.load(index) for index in range(3)] == [photo(number) for number in range(3)]
    assert opened(tmp_path).size == 3
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(InputError, match=r"no whole|no images"):
        opened(path)


@pytest.mark.parametrize("ending", ["tar.gz", "tgz", "tar.bz2", "tar.xz", "tar.zst"])
def test_a_compressed_tar_gives_what_the_plain_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "shards"
    folder.mkdir()
    content, path = _tar_of(5), folder / f"000.{ending}"
    if ending == "tar.zst":
        frames = zstandard.ZstdCompressor()
        path.write_bytes(frames.compress(content[:700]) + frames.compress(content[700:]))
    else:
        pack = {"tar.bz2": bz2.compress, "tar.xz": lzma.compress}.get(ending, gzip.compress)
        path.write_bytes(pack(content))
    for source in (opened(path), opened(folder)):  # the second one finds it unpacked
        assert source.labels == [0, 1, 0, 1, 0]
        assert [source.load(index) for index in (4, 0)] == [photo(4), photo(0)]
        assert str(path) in source.said(0)
    (made,) = (tmp_path / "cache" / "tars").iterdir()
    assert made.read_bytes() == content
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"no whole, compressed tar .* get it again"):
        opened(path)
    assert list((tmp_path / "cache" / "tars").iterdir()) == [made]


def test_a_tar_that_unpacks_to_much_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed, "LEAST", 1 << 20)
    (tmp_path / "bomb.tgz").write_bytes(gzip.compress(bytes(8 << 20)))
    with pytest.raises(InputError, match="50 times what it takes"):
        opened(tmp_path / "bomb.tgz")
    assert not list((tmp_path / "cache" / "tars").iterdir())
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    (tmp_path / "a.tgz").write_bytes(gzip.compress(_tar_of(2)))
    with pytest.raises(SetupError, match="the disk is full"):
        opened(tmp_path / "a.tgz")


def test_a_digit_that_is_no_number_is_the_name_of_a_class(tmp_path: Path) -> None:
    (path := tmp_path / "shard.tar").write_bytes(_tar_of(3, "²³"))
    assert opened(path).labels == ["²", "³", "²"]


def _tar_of(images: int, classes: str = "01") -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as file:
        for number in range(images):
            for ending, content in (("png", photo(number)), ("cls", classes[number % 2].encode())):
                member = tarfile.TarInfo(f"data/{number:04d}.{ending}")
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
    return made.getvalue()


def test_files_of_a_folder_may_be_for_testing(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, count in (("train-00000", 3), ("test-00000", 2)):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((count, 2)))
        rows = [{"image": f"{number}.png", "label": 1} for number in range(count)]
        (tmp_path / "data" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = opened(tmp_path)
    assert source.size == 5
    assert [source.said(int(index)).split("/")[-1] for index in source.halves(0.1)[1]] == ["test-00000.jsonl"] * 2


def test_tensors(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((4, 3)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=values, labels=np.arange(4))
    save_file({"x": torch.from_numpy(values), "labels": torch.arange(4)}, tmp_path / "a.safetensors")
    for name in ("a.npz", "a.safetensors"):
        source = opened(tmp_path / name)
        assert source.labels == [0, 1, 2, 3]
        np.testing.assert_array_equal(source.load(2)["x"], values[2])  # type: ignore[index,call-overload]
    np.save(tmp_path / "a.npy", values)
    np.testing.assert_array_equal(opened(tmp_path / "a.npy").load(2)["0"], values[2])  # type: ignore[index,call-overload]
    np.savez(tmp_path / "b.npz", x=values, y=values[:2])
    with pytest.raises(InputError, match="as many of all"):
        opened(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", x=np.array([{}], object))
    np.save(tmp_path / "c.npy", np.array([{}], object))
    for name in ("c.npz", "c.npy"):
        with pytest.raises(InputError, match="pickled"):
            opened(tmp_path / name)


def test_a_function(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def pairs():\n    for _ in range(2):\n        yield torch.ones(2, 3), torch.tensor([0, 1])\n"
        "def named():\n    yield {'a': torch.ones(2, 3), 'b': torch.zeros(2)}\n"
        "def broken():\n    raise RuntimeError('no disk')\n"
        "def nothing():\n    yield from ()\n"
    )
    assert opened(f"{path}:pairs").labels == [0, 1, 0, 1]
    assert set(opened(f"{path}:named").load(0)) == {"a", "b"}  # type: ignore[arg-type]
    for name, said in (("broken", "no disk"), ("nothing", "yields nothing"), ("other", "no function 'other'")):
        with pytest.raises(InputError, match=said):
            opened(f"{path}:{name}")


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(records, "import_module", missing)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(SetupError, match="pip install pyarrow"):
        opened(tmp_path / "a.parquet")


def test_what_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        opened(tmp_path / "missing")
    (tmp_path / "a.txt").touch()
    with pytest.raises(InputError, match="no folder and no"):
        opened(tmp_path / "a.txt")


def test_images_is_another_spelling() -> None:
    assert SourceSettings.model_validate({"images": "photos/"}).source == "photos/"
    with pytest.raises(ValueError, match="give one of them"):
        SourceSettings.model_validate({"images": "photos/", "source": "other/"})


def test_a_source_that_changes_is_another(tmp_path: Path) -> None:
    settings = SourceSettings(source=str(folder_of(tmp_path, {"cat": 2, "dog": 2})))
    before = fingerprint(settings)
    assert fingerprint(settings) == before
    (tmp_path / "cat" / "000.png").write_bytes(photo(77))
    assert fingerprint(settings) != before


def _npz(path: Path, header: str) -> Path:
    text = header.encode()
    text += b" " * ((64 - (11 + len(text)) % 64) % 64) + b"\n"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64))
    return path


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000, 100)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (4,)}",
        "(" * 5000,
    ],
)
def test_arrays_that_claim_what_they_do_not_hold(header: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        opened(_npz(tmp_path / "a.npz", header))


def test_a_zip_without_arrays(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("x.txt", "hello")
    with pytest.raises(InputError, match="holds no tensors"):
        opened(tmp_path / "a.npz")
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04garbage")
    with pytest.raises(InputError, match="cannot be read"):
        opened(tmp_path / "b.npz")


def test_a_pipe_among_images_is_named_and_not_waited_for(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", {"cat": 1, "dog": 1})
    os.mkfifo(tmp_path / "photos" / "cat" / "pipe.png")
    with pytest.raises(InputError, match=r"pipe\.png is no file"):
        opened(tmp_path / "photos")


def test_json_that_is_nested_without_end_in_a_tar(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for name, content in (("a.png", photo(0)), ("a.json", b"[" * 100_000)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    with pytest.raises(InputError, match="no whole tar"):
        opened(tmp_path / "a.tar")


@pytest.mark.parametrize("name", ["a\0b.png", "\ud800.png", "../../x.png", "a" * 5000 + ".png"])
def test_names_of_images_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"image": name}) + "\n")
    with pytest.raises(InputError):
        opened(tmp_path / "a.jsonl").load(0)


def test_a_line_of_json_has_a_largest_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_LONGEST_LINE", 1000)
    (tmp_path / "a.jsonl").write_text(json.dumps({"image": "a.png"}) + "\n" + json.dumps({"image": "b" * 1000}) + "\n")
    with pytest.raises(InputError, match="line 2 "):
        opened(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b"])
def test_a_source_that_can_be_no_path(name: str) -> None:
    with pytest.raises(InputError, match=r"cannot be a path|does not exist"):
        opened(name)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys\nsys.exit(3)", "raised SystemExit, line 2: 3"),
        ("def f():\n    raise SystemExit(0)", "raised SystemExit, line 2: 0"),
        ("def f():\n    return f()", "raised RecursionError"),
        ("def f(:", "raised SyntaxError"),
    ],
)
def test_code_of_the_users_that_ends_the_program(code: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(code)
    with pytest.raises(InputError, match=said):
        opened(f"{tmp_path / 'a.py'}:f")


def test_no_setting_is_named_that_may_not_have_been_written(tmp_path: Path) -> None:
    """`data.images`, `evaluate.source`, --source and data=… of the Python door name samples, too."""
    (tmp_path / "notes.txt").write_text("no samples")
    for name, said in (("nope", "does not exist; name a folder"), ("notes.txt", "is no folder and no .parquet, ")):
        settings = SourceSettings.model_validate({"images": str(tmp_path / name)})
        with pytest.raises(InputError, match=rf"^{tmp_path}/{name} {said}") as caught:
            open_source(settings)
        assert "data.source" not in str(caught.value)
