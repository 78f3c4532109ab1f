"""What every sensitivity study shares: cells that outlive a kill, and an output that appears when all are measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from penjing.compress.measure.data import ImageData, fitting_images
from penjing.compress.work import WorkFolder
from penjing.core.checkpoint.classifier import vision_config
from penjing.core.config import Config
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text, publish_folder
from penjing.core.info import processor, versions
from penjing.core.manifest import read_json_object
from penjing.core.progress import Progress, clock

RESULT_FILE, PAGE_FILE = "sensitivity.json", "sensitivity.html"
BATCH_IMAGES = 256
Samples = Literal["calibration", "held-out"]


def run_study(
    out: Path,
    key: str,
    measure: Callable[[WorkFolder], dict[str, Any]],
    page: Callable[[dict[str, Any]], str],
    *,
    force: bool,
    progress: Progress,
) -> dict[str, Any]:
    """What `measure` finds, published in `out` as sensitivity.json and, by `page`, sensitivity.html.

    Args:
        key: what the result depends on; a result of the same key is kept, and so are cells of a run that was killed.
        measure: gets the folder in which its cells are kept.
        force: replace what another key made.

    Raises:
        InputError: `out` holds something else.
        SetupError: no permission, no space, another process works on the same output.
    """
    if (done := _already(out, key, force)) is not None:
        progress.note(f"{out} is already done: kept (--force makes it again)")
        return done
    with WorkFolder(out, key) as work:
        result = measure(work) | {"key": key}
        with publish_folder(out, replace=force, marker=RESULT_FILE) as partial:
            atomic_write_text(partial / RESULT_FILE, json.dumps(result, indent=2) + "\n")
            atomic_write_text(partial / PAGE_FILE, page(result))
        work.remove()
    return result


def measure_cells(
    work: WorkFolder, title: str, cells: Mapping[str, Callable[[], dict[str, Any]]], progress: Progress
) -> list[dict[str, Any]]:
    """The JSON-ready result of each of `cells`, by name and in order; what `work` keeps is not measured again."""
    progress.start(title, len(cells))
    remaining, results = _Remaining(len(cells)), []
    for name, measure in cells.items():
        is_kept = work.record(name) is not None
        with remaining.timed(is_kept):
            results.append(work.run(name, measure).result)
        progress.advance()
        progress.status(f"{len(results)} of {len(cells)} cells, left {remaining}")
    return results


def about(folder: Path, settings: Config) -> dict[str, Any]:
    """What every result says of how it was made."""
    return {
        "schema_version": 1,
        "checkpoint": str(folder),
        "settings": settings.model_dump(mode="json"),
        "versions": versions(),
        "device": processor(),
    }


def study_images(folder: Path, samples: Samples, count: int, progress: Progress) -> ImageData:
    """The first `count` images that a classifier is measured on: training images, or held-out ones.

    Raises:
        InputError: they do not fit the classifier in `folder`.
        SetupError: they cannot be fetched.
    """
    config = vision_config(folder)
    split = "test" if samples == "held-out" else "train"
    images = fitting_images(folder, config, split, progress).first(count)
    return ImageData(images, config.mean, config.std, BATCH_IMAGES)


def _already(out: Path, key: str, force: bool) -> dict[str, Any] | None:
    """The result that lies complete in `out`, if it is that of `key`; None if it is to be made.

    Raises:
        InputError: `out` holds something else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())) or force:
        return None
    if not (out / RESULT_FILE).is_file():
        raise InputError(f"{out} exists and holds no {RESULT_FILE}, so it is not replaced; choose another --out")
    found = read_json_object(out / RESULT_FILE)
    if found.get("key") != key:
        raise InputError(f"{out} was made from another checkpoint or settings; replace it with --force, or set --out")
    return found


class _Remaining:
    """Time to go, by the mean of the cells that were measured in this run."""

    def __init__(self, cells: int) -> None:
        self._left, self._measured, self._seconds = cells, 0, 0.0

    @contextmanager
    def timed(self, is_kept: bool) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._left -= 1
        if not is_kept:
            self._measured += 1
            self._seconds += time.monotonic() - began

    def __str__(self) -> str:
        return clock(self._left * self._seconds / self._measured) if self._measured else "-:--"
