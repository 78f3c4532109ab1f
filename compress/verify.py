"""`penjing compress verify`: an artifact's hashes, and its parity measured again on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penjing.compress.decoder import parity as decoder_parity
from penjing.compress.quantize import encoder_parity
from penjing.compress.quantize import parity as classifier_parity
from penjing.core.artifact.parity import Difference, read_parity
from penjing.core.errors import InputError
from penjing.core.family import FamilyName, family_of
from penjing.core.progress import Progress, Silent, error_console

RERUN: dict[FamilyName, Callable[[Path, Progress], tuple[Difference, ...]]] = {
    "decoder": decoder_parity.rerun,
    "classifier": classifier_parity.rerun,
    "encoder": encoder_parity.rerun,
}
"""Family → what opens an artifact, checks every hash, and measures its parity again, held to its record's bound."""


def verify_artifact(folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Check every hash and run the parity gate again; JSON-ready.

    Raises:
        InputError: damaged, of another kind, or beyond the bound.
    """
    family = family_of(folder)
    if family not in RERUN:
        raise InputError(f"{folder}: only {', '.join(RERUN)} artifacts are verified")
    differences = RERUN[family](folder, progress or Silent())
    record = read_parity(folder)
    return {
        "artifact": str(folder),
        "family": family,
        "bound": record.bound.value,
        "differences": [difference.model_dump() for difference in differences],
        "unmeasured": record.unmeasured,
    }


def print_verification(result: dict[str, Any]) -> None:
    """Show the differences on standard error."""
    from rich.table import Table

    table = Table("between", "", "what", box=None, pad_edge=False)
    for column in ("largest", "mean", "same"):
        table.add_column(column, justify="right")
    for each in result["differences"]:
        same = "" if each["same"] is None else f"{each['same']:.1%}"
        table.add_row(*each["between"], each["quantity"], f"{each['largest']:.3g}", f"{each['mean']:.3g}", same)
    console = error_console(soft_wrap=True)
    console.print(table)
    for name, reason in result["unmeasured"].items():
        console.print(f"{name}: not measured here: {reason}")
    if "same_bits" in result:
        console.print(f"served and local logits are {'equal bit for bit' if result['same_bits'] else 'not equal'}")
    console.print(f"{result['artifact']} is intact and within its bound of {result['bound']:g}")
