"""The page of a joint search: every combination that was measured, its front, and what each choice costs alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penjing.core.pages.page import AFTER, BEFORE, OTHERS, figure, render_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATE = """<p>{{ result.rows | length }} combinations of <code>{{ result.model }}</code> were measured before
healing, each on {{ result.samples }} samples that calibrate and never evaluate: how far the answers are from those of
the network as it is ({{ result.unit }}), beside {{ costs[result.cost] }}.</p>
<div class="figures">{{ front }}{{ ranks }}</div>
<p>The sum that was fitted ranks combinations that it was not fitted to with a correlation of
<strong>{{ "%.3f" | format(result.prediction.rank) }}</strong> (Spearman, each left out in turn); plain sums of single
changes have {{ "%.3f" | format(result.prediction.plain_rank) }}. On the front's points and the uniform choices, which
were measured afterwards, it is {{ "%.3f" | format(result.prediction.measured_rank) }}. Its whole front has
{{ result.prediction.points }} points, found {{ "exactly" if result.prediction.exact else "up to thinning" }}.</p>
{% if healing %}<h2>Healed points</h2>
<p>{{ healing.first }} points were made and trained ({{ healing.steps | join(" + ") }} steps), then {{ healing.second }}
more of the front that these foretell; where bits alone change there is nothing to train.
{% if healing.left %}Of what changes cost before, training leaves
{% for kind, factor in healing.left.items() %}{{ percent(factor ** (1 / healing.power)) }} of {{ KINDS[kind] }}
{{- ", " if not loop.last }}{% endfor %}, as far as so few points can tell.{% endif %}
{%- if result.prediction.healed_rank is not none %} What was foretold of a point, by the others of the first round and
in the second by the first, ranks them with a correlation of
{{ "%.3f" | format(result.prediction.healed_rank) }}.{% endif %}
Recipes are those that no other healed point beats in both.</p>
<div class="wide"><table><tr><th>{{ result.cost }}</th><th>round</th><th>before healing</th><th>healed</th>
<th>foretold</th><th>recipe</th></tr>
{% for row in healed %}<tr><td>{{ percent(row.share) }}</td>
<td>{{ row.round }}{{ ", uniform" if is_uniform(row) }}</td>
<td>{{ number(row.divergence) }}</td><td>{{ number(row.healed) }}</td>
<td>{{ "" if row.foretold is none else number(row.foretold) }}</td><td>{{ recipe_of(row) }}</td></tr>
{% endfor %}</table></div>{% endif %}
<h2>The front, as recipes</h2>
<div class="wide"><table><tr><th>recipe</th><th>{{ result.cost }}</th>
<th>{{ "before healing" if healing else "measured" }}</th><th>predicted</th>{% if healing %}<th>healed</th>{% endif %}
{% for each in columns %}<th>{{ each }}</th>{% endfor %}</tr>
{% for entry in result.front %}<tr><td><code>{{ entry.recipe }}</code></td>{{ cells(entry.row) }}</tr>
{% endfor %}</table></div>
<h2>Uniform choices, the line to beat</h2>
<p>All groups at one width, all layers at one number of bits{{ " and one window" if windows }}; beside each the best
that costs no more.</p>
<table><tr><th>{{ result.cost }}</th><th>widths</th><th>bits</th>{% if windows %}<th>sees</th>{% endif %}
<th>uniform</th><th>best</th><th>at</th>{% if healing %}<th>uniform, healed</th><th>best, healed</th>
<th>at</th>{% endif %}</tr>
{% for each in result.baselines %}<tr><td>{{ percent(rows[each.row].share) }}</td>
<td>{{ option(each.row, "width", "layer") }}</td><td>{{ option(each.row, "bits") }}</td>
{% if windows %}<td>{{ option(each.row, "attention") }}</td>{% endif %}
<td>{{ number(rows[each.row].divergence) }}</td>
{% if each.best != each.row %}<td>{{ number(rows[each.best].divergence) }}</td>
<td>{{ percent(rows[each.best].share) }}</td>{% else %}<td colspan="2">itself</td>{% endif %}
{% if each.healed is defined %}<td>{{ number(rows[each.row].healed) }}</td>
{% if each.healed != each.row %}<td>{{ number(rows[each.healed].healed) }}</td>
<td>{{ percent(rows[each.healed].share) }}</td>{% else %}<td colspan="2">itself</td>{% endif %}{% endif %}</tr>
{% endfor %}</table>
<h2>What each choice costs alone</h2>
<div class="wide"><table><tr><th>choice</th><th>option</th><th>{{ result.cost }} saved</th><th>divergence</th></tr>
{% for row in rows if row.kind == "single" %}<tr><td><code>{{ changed(row)[0] }}</code></td>
<td>{{ changed(row)[1] }}</td><td>{{ percent(1 - row.share) }}</td><td>{{ number(row.divergence) }}</td></tr>
{% endfor %}</table></div>
{% if result.latency is defined %}<h2>Latency</h2>
<p>Predicted is a sum that was fitted to {{ result.latency.fitted | length }} whole networks:
{{ ms(result.latency.coefficients.once) }} ms
{%- for name, value in result.latency.coefficients.items() if name != "once" and value -%}
, {{ coefficient(name, value) }}{% endfor %}. The networks below were timed
afterwards, in turns with the network as it is, which takes {{ ms(result.latency.start) }} ms
{%- if result.latency.error is not none %}; half of the predictions are within
{{ percent(result.latency.error) }}{% endif %}. Timed were
{% for name, value in result.latency.workload.items() %}{{ name }} = {{ value }}{{ ", " if not loop.last }}{% endfor %};
{{ result.latency.threads }} thread{{ "" if result.latency.threads == 1 else "s" }}.</p>
<div class="wide"><table><tr><th>{{ result.cost }}</th><th>predicted, ms</th><th>measured, ms</th><th>off by</th></tr>
{% for each in result.latency.points %}<tr><td>{{ percent(rows[each.row].share) }}</td>
<td>{{ ms(each.predicted) }}</td><td>{{ ms(each.seconds) }}</td>
<td>{{ percent(each.predicted / each.seconds - 1) }}</td></tr>{% endfor %}</table></div>
<details><summary>The layers alone</summary><table><tr>{% for name in result.latency.entries[0] %}<th>{{ name }}</th>
{% endfor %}</tr>{% for entry in result.latency.entries %}<tr>{% for name, value in entry.items() %}
<td>{{ "" if value is none else ms(value) if name == "seconds" else value }}</td>{% endfor %}</tr>
{% endfor %}</table></details>{% endif %}
<p>{{ result.device.name }}, {{ result.device.cores }} core{{ "" if result.device.cores == 1 else "s" }}{%
 for name, version in result.versions.items() %},
{{ name }} {{ version }}{% endfor %}</p>
"""
COSTS = {
    "macs": "multiply-accumulates (an INT8 one counts a quarter)",
    "bytes": "bytes of the weights of convolutions and linear layers",
    "latency": "milliseconds that the engine takes, as a fitted sum predicts them",
}
KINDS = {"width": "widths", "bits": "bits", "layer": "layers and their widths", "attention": "attention"}
ROW_CELLS = """<td>{{ share }}</td><td>{{ measured }}</td><td>{{ predicted }}</td>
{% if healed is not none %}<td>{{ healed }}</td>{% endif %}{% for each in options %}<td>{{ each }}</td>{% endfor %}"""
ALONE = {"of_its_time": "the layers", "of_attention": "attentions"}
MOST_COLUMNS = 24  # choices; where there are more, a row names those that are not the network as it is
SMALLEST = 1e-6  # what is below is drawn there, for a logarithm has no zero


def search_page(result: dict[str, Any]) -> str:
    """The HTML of a result; needs no other file and no network."""
    from jinja2 import Environment
    from markupsafe import Markup

    wide = len(result["variables"]) > MOST_COLUMNS
    row_cells = Environment(autoescape=True).from_string(ROW_CELLS)

    def cells(place: int) -> Markup:
        row = result["rows"][place]
        options = [
            _option(each, option) if option else ""
            for each, option in zip(result["variables"], row["choice"], strict=True)
        ]
        if wide:
            options = [_summary(result, row["choice"])]
        return Markup(
            row_cells.render(
                share=_percent(row["share"]),
                measured=_number(row["divergence"]),
                predicted=_number(row["predicted"]),
                healed=_number(row["healed"]) if "healed" in row else None,
                options=options,
            )
        )

    def option(place: int, *kinds: str) -> str:
        choice = result["rows"][place]["choice"]
        found = [
            _option(each, at) for each, at in zip(result["variables"], choice, strict=True) if each["kind"] in kinds
        ]
        return ", ".join(dict.fromkeys(found))

    recipes = {tuple(result["rows"][entry["row"]]["choice"]): entry["recipe"] for entry in result["front"]}
    values = {
        "result": result,
        "rows": result["rows"],
        "healing": result.get("healing"),
        "healed": sorted((row for row in result["rows"] if "healed" in row), key=lambda row: row["cost"]),
        "recipe_of": lambda row: recipes.get(tuple(row["choice"]), ""),
        "is_uniform": lambda row: any(result["rows"][each["row"]] is row for each in result["baselines"]),
        "KINDS": KINDS,
        "costs": COSTS,
        "cells": cells,
        "windows": any(each["kind"] == "attention" for each in result["variables"]),
        "columns": ["what is changed"] if wide else [each["name"] for each in result["variables"]],
        "ms": _milliseconds,
        "option": option,
        "number": _number,
        "percent": _percent,
        "changed": lambda row: _changed(result, row),
        "coefficient": _coefficient,
        "front": figure(lambda axes: _draw_front(axes, result), 5.6, 3.8),
        "ranks": figure(lambda axes: _draw_ranks(axes, result), 4.2, 3.8),
    }
    return render_page(f"Search over {result['model']}", TEMPLATE, values)


def _changed(result: dict[str, Any], row: dict[str, Any]) -> tuple[str, str]:
    """The name of what a single change changes, and its option."""
    place = next(place for place, option in enumerate(row["choice"]) if option)
    variable = result["variables"][place]
    return variable["name"], _option(variable, row["choice"][place])


def _option(variable: dict[str, Any], option: int) -> str:
    value = variable["options"][option]
    if variable["kind"] == "layer" and not value:
        return "gone"
    if variable["kind"] == "attention":
        return f"{value:g} tokens" if value > 1 else "itself alone"
    return f"{value:g} bits" if variable["kind"] == "bits" else f"{100 * value:g} %"


def _summary(result: dict[str, Any], choice: Sequence[int]) -> str:
    """The changed variables, those of one kind and option together."""
    found: dict[str, list[str]] = {}
    for each, option in zip(result["variables"], choice, strict=True):
        if option:
            found.setdefault(_option(each, option), []).append(each["name"].removeprefix("model.layers."))
    return "; ".join(f"{option}: {', '.join(names)}" for option, names in sorted(found.items()))


def _coefficient(name: str, value: float) -> str:
    """What a part of a fitted latency counts."""
    if name == "a_layer":
        return f"{_milliseconds(value)} ms a layer"
    if name in ALONE:
        return f"{_number(value)} times what {ALONE[name]} take alone"
    return f"{_number(1e9 * value)} ns for each number that becomes an integer or ceases to be one"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _number(value: float) -> str:
    return f"{value:.3g}"


def _draw_front(axes: Axes, result: dict[str, Any]) -> None:
    """Every combination, the uniform ones apart, and the measured front as a line."""
    rows = result["rows"]
    front = [rows[entry["row"]] for entry in result["front"]]
    healed = [row for row in rows if "healed" in row]
    uniform = [rows[entry["row"]] for entry in result["baselines"]]
    for of, color, size, label in (
        (rows, BEFORE, 3, "measured"),
        (uniform, OTHERS[0], 6, "uniform"),
        (front, AFTER, 5, "front"),
    ):
        shares, losses = [100 * row["share"] for row in of], [max(row["divergence"], SMALLEST) for row in of]
        axes.plot(shares, losses, "o", markersize=size, color=color, label=label)
    axes.plot([100 * row["share"] for row in front], [max(row["divergence"], SMALLEST) for row in front], color=AFTER)
    if healed:
        shares = [100 * row["share"] for row in healed]
        axes.plot(shares, [max(row["healed"], SMALLEST) for row in healed], "*", color=OTHERS[1], label="healed")
    axes.set_yscale("log")
    axes.set_xlabel(f"{result['cost']}, % of the network")
    axes.set_ylabel(f"divergence, {result['unit']}")
    axes.legend(frameon=False, fontsize=8)


def _draw_ranks(axes: Axes, result: dict[str, Any]) -> None:
    """What was predicted beside what was measured, of all but the network as it is."""
    groups = {
        "fitted": ("combination", "near the front"),
        "single": ("single",),
        "after it": ("uniform", "front", "second round"),
    }
    for (label, kinds), color in zip(groups.items(), (BEFORE, OTHERS[0], AFTER), strict=True):
        own = [row for row in result["rows"] if row["kind"] in kinds]
        pairs = [(max(row["predicted"], SMALLEST), max(row["divergence"], SMALLEST)) for row in own]
        axes.plot([x for x, _ in pairs], [y for _, y in pairs], "o", markersize=4, color=color, label=label)
    axes.axline((SMALLEST, SMALLEST), slope=1, color=BEFORE, linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("predicted")
    axes.set_ylabel("measured")
    axes.legend(frameon=False, fontsize=8)
