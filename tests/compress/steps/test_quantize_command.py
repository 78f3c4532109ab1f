"""`penjing compress quantize | verify` and `penjing export` as a user types them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penjing.compress.samples import data
from penjing.core.cli import _run
from tests.compress.quantize.folders import image_set, vision_folder
from tests.conftest import write_tiny_checkpoint


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(data, "load_fashion", lambda split, progress: image_set())
    return vision_folder(tmp_path / "fp32")


def test_quantize_verify_export(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, file = tmp_path / "int8", tmp_path / "resnet.onnx"
    untimed = ["--set", "measure.rounds=0"]
    assert _run(["compress", "quantize", str(source), str(out), "--set", "observer=entropy", *untimed]) == 0
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
    assert (
        _run(["compress", "quantize", str(source), str(out), "--force", "--target", "onnxruntime-avx2", *untimed]) == 0
    )
    assert json.loads((out / "quantization.json").read_text())["weights"] == "int7"


def test_a_network_that_no_rotation_passes_is_quantized_as_it_is_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_tiny_checkpoint(tmp_path / "around", model_type="penjing", norms="around")
    small = ["data.tokens=512", "data.window=64", "evaluate.window=64"]
    small += ["evaluate.prose_tokens=128", "evaluate.code_tokens=128"]
    settings = [part for setting in small for part in ("--set", setting)]
    typed = ["compress", "quantize", str(source), str(tmp_path / "int8"), *settings]
    assert _run([*typed, "--set", "transform.rotate=true"]) == 2
    assert "does not let a rotation through; set rotate = false" in capsys.readouterr().err
    assert _run(typed) == 0
    assert "rotate = false" in (tmp_path / "int8" / "recipe.toml").read_text()


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
