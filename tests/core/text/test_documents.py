"""The user's own texts: what is read, in which order, and what is refused with its place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penjing.core.errors import InputError
from penjing.core.text.documents import Documents

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
TALK = [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "Four."}]


@pytest.fixture
def talker(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def read(folder: Path, *paths: Path) -> str:
    documents = Documents(folder)
    return documents.tokenizer.decode(documents.tokens(paths, "data.calibrate"))


def test_a_folder_is_read_file_by_file_in_order(talker: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    (texts / "a").mkdir(parents=True)
    (texts / "b.txt").write_text("second ")
    (texts / "a" / "z.md").write_text("first ")
    line = {"messages": TALK}
    (texts / "c.jsonl").write_text(f"{json.dumps({'text': 'third '})}\n\n{json.dumps(line)}\n")
    assert read(talker, texts) == "first second third <user>What is two and two?\n<assistant>Four.\n"


def test_text_that_looks_like_a_control_token_stays_text(talker: Path, tmp_path: Path) -> None:
    documents, path = Documents(talker), tmp_path / "text.txt"
    special = documents.tokenizer.id_to_token(next(iter(documents.tokenizer.special_ids)))
    path.write_text(f"a {special} b")
    assert not documents.tokenizer.special_ids & set(documents.tokens([path], "data.calibrate"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"text": "a"}\n{oops\n', "line 2: not JSON"),
        ('{"prompt": "a"}\n', 'line 1: an object with "text" or "messages" is needed'),
        ('["text"]\n', "line 1: an object"),
        ('{"messages": [{"content": "a"}]}\n', "line 1: messages"),
        (b"\xff\xfe", "cannot be read as UTF-8"),
    ],
)
def test_what_is_no_document_is_named_with_its_line(
    talker: Path, tmp_path: Path, content: str | bytes, says: str
) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError, match=rf"data.calibrate: .*own.jsonl.*{says}"):
        read(talker, path)


def test_missing_paths_empty_folders_and_models_without_template_are_refused(talker: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"data.calibrate: .*nowhere does not exist"):
        read(talker, tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no file"):
        read(talker, tmp_path / "empty")
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": TALK}))
    (talker / "chat_template.jinja").unlink()
    (talker / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="no chat template"):
        read(talker, path)
