"""What `penjing compress sensitivity` found, as a table and as a page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penjing.compress.report.page import figure, render
from penjing.compress.sensitivity.plot import draw_lines
from penjing.core.progress import error_console

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATE = """<p>{{ result.quality | capitalize }} on {{ result.baseline.samples }} {{ samples }}
({{ result.settings.data }} data): <strong>{{ shown(result.baseline.value) }}</strong>. Each group below was pruned
alone, by {{ result.settings.method }}, without training afterwards.</p>
{% for figure in figures %}{{ figure }}{% endfor %}
<div class="wide"><table><tr><th>group</th><th>units</th>{% for ratio in result.settings.ratios %}
<th>{{ "%g %%" | format(100 * ratio) }} removed</th><th></th>{% endfor %}</tr>
{% for group in result.groups %}<tr><td><code>{{ group.name }}</code></td><td>{{ group.units }}</td>
{% for cell in group.cells %}<td>{{ shown(cell.value) }}</td><td>{{ change(cell) }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<h2>Make it again</h2>
<pre>penjing compress sensitivity {{ result.checkpoint }} --ratios {{ result.settings.ratios | join(",") }}
{%- for name, value in result.settings.items() if name not in ("ratios", "window", "windows", "images", "seed") %}
 --{{ name }} {{ value }}{% endfor %}{% if result.quality == "accuracy" %} --images {{ result.settings.images }}
{%- else %} --windows {{ result.settings.windows }}{% endif %}</pre>
<p>{{ result.device.name }}, {{ result.device.cores }} cores{% for name, version in result.versions.items() %},
{{ name }} {{ version }}{% endfor %}</p>
"""


def sensitivity_page(result: dict[str, Any]) -> str:
    """The HTML of a result; needs no other file and no network."""
    values = {
        "result": result,
        "samples": "images" if result["quality"] == "accuracy" else f"windows of {result['settings']['window']} tokens",
        "figures": [figure(lambda axes, kind=kind: _draw(axes, result, kind), 9.5, 3.6) for kind in _kinds(result)],
        "shown": lambda value: _value(result, value),
        "change": lambda cell: _change(result, cell),
    }
    return render(f"Sensitivity of {result['checkpoint']}", TEMPLATE, values)


def print_sensitivity(result: dict[str, Any]) -> None:
    """The table on standard error, groups in the network's order."""
    from rich.table import Table

    console = error_console(width=None if sys.stderr.isatty() else 160)
    table = Table(box=None, pad_edge=False)
    table.add_column("group", overflow="fold", min_width=24)
    table.add_column("units", justify="right")
    for ratio in result["settings"]["ratios"]:
        table.add_column(f"{100 * ratio:g} % removed", justify="right")
    for group in result["groups"]:
        cells = (f"{_value(result, cell['value'])} ({_change(result, cell)})" for cell in group["cells"])
        table.add_row(group["name"], str(group["units"]), *cells)
    console.print(table)
    console.print(
        f"{result['quality']} of the whole network: {_value(result, result['baseline']['value'])} on "
        f"{result['baseline']['samples']} samples; each group pruned alone, without training afterwards"
    )


def _value(result: dict[str, Any], value: float) -> str:
    return f"{100 * value:.2f} %" if result["quality"] == "accuracy" else f"{value:.4g}"


def _change(result: dict[str, Any], cell: dict[str, Any]) -> str:
    before = result["baseline"]["value"]
    if result["quality"] == "accuracy":
        return f"{100 * (cell['value'] - before):+.2f}"
    return f"{cell['value'] / before:.3f}×"


def _kinds(result: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Groups by what their names are up to numbers; kinds with fewer than four groups share a figure."""
    found: dict[str, list[dict[str, Any]]] = {}
    for group in result["groups"]:
        kind = ".".join("N" if part.isdigit() else part for part in group["name"].split("."))
        found.setdefault(kind, []).append(group)
    large = [groups for groups in found.values() if len(groups) >= 4]
    rest = [group for groups in found.values() if len(groups) < 4 for group in groups]
    return large + ([rest] if rest else [])


def _draw(axes: Axes, result: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    accuracy = result["quality"] == "accuracy"
    scale = 100 if accuracy else 1
    lines = {
        f"{100 * ratio:g} % removed": [scale * group["cells"][place]["value"] for group in groups]
        for place, ratio in enumerate(result["settings"]["ratios"])
    }
    names = [group["name"].removesuffix(".weight[dim 0]") for group in groups]
    label, whole = "accuracy, %" if accuracy else "perplexity", scale * result["baseline"]["value"]
    draw_lines(axes, names, lines, label, whole=whole, log=not accuracy)
