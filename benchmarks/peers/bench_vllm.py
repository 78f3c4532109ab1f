"""bench_vllm.py FOLDER PROMPTS RUNS THREADS: vLLM for CPU on a compressed-tensors folder, no prefix cache."""

# pyright: reportMissingImports=false

import sys
import time

from figures import measure, read_prompts, report
from vllm_engine import full_name, preload, start


def main(folder: str, prompts: str, runs: int, threads: int) -> None:
    model = start(folder, threads)
    from vllm import SamplingParams

    def seconds(batch, new):
        params = SamplingParams(temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        model.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
        return time.perf_counter() - begun

    report(full_name(folder), measure(seconds, read_prompts(prompts), runs))


if __name__ == "__main__":
    preload()
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
