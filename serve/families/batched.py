"""The table of a family of batched models, made of what is its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penjing.core.artifact.base import MODEL_FILE, is_artifact
from penjing.core.artifact.onnx import Quantization
from penjing.core.errors import InputError, ServerError
from penjing.serve.engine.config import BatchConfig
from penjing.serve.families.base import BatchModel, Entry, Family, Form, Served, Signature, Workload
from penjing.serve.families.repository import write_onnx_entry, write_python_entry

if TYPE_CHECKING:
    from penjing.serve.client.client import Client


class Artifact(Protocol):
    """An opened artifact: every hash is checked."""

    @property
    def folder(self) -> Path: ...
    @property
    def quantization(self) -> Quantization: ...


def batched(
    name: str,
    open_artifact: Callable[[Path], Any],
    signature: Callable[[Any], Signature],
    load: Callable[[Path, Any], BatchModel],
    how_to_compress: str,
    settings: type[BatchConfig] = BatchConfig,
    workload: Callable[..., Workload] | None = None,
    parity: Callable[[Path, Client], Served] | None = None,
) -> Family:
    """The `Family` of models that are artifacts in ONNX.

    Args:
        name: the model's on the server.
        open_artifact: folder → `Artifact`; raises InputError.
        signature: of such an artifact.
        load: see `Family`.
        how_to_compress: what `penjing serve` says of a checkpoint after "FOLDER is ": what it is, and the command that
            makes an artifact of it; `{folder}` stands for the folder.
        settings: see `Family`.
        workload, parity: see `Family`.
    """

    def open_(folder: Path) -> Any:
        if not is_artifact(folder):
            raise InputError(f"{folder} is {how_to_compress.format(folder=folder)}")
        return open_artifact(folder)

    def repository(folder: Path, settings: BatchConfig, scratch: Path) -> Path:
        shutil.rmtree(scratch, ignore_errors=True)
        write_python_entry(scratch / name, signature(open_(folder)), settings)
        return scratch

    def entry(folder: Path, settings: BatchConfig, form: Form | None) -> Entry:
        artifact: Artifact = open_(folder)
        if form == "python":
            return Entry(
                partial(write_python_entry, signature=signature(artifact), config=settings, artifact=artifact.folder)
            )
        quantization = artifact.quantization
        write = partial(
            write_onnx_entry,
            signature=signature(artifact),
            config=settings,
            onnx_file=artifact.folder / MODEL_FILE,
            optimise=quantization.optimise,
        )
        if not quantization.session_options:
            return Entry(write)
        return Entry(
            write,
            f"Triton server's onnxruntime backend cannot set {json.dumps(quantization.session_options)}, which this "
            f"artifact asks for ({quantization.session_options_reason}); serve it with VNNI, or take --form python",
        )

    return Family(
        name=name,
        settings=settings,
        queued_by_server=True,
        check=lambda folder, _: open_(folder).folder.absolute(),
        repository=repository,
        entry=entry,
        ask=ask_for_life,
        load=load,
        workload=workload,
        parity=parity,
    )


def ask_for_life(client: Client, seconds: float) -> None:
    """See `Family.ask`.

    Raises:
        ServerError: the model does not answer within `seconds`.
    """
    if not client.is_ready(seconds):
        raise ServerError(f"no answer within {seconds:.0f} s")
