"""Emoji out of npm's packages, here made up."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from penjing.core.errors import InputError
from penjing.train.data.emoji import unpack

EMOJI = [
    {"image": "b.png", "name": "GRINNING FACE", "short_names": ["grinning"], "has_img_google": True},
    {"image": "a.png", "name": "KEYCAP 3", "short_names": ["three", "three_sign"], "has_img_google": True},
    {"image": "c.png", "name": "NOT DRAWN", "short_names": [], "has_img_google": False},
]


def package(folder: Path, emoji: object) -> tuple[Path, str]:
    path = folder / "emoji.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in (
            ("emoji.json", json.dumps(emoji).encode()), ("img/google/64/a.png", b"A"), ("img/google/64/b.png", b"B"),
            ("img/google/64/c.png", b"C"), ("img/google/sheets/64.png", b"all"), ("../../outside.png", b"no"),
        ):  # fmt: skip
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path, base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()


def test_drawings_and_names_are_taken_out(tmp_path: Path) -> None:
    path, integrity = package(tmp_path, EMOJI)
    unpack(path, "google", integrity, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert rows == [
        {"image": "images/a.png", "text": "keycap 3 (three, three sign)"},
        {"image": "images/b.png", "text": "grinning face"},
    ]
    assert sorted(file.name for file in tmp_path.rglob("*") if file.is_file()) == ["a.png", "b.png", "pairs.jsonl"]
    assert (tmp_path / "images/b.png").read_bytes() == b"B"


def test_another_package_is_not_used(tmp_path: Path) -> None:
    path, integrity = package(tmp_path, EMOJI)
    with pytest.raises(InputError, match=r"emoji.tgz has SHA-512 .*, pinned is AAAA.*; it is not used"):
        unpack(path, "google", "AAAA", tmp_path)
    with pytest.raises(InputError, match="holds no drawings of twitter"):
        unpack(path, "twitter", integrity, tmp_path)
