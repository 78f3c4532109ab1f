"""`penjing compress quantize | verify` and `penjing export` as a user types them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penjing.compress.samples import data
from penjing.core.cli import _run
from tests.compress.quantize.folders import image_set, vision_folder


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(data, "load_fashion", lambda split, progress: image_set())
    return vision_folder(tmp_path / "fp32")


def test_quantize_verify_export(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, file = tmp_path / "int8", tmp_path / "resnet.onnx"
    assert _run(["compress", "quantize", str(source), str(out), "--set", "observer=entropy"]) == 0
    assert "accuracy 100.00% → 100.00%" in capsys.readouterr().err
    assert _run(["compress", "verify", str(out), "--json", str(tmp_path / "v.json")]) == 0
    found = json.loads((tmp_path / "v.json").read_text())
    assert (found["family"], found["differences"][0]["num_values"]) == ("classifier", 32 * 10)
    assert _run(["export", str(out), str(file), "--to", "onnx"]) == 0
    assert file.read_bytes() == (out / "model.onnx").read_bytes()
    capsys.readouterr()
    assert _run(["export", str(out), str(file), "--to", "onnx"]) == 3
    assert "already exists" in capsys.readouterr().err
    assert _run(["compress", "quantize", str(source), str(out)]) == 3
    assert "was made from another recipe, input or version; replace it with --force" in capsys.readouterr().err
    assert _run(["compress", "quantize", str(source), str(out), "--force", "--target", "onnxruntime-avx2"]) == 0
    assert json.loads((out / "quantization.json").read_text())["weights"] == "int7"


def test_mistakes_are_one_line_and_leave_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path
) -> None:
    out = tmp_path / "int8"
    for arguments, code, message in (
        (["--set", "observers=mse"], 2, "unknown key 'steps.0.observers'; did you mean 'observer'?"),
        (["--target", "tensorrt", "--set", "activations=uint8"], 2, "target tensorrt has no activations in uint8"),
        (["--set", "parity_bound=1e-12"], 3, "parity: "),
    ):
        assert _run(["compress", "quantize", str(source), str(out), *arguments]) == code
        error = capsys.readouterr().err
        assert message in error
        assert not out.exists()
    for folder in (source, tiny_checkpoint):
        assert _run(["export", str(folder), str(tmp_path / "x.onnx"), "--to", "onnx"]) == 3
        assert _run(["compress", "verify", str(folder)]) == 3
    shutil.rmtree(source)
    assert _run(["compress", "verify", str(source)]) == 3
    assert not (tmp_path / "x.onnx").exists()
