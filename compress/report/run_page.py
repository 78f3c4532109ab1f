"""`report.html` of a run, of whatever family: written for a reader who meets penjing there for the first time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penjing.compress.report.run_figures import (
    changed_widths,
    errors_figure,
    size_figure,
    speed_figure,
    widths_figure,
)
from penjing.compress.report.text import READINGS, answer_said, loss_in_words, loss_text, quality_text
from penjing.core.pages.page import render_page
from penjing.core.progress import count, duration, volume

if TYPE_CHECKING:
    from penjing.compress.report.schema import Report, Stage

WORST = 10  # layers whose errors are shown without a click
MEANINGS = {
    "model": "the network that the run began with",
    "prune": "whole channels, heads or layers were removed",
    "prune_weights": "the weights that matter least became zero",
    "sparsify": "training drew channels that matter little towards zero, so that they can be removed",
    "window": "layers see fewer tokens back",
    "distill": "training taught it to answer as the network before it was made smaller",
    "finetune": "training on the data again",
    "quantize": "weights and the numbers between layers were rounded to fewer bits",
}
"""Kind of a stage → what was done."""
PARITY = {
    "decoder": "layer_outputs compares every layer, given the same input, relative to what it adds. "
    "End to end, one float32 rounding that differs turns into other INT8 roundings layer by layer, so logits agree "
    "about as far as INT8 itself.",
    "classifier": "Differences of logits are in units of how much they vary between images.",
    "encoder": "The distance of two embeddings is 1 − their cosine: 0 where they point the same way.",
}
"""Family → in which units parity is, and what to expect."""

TEMPLATE = """<p>{{ report.recipe.get("model", "A model") }} was made smaller by penjing. Its weights went from
{{ first.size.bytes | volume }} to <strong>{{ last.size.bytes | volume }}</strong>
({{ "%.2f" | format(first.size.bytes / last.size.bytes) }} times smaller), its {{ first.quality.name }} from
{{ quality(first) }} to <strong>{{ quality(last) }}</strong>. {{ reading.meaning }}
{% if report.seconds %}All the work took {{ report.seconds | duration }}
{%- if report.peak_memory_bytes %} and {{ report.peak_memory_bytes | volume }} of memory at most{% endif %}.{% endif %}
</p>
<h2>What was gained</h2>
<div class="wide"><table><tr><th></th><th>before</th><th>after</th><th>change</th></tr>
{% for row in gains %}<tr><td>{{ row[0] }}</td><td>{{ row[1] | ranged }}</td>
<td><strong>{{ row[2] | ranged }}</strong></td><td>{{ row[3] | ranged }}</td></tr>
{% endfor %}</table></div>
<div class="figures">{{ figures.bytes }}{{ figures.speed }}</div>
<p>Each dot is a stage, its bar the 95 % interval; the line joins those that no other stage beats in both.</p>
<h2>Stages</h2>
<p>A stage is the network after one step of the recipe; each begins with the one before it.</p>
<ul>{% for stage in report.stages %}<li>{{ stage.name }}{% if stage.kind in meanings %}:
{{ meanings[stage.kind] }}{% endif %}</li>
{% endfor %}</ul>
<div class="wide"><table><tr><th>stage</th><th>parameters</th><th>weights</th><th>MACs</th>
<th>{{ first.quality.name }}</th><th>lost</th><th>took</th><th>peak memory</th></tr>
{% for stage in report.stages %}<tr><td>{{ stage.name }}</td>
<td>{{ share(stage.size.parameters, first.size.parameters, count) | ranged }}</td>
<td>{{ share(stage.size.bytes, first.size.bytes, volume) | ranged }}</td>
<td>{{ share(stage.size.macs, first.size.macs, count) | ranged }}</td><td>{{ quality(stage) | ranged }}</td>
<td>{{ lost(stage) | ranged if not loop.first else "" }}</td>
<td>{{ stage.seconds | duration if stage.seconds else "" }}</td>
<td>{{ stage.peak_memory_bytes | volume if stage.peak_memory_bytes else "" }}</td></tr>
{% endfor %}</table></div>
<p>Below each size stands its share of the first stage's. {{ first.quality.name | capitalize }} was measured on
{{ first.quality.samples }} {{ reading.samples }} of held-out data, in
brackets the 95 % interval of a bootstrap over them. “Lost” is against the first stage on the same samples, with its
own interval; less than zero is a gain. MACs: multiply-accumulates for one
{{ first.size.macs_per or "sample" }}.</p>
{% if parts %}
<div class="wide"><table><tr><th>{{ reading.parts }}</th>{% for name in parts %}<th>{{ name }}</th>
{% endfor %}</tr>
{% for stage in report.stages %}<tr><td>{{ stage.name }}</td>{% for part in stage.quality.parts %}
<td>{{ part_text(part.value) }}</td>{% endfor %}</tr>{% endfor %}</table></div>
{% endif %}
{% if answers %}
<h2>Answers</h2>
<div class="wide"><table class="two"><tr><th>asked</th><th>measure</th><th>of</th>
{% for stage in report.stages %}<th>{{ stage.name }}</th>{% endfor %}</tr>
{% for row in answers %}<tr>{% for cell in row %}<td>{{ cell | ranged }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<p>“Greedy” lets every stage continue the same prompts with the likeliest token each time, and compares that with what
the first stage wrote: the share of tokens that are equal place by place, how many tokens pass before the first one that
differs, and the share of answers that are equal throughout. Since one other token changes what follows, the last figure
asks for each next token anew, behind the first stage's own answer. For questions, the choice with the largest
log-likelihood is taken, or the largest a byte of its text. In brackets is the 95 % interval of a bootstrap over prompts
or questions; “lost” is against the first stage on the same questions.</p>
{% endif %}
{% if cases %}
<h2>Speed</h2>
<div class="wide"><table class="two"><tr><th>what was timed</th><th>stage</th><th>a call</th><th>throughput</th>
<th>speed</th></tr>
{% for case in cases %}{% for stage in report.stages if case in stage.by_case() %}
{% set row = stage.by_case()[case] %}<tr><td>{{ case if loop.first else "" }}</td><td>{{ stage.name }}</td>
<td>{{ row.seconds | duration }}</td><td>{{ row.throughput | count }} {{ row.unit }}/s</td>
<td>{{ "%.2f×" | format(row.speedup) }} ({{ "%.2f–%.2f" | format(row.speedup_low, row.speedup_high) }})</td></tr>
{% endfor %}{% endfor %}</table></div>
<p>All stages took turns in one run on {{ report.processor.name }},
{{ report.processor.cores }} core{{ "" if report.processor.cores == 1 else "s" }}; medians of
{{ rounds }} rounds. “×” is how many times as fast a stage is as the first one timed, in brackets the slowest and the
fastest round.</p>
{% endif %}
{% if figures.widths %}
<h2>Widths</h2>
{{ figures.widths }}
<p>Output channels or features of each layer in the first stage (grey) and in the last one.
{% if hidden_layers %}{{ hidden_layers }} layers that did not change, or changed as another one did, are left out.
{% endif %}After whole layers were dropped, the others are numbered anew.</p>
{% endif %}
{% for stage in report.stages if stage.quantized %}{% set q = stage.quantized %}
<h2>Rounding in {{ stage.name }}</h2>
<p>The artifact is for {{ q.target }}:
{% for what, format in q.formats.items() %}{{ what }} in {{ format }}, {% endfor %}
{% if q.effective_bits %}{{ "%.2f" | format(q.effective_bits) }} bits a weight on average, {% endif %}
{% if q.training_steps %}{{ q.training_steps }} steps of training with rounded numbers{% else %}calibrated without
training{% endif %}.
{% if q.kept_for_parity %}{{ q.kept_for_parity | join(", ") }} stay floating, because ONNX Runtime's answers
drifted from those of the network where they were rounded.{% endif %}
{% if q.agreement is not none %}On {{ "%.2f %%" | format(100 * q.agreement) }} of the calibration samples it makes the
choice that it made before.{% endif %}</p>
{% if q.layers %}
<h3>Error of each quantized layer</h3>
{{ errors[stage.name] }}
<p>The output error is ‖y − ŷ‖ / ‖y‖ of a layer, given the same input, its own weight and activations rounded; the
weight error is that of the weight alone. {% if q.layers | length > worst %}The {{ worst }} largest:{% endif %}</p>
<div class="wide"><table><tr><th>layer</th><th>weight</th><th>output error</th><th>weight error</th></tr>
{% for row in largest(q.layers) %}{{ layer_row(row) }}{% endfor %}</table></div>
{% if q.layers | length > worst %}<details><summary>All {{ q.layers | length }} layers, in order</summary>
<div class="wide"><table><tr><th>layer</th><th>weight</th><th>output error</th><th>weight error</th></tr>
{% for row in q.layers %}{{ layer_row(row) }}{% endfor %}</table></div></details>{% endif %}
{% endif %}
{% if q.differences %}
<h3>Parity</h3>
<p>The same inputs went through every implementation: “fake_quantized” is the network in floating point with every
number rounded as the artifact rounds it, “floating” (where it is listed) the same network without rounding; the others
run the artifact itself.</p>
<div class="wide"><table><tr><th>parity between</th><th>quantity</th><th>values</th><th>largest</th><th>mean</th>
<th>same choice</th></tr>
{% for row in q.differences %}<tr><td>{{ row.between | join(", ") }}</td><td>{{ row.quantity }}</td>
<td>{{ "{:,}".format(row.num_values) if row.num_values else "" }}</td><td>{{ "%.3g" | format(row.largest) }}</td>
<td>{{ "%.3g" | format(row.mean) }}</td>
<td>{{ "%.2f %%" | format(100 * row.same) if row.same is not none else "" }}</td></tr>
{% endfor %}{% for name, reason in q.unmeasured.items() %}<tr><td>{{ name }}</td>
<td class="text" colspan="5">not measured: {{ reason }}</td></tr>{% endfor %}</table></div>
<p>{{ parity }}
{% if q.bound %}An artifact is refused where the {{ q.bound.statistic }} difference of {{ q.bound.quantity }} between
{{ q.bound.between | join(" and ") }} exceeds {{ "%g" | format(q.bound.value) }}.{% endif %}</p>
{% endif %}
{% endfor %}
{% if report.decisions %}
<h2>Decisions of the guard</h2>
<p>After some steps the guard compares the network with the one that the run began with, or with the last one that
passed. What loses more than the budget is repeated with less removed, left out, or ends the run, as the recipe
says.</p>
<div class="wide"><table><tr><th>after</th><th>attempt</th><th>loss</th><th>95 %</th><th>budget</th><th></th>
<th>then</th><th>pruned</th></tr>
{% for each in report.decisions %}<tr><td class="text">{{ each.steps | join(", ") }}</td>
<td>{{ each.attempt }}</td>
<td>{{ "%.5g" | format(each.loss) }}</td><td>{{ "%.5g … %.5g" | format(each.loss_low, each.loss_high) }}</td>
<td>{{ "%g" | format(each.budget) }}</td><td>{{ each.unit }}</td><td>{{ each.outcome }}</td>
<td>{% if each.prunes %}<code>{{ json(each.prunes) }}</code>{% endif %}
{% if each.prunes_next %} → <code>{{ json(each.prunes_next) }}</code>{% endif %}</td></tr>{% endfor %}</table></div>
{% endif %}
{% if report.stages | map(attribute="record") | select | list %}
<h2>What each step recorded</h2>
{% endif %}
{% for stage in report.stages if stage.record %}<details><summary>{{ stage.name }}</summary>
<pre>{{ json(stage.record, 2) }}</pre></details>{% endfor %}
<h2>Make it again</h2>
<pre>{{ report.command }}</pre>
<details><summary>The recipe with every value written out</summary><pre>{{ json(report.recipe, 2) }}</pre></details>
<p>It ran with these versions on this processor:</p>
<table>{% for name, version in report.versions.items() %}<tr><td>{{ name }}</td><td>{{ version }}</td></tr>
{% endfor %}{% for name, value in report.processor.items() %}<tr><td>{{ names.get(name, name) }}</td>
<td>{{ value | volume if name == "memory_bytes" else value }}</td></tr>
{% endfor %}</table>
"""
ROW = """{% macro layer_row(row) %}<tr><td><code>{{ row.name }}</code></td><td>{{ row.format }}</td>
<td>{{ "%.2f %%" | format(100 * row.output) }}</td><td>{{ "%.2f %%" | format(100 * row.weight) }}</td></tr>
{% endmacro %}"""


def run_page(report: Report) -> str:
    """The HTML of a report; needs no other file and no network."""
    first, last = report.first, report.last
    before, after, hidden = changed_widths(first.widths, last.widths)
    if before == {name: after.get(name) for name in before}:
        before, hidden = {}, 0
    values: dict[str, Any] = {
        "report": report,
        "first": first,
        "last": last,
        "reading": READINGS[first.quality.name],
        "meanings": MEANINGS,
        "parity": PARITY.get(report.family, ""),
        "gains": _gains(report),
        "figures": {
            "bytes": size_figure(report),
            "speed": speed_figure(report),
            "widths": widths_figure(before, after),
        },
        "errors": {stage.name: errors_figure(stage.quantized.layers) for stage in report.stages if stage.quantized},
        "answers": _answers(report),
        "cases": list(dict.fromkeys(case for stage in report.stages for case in stage.by_case())),
        "rounds": max((row.runs for stage in report.stages for row in stage.latency), default=0),
        "parts": [part.name for part in first.quality.parts],
        "part_text": READINGS[first.quality.name].number if first.quality.name == "perplexity" else "{:.4f}".format,
        "worst": WORST,
        "largest": lambda layers: sorted(layers, key=lambda row: -row.output)[:WORST],
        "hidden_layers": hidden,
        "names": {"name": "processor", "memory_bytes": "memory"},
        "quality": quality_text,
        "lost": lambda stage: loss_text(report, stage),
        "share": _with_share,
        "count": count,
        "volume": volume,
        "json": lambda content, indent=None: json.dumps(content, indent=indent, ensure_ascii=False),
    }
    return render_page(f"{report.recipe.get('model', 'a model')}, compressed", ROW + TEMPLATE, values)


def _answers(report: Report) -> list[list[str]]:
    """Of each figure the task, what was counted and over how many samples, then every stage's, with what it lost."""
    by_stage = [{(each.task, each.measure): each for each in stage.answers} for stage in report.stages]
    rows = []
    for key in dict.fromkeys(key for figures in by_stage for key in figures):
        samples = next(figures[key].samples for figures in by_stage if key in figures)
        cells = (answer_said(figures[key]) if key in figures else "" for figures in by_stage)
        rows.append([*key, str(samples), *cells])
    return rows


def _gains(report: Report) -> list[tuple[str, str, str, str]]:
    """What, before, after and change, of all that both ends of the run have."""
    first, last = report.first, report.last
    rows = [
        (
            "weights on disk",
            volume(first.size.bytes),
            volume(last.size.bytes),
            f"{first.size.bytes / last.size.bytes:.2f} times smaller",
        ),
        (
            "parameters",
            count(first.size.parameters),
            count(last.size.parameters),
            _left(last.size.parameters, first.size.parameters),
        ),
    ]
    if first.size.macs and last.size.macs:
        what = f"multiply-accumulates for one {first.size.macs_per or 'sample'}"
        rows.append((what, count(first.size.macs), count(last.size.macs), _left(last.size.macs, first.size.macs)))
    change = loss_in_words(report, last) if last is not first else ""
    rows.append((first.quality.name, quality_text(first), quality_text(last), change))
    return rows + [_faster(first, last, case) for case in first.by_case() if case in last.by_case()]


def _faster(first: Stage, last: Stage, case: str) -> tuple[str, str, str, str]:
    before, after = first.by_case()[case], last.by_case()[case]
    return (
        f"time of a call ({case})",
        duration(before.seconds),
        duration(after.seconds),
        f"{after.speedup:.2f}× as fast",
    )


def _with_share(part: float | None, whole: float | None, say: Callable[[float], str]) -> str:
    return f"{say(part)} ({part / whole:.1%})" if part and whole else ""


def _left(after: float, before: float) -> str:
    return f"{after / before:.1%} left" if after != before else "as before"
