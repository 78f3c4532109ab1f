"""Finding, fetching and checking the Triton server: what the machine lacks is named with the next step."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from penjing.core.errors import InputError, SetupError
from penjing.core.progress import Silent
from penjing.serve.supervisor import host, install
from penjing.serve.supervisor.wheels import WHEELS_VARIABLE, Wheel, unpack_once


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(WHEELS_VARIABLE, str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "cache"


def make_wheel(folder: Path, name: str = "thing") -> Wheel:
    """A wheel with a program, a library and something that is not wanted."""
    file = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        program = zipfile.ZipInfo(f"{name}/bin/run")
        program.external_attr = 0o755 << 16
        archive.writestr(program, "#!/bin/sh\n")
        archive.writestr(f"{name}/lib.so", "library")
        archive.writestr("other/file", "not wanted")
    return Wheel(name, "1", file.name, hashlib.sha256(file.read_bytes()).hexdigest())


def test_a_wheel_is_checked_and_unpacked_once(cache: Path, tmp_path: Path) -> None:
    wheel, folder = make_wheel(tmp_path / "wheels"), cache / "server" / "thing"
    assert unpack_once(wheel, folder, Silent(), keep=("thing/",)) == folder
    assert os.access(folder / "thing/bin/run", os.X_OK)
    assert not os.access(folder / "thing/lib.so", os.X_OK)
    assert not (folder / "other").exists()
    (tmp_path / "wheels" / wheel.filename).unlink()
    assert unpack_once(wheel, folder, Silent(), keep=("thing/",)) == folder  # needs the wheel no more


def test_another_file_than_the_pinned_one_is_not_used(cache: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels")
    with open(tmp_path / "wheels" / wheel.filename, "ab") as file:
        file.write(b"more")
    with pytest.raises(InputError, match="not used"):
        unpack_once(wheel, cache / "thing", Silent(), keep=("thing/",))
    assert not (cache / "thing").exists()
    assert [path.name for path in cache.iterdir()] == [".thing.lock"]


def test_a_finish_that_fails_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise OSError(28, "No space left on device")

    wheel = make_wheel(tmp_path / "wheels")
    with pytest.raises(SetupError, match="the disk is full"):
        unpack_once(wheel, cache / "thing", Silent(), keep=("thing/",), finish=fail)
    assert not (cache / "thing").exists()


def test_a_machine_without_network_is_told_what_to_do(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path)
    with pytest.raises(SetupError, match=f"holds no {wheel.filename}"):
        unpack_once(wheel, cache / "thing", Silent(), keep=("thing/",))
    monkeypatch.delenv(WHEELS_VARIABLE)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(SetupError, match=f"cannot fetch thing==1 .* set {WHEELS_VARIABLE}"):
        unpack_once(wheel, cache / "thing", Silent(), keep=("thing/",))
    assert not (cache / "thing").exists()


def test_an_old_or_foreign_c_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "glibc_version", lambda: (2, 31))
    with pytest.raises(SetupError, match=r"needs glibc ≥ 2\.35 .* this is glibc 2\.31"):
        host.check_platform()
    monkeypatch.setattr(host, "glibc_version", lambda: None)
    with pytest.raises(SetupError, match="another C library"):
        host.check_platform()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(SetupError, match="linux on aarch64"):
        host.check_platform()


def test_a_python_without_shared_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "libpython_folders", lambda: [tmp_path])
    with pytest.raises(SetupError, match=f"apt install libpython{host.PYTHON_MINOR}.*searched {tmp_path}"):
        host.find_libpython()
    assert "apt install" in install.status()["problem"]


@pytest.mark.server
def test_the_embedded_server_fits_this_python() -> None:
    server = install.install()
    assert server == install.find_server()
    stub = server.backends / "python" / host.STUB
    assert host.stub_python(stub) == host.PYTHON_MINOR
    environment = server.environment()
    assert str(host.find_libpython().parent) in environment["LD_LIBRARY_PATH"].split(":")
    assert environment["PATH"].split(":")[0] == str(host.python_folder())
    assert server.source == install.status()["server"]


def test_a_python_without_numpy_1_is_told_before_the_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_system_server", lambda: None)
    monkeypatch.setattr(install, "PYTHON_MINOR", "3.13")
    monkeypatch.setattr(install, "numpy_major", lambda: 2)
    with pytest.raises(SetupError, match=r"published for Python 3\.11 and 3\.12 and not for 3\.13"):
        install.install()
    assert not cache.exists()


def test_a_server_of_ones_own_wins(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "opt"
    stub = root / "backends/python" / host.STUB
    stub.parent.mkdir(parents=True)
    (root / "bin").mkdir()
    (root / "bin/tritonserver").write_text("#!/bin/sh\n")
    (root / "bin/tritonserver").chmod(0o755)
    monkeypatch.setenv("PATH", str(root / "bin"), prepend=os.pathsep)
    with pytest.raises(SetupError, match="has no Python backend"):
        install.find_server()
    stub.write_bytes(b"\0libpython3.9.so.1.0\0numpy._core\0")
    with pytest.raises(SetupError, match=r"built for Python 3\.9"):
        install.find_server()
    stub.write_bytes(f"\0libpython{host.PYTHON_MINOR}.so.1.0\0numpy._core\0".encode())
    found = install.find_server()
    assert found is not None
    assert found.binary == root / "bin/tritonserver"
    assert found.numpy_folder is None
    monkeypatch.setattr(install, "numpy_major", lambda: 2)
    stub.write_bytes(f"\0libpython{host.PYTHON_MINOR}.so.1.0\0".encode())  # built with an old pybind11
    assert install.find_server() is None  # until its numpy is fetched
    if host.PYTHON_MINOR in install.NUMPY_WHEELS:
        (cache / "server" / f"numpy-1.26.4-py{host.PYTHON_MINOR}").mkdir(parents=True)
        found = install.find_server()
        assert found is not None
        assert found.numpy_folder is not None
