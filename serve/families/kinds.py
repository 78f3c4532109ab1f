"""The kinds of models that `penjing serve` takes: how a folder is recognised, checked, and put before Triton server."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penjing.core.artifact.classifier import VisionArtifact, is_vision_artifact, open_vision_artifact
from penjing.core.artifact.encoder import EncoderArtifact, is_encoder_artifact, open_encoder_artifact
from penjing.core.config import Config, apply_override, parse_config
from penjing.core.errors import InputError, PenjingError, ServerError
from penjing.core.manifest import read_json_object
from penjing.core.models.encoder_config import MODEL_TYPE
from penjing.serve.engine.config import BatchConfig, EngineConfig
from penjing.serve.families import classifier, encoder
from penjing.serve.families.base import BatchModel, Signature
from penjing.serve.families.repository import ENTRIES, write_python_entry

if TYPE_CHECKING:
    from penjing.serve.client.client import Client

CANARY_SECONDS = 30.0


@dataclass(frozen=True)
class Kind:
    """`name` is the model's on the server. `queued_by_server`: Triton server holds the queue, so it drains it too."""

    name: str
    settings: type[Config]
    queued_by_server: bool


DECODER = Kind("llm", EngineConfig, queued_by_server=False)
CLASSIFIER = Kind(classifier.NAME, BatchConfig, queued_by_server=True)
ENCODER = Kind(encoder.NAME, BatchConfig, queued_by_server=True)


def kind_of(folder: Path) -> Kind:
    """What the model in `folder` is; a folder that is no artifact in ONNX counts as a decoder's."""
    if is_encoder_artifact(folder):
        return ENCODER
    return CLASSIFIER if is_vision_artifact(folder) else DECODER


def open_batched(folder: Path) -> VisionArtifact | EncoderArtifact:
    """The artifact behind a batched entry, every hash checked.

    Raises:
        InputError: damaged, or of another kind.
    """
    return open_encoder_artifact(folder) if is_encoder_artifact(folder) else open_vision_artifact(folder)


def signature_of(artifact: VisionArtifact | EncoderArtifact) -> Signature:
    """What Triton server must know of it."""
    if isinstance(artifact, EncoderArtifact):
        return encoder.signature(artifact)
    return classifier.signature(artifact)


def read_overrides(kind: Kind, overrides: list[str]) -> Config:
    """The settings that "key=value" texts ask for.

    Raises:
        ConfigError: an unknown key, or a value out of range.
    """
    values: dict[str, Any] = {}
    for override in overrides:
        apply_override(values, override)
    return parse_config(kind.settings, values, "--set")


def check_model(kind: Kind, folder: Path, settings: Config) -> Path:
    """The absolute folder of a model that can be served here.

    Raises:
        InputError: damaged, or of a kind that is not served.
        ConfigError: the settings ask for a device that is not there.
    """
    if isinstance(settings, EngineConfig):
        from penjing.core.checkpoint.decoder import open_checkpoint

        _refuse_checkpoint(folder)
        checkpoint = open_checkpoint(folder)
        if settings.device != "cpu" or settings.dtype != "auto":  # this process needs no torch but for this
            from penjing.serve.runner.device import resolve_device

            resolve_device(settings, checkpoint.config)
        return checkpoint.folder.absolute()
    return open_batched(folder).folder.absolute()


def prepare_repository(kind: Kind, folder: Path, settings: Config, scratch: Path) -> Path:
    """The repository that Triton server shall read; `scratch` is where one may be made."""
    if not isinstance(settings, BatchConfig):
        return ENTRIES
    shutil.rmtree(scratch, ignore_errors=True)
    write_python_entry(scratch / kind.name, signature_of(open_batched(folder)), settings)
    return scratch


def load_batched(folder: Path, settings: BatchConfig) -> BatchModel:
    """The model behind a batched entry.

    Raises:
        InputError: damaged, or of another kind.
    """
    model = encoder.TextEncoder if is_encoder_artifact(folder) else classifier.Classifier
    return model(folder, settings.threads)


def canary(kind: Kind, client: Client) -> str | None:
    """Ask the served model as a client would; what failed, in words."""
    try:
        if kind.queued_by_server:
            if not client.is_ready(CANARY_SECONDS):
                raise ServerError(f"no answer within {CANARY_SECONDS:.0f} s")
        else:
            client.generate("a", max_tokens=1, temperature=0.0, ignore_eos=True, timeout=CANARY_SECONDS)
    except PenjingError as error:
        return f"the server answers no request: {error}"
    return None


def _refuse_checkpoint(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        return
    values = read_json_object(folder / "config.json")
    for found, what, command in (
        ("task" in values, "an image classifier", f"quantize {folder} {folder}-int8"),
        (values.get("model_type") == MODEL_TYPE, "a text encoder", f"recipes/minilm-int8.toml --set model={folder}"),
    ):
        if found:
            raise InputError(
                f"{folder} is the checkpoint of {what}, and artifacts are served; make one with "
                f"'penjing compress {command}'"
            )
