"""What is known of a served port: `cache/run/PORT.*`, one set of files a supervisor, held by a lock while it lives."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from penjing.core.cache import cache_dir
from penjing.core.errors import InputError, SetupError
from penjing.core.files import atomic_write_text, writing
from penjing.serve.client.protocol import host_port
from penjing.serve.triton.adapter_list import said_path

SHM_FOLDER = Path("/dev/shm")
MAX_LOG_BYTES = 16 << 20
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class ServerState:
    """What a supervisor last wrote. `state`: starting, ready, not ready, restarting, draining, failed."""

    state: str
    model: str
    host: str
    grpc_port: int
    http_port: int
    metrics_port: int
    supervisor_pid: int
    server_pid: int = 0
    stub_pid: int = 0
    front_pid: int = 0
    front_url: str = ""
    restarts: int = 0
    message: str = ""
    log: str = ""
    name: str = ""
    """The model's on the server."""
    fleet_pid: int = 0
    """Process that serves this model beside others; 0: there is none."""

    @property
    def grpc(self) -> str:
        """host:port of its gRPC endpoint."""
        return host_port(self.host, self.grpc_port)


def run_folder() -> Path:
    """Where the files lie."""
    return cache_dir() / "run"


def state_path(grpc_port: int) -> Path:
    return run_folder() / f"{grpc_port}.json"


def served_at(server: str) -> ServerState | None:
    """What is known of the server at host:port of a gRPC endpoint, if this user runs it here."""
    host, _, port = server.rpartition(":")
    if host not in LOCAL_HOSTS or not port.isdigit() or not is_running(int(port)):
        return None
    return read_state(int(port))


def served_name(server: str) -> str | None:
    """What the model at `server` is called there, if that is known; see `served_at`."""
    found = served_at(server)
    return None if found is None else found.name or None


def check_serves(server: str, folder: Path) -> None:
    """Refuse a server that is known to have another model.

    Raises:
        InputError: it serves another folder.
    """
    found = served_at(server)
    if found is not None and Path(found.model).resolve() != folder.resolve():
        raise InputError(f"{server} serves {found.model}, not {folder}; name that folder, or another --server")


def log_path(grpc_port: int) -> Path:
    return run_folder() / f"{grpc_port}.log"


def errors_path(grpc_port: int) -> Path:
    """What a supervisor in the background says."""
    return run_folder() / f"{grpc_port}.supervisor.log"


def front_log_path(grpc_port: int) -> Path:
    """The HTTP front's requests, a line each."""
    return run_folder() / f"{grpc_port}.front.log"


def drain_path(grpc_port: int) -> Path:
    """Holds how many seconds whoever asked for the stop gives running answers."""
    return run_folder() / f"{grpc_port}.drain"


def adapters_path(grpc_port: int) -> Path:
    """Which adapters a decoder shall have, once that has changed (`serve/triton/adapter_list.py`)."""
    return run_folder() / f"{grpc_port}.adapters.json"


def forget_adapters(grpc_port: int) -> None:
    """A server that starts has those that its command names."""
    for path in (adapters_path(grpc_port), said_path(adapters_path(grpc_port))):
        path.unlink(missing_ok=True)


def repository_path(grpc_port: int) -> Path:
    """The model repository that was made for this server."""
    return run_folder() / f"{grpc_port}.models"


def shm_prefix(grpc_port: int) -> str:
    """How the names of the server's shared-memory regions begin."""
    return f"penjing-{grpc_port}-"


@contextmanager
def owning(grpc_port: int) -> Iterator[None]:
    """Hold the port's lock; what a killed supervisor left (processes, shared memory, files) is removed first.

    Raises:
        SetupError: a living supervisor holds it.
    """
    folder = run_folder()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # logs and the state say which models and files there are
        lock = open(folder / f"{grpc_port}.lock", "w")  # noqa: SIM115 (the with below)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SetupError(
                f"a penjing server has gRPC port {grpc_port} already; stop it with 'penjing stop --grpc-port "
                f"{grpc_port}', or choose another port with --grpc-port"
            ) from None
        clean_up(grpc_port)
        try:
            yield
        finally:
            clean_up(grpc_port)


