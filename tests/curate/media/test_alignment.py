"""How well texts fit their images: the cosine of two towers, as transformers has it, and what is dropped by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

from penjing.core.errors import InputError
from penjing.core.imports.importer import import_model
from penjing.curate.media.alignment import Alignment
from penjing.curate.media.run import curate_media
from tests.core.vision.paired import SIDE, write_paired

parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("imagehash")
pytest.importorskip("soundfile")


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    write_paired(folder / "source", "clip")
    return import_model(str(folder / "source"), folder / "towers")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(4):
        values = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
        Image.fromarray(values).save(folder / f"{number}.png")
        if number < 3:
            (folder / f"{number}.txt").write_text("abc"[: number + 1] * 2)
    return folder


def theirs(folder: Path, photos: Path, name: str) -> float:
    """The cosine by transformers, of an image that has the towers' size already."""
    from transformers import CLIPModel

    loaded: Any = CLIPModel.from_pretrained(folder)
    image = np.asarray(Image.open(photos / name)).astype(np.float32) / 255
    pixels = (image - np.array([0.4, 0.45, 0.5], np.float32)) / np.array([0.2, 0.25, 0.3], np.float32)
    text = (photos / name).with_suffix(".txt").read_text()
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text)
    with torch.inference_mode():
        found = loaded(
            input_ids=torch.tensor([tokens.ids]), pixel_values=torch.from_numpy(pixels.transpose(2, 0, 1))[None]
        )
    return float(torch.cosine_similarity(found.image_embeds, found.text_embeds))


def scores(folder: Path) -> dict[str, Any]:
    return {each["source"]: each["alignment"] for each in parquet.read_table(folder / "records.parquet").to_pylist()}


def test_scores_are_cosines_of_the_towers_and_choose(towers: Path, photos: Path, tmp_path: Path) -> None:
    report = curate_media(photos, tmp_path / "all", towers=towers, distance=-1)
    found = scores(tmp_path / "all")
    assert found.pop("3.png") is None  # it has no text
    for name, score in found.items():
        assert score == pytest.approx(theirs(towers.parent / "source", photos, name), abs=1e-5)
    assert report["does not fit"] == 0
    assert report["alignment, 50 % below"] == pytest.approx(sorted(found.values())[1], abs=1e-4)

    least = sorted(found.values())[1]
    assert curate_media(photos, tmp_path / "few", towers=towers, distance=-1, least_alignment=least)["image"] == 3
    gone = [json.loads(line) for line in (tmp_path / "few" / "dropped.jsonl").read_text().splitlines()]
    worst = min(found, key=lambda name: found[name])
    assert gone == [{"id": worst, "rule": "does not fit", "alignment": round(found[worst], 4)}]


def test_no_text_no_score(towers: Path, photos: Path, tmp_path: Path) -> None:
    for path in photos.glob("*.txt"):
        path.unlink()
    report = curate_media(photos, tmp_path / "out", towers=towers, distance=-1, least_alignment=1.0)
    assert report["image"] == 4
    assert not any("below" in name for name in report)


def test_a_threshold_needs_towers_that_are_towers(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs --towers"):
        curate_media(photos, tmp_path / "out", least_alignment=0.2)
    with pytest.raises(InputError, match=str(photos)):
        curate_media(photos, tmp_path / "out", towers=photos)
    assert not (tmp_path / "out").exists()


def test_equal_pairs_score_equally(towers: Path, photos: Path) -> None:
    judge = Alignment(towers, 1_000_000)
    data = (photos / "0.png").read_bytes()
    assert judge.score(data, "x") == judge.score(data, "x")
    assert judge.summary()["alignment, 5 % below"] == judge.summary()["alignment, 95 % below"]
