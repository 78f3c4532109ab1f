"""What runs here: versions, the processor, and which implementation of each kernel was chosen, and why."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

PACKAGES = ("penjing", "torch", "numpy", "safetensors", "tokenizers", "onnxruntime", "tritonclient")


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
    from penjing.kernels.dispatch import describe

    return {"versions": versions(), "processor": processor(), "kernels": describe()}
