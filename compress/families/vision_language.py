"""What compression does with decoders that see: the decoder gets smaller, learns from conversations about images, and
is quantized; it is judged by text as any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from penjing.compress.distill.seeing import TRAINING
from penjing.compress.families.base import Needs, Pruner, Quantizer
from penjing.compress.families.decoder import FAMILY as DECODER_FAMILY
from penjing.compress.prune_decoder.seeing import SeeingSubject
from penjing.compress.quantizers import decoder as decoder_quantizer
from penjing.compress.quantizers import vision_language as quantizer
from penjing.compress.samples.data import DataSettings
from penjing.core.checkpoint.vision_language import vision_language_config
from penjing.core.family import FAMILIES


def _hashes(folder: Path) -> dict[str, str]:
    vision_language_config(folder)
    return DECODER_FAMILY.hashes(folder)


def _decoder_pruner() -> Pruner:
    assert DECODER_FAMILY.pruner is not None
    return DECODER_FAMILY.pruner


def _needs(source: Path, step: Any, data: DataSettings) -> Needs:
    return Needs(*decoder_quantizer.needed(source, step, data))


FAMILY = replace(
    DECODER_FAMILY,
    name="vision_language",
    said=FAMILIES["vision_language"],
    hashes=_hashes,
    asker=None,
    pruner=Pruner(parts=("ffn", "heads", "hidden", "layers"), open=SeeingSubject, depth=_decoder_pruner().depth),
    training=TRAINING,
    quantizer=Quantizer(quantizer.SightQuantize, quantizer.check, quantizer.quantize, _needs),
    exporter=None,
)
