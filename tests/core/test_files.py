"""Atomic publishing: complete under the final name or not there, whatever happens while it is written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from penjing.core.cache import cache_dir
from penjing.core.errors import InputError, SetupError
from penjing.core.files import (
    atomic_write_bytes,
    atomic_write_text,
    check_replaceable,
    check_writable,
    publish_folder,
    sha256_file,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_folder_appears_at_the_end(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "out"
    with publish_folder(final) as partial:
        (partial / "a").write_text("1")
        assert partial.parent == final.parent
        assert not final.exists()
    assert names(final.parent) == ["out"]
    assert (final / "a").read_text() == "1"


def test_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), publish_folder(tmp_path / "out") as partial:  # noqa: PT012
        (partial / "a").write_text("1")
        raise ValueError("broken")
    assert names(tmp_path) == []


def test_existing_folder_is_kept_unless_replaced(tmp_path: Path) -> None:
    final = tmp_path / "out"
    with publish_folder(final) as partial:
        (partial / "penjing.json").write_text("old")
    with pytest.raises(InputError, match="already exists; replace it with --force"), publish_folder(final):
        pass
    with publish_folder(final, replace=True) as partial:
        (partial / "penjing.json").write_text("new")
        assert (final / "penjing.json").read_text() == "old"
    assert (final / "penjing.json").read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_failed_replacement_keeps_the_old(tmp_path: Path) -> None:
    final = tmp_path / "out"
    with publish_folder(final) as partial:
        (partial / "penjing.json").write_text("old")
    with pytest.raises(KeyboardInterrupt), publish_folder(final, replace=True):
        raise KeyboardInterrupt
    assert (final / "penjing.json").read_text() == "old"


def test_replacement_where_the_file_system_cannot_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        def renameat2(self, *_: object) -> int:
            return -1

    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: Libc())
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.EINVAL)
    final = tmp_path / "out"
    for text in ("old", "new"):
        with publish_folder(final, replace=True) as partial:
            (partial / "penjing.json").write_text(text)
    assert (final / "penjing.json").read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_folder_of_someone_else_is_never_replaced(tmp_path: Path) -> None:
    final = tmp_path / "home"
    final.mkdir()
    (final / "thesis.tex").write_text("years of work")
    with (
        pytest.raises(InputError, match=r"holds no penjing\.json, so it is not replaced"),
        publish_folder(final, replace=True),
    ):
        pass
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"), publish_folder(tmp_path / "file", replace=True):
        pass
    assert (final / "thesis.tex").exists()


def test_empty_folder_counts_as_absent(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with publish_folder(tmp_path / "out") as partial:
        (partial / "a").write_text("1")
    assert names(tmp_path / "out") == ["a"]


def test_two_writers_one_wins_the_other_is_told(tmp_path: Path) -> None:
    final = tmp_path / "out"
    with pytest.raises(InputError, match="already exists"), publish_folder(final) as first:  # noqa: PT012
        (first / "a").write_text("first")
        with publish_folder(final) as second:
            assert first.exists()  # its writer lives: not stale
            (second / "a").write_text("second")
    assert (final / "a").read_text() == "second"
    assert names(tmp_path) == ["out"]


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    code = """
        import os, signal, sys
        from pathlib import Path
        from penjing.core.files import publish_folder
        with publish_folder(Path(sys.argv[1])) as partial:
            (partial / "a").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    final = tmp_path / "o[u]t*"  # a name that a glob would misread
    other = tmp_path / ".other.partial-1-x"
    other.mkdir()
    assert run(code, final).returncode == -9
    assert len(names(tmp_path)) == 2
    with publish_folder(final) as partial:
        assert names(tmp_path) == sorted([other.name, partial.name])
    assert names(tmp_path) == sorted([other.name, final.name])


def test_file_size_limit_is_one_clear_error(tmp_path: Path) -> None:
    code = """
        import resource, sys
        from pathlib import Path
        from penjing.core.errors import SetupError
        from penjing.core.files import atomic_write_bytes, publish_folder
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        folder = Path(sys.argv[1])
        try:
            atomic_write_bytes(folder / "file", bytes(5000))
        except SetupError as error:
            print(error)
        try:
            with publish_folder(folder / "out") as partial:
                (partial / "a").write_bytes(bytes(5000))
        except SetupError as error:
            print(error)
    """
    done = run(code, tmp_path)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"cannot write {tmp_path / name}: the file-size limit is reached; raise it (ulimit -f) and run again"
        for name in ("file", "out")
    ]
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "read-only"), (errno.EACCES, "permission is denied")],
)
def test_refusals_of_the_system_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    def refuse(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(SetupError, match=message):
        atomic_write_text(tmp_path / "a", "text")
    with pytest.raises(SetupError, match=message), publish_folder(tmp_path / "out") as partial:
        (partial / "a").write_text("1")
    assert names(tmp_path) == []


def test_other_system_errors_are_not_disguised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), publish_folder(tmp_path / "out"):
        (tmp_path / "missing").read_text()


