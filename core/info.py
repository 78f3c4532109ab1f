"""What runs here: versions, the processor, and which implementation of each kernel was chosen, and why."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from penjing.core.errors import SetupError
from penjing.core.progress import Progress, error_console

PACKAGES = ("penjing", "torch", "triton", "numpy", "safetensors", "tokenizers", "onnxruntime", "tritonclient")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that move results or speed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def processor() -> dict[str, Any]:
    """Name, usable cores and memory in bytes of this machine."""
    name = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"name": name, "cores": len(os.sched_getaffinity(0)), "memory_bytes": memory}


def collect() -> dict[str, Any]:
    """Everything `penjing info` shows, as one JSON-ready dictionary."""
    from penjing.kernels.dispatch import describe, describe_cuda

    kernels = {"cpu": describe(), "cuda": describe_cuda()}
    return {"versions": versions(), "processor": processor(), "kernels": kernels}


def compiled_kernels(progress: Progress, *, full: bool = False) -> list[dict[str, Any]]:
    """Compile every Triton-language kernel for sm_90, which needs no GPU; see `penjing.kernels.gpu.build.Usage`.

    Raises:
        SetupError: the Triton language is not installed, or `TRITON_INTERPRET` is set.
    """
    if find_spec("triton") is None:
        raise SetupError("the Triton language is not installed; run: pip install 'penjing[gpu]'")
    from penjing.kernels.gpu.build import compile_all, interpreted

    if interpreted():
        raise SetupError("TRITON_INTERPRET is set, so that kernels are interpreted; unset it to compile them")
    cores = len(os.sched_getaffinity(0))
    progress.start("compiling for sm_90", 100)
    shown = 0

    def done(finished: int, total: int) -> None:
        nonlocal shown
        progress.advance(100 * finished // total - shown)
        shown = 100 * finished // total

    return [asdict(usage) for usage in compile_all(full=full, jobs=cores, done=done)]


def print_kernels(usages: list[dict[str, Any]]) -> None:
    """Print what `compiled_kernels` found, on standard error."""
    from rich.table import Table

    table = Table("operation", "configuration", "warps", "stages", box=None, pad_edge=False)
    for column in ("registers", "spill B", "shared B"):
        table.add_column(column, justify="right")
    for usage in usages:
        columns = ("operation", "label", "num_warps", "num_stages", "registers", "spill_bytes", "shared_bytes")
        table.add_row(*(str(usage[name]) for name in columns))
    error_console().print(table)
