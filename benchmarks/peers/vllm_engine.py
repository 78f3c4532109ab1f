"""vLLM for CPU as the benchmarks start it.

libiomp5 (from its environment) and, where the system has it, tcmalloc are preloaded, as vLLM's documentation asks.
"""

# pyright: reportMissingImports=false

import ctypes.util
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def preload() -> None:
    """Start this program again with the libraries preloaded: the loader reads LD_PRELOAD only at the start."""
    if "LD_PRELOAD" in os.environ:
        return
    libraries = [str(path) for path in (Path(sys.prefix) / "lib").glob("libiomp5.so")]
    for name in ("tcmalloc_minimal", "tcmalloc"):
        if found := ctypes.util.find_library(name):
            libraries.append(found)
            break
    else:
        print("no tcmalloc on this system (Debian: libtcmalloc-minimal4): vLLM runs without it", file=sys.stderr)
    os.environ["LD_PRELOAD"] = ":".join(libraries)
    os.execv(sys.executable, [sys.executable, *sys.argv])


def start(folder: str, threads: int, **more: Any) -> Any:
    """An engine in this process, in bfloat16, with no prefix cache; `more` are arguments of `vllm.LLM`."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GB
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM

    return LLM(
        folder,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=16,
        enable_prefix_caching=False,
        **more,
    )


def full_name(folder: str) -> str:
    """With the version, and the bits of weights and activations."""
    return f"vLLM CPU {version('vllm-cpu')} {'W4A16' if folder.endswith('int4') else 'W8A8'}"
