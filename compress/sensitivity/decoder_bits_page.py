"""What `penjing compress sensitivity --bits` found of a decoder, as a table and as a page."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from penjing.compress.report.page import figure, render
from penjing.compress.sensitivity.plot import draw_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATE = """<p>Perplexity on {{ result.baseline.samples }} windows of {{ result.settings.window }} tokens
({{ result.settings.data }} data): <strong>{{ "%.4g" | format(result.baseline.value) }}</strong>. Each layer below was
rounded alone, weights by row and activations by token, after the transforms of a recipe.</p>
{{ plot }}
<div class="wide"><table><tr><th>layer</th>
{% for bits in result.settings.widths %}<th>{{ bits }} bits</th><th>score</th>
{% endfor %}</tr>{% for row in result.layers %}<tr><td><code>{{ row.name }}</code></td>{% for cell in row.cells %}
<td>{{ shown(cell) }}</td><td>{{ "%.2g" | format(row.scores[cell.bits | string]) }}</td>{% endfor %}</tr>{% endfor %}
</table></div>
<h2>Linear layers by score for their size</h2>
<div class="wide"><table><tr><th>layer</th><th>weights</th>
{% for bits in result.settings.widths %}<th>{{ bits }} bits</th>
{% endfor %}</tr>{% for row in linears %}<tr><td><code>{{ row.name }}</code></td><td>{{ row.parameters }}</td>
{% for score in row.scores.values() %}<td>{{ "%.2g" | format(score) }}</td>{% endfor %}</tr>{% endfor %}</table></div>
<h2>Make it again</h2>
<pre>penjing compress sensitivity {{ result.checkpoint }} --bits --widths {{ result.settings.widths | join(",") }}
 --data {{ result.settings.data }} --windows {{ result.settings.windows }}</pre>
<p>{{ result.device.name }}, {{ result.device.cores }} cores{% for name, version in result.versions.items() %},
{{ name }} {{ version }}{% endfor %}</p>
"""


def decoder_bits_page(result: dict[str, Any]) -> str:
    """The HTML of a result; needs no other file and no network."""
    first = str(result["settings"]["widths"][0])
    values = {
        "result": result,
        "plot": figure(lambda axes: _draw(axes, result), 9.5, 3.6),
        "shown": lambda cell: _shown(result, cell),
        "linears": sorted(result["linears"], key=lambda row: -row["scores"][first] / row["parameters"]),
    }
    return render(f"Bits of {result['checkpoint']}", TEMPLATE, values)


def print_decoder_bits(result: dict[str, Any]) -> None:
    """The table on standard error, in the network's order."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", min_width=16)
    for bits in result["settings"]["widths"]:
        table.add_column(f"{bits} bits", justify="right")
        table.add_column("score", justify="right")
    for row in result["layers"]:
        cells = [(_shown(result, cell), f"{row['scores'][str(cell['bits'])]:.2g}") for cell in row["cells"]]
        table.add_row(Text(row["name"]), *(text for pair in cells for text in pair))
    console.print(table)
    console.print(
        f"perplexity of the whole network: {result['baseline']['value']:.4g} on {result['baseline']['samples']} "
        "windows; each layer rounded alone; score: predicted rise of the loss in nats"
    )


def _shown(result: dict[str, Any], cell: dict[str, Any]) -> str:
    return f"{cell['value']:.4g} ({100 * (cell['value'] / result['baseline']['value'] - 1):+.2f} %)"


def _draw(axes: Axes, result: dict[str, Any]) -> None:
    rows = result["layers"]
    lines = {
        f"{bits} bits": [row["cells"][place]["value"] for row in rows]
        for place, bits in enumerate(result["settings"]["widths"])
    }
    names = [row["name"].removeprefix("model.") for row in rows]
    draw_lines(axes, names, lines, "perplexity", whole=result["baseline"]["value"], log=True)
