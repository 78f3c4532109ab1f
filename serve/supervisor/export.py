"""`penjing export --to model-repository`: a folder for `tritonserver --model-repository`."""

from __future__ import annotations

from pathlib import Path

from penjing.core.files import publish_folder
from penjing.core.progress import Progress, Silent
from penjing.serve.families.base import Form, family_at, read_overrides


def export_repository(
    folder: Path,
    out: Path,
    form: Form | None = None,
    *,
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
        overrides: "key=value" of the settings that `penjing serve --set` takes.

    Returns:
        The model's own folder in `out`.

    Raises:
        InputError: the model is damaged or of another kind, or `out` exists.
        ConfigError: a wrong setting, or a form that this kind does not have.
    """
    progress = progress or Silent()
    family = family_at(folder)
    settings = read_overrides(family.settings, overrides or [])
    folder = family.check(folder, settings)
    entry = family.entry(folder, settings, form)
    with publish_folder(out, replace=force, marker=f"{family.name}/config.pbtxt") as partial:
        entry.write(partial / family.name)
        for name, write in entry.beside.items():
            write(partial / name)
    if entry.note:
        progress.note(entry.note)
    return out / family.name
