"""`penjing export --to model-repository`: a folder for `tritonserver --model-repository`."""

from __future__ import annotations

import re
from pathlib import Path

from penjing.core.errors import ConfigError
from penjing.core.files import publish_folder
from penjing.core.progress import Progress, Silent
from penjing.serve.client.protocol import MODEL_NAME
from penjing.serve.families.base import Form, family_at, read_overrides
from penjing.serve.families.repository import call_entry


def export_repository(
    folder: Path,
    out: Path,
    form: Form | None = None,
    *,
    name: str | None = None,
    overrides: list[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the model repository `out`, which holds one model, and what it sees with where that is a model of its own;
    its files are complete when it appears.

    Args:
        folder: an artifact, or a decoder's checkpoint; every hash is checked.
        form: None is "onnxruntime" for a classifier or a text encoder, whose server then needs that backend and no
            penjing (an encoder then takes token ids), and "python" for a decoder.
        name: what the model is called; None is what its kind is, such as "classifier".
        overrides: "key=value" of the settings that `penjing serve --set` takes.

    Returns:
        The model's own folder in `out`.

    Raises:
        InputError: the model is damaged or of another kind, or `out` exists.
        ConfigError: a wrong setting, a name that a folder or Triton server cannot have, or a form that this kind does
            not have.
    """
    progress = progress or Silent()
    if name is not None and not re.fullmatch(MODEL_NAME, name):
        raise ConfigError(
            f"{name!r} cannot be a model's name, which has up to 63 letters, digits, _, . and -, and begins with none "
            "of the last two"
        )
    family = family_at(folder)
    called = name or family.name
    settings = read_overrides(family.settings, overrides or [])
    folder = family.check(folder, settings)
    entry = family.entry(folder, settings, form)
    if called in entry.beside:
        raise ConfigError(f"{called!r} is what the model beside it is called; take another name")
    with publish_folder(out, replace=force, marker=f"{called}/config.pbtxt") as partial:
        entry.write(partial / called)
        call_entry(partial / called, called)
        for beside, write in entry.beside.items():
            write(partial / beside)
    if entry.note:
        progress.note(entry.note)
    return out / called
