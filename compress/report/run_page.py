"""`report.html` of a run in steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penjing.compress.report.page import AFTER, BEFORE, figure, render
from penjing.compress.report.pareto import Point, draw_pareto
from penjing.compress.report.text import loss_text, quality_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from penjing.compress.report.schema import LayerError, Report, Stage

MOST_BARS = 60  # more layers than this cannot be told apart: those that changed are shown

TEMPLATE = """<p>{{ first.size.bytes | volume }} → <strong>{{ last.size.bytes | volume }}</strong>
({{ "%.2f" | format(first.size.bytes / last.size.bytes) }} times smaller), {{ first.quality.name }}
{{ quality(first) }} → <strong>{{ quality(last) }}</strong>.</p>
<div class="figures">{{ figures.bytes }}{{ figures.speed }}</div>
<h2>Stages</h2>
<div class="wide"><table><tr><th>stage</th><th>parameters</th><th>weights</th><th>of the first</th><th>MACs</th>
<th>of the first</th><th>{{ first.quality.name }}</th><th>lost</th><th>took</th><th>peak memory</th></tr>
{% for stage in report.stages %}<tr><td>{{ stage.name }}</td><td>{{ stage.size.parameters | count }}</td>
<td>{{ stage.size.bytes | volume }}</td><td>{{ share(stage.size.bytes, first.size.bytes) }}</td>
<td>{{ stage.size.macs | count if stage.size.macs else "" }}</td>
<td>{{ share(stage.size.macs, first.size.macs) }}</td><td>{{ quality(stage) }}</td>
<td>{{ lost(stage) if not loop.first else "" }}</td><td>{{ stage.seconds | duration if stage.seconds else "" }}</td>
<td>{{ stage.peak_memory_bytes | volume if stage.peak_memory_bytes else "" }}</td></tr>
{% endfor %}</table></div>
<p>{{ first.quality.name | capitalize }} on {{ first.quality.samples }} {{ samples }} of held-out data, in brackets the
95 % interval of a bootstrap over them. “Lost” is against the first stage on the same samples, with its own
interval; less than zero is a gain. MACs: multiply-accumulates for one {{ "image" if images else "token" }}.</p>
{% if parts %}
<table><tr><th>perplexity</th>{% for name in parts %}<th>{{ name }}</th>{% endfor %}</tr>
{% for stage in report.stages %}<tr><td>{{ stage.name }}</td>{% for part in stage.quality.parts %}
<td>{{ "%.3f" | format(part.value) }}</td>{% endfor %}</tr>{% endfor %}</table>
{% endif %}
{% if cases %}
<h2>Speed</h2>
<div class="wide"><table><tr><th>stage</th>{% for case in cases %}<th colspan="3">{{ case }}</th>{% endfor %}</tr>
{% for stage in report.stages %}{% set timed = stage.by_case() %}<tr><td>{{ stage.name }}</td>
{% for case in cases %}{% set row = timed.get(case) %}{% if row %}<td>{{ row.seconds | duration }}</td>
<td>{{ row.throughput | count }} {{ row.unit }}/s</td>
<td>{{ "%.2f×" | format(row.speedup) }} ({{ "%.2f–%.2f" | format(row.speedup_low, row.speedup_high) }})</td>
{% else %}<td colspan="3"></td>{% endif %}{% endfor %}</tr>{% endfor %}</table></div>
<p>All stages measured in turns in one run on {{ report.device.name }}, {{ report.device.cores }} cores; medians of
{{ rounds }} rounds. In brackets the slowest and the fastest round's ratio to the first stage.</p>
{% endif %}
{% if figures.widths %}
<h2>Widths</h2>
{{ figures.widths }}
<p>Output channels or features of each layer in the first stage (grey) and in the last one.
{% if hidden_layers %}{{ hidden_layers }} layers that did not change, or changed as another one did, are left out.
{% endif %}After whole layers were dropped, the others are numbered anew.</p>
{% endif %}
{% if quantized %}
<h2>INT8</h2>
<p>For {{ quantized.target }}: activations in {{ quantized.formats.activations }}, weights in
{{ quantized.formats.weights }}, {{ "%.2f" | format(quantized.effective_bits) }} bits a weight on average,
{{ quantized.training_steps }} steps of training. On {{ "%.2f %%" | format(100 * quantized.same_class_as_fp32) }} of the
calibration images it chooses the class of the network before it was quantized.</p>
{{ figures.errors }}
<p>‖y − ŷ‖ / ‖y‖ of each layer, given the same input, its own weight and activations rounded; and of the weight
alone.</p>
<div class="wide"><table><tr><th>layer</th><th>weight</th><th>output error</th><th>weight error</th></tr>
{% for row in quantized.layers %}<tr><td><code>{{ row.name }}</code></td><td>{{ row.format }}</td>
<td>{{ "%.2f %%" | format(100 * row.output) }}</td><td>{{ "%.2f %%" | format(100 * row.weight) }}</td></tr>
{% endfor %}</table></div>
<table><tr><th>parity between</th><th>largest</th><th>mean</th><th>same class</th></tr>
{% for row in quantized.parity %}<tr><td>{{ row.between | join(", ") }}</td><td>{{ "%.3g" | format(row.largest) }}</td>
<td>{{ "%.3g" | format(row.mean) }}</td><td>{{ "%.2f %%" | format(100 * row.same_class) }}</td></tr>
{% endfor %}{% for name, reason in quantized.parity_unmeasured.items() %}<tr><td>{{ name }}</td>
<td colspan="3">not measured: {{ reason }}</td></tr>{% endfor %}</table>
<p>Differences of logits in units of how much they vary between images.</p>
{% endif %}
{% if report.decisions %}
<h2>Decisions of the guard</h2>
<div class="wide"><table><tr><th>after</th><th>attempt</th><th>loss</th><th>95 %</th><th>budget</th><th></th>
<th>then</th><th>pruned</th></tr>
{% for each in report.decisions %}<tr><td>{{ each.steps | join(", ") }}</td><td>{{ each.attempt }}</td>
<td>{{ "%.5g" | format(each.loss) }}</td><td>{{ "%.5g … %.5g" | format(each.loss_low, each.loss_high) }}</td>
<td>{{ "%g" | format(each.budget) }}</td><td>{{ each.unit }}</td><td>{{ each.outcome }}</td>
<td><code>{{ json(each.prunes) }}</code>{% if each.prunes_next %} → <code>{{ json(each.prunes_next) }}</code>{% endif %}
</td></tr>{% endfor %}</table></div>
{% endif %}
<h2>What each step recorded</h2>
{% for stage in report.stages if stage.record %}<details><summary>{{ stage.name }}</summary>
<pre>{{ json(stage.record, 2) }}</pre></details>{% endfor %}
<h2>Make it again</h2>
<pre>{{ report.command }}</pre>
<details><summary>The recipe with every value written out</summary><pre>{{ json(report.recipe, 2) }}</pre></details>
<table>{% for name, version in report.versions.items() %}<tr><td>{{ name }}</td><td>{{ version }}</td></tr>
{% endfor %}{% for name, value in report.device.items() %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}</table>
"""


def flow_page(report: Report) -> str:
    """The HTML of a report; needs no other file and no network."""
    first, last = report.stages[0], report.stages[-1]
    before, after, hidden = changed_widths(first.widths, last.widths)
    cases = list(dict.fromkeys(case for stage in report.stages for case in stage.by_case()))
    speed, label = speed_points(report.stages)
    size = [Point(stage.name, stage.size.bytes / 1e6, stage.quality) for stage in report.stages]
    quantized = last.quantized()
    figures = {
        "bytes": figure(lambda axes: draw_pareto(axes, size, "weights, MB"), 4.6, 3.4),
        "speed": figure(lambda axes: draw_pareto(axes, speed, label), 4.6, 3.4) if speed else "",
        "widths": figure(lambda axes: _draw_widths(axes, before, after), 9.5, 3.8) if before else "",
        "errors": figure(lambda axes: _draw_errors(axes, quantized.layers), 9.5, 3.4) if quantized else "",
    }
    values = {
        "report": report,
        "first": first,
        "last": last,
        "quantized": quantized,
        "figures": figures,
        "cases": cases,
        "rounds": max((row.runs for stage in report.stages for row in stage.latency), default=0),
        "parts": [part.name for part in first.quality.parts],
        "images": first.quality.name == "accuracy",
        "samples": "images" if first.quality.name == "accuracy" else "windows of text",
        "hidden_layers": hidden,
        "quality": quality_text,
        "lost": lambda stage: loss_text(report, stage),
        "share": lambda part, whole: f"{part / whole:.1%}" if part and whole else "",
        "json": lambda content, indent=None: json.dumps(content, indent=indent, ensure_ascii=False),
    }
    return render(f"{report.recipe.get('model', 'a model')}, compressed", TEMPLATE, values)


def speed_points(stages: Sequence[Stage]) -> tuple[list[Point], str]:
    """Each stage's speed-up in the last case that all have (the largest batch; decoding), and what it is."""
    common = [case for case in stages[0].by_case() if all(case in stage.by_case() for stage in stages)]
    if not common:
        return [], ""
    case = common[-1]
    points = [Point(stage.name, stage.by_case()[case].speedup, stage.quality, larger=True) for stage in stages]
    return points, f"speed against {stages[0].name} ({case})"


