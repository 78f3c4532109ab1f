"""The Triton server that penjing runs: one on PATH or in /opt/tritonserver, else the embedded one, unpacked once."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penjing.core.cache import cache_dir
from penjing.core.errors import SetupError
from penjing.core.progress import Progress, Silent
from penjing.serve.supervisor.host import (
    PYTHON_MINOR,
    STUB,
    check_platform,
    find_libpython,
    numpy_major,
    python_folder,
    stub_python,
    stub_takes_numpy2,
)
from penjing.serve.supervisor.wheels import Wheel, unpack_once

SERVER_WHEEL = Wheel(
    name="nvidia-pytriton",
    version="0.7.0",
    filename="nvidia_pytriton-0.7.0-py3-none-manylinux_2_35_x86_64.whl",
    sha256="21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df",
)
SERVER_VERSION = "2.51.0"
# The embedded server's stub cannot read arrays of numpy 2 (see host.stub_takes_numpy2), so it gets the last numpy 1.
NUMPY_WHEELS = {
    minor: Wheel(
        name="numpy",
        version="1.26.4",
        filename=f"numpy-1.26.4-cp{tag}-cp{tag}-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        sha256=sha256,
    )
    for minor, tag, sha256 in (
        ("3.11", "311", "666dbfb6ec68962c033a450943ded891bed2d54e6755e35e5835d63f4f6931d5"),
        ("3.12", "312", "675d61ffbfa78604709862923189bad94014bef562cc35cf61d3a07bba02a7ed"),
    )
}
SYSTEM_FOLDER = Path("/opt/tritonserver")


@dataclass(frozen=True)
class ServerInstall:
    """A Triton server that can run models in the running Python's environment."""

    source: str
    binary: Path
    backends: Path
    library_folders: tuple[Path, ...]
    numpy_folder: Path | None
    """Holds the numpy that the stub imports; None: the environment's own will do."""

    def environment(self) -> dict[str, str]:
        """Variables for the server process, on top of the caller's."""
        library_path = [str(folder) for folder in self.library_folders] + [str(find_libpython().parent)]
        inherited = os.environ.get("LD_LIBRARY_PATH")
        packages = [str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        return os.environ | {
            "LD_LIBRARY_PATH": ":".join(library_path + ([inherited] if inherited else [])),
            "PATH": f"{python_folder()}:{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": os.pathsep.join(packages),  # the server runs elsewhere, so they are absolute
        }


def install(progress: Progress | None = None) -> ServerInstall:
    """The server to run; the embedded one is fetched and unpacked into the cache when there is no other.

    Raises:
        SetupError: glibc too old, no shared libpython, an unsupported Python, no network, disk full.
        InputError: a downloaded file is not the one that is pinned.
    """
    progress = progress or Silent()
    find_libpython()
    server = _system_server() or _embedded_server(progress)
    if server.numpy_folder is not None:
        unpack_once(NUMPY_WHEELS[PYTHON_MINOR], server.numpy_folder, progress, keep=("numpy",))
    return server


def find_server() -> ServerInstall | None:
    """The server that would run without fetching anything; None when it must be installed first."""
    server = _system_server()
    if server is None and embedded_folder().is_dir():
        server = _describe_embedded()
    if server is None or (server.numpy_folder is not None and not server.numpy_folder.is_dir()):
        return None
    return server


def status() -> dict[str, Any]:
    """What would run and what the machine lacks, in words."""
    result: dict[str, Any] = {"python": f"{PYTHON_MINOR} ({sys.executable})"}
    try:
        result["libpython"] = str(find_libpython())
        server = find_server()
        result["server"] = "not installed; run 'penjing server install'" if server is None else server.source
        if server is not None:
            result["binary"] = str(server.binary)
    except SetupError as error:
        result["problem"] = str(error)
    return result


def install_to_terminal() -> None:
    """`penjing server install`."""
    from penjing.core.progress import progress_bar

    with progress_bar() as progress:
        present = find_server()
        server = present or install(progress)
        state = "is there already" if present else "is installed"
        progress.note(f"{server.source} {state}: {server.binary}")


def embedded_folder() -> Path:
    """Where the embedded server lies once it is installed."""
    return cache_dir() / "server" / f"pytriton-{SERVER_WHEEL.version}"


def _system_server() -> ServerInstall | None:
    found = shutil.which("tritonserver")
    binary = Path(found).resolve() if found else SYSTEM_FOLDER / "bin" / "tritonserver"
    stub = binary.parent.parent / "backends" / "python" / STUB
    if not binary.is_file():
        return None
    if not stub.is_file():
        raise SetupError(f"{binary} has no Python backend ({stub} is missing); install it, or take it off PATH")
    linked = stub_python(stub)
    if linked != PYTHON_MINOR:
        raise SetupError(
            f"the Python backend of {binary} is built for Python {linked}, penjing runs on {PYTHON_MINOR}; run penjing "
            f"with Python {linked}, or take that tritonserver off PATH"
        )
    root = binary.parent.parent
    return ServerInstall(
        source=f"Triton server of {root}",
        binary=binary,
        backends=root / "backends",
        library_folders=(root / "lib",),
        numpy_folder=_numpy_folder(stub),
    )


def _embedded_server(progress: Progress) -> ServerInstall:
    check_platform()
    if PYTHON_MINOR not in NUMPY_WHEELS and numpy_major() >= 2:
        raise SetupError(_no_numpy("the embedded Triton server"))  # before 55 MB are fetched in vain
    unpack_once(
        SERVER_WHEEL,
        embedded_folder(),
        progress,
        keep=("pytriton/tritonserver/", "nvidia_pytriton.libs/", "nvidia_pytriton-0.7.0.dist-info/licenses/"),
        finish=_arrange_backends,
    )
    return _describe_embedded()


def _describe_embedded() -> ServerInstall:
    folder = embedded_folder()
    server = folder / "pytriton" / "tritonserver"
    binary, backends = server / "bin" / "tritonserver", server / f"backends-{PYTHON_MINOR}"
    stub = backends / "python" / STUB
    for path in (binary, stub):
        if not path.exists():
            raise SetupError(f"{path} is missing; remove {folder} and run 'penjing server install'")
    return ServerInstall(
        source=f"embedded Triton server {SERVER_VERSION} ({SERVER_WHEEL.pinned})",
        binary=binary,
        backends=backends,
        library_folders=(folder / "nvidia_pytriton.libs",),
        numpy_folder=_numpy_folder(stub),
    )


def _arrange_backends(partial: Path) -> None:
    """Give each Python minor a backend folder of its own, with its stub beside the backend's library."""
    server = partial / "pytriton" / "tritonserver"
    (server / "bin" / "tritonserver").chmod(0o755)
    for stubs in (server / "python_backend_stubs").iterdir():
        backend = server / f"backends-{stubs.name}" / "python"
        backend.mkdir(parents=True)
        for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
            shutil.copy2(server / "backends" / "python" / name, backend / name)
        shutil.copy2(stubs / STUB, backend / STUB)
        (backend / STUB).chmod(0o755)


def _numpy_folder(stub: Path) -> Path | None:
    """Where the numpy for a stub of an older build lies (or will lie); None when the environment's own will do."""
    if numpy_major() < 2 or stub_takes_numpy2(stub):
        return None
    wheel = NUMPY_WHEELS.get(PYTHON_MINOR)
    if wheel is None:
        raise SetupError(_no_numpy(str(stub)))
    return cache_dir() / "server" / f"numpy-{wheel.version}-py{PYTHON_MINOR}"


def _no_numpy(what: str) -> str:
    return (
        f"{what} needs numpy 1, which is published for Python {' and '.join(NUMPY_WHEELS)} and not for {PYTHON_MINOR}; "
        f"make the environment with one of those (make PYTHON=python3.12), or put a newer tritonserver on PATH"
    )
