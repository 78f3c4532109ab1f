"""`penjing compress verify`: an artifact's hashes, and its parity measured again on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.compress.families.base import family_at
from penjing.compress.report.schema import Answered, read_report
from penjing.compress.report.text import answer_line
from penjing.core.artifact.base import REPORT_FILE
from penjing.core.artifact.parity import SERVED, read_parity
from penjing.core.progress import Progress, Silent, error_console


def verify_artifact(folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Check every hash and run the parity gate again; JSON-ready.

    Raises:
        InputError: damaged, of another kind, or beyond the bound.
    """
    family = family_at(folder)
    differences = family.need("rerun", "verified")(folder, progress or Silent())
    record = read_parity(folder)
    return {
        "artifact": str(folder),
        "family": family.name,
        "bound": record.bound.value,
        "judged": record.bound.model_dump(mode="json", include={"between", "quantity", "statistic"}),
        "differences": [difference.model_dump() for difference in differences],
        "unmeasured": record.unmeasured,
        "answers": [figure.model_dump(mode="json") for figure in _answers(folder)],
    }


def _answers(folder: Path) -> tuple[Answered, ...]:
    """What the run's report says that the artifact answered; it is not asked again."""
    return read_report(folder).last.answers if (folder / REPORT_FILE).exists() else ()


def print_verification(result: dict[str, Any]) -> None:
    """Show the differences on standard error."""
    from rich.table import Table

    table = Table("between", "", "what", box=None, pad_edge=False)
    for column in ("largest", "mean", "same"):
        table.add_column(column, justify="right")
    table.add_column("may be")
    first, second = result["judged"]["between"]
    judged = {(first, name, result["judged"]["quantity"]) for name in (second, SERVED)}
    for each in result["differences"]:
        same = "" if each["same"] is None else f"{each['same']:.1%}"
        held = (*each["between"], each["quantity"]) in judged
        may_be = f"{result['judged']['statistic']} ≤ {result['bound']:g}" if held else ""
        table.add_row(*each["between"], each["quantity"], f"{each['largest']:.3g}", f"{each['mean']:.3g}", same, may_be)
    console = error_console(soft_wrap=True)
    console.print(table)
    for name, reason in result["unmeasured"].items():
        console.print(f"{name}: not measured here: {reason}")
    for figure in result["answers"]:
        console.print(f"as its run measured it: {answer_line(Answered.model_validate(figure))}")
    if "same_bits" in result:
        console.print(f"served and local answers are {'equal bit for bit' if result['same_bits'] else 'not equal'}")
    console.print(f"{result['artifact']} is intact and within its bound. Rows without one are for information.")
