"""How a command asks the process that keeps several models to change them, and hears what became of it.

One change at a time: the command holds a lock, writes what it wants into a file of the folder of state, which belongs
to the server's user alone, and waits until the process has written an outcome. No port is opened for it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import Field, ValidationError

from penjing.core.config import Config
from penjing.core.errors import ServerError, SetupError
from penjing.core.files import atomic_write_text, writing
from penjing.serve.fleet.plan import FleetModel
from penjing.serve.fleet.state import FleetState, is_alive, read_fleet
from penjing.serve.supervisor.state import is_running, lives, read_state, run_folder

POLL_SECONDS = 0.05
NAME = "llm"  # in an example


class Change(Config):
    """One of them, by the field that is set."""

    id: str = Field(description="Of this change, so that its outcome is told from an older one's.")
    load: FleetModel | None = Field(default=None, description="A model to load beside the others.")
    unload: str | None = Field(default=None, description="A model to end when its answers have ended.")
    shares: dict[str, float] | None = Field(default=None, description="Of versions of one model, by their names.")
    back: str | None = Field(default=None, description="A model whose versions get the shares they had before.")


class Answered(Config):
    """What became of a change."""

    id: str = Field(description="The change's.")
    said: str = Field(description="For the terminal.")
    failed: bool = Field(default=False, description="Whether everything is as it was before.")


def change_path(port: int) -> Path:
    """What is wanted of the models from this gRPC port on."""
    return run_folder() / f"{port}.change.json"


def outcome_path(port: int) -> Path:
    """What became of it."""
    return run_folder() / f"{port}.changed.json"


def ask_for(port: int, pid: int, **change: object) -> str:
    """Ask process `pid` for a change; what it says when that is made.

    Raises:
        ServerError: it cannot be made, or the process has ended.
        SetupError: another change is under way, or the disk is full.
    """
    wanted = Change.model_validate(change | {"id": secrets.token_hex(8)})
    with alone(run_folder() / f"{port}.change.lock"):
        atomic_write_text(change_path(port), wanted.model_dump_json(), 0o600)
        while (found := _outcome(port)) is None or found.id != wanted.id:
            if not lives(pid):
                raise ServerError("the process that keeps the models has ended; its log says why")
            time.sleep(POLL_SECONDS)
    if found.failed:
        raise ServerError(found.said)
    return found.said


def take_change(port: int) -> Change | None:
    """What is wanted, once; what no command of ours has written is dropped."""
    path = change_path(port)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    path.unlink(missing_ok=True)
    with suppress(ValidationError):
        return Change.model_validate_json(text)
    return None


def tell(port: int, outcome: Answered) -> bool:
    """Write what became of a change; False where the disk does not take it."""
    try:
        atomic_write_text(outcome_path(port), outcome.model_dump_json())
    except (SetupError, OSError):
        return False
    return True


def forget_changes(port: int) -> None:
    """Remove the files."""
    for path in (change_path(port), outcome_path(port)):
        path.unlink(missing_ok=True)


def _outcome(port: int) -> Answered | None:
    with suppress(OSError, UnicodeDecodeError, ValidationError):
        return Answered.model_validate_json(outcome_path(port).read_text(encoding="utf-8"))
    return None


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold a file, so that no other command changes the same meanwhile.

    Raises:
        SetupError: one does, or the disk is full.
    """
    with writing(lock):
        held = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SetupError("another change of these models is under way; try again when it is done") from None
        yield
    finally:
        os.close(held)


def found_fleet(port: int) -> FleetState:
    """The server on gRPC port `port`.

    Raises:
        SetupError: no server of models with names runs there.
    """
    found = read_fleet(port)
    if found is None or not is_alive(found):
        alone = read_state(port) if is_running(port) else None
        if alone is not None and alone.model and not alone.fleet_pid:
            raise SetupError(
                f"the server on gRPC port {port} has one model without a name, {alone.model}, and stays as it is; stop "
                f"it, and start it with a name to change it later: 'penjing serve {NAME}={alone.model}'"
            )
        raise SetupError(
            f"no server of models with names runs from gRPC port {port}; start one with 'penjing serve llm:1=FOLDER', "
            "or name its port with --grpc-port"
        )
    return found