def test_a_file_in_the_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="file is a file, so"), publish_folder(tmp_path / "file" / "out"):
        pass


def test_atomic_write_replaces(tmp_path: Path) -> None:
    atomic_write_bytes(tmp_path / "sub" / "a", b"1")
    atomic_write_text(tmp_path / "sub" / "a", "ü")
    assert (tmp_path / "sub" / "a").read_bytes() == "ü".encode()
    assert names(tmp_path / "sub") == ["a"]


def test_a_file_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder; give the name of the file to write"):
        atomic_write_text(tmp_path, "x")
    with pytest.raises(SetupError, match=r"cannot write /proc/x\.toml: no folder can be made there; choose another"):
        atomic_write_text(Path("/proc/x.toml"), "x")
    assert names(tmp_path) == []


def test_where_nothing_may_be_written_is_known_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_replaceable(tmp_path / "a" / "out", False, "a")
    monkeypatch.setattr("os.access", lambda path, _: path != tmp_path)
    with pytest.raises(SetupError, match=r"cannot write .*/a/out: permission is denied; choose a folder"):
        check_replaceable(tmp_path / "a" / "out", False, "a")


def test_a_link_leads_to_where_the_folder_is_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in ("absent", "empty"):
        link = tmp_path / f"to-{target}"
        link.symlink_to(target)
        for content in ("1", "2"):
            with publish_folder(link, replace=content == "2", marker="a") as partial:
                (partial / "a").write_text(content)
            assert link.is_symlink()
            assert (tmp_path / target / "a").read_text() == content
    assert names(tmp_path) == ["absent", "empty", "to-absent", "to-empty"]


def test_links_are_followed_before_the_work_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    for name, target in (("one", "other"), ("other", "one"), ("closed", "shut/out"), ("inside", "file/out")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "shut").mkdir()
    for name in ("one", "one/out"):
        with pytest.raises(SetupError, match="a link there leads back to itself; choose another folder"):
            check_replaceable(tmp_path / name, False, "a")
    with pytest.raises(SetupError, match="a link there leads back to itself; choose another folder"):
        check_writable(tmp_path / "one" / "a.json")
    with pytest.raises(InputError, match="file is a file, so"):
        check_replaceable(tmp_path / "inside", False, "a")
    monkeypatch.setattr("os.access", lambda path, _: path != tmp_path / "shut")
    with pytest.raises(SetupError, match="permission is denied"):
        check_replaceable(tmp_path / "closed", False, "a")


def test_a_file_is_written_behind_a_link_to_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("absent")
    check_writable(tmp_path / "link" / "a")
    atomic_write_text(tmp_path / "link" / "a", "1")
    assert (tmp_path / "absent" / "a").read_text() == "1"


def test_a_file_in_the_path_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for write in (check_writable, lambda path: atomic_write_text(path, "x")):
        with pytest.raises(InputError, match=r"file is a file, so .*/a cannot lie in it"):
            write(tmp_path / "file" / "a")


def test_a_folder_that_may_not_be_looked_into_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(SetupError, match="permission is denied"):
        check_replaceable(tmp_path / "out", True, "a")


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_file(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with pytest.raises(InputError, match="cannot read"):
        sha256_file(tmp_path / "b")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("PENJING_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_dir() == Path("/a")
    monkeypatch.delenv("PENJING_CACHE")
    assert cache_dir() == Path("/b/penjing")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == Path("/home/me/.cache/penjing")


def test_a_folder_that_cannot_be_made_is_said_so_and_a_missing_input_is_not(tmp_path: Path) -> None:
    message = "cannot write /proc/none/out: no folder can be made there"
    with pytest.raises(SetupError, match=message), publish_folder(Path("/proc/none/out")):
        pass
    with pytest.raises(FileNotFoundError), publish_folder(tmp_path / "out"):
        (tmp_path / "input").read_text()
