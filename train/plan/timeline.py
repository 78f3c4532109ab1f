"""A pipeline's timeline as a figure: one row a rank, forward and backward work in colour, what is blank is bubble."""

from __future__ import annotations

from pathlib import Path

from penjing.core.errors import ConfigError
from penjing.core.files import atomic_write_bytes
from penjing.train.pipeline.simulate import Timeline

_INK = "#7d8590"  # at least 3:1 on white and on dark pages, as in the other figures
_COLORS = {
    "F": ("#4c78c8", "forward"),
    "B": ("#2f9e6e", "backward"),
    "I": ("#2f9e6e", "backward, inputs"),
    "W": ("#c2622d", "backward, weights"),
}
_MANY = 4000  # shapes beyond which the bars become an image inside the SVG


def draw_timeline(line: Timeline, out: Path, title: str) -> Path:
    """Draw `line` into an SVG file, readable on light and dark pages.

    Raises:
        ConfigError: `out` is no .svg file.
    """
    if out.suffix != ".svg":
        raise ConfigError(f"--out {out}: the figure is an SVG; name a file that ends in .svg")
    import io

    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "penjing", "font.family": "sans-serif"})
    figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.16 * max(line.ranks, 6)), layout="constrained")
    figure.patch.set_alpha(0)
    axis.set_facecolor("none")
    chunks = len({span.work.stage for span in line.spans}) // line.ranks
    for kind, (color, label) in _COLORS.items():
        named = False
        for rank in range(line.ranks):
            for chunk in range(chunks):  # the later chunks of a rank are paler
                spans = [
                    (span.start, span.end - span.start)
                    for span in line.spans
                    if (span.rank, span.work.kind, span.work.stage // line.ranks) == (rank, kind, chunk)
                ]
                if spans:
                    axis.broken_barh(
                        spans, (rank - 0.42, 0.84), facecolors=color, alpha=1 - 0.45 * chunk / chunks, linewidth=0,
                        label=None if named else label, rasterized=len(line.spans) > _MANY,
                    )  # fmt: skip
                    named = True
    axis.set_ylim(line.ranks - 0.5, -0.5)
    axis.set_xlim(0, line.makespan)
    axis.set_xlabel("seconds", color=_INK)
    axis.set_ylabel("rank", color=_INK)
    axis.tick_params(colors=_INK)
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)
    axis.set_title(title, loc="left", fontsize=10, color=_INK)
    axis.legend(frameon=False, labelcolor=_INK, fontsize=8, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    data = io.BytesIO()
    figure.savefig(data, format="svg", transparent=True, metadata={"Date": None}, dpi=200)
    pyplot.close(figure)
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(out, data.getvalue())
    return out
