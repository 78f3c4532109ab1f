"""An export that dies leaves no name behind, neither the file's nor its record's; the next one succeeds."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penjing.compress.export import compressed_tensors, decoder, record
from penjing.compress.export import gate as decoder_gate
from penjing.compress.exports import export_artifact
from penjing.compress.parity.classifier import ClassifierParity
from penjing.compress.quantizers.classifier import ArtifactSettings, quantize_checkpoint
from penjing.core.errors import InputError, SetupError
from penjing.core.files import publish_folder
from penjing.core.progress import Silent
from tests.compress.quantize.folders import image_data, vision_folder

pytestmark = pytest.mark.xdist_group("export-faults")  # what all share is made once


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exports")
    with publish_folder(root / "int8") as partial:
        quantize_checkpoint(vision_folder(root / "fp32"), partial, ArtifactSettings(), image_data())
    return root / "int8"


def dying(original: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    def die(*arguments: Any, **named: Any) -> Any:
        original(*arguments, **named)
        raise error

    return die


@pytest.mark.parametrize("fault", ["killed", "disk full"])
@pytest.mark.parametrize(
    ("kind", "form", "module", "stage"),
    [
        ("decoder", "gguf", decoder, "write_gguf"),
        ("decoder", "gguf", record, "write_record"),
        ("decoder", "gguf", record, "sync_tree"),
        ("decoder", "onnx", decoder, "write_decoder_onnx"),
        ("decoder", "onnx", decoder_gate, "measure"),
        ("decoder", "onnx", decoder, "write_record"),
        ("decoder", "compressed-tensors", compressed_tensors, "write_compressed_tensors"),
        ("classifier", "onnx", ClassifierParity, "compare"),
        ("classifier", "onnx", record, "write_record"),
    ],
)
def test_nothing_is_left_and_the_next_export_succeeds(
    kind: str,
    form: Any,
    module: Any,
    stage: str,
    fault: str,
    vision: Path,
    tiny_int8: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = KeyboardInterrupt() if fault == "killed" else OSError(errno.ENOSPC, "No space left on device")
    folder = vision if kind == "classifier" else tiny_int8
    with monkeypatch.context() as patch:
        patch.setattr(module, stage, dying(getattr(module, stage), error))
        with pytest.raises((KeyboardInterrupt, SetupError)) as found:
            export_artifact(folder, form, tmp_path / "out", force=False, progress=Silent())
    if fault == "disk full":
        assert str(found.value).endswith("the disk is full; free some space and run again")
    assert not list(tmp_path.iterdir())
    export_artifact(folder, form, tmp_path / "out", force=False, progress=Silent())
    names = {path.name for path in tmp_path.iterdir()}
    assert names == ({"out"} if (tmp_path / "out").is_dir() else {"out", "out.json"})


@pytest.mark.parametrize("name", ["model.safetensors", "penjing.json", "config.json"])
@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_damaged_artifact_is_not_exported(name: str, damage: str, tiny_int8: Path, tmp_path: Path) -> None:
    folder = tmp_path / "int8"
    shutil.copytree(tiny_int8, folder)
    content = (folder / name).read_bytes()
    middle = len(content) // 2
    rest = b"" if damage == "truncated" else b"\0" + content[middle + 1 :]
    (folder / name).write_bytes(content[:middle] + rest)
    for form in ("gguf", "onnx", "compressed-tensors"):
        with pytest.raises(InputError, match=name.replace(".", r"\.")) as found:
            export_artifact(folder, form, tmp_path / "out", force=False, progress=Silent())  # type: ignore[arg-type]
        assert "\n" not in str(found.value)
        assert [path.name for path in tmp_path.iterdir()] == ["int8"]


def test_a_file_where_no_folder_can_be_made_is_said_so(vision: Path) -> None:
    with pytest.raises(SetupError, match=r"cannot write /proc/x\.onnx: no folder can be made there; choose another"):
        export_artifact(vision, "onnx", Path("/proc/x.onnx"), force=False, progress=Silent())
