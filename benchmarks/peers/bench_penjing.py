"""bench_penjing.py MODEL PROMPTS RUNS THREADS [KV]: this project's engine in process, run as its peers are."""

import sys
from pathlib import Path

from figures import measure, read_prompts, report

from penjing.core.info import versions
from penjing.serve.bench.engine import run_prompts
from penjing.serve.engine.config import EngineConfig
from penjing.serve.runner.load import load_engine


def main(model: str, prompts_path: str, runs: int, kv_dtype: str = "auto") -> None:
    prompts = read_prompts(prompts_path)
    limits = {"enable_prefix_caching": False, "max_num_sequences": len(prompts["p16"]), "kv_dtype": kv_dtype}
    config = EngineConfig.model_validate(limits)
    engine = load_engine(Path(model), config)

    def seconds(batch, new):
        return run_prompts(engine, batch, new).seconds

    report(f"penjing {versions()['penjing']} {engine.scheme.upper()}", measure(seconds, prompts, runs))


if __name__ == "__main__":
    main(
        sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[5:]
    )  # threads: OMP_NUM_THREADS, which run_engine.py sets
