"""What report pages share: style, filters, figures drawn into the page. A page needs no other file and no network."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from penjing.core.progress import count, duration, megabytes, volume

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEFORE, AFTER, OTHERS = "#9aa5b1", "#2f6f4f", ("#b7791f", "#2b6cb0", "#9b2c2c", "#6b46c1", "#d53f8c")

FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1f2933; }
table { border-collapse: collapse; margin: 1rem 0; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; vertical-align: top; border-bottom: 1px solid #d9e2ec; }
td { white-space: nowrap; }
td code, td.text { white-space: normal; }
td small { display: block; color: #616e7c; }
th:first-child, td:first-child, .two th:nth-child(2), .two td:nth-child(2) { text-align: left; }
code, pre { background: #f0f4f8; padding: .1rem .3rem; }
pre { padding: .8rem; overflow-x: auto; }
svg { max-width: 100%; height: auto; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; }
.wide { overflow-x: auto; }
</style></head><body>
<h1>{{ title }}</h1>
{{ body }}
</body></html>
"""


def render_page(title: str, template: str, values: dict[str, Any]) -> str:
    """A page: the Jinja `template` filled with `values`, every one escaped unless it is `Markup`."""
    body = Markup(_compiled(template).render(values))
    return _compiled(FRAME).render(title=title, body=body)


@cache
def _compiled(template: str) -> Template:
    """Compiled once in a process, which takes longer than filling it."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {
        "megabytes": megabytes,
        "volume": volume,
        "count": count,
        "duration": duration,
        "ranged": ranged,
    }
    return environment.from_string(template)


def ranged(text: str) -> Markup:
    """A value with its interval in brackets, such as "93.52 % (93.01–94.00)", for a cell: the interval below it."""
    value, bracket, interval = text.partition(" (")
    return Markup("{} <small>({}</small>").format(value, interval) if bracket else Markup.escape(text)


def figure(draw: Callable[[Axes], None], width: float, height: float) -> Markup:
    """An inline SVG of `width` × `height` inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # hashsalt and no metadata: the same report gives the same page
    with rc_context({"svg.hashsalt": "penjing", "svg.fonttype": "none", "font.size": 9, "text.parse_math": False}):
        drawing = Figure(figsize=(width, height), layout="constrained")
        axes = drawing.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        out = io.StringIO()
        drawing.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = out.getvalue()
    # inside HTML the name spaces are known, so that a page holds no address at all
    return Markup(re.sub(r' xmlns(:xlink)?="[^"]*"', "", text[text.index("<svg") :], count=2))
