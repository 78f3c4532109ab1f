"""The work folder of a compression run: what is damaged there is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penjing.core.errors import InputError
from penjing.core.work import WorkFolder


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"name": "a", "more": 1}), "[" * 100_000])
def test_a_record_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    with WorkFolder(tmp_path / "out", "key") as work:
        assert work.record("prune") is None
        assert work.run("prune", lambda: {"removed": 3}).result == work.run("prune", dict).result == {"removed": 3}
        (work.path / "prune.json").write_text(content)
        with pytest.raises(InputError, match=r"prune\.json"):
            work.record("prune")
