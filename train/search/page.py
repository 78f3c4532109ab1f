"""The page of a search: how far each trial came, and what each setting did."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penjing.core.pages.page import AFTER, BEFORE, figure, render_page
from penjing.train.search.halving import cost
from penjing.train.search.state import SearchState, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = """
<p>{{ state.trials | length }} trials of <code>{{ state.base }}</code>, {{ "%.1f" | format(runs) }} whole runs of
{{ last }} steps together. The best {{ state.metric }} is <strong>{{ "%.4f" | format(best) }}</strong>, with
{% for key, value in winner.settings.items() %}<code>{{ key }} = {{ shown(value) }}</code>{{ ", " if not loop.last }}
{% endfor %}; the recipe as it was {{ told(0) }}.</p>
{{ curves }}
<div class="figures">{% for drawing in axes %}{{ drawing }}{% endfor %}</div>
<div class="wide"><table><tr><th>trial</th>{% for key in winner.settings %}<th>{{ key }}</th>{% endfor %}
{% for steps, _ in state.rungs %}<th>step {{ steps }}</th>{% endfor %}<th>seconds</th></tr>
{% for number, trial in rows %}<tr><td>{{ number }}</td>
{% for value in trial.settings.values() %}<td>{{ shown(value) }}</td>{% endfor %}
{% for steps, _ in state.rungs %}<td>{{ cell(trial, steps) }}</td>{% endfor %}
<td>{{ "%.0f" | format(trial.seconds) }}</td></tr>
{% if trial.reason %}<tr><td></td><td class="text" colspan="9">{{ trial.reason }}</td></tr>{% endif %}
{% endfor %}</table></div>
"""


def search_page(state: SearchState) -> str:
    """The HTML of a search that has its winner; needs no other file and no network."""
    assert state.winner is not None
    last = state.plan[-1].steps
    sign = 1.0 if state.goal == "lowest" else -1.0

    def order(entry: tuple[int, Trial]) -> tuple[int, float]:
        reached = _reached(entry[1])
        value = entry[1].value(reached, state.metric)
        return -reached, sign * value if math.isfinite(value) else math.inf

    def told(number: int) -> str:
        trial = state.trials[number]
        reached = _reached(trial)
        if math.isfinite(value := trial.value(reached, state.metric)):
            return f"has {value:.4f} at step {reached}"
        return "failed" if trial.reason else f"has no number at step {reached}" if reached else "was not evaluated"

    winner = state.trials[state.winner]
    keys = [key for key, value in winner.settings.items() if not isinstance(value, str | bool)]
    return render_page(
        f"Search over {', '.join(winner.settings)}",
        PAGE,
        {
            "state": state,
            "winner": winner,
            "best": winner.value(last, state.metric),
            "last": last,
            "runs": cost(state.plan) / last,
            "rows": sorted(enumerate(state.trials), key=order),
            "told": told,
            "shown": lambda value: f"{value:.4g}" if isinstance(value, float) else str(value),
            "cell": lambda trial, steps: _cell(trial, steps, state.metric),
            "curves": figure(lambda axes: _draw_curves(axes, state), 9.5, 3.4),
            "axes": [figure(lambda axes, key=key: _draw_key(axes, state, key), 4.6, 2.8) for key in keys],
        },
    )


def _reached(trial: Trial) -> int:
    return max(trial.evaluations, default=0)


def _cell(trial: Trial, steps: int, metric: str) -> str:
    value = trial.value(steps, metric)
    return f"{value:.4f}" if math.isfinite(value) else "failed" if trial.reason else ""


def _draw_curves(axes: Axes, state: SearchState) -> None:
    for number, trial in enumerate(state.trials):
        steps = [each for each in sorted(trial.evaluations) if math.isfinite(trial.value(each, state.metric))]
        color, order = (AFTER, 3) if number == state.winner else (BEFORE, 2)
        values = [trial.value(each, state.metric) for each in steps]
        axes.plot(steps, values, marker="o", markersize=3, color=color, zorder=order)
    axes.set_xscale("log")
    axes.set_xticks([steps for steps, _ in state.rungs], [str(steps) for steps, _ in state.rungs])
    axes.minorticks_off()
    axes.set_xlabel("step")
    axes.set_ylabel(state.metric)


def _draw_key(axes: Axes, state: SearchState, key: str) -> None:
    """The first rung alone: there all trials are compared after equally many steps."""
    first = state.rungs[0][0]
    for number, trial in enumerate(state.trials):
        if math.isfinite(value := trial.value(first, state.metric)):
            color = AFTER if number == state.winner else BEFORE
            axes.plot(float(trial.settings[key]), value, "o", markersize=5, color=color)
    numbers = [float(trial.settings[key]) for trial in state.trials]
    if min(numbers) > 0 and max(numbers) > 10 * min(numbers):
        axes.set_xscale("log")
    axes.set_xlabel(key)
    axes.set_ylabel(f"{state.metric} at step {first}")
