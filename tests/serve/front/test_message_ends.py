"""Messages that a token ends beside texts that may: such a token is not shown, since nobody has asked for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from tests.serve.front.scripted import ScriptedFront

BODY = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "stop_sequences": ["STOP"]}
WORDS = {"</s>": 0, "▁the": 1, "!": 2, "▁": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts a space before words, but not before the first."""
    folder = tmp_path_factory.mktemp("words")
    backend = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="▁"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return folder


@pytest.mark.parametrize(
    ("pieces", "fields", "text", "sequence"),
    [
        (["on ", "x the"], {"stop_token_ids": [1]}, "on x", None),
        (["the"], {"stop_token_ids": [1, 9]}, "", None),
        (["on the", "!"], {"stop_token_ids": [1, 2]}, "on the", None),
        (["on the", " STOP"], {"stop_token_ids": [1, 2]}, "on the ", "STOP"),
        (["on the</s>"], {"skip_special_tokens": False}, "on the", None),
        (["on the</s>"], {"skip_special_tokens": False, "ignore_eos": True}, "on the</s>", None),
        (["on the"], {}, "on the", None),
        (["on the"], {"stop_token_ids": [1], "include_stop_str_in_output": True}, "on the", None),
    ],
)
def test_a_token_that_ends_a_message_is_not_shown(
    folder: Path, pieces: list[str], fields: dict[str, Any], text: str, sequence: str | None
) -> None:
    with ScriptedFront(folder) as front:
        front.script.pieces = pieces
        found = front.ask("/v1/messages", BODY | fields).json
        events = front.events("/v1/messages", BODY | fields)
    assert "".join(block["text"] for block in found["content"]) == text
    assert found["stop_sequence"] == sequence
    assert "".join(event.get("delta", {}).get("text", "") for event in events) == text


def test_an_answer_of_full_length_has_met_no_end(folder: Path) -> None:
    with ScriptedFront(folder) as front:
        front.script.pieces, front.script.reason = ["on the"], "length"
        found = front.ask("/v1/messages", BODY | {"stop_token_ids": [1]}).json
    assert (found["content"][0]["text"], found["stop_reason"]) == ("on the", "max_tokens")
