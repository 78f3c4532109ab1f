"""Addresses of S3, through s3fs: names, changes, keys and connections, against as much of a server as reading needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penjing.core.errors import InputError, SetupError
from penjing.core.remote import files
from penjing.core.remote.files import remote_file, remote_files, store_of
from penjing.core.text.source_files import remote_files_below
from tests.core.remote.server import Files, serving

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("s3fs")

NAMES = ["#h.txt", "a b.txt", "deep/er.txt", "q?x=1.txt", "ä+%20.txt", "/twice.txt"]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path))
    monkeypatch.setattr(files, "_FIRST_WAIT_S", 0.001)
    files._checked_at.clear()
    store = Files(
        {f"bucket/d/{name}": name.encode() for name in (*NAMES, ".hidden.txt")}
        | {"bucket/d/": b"", "bucket/d/deep/": b""}
    )
    with serving(store) as address:
        files._store.cache_clear()
        user = {"endpoint_url": address, "key": "one", "secret": "two", "config_kwargs": {"read_timeout": 7}}
        monkeypatch.setitem(fsspec.config.conf, "s3", user)
        yield store
    files._store.cache_clear()


def test_objects_of_a_folder_whatever_their_names(server: Files) -> None:
    found = remote_files("s3://bucket/d/")
    assert [each.address for each in found] == sorted(f"s3://bucket/d/{name}" for name in NAMES)
    assert all(each.fetch(0, each.size).decode() == each.address.removeprefix("s3://bucket/d/") for each in found)
    assert sorted(name for _, name in remote_files_below("s3://bucket/d")) == sorted(NAMES)
    assert remote_file("s3://bucket/d/a b.txt") == next(each for each in found if each.name == "a b.txt")


def test_what_is_not_there_and_what_changes(server: Files) -> None:
    with pytest.raises(InputError, match=r"s3://bucket/none.txt does not exist"):
        remote_file("s3://bucket/none.txt")
    with pytest.raises(InputError, match=r"s3://bucket/none/ (does not exist|holds no files)"):
        remote_files("s3://bucket/none/")
    file = remote_file("s3://bucket/d/a b.txt")
    server.files["bucket/d/a b.txt"] = b"b a.txt"
    with pytest.raises(InputError, match=r"a b.txt was changed while it was read \(7 bytes, now 7\)"):
        file.fetch(0, 3)


def test_a_store_that_fails_is_asked_again_and_no_more_often_than_said(server: Files) -> None:
    file = remote_file("s3://bucket/d/a b.txt")
    server.failures = [503, 500, 503]
    assert file.fetch(2, 5) == b"b.t"
    assert server.gets["bucket/d/a b.txt"] == 4
    server.failures = [503] * 40
    with pytest.raises(SetupError, match=r"a b.txt cannot be read: .*after 6 tries"):
        file.fetch(0, 2)
    assert server.gets["bucket/d/a b.txt"] == 4 + 6  # s3fs and its library would each ask again
    server.failures.clear()
    server.status = 403
    with pytest.raises(SetupError, match=r"its store does not let us in \(Forbidden\); give"):
        remote_file("s3://bucket/d/a b.txt")


def test_what_the_user_says_of_the_store_goes_first(server: Files) -> None:
    said = store_of("s3://bucket/x").config_kwargs
    assert (said["read_timeout"], said["connect_timeout"]) == (7, 10)
