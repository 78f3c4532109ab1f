"""`report.html` of a text encoder: one self-contained page, figures drawn into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penjing.compress.quantize.place_bert import LINEAR
from penjing.compress.report.page import AFTER, BEFORE, figure, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATE = """<p>{{ report.parameters | count }} parameters, {{ report.bytes_fp32 | volume }} in FP32 →
<strong>{{ report.bytes_int8 | volume }}</strong>
({{ "%.1f" | format(report.bytes_fp32 / report.bytes_int8) }} times smaller), for {{ report.target }}:
activations {{ report.formats.activations }}, weights {{ report.formats.weights }}, word table
{{ report.formats.embedding }}.</p>
<div class="figures">{{ figures.size }}{{ figures.errors }}</div>
<h2>Quality on held-out text</h2>
<table><tr><th>embeddings of {{ q.texts }} texts</th><th>INT8 against FP32</th></tr>
<tr><td>mean cosine</td><td>{{ "%.4f" | format(q.cosine_mean) }}</td></tr>
<tr><td>smallest cosine</td><td>{{ "%.4f" | format(q.cosine_smallest) }}</td></tr>
<tr><td>nearest document unchanged, {{ q.queries }} queries</td>
<td>{{ "%.1f %%" | format(100 * q.top1_unchanged) }}</td></tr>
<tr><td>nearest document is the right one, FP32</td><td>{{ "%.1f %%" | format(100 * q.top1_fp32) }}</td></tr>
<tr><td>… INT8</td><td>{{ "%.1f %%" | format(100 * q.top1_int8) }}</td></tr></table>
<p>A query is the first sentence of a paragraph of Python's help, its document the paragraph.
Calibration used other text.</p>
<h2>Parity</h2>
<table><tr><th>ONNX Runtime against the fake-quantized model</th><th>smallest cosine</th><th>mean</th></tr>
{% for name, value in report.parity.smallest.items() %}<tr><td>{{ name }}</td><td>{{ "%.5f" | format(value) }}</td>
<td>{{ "%.5f" | format(report.parity.mean[name]) }}</td></tr>{% endfor %}</table>
<p>The bound is {{ report.parity.bound }} for the first.</p>
<h2>Error of each quantized layer</h2>
<p>Relative root mean square of its output, weights and input in INT8. The ten largest:</p>
<table><tr><th>layer</th><th>output</th><th>weight</th></tr>
{% for row in worst %}<tr><td><code>{{ row.name }}</code></td><td>{{ "%.2f %%" | format(100 * row.output) }}</td>
<td>{{ "%.2f %%" | format(100 * row.weight) }}</td></tr>{% endfor %}</table>
<h2>Make it again</h2>
<pre>{{ report.command }}</pre>
<p>{{ report.seconds | duration }}; the recipe with every value written out lies beside this page as
<code>recipe.toml</code>.</p>
<table>{% for name, version in report.versions.items() %}<tr><td>{{ name }}</td><td>{{ version }}</td></tr>{% endfor %}
</table>
"""


def encoder_page(report: dict[str, Any]) -> str:
    """The HTML of `report.json`'s content; needs no other file and no network."""
    figures = {
        "size": figure(lambda axes: _draw_size(axes, report), 3.5, 3),
        "errors": figure(lambda axes: _draw_errors(axes, report), 6, 3),
    }
    worst = sorted(report["layers"], key=lambda row: -row["output"])[:10]
    values = {"report": report, "q": report["quality"], "figures": figures, "worst": worst}
    return render(f"{report['model']} in INT8", TEMPLATE, values)


def _draw_size(axes: Axes, report: dict[str, Any]) -> None:
    values = [report["bytes_fp32"] / 1e6, report["bytes_int8"] / 1e6]
    bars = axes.bar(["FP32", "INT8"], values, color=[BEFORE, AFTER], width=0.6)
    axes.bar_label(bars, [f"{value:.0f}" for value in values])
    axes.set_ylabel("MB")


def _draw_errors(axes: Axes, report: dict[str, Any]) -> None:
    for part in LINEAR:
        rows = [row for row in report["layers"] if row["name"].endswith(f".{part}")]
        places = [int(row["name"].split(".")[1]) for row in rows]
        axes.plot(places, [100 * row["output"] for row in rows], marker=".", label=part)
    axes.set(xlabel="layer", ylabel="output error, %")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.25))
