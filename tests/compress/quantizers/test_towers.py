"""Two towers in one INT8 artifact: what they find of each other before and after, and the same vectors wherever."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import penjing
from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.core.artifact.base import read_report_file
from penjing.core.artifact.towers import load_embedder
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import family_of
from penjing.core.imports.importer import import_model
from penjing.core.manifest import verify
from penjing.core.vision.embedder import Embedder
from tests.core.vision.paired import write_paired, write_resnet_towers

pytestmark = pytest.mark.xdist_group("towers")  # one artifact of each kind for all
WORDS = ["the name", "a list", "python", "the object is", "it returns the value", "name of the class", "class", "x y"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)
    rows = []
    for place in range(24):
        Image.fromarray(random.integers(0, 256, (20, 18, 3), np.uint8)).save(folder / f"{place}.png")
        rows.append(json.dumps({"image": f"{place}.png", "text": WORDS[place % len(WORDS)]}))
    (folder / "pairs.jsonl").write_text("\n".join(rows))
    return folder / "pairs.jsonl"


Made = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, pairs: Path) -> Made:
    """Towers of a kind and the artifact that they become, made once: an export takes seconds. Only those of a ResNet
    are timed, which exports them a second time."""

    @cache
    def of(kind: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(kind)
        if kind == "resnet":
            model = write_resnet_towers(folder)
        else:
            write_paired(folder / "source", "clip" if kind == "clip" else "siglip", layers=1)
            model = import_model(str(folder / "source"), folder / "made")
        return model, run_recipe(recipe(model, folder / "int8", pairs, timed=kind == "resnet"))

    return of


def recipe(model: Path, output: Path, pairs: Path | None, *, timed: bool = False) -> dict[str, Any]:
    return {
        "model": str(model), "output": str(output),
        "data": {} if pairs is None else {"source": str(pairs), "held_out": 0.4, "batch_images": 8},
        "measure": {"rounds": int(timed), "seconds": 0, "batches": [1], "texts": 2},
        "guard": {"accuracy_points": 100},
        "steps": [{"kind": "quantize", "target": "onnxruntime-cpu"}],
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["resnet", "clip", pytest.param("siglip", marks=pytest.mark.full)])
def test_both_towers_become_integers_and_embed_nearly_as_before(made: Made, pairs: Path, kind: str) -> None:
    model, artifact = made(kind)
    verify(artifact)
    assert family_of(artifact) == "towers"
    before, after = load_embedder(model), penjing.load(artifact)
    assert isinstance(after, Embedder)
    files = [(pairs.parent / f"{place}.png").read_bytes() for place in range(4)]
    for one, other in ((before.embed_images(files), after.embed_images(files)),
                       (before.embed_texts(WORDS), after.embed_texts(WORDS))):  # fmt: skip
        assert other.shape == one.shape
        assert 0.98 < float((one * other).sum(1).mean()) < 1
    stages = read_report_file(artifact)["stages"]
    first, last = stages[0], stages[-1]
    parts = {part["name"]: part["value"] for part in last["quality"]["parts"]}
    assert last["quality"]["name"] == "accuracy"
    assert parts["cosine of images"] > 0.98
    assert parts["cosine of texts"] > 0.98
    assert first["quality"]["samples"] == last["quality"]["samples"] < 24
    assert last["size"]["bytes"] < first["size"]["bytes"]
    names = {row["name"].split(".")[0] for row in last["quantized"]["layers"]}
    assert names == {"image", "text"}
    again = verify_artifact(artifact)
    assert {each["quantity"].split(":")[0] for each in again["differences"]} == {"image", "text"}
    alone = load_embedder(artifact, threads=1)
    assert np.array_equal(alone.embed_texts(WORDS[:1])[0], after.embed_texts(WORDS)[0])


def test_what_is_found_is_counted(made: Made, pairs: Path) -> None:
    """The share is that of the vectors themselves, over the held-out texts."""
    from penjing.compress.measure.evaluate import EvaluateSettings
    from penjing.compress.measure.towers import evaluate_towers
    from penjing.core.progress import Silent

    model, _ = made("resnet")
    found = evaluate_towers(model, model, EvaluateSettings(source=str(pairs)), Silent())
    embedder = load_embedder(model)
    images = embedder.embed_images([(pairs.parent / f"{place}.png").read_bytes() for place in range(24)])
    nearest = (images @ embedder.embed_texts(WORDS).T).argmax(1)
    assert found.value == pytest.approx(float((nearest == np.arange(24) % len(WORDS)).mean()))
    assert found.samples == 24


def test_what_does_not_fit_is_one_line(tmp_path: Path, made: Made, pairs: Path) -> None:
    model, whole = made("resnet")
    with pytest.raises(ConfigError, match=r"name them, as data\.source"):
        run_recipe(recipe(model, tmp_path / "int8", None))
    with pytest.raises(ConfigError, match="two towers cannot be pruned"):
        run_recipe(recipe(model, tmp_path / "int8", pairs) | {"steps": [{"kind": "prune", "ratio": 0.2}]})
    artifact = shutil.copytree(whole, tmp_path / "copy")
    with pytest.raises(InputError, match="is quantized already"):
        run_recipe(recipe(artifact, tmp_path / "other", pairs))
    graph = artifact / "text" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-4])
    with pytest.raises(InputError, match=r"model\.onnx"):
        load_embedder(artifact)
