"""What compression does with two towers: both become integers, and are judged by what they find of each other."""

from __future__ import annotations

from pathlib import Path

from penjing.compress.families.base import Family, Quantizer, refuse_artifact
from penjing.compress.measure.evaluate import EvaluateSettings
from penjing.compress.measure.skeleton import skeleton_of_towers
from penjing.compress.measure.towers import evaluate_towers, towers_calls
from penjing.compress.parity.graph import GraphParity
from penjing.compress.quantizers import towers as quantizer
from penjing.compress.samples.pairs import calibration_pairs
from penjing.core.artifact.parity import Difference
from penjing.core.artifact.towers import IMAGE, TEXT, open_towers_artifact
from penjing.core.checkpoint.towers import load_towers
from penjing.core.family import FAMILIES
from penjing.core.files import sha256_file
from penjing.core.progress import Progress


def _hashes(folder: Path) -> dict[str, str]:
    refuse_artifact(folder)
    load_towers(folder)
    return {
        path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.suffix in (".json", ".safetensors")
    }


def _rerun(folder: Path, progress: Progress) -> tuple[Difference, ...]:
    open_towers_artifact(folder)
    return tuple(
        each.model_copy(update={"quantity": f"{name}: {each.quantity}"})
        for name in (IMAGE, TEXT)
        for each in GraphParity.rerun(folder / name, progress)
    )


def _held_out(settings: EvaluateSettings) -> int:
    return 2 * settings.images


FAMILY = Family(
    name="towers",
    said=FAMILIES["towers"],
    hashes=_hashes,
    skeleton=skeleton_of_towers,
    samples=calibration_pairs,
    quality="accuracy",
    evaluate=evaluate_towers,
    held_out=_held_out,
    calls=towers_calls,
    quantizer=Quantizer(quantizer.TowersQuantize, quantizer.check, quantizer.quantize),
    rerun=_rerun,
)
