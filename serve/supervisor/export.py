"""`penjing export --to model-repository`: a folder for `tritonserver --model-repository`."""

from __future__ import annotations

import json
from pathlib import Path

from penjing.core.artifact.classifier import MODEL_FILE
from penjing.core.errors import ConfigError
from penjing.core.files import publish_folder
from penjing.core.manifest import verify
from penjing.core.progress import Progress, Silent
from penjing.serve.engine.config import BatchConfig
from penjing.serve.families.kinds import check_model, kind_of, open_batched, read_overrides, signature_of
from penjing.serve.families.repository import Form, write_decoder_entry, write_onnx_entry, write_python_entry


def export_repository(
    folder: Path,
    out: Path,
    form: Form | None = None,
    *,
    overrides: list[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the model repository `out`, which holds one model; its files are complete when it appears.

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
    kind = kind_of(folder)
    settings = read_overrides(kind, overrides or [])
    folder = check_model(kind, folder, settings)
    marker = f"{kind.name}/config.pbtxt"
    if isinstance(settings, BatchConfig):
        artifact = open_batched(folder)
        signature, form = signature_of(artifact), form or "onnxruntime"
        with publish_folder(out, replace=force, marker=marker) as partial:
            if form == "python":
                write_python_entry(partial / kind.name, signature, settings, folder)
            else:
                optimise = artifact.quantization.optimise
                write_onnx_entry(partial / kind.name, signature, settings, folder / MODEL_FILE, optimise=optimise)
        if form == "onnxruntime" and (options := artifact.quantization.session_options):
            progress.note(
                f"Triton server's onnxruntime backend cannot set {json.dumps(options)}, which this artifact asks for "
                f"({artifact.quantization.session_options_reason}); serve it with VNNI, or take --form python"
            )
        return out / kind.name
    if form == "onnxruntime":
        raise ConfigError(f"{folder} is a decoder, which runs in penjing's own engine: leave --form out or take python")
    verify(folder)
    with publish_folder(out, replace=force, marker=marker) as partial:
        write_decoder_entry(partial / kind.name, folder, settings.model_dump_json(exclude_unset=True))
    return out / kind.name
