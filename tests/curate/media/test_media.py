"""Folders of images and recordings: what is kept, what it loses, what is refused, and that training reads it."""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
import wave
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penjing.core.errors import InputError
from penjing.core.manifest import verify
from penjing.curate.media import run
from penjing.curate.media.images import Gallery, Picture, read_picture
from penjing.curate.media.run import curate_media
from penjing.curate.media.texts import Texts
from penjing.train.sources.pairs import open_pairs
from penjing.train.sources.settings import SourceSettings

parquet = pytest.importorskip("pyarrow.parquet")
imagehash = pytest.importorskip("imagehash")
soundfile = pytest.importorskip("soundfile")


def photo(seed: int, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """Large smooth shapes, as photographs have."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def stored(image: Image.Image, form: str = "JPEG", **settings: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **settings)
    return out.getvalue()


def sound(seconds: float = 0.5, rate: int = 8000) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(b"\x01\x00" * int(2 * seconds * rate))
    return out.getvalue()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def records(folder: Path) -> list[dict[str, Any]]:
    return parquet.read_table(folder / "records.parquet").to_pylist()


def test_a_folder_becomes_tars_that_training_reads(tmp_path: Path) -> None:
    source = tmp_path / "in"
    (source / "deep").mkdir(parents=True)
    for number in range(4):
        (source / f"{number}.jpg").write_bytes(stored(photo(number)))
        (source / f"{number}.txt").write_text(f"picture {number}\n")
    (source / "deep" / "5.png").write_bytes(stored(photo(5), "PNG"))
    (source / "deep" / "5.json").write_text('{"caption": "a drawing"}')
    (source / "deep" / "6.webp").write_bytes(stored(photo(6), "WEBP"))
    (source / "deep" / "metadata.jsonl").write_text('{"file_name": "6.webp", "text": "a web picture"}\noops\n')
    (source / "tone.wav").write_bytes(sound())
    (source / "tone.txt").write_text("a tone")
    report = curate_media(source, tmp_path / "out", licence="CC0-1.0")
    assert report == {
        "files": 7, "image": 6, "audio": 1, "with text": 7, "equal file": 0, "looks alike": 0, "damaged": 0
    }  # fmt: skip
    found = {row["source"]: row for row in records(tmp_path / "out")}
    assert {row["text"] for row in found.values()} >= {"picture 0", "a drawing", "a web picture", "a tone"}
    tone = found["tone.wav"]
    assert (tone["sample_rate"], tone["channels"], tone["seconds"], tone["form"]) == (8000, 2, 0.5, "WAV")
    assert {row["licence"] for row in found.values()} == {"CC0-1.0"}
    assert (found["0.jpg"]["width"], found["0.jpg"]["height"], len(found["0.jpg"]["look"])) == (160, 120, 16)
    pairs = open_pairs([str(tmp_path / "out" / "images")], SourceSettings(), None)
    assert sorted(map(str, pairs.labels or ())) == ["a drawing", "a web picture", *(f"picture {n}" for n in range(4))]
    content = pairs.load(0)
    assert isinstance(content, bytes)
    with Image.open(io.BytesIO(content)) as image:
        assert image.size == (160, 120)
    assert verify(tmp_path / "out").kind == "corpus"
    again = tmp_path / "again"
    curate_media(source, again, licence="CC0-1.0")
    for tar in ("images/00000.tar", "audio/00000.tar"):
        assert (again / tar).read_bytes() == (tmp_path / "out" / tar).read_bytes()
    with pytest.raises(InputError, match="already exists"):
        curate_media(source, again)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_images_are_upright_and_say_nothing_of_their_camera(form: str) -> None:
    image = photo(1)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 270 degrees
    exif[0x010F] = "Secret Camera"
    exif.get_ifd(0x8825)[2] = (52.0, 31.0, 12.0)  # its place
    more = {"comment": b"Secret words"} if form == "JPEG" else {}
    content = stored(image, form, exif=exif, icc_profile=b"Secret profile", **more)
    assert b"Secret" in content
    found = read_picture(content, 10**6)
    assert (found.width, found.height, found.changed) == (120, 160, "turned, stored again")
    assert b"Secret" not in found.data
    with Image.open(io.BytesIO(found.data)) as made:
        assert not dict(made.getexif())
        assert set(made.info) <= {"jfif", "jfif_version", "jfif_unit", "jfif_density", "dpi"}
        expected = np.asarray(image.transpose(Image.Transpose.ROTATE_270), np.int64)
        assert np.abs(np.asarray(made.convert("RGB"), np.int64) - expected).mean() < 3


def test_what_is_transparent_or_grey_stays_so() -> None:
    clear = photo(2).convert("RGBA")
    clear.putalpha(100)
    for content, mode in (
        (stored(clear, "PNG"), "RGBA"),
        (stored(photo(2).convert("P"), "PNG", transparency=3), "RGBA"),
        (stored(photo(2).convert("L")), "L"),
        (stored(photo(2).convert("CMYK")), "RGB"),
        (stored(photo(2).convert("1"), "PNG"), "L"),
    ):
        with Image.open(io.BytesIO(read_picture(content, 10**6).data)) as made:
            assert made.mode == mode


def test_twins_are_found_by_their_looks(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for number in range(9):
        image = photo(number)
        (source / f"{number:02d}-a.png").write_bytes(stored(image, "PNG"))
        (source / f"{number:02d}-b.jpg").write_bytes(stored(image, quality=60))
        (source / f"{number:02d}-c.png").write_bytes(stored(image.resize((97, 75)), "PNG"))
        (source / f"{number:02d}-d.png").write_bytes(stored(image, "PNG"))
    report = curate_media(source, tmp_path / "out")
    assert report["image"] == 9
    assert (report["equal file"], report["looks alike"]) == (9, 18)
    told = lines(tmp_path / "out" / "dropped.jsonl")
    assert all(row["twin"][:4] == row["id"][:2] + "-a" for row in told)
    report = curate_media(source, tmp_path / "all", distance=-1)
    assert (report["image"], report["equal file"], report["looks alike"]) == (27, 9, 0)


def test_looks_within_a_distance() -> None:
    looks = Gallery(2)
    picture = read_picture(stored(photo(1)), 10**6)
    far = np.full(9, np.uint64(0xF0F0F0F0F0F0F0F0))  # no part is near any

    def seen(look: np.ndarray, thumb: np.ndarray = picture.thumb) -> Picture:
        return replace(picture, look=look, views=far, thumb=thumb)

    one = np.zeros(64, bool)
    assert looks.twin(seen(one)) is None
    for number in range(3000):  # more than its first table holds
        looks.add(seen(np.unpackbits(np.array([number + 7], ">u8").view(np.uint8)).astype(bool)), str(number))
    looks.add(seen(~one), "far")
    near = ~one
    near[[5, 60]] = False
    assert looks.twin(seen(near)) == "far"
    assert looks.twin(seen(near, picture.thumb[::-1])) is None  # its pixels are others
    near[20] = False
    assert looks.twin(seen(near)) is None
    assert Gallery(-1).twin(seen(one)) is None


@pytest.mark.parametrize("box", [(0, 0, 0.95, 0.95), (0.025, 0.025, 0.975, 0.975), (0.05, 0, 1, 0.95)])
def test_copies_that_were_cut_are_found_either_way(box: tuple[float, ...]) -> None:
    whole = photo(3, (400, 300))
    left, top, right, bottom = (round(side * part) for side, part in zip((400, 300) * 2, box, strict=True))
    cut = whole.crop((left, top, right, bottom))
    pictures = [read_picture(stored(each), 10**6) for each in (whole, cut)]
    for first, second in (pictures, pictures[::-1]):
        looks = Gallery(4)
        for number in range(10, 20):
            looks.add(read_picture(stored(photo(number)), 10**6), "another")
        looks.add(first, "copy")
        assert looks.twin(second) == "copy"
        assert looks.twin(read_picture(stored(photo(4)), 10**6)) is None


def bomb(side: int) -> bytes:
    small = bytearray(stored(photo(1), "PNG"))
    small[16:24] = struct.pack(">II", side, side)  # what its header says
    small[29:33] = struct.pack(">I", zlib.crc32(small[12:29]))
    return bytes(small)


def animated() -> bytes:
    return stored(photo(1), "GIF", save_all=True, append_images=[photo(n) for n in range(2, 9)])


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jpg", lambda: stored(photo(1))[:900], "is broken"),
        ("a.png", lambda: stored(photo(1), "PNG")[:900], "is broken"),
        ("a.png", lambda: bomb(9000), "has 9000 x 9000 pixels, more than 50,000,000"),
        ("a.png", lambda: bomb(30_000), "is too large"),
        ("a.gif", animated, "is animated"),
        ("a.png", lambda: stored(Image.fromarray(np.zeros((9, 9), np.uint16)), "PNG"), "more than 8 bits"),
        ("a.jpg", lambda: b"", "is empty"),
        ("a.jpg", lambda: b"<html>not found</html>", "is no image that is read here"),
        ("a.wav", lambda: b"RIFFxxxxWAVE", "is no recording|holds no sound"),
        ("a.wav", lambda: sound(0.0), "holds no sound"),
        ("a.flac", lambda: sound()[:20], "is no recording|holds no sound"),
        ("a.wav", lambda: sound()[:3000], "is a broken WAV file: it ends after 2,956 of"),
        ("a.mp3", lambda: b"\0" * 300, "is no recording"),
    ],
)
def test_what_is_broken_costs_itself_and_is_named(
    tmp_path: Path, name: str, content: Callable[[], bytes], reason: str
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / name).write_bytes(content())
    (source / "good.png").write_bytes(stored(photo(3), "PNG"))
    report = curate_media(source, tmp_path / "out", most_damaged=0.5)
    assert (report["image"], report["damaged"]) == (1, 1)
    (row,) = lines(tmp_path / "out" / "quarantine.jsonl")
    assert row["id"] == name
    assert any(part in row["reason"] for part in reason.split("|"))
    with pytest.raises(InputError, match=r"1 of 2 files are broken, more than 0.05 of them; the first, a"):
        curate_media(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_hostile_names_and_texts(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    names = ["..", "a b", "ä", "x" * 200, "-rf", "$(id)"]
    for number, name in enumerate(names):
        (source / f"{name}.png").write_bytes(stored(photo(number), "PNG"))
    (source / "a b.txt").write_bytes(b"\xff\xfe")
    (source / "ä.json").write_text('{"text": "half \\ud800"}')
    (source / "-rf.json").write_text("[" * 100_000)
    (source / "loop.png").symlink_to("loop.png")
    report = curate_media(source, tmp_path / "out", most_damaged=0.5, shard_mb=0.0001)
    assert (report["image"], report["damaged"]) == (4, 1)  # "...png" is hidden
    tars = sorted((tmp_path / "out" / "images").iterdir())
    assert len(tars) == 4
    for tar in tars:
        with tarfile.open(tar) as file:
            assert all(name.partition(".")[0].isdigit() for name in file.getnames())
    for bad, said in ((tmp_path / "nowhere", "does not exist"), (tmp_path / "out" / "audio", "does not exist")):
        with pytest.raises(InputError, match=said):
            curate_media(bad, tmp_path / "new")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no file that ends with .jpg"):
        curate_media(tmp_path / "empty", tmp_path / "new")


def test_captions_are_read_after_byte_order_marks_and_with_line_separators(tmp_path: Path) -> None:
    signs = {"a": " ", "b": "\u2028", "c": "\x85"}
    rows = [{"file_name": f"{name}.jpg", "text": f"a{sign}b"} for name, sign in signs.items()]
    written = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "metadata.jsonl").write_text(f"\ufeff{written}", encoding="utf-8")
    (tmp_path / "d.txt").write_text("\ufeffa text", encoding="utf-8")
    (tmp_path / "e.json").write_text('\ufeff{"caption": "a caption"}', encoding="utf-8")
    texts = Texts(tmp_path)
    said = [texts.of(tmp_path / f"{name}.jpg") for name in "abcde"]
    assert said == ["a b", "a\u2028b", "a\x85b", "a text", "a caption"]


def test_tables_of_texts_that_are_no_files_are_passed_over(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for name in ("pipe", "folder"):
        (source / name).mkdir(parents=True)
        (source / name / "a.jpg").write_bytes(stored(photo(len(name))))
    os.mkfifo(source / "pipe" / "metadata.jsonl")
    (source / "folder" / "metadata.jsonl").mkdir()
    assert curate_media(source, tmp_path / "out")["image"] == 2


def test_a_file_that_goes_while_others_are_read_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for seed in range(2):
        (source / f"{seed}.jpg").write_bytes(stored(photo(seed)))
    listed = run.files_below(source)
    monkeypatch.setattr(run, "files_below", lambda _: [*listed, Gone(source / "2.jpg")])
    assert curate_media(source, tmp_path / "out", most_damaged=0.5)["damaged"] == 1
    assert lines(tmp_path / "out" / "quarantine.jsonl") == [
        {"id": "2.jpg", "reason": "cannot be read (No such file or directory)"}
    ]


class Gone(type(Path())):  # type: ignore[misc]
    """A file that was there when it was listed."""

    def is_file(self) -> bool:
        return True
