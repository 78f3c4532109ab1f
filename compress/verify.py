"""`penjing compress verify`: an artifact's hashes, and its parity measured again on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.compress.decoder.parity import LAYER_BOUND, check_parity, measure_parity
from penjing.compress.measure.data import is_classifier
from penjing.compress.quantize.encoder_parity import rerun_parity as rerun_encoder_parity
from penjing.compress.quantize.parity import rerun_parity
from penjing.core.artifact.classifier import FAKE_QUANTIZED, open_vision_artifact
from penjing.core.artifact.decoder import open_artifact
from penjing.core.artifact.encoder import is_encoder_artifact, open_encoder_artifact
from penjing.core.progress import Progress, Silent, error_console


def verify_artifact(folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Check every hash and run the parity gate again; JSON-ready.

    A classifier and a text encoder are held to the bound of their recipe. A decoder runs its prompts through the
    fake-quantized model and the INT8 runtime; dynamic quantization is chaotic end to end, so the gate is on what each
    layer does with the same input.

    Raises:
        InputError: damaged, of another kind, or beyond the bound.
    """
    progress = progress or Silent()
    if is_classifier(folder):
        artifact = open_vision_artifact(folder)
        progress.start("parity", 1)
        differences = rerun_parity(artifact)
        progress.advance()
        return {
            "artifact": str(folder),
            "kind": "classifier",
            "target": artifact.quantization.target,
            "bound": artifact.parity.bound,
            "images": artifact.parity.shape[0],
            "differences": [difference.model_dump() for difference in differences],
            "unmeasured": artifact.parity.unmeasured,
        }
    if is_encoder_artifact(folder):
        return _verify_encoder(folder, progress)
    open_artifact(folder)
    progress.start("parity", 3)
    parity = measure_parity(folder, progress)
    check_parity(parity)
    return {
        "artifact": str(folder),
        "kind": "decoder",
        "bound": LAYER_BOUND,
        "differences": [difference.model_dump() for difference in parity.differences],
    }


def _verify_encoder(folder: Path, progress: Progress) -> dict[str, Any]:
    artifact = open_encoder_artifact(folder)
    progress.start("parity", 1)
    smallest, mean = rerun_encoder_parity(artifact)
    progress.advance()
    differences = [
        {"between": (FAKE_QUANTIZED, name), "quantity": "1 - cosine", "largest": 1 - value, "mean": 1 - mean[name]}
        for name, value in smallest.items()
    ]
    return {
        "artifact": str(folder),
        "kind": "encoder",
        "target": artifact.quantization.target,
        "bound": 1 - artifact.parity.bound,
        "texts": len(artifact.parity.texts),
        "differences": differences,
    }


def print_verification(result: dict[str, Any]) -> None:
    """Show the differences on standard error."""
    from rich.table import Table

    table = Table("between", "", "what", box=None, pad_edge=False)
    for column in ("largest", "mean", "same"):
        table.add_column(column, justify="right")
    for each in result["differences"]:
        same = each.get("same_class", each.get("same_tokens"))
        table.add_row(
            *each["between"],
            each.get("quantity", "logits"),
            f"{each['largest']:.3g}",
            f"{each['mean']:.3g}",
            "" if same is None else f"{same:.1%}",
        )
    console = error_console(soft_wrap=True)
    console.print(table)
    for name, reason in result.get("unmeasured", {}).items():
        console.print(f"{name}: not measured here: {reason}")
    if "same_bits" in result:
        console.print(f"served and local logits are {'equal bit for bit' if result['same_bits'] else 'not equal'}")
    console.print(f"{result['artifact']} is intact and within its bound of {result['bound']:g}")
