"""Disks that are really full: a program runs on a tiny file system of its own, or under a limit of its files' size."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))\n"


def run_in(place: str, size: int, folder: Path, code: str, *arguments: str) -> list[str]:
    """Run Python's `code`, with `folder` and `arguments` in sys.argv, where a file system of `size` bytes is mounted on
    `folder` for it alone, or no file may have more. What it prints, by lines; skips where nothing can be mounted."""
    code = textwrap.dedent(code)
    command = [sys.executable, "-c", code if place == "tiny disk" else _LIMIT.format(size) + code]
    command += [str(folder), *arguments]
    if place == "tiny disk":
        mount = f'mount -t tmpfs -o size={size} tmpfs "$0" && exec "$@"'
        if subprocess.run(["unshare", "-rm", "sh", "-c", mount, folder, "true"], capture_output=True).returncode:
            pytest.skip("no file system can be mounted here")
        command = ["unshare", "-rm", "sh", "-c", mount, str(folder), *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
