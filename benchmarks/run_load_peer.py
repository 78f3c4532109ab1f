"""The figures of `penjing bench server --openai` beside aiperf's, of the same requests; appends rows.

    python benchmarks/run_load_peer.py          # a few minutes

Both send the same bodies at the same times, in turns: first to a server whose times are known, so that both can be held
to the truth, then to a front. That has no prefix cache, so that the first of them does not make it faster for the
second. Rows are medians of the rounds, ours with aiperf's as the baseline: two clients that measure the same thing have
a ratio of 1. aiperf counts a request's time from when it was sent to its last text, we from when it was meant to be
sent to the end of the answer. A median is the mean of the middle two there, and the lower of the two here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from lib.chaos_server import served
from lib.known_server import MODEL, known_figures, known_server
from lib.models import ROOT, add_arguments, make_models, say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded
from penjing.core.errors import SetupError
from penjing.serve.bench.load import Asked, Scenario, make_load
from penjing.serve.bench.open_loop import bench_open_loop

SCRIPT = ROOT / "benchmarks" / "peers" / "aiperf.sh"
PROGRAM = ROOT / "build" / "peers" / "aiperf" / "venv" / "bin" / "aiperf"
VERSION = "0.13.0"
SECONDS = 600
GOALS = (2.0, 0.1)
FIGURES = {  # ours, aiperf's, unit
    "first_token_p50": ("first_token_ms", "time_to_first_token", "p50", "ms"),
    "first_token_p90": ("first_token_ms", "time_to_first_token", "p90", "ms"),
    "per_token_p50": ("per_token_ms", "inter_token_latency", "p50", "ms"),
    "whole_answer_p50": ("whole_answer_ms", "request_latency", "p50", "ms"),
    "requests_per_second": ("requests_per_second", "request_throughput", "avg", "requests/s"),
    "tokens_per_second": ("tokens_per_second", "output_token_throughput", "avg", "tok/s"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--scenario", default="chat", choices=("chat", "long-prompt", "shared-prefix", "burst"))
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=30.0, help="in which requests are sent")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    checkpoint, artifact = make_models(arguments.checkpoint, arguments.model)
    subprocess.run(["bash", str(SCRIPT)], check=True)
    warn_if_busy()
    scenario: Scenario = arguments.scenario
    load = make_load(scenario, arguments.rate, arguments.seconds)
    with known_server() as address:
        ours, theirs = in_turns(load, scenario, arguments, address, MODEL, checkpoint)
    known = known_figures(load)
    rows = load_rows("known/penjing", ours, [known], "the times that the server keeps")
    rows += load_rows("known/aiperf", theirs, [known], "the times that the server keeps")
    with served(artifact.absolute(), "enable_prefix_caching=false") as patient:
        address = f"127.0.0.1:{patient.front_port}"
        ours, theirs = in_turns(load, scenario, arguments, address, patient.model, checkpoint)
    rows += load_rows(scenario, ours, theirs, "aiperf")
    append("load_peer", rows, arguments.results)
    return 0


def in_turns(
    load: list[Asked], scenario: Scenario, arguments: argparse.Namespace, address: str, model: str, tokenizer: Path
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Our figures of each round and aiperf's, the first round left out since it warms caches up.

    Raises:
        SetupError: a request had no whole answer.
    """
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    requests = [{"timestamp": 1000 * asked.at, "payload": asked.body(model)} for asked in load]
    for turn in range(arguments.rounds + 1):
        figures, _ = bench_open_loop(address, scenario, arguments.rate, arguments.seconds, GOALS)
        with TemporaryDirectory() as folder:
            other = ask_aiperf(Path(folder), requests, address, model, tokenizer)
        if figures["complete"] != len(load) or other["request_count"]["avg"] != len(load):
            raise SetupError(
                f"of {len(load)} requests {figures['complete']} of ours and {other['request_count']['avg']:.0f} of "
                "aiperf's had whole answers; take a lower --rate"
            )
        if turn > 0:
            ours.append({name: our_figure(figures, *keys) for name, keys in FIGURES.items()})
            theirs.append({name: other[keys[1]][keys[2]] for name, keys in FIGURES.items()})
        say(f"round {turn}/{arguments.rounds}")
    return ours, theirs


def our_figure(figures: dict[str, Any], ours: str, _theirs: str, share: str, _unit: str) -> float:
    found = figures[ours]
    return found[share] if isinstance(found, dict) else found


def load_rows(name: str, values: list[dict[str, float]], others: list[dict[str, float]], baseline: str) -> list[Row]:
    """A row of each figure, the median of the rounds beside that of `others`."""
    return [
        new_row(
            "load_peer", f"{name}/{figure}", median(each[figure] for each in values), keys[3], runs=len(values),
            baseline=baseline, baseline_value=median(each[figure] for each in others),
            more_versions={"aiperf": VERSION},
        )
        for figure, keys in FIGURES.items()
    ]  # fmt: skip


def ask_aiperf(
    folder: Path, requests: list[dict[str, Any]], address: str, model: str, tokenizer: Path
) -> dict[str, Any]:
    """What aiperf says of `requests`, bodies with times in milliseconds.

    Raises:
        SetupError: it wrote no report.
    """
    trace = folder / "load.jsonl"
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests))
    command = [str(PROGRAM), "profile", "--model", model, "--url", f"http://{address}", "--endpoint-type", "chat"]
    command += ["--streaming", "--input-file", str(trace), "--custom-dataset-type", "mooncake_trace"]
    command += ["--fixed-schedule", "--use-server-token-count", "--tokenizer", str(tokenizer), "--ui", "none"]
    command += ["--artifact-dir", str(folder / "out")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    report = folder / "out" / "profile_export_aiperf.json"
    if not report.exists():
        raise SetupError(f"aiperf wrote no report:\n{(done.stdout + done.stderr)[-3000:]}")
    return json.loads(report.read_text())


if __name__ == "__main__":
    sys.exit(guarded(main))
