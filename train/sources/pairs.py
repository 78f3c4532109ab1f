"""Images with texts that belong to them: tables, tars as WebDataset writes them, folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penjing.core.errors import InputError
from penjing.core.text.records import LINES
from penjing.train.sources.folder import image_folder
from penjing.train.sources.open import TABLES
from penjing.train.sources.packed import TARS, is_tar
from penjing.train.sources.settings import SourceSettings
from penjing.train.sources.source import Source, join
from penjing.train.sources.tables import arrow_table, json_rows, read_table
from penjing.train.sources.tar import read_tar

_TEXTS = ("text", "caption", "captions", "alt_text", "alt", "title", "TEXT", "txt")
METADATA = ("metadata.jsonl", "metadata.parquet")  # of Hugging Face's folders of images


def open_pairs(paths: Sequence[str], settings: SourceSettings, text_column: str | None) -> Source:
    """The pairs of all `paths`: `Source.labels` are the texts.

    A path is a .jsonl, .parquet, .arrow or .tar file; or a folder of such files, of images with a .txt of the same name
    each, or of images with a metadata.jsonl.

    Args:
        settings: how images are read; images without a text count as broken.
        text_column: of tables; by default the first of the usual names.

    Raises:
        InputError: a path does not exist, is damaged or empty; too many pairs have no text.
        SetupError: a package is needed that is not installed.
    """
    plain = settings.model_copy(update={"labels": False, "label_column": None})
    opened = [each for path in paths for each in _open(Path(path), plain, text_column)]
    source = join(opened, ", ".join(paths), ["" for _ in opened])
    return _with_texts(replace(source, test=None), settings.max_broken)


def _open(path: Path, settings: SourceSettings, column: str | None) -> list[Source]:
    if path.is_dir():
        if found := [path / name for name in METADATA if (path / name).is_file()]:
            return [_table(found[0], settings, column)]
        files = sorted(
            file for file in path.rglob("*") if (file.suffix.lower() in TABLES or is_tar(file)) and file.is_file()
        )
        return [each for file in files for each in _open(file, settings, column)] or [_folder(path)]
    if not path.exists():
        raise InputError(f"data.sources: {path} does not exist; name a folder or file with images and texts")
    if is_tar(path):
        tar = read_tar(path, labels=True, texts=True)
        if tar.labels is None:
            raise InputError(f"{path} has no texts; give each image a .txt, or a .json with text or caption")
        return [tar]
    if path.suffix.lower() in TABLES:
        return [_table(path, settings, column)]
    raise InputError(f"data.sources: {path} is no folder and no {', '.join((*TABLES, *TARS))} file; give one of these")


def _table(path: Path, settings: SourceSettings, wanted: str | None) -> Source:
    images = read_table(path, settings)
    if path.suffix.lower() in LINES:
        rows = json_rows(path)
        names = list(dict.fromkeys(name for row in rows for name in row))

        def values(name: str) -> list[Any]:
            return [row.get(name) for row in rows]
    else:
        table, _ = arrow_table(path)
        names = table.column_names

        def values(name: str) -> list[Any]:
            return table.column(name).to_pylist()

    column = wanted if wanted is not None else next((name for name in _TEXTS if name in names), None)
    if column is None or column not in names:
        what = "holds texts" if wanted is None else f"is called {wanted!r}"
        raise InputError(
            f"{path} has the columns {', '.join(names) or 'none'}, of which none {what}; name it by data.text_column"
        )
    return replace(images, labels=[_first(value) for value in values(column)])


def _first(value: Any) -> str:
    """The text of a cell, or the first of several."""
    if isinstance(value, list) and value:
        value = value[0]
    return value.strip() if isinstance(value, str) else ""


def _folder(path: Path) -> Source:
    images = image_folder(path, labels=False)
    texts = []
    for index in range(images.size):
        beside = Path(images.said(index)).with_suffix(".txt")
        try:
            texts.append(beside.read_text(encoding="utf-8").strip() if beside.is_file() else "")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{beside} cannot be read ({error}); mend or remove it") from None
    return replace(images, labels=texts)


def _with_texts(source: Source, most: float) -> Source:
    """Without the pairs that have no text.

    Raises:
        InputError: they are more than `most` of all, or all.
    """
    texts = list(map(str, source.labels or ()))
    kept = [index for index, text in enumerate(texts) if text.strip()]
    if len(kept) == source.size:
        return source
    if not kept or source.size - len(kept) > most * source.size:
        missing = next(index for index, text in enumerate(texts) if not text.strip())
        raise InputError(
            f"{source.size - len(kept)} of {source.size} images of {source.where} have no text, more than "
            f"data.max_broken = {most:g} allows; the first is {source.said(missing)}"
        )
    return Source(
        source.where, len(kept), lambda index: source.load(kept[index]), lambda index: source.said(kept[index]),
        lambda index: source.digest(kept[index]), [texts[index] for index in kept],
    )  # fmt: skip
