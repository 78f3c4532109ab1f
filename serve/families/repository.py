"""Folders of a Triton model repository: what `penjing serve` loads and `penjing export --to model-repository` writes.

NAME/config.pbtxt      tensors, batching and limits
NAME/labels.txt        names of the classes, for Triton server's classification extension
NAME/1/model.py        form "python": penjing's own code in the Python backend, which must find penjing installed
NAME/1/artifact/       what it loads (`penjing serve` leaves it where it is)
NAME/1/model.onnx      form "onnxruntime": for a server with that backend, such as NVIDIA's image; no penjing there
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import penjing.model_repository
from penjing.serve.engine.config import BatchConfig
from penjing.serve.families.base import Signature, TensorSpec

ENTRIES = Path(penjing.model_repository.__path__[0])
LABELS_FILE = "labels.txt"
ARTIFACT_FOLDER = "1/artifact"


def write_python_entry(
    folder: Path,
    signature: Signature,
    config: BatchConfig,
    artifact: Path | None = None,
    *,
    code: str = "batched",
    parameters: Mapping[str, str] | None = None,
) -> None:
    """Fill `folder` with the model's entry in the Python backend.

    Args:
        artifact: is copied into it; None leaves it to the environment to name one, or to `parameters`.
        code: whose `model.py` it has, of those in `penjing.model_repository`.
        parameters: of the model, see `read_settings`.
    """
    (folder / "1").mkdir(parents=True)
    shutil.copyfile(ENTRIES / code / "1" / "model.py", folder / "1" / "model.py")
    parameters = dict(parameters or {})
    if artifact is not None:
        shutil.copytree(artifact, folder / ARTIFACT_FOLDER)
        parameters = {"model": ARTIFACT_FOLDER, "engine": config.model_dump_json(exclude_unset=True)}
    _write_config(folder, "python", signature, signature.inputs, config, parameters)


def write_onnx_entry(
    folder: Path, signature: Signature, config: BatchConfig, onnx_file: Path, *, optimise: bool
) -> None:
    """Fill `folder` with the model's entry in the onnxruntime backend: the tensors of the file itself.

    Args:
        optimise: False tells the backend to run the graph as it is written.
    """
    (folder / "1").mkdir(parents=True)
    shutil.copyfile(onnx_file, folder / "1" / "model.onnx")
    parameters = {"intra_op_thread_count": str(config.threads)} if config.threads else {}
    more = (
        "" if optimise else "optimization { graph { level: 2 } }  # none: ONNX Runtime's optimiser breaks this graph\n"
    )
    _write_config(folder, "onnxruntime", signature, signature.file_inputs, config, parameters, more)


def write_decoder_entry(folder: Path, model: Path | None, parameters: Mapping[str, str]) -> None:
    """Fill `folder` with a language model's entry in the Python backend.

    Args:
        model: is copied into it; None leaves it to the environment to name one.
        parameters: of the model, see `read_settings`.
    """
    source = ENTRIES / "llm"
    (folder / "1").mkdir(parents=True)
    shutil.copyfile(source / "1" / "model.py", folder / "1" / "model.py")
    parameters = dict(parameters)
    if model is not None:
        shutil.copytree(model, folder / ARTIFACT_FOLDER)
        parameters = {"model": ARTIFACT_FOLDER, **parameters}
    text = (source / "config.pbtxt").read_text(encoding="utf-8")
    (folder / "config.pbtxt").write_text(text + _parameters(parameters), encoding="utf-8")


def models_of(repository: Path) -> list[str]:
    """The names of the models in a repository."""
    return sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))


def call_entry(entry: Path, name: str) -> None:
    """Write into the folder `entry` that its model is called `name`."""
    config = entry / "config.pbtxt"
    text, count = re.subn(r'(?m)^name: ".*"$', lambda _: f"name: {_quoted(name)}", config.read_text(encoding="utf-8"))
    assert count == 1, f"{config} names its model once"
    config.write_text(text, encoding="utf-8")


def rename_entry(entry: Path, repository: Path, name: str, version: int) -> Path:
    """Make `repository` of a copy of the folder `entry`, as the model `name` in `version`, and of the models beside it
    as they are; returns it. `entry` may lie in it, and is then taken."""
    made = repository.with_name(f"{repository.name}.renamed")
    shutil.rmtree(made, ignore_errors=True)
    for beside in models_of(entry.parent):
        if beside != entry.name:
            shutil.copytree(entry.parent / beside, made / beside, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(entry, made / name, ignore=shutil.ignore_patterns("__pycache__"))
    (made / name / "1").rename(made / name / str(version))
    call_entry(made / name, name)
    shutil.rmtree(repository, ignore_errors=True)
    made.rename(repository)
    return repository


def _write_config(
    folder: Path,
    backend: str,
    signature: Signature,
    inputs: tuple[TensorSpec, ...],
    config: BatchConfig,
    parameters: Mapping[str, str],
    more: str = "",
) -> None:
    for output in signature.outputs:
        if output.labels:
            (folder / LABELS_FILE).write_text("".join(f"{label}\n" for label in output.labels), encoding="utf-8")
    preferred = ", ".join(map(str, config.preferred_batch_sizes))
    batching = (
        "dynamic_batching {\n"
        + (f"  preferred_batch_size: [ {preferred} ]\n" if preferred else "")
        + f"  max_queue_delay_microseconds: {round(config.max_queue_delay * 1e6)}\n"
        + (_queue_policy(config) if backend == "onnxruntime" else "")  # else the adapter's, see `BatchAdapter`
        + "}\n"
    )
    rows = config.max_batch_size if signature.batched else 0
    text = (
        f"name: {_quoted(signature.name)}\nbackend: {_quoted(backend)}\nmax_batch_size: {rows}\n"
        + f"input [\n{_tensors(inputs)}\n]\noutput [\n{_tensors(signature.outputs)}\n]\n"
        + (batching if signature.batched else "")
        + "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
        + more
        + _parameters(parameters)
    )
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")


def _queue_policy(config: BatchConfig) -> str:
    return (
        "  default_queue_policy {\n"
        "    timeout_action: REJECT\n"
        f"    default_timeout_microseconds: {round(config.queue_timeout * 1e6)}\n"
        "    allow_timeout_override: true\n"
        f"    max_queue_size: {config.max_queue_size}\n"
        "  }\n"
    )


def _tensors(specs: tuple[TensorSpec, ...]) -> str:
    lines = []
    for spec in specs:
        kind = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
        dims = ", ".join(map(str, spec.shape or (1,)))  # Triton server knows no tensor without axes
        line = f"  {{ name: {_quoted(spec.name)} data_type: {kind} dims: [ {dims} ]"
        line += "" if spec.shape else " reshape { shape: [ ] }"
        line += " optional: true" if spec.optional else ""
        line += f" label_filename: {_quoted(LABELS_FILE)}" if spec.labels else ""
        lines.append(line + " }")
    return ",\n".join(lines)


def _parameters(values: Mapping[str, str]) -> str:
    return "".join(
        f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}\n"
        for key, value in values.items()
    )


def _quoted(text: str) -> str:
    """A string of protobuf's text format: JSON's escapes are among its own."""
    return json.dumps(text)
