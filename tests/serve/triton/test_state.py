"""What a server leaves in the run folder: stale files go, processes of others stay."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from penjing.core.errors import InputError, ServerError, SetupError
from penjing.serve.fleet.status import status_to_terminal
from penjing.serve.supervisor import state
from penjing.serve.supervisor.stop import stop
from tests.serve.triton.serving import free_ports, leftovers


def test_a_server_that_a_full_disk_left_without_its_state_is_not_cleaned_up_behind() -> None:
    """It was told to be none, and its shared memory and its model repository were removed while it ran."""
    port = free_ports(1)[0]
    with state.owning(port):
        region = state.SHM_FOLDER / f"{state.shm_prefix(port)}living"
        region.write_bytes(b"x")
        with pytest.raises(ServerError, match="does not say which process it is; is the disk full"):
            stop(port)
        assert region.exists()


def test_stale_files_are_removed_and_strangers_are_not_killed() -> None:
    port = free_ports(1)[0]
    with subprocess.Popen(["sleep", "60"]) as stranger:  # now has the number of a server long gone
        state.run_folder().mkdir(parents=True, exist_ok=True)
        old = state.ServerState("ready", "m", "127.0.0.1", port, 1, 2, stranger.pid, stranger.pid, stranger.pid)
        state.write_state(old)
        (state.SHM_FOLDER / f"{state.shm_prefix(port)}old").write_bytes(b"x")
        with state.owning(port):
            assert leftovers(port) == []
            with pytest.raises(SetupError, match="penjing stop"), state.owning(port):
                pass
        assert stranger.poll() is None
        stranger.kill()
    stop(port)  # nothing there: says so
    state_file = state.state_path(port)
    state_file.write_text(json.dumps({"state": "ready"}))
    assert state.read_state(port) is None
    state_file.unlink()


def test_what_is_known_of_a_server_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_ports(1)[0]
    served, other = tmp_path / "served", tmp_path / "other"
    with state.owning(port):
        state.write_state(state.ServerState("ready", str(served), "127.0.0.1", port, 0, 2, 0, name="decoder"))
        status_to_terminal()
        shown = capsys.readouterr().err
        assert re.search(rf"port {port}.*name +decoder", shown, re.DOTALL), shown
        state.check_serves(f"localhost:{port}", served / ".." / "served")
        state.check_serves(f"elsewhere:{port}", other)
        with pytest.raises(InputError, match=rf"localhost:{port} serves .*served, not .*other; name that folder"):
            state.check_serves(f"localhost:{port}", other)
