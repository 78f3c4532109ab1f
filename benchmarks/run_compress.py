"""Rows of a compression: size, perplexity before and after, time and memory, as the artifact's report has them.

python benchmarks/run_compress.py                   # recipes/smollm2-int8.toml; an artifact that is there is kept
python benchmarks/run_compress.py RECIPE --force    # compress again, to time it
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rows import RESULTS, append, new_row

from penjing.compress.pipeline import compress
from penjing.core.cli import guarded
from penjing.core.progress import progress_bar


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=Path("recipes/smollm2-int8.toml"))
    parser.add_argument("--force", action="store_true", help="compress again")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    with progress_bar() as progress:
        artifact = compress(arguments.recipe, force=arguments.force, progress=progress)
    report = json.loads((artifact / "report.json").read_text())
    original = "the FP32 checkpoint"
    rows = [
        new_row(
            "compress",
            "size",
            report["bytes_int8"],
            "bytes",
            runs=1,
            baseline=original,
            baseline_value=report["bytes_fp32"],
        )
    ]
    rows += [
        new_row(
            "compress",
            f"perplexity_{text}",
            found["int8"],
            "perplexity",
            runs=1,
            baseline=original,
            baseline_value=found["fp32"],
        )
        for text, found in report["perplexity"].items()
    ]
    rows += [
        new_row("compress", "seconds", report["seconds"], "s", runs=1),
        new_row(
            "compress",
            "peak_memory",
            report["peak_memory_bytes"],
            "bytes",
            runs=1,
            baseline=original,
            baseline_value=report["bytes_fp32"],
        ),
    ]
    append("compress", rows, arguments.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
