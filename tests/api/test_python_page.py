"""The code in docs/python.md runs as it stands, on a tiny checkpoint in place of SmolLM2."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import penjing

PAGE = Path(__file__).parents[2] / "docs/python.md"
BLOCK = re.compile(r"(<!-- not run in the tests: (?P<reason>[^>]*) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL)


def test_every_block_runs(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_checkpoint, "build/smollm2")
    names: dict[str, object] = {}
    ran = 0
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        code = compile(block["code"], f"{PAGE.name} at {block.start()}", "exec")
        if block["reason"] is None:
            exec(code, names)
            ran += 1
    assert ran >= 5
    assert names["folder"] == Path("build/smollm2-int8")
    assert getattr(names["logits"], "ndim", 0) == 3


def test_every_name_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in penjing.__all__ if name not in text] == ["Progress"]
