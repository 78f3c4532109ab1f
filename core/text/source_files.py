"""The files of a source of text: one file, a folder of them, or a data set in the layout of Hugging Face `datasets`."""

from __future__ import annotations

import re
from pathlib import Path

from penjing.core.manifest import MANIFEST_NAME, check_inside, read_json_object
from penjing.core.remote.files import RemoteFile, remote_files
from penjing.core.text.records import LINES, TABLES, form_of

SHARDS = "shards"  # of a corpus that `penjing curate` wrote
_MARKS = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json", MANIFEST_NAME)
_HUB = re.compile(r"^---\s.*?^(dataset_info|configs|task_categories|size_categories):", re.MULTILINE | re.DOTALL)
_TRAIN = re.compile(r"(^|[-_./])train([-_./\d]|$)")
_OTHER = re.compile(r"(^|[-_./])(validation|valid|val|dev|test|eval)([-_./\d]|$)")


def files_below(path: Path) -> list[Path]:
    """The files of `path` in their order, none of them hidden; those of a data set (see `is_data_set`) are its tables,
    and of these only the train split where it has one."""
    if not path.is_dir():
        return [path]
    files = sorted(
        each
        for each in path.rglob("*")
        if each.is_file() and not any(part.startswith(".") for part in each.relative_to(path).parts)
    )
    if not is_data_set(path):
        return files
    named = set(_listed(path))
    tables = [each for each in files if form_of(each) in (*TABLES, *LINES) and (not named or each in named)]
    inside = [each.relative_to(path).as_posix() for each in tables]
    return [each for each, name in zip(tables, inside, strict=True) if name in _trained(inside)]


def remote_files_below(address: str) -> list[tuple[RemoteFile, str]]:
    """As `files_below`, of a remote address: files, each with what it is called below it. What a README of the Hub says
    is not looked at.

    Raises:
        InputError, SetupError: see `remote_files`.
    """
    root = address.rstrip("/")
    files = [(each, each.address.removeprefix(root).removeprefix("/") or each.name) for each in remote_files(address)]
    marks = {name.rpartition("/")[2] for _, name in files} & set(_MARKS)
    if not marks:
        return files
    tables = [(each, name) for each, name in files if form_of(each) in (*TABLES, *LINES)]
    if MANIFEST_NAME in marks:
        return [(each, name) for each, name in tables if name.startswith(f"{SHARDS}/")]
    wanted = _trained([name for _, name in tables])
    return [(each, name) for each, name in tables if name in wanted]


def _trained(names: list[str]) -> set[str]:
    """Those that are of the train split, where there is one; else all."""
    if any(_TRAIN.search(name) for name in names):
        return {name for name in names if _TRAIN.search(name) or not _OTHER.search(name)}
    return set(names)


def is_data_set(path: Path) -> bool:
    """Whether a folder says of itself that it is a data set: as `save_to_disk` and the Hub of Hugging Face do, and as
    `penjing curate` does. Its other files are about the data."""
    if any((path / name).is_file() for name in _MARKS):
        return True
    card = path / "README.md"
    return card.is_file() and _HUB.match(card.read_text(encoding="utf-8", errors="replace")) is not None


def _listed(path: Path) -> list[Path]:
    """The tables that a data set names: `save_to_disk` lists them, as caches of the library lie beside them; those of
    a corpus of `penjing curate` are in one folder."""
    files = list((path / SHARDS).iterdir()) if (path / MANIFEST_NAME).is_file() and (path / SHARDS).is_dir() else []
    for state in path.rglob("state.json"):
        for entry in read_json_object(state).get("_data_files") or ():
            name = str(entry.get("filename")) if isinstance(entry, dict) else ""
            check_inside(state, name)
            files.append(state.parent / name)
    return files
