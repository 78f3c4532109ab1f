"""Images with texts, from every kind of file that holds them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from penjing.core.errors import InputError
from penjing.train.sources.pairs import open_pairs
from penjing.train.sources.settings import SourceSettings
from penjing.train.sources.source import Source
from tests.train.sources.test_reader import photo

TEXTS = ["a red square", "a blue circle", "a green line"]


def opened(*paths: Path, column: str | None = None, **settings: object) -> Source:
    return open_pairs([str(path) for path in paths], SourceSettings(**settings), column)  # type: ignore[arg-type]


def a_table(folder: Path, key: str = "text", texts: list[object] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    rows = []
    for place, text in enumerate(texts or TEXTS):
        (folder / f"{place}.png").write_bytes(photo(place))
        rows.append(json.dumps({"image": f"{place}.png", key: text}))
    (folder / "pairs.jsonl").write_text("\n".join(rows))
    return folder / "pairs.jsonl"


def a_tar(path: Path, texts: dict[int, str]) -> Path:
    with tarfile.open(path, "w") as file:
        for place in range(3):
            parts = {"png": photo(place)} | ({"txt": texts[place].encode()} if place in texts else {})
            for ending, content in parts.items():
                member = tarfile.TarInfo(f"{place:04d}.{ending}")
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
    return path


def check(source: Source) -> None:
    assert list(source.labels or ()) == TEXTS
    assert [source.load(index) for index in range(3)] == [photo(index) for index in range(3)]


def test_json_lines_beside_their_images(tmp_path: Path) -> None:
    check(opened(a_table(tmp_path)))
    check(opened(a_table(tmp_path, "said"), column="said"))


def test_a_column_with_several_texts_gives_the_first(tmp_path: Path) -> None:
    check(opened(a_table(tmp_path, "captions", [[text, "another"] for text in TEXTS])))


def test_parquet(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": photo(place), "path": None} for place in range(3)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array(images, kind), "caption": TEXTS}), tmp_path / "pairs.parquet")
    check(opened(tmp_path / "pairs.parquet"))


def test_a_tar_as_webdataset_writes_it(tmp_path: Path) -> None:
    check(opened(a_tar(tmp_path / "0.tar", dict(enumerate(TEXTS)))))


def test_a_folder_with_a_text_beside_each_image(tmp_path: Path) -> None:
    for place, text in enumerate(TEXTS):
        (tmp_path / f"{place}.png").write_bytes(photo(place))
        (tmp_path / f"{place}.txt").write_text(f"{text}\n")
    check(opened(tmp_path))


def test_a_folder_with_metadata(tmp_path: Path) -> None:
    a_table(tmp_path).rename(tmp_path / "metadata.jsonl")
    check(opened(tmp_path))


def test_several_sources_are_one(tmp_path: Path) -> None:
    source = opened(a_table(tmp_path / "a"), a_tar(tmp_path / "0.tar", dict(enumerate(TEXTS))))
    assert list(source.labels or ()) == TEXTS * 2


def test_images_without_a_text_are_left_out_if_they_are_few(tmp_path: Path) -> None:
    path = a_tar(tmp_path / "0.tar", {0: TEXTS[0], 2: TEXTS[2]})
    source = opened(path, max_broken=0.4)
    assert list(source.labels or ()) == [TEXTS[0], TEXTS[2]]
    assert source.load(1) == photo(2)
    with pytest.raises(
        InputError, match=r"1 of 3 images of .* have no text, .*max_broken = 0.01 .* first is /?0001 in"
    ):
        opened(path)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "none.jsonl", "does not exist; name a folder or file with images and texts"),
        (lambda folder: a_table(folder, "said"), "columns image, said, of which none holds texts; name it by"),
        (lambda folder: a_table(folder, "text", [1, 2, 3]), "3 of 3 images of .* have no text"),
        (lambda folder: a_tar(folder / "0.tar", {}), "has no texts; give each image a .txt"),
        (lambda folder: folder, "holds no images"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, make: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        opened(make(tmp_path))  # type: ignore[operator]
