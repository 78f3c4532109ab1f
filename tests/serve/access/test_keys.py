"""The file of keys: what it holds, who may read it, and that no change is lost."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penjing.core.errors import ConfigError, InputError
from penjing.serve.access.keys import KeyRing, add_key, read_keys, revoke_key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_a_key_is_found_until_it_is_revoked(path: Path) -> None:
    secret = add_key(path, "alice", {"tokens_per_minute": 20})
    ring = KeyRing(path)
    found = ring.find(secret)
    assert found is not None
    assert (found.name, found.tokens_per_minute) == ("alice", 20)
    assert ring.find(secret[:-1]) is None
    assert ring.find("pj-" + "ü" * 20) is None
    assert ring.find("x" * 10_000_000) is None
    revoke_key(path, "alice")
    assert ring.find(secret) is None  # without a restart
    again = add_key(path, "alice", {})
    assert ring.find(again) is not None
    assert ring.find(secret) is None


def test_a_file_that_an_editor_of_windows_saved_is_read(path: Path) -> None:
    secret = add_key(path, "alice", {})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert KeyRing(path).find(secret) is not None


def test_the_file_has_no_secret_and_one_reader(path: Path) -> None:
    secret = add_key(path, "alice", {})
    assert len(secret) >= 43  # 256 bits
    assert secret not in path.read_text()
    assert hashlib.sha256(secret.encode()).hexdigest() in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert add_key(path, "bob", {}) != secret


def test_files_that_others_make_meanwhile_keep_their_modes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The umask belongs to all threads: two that changed it and put it back could leave each other's."""
    before, during = path.with_name("before"), path.with_name("during")
    before.touch()
    sync = os.fsync

    def touch_and_sync(descriptor: int) -> None:
        during.touch()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", touch_and_sync)
    add_key(path, "alice", {})
    assert during.stat().st_mode == before.stat().st_mode
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_file_that_others_can_read_or_change_is_refused(path: Path, mode: int) -> None:
    secret = add_key(path, "alice", {})
    ring = KeyRing(path)
    path.chmod(mode)
    with pytest.raises(InputError, match="chmod 600"):
        ring.find(secret)
    path.chmod(0o600)
    assert ring.find(secret) is not None


def test_a_damaged_file_lets_nobody_in(path: Path) -> None:
    secret = add_key(path, "alice", {})
    whole, ring = path.read_bytes(), KeyRing(path)
    for end in range(1, len(whole) - 1, 7):
        path.write_bytes(whole[:end])
        try:
            found = ring.find(secret)
        except InputError:
            continue
        assert found is None or found.name == "alice"  # only what comes after the hash is missing
        assert b"sha256" in whole[:end] or found is None
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="damaged"):
        ring.find(secret)
    path.unlink()
    with pytest.raises(InputError, match="penjing keys add"):
        ring.find(secret)
    path.mkdir()
    with pytest.raises(InputError):
        ring.find(secret)


@pytest.mark.parametrize(
    "text",
    [
        "schema_version = 2",
        "[[key]]\nname = 'a'",
        f"[[key]]\nname = 'a'\nsha256 = '{'0' * 63}'\ncreated = ''",
        f"[[key]]\nname = 'a'\nsha256 = '{'0' * 64}'\ncreated = ''\ntokens_per_minute = 0",
        f"[[key]]\nname = 'a/b'\nsha256 = '{'0' * 64}'\ncreated = ''",
        f"[[key]]\nname = 'a'\nsha256 = '{'0' * 64}'\ncreated = ''\n" * 2,
        "keys = 1",
    ],
)
def test_a_wrong_file_is_refused(path: Path, text: str) -> None:
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(InputError):
        read_keys(path)


def test_wrong_commands(path: Path) -> None:
    add_key(path, "alice", {})
    with pytest.raises(ConfigError, match="has a key already"):
        add_key(path, "alice", {})
    with pytest.raises(ConfigError, match="there is alice"):
        revoke_key(path, "bob")
    for name in ("", "a b", "../a", "a" * 65, "ü"):
        with pytest.raises(ConfigError, match="letters"):
            add_key(path, name, {})


def test_two_commands_at_once_lose_nothing(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from penjing.serve.access.keys import add_key\n"
        "for number in range(8): add_key(Path(sys.argv[1]), f'{sys.argv[2]}{number}', {})"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), name], env=os.environ) for name in "abc"]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert len(read_keys(path).key) == 24
