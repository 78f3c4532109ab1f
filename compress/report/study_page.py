"""What `penjing compress sensitivity` found, as a table and as a page: one for every study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penjing.core.pages.page import AFTER, BEFORE, OTHERS, figure, render_page
from penjing.core.progress import error_console, typed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATE = """<p>{{ result.quality | capitalize }} on {{ samples }} ({{ result.settings.data }} data):
<strong>{{ value(result.baseline) }}</strong>. {{ how }}</p>
{% for figure in figures %}{{ figure }}{% endfor %}
<p>Most sensitive at {{ last }}: {% for name in worst %}<code>{{ name }}</code>{{ ", " if not loop.last }}{% endfor %}.
</p>
<div class="wide"><table><tr><th>{{ part }}</th><th>{{ size }}</th>
{% for step in steps %}<th>{{ step }}</th>{% if estimate %}<th>{{ heading }}</th>{% endif %}
{% endfor %}</tr>{% for row in result.rows %}<tr><td><code>{{ row.name }}</code></td><td>{{ row.size }}</td>
{% for cell in row.cells %}<td>{{ shown(cell) }}</td>
{% if estimate %}<td>{{ "%.2g" | format(cell[estimate]) }}</td>{% endif %}{% endfor %}</tr>
{% endfor %}</table></div>
{% if linears %}<h2>Linear layers by score for their size</h2>
<div class="wide"><table><tr><th>layer</th><th>weights</th>{% for step in steps %}<th>{{ step }}</th>{% endfor %}</tr>
{% for row in linears %}<tr><td><code>{{ row.name }}</code></td><td>{{ row.parameters }}</td>
{% for score in row.scores.values() %}<td>{{ "%.2g" | format(score) }}</td>{% endfor %}</tr>
{% endfor %}</table></div>{% endif %}
<h2>Make it again</h2>
<pre>{{ command }}</pre>
<p>{{ result.device.name }}, {{ result.device.cores }} core{{ "" if result.device.cores == 1 else "s" }}{%
 for name, version in result.versions.items() %},
{{ name }} {{ version }}{% endfor %}</p>
"""
PARTS = {"pruning": ("group", "units"), "bits": ("layer", "weights")}
"""What a row is, and what its size counts."""
HOW = {
    ("pruning", "accuracy"): "each group pruned alone, without training afterwards",
    ("pruning", "perplexity"): "each group pruned alone, without training afterwards",
    (
        "pruning",
        "similarity",
    ): "each group zeroed alone, without training afterwards; cosine of the outputs to those of "
    "the whole network, and their squared error relative to their size",
    ("bits", "similarity"): "weights of each layer rounded alone, with one scale an output channel, everything else "
    "floating; cosine of the outputs to those of the whole network, and their squared error relative to their size",
    ("bits", "accuracy"): "weights of each layer rounded alone, with one scale an output channel, everything else "
    "floating; divergence of the answers from the floating network's in nats an image",
    ("bits", "perplexity"): "each layer rounded alone, weights by row and activations by token, after the transforms "
    "of a recipe; score: predicted rise of the loss in nats",
}
ESTIMATES = {
    ("bits", "accuracy"): "divergence", ("bits", "perplexity"): "score",
    ("bits", "similarity"): "loss", ("pruning", "similarity"): "loss",
}  # fmt: skip
"""What a cell of a study says besides its `value`: shown in a column of its own. In nats, but that a graph's loss is a
share of the outputs' size."""
_HEADINGS = {"loss": "error"}
SMALLEST = 1e-9  # nats: what is below is drawn there, for a logarithm has no zero


def study_page(result: dict[str, Any]) -> str:
    """The HTML of a result; needs no other file and no network."""
    bits = result["kind"] == "bits"
    first = str(result["settings"]["widths"][0]) if bits else ""
    values = {
        "result": result,
        "samples": _samples(result),
        "how": HOW[_of(result)][0].upper() + HOW[_of(result)][1:] + ".",
        "figures": [
            figure(lambda axes, rows=rows, key=key: _draw(axes, result, rows, key), 9.5, 3.6)
            for key in _drawn(result)
            for rows in _alike(result)
        ],
        "part": PARTS[result["kind"]][0],
        "size": PARTS[result["kind"]][1],
        "steps": _steps(result),
        "last": _steps(result)[-1],
        "worst": most_sensitive(result)[:5],
        "estimate": _estimate(result),
        "heading": _HEADINGS.get(_estimate(result), _estimate(result)),
        "value": lambda cell: _value(result, cell),
        "shown": lambda cell: _shown(result, cell),
        "linears": sorted(result.get("linears", []), key=lambda row: -row["scores"][first] / row["parameters"]),
        "command": _command(result),
    }
    return render_page(f"{'Bits' if bits else 'Sensitivity'} of {result['checkpoint']}", TEMPLATE, values)


