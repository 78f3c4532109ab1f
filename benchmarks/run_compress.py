"""Rows of a decoder's compression: size, perplexity before and after, time and memory, as the result's report has them.

    python benchmarks/run_compress.py                   # recipes/smollm2-int8.toml; an artifact that is there is kept
    python benchmarks/run_compress.py RECIPE --force    # compress again, to time it

Rows are named RECIPE/METRIC, those of smollm2-int8.toml METRIC alone. The report keeps the loss of each window, so that
there is a row of the rise of perplexity over the same windows too, and of the ends of its 95 % interval.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lib.rows import RESULTS, Row, append, new_row

from penjing.compress.measure.evaluate import Change, EvaluateSettings, Quality, compare, perplexity
from penjing.compress.report.schema import Report, read_report
from penjing.compress.run import run_recipe
from penjing.core.cli import guarded
from penjing.core.progress import progress_bar

DEFAULT = Path("recipes/smollm2-int8.toml")
ORIGINAL = "the FP32 checkpoint"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=DEFAULT)
    parser.add_argument("--force", action="store_true", help="compress again")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--name", help="of the rows; by default the recipe's")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    with progress_bar() as progress:
        made = run_recipe(arguments.recipe, arguments.overrides, force=arguments.force, progress=progress)
    append("compress", report_rows(read_report(made), arguments.name or arguments.recipe.stem), arguments.results)
    return 0


def report_rows(report: Report, name: str) -> list[Row]:
    """The rows of a report; `name` is the recipe's."""
    first, last = report.stages[0], report.stages[-1]
    made = report.stages[1:]
    prefix = "" if name == DEFAULT.stem else f"{name}/"

    def row(metric: str, value: float, unit: str, original: float | None = None) -> Row:
        baseline = None if original is None else ORIGINAL
        return new_row("compress", prefix + metric, value, unit, runs=1, baseline=baseline, baseline_value=original)

    rows = [row("size", last.size.bytes, "bytes", first.size.bytes)]
    for before, after in zip(first.quality.parts, last.quality.parts, strict=True):
        rows.append(row(f"perplexity_{before.name}", after.value, "perplexity", before.value))
    if first.quality.record:
        for text, change in rises(first.quality, last.quality).items():
            rows += [
                row(f"perplexity_{text}_rise{end}", 100 * value, "%")
                for end, value in (("", change.value), ("_low", change.low), ("_high", change.high))
            ]
    rows.append(row("seconds", sum(stage.seconds for stage in made), "s"))
    peak = max(stage.peak_memory_bytes for stage in made)
    rows.append(row("peak_memory", peak, "bytes", first.size.bytes))
    return rows


def rises(before: Quality, after: Quality) -> dict[str, Change]:
    """How much the perplexity of each text by itself rises, over the same windows."""
    settings, found = EvaluateSettings(), dict[str, Change]()
    for part, *losses in zip(before.parts, before.outcomes(), after.outcomes(), strict=True):
        old, new = (perplexity({part.name: each.tolist()}, settings) for each in losses)
        found[part.name] = compare(old, new)
    return found


if __name__ == "__main__":
    raise SystemExit(guarded(main))
