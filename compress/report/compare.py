"""`penjing report`: the stages of several runs of any family in one table and one page.

Runs that measured the same quality stand beside each other; those of another one form a group of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from penjing.compress.report.pareto import Point, draw_pareto
from penjing.compress.report.schema import Report, Stage, read_report
from penjing.compress.report.text import READINGS, answer_loss_text, answer_text, loss_text, quality_text
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text
from penjing.core.pages.page import figure, render_page
from penjing.core.progress import count, duration, error_console, volume

TEMPLATE = """<p>Each row is a stage: the network after one step of a recipe. The first stage of a run is the model that
it began with.</p>
{% for group in groups %}<h2>{{ group.quality | capitalize }}</h2>
<p>{{ group.meaning }}</p>
<div class="figures">{{ group.figures | join }}</div>
<div class="wide"><table class="two"><tr>{% for name in group.columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in group.rows %}<tr>{% for cell in row %}<td>{{ cell | ranged }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endfor %}{% if answers %}<h2>Answers</h2>
<div class="wide"><table class="two"><tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in answers %}<tr>{% for cell in row %}<td>{{ cell | ranged }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endif %}<p>{{ note }}</p>
<h2>Make them again</h2>
{% for run in runs %}<h3>{{ run.name }}</h3><pre>{{ run.report.command }}</pre>
<p>{{ run.report.processor.name }}{% for name, version in run.report.versions.items() %}, {{ name }} {{ version }}
{%- endfor %}</p>{% endfor %}
"""
NOTE = (
    "Sizes, losses and speeds are against the first stage of the same run; speeds were measured in turns within it. "
    "Absolute times of different runs are not compared: the machine may have changed between them."
)
ANSWERS = ("run", "stage", "asked", "measure", "value", "lost")


@dataclass(frozen=True)
class Run:
    """A result and the name that tells it apart."""

    name: str
    report: Report


def report_runs(folders: Sequence[Path], page: Path | None = None) -> list[dict[str, Any]]:
    """Show the stages of all runs on standard error, write `page` if one is asked for, and return the rows.

    Raises:
        InputError: as `read_runs` says.
        SetupError: the page cannot be written.
    """
    runs = read_runs(folders)
    if page is not None:
        atomic_write_text(page, comparison_page(runs))
    print_comparison(runs)
    return comparison(runs)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The reports of `folders`, named by their folders as shortly as tells them apart.

    Raises:
        InputError: none, or one is missing, damaged, or of another schema.
    """
    if not folders:
        raise InputError("there is nothing to compare; give the folders of results")
    reports = [read_report(folder) for folder in folders]
    paths = [folder.parent if folder.is_file() else folder for folder in folders]
    short = [path.resolve().name for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    return [Run(name, report) for name, report in zip(names, reports, strict=True)]


def groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Name of a quality → the runs that measured it, both in the order of `runs`."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.report.first.quality.name, []).append(run)
    return found


def comparison(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A JSON-ready row for each stage of each run: what `table` shows, as numbers.

    `bytes_ratio`, `parameters_ratio`, `macs_ratio` and `speedup` (by case) are against the run's first stage; `lost` is
    a `Change`, or None where samples were not kept.
    """
    rows = []
    for run in runs:
        first = run.report.first
        for stage in run.report.stages:
            change = run.report.lost(stage)
            quality = asdict(stage.quality)
            rows.append(
                {
                    "run": run.name,
                    "family": run.report.family,
                    "stage": stage.name,
                    "kind": stage.kind,
                    "quality": {key: quality[key] for key in ("name", "value", "low", "high", "samples")},
                    "lost": None if change is None else asdict(change),
                    **stage.size.model_dump(),
                    "parameters_ratio": stage.size.parameters / first.size.parameters,
                    "bytes_ratio": stage.size.bytes / first.size.bytes,
                    "macs_ratio": _macs_ratio(stage, first),
                    "speedup": _speedups(stage),
                    "seconds": stage.seconds,
                    "answers": [figure.model_dump(mode="json") for figure in stage.answers],
                }
            )
    return rows


def table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Column names, and a row of text for each stage of each run; the runs measured the same quality."""
    quality = runs[0].report.first.quality.name
    cases = list(dict.fromkeys(case for run in runs for stage in run.report.stages for case in stage.by_case()))
    timed = [case.replace(", ", "\n") for case in cases]
    columns = ["run", "stage", "weights", "MACs", quality, "lost", *timed, "took"]
    rows = []
    for run in runs:
        first = run.report.first
        for stage in run.report.stages:
            speedups, share = _speedups(stage), _macs_ratio(stage, first)
            rows.append(
                [
                    run.name,
                    stage.name,
                    f"{volume(stage.size.bytes)} ({stage.size.bytes / first.size.bytes:.1%})",
                    f"{count(stage.size.macs)} ({share:.1%})" if stage.size.macs and share else "",
                    quality_text(stage),
                    "" if stage is first else loss_text(run.report, stage),
                    *(f"{speedups[case]:.2f}×" if case in speedups else "" for case in cases),
                    duration(stage.seconds) if stage.seconds else "",
                ]
            )
    return columns, rows


def answers_table(runs: Sequence[Run]) -> list[list[str]]:
    """A row of text for each figure of what each stage of each run answered: `ANSWERS` are its columns."""
    return [
        [run.name, stage.name, figure.task, figure.measure, answer_text(figure), answer_loss_text(figure)]
        for run in runs
        for stage in run.report.stages
        for figure in stage.answers
    ]


def print_comparison(runs: Sequence[Run]) -> None:
    """A table on standard error for each group of runs."""
    from rich.table import Table

    console = error_console()
    for group in groups(runs).values():
        columns, rows = table(group)
        shown = Table(box=None, pad_edge=False)
        for place, column in enumerate(columns):
            shown.add_column(column, justify="left" if place < 2 else "right", overflow="fold")
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
    if rows := answers_table(runs):
        shown = Table(*ANSWERS, box=None, pad_edge=False)
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
    console.print(NOTE, style="dim")


def comparison_page(runs: Sequence[Run]) -> str:
    """The HTML: for each group Pareto plots of size and speed and the table, then each run's command; it needs no other
    file."""
    shown = []
    for name, group in groups(runs).items():
        columns, rows = table(group)
        shown.append(
            {
                "quality": name,
                "meaning": READINGS[name].meaning,
                "figures": _figures(group),
                "columns": columns,
                "rows": rows,
            }
        )
    values = {"groups": shown, "answers": answers_table(runs), "columns": ANSWERS, "note": NOTE, "runs": runs}
    return render_page("Compression runs compared", TEMPLATE, values)


def _figures(runs: Sequence[Run]) -> list[Markup]:
    stages = [(run, stage) for run in runs for stage in run.report.stages]
    sizes = [Point(stage.name, stage.size.bytes / 1e6, stage.quality, series=run.name) for run, stage in stages]
    figures = [figure(lambda axes: draw_pareto(axes, sizes, "weights, MB"), 4.6, 3.8)]
    common = [case for case in runs[0].report.cases() if all(case in run.report.cases() for run in runs)]
    if common:
        speeds = [
            Point(stage.name, _speedups(stage)[common[-1]], stage.quality, larger=True, series=run.name)
            for run, stage in stages
        ]
        label = f"speed against the run's first stage ({common[-1]})"
        figures.append(figure(lambda axes: draw_pareto(axes, speeds, label), 4.6, 3.8))
    return figures


def _speedups(stage: Stage) -> dict[str, float]:
    return {case: row.speedup for case, row in stage.by_case().items()}


def _macs_ratio(stage: Stage, first: Stage) -> float | None:
    return stage.size.macs / first.size.macs if stage.size.macs and first.size.macs else None