def print_study(result: dict[str, Any]) -> None:
    """The table on standard error, in the network's order."""
    from rich.table import Table
    from rich.text import Text

    console, estimate = error_console(), _estimate(result)
    part, size = PARTS[result["kind"]]
    table = Table(box=None, pad_edge=False)
    table.add_column(part, overflow="fold", min_width=16)
    table.add_column(size, justify="right")
    for step in _steps(result):
        table.add_column(step, justify="right")
        if estimate:
            table.add_column(_HEADINGS.get(estimate, estimate), justify="right")
    for row in result["rows"]:
        texts = [Text(row["name"]), str(row["size"])]
        for cell in row["cells"]:
            texts += [_shown(result, cell)] + ([f"{cell[estimate]:.2g}"] if estimate else [])
        table.add_row(*texts)
    console.print(table)
    whole = _value(result, result["baseline"])
    console.print(f"{result['quality']} of the whole network: {whole} on {_samples(result)}; {HOW[_of(result)]}")
    console.print(f"most sensitive at {_steps(result)[-1]}: {', '.join(most_sensitive(result)[:5])}")


def most_sensitive(result: dict[str, Any]) -> list[str]:
    """The parts by what the last step costs them, largest first: by divergence where that is known, else by loss."""
    key = "divergence" if _estimate(result) == "divergence" else "loss"
    return [row["name"] for row in sorted(result["rows"], key=lambda row: -row["cells"][-1][key])]


def _of(result: dict[str, Any]) -> tuple[str, str]:
    return result["kind"], result["quality"]


def _estimate(result: dict[str, Any]) -> str:
    return ESTIMATES.get(_of(result), "")


def _samples(result: dict[str, Any]) -> str:
    count = result["baseline"]["samples"]
    if result["quality"] == "accuracy":
        return f"{count} images"
    if result["quality"] == "similarity":
        return f"{count} samples"
    return f"{count} windows of {result['settings']['window']} tokens"


def _drawn(result: dict[str, Any]) -> list[str]:
    """What a figure shows: cosines near 1 are told apart by their error alone."""
    if result["quality"] == "similarity":
        return ["loss"]
    return ["value", *(["divergence"] if _estimate(result) == "divergence" else [])]


def _steps(result: dict[str, Any]) -> list[str]:
    settings = result["settings"]
    if result["kind"] == "bits":
        return [f"{bits} bits" for bits in settings["widths"]]
    return [f"{100 * ratio:g} % removed" for ratio in settings["ratios"]]


def _command(result: dict[str, Any]) -> str:
    settings = result["settings"]
    samples = "windows" if result["quality"] == "perplexity" else "images"
    if result["kind"] == "bits":
        steps = f"--bits --widths {','.join(map(str, settings['widths']))}"
    else:
        steps = f"--ratios {','.join(map(str, settings['ratios']))} --method {settings['method']}"
    return (
        f"penjing compress sensitivity {typed(result['checkpoint'])} {steps} \\\n"
        f" --data {settings['data']} --{samples} {settings[samples]}"
        + (f" --source {typed(settings['source'])}" if settings.get("source") else "")
    )


def _value(result: dict[str, Any], cell: dict[str, Any]) -> str:
    if result["quality"] == "accuracy":
        return f"{100 * cell['value']:.2f} %"
    return f"{cell['value']:.4f}" if result["quality"] == "similarity" else f"{cell['value']:.4g}"


def _shown(result: dict[str, Any], cell: dict[str, Any]) -> str:
    """The value of a cell and its change; a perplexity rises by percents when rounded, and by factors when pruned."""
    before, after = result["baseline"]["value"], cell["value"]
    if result["quality"] == "accuracy":
        change = f"{100 * (after - before):+.2f}"
    elif result["quality"] == "similarity":
        change = f"{after - before:+.4f}"
    else:
        change = f"{100 * (after / before - 1):+.2f} %" if result["kind"] == "bits" else f"{after / before:.3f}×"
    return f"{_value(result, cell)} ({change})"


def _alike(result: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The rows of each figure: groups by what their names are up to numbers; kinds with fewer than four share one."""
    if result["kind"] == "bits":
        return [result["rows"]]
    found: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        kind = ".".join("N" if part.isdigit() else part for part in row["name"].split("."))
        found.setdefault(kind, []).append(row)
    large = [rows for rows in found.values() if len(rows) >= 4]
    rest = [row for rows in found.values() if len(rows) < 4 for row in rows]
    return large + ([rest] if rest else [])


def _draw(axes: Axes, result: dict[str, Any], rows: Sequence[dict[str, Any]], key: str = "value") -> None:
    """Parts from left to right, a line for each step, and a dashed one for the whole network."""
    accuracy = key == "value" and result["quality"] == "accuracy"
    scale, least = (100, 0.0) if accuracy else (1, SMALLEST)
    for place, label in enumerate(_steps(result)):
        values = [max(scale * row["cells"][place][key], least) for row in rows]
        color = [AFTER, *OTHERS][place % (1 + len(OTHERS))]
        axes.plot(range(len(rows)), values, marker="o", markersize=4, color=color, label=label)
    if key == "value":
        whole = scale * result["baseline"]["value"]
        axes.axhline(whole, color=BEFORE, linewidth=1, linestyle="--", label="whole")
    names = [row["name"].removesuffix(".weight[dim 0]") for row in rows]
    if result["kind"] == "bits":
        names = [name.removeprefix("model.") for name in names]
    axes.set_xticks(range(len(rows)), names, rotation=90, fontsize=6)
    named = {"value": "accuracy, %" if accuracy else "perplexity", "loss": "squared error, relative"}
    axes.set_ylabel(named.get(key, f"{key}, nats"))
    if not accuracy:
        axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
