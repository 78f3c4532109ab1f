"""Models whose tokenizers put tokens before or behind every text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from penjing.core.manifest import MANIFEST_NAME

TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def with_ends(folder: Path, to: Path, *, begins: bool, ends: bool = False) -> Path:
    """A copy of `folder` in `to` whose tokenizer writes its first control token before, or behind, every text."""
    to = Path(shutil.copytree(folder, to))
    values = json.loads((to / "tokenizer.json").read_text())
    word = values["added_tokens"][0]
    token = {"SpecialToken": {"id": word["content"], "type_id": 0}}
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*([token] if begins else []), TEXT, *([token] if ends else [])],
        "pair": [TEXT, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {word["content"]: {"id": word["content"], "ids": [word["id"]], "tokens": [word["content"]]}},
    }
    (to / "tokenizer.json").write_text(json.dumps(values))
    (to / MANIFEST_NAME).unlink(missing_ok=True)  # which has the hash of the other
    return to
