"""The page of a run that learns from rewards: how rewards and right answers move as the model leaves its reference."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penjing.core.files import atomic_write_text
from penjing.core.pages.page import AFTER, BEFORE, OTHERS, figure, render_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE_NAME = "report.html"
Records = Sequence[dict[str, Any]]
_COLORS = {"reward": AFTER, "gold": OTHERS[0]}
_CURVES = (
    "length",
    "ended",
    "entropy",
    "silent",
    "asked",
    "clipped",
    "gap",
    "kl",
    "value",
    "value_error",
    "rollout_share",
)

PAGE = """
<p>{{ steps }} updates. The mean reward of sampled answers was {{ "%.3f" | format(first) }} in the first record and is
<strong>{{ "%.3f" | format(last) }}</strong> in the last{% if judged %}; held-out prompts reach
<strong>{{ "%.3f" | format(judged) }}</strong>{% endif %}.{% if gold %} <code>gold</code> is what is right and was never
learnt from: where it falls while the reward rises, the reward is being gamed.{% endif %}</p>
<div class="figures">{% for drawing in drawings %}{{ drawing }}{% endfor %}</div>
{% if answers %}<h2>Held-out answers of the last evaluation</h2>
<div class="wide"><table><tr><th>prompt</th><th>answer</th><th>reward</th></tr>
{% for each in answers %}<tr><td class="text">{{ each.prompt }}</td><td class="text">{{ each.answer }}</td>
<td>{{ "%g" | format(each.reward) }}</td></tr>
{% endfor %}</table></div>{% endif %}
"""


def write_rollout_page(run: Path, title: str, kept: int) -> Path | None:
    """Write report.html of a run folder from its records; None where there are none yet.

    Args:
        kept: answers that an evaluation keeps at most.
    """
    records = _lines(run / "metrics.jsonl")
    if not (steps := [each for each in records if _finite(each.get("reward"))]):
        return None
    atomic_write_text(run / PAGE_NAME, rollout_page(title, steps, records, _lines(run / "answers.jsonl")[-kept:]))
    return run / PAGE_NAME


def rollout_page(title: str, steps: Records, records: Records, answers: Records) -> str:
    """The HTML; needs no other file and no network.

    Args:
        steps: records of updates, which have a reward.
        records: all of them, evaluations too.
        answers: to held-out prompts.
    """
    judged = [each["eval/reward"] for each in records if _finite(each.get("eval/reward"))]
    drawings = [figure(lambda axes: _draw_rewards(axes, steps, records, "step"), 4.6, 2.8)]
    if any(_finite(each.get("kl")) for each in steps):
        drawings.append(figure(lambda axes: _draw_rewards(axes, steps, records, "kl"), 4.6, 2.8))
    known = [name for name in _CURVES if any(_finite(each.get(name)) for each in steps)]
    drawings += [figure(lambda axes, name=name: _draw_curve(axes, steps, name), 3.0, 2.0) for name in known]
    values = {
        "steps": max(each["step"] for each in steps), "first": steps[0]["reward"], "last": steps[-1]["reward"],
        "judged": judged[-1] if judged else None, "gold": any("gold" in each for each in steps),
        "drawings": drawings, "answers": answers,
    }  # fmt: skip
    return render_page(title, PAGE, values)


def _draw_rewards(axes: Axes, steps: Records, records: Records, over: str) -> None:
    """What was learnt from and what is right, over the steps or over the distance from the reference."""
    for name, color in _COLORS.items():
        points = [(each[over], each[name]) for each in steps if _finite(each.get(name)) and _finite(each.get(over))]
        if points:
            axes.plot(*zip(*points, strict=True), "o" if over == "kl" else "-", markersize=3, color=color, label=name)
        held = [(each["step"], each[f"eval/{name}"]) for each in records if _finite(each.get(f"eval/{name}"))]
        if held and over == "step":
            axes.plot(*zip(*held, strict=True), "o", markersize=5, color=color, label=f"{name}, held out")
    axes.set_xlabel("distance from the reference, nats a token" if over == "kl" else "step")
    axes.set_ylabel("mean of sampled answers")
    axes.legend(frameon=False)


def _draw_curve(axes: Axes, steps: Records, name: str) -> None:
    some = [each for each in steps if _finite(each.get(name))]
    axes.plot([each["step"] for each in some], [each[name] for each in some], color=BEFORE)
    axes.set_xlabel("step")
    axes.set_ylabel(name)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; none if there is no file. A last line that was cut off is passed over."""
    found = []
    # not splitlines: answers keep line separators such as U+2028 within a line of JSON
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # the run was killed while it wrote this, or nothing follows the last break
            continue
    return found
