"""`report.html`: the report as one self-contained page, figures drawn into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penjing.compress.report.page import AFTER, BEFORE, figure, render
from penjing.core.progress import megabytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

TEMPLATE = """<p>{{ "{:,}".format(report.parameters) }} parameters, {{ report.bytes_fp32 | megabytes }} in FP32 →
<strong>{{ report.bytes_int8 | megabytes }}</strong>
({{ "%.1f" | format(report.bytes_fp32 / report.bytes_int8) }} times smaller), in
{{ "%.0f" | format(report.seconds) }} s ({{ "%.0f" | format(report.seconds_measuring) }} s of them measured perplexity)
with {{ report.peak_memory_bytes | megabytes }} of memory at most
({{ "%.2f" | format(report.peak_memory_of_fp32) }} of the FP32 model).</p>
<div class="figures">{{ figures.size }}{{ figures.perplexity }}</div>
<h2>Perplexity on held-out text</h2>
<table><tr><th>text</th><th>FP32</th><th>INT8</th><th>change</th></tr>
{% for name, row in report.perplexity.items() %}<tr><td>{{ name }}</td><td>{{ "%.3f" | format(row.fp32) }}</td>
<td>{{ "%.3f" | format(row.int8) }}</td><td>{{ "%+.2f %%" | format(100 * row.change) }}</td></tr>{% endfor %}</table>
<p>Windows of {{ report.recipe.evaluate.window }} tokens that start afresh;
{{ report.recipe.evaluate.prose_tokens }} tokens of prose, {{ report.recipe.evaluate.code_tokens }} of code.
Calibration used other text.</p>
<h2>Error of each quantized layer</h2>
{{ figures.errors }}
<p>‖X·Wᵀ − X̂·Ŵᵀ‖ / ‖X·Wᵀ‖ on calibration tokens, weights and activations in INT8. The ten largest:</p>
<table><tr><th>layer</th><th>output</th><th>weight</th></tr>
{% for row in worst %}<tr><td><code>{{ row.name }}</code></td><td>{{ "%.2f %%" | format(100 * row.output) }}</td>
<td>{{ "%.2f %%" | format(100 * row.weight) }}</td></tr>{% endfor %}</table>
<h2>Parity</h2>
<table><tr><th>between</th><th>quantity</th><th>values</th><th>largest</th><th>mean</th></tr>
{% for row in report.parity %}<tr><td>{{ row.between | join(", ") }}</td><td>{{ row.quantity }}</td>
<td>{{ "{:,}".format(row.num_values) }}</td><td>{{ "%.3g" | format(row.largest) }}</td>
<td>{{ "%.3g" | format(row.mean) }}</td></tr>{% endfor %}</table>
<p>layer_outputs: every layer, given the same input, relative to the token's root mean square. End to end, one float32
rounding that differs turns into other INT8 roundings layer by layer, so logits agree about as far as INT8 itself.</p>
<h2>Steps</h2>
{{ figures.steps }}
<table><tr><th>step</th><th>seconds</th><th>peak memory</th></tr>
{% for step in steps %}<tr><td>{{ step.name }}</td><td>{{ "%.1f" | format(step.seconds) }}</td>
<td>{{ step.peak_memory_bytes | megabytes }}</td></tr>{% endfor %}</table>
{% if report.steps_resumed %}
<p>{{ report.steps_resumed }} steps were kept from a run that was interrupted.</p>
{% endif %}
<h2>Make it again</h2>
<pre>{{ report.command }}</pre>
<p>The recipe with every value written out lies beside this page as <code>recipe.toml</code>.</p>
<table>{% for name, version in report.versions.items() %}<tr><td>{{ name }}</td><td>{{ version }}</td></tr>{% endfor %}
<tr><td>processor</td><td>{{ report.processor.name }}, {{ report.processor.cores }} cores,
{{ report.processor.memory_bytes | megabytes }}</td></tr></table>
"""


def report_page(report: dict[str, Any]) -> str:
    """The HTML of `report.json`'s content; needs no other file and no network."""
    steps = _steps(report)
    figures = {
        "size": figure(lambda axes: _draw_size(axes, report), 4, 3),
        "perplexity": figure(lambda axes: _draw_perplexity(axes, report), 4, 3),
        "errors": figure(lambda axes: _draw_errors(axes, report), 9, 3.6),
        "steps": figure(lambda axes: _draw_steps(axes, steps), 9, 2.6),
    }
    worst = sorted(report["linears"], key=lambda row: -row["output"])[:10]
    values = {"report": report, "figures": figures, "worst": worst, "steps": steps}
    return render(f"{report['model']} in INT8", TEMPLATE, values)


def _steps(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Steps with all layers as one."""
    steps: list[dict[str, Any]] = []
    for step in report["steps"]:
        name = "layers" if step["name"].startswith("layer_") else step["name"]
        if steps and steps[-1]["name"] == name:
            steps[-1]["seconds"] += step["seconds"]
            steps[-1]["peak_memory_bytes"] = max(steps[-1]["peak_memory_bytes"], step["peak_memory_bytes"])
        else:
            steps.append({**step, "name": name})
    return steps


def _draw_size(axes: Axes, report: dict[str, Any]) -> None:
    values = [report["bytes_fp32"] / 1e6, report["bytes_int8"] / 1e6]
    bars = axes.bar(["FP32", "INT8"], values, color=[BEFORE, AFTER], width=0.6)
    axes.bar_label(bars, [f"{value:.0f}" for value in values])
    axes.set_ylabel("weights, MB")


def _draw_perplexity(axes: Axes, report: dict[str, Any]) -> None:
    texts = list(report["perplexity"])
    for offset, kind, color in ((-0.2, "fp32", BEFORE), (0.2, "int8", AFTER)):
        values = [report["perplexity"][text][kind] for text in texts]
        bars = axes.bar([index + offset for index in range(len(texts))], values, 0.38, color=color, label=kind.upper())
        axes.bar_label(bars, [f"{value:.2f}" for value in values])
    axes.set_xticks(range(len(texts)), texts)
    axes.set_ylabel("perplexity (lower is better)")
    axes.legend(frameon=False, loc="lower right")


def _draw_errors(axes: Axes, report: dict[str, Any]) -> None:
    for kind in KINDS:
        rows = [row for row in report["linears"] if row["name"].endswith(kind)]
        layers = [int(row["name"].split(".")[2]) for row in rows]
        axes.plot(layers, [100 * row["output"] for row in rows], marker=".", label=kind)
    axes.set(xlabel="layer", ylabel="output error, %")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, ncols=len(KINDS), loc="upper center", bbox_to_anchor=(0.5, 1.15))


def _draw_steps(axes: Axes, steps: list[dict[str, Any]]) -> None:
    bars = axes.barh([step["name"] for step in steps], [step["seconds"] for step in steps], color=AFTER)
    axes.bar_label(bars, [f" {megabytes(step['peak_memory_bytes'])}" for step in steps])
    axes.invert_yaxis()
    axes.set_xlabel("seconds; beside the bars: peak memory")
