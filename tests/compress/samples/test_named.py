"""What is told from other files: texts, rows and the pictures that they name, code; and what comes with the program."""

from __future__ import annotations

import json
import os
from pathlib import Path

from penjing.compress.samples.named import code_file, learnt_files, pictures
from penjing.core.files import sha256_file


def test_texts_are_told_by_all_that_is_read_of_them(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    first, second = tmp_path / "a.txt", tmp_path / "inner/b.jsonl"
    first.write_text("one")
    second.write_text('{"text": "two"}\n')
    (tmp_path / "picture.bin").write_bytes(b"which no reader of texts opens")
    sources = (str(tmp_path), "builtin:code", "builtin:own")
    assert learnt_files(sources, None, "sources") == {str(each): sha256_file(each) for each in (first, second)}
    assert learnt_files((str(first),), None, "sources") == {str(first): sha256_file(first)}
    assert not learnt_files(("builtin:prose",), None, "sources")


def test_pictures_are_told_where_rows_name_them(tmp_path: Path) -> None:
    rows, folder = tmp_path / "rows.jsonl", tmp_path / "pictures"
    folder.mkdir()
    for name in ("a.png", "b.png", "other.png"):
        (folder / name).write_bytes(name.encode())
    lines = [{"images": ["a.png"]}, {"image": {"path": "b.png"}}, {"images": [{"bytes": "AAAA"}, "gone.png"]}]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = learnt_files((str(rows),), folder, "sources")
    assert found.keys() == {str(rows), f"pictures in {folder}"}
    (folder / "other.png").write_bytes(b"changed")
    assert learnt_files((str(rows),), folder, "sources") == found
    (folder / "b.png").write_bytes(b"c.png")
    assert pictures((str(rows),), folder, "sources") != pictures((str(rows),), tmp_path, "sources")
    assert learnt_files((str(rows),), folder, "sources") != found
    assert not pictures(("builtin:scenes",), folder, "sources")
    assert not pictures((str(tmp_path / "none.jsonl"),), folder, "steps.0.sources")  # who reads it says so


def test_a_pipe_in_a_picture_s_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "<image>", "completion": "x", "images": ["a.png"]}) + "\n")
    assert pictures((str(rows),), tmp_path, "sources").keys() == {f"pictures in {tmp_path}"}


def test_code_is_told_by_its_file(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("def score(outputs, targets): ...\n")
    assert code_file(f"{code}:score") == {str(code): sha256_file(code)}
    assert code_file("auto") == code_file("") == code_file(f"{tmp_path}/none.py:score") == {}