def changed_widths(before: dict[str, int], after: dict[str, int]) -> tuple[dict[str, int], dict[str, int], int]:
    """The widths to show, and how many layers are left out.

    Where there are too many for one chart, kinds of layers (names up to their numbers) of which none changed are left
    out, and those that changed exactly as a kind before them, such as gate_proj and up_proj.
    """
    if len(before) <= MOST_BARS:
        return before, after, 0
    kinds: dict[str, list[str]] = {}
    for name in before:
        kinds.setdefault(".".join("N" if part.isdigit() else part for part in name.split(".")), []).append(name)
    shown: list[str] = []
    seen: list[list[tuple[int, int]]] = []
    for names in kinds.values():
        pairs = [(before[name], after.get(name, 0)) for name in names]
        if all(old == new for old, new in pairs) or pairs in seen:
            continue
        seen.append(pairs)
        shown += names
    return {name: before[name] for name in shown}, after, len(before) - len(shown)


def _draw_errors(axes: Axes, layers: Sequence[LayerError]) -> None:
    places = range(len(layers))
    axes.bar(places, [100 * row.output for row in layers], color=AFTER, width=0.8, label="output")
    axes.plot(places, [100 * row.weight for row in layers], "_", color=BEFORE, label="weight")
    axes.set_xticks(places, [row.name for row in layers], rotation=90, fontsize=7 if len(layers) <= MOST_BARS else 5)
    axes.set_ylabel("error, %")
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize=8)


def _draw_widths(axes: Axes, before: dict[str, int], after: dict[str, int]) -> None:
    places = range(len(before))
    axes.bar(places, list(before.values()), color=BEFORE, width=0.8)
    axes.bar(places, [after.get(name, 0) for name in before], color=AFTER, width=0.8)
    if len(before) <= 2 * MOST_BARS:
        axes.set_xticks(places, list(before), rotation=90, fontsize=7 if len(before) <= MOST_BARS // 2 else 5)
    axes.set_ylabel("channels or features")
    axes.margins(x=0.01)
