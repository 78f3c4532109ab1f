"""Loading, instruction sets, threads and forks of the C++ extension."""

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from penjing.kernels.cpu import library
from penjing.kernels.cpu import threads as thread_rules
from penjing.kernels.cpu.functions import ISAS, CpuExtension
from tests import forking
from tests.kernels.cpu import needs_extension, the_extension

PREPARE = """
import os, torch
from penjing.kernels.cpu import extension
kernels = extension()
g = torch.Generator().manual_seed(0)
weight = torch.randint(-127, 128, (256, 200), dtype=torch.int8, generator=g)
x = torch.randn(9, 200, generator=g)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return forking.run([sys.executable, "-c", PREPARE + code], env=os.environ | environment)


@needs_extension
def test_structures_have_the_sizes_of_the_c_side() -> None:
    sizes = [the_extension().library.pj_struct_bytes(i) for i in range(len(library.STRUCTURES) + 1)]
    assert sizes == [*map(ctypes.sizeof, library.STRUCTURES), 0]


@needs_extension
def test_a_forked_child_computes_while_the_parent_does() -> None:
    code = """
kernels.set_num_threads(3)
panels = kernels.prepack_int8(weight, torch.ones(256))
expected = kernels.int8_linear(x, panels)
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        good = all(torch.equal(kernels.int8_linear(x, panels), expected) for _ in range(50))
        os._exit(0 if good and kernels.num_threads == 3 else 1)
    children.append(child)
assert all(torch.equal(kernels.int8_linear(x, panels), expected) for _ in range(50))
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


@needs_extension
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_workers_stay_off_the_core_of_the_caller() -> None:
    code = """
kernels.set_num_threads(2)
allowed, others = os.sched_getaffinity(0), set(os.listdir("/proc/self/task"))
panels = kernels.prepack_int8(weight, torch.ones(256))
for core in (None, *sorted(allowed)[:4]):
    os.sched_setaffinity(0, allowed if core is None else {core})
    for _ in range(200):  # more than the pool works alone on a busy machine
        kernels.int8_linear(x, panels)
    (worker,) = set(os.listdir("/proc/self/task")) - others
    assert core is None or os.sched_getaffinity(int(worker)) == allowed - {core}
assert os.sched_getaffinity(0) == {core}  # the caller's own is left alone
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


@needs_extension
def test_calls_from_many_threads_take_turns(threads: CpuExtension) -> None:
    threads.set_num_threads(2)
    g = torch.Generator().manual_seed(1)
    panels = threads.prepack_int8(torch.randint(-127, 128, (300, 64), dtype=torch.int8, generator=g), torch.ones(300))
    inputs = [torch.randn(rows, 64, generator=g) for rows in (1, 5, 130, 2, 70, 9)]
    expected = [threads.int8_linear(x, panels) for x in inputs]

    def work(i: int) -> bool:
        if i % 9 == 0:
            threads.set_num_threads(1 + i // 9 % 3)
        return torch.equal(threads.int8_linear(inputs[i % 6], panels), expected[i % 6])

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(work, range(120)))


@needs_extension
@pytest.mark.parametrize("count", [0, -1, 5000])
def test_thread_counts_out_of_range(count: int) -> None:
    with pytest.raises(ValueError, match=str(count)):
        the_extension().set_num_threads(count)


@needs_extension
def test_instruction_sets() -> None:
    kernels = the_extension()
    with pytest.raises(ValueError, match=r"'sse2' is unknown.*avx2"):
        kernels.select_isa("sse2")
    before = kernels.isa
    kernels.select_isa("scalar")
    assert kernels.isa == "scalar"
    kernels.select_isa("auto")
    assert kernels.isa in ISAS
    kernels.select_isa(before)


@needs_extension
def test_environment() -> None:
    done = run("print(kernels.isa, kernels.num_threads)", PENJING_CPU_ISA="scalar", PENJING_CPU_THREADS="5")
    assert done.stdout.split() == ["scalar", "5"]
    assert "ValueError: instruction set 'neon' is unknown" in run("", PENJING_CPU_ISA="neon").stderr
    assert "PENJING_CPU_THREADS='two'" in run("", PENJING_CPU_THREADS="two").stderr


def test_without_the_library_everything_runs_on_torch_and_says_so_once(tmp_path: Path) -> None:
    code = """
from penjing.kernels.int8_linear import int8_linear, prepack_int8
assert kernels is None and extension() is None
print(tuple(int8_linear(x, prepack_int8(weight, torch.ones(256))).shape))
"""
    done = run(code, PENJING_CPU_LIBRARY=str(tmp_path / "missing.so"))
    assert done.stdout.strip() == "(9, 256)"
    assert done.stderr.count("several times slower") == 1
    assert "missing.so" in done.stderr


def test_a_library_of_another_version_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.so").write_bytes(b"")
    monkeypatch.setenv("PENJING_CPU_LIBRARY", str(tmp_path / "empty.so"))
    with pytest.raises(library.MissingLibrary, match="do not load"):
        library.load_library()
    monkeypatch.delenv("PENJING_CPU_LIBRARY")
    if library.library_path() is not None:
        monkeypatch.setattr(library, "ABI_VERSION", -1)
        with pytest.raises(library.MissingLibrary, match="other sources"):
            library.load_library()
    else:
        with pytest.raises(library.MissingLibrary, match="compiler"):
            library.load_library()


def test_default_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENJING_CPU_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(thread_rules, "physical_cores", lambda: 8)
    monkeypatch.setattr(thread_rules, "cgroup_quota", lambda: 6)
    assert thread_rules.default_threads() == 6
    for value, expected in (("3", 3), ("4,2", 4), ("64", 6), ("", 6), ("many", 6), ("0", 6)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert thread_rules.default_threads() == expected
    monkeypatch.setenv("PENJING_CPU_THREADS", "11")
    assert thread_rules.default_threads() == 11
    monkeypatch.setenv("PENJING_CPU_THREADS", "0")
    with pytest.raises(ValueError, match="'0'"):
        thread_rules.default_threads()


@pytest.mark.parametrize(
    ("text", "expected"), [("max 100000\n", 1024), ("250000 100000\n", 2), ("50000 100000\n", 1), ("", 1024)]
)
def test_container_quota(tmp_path: Path, text: str, expected: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert thread_rules.cgroup_quota(tmp_path / "cpu.max") == expected
    assert thread_rules.cgroup_quota(tmp_path / "none") == 1024


def test_physical_cores_are_within_the_affinity() -> None:
    assert 1 <= thread_rules.physical_cores() <= len(os.sched_getaffinity(0))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@needs_extension
def test_small_tensors_take_no_huge_pages() -> None:
    kernels, before = the_extension(), resident()
    tensors = [kernels.empty_pages((64, 64), torch.uint8).fill_(1) for _ in range(64)]
    assert resident() - before < 16 << 20
    assert all(tensor.data_ptr() % 2**21 == 0 for tensor in tensors)


@needs_extension
def test_pages_are_zero_aligned_and_freed() -> None:
    kernels = the_extension()

    before = resident()
    for _ in range(8):
        tensor = kernels.empty_pages((64, 1024, 1024), torch.uint8)
        assert tensor.data_ptr() % 2**21 == 0
        assert not tensor[::16].any()
        view = tensor[1:3].view(-1)
        del tensor
        view.fill_(1)
        del view
    assert resident() - before < 3 * 2**26
    assert kernels.empty_pages((0, 3), torch.float32).shape == (0, 3)
    with pytest.raises(MemoryError):
        kernels.empty_pages((2**50,), torch.float32)
