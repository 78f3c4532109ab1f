"""Compile kernels for a GPU that need not be there, and read what they use: registers, spills, shared memory.

`python -m penjing.kernels.gpu.build --help`. Compiled kernels stay in the Triton language's cache (`TRITON_CACHE_DIR`),
which is keyed by source and configuration and written atomically, so processes may compile side by side.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penjing.kernels.gpu.registry import OPERATIONS, Variant, variants

ARCH = 90  # sm_90: H100, H200


@dataclass(frozen=True)
class Usage:
    """What one compiled configuration takes.

    Attributes:
        registers: of a thread.
        spill_bytes: local memory of a thread: registers that did not fit.
        shared_bytes: shared memory of a block.
        cubin_bytes: size of the machine code.
        seconds: to compile it; near 0 from the cache.
    """

    operation: str
    label: str
    num_warps: int
    num_stages: int
    hot: bool
    registers: int
    spill_bytes: int
    shared_bytes: int
    cubin_bytes: int
    seconds: float


def compile_variant(operation: str, variant: Variant, arch: int = ARCH) -> Usage:
    """Compile one configuration for compute capability `arch` (90 for sm_90).

    Raises:
        RuntimeError: the interpreter is on, so that there is nothing to compile.
        ValueError: arguments that are not those of the kernel.
    """
    if interpreted():
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted; unset it to compile them")
    names = variant.kernel.arg_names
    if set(names) != variant.arguments.keys() | variant.constants.keys():
        odd = sorted(set(names) ^ (variant.arguments.keys() | variant.constants.keys()))
        raise ValueError(f"{operation} {variant.label}: {', '.join(odd)} do not match the kernel's arguments")
    signature = {name: variant.arguments.get(name, "constexpr").partition(":")[0] for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if variant.arguments.get(name, "").endswith(":16")
    }
    source = ASTSource(variant.kernel, signature=signature, constexprs=dict(variant.constants), attrs=aligned)
    start = time.perf_counter()
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": variant.fused_multiply_add,
    }
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    seconds = time.perf_counter() - start
    registers, spill_bytes = _resources(kernel.asm["cubin"])
    return Usage(
        operation=operation,
        label=variant.label,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
        hot=variant.hot,
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=kernel.metadata.shared,
        cubin_bytes=len(kernel.asm["cubin"]),
        seconds=round(seconds, 2),
    )


def compile_all(
    operations: Iterable[str] = OPERATIONS,
    *,
    full: bool = False,
    arch: int = ARCH,
    jobs: int = 1,
    done: Callable[[int, int], None] | None = None,
) -> list[Usage]:
    """Compile every configuration of `operations`, in the registry's order.

    Args:
        full: those marked `full` as well.
        jobs: processes side by side.
        done: called after each with (finished, all).

    Raises:
        RuntimeError: the interpreter is on. The compiler's errors pass through, with the configuration's name added.
    """
    work = [(operation, index) for operation in operations for index in _chosen(operation, full)]
    found: dict[int, Usage] = {}
    for place, usage in _compiled(work, arch, jobs):
        found[place] = usage
        if done is not None:
            done(len(found), len(work))
    return [found[place] for place in range(len(work))]


def interpreted() -> bool:
    """Whether `TRITON_INTERPRET` is set."""
    return knobs.runtime.interpret


def _chosen(operation: str, full: bool) -> list[int]:
    return [index for index, variant in enumerate(variants(operation)) if full or not variant.full]


def _compiled(work: list[tuple[str, int]], arch: int, jobs: int) -> Iterator[tuple[int, Usage]]:
    if jobs == 1 or len(work) < 2:
        for place, (operation, index) in enumerate(work):
            yield place, _compile_one(operation, index, arch)
        return
    # Spawned: a fork of a process that runs torch's threads can hang.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        places = {pool.submit(_compile_one, *item, arch): place for place, item in enumerate(work)}
        for future in as_completed(places):
            yield places[future], future.result()


def _compile_one(operation: str, index: int, arch: int) -> Usage:
    variant = list(variants(operation))[index]
    try:
        return compile_variant(operation, variant, arch)
    except Exception as error:
        error.add_note(f"while compiling {operation} {variant.label} for sm_{arch}")
        raise


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) of a thread, from NVIDIA's cuobjdump in the Triton language's wheel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # A spill is counted with the stack: LOCAL stays 0 in code for recent architectures.
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage answered in an unknown form: {text.strip()!r}")
    return int(found[1]), int(found[2]) + int(found[3])


def main() -> None:
    """Compile and print one JSON line a configuration."""
    parser = argparse.ArgumentParser(
        prog="python -m penjing.kernels.gpu.build", description="Compile the Triton-language kernels; needs no GPU."
    )
    parser.add_argument("operations", nargs="*", help=f"of {', '.join(OPERATIONS)}; default all")
    parser.add_argument("--full", action="store_true", help="rare configurations too")
    parser.add_argument("--arch", type=int, default=ARCH, help="compute capability, default 90 for sm_90")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    options = parser.parse_args()
    usages = compile_all(options.operations or OPERATIONS, full=options.full, arch=options.arch, jobs=options.jobs)
    for usage in usages:
        sys.stdout.write(json.dumps(asdict(usage)) + "\n")


if __name__ == "__main__":
    main()
