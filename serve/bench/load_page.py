"""The page of a load: its figures, and when requests came and how long they waited."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penjing.core.files import atomic_write_text
from penjing.core.pages.page import AFTER, BEFORE, OTHERS, figure, render_page
from penjing.serve.bench.intervals import SHARES
from penjing.serve.bench.open_loop import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = """
<p>{{ figures.requests | count }} requests of the scenario <code>{{ figures.scenario }}</code> were sent to
<code>{{ figures.server }}</code> at {{ "%g" | format(figures.rate) }} a second on average, at times that do not depend
on the answers; what a request waited is counted from the moment at which it was meant to be sent.
{{ figures.complete | count }} were answered in full, {{ figures.refused | count }} refused and
{{ figures.failed | count }} failed{% for each in figures.failures %}{{ ":" if loop.first else ";" }}
{{ each.requests | count }} by “{{ each.why }}”{% endfor %}.</p>
<p>Good are {{ "%.1f" | format(100 * figures.goodput.share) }} % of all requests
({{ "%.2f" | format(figures.goodput.requests_per_second) }} a second): their first token came within
{{ "%g" | format(figures.goals.first_token_ms) }} ms, and the others within
{{ "%g" | format(figures.goals.per_token_ms) }} ms each on average. All answers together had
{{ "%.1f" | format(figures.tokens_per_second) }} tokens a second.</p>
<div class="wide"><table><tr><th>milliseconds</th>{% for share in shares %}<th>p{{ share }}</th>{% endfor %}</tr>
{% for name, key in rows %}<tr><td>{{ name }}</td>{% for share in shares %}
<td>{{ "%.1f" | format(figures[key]["p%d" % share]) if figures[key] else "–" }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<div class="figures">{{ waits }}{{ curves }}</div>
"""
ROWS = (
    ("to the first token", "first_token_ms"),
    ("between two pieces of text", "between_pieces_ms"),
    ("a token after the first", "per_token_ms"),
    ("to the end of the answer", "whole_answer_ms"),
    ("sent late by this client", "sent_late_ms"),
)


def write_load_page(figures: dict[str, Any], outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the page of a load to a file."""
    atomic_write_text(path, load_page(figures, outcomes))


def load_page(figures: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """A page that needs no other file and no network."""

    def waits(axes: Axes) -> None:
        complete = [outcome for outcome in outcomes if outcome.complete]
        others = [outcome.asked.at for outcome in outcomes if not outcome.complete]
        first = [outcome.arrivals[0] for outcome in complete]
        axes.scatter([outcome.asked.at for outcome in complete], first, s=8, color=AFTER, label="first token")
        axes.scatter(others, [0.0] * len(others), s=14, marker="x", color=OTHERS[2], label="refused or failed")
        axes.axhline(figures["goals"]["first_token_ms"] / 1000, color=BEFORE, linewidth=1, label="goal")
        axes.set_xlabel("meant to be sent after (s)")
        axes.set_ylabel("first token after (s)")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)

    def curves(axes: Axes) -> None:
        complete = [outcome for outcome in outcomes if outcome.complete]
        first = [outcome.arrivals[0] for outcome in complete]
        gaps = [gap for outcome in complete for gap in outcome.gaps]
        for name, values, color in (("first token", first, AFTER), ("between pieces", gaps, OTHERS[1])):
            if ordered := sorted(values):
                shares = [100 * (rank + 1) / len(ordered) for rank in range(len(ordered))]
                axes.step(ordered, shares, where="post", color=color, label=name)
        axes.set_xlabel("seconds")
        axes.set_ylabel("percent within")
        axes.set_ylim(0, 100)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)

    values = {"figures": figures, "shares": SHARES, "rows": ROWS}
    drawn = {"waits": figure(waits, 5.6, 3.0), "curves": figure(curves, 5.6, 3.0)}
    return render_page(f"Load: {figures['scenario']} at {figures['rate']:g} a second", PAGE, values | drawn)
