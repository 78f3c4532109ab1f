"""Tables of the zoo's rows: how many networks each contestant takes, and every cell of every network."""

from __future__ import annotations

from collections.abc import Sequence

from lib.rows import Row, latest

STAGES = {  # what it is called → who has a column for it
    "comes in": {"penjing": "import"},
    "pruned by 30 %": {"penjing": "prune", "Torch-Pruning": "torch_pruning"},
    "… and trained": {"penjing": "train", "Torch-Pruning": "torch_pruning_train"},
    "… and in ONNX Runtime": {"penjing": "onnx"},
    "INT8 in ONNX Runtime": {"penjing": "int8", "NNCF": "nncf_int8", "ONNX Runtime": "onnxruntime_int8"},
}
WHO = ("penjing", "Torch-Pruning", "NNCF", "ONNX Runtime")  # their versions are in the rows
LONGEST = 90  # letters of a reason


def counts(rows: Sequence[Row]) -> str:
    """A Markdown table: of how many networks each stage was reached."""
    cells = _cells(rows)
    lines = [f"| | {' | '.join(WHO)} |", "|---|--:|--:|--:|--:|"]
    for stage, columns in STAGES.items():
        said = []
        for who in WHO:
            found = [network[columns[who]] for network in cells.values() if columns.get(who) in network]
            said.append(f"{sum(row.value is not None for row in found)} of {len(found)}" if found else "–")
        lines.append(f"| {stage} | {' | '.join(said)} |")
    return "\n".join(lines)


def every_cell(rows: Sequence[Row]) -> str:
    """A Markdown table: ✓ or the reason for each network, stage and contestant."""
    columns = {f"{who}: {stage}": name for stage, by in STAGES.items() for who, name in by.items()}
    columns = dict(sorted(columns.items(), key=lambda each: WHO.index(each[0].split(":")[0])))
    lines = [f"| Network | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for network, found in _cells(rows).items():
        said = [_said(found.get(name)) for name in columns.values()]
        lines.append(f"| {network} | {' | '.join(said)} |")
    return "\n".join(lines)


def _cells(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Network → column → its newest row."""
    found: dict[str, dict[str, Row]] = {}
    for row in latest(rows):
        network, _, column = row.metric.rpartition("/")
        found.setdefault(network, {})[column] = row
    return dict(sorted(found.items()))


def _said(row: Row | None) -> str:
    if row is None:
        return ""
    reason = (row.reason or "✓").replace("|", "\\|").replace("<", "&lt;")
    return reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}…"
