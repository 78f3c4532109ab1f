"""What compression does with decoders that see: the decoder is quantized, and judged by text as any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from penjing.compress.families.base import Needs, Quantizer
from penjing.compress.families.decoder import FAMILY as DECODER_FAMILY
from penjing.compress.quantizers import decoder as decoder_quantizer
from penjing.compress.quantizers import vision_language as quantizer
from penjing.compress.samples.data import DataSettings
from penjing.core.checkpoint.vision_language import vision_language_config
from penjing.core.family import FAMILIES


def _hashes(folder: Path) -> dict[str, str]:
    vision_language_config(folder)
    return DECODER_FAMILY.hashes(folder)


def _needs(source: Path, step: Any, data: DataSettings) -> Needs:
    return Needs(*decoder_quantizer.needed(source, step, data))


FAMILY = replace(
    DECODER_FAMILY,
    name="vision_language",
    said=FAMILIES["vision_language"],
    hashes=_hashes,
    asker=None,
    pruner=None,
    training=None,
    quantizer=Quantizer(quantizer.SightQuantize, quantizer.check, quantizer.quantize, _needs),
    exporter=None,
)
