"""bench_llama_cpp.py MODEL PROMPTS RUNS THREADS: llama.cpp's own two benchmarks, flash attention on.

They make prompts of the same lengths themselves; speed does not depend on which tokens those are.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from figures import NEW_1, NEW_16, read_prompts, report

TOOLS = Path(__file__).resolve().parents[2] / "build/peers/llama_cpp/build/bin"


def lines_of(tool: str, *arguments: object) -> list[dict]:
    command = [str(TOOLS / tool), *map(str, arguments)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def main(model: str, prompts_path: str, runs: int, threads: int) -> None:
    prompts = read_prompts(prompts_path)
    long, streams, length = len(prompts["p512"]), len(prompts["p16"]), len(prompts["p16"][0])
    alone = lines_of(
        "llama-bench", "-m", model, "-t", threads, "-p", long, "-n", NEW_1 - 1, "-fa", 1, "-r", runs, "-o", "jsonl"
    )
    context = streams * (length + NEW_16) + 64
    options = ("-c", context, "-b", 2048, "-ub", 512, "-npp", length, "-ntg", NEW_16, "-npl", streams, "-fa", "on")
    together = [
        lines_of("llama-batched-bench", "-m", model, "-t", threads, *options, "--output-format", "jsonl")[0]
        for _ in range(runs)
    ]
    build = alone[0]["build_number"]
    figures = {
        "prefill_512": next(row["avg_ts"] for row in alone if row["n_prompt"] == long),
        "one_stream": next(row["avg_ts"] for row in alone if row["n_gen"] == NEW_1 - 1),
        "streams_16": median(streams * NEW_16 / row["t"] for row in together),
        "decode_only_16": median(row["speed_tg"] for row in together),
    }
    kind = Path(model).stem.split("-")[-1]  # of "q4_0.gguf" and of "gemma3-q4_0.gguf"
    report(f"llama.cpp {build} {kind.upper()}", figures)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
