"""bench_openvino.py MODEL PROMPTS RUNS THREADS: OpenVINO GenAI, continuous batching, paged KV."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai
from figures import measure, read_prompts, report


def main(model: str, prompts: str, runs: int, threads: int) -> None:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2  # GB
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False  # the same prompts come in every run
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})

    def seconds(batch, new):
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos, config.do_sample = True, False
        start = time.perf_counter()
        pipeline.generate([ov.Tensor(np.array([ids], dtype=np.int64)) for ids in batch], [config] * len(batch))
        return time.perf_counter() - start

    version = genai.__version__.split("-")[0]
    bits = "INT4" if model.endswith("int4") else "INT8"
    report(f"OpenVINO GenAI {version} {bits} weights", measure(seconds, read_prompts(prompts), runs))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
