"""bench_vllm.py ARTIFACT PROMPTS RUNS THREADS: vLLM for CPU on a W8A8 compressed-tensors folder, no prefix cache.

libiomp5 (from its environment) and, where the system has it, tcmalloc are preloaded, as vLLM's documentation asks.
"""

# pyright: reportMissingImports=false

import ctypes.util
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

from figures import measure, read_prompts, report


def preload() -> None:
    """Start this program again with the libraries preloaded: the loader reads LD_PRELOAD only at the start."""
    libraries = [str(path) for path in (Path(sys.prefix) / "lib").glob("libiomp5.so")]
    for name in ("tcmalloc_minimal", "tcmalloc"):
        if found := ctypes.util.find_library(name):
            libraries.append(found)
            break
    else:
        print("no tcmalloc on this system (Debian: libtcmalloc-minimal4): vLLM runs without it", file=sys.stderr)
    os.environ["LD_PRELOAD"] = ":".join(libraries)
    os.execv(sys.executable, [sys.executable, *sys.argv])


def main(artifact: str, prompts: str, runs: int, threads: int) -> None:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GB
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    model = LLM(
        artifact,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=16,
        enable_prefix_caching=False,
    )

    def seconds(batch, new):
        params = SamplingParams(temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        model.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
        return time.perf_counter() - start

    report(f"vLLM CPU {version('vllm-cpu')} W8A8", measure(seconds, read_prompts(prompts), runs))


if __name__ == "__main__":
    if "LD_PRELOAD" not in os.environ:
        preload()
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
