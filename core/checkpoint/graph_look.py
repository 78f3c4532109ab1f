"""What `penjing graph` shows of a checkpoint."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from penjing.core.checkpoint.graph import load_network, parameters_of
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import family_of
from penjing.core.files import atomic_write_text
from penjing.core.graph.cost import costs
from penjing.core.graph.draw import svg
from penjing.core.graph.network import Network, tensors_of
from penjing.core.manifest import read_manifest

_FORMS = (".txt", ".svg", ".json")


def look(checkpoint: Path, out: Path | None = None) -> tuple[Network, dict[str, Any]]:
    """The network of a graph's checkpoint, and its size and cost; `out` gets it as text, picture or JSON.

    Returns:
        The network; "inputs", "outputs", "operators", "parameters", "bytes", "macs" (of one sample where the batch
        may differ), "by_operator" (count, macs, weight_bytes, result_bytes), and what is known of its import.

    Raises:
        ConfigError: `out` has another ending than `.txt`, `.svg`, `.json`.
        InputError: no graph, or a damaged one.
    """
    if out is not None and out.suffix not in _FORMS:
        raise ConfigError(f"--out {out}: write a file that ends in {', '.join(_FORMS)}")
    if (family := family_of(checkpoint)) != "graph":
        raise InputError(f"{checkpoint} is of the family {family!r}; 'penjing graph' shows graphs")
    network = load_network(checkpoint)
    found = costs(network)
    first = network.inputs()[0]
    samples = len(first) if network.config.batched and first.ndim else 1
    table: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(_COLUMNS, 0))
    for cost in found:
        row = table[cost.operator]
        for key, value in zip(
            _COLUMNS, (1, cost.macs // samples, cost.weight_bytes, cost.result_bytes // samples), strict=True
        ):
            row[key] += value
    made = read_manifest(checkpoint).created_by
    result: dict[str, Any] = {
        "inputs": list(map(str, network.config.inputs)),
        "outputs": list(map(str, network.config.outputs)),
        "operators": len(found),
        "parameters": parameters_of(network.module),
        "bytes": sum(
            tensor.nbytes for tensor in {id(value): value for value in tensors_of(network.module).values()}.values()
        ),
        "macs": sum(cost.macs for cost in found) // samples,
        "by_operator": dict(sorted(table.items(), key=lambda item: (-item[1]["macs"], -item[1]["count"]))),
        **{key: made[key] for key in ("source", "parity", "passes") if key in made},
    }
    if out is not None:
        forms = {".txt": lambda: network.text() + "\n", ".svg": lambda: svg(network, found)}
        atomic_write_text(out, forms.get(out.suffix, lambda: json.dumps(result, indent=2) + "\n")())
    return network, result


_COLUMNS = ("count", "macs", "weight_bytes", "result_bytes")


def show(checkpoint: Path, out: Path | None) -> tuple[Network, dict[str, Any]]:
    """`look`, with the text on standard output where `out` is none, and the totals on standard error."""
    from rich.table import Table

    from penjing.core.progress import count, error_console, volume

    network, result = look(checkpoint, out)
    if out is None:
        print(network.text())
    table = Table("operator", "number", "MACs", "weights", "results", box=None, pad_edge=False)
    rows = {**result["by_operator"]}
    rows["all"] = {key: sum(row[key] for row in result["by_operator"].values()) for key in _COLUMNS}
    rows["all"]["weight_bytes"] = result["bytes"]
    for name, row in rows.items():
        table.add_row(
            name, str(row["count"]), count(row["macs"]), volume(row["weight_bytes"]), volume(row["result_bytes"])
        )
    error_console().print(table)
    parity = result.get("parity", {})
    if "tolerance" in parity:
        error_console().print(
            f"Its answers are {parity['distance']:.1e} of their scale from those of {parity['oracle']}, more than "
            f"{parity['bound']:.0e}: accepted by --tolerance {parity['tolerance']:g} when it was imported."
        )
    return network, result
