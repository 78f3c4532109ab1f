"""What compression does with text encoders."""

from __future__ import annotations

from pathlib import Path

from penjing.compress.export.as_made import AsMade
from penjing.compress.families.base import Exporter, Family, Quantizer, refuse_artifact
from penjing.compress.measure.cost import encoder_calls
from penjing.compress.measure.evaluate import EvaluateSettings, evaluate_encoder
from penjing.compress.measure.skeleton import skeleton_of_encoder
from penjing.compress.parity.encoder import EncoderParity
from penjing.compress.quantizers import encoder as quantizer
from penjing.compress.samples.data import text_samples
from penjing.core.checkpoint.encoder import WEIGHTS, load_encoder
from penjing.core.family import FAMILIES
from penjing.core.files import sha256_file

TEXT_TOKENS = 54  # of a paragraph of Python's help or its first sentence, on average
NOTE = "takes token ids and their mask; the tokenizer is the artifact's tokenizer.json"


def _hashes(folder: Path) -> dict[str, str]:
    refuse_artifact(folder)
    load_encoder(folder)
    return {name: sha256_file(folder / name) for name in ("config.json", WEIGHTS, "tokenizer.json")}


def _held_out(settings: EvaluateSettings) -> int:
    texts = 2 * settings.texts * (1 + len(settings.own))  # each with its first sentence
    return 2 * texts * TEXT_TOKENS  # the model embeds them beside it


FAMILY = Family(
    name="encoder",
    said=FAMILIES["encoder"],
    hashes=_hashes,
    skeleton=skeleton_of_encoder,
    samples=text_samples,
    quality="similarity",
    evaluate=evaluate_encoder,
    held_out=_held_out,
    calls=encoder_calls,
    quantizer=Quantizer(quantizer.EncoderQuantize, quantizer.check, quantizer.quantize),
    rerun=EncoderParity.rerun,
    exporter=Exporter(("onnx",), (), AsMade(EncoderParity, NOTE)),
)
