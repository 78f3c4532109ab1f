"""`penjing compress verify`: an artifact's hashes, and its parity measured again on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.compress.data import is_classifier
from penjing.compress.parity import measure_parity
from penjing.compress.quant.parity import rerun_parity
from penjing.core.artifact import open_artifact
from penjing.core.errors import InputError
from penjing.core.progress import Progress, Silent
from penjing.core.vision_artifact import open_vision_artifact

LAYER_BOUND = 0.05  # decoders: mean difference of a layer's output, of the hidden state's root mean square


def verify_artifact(folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Check every hash and run the parity gate again; JSON-ready.

    A classifier is held to the bound of its recipe. A decoder runs its prompts through the fake-quantized model and
    the INT8 runtime; dynamic quantization is chaotic end to end, so the gate is on what each layer does with the same
    input.

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
    open_artifact(folder)
    progress.start("parity", 3)
    found = {difference.quantity: difference for difference in measure_parity(folder, progress).differences}
    layers = found["layer_outputs"]
    if not layers.mean <= LAYER_BOUND:  # NaN fails too
        raise InputError(
            f"parity: the INT8 runtime's layers differ from the fake-quantized ones by {layers.mean:.3g} of their "
            f"inputs' size on average, the bound is {LAYER_BOUND}; see 'penjing info' for the kernels that run here"
        )
    return {
        "artifact": str(folder),
        "kind": "decoder",
        "bound": LAYER_BOUND,
        "differences": [difference.model_dump() for difference in found.values()],
    }


def print_verification(result: dict[str, Any]) -> None:
    """Show the differences on standard error."""
    from rich.console import Console
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
    console = Console(stderr=True, soft_wrap=True)
    console.print(table)
    for name, reason in result.get("unmeasured", {}).items():
        console.print(f"{name}: not measured here: {reason}")
    console.print(f"{result['artifact']} is intact and within its bound of {result['bound']:g}")
