"""What compression does with decoders that see: the decoder gets smaller, learns from conversations about images, and
is quantized; it is looked at with questions about images where there are some, and else with text as any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from penjing.compress.distill.seeing import TRAINING
from penjing.compress.families.base import DepthChoice, Needs, Pruner, Quantizer
from penjing.compress.families.decoder import FAMILY as DECODER_FAMILY
from penjing.compress.measure.evaluate import EvaluateSettings
from penjing.compress.measure.seeing import evaluate_seeing
from penjing.compress.measure.skeleton import TOKENS, skeleton_of_seeing
from penjing.compress.prune_decoder.seeing import EYES, SeeingSubject
from penjing.compress.quantizers import decoder as decoder_quantizer
from penjing.compress.quantizers import vision_language as quantizer
from penjing.compress.samples.data import DataSettings, Samples
from penjing.compress.samples.seeing import SightData, seeing_samples
from penjing.core.checkpoint.vision_language import vision_language_config
from penjing.core.family import FAMILIES
from penjing.core.progress import Progress


def _hashes(folder: Path) -> dict[str, str]:
    vision_language_config(folder)
    return DECODER_FAMILY.hashes(folder)


def _held_out(settings: EvaluateSettings) -> int:
    return settings.most_questions if settings.questions else DECODER_FAMILY.held_out(settings) // TOKENS


def _depth(
    folder: Path, count: int, choice: DepthChoice, samples: Samples, progress: Progress
) -> tuple[list[int], dict[str, Any]]:
    assert DECODER_FAMILY.pruner is not None
    assert DECODER_FAMILY.pruner.depth is not None
    text = samples.text if isinstance(samples, SightData) else samples
    return DECODER_FAMILY.pruner.depth(folder, count, choice, text, progress)


def _needs(source: Path, step: Any, data: DataSettings) -> Needs:
    return Needs(*decoder_quantizer.needed(source, step, data))


FAMILY = replace(
    DECODER_FAMILY,
    name="vision_language",
    said=FAMILIES["vision_language"],
    hashes=_hashes,
    asker=None,
    skeleton=skeleton_of_seeing,
    samples=seeing_samples,
    evaluate=evaluate_seeing,
    held_out=_held_out,
    pruner=Pruner(parts=("ffn", "heads", "hidden", "layers", *EYES), open=SeeingSubject, depth=_depth),
    training=TRAINING,
    quantizer=Quantizer(quantizer.SightQuantize, quantizer.check, quantizer.quantize, _needs),
    sees=True,
)
