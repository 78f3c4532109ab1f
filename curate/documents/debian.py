"""Real text for any machine with apt: packages of Debian, fetched and unpacked into the cache without being
installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from penjing.core.cache import cache_dir
from penjing.core.errors import ConfigError, SetupError
from penjing.core.files import holding, publish_folder
from penjing.core.manifest import MANIFEST_NAME
from penjing.core.progress import Progress

_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]+")
_SECONDS = 1800


def fetch_debian(package: str, progress: Progress) -> Path:
    """The folder of a package's files, such as FOLDER/usr/share/doc; fetched by apt-get on the first call.

    Raises:
        ConfigError: no name of a package.
        SetupError: no apt-get, no such package, no network, disk full.
    """
    if not _NAME.fullmatch(package):
        raise ConfigError(f"packages: {package!r} is no name of a Debian package")
    folder = cache_dir() / "debian" / package
    with holding(folder.parent / f"{package}.lock"):
        if not folder.exists():
            progress.note(f"fetching Debian's {package}")
            with publish_folder(folder, marker=MANIFEST_NAME) as partial:
                _unpack(package, partial)
    return folder


def _unpack(package: str, folder: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise SetupError(f"{package} is a package of Debian, and there is no apt-get here; give `path` in its place")
    fetched = _call(["apt-get", "download", package], folder)
    files = list(folder.glob("*.deb"))
    if fetched.returncode or len(files) != 1:
        reason = (fetched.stderr.strip().splitlines() or ["apt-get gave no reason"])[0]
        raise SetupError(f"cannot fetch {package} ({reason}); check its name and the network, or 'apt-get update'")
    unpacked = _call(["dpkg", "-x", files[0].name, "."], folder)
    if unpacked.returncode:
        raise SetupError(f"cannot unpack {files[0].name} ({unpacked.stderr.strip()}); is the disk full?")
    files[0].unlink()


def _call(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False)
