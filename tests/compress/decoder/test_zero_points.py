"""An artifact whose down_proj has zero points goes where others go: to other loaders, and through GGUF."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penjing.compress.exports import Form, export_artifact
from penjing.compress.run import run_recipe
from penjing.core.checkpoint.load import load_model
from penjing.core.progress import Silent

pytestmark = pytest.mark.xdist_group("zero-points")  # what all share is made once


@pytest.fixture(scope="module")
def artifact(tiny_int8: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    override = 'steps.0.zero_points=["*.down_proj"]'
    return run_recipe(tiny_int8 / "recipe.toml", [override], out=tmp_path_factory.mktemp("above") / "above")


@torch.no_grad()
def test_compressed_tensors_and_transformers_read_it(artifact: Path, tmp_path: Path) -> None:
    out, ids = tmp_path / "export", torch.arange(3, 27)[None]
    export_artifact(artifact, "compressed-tensors", out, force=False, progress=Silent())
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()(ids).logits
    ours = load_model(artifact).model(ids)
    assert (ours - theirs).abs().mean() < 0.1 * theirs.std()  # the other layers divide by another limit


@pytest.mark.parametrize("form", ["gguf", "onnx"])
def test_other_forms_pass_their_gates(artifact: Path, tmp_path: Path, form: Form) -> None:
    out = tmp_path / ("out.gguf" if form == "gguf" else "out")
    record = export_artifact(artifact, form, out, force=False, progress=Silent())
    assert out.exists()
    assert record.differences or record.unmeasured