def clean_up(grpc_port: int) -> None:
    """End the processes that the state names, if they are still a Triton server's, and remove its files but the log."""
    state = read_state(grpc_port)
    if state is not None:
        for pid, name in ((state.server_pid, "tritonserver"), (state.stub_pid, "triton_python_b")):
            if pid and _process_name(pid) == name:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    remove_shared_memory(grpc_port)
    for path in (state_path(grpc_port), drain_path(grpc_port)):
        path.unlink(missing_ok=True)
    shutil.rmtree(repository_path(grpc_port), ignore_errors=True)


def remove_shared_memory(grpc_port: int) -> None:
    """Remove the regions that a killed server left."""
    for region in SHM_FOLDER.glob(f"{shm_prefix(grpc_port)}*"):
        region.unlink(missing_ok=True)


def is_running(grpc_port: int) -> bool:
    """Whether a living supervisor holds the port's lock."""
    try:
        with open(run_folder() / f"{grpc_port}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def running_ports() -> list[int]:
    """gRPC ports whose supervisor lives."""
    ports = sorted(int(path.stem) for path in run_folder().glob("*.lock") if path.stem.isdigit())
    return [port for port in ports if is_running(port)]


def fleet_ports(state: ServerState) -> list[int]:
    """gRPC ports of the servers that were started with this one, and its own."""
    if not state.fleet_pid:
        return [state.grpc_port]
    states = [read_state(port) for port in running_ports()]
    others = {found.grpc_port for found in states if found is not None and found.fleet_pid == state.fleet_pid}
    return sorted({state.grpc_port, *others})


def write_first_state(state: ServerState) -> None:
    """Write `state` before a server starts, which nobody could find or stop without it.

    Raises:
        SetupError: the disk does not take it.
    """
    atomic_write_text(state_path(state.grpc_port), json.dumps(asdict(state), indent=2) + "\n")


def write_state(state: ServerState) -> bool:
    """Write `state`; False where the disk does not take it, which must not end a server that answers."""
    try:
        write_first_state(state)
    except (SetupError, OSError):
        return False
    return True


def read_state(grpc_port: int) -> ServerState | None:
    """What was last written; None when there is nothing that can be read."""
    try:
        values: Any = json.loads(state_path(grpc_port).read_text(encoding="utf-8"))
        return ServerState(**{field.name: values[field.name] for field in fields(ServerState)})
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def append_log(grpc_port: int, line: str) -> None:
    """Add a line of the supervisor's to the server's log, if the disk takes it."""
    with suppress(OSError), open(log_path(grpc_port), "a", encoding="utf-8") as log:
        log.write(f"SUPERVISOR {datetime.now():%Y-%m-%d %H:%M:%S} {line}\n")


@contextmanager
def opened_log(grpc_port: int) -> Iterator[IO[bytes]]:
    """The server's log to append to; where the disk does not take a file, what is written goes nowhere."""
    try:
        log = open(os.open(log_path(grpc_port), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "wb")  # noqa: SIM115
    except OSError:
        log = open(os.devnull, "wb")  # noqa: SIM115 (the with below)
    with log:
        yield log


def rotate_log(path: Path) -> None:
    """Where a log has more than `MAX_LOG_BYTES`, keep it as NAME.1, in the place of the one before, and empty it. Its
    writers append, and go on at its start; what they write meanwhile may be lost."""
    try:
        if path.stat().st_size <= MAX_LOG_BYTES:
            return
        with suppress(OSError):  # a full disk: then what is old is lost
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)
    except FileNotFoundError:
        return


def tail(path: Path, lines: int = 20) -> str:
    """The last lines of a log, without the tables that Triton server prints."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    kept = [line for line in text.splitlines() if line.strip() and line[0] not in "+|"]
    return "\n".join(kept[-lines:])


def lives(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _process_name(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
