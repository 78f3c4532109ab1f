"""What a server's process may do, seen from a process that is started as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from penjing.serve.supervisor.confine import STACK_BYTES, confine

GROW = """
import os, sys
descriptor = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
os.ftruncate(descriptor, 1 << 20)
try:
    os.ftruncate(descriptor, (1 << 20) + 1)
except OSError as error:
    print(error.strerror)
"""
CODE = """
import os, resource, sys
path = sys.argv[1]
descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
os.fchmod(descriptor, 0o644)  # as Boost does
os.chmod(sys.argv[2], 0o640)  # another call works as ever
print(oct(os.fstat(descriptor).st_mode & 0o777), *resource.getrlimit(resource.RLIMIT_STACK)[:1],
      *resource.getrlimit(resource.RLIMIT_CORE), open("/proc/self/status").read().count("Seccomp:\\t2"))
"""


def test_files_are_for_their_user_alone_and_stacks_are_large(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    command = [sys.executable, "-c", CODE, str(tmp_path / "region"), str(tmp_path / "other")]
    done = subprocess.run(command, preexec_fn=confine, capture_output=True, text=True, check=True)
    mode, stack, *core, filtered = done.stdout.split()
    assert mode == "0o600"
    assert int(stack) == STACK_BYTES
    assert core == ["0", "0"]
    assert filtered == "1"
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o640


def test_a_file_that_would_be_too_large_fails_the_call_and_not_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GROW, str(tmp_path / "region")]
    done = subprocess.run(command, preexec_fn=lambda: confine(1 << 20), capture_output=True, text=True, check=True)
    assert done.stdout == "File too large\n"
    assert (tmp_path / "region").stat().st_size == 1 << 20
