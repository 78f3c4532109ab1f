"""Decoders that see, behind a server: penjing's own engine, as for other decoders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penjing.core.errors import ConfigError
from penjing.core.manifest import MANIFEST_NAME, verify
from penjing.serve.engine.config import EngineConfig
from penjing.serve.families.base import Entry, Form
from penjing.serve.families.decoder import FAMILY as DECODER_FAMILY
from penjing.serve.families.sight import decoder_entry


def _check(folder: Path, settings: EngineConfig) -> Path:
    from penjing.core.checkpoint.vision_language import vision_language_config

    config = vision_language_config(folder)
    _check_settings(settings)
    if settings.attention != "full":
        from penjing.serve.runner.key_blocks import check_key_blocks

        check_key_blocks(settings, config.decoder)
    return folder.absolute()


def _check_settings(settings: EngineConfig) -> None:
    if settings.device == "cuda":
        raise ConfigError("a decoder that sees is served on a CPU only; take device=cpu")
    if settings.adapters:
        raise ConfigError("a decoder that sees takes no adapters so far; leave them out")


def _entry(folder: Path, settings: EngineConfig, form: Form | None) -> Entry:
    _check_settings(settings)
    if form == "onnxruntime":
        raise ConfigError(f"{folder} is a decoder, which runs in penjing's own engine: leave --form out or take python")
    if (folder / MANIFEST_NAME).exists():
        verify(folder)
    return decoder_entry(folder, settings)


FAMILY = replace(DECODER_FAMILY, check=_check, entry=_entry, parity=None)
