"""bench_ort_genai.py MODEL PROMPTS RUNS THREADS: ONNX Runtime GenAI, static batch."""

# pyright: reportMissingImports=false

import json
import sys
import time

import numpy as np
import onnxruntime_genai as og
from figures import measure, read_prompts, report


def main(model_folder: str, prompts: str, runs: int, threads: int) -> None:
    overlay = {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
    config = og.Config(model_folder)
    config.overlay(json.dumps(overlay))
    model = og.Model(config)

    def seconds(batch, new):
        params = og.GeneratorParams(model)
        length = len(batch[0]) + new
        params.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=len(batch))
        generator = og.Generator(model, params)
        start = time.perf_counter()
        generator.append_tokens(np.array(batch, dtype=np.int32))
        for _ in range(new):
            generator.generate_next_token()
        return time.perf_counter() - start

    bits = "INT4" if model_folder.endswith("int4") else "INT8"
    report(f"ONNX Runtime GenAI {og.__version__} {bits} weights", measure(seconds, read_prompts(prompts), runs))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
