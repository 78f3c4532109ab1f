"""Measure what Triton server costs: the engine through it and in process, in interleaved rounds; appends rows.

python benchmarks/run_server.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lib.contestants import METRICS, Outcome, penjing, penjing_server, run_rounds
from lib.models import add_arguments, make_models, make_prompts, say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded
from penjing.core.errors import SetupError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()

    _, artifact = make_models(arguments.checkpoint, arguments.model)
    warn_if_busy()
    outcome = run_rounds(
        [penjing(artifact), penjing_server(artifact)],
        make_prompts(artifact),
        rounds=arguments.rounds,
        runs=arguments.runs,
        threads=arguments.threads,
        say=say,
    )
    append("server", server_rows(outcome, arguments.rounds * arguments.runs), arguments.results)
    return 0


def server_rows(outcome: Outcome, runs: int, prefix: str = "") -> list[Row]:
    """A row for each figure through Triton server; `ratio` is its share of the same figure in process.

    Metrics begin with `prefix`.

    Raises:
        SetupError: either of them failed.
    """
    for reason in outcome.missing.values():
        raise SetupError(reason)
    return [
        new_row(
            "server",
            f"{prefix}{metric}",
            outcome.median("penjing_server", metric),
            "tok/s",
            runs=runs,
            baseline=f"{outcome.label('penjing')} in process",
            baseline_value=outcome.median("penjing", metric),
        )
        for metric in METRICS
    ]


if __name__ == "__main__":
    sys.exit(guarded(main))
