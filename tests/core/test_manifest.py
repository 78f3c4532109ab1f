"""`penjing.json`: every change of a file is found, and a manifest cannot point out of its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penjing.core.errors import InputError
from penjing.core.manifest import read_json_object, read_manifest, verify, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.json").write_text("{}")
    write_manifest(tmp_path, "checkpoint", {"command": "test"}, {"note": 1})
    return tmp_path


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "penjing.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_round_trip(folder: Path) -> None:
    manifest = verify(folder)
    assert (manifest.kind, manifest.created_by, manifest.extra) == ("checkpoint", {"command": "test"}, {"note": 1})
    assert set(manifest.sha256) == {"model.safetensors", "sub/b.json"}


def test_changed_missing_and_unlisted_files_are_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(InputError, match=r"model\.safetensors has SHA-256 .* changed or damaged"):
        verify(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model\.safetensors is missing"):
        verify(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "more.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"more\.safetensors is not listed"):
        verify(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/../../x", "", "a\0b"])
def test_names_cannot_leave_the_folder(folder: Path, name: str) -> None:
    edit(folder, sha256={name: "00"})
    with pytest.raises(InputError, match="outside its folder; refused"):
        verify(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, "schema_version 2, this penjing reads 1; upgrade"),
        ({"schema_version": "one"}, "schema_version"),
        ({"kind": "picture"}, "'checkpoint', 'artifact', 'adapter' or 'corpus'"),
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"sha256": {}}, "sha256"),
        ({"sha256": {"a": 1}}, "sha256"),
    ],
)
def test_malformed_fields(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit(folder, **changes)
    with pytest.raises(InputError, match=message):
        read_manifest(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_content_that_is_no_manifest(folder: Path, content: bytes) -> None:
    (folder / "penjing.json").write_bytes(content)
    with pytest.raises(InputError, match=r"penjing\.json"):
        read_manifest(folder)


@pytest.mark.parametrize(("text", "whole"), [(r"\ud83c\udf33", True), (r"\ud800", False), (r"\uDC00x", False)])
def test_half_a_surrogate_pair_is_no_text(tmp_path: Path, text: str, whole: bool) -> None:
    path = tmp_path / "any.json"
    path.write_text(f'{{"a": "{text}"}}')
    if whole:
        assert read_json_object(path) == {"a": "🌳"}
    else:
        with pytest.raises(InputError, match=r"any\.json is not valid JSON"):
            read_json_object(path)


def test_a_byte_order_mark_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "any.json"
    path.write_text('{"a": 1}', encoding="utf-8-sig")
    assert read_json_object(path) == {"a": 1}


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="penjing import"):
        read_manifest(tmp_path)
    with pytest.raises(InputError, match="there is no folder"):
        read_manifest(tmp_path / "none")


def test_a_copied_folder_still_verifies(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy") / "model"
    shutil.copytree(folder, copy)
    assert verify(copy) == read_manifest(folder)
