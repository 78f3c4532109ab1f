"""Ask a server for everything that its own OpenAPI document allows, and much that it does not; appends rows.

    python benchmarks/run_schema_fuzz.py build/decoder-tiny      # half an hour; a small decoder, since it answers

Schemathesis makes the requests and holds each answer to the document: no status of 500 and more, none that is not
described, bodies of the right type and form, refusals of what breaks the schema, and the methods that a path takes.
That everything that fulfils the schema is accepted is not asked for, since a schema cannot say which tokens a model
has, or which fields exclude each other. In the document that it reads, the model is the one that is served and answers
are short; with a random name nearly every request would end at the first look.

The server is one, and its paths are asked one after the other, so that an error of schemathesis' own ends the requests
of one path: that one is asked once more with another seed, and `tool_errors` counts such errors, whose words are shown.

`failures` are requests, `restarts` processes that had to be started again, `cache_held_after` the share of the
key-value cache that is still in use when all have their answers, `canaries_different` greedy answers that are not the
same as before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

from lib.chaos_server import Patient, served, wait_until
from lib.models import ROOT, say
from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded
from penjing.core.errors import SetupError

SCRIPT = ROOT / "benchmarks" / "peers" / "schemathesis.sh"
PROGRAM = ROOT / "build" / "peers" / "schemathesis" / "venv" / "bin" / "schemathesis"
CONTEXT = 64  # tokens of prompt and answer, so that 64 answers to a request are short too
SECONDS = 4 * 3600  # ten thousand requests took an hour on two cores with fifteen other processes
IDLE_SECONDS = 120.0
ATTEMPTS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a decoder")
    parser.add_argument("--cases", type=int, default=2000, help="random requests of each path at most")
    parser.add_argument("--seed", type=int, default=1, help="another one makes other requests")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    subprocess.run(["bash", str(SCRIPT)], check=True)
    with served(arguments.model.absolute(), f"max_model_len={CONTEXT}") as patient:
        append("schema_fuzz", fuzz(patient, arguments.cases, arguments.seed), arguments.results)
    return 0


def fuzz(patient: Patient, cases: int, seed: int) -> list[Row]:
    """Rows of one run."""
    pids, before = patient.pids(), patient.canaries()
    url = f"http://127.0.0.1:{patient.front_port}"
    document = narrowed(url, patient.model)
    sent = failures = tool_errors = 0
    versions: dict[str, str] = {}
    for path in document["paths"]:
        for attempt in range(ATTEMPTS):
            with TemporaryDirectory() as folder:
                report = ask(Path(folder), document, path, url, cases, seed + 1000 * attempt)
            versions = {"schemathesis": report["schemathesis_version"]}
            sent += report["test_cases"]["generated"]
            failures += report["test_cases"]["with_failures"]
            tool_errors += len(report["errors"])
            say(f"{path}: {report['test_cases']}, {len(report['errors'])} errors of schemathesis' own; {sent} so far")
            for failure in report["failures"]:
                say(json.dumps(failure)[:1000])
            if report["complete"] and not report["errors"]:
                break
            say(f"ended early, {report['stop_reason']}: {json.dumps(report['errors'])}\n{report['said'][-5000:]}")
        else:
            raise SetupError(f"schemathesis came to no end at {path} in {ATTEMPTS} attempts; its words stand above")
    wait_until(lambda: patient.figures()["num_requests_running"] == 0, IDLE_SECONDS)
    held = 100 * patient.figures()["kv_cache_usage_perc"]
    restarts = sum(patient.pids()[name] != pid for name, pid in pids.items())
    different = sum(one != other for one, other in zip(before, patient.canaries(), strict=True))
    values = {
        "requests": (sent, "requests"),
        "failures": (failures, "requests"),
        "tool_errors": (tool_errors, "errors"),
        "restarts": (restarts, "processes"),
        "cache_held_after": (held, "%"),
        "canaries_different": (different, "answers"),
    }
    return [
        new_row("schema_fuzz", name, value, unit, runs=sent, more_versions=versions)
        for name, (value, unit) in values.items()
    ]


def narrowed(url: str, model: str) -> dict[str, Any]:
    """The server's document, for its own model alone."""
    with urlopen(f"{url}/openapi.json", timeout=60) as answer:
        document = json.load(answer)
    document["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["schema"] = {"enum": [model, "other"]}
    for body in document["components"]["schemas"].values():
        fields = body.get("properties", {})
        if "model" in fields:
            fields["model"] = {"enum": [model] if "model" in body["required"] else [model, None]}
    return document


def ask(folder: Path, document: dict[str, Any], path: str, url: str, cases: int, seed: int) -> dict[str, Any]:
    """Schemathesis' report of one path, and under `said` what it wrote: the report names its own errors by kind alone.

    Raises:
        SetupError: it wrote none.
    """
    (folder / "openapi.json").write_text(json.dumps(document))
    command = [str(PROGRAM), "run", "openapi.json", "--url", url, "--seed", str(seed), "--max-examples", str(cases)]
    command += ["--phases", "coverage,fuzzing", "--exclude-checks", "positive_data_acceptance", "--include-path", path]
    command += ["--continue-on-failure", "--no-shrink", "--suppress-health-check", "all", "--request-timeout", "120"]
    command += ["--report", "json", "--report-json-path", "report.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    if not (folder / "report.json").exists():
        raise SetupError(f"schemathesis wrote no report:\n{(done.stdout + done.stderr)[-2000:]}")
    return json.loads((folder / "report.json").read_text()) | {"said": done.stdout}


if __name__ == "__main__":
    sys.exit(guarded(main))
