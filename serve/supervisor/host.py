"""What the machine must have for Triton server's Python backend: glibc, a shared libpython, a matching stub, numpy."""

from __future__ import annotations

import os
import platform
import re
import sys
import sysconfig
from pathlib import Path

from penjing.core.errors import SetupError

MIN_GLIBC = (2, 35)
STUB = "triton_python_backend_stub"
PYTHON_MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


def check_platform() -> None:
    """Raises SetupError unless this is x86-64 Linux with glibc ≥ 2.35, which the embedded server is built for."""
    machine = platform.machine()
    if sys.platform != "linux" or machine != "x86_64":
        raise SetupError(
            f"the embedded Triton server runs on x86-64 Linux, this is {sys.platform} on {machine}; use the image in "
            f"docker/, or put a tritonserver of your own on PATH"
        )
    version = glibc_version()
    if version is None or version < MIN_GLIBC:
        found = "another C library" if version is None else "glibc " + ".".join(map(str, version))
        raise SetupError(
            f"the embedded Triton server needs glibc ≥ 2.35 (Debian 12, Ubuntu 22.04 or newer), this is {found}; use "
            f"the image in docker/, or put a tritonserver of your own on PATH"
        )


def glibc_version() -> tuple[int, int] | None:
    """(major, minor) of the running glibc; None with another C library."""
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return None
    match = re.fullmatch(r"glibc (\d+)\.(\d+).*", text)
    return (int(match[1]), int(match[2])) if match else None


def find_libpython() -> Path:
    """The shared library of the running Python, which the stub embeds.

    Raises:
        SetupError: this Python has none.
    """
    name = f"libpython{PYTHON_MINOR}.so.1.0"
    candidates = libpython_folders()
    for folder in candidates:
        if (folder / name).is_file():
            return folder / name
    raise SetupError(
        f"Triton server embeds Python and needs {name}, which {sys.executable} lacks; on Debian or Ubuntu: apt install "
        f"libpython{PYTHON_MINOR}; with pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install; Pythons of uv and "
        f"conda have it (searched {', '.join(map(str, candidates))})"
    )


def libpython_folders() -> list[Path]:
    """Where a libpython of the running Python can lie, most likely first."""
    variables = sysconfig.get_config_vars()
    library = variables.get("LIBDIR")
    folders = [Path(library)] if library else []
    if library and variables.get("MULTIARCH"):
        folders.append(Path(library) / str(variables["MULTIARCH"]))
    folders.append(Path(sys.base_prefix) / "lib")
    if variables.get("LIBPL"):
        folders.append(Path(str(variables["LIBPL"])))
    return list(dict.fromkeys(folders))


def python_folder() -> Path:
    """The folder whose `python3` is the running environment: the stub takes the first `python3` on PATH as its home.

    Raises:
        SetupError: there is none.
    """
    folder = Path(sys.prefix) / "bin"
    if not (folder / "python3").exists():
        raise SetupError(f"{folder} holds no python3, by which Triton server finds this environment; use a venv")
    return folder


def stub_python(stub: Path) -> str | None:
    """The Python minor ("3.11") that a stub is linked to."""
    match = re.search(rb"libpython(\d+\.\d+)\.so", stub.read_bytes())
    return match[1].decode() if match else None


def stub_takes_numpy2(stub: Path) -> bool:
    """Whether the stub reads arrays of numpy 2.

    One built with pybind11 < 2.12 looks for the item size where numpy 1 kept it, and so reads a text tensor as its
    first byte repeated, and crashes. Newer ones look numpy's core up by its new name.
    """
    return b"numpy._core" in stub.read_bytes()


def numpy_major() -> int:
    """Major version of the environment's numpy."""
    from importlib.metadata import version

    return int(version("numpy").split(".")[0])
