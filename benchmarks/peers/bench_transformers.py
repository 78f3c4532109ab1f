"""bench_transformers.py CHECKPOINT PROMPTS RUNS THREADS: transformers eager, FP32, static batch."""

import sys
import time
from typing import Any

import torch
import transformers
from figures import measure, read_prompts, report


def main(checkpoint: str, prompts: str, runs: int, threads: int) -> None:
    torch.set_num_threads(threads)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.inference_mode()
    def seconds(batch, new):
        ids = torch.tensor(batch)
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return time.perf_counter() - start

    report(f"transformers {transformers.__version__} FP32 eager", measure(seconds, read_prompts(prompts), runs))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
