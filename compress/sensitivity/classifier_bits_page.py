"""What `penjing compress sensitivity --bits` found of a classifier, as a table and as a page."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from penjing.compress.report.page import figure, render
from penjing.compress.sensitivity.plot import draw_lines
from penjing.core.progress import error_console

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATE = """<p>Accuracy on {{ result.baseline.samples }} images ({{ result.settings.data }} data):
<strong>{{ "%.2f %%" | format(100 * result.baseline.value) }}</strong>. The weights of each layer below were rounded
alone, with one scale an output channel; everything else stayed floating. Divergence: of the answers from the floating
network's, in nats an image.</p>
{% for figure in figures %}{{ figure }}{% endfor %}
<p>Most sensitive at {{ result.settings.widths[-1] }} bits:
{% for name in worst %}<code>{{ name }}</code>{{ ", " if not loop.last }}{% endfor %}.</p>
<div class="wide"><table><tr><th>layer</th><th>weights</th>
{% for bits in result.settings.widths %}<th>{{ bits }} bits</th><th>divergence</th>
{% endfor %}</tr>{% for row in result.layers %}<tr><td><code>{{ row.name }}</code></td><td>{{ row.parameters }}</td>
{% for cell in row.cells %}<td>{{ shown(cell) }}</td><td>{{ "%.2g" | format(cell.divergence) }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<h2>Make it again</h2>
<pre>penjing compress sensitivity {{ result.checkpoint }} --bits --widths {{ result.settings.widths | join(",") }}
 --data {{ result.settings.data }} --images {{ result.settings.images }}</pre>
<p>{{ result.device.name }}, {{ result.device.cores }} cores{% for name, version in result.versions.items() %},
{{ name }} {{ version }}{% endfor %}</p>
"""
SMALLEST = 1e-9  # nats: what is below is drawn there, for a logarithm has no zero


def classifier_bits_page(result: dict[str, Any]) -> str:
    """The HTML of a result; needs no other file and no network."""
    values = {
        "result": result,
        "figures": [
            figure(lambda axes: _draw_accuracy(axes, result), 9.5, 3.6),
            figure(lambda axes: _draw_divergence(axes, result), 9.5, 3.6),
        ],
        "shown": lambda cell: _shown(result, cell),
        "worst": most_sensitive(result)[:5],
    }
    return render(f"Bits of {result['checkpoint']}", TEMPLATE, values)


def print_classifier_bits(result: dict[str, Any]) -> None:
    """The table on standard error, in the network's order."""
    from rich.table import Table

    console = error_console(width=None if sys.stderr.isatty() else 160)
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", min_width=16)
    for bits in result["settings"]["widths"]:
        table.add_column(f"{bits} bits", justify="right")
        table.add_column("divergence", justify="right")
    for row in result["layers"]:
        cells = [(_shown(result, cell), f"{cell['divergence']:.2g}") for cell in row["cells"]]
        table.add_row(row["name"], *(text for pair in cells for text in pair))
    console.print(table)
    baseline = result["baseline"]
    console.print(
        f"accuracy of the whole network: {100 * baseline['value']:.2f} % on {baseline['samples']} images; weights of "
        "each layer rounded alone; divergence from the floating network in nats an image"
    )
    console.print(f"most sensitive at {result['settings']['widths'][-1]} bits: {', '.join(most_sensitive(result)[:5])}")


def most_sensitive(result: dict[str, Any]) -> list[str]:
    """The layers by their divergence at the fewest bits, largest first."""
    return [row["name"] for row in sorted(result["layers"], key=lambda row: -row["cells"][-1]["divergence"])]


def _shown(result: dict[str, Any], cell: dict[str, Any]) -> str:
    return f"{100 * cell['value']:.2f} % ({100 * (cell['value'] - result['baseline']['value']):+.2f})"


def _draw_accuracy(axes: Axes, result: dict[str, Any]) -> None:
    whole = 100 * result["baseline"]["value"]
    draw_lines(axes, _names(result), _lines(result, "value", 100), "accuracy, %", whole=whole)


def _draw_divergence(axes: Axes, result: dict[str, Any]) -> None:
    lines = _lines(result, "divergence")
    drawn = {name: [max(value, SMALLEST) for value in values] for name, values in lines.items()}
    draw_lines(axes, _names(result), drawn, "divergence, nats", log=True)


def _names(result: dict[str, Any]) -> list[str]:
    return [row["name"] for row in result["layers"]]


def _lines(result: dict[str, Any], key: str, scale: float = 1) -> dict[str, list[float]]:
    return {
        f"{bits} bits": [scale * row["cells"][place][key] for row in result["layers"]]
        for place, bits in enumerate(result["settings"]["widths"])
    }
