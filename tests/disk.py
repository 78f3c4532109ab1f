"""Disks that are really full: a program runs on a tiny file system of its own, or under a limit of its files' size."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from tests.forking import Forked

_NOT_HERE = 77
_LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))\n"
# unshare(2) makes this process root of a user's and a mount's name space of its own, as `unshare -rm` does.
_MOUNT = f"""
import ctypes, os, sys
from pathlib import Path
own = Path("/proc/self")
maps = {{"setgroups": "deny", "uid_map": f"0 {{os.getuid()}} 1", "gid_map": f"0 {{os.getgid()}} 1"}}
libc = ctypes.CDLL(None)
CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 0x4000, 0x40000
if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
    sys.exit({_NOT_HERE})
for name, text in maps.items():
    (own / name).write_text(text)
if libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) or libc.mount(
    b"tmpfs", os.fsencode(sys.argv[1]), b"tmpfs", 0, b"size={{0}}"
):
    sys.exit({_NOT_HERE})
"""


def run_in(place: str, size: int, folder: Path, code: str, *arguments: str, forked: bool = False) -> list[str]:
    """Run Python's `code`, with `folder` and `arguments` in sys.argv, where a file system of `size` bytes is mounted on
    `folder` for it alone, or no file may have more. What it prints, by lines; skips where nothing can be mounted.

    Args:
        forked: from a process that has imported what trains.
    """
    begins = _MOUNT.replace("{0}", str(size)) if place == "tiny disk" else _LIMIT.format(size)
    command = [sys.executable, "-c", begins + textwrap.dedent(code), str(folder), *arguments]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        start = Forked if forked else subprocess.Popen
        ended = start(command, stdout=out, stderr=error).wait(120)
        for file in (out, error):
            file.seek(0)
        if ended == _NOT_HERE:
            pytest.skip("no file system can be mounted here")
        assert ended == 0, error.read()
        return out.read().splitlines()
