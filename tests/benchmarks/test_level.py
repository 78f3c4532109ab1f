"""Speeds of processors without AVX-512 have names of their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from lib import level
from lib.rows import new_row


@pytest.mark.parametrize(
    ("isa", "prefix"),
    [("avx2", "avx2/"), ("scalar", "avx2/"), ("avx_vnni", "avx_vnni/"), ("avx512_vnni", ""), ("amx", "amx/")],
)
def test_the_level_stands_before_speeds_alone(monkeypatch: pytest.MonkeyPatch, isa: str, prefix: str) -> None:
    monkeypatch.setattr(level, "extension", lambda: SimpleNamespace(isa=isa))
    rows = [new_row("int4", name, 1.0, "tok/s", runs=1) for name in ("decode_16", "artifact_size")]
    assert [row.metric for row in level.at_level(rows, ("decode",))] == [f"{prefix}decode_16", "artifact_size"]
    assert [row.metric for row in level.at_level(rows, prefix="x_")] == [
        f"{prefix}x_decode_16",
        f"{prefix}x_artifact_size",
    ]
