"""The teacher's answers on disk: the same lesson, given once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from penjing.compress.distill import decoder as decoders
from penjing.compress.steps.train import Distill
from penjing.core.errors import ConfigError, InputError, SetupError
from tests.compress.classifiers import write_classifier
from tests.compress.distill.conftest import STEPS, do

MakeStep = Callable[..., Distill]


@pytest.fixture
def student(make_tiny_checkpoint: Callable[..., Path]) -> Path:
    return make_tiny_checkpoint(intermediate_size=24, seed=7)


@pytest.fixture
def learn(student: Path, tiny_checkpoint: Path, text_step: MakeStep, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Distil with a cache in `tmp_path`/cached; the name is that of a folder for the run."""

    from pydoc_data.topics import topics

    short = tmp_path / "short.txt"
    short.write_text(topics["specialnames"][:9000], encoding="utf-8")  # four parts

    def run(name: str, **changes: Any) -> dict[str, Any]:
        partial = tmp_path / name / "partial"
        partial.mkdir(parents=True)
        settings = {"steps": 4, "temperature": 2.0, "evaluation_samples": 0, "cache_folder": tmp_path / "cached"}
        settings |= {"sources": (str(short),), "held_out": 1e-9}
        step = text_step(**(settings | changes))
        return do(step, student, tiny_checkpoint, partial, tmp_path / name / "work")

    return run


@pytest.mark.parametrize("document_mask", [pytest.param(False, marks=pytest.mark.full), True])
def test_all_classes_in_the_cache_teach_as_the_teacher_does(
    learn: Callable[..., dict[str, Any]], document_mask: bool
) -> None:
    live = learn("live", document_mask=document_mask)
    cached = learn("cached-run", cache_top_k=320, document_mask=document_mask)
    few = learn("few", cache_top_k=8, document_mask=document_mask)
    for end in ("first", "last"):
        assert cached["losses"][end]["loss"] == pytest.approx(live["losses"][end]["loss"], rel=1e-3)
        assert 0 < few["losses"][end]["loss"] < live["losses"][end]["loss"]


def test_a_cache_is_filled_once_and_goes_on_after_a_kill(
    learn: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = learn("a", cache_top_k=16)
    (folder,) = (path for path in (tmp_path / "cached").iterdir() if path.is_dir())
    assert json.loads((folder / "index.json").read_text())["top_k"] == 16
    parts = sorted(folder.glob("part-*"))
    assert 2 <= len(parts) < 10
    content = parts[1].read_bytes()
    parts[1].unlink()  # as if the pass had been killed
    kept = parts[0].stat().st_mtime_ns
    assert learn("b", cache_top_k=16)["losses"] == first["losses"]
    assert parts[1].read_bytes() == content
    assert parts[0].stat().st_mtime_ns == kept

    def no_teacher(*_: object) -> None:
        raise AssertionError("the teacher was loaded")

    monkeypatch.setattr(decoders, "decoder", no_teacher)
    assert learn("c", cache_top_k=16)["losses"] == first["losses"]
    with pytest.raises(AssertionError, match="the teacher was loaded"):
        learn("d", cache_top_k=16, temperature=1.0)  # another distribution
    strange = save({name: torch.zeros(64, 3, dtype=torch.int8) for name in ("index", "top", "rest")})
    for name, damaged in (("e", b"damaged"), ("f", strange)):
        parts[0].write_bytes(damaged)
        with pytest.raises(InputError, match=r"part-000000.safetensors cannot be read .*delete it"):
            learn(name, cache_top_k=16, steps=40)


def test_what_cannot_be_cached_is_refused(
    learn: Callable[..., dict[str, Any]], text_step: MakeStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="cache_top_k keeps logits alone"):
        text_step(cache_top_k=4, weights={"hidden": 1.0})
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(SetupError, match=r"needs .* GB, .* are free; lower cache_top_k"):
        learn("full", cache_top_k=4)


@pytest.mark.usefixtures("small_images")
def test_images_are_not_cached(tmp_path: Path) -> None:
    classifier = write_classifier(tmp_path / "classifier")
    step = Distill.model_validate(STEPS | {"kind": "distill", "cache_top_k": 4})
    with pytest.raises(ConfigError, match="cache_top_k is for decoders"):
        do(step, classifier, classifier, tmp_path, tmp_path / "work")
