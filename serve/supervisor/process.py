"""One run of the tritonserver process: how it is started, watched and ended."""

from __future__ import annotations

import errno
import os
import secrets
import select
import signal
import socket
import subprocess
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from penjing.core.cluster.tied import end_with
from penjing.core.config import Config
from penjing.core.errors import ConfigError, SetupError
from penjing.serve.client.protocol import (
    ADAPTERS_VARIABLE,
    DECODER,
    ENGINE_VARIABLE,
    MODEL_VARIABLE,
    PULSE_VARIABLE,
    SIGHT,
    host_port,
)
from penjing.serve.families.base import Family
from penjing.serve.families.repository import models_of
from penjing.serve.gate.config import FrontConfig
from penjing.serve.supervisor.confine import confine
from penjing.serve.supervisor.install import ServerInstall
from penjing.serve.supervisor.state import adapters_path, opened_log, remove_shared_memory, shm_prefix
from penjing.serve.triton.pulse import EYES_SLOT, Command, Pulse

LOOPBACK = "127.0.0.1"
RESTRICTED = "shared-memory,model-repository,trace,logging"
"""APIs that need a key which nobody can send: their callers read and write a 2.51 server's memory, load code, and
choose files that it writes."""
KEY_BYTES = 10_000
"""Every user of the machine can read the key among the server's arguments. But as 20,000 digits it is longer than gRPC
(16 KiB) and the server's HTTP (8 KiB) take a header, so that it cannot be sent."""
MODEL_PROCESS, EYES_PROCESS = "the model's process", "the process of what the model sees with"
EXIT_SECONDS = 5
ANSWER_SECONDS = 24 * 3600  # for what runs when the server ends: the supervisor decides how long it may take


class ServeConfig(Config):
    """Where the server listens and how patient its supervisor is (seconds)."""

    host: str = Field(default=LOOPBACK, description="Address on which gRPC listens.")
    grpc_port: int = Field(default=8001, description="Port of gRPC.")
    http_port: int | None = Field(
        default=None, description="Port of Triton server's own HTTP, on loopback alone. None: it is closed."
    )
    metrics_port: int = Field(default=8002, description="Port of the metrics for Prometheus, on loopback alone.")
    start_timeout: float = Field(default=600.0, description="For loading the model and the first token.")
    drain_timeout: float = Field(default=60.0, description="For running answers when the server stops.")
    freeze_after: float = Field(
        default=0.7,
        description="Without a sign of life from the model's process: the server stops answering until one comes.",
    )
    hang_timeout: float = Field(
        default=5.0,
        description="Without a sign of life, though it had processors: the server is killed and started again.",
    )
    starve_timeout: float = Field(
        default=60.0, description="Without a sign of life, for want of a processor: the same."
    )
    step_timeout: float = Field(default=120.0, description="For one step of the engine: longer counts as hung.")
    shared_memory_bytes: int = Field(
        default=256 << 20,
        ge=16 << 20,
        description="Between Triton server and a decoder's process: a request that does not fit is refused.",
    )
    model_name: str | None = Field(default=None, description="The model's name on the server. None: that of its kind.")
    model_version: int = Field(default=1, description="The version that a named model has on the server.")
    fleet_pid: int = Field(default=0, description="Process that serves this model beside others; 0: there is none.")
    front: FrontConfig | None = Field(default=None, description="The HTTP front before it; None: there is none.")

    def ports(self) -> dict[str, int]:
        """Port by the flag that sets it; a closed one is left out."""
        ports = {"--grpc-port": self.grpc_port, "--http-port": self.http_port, "--metrics-port": self.metrics_port}
        return {flag: port for flag, port in ports.items() if port is not None}

    def address_of(self, flag: str) -> str:
        """Where the port of `flag` listens: only gRPC's is for other machines."""
        return self.host if flag == "--grpc-port" else LOOPBACK

    def address(self, port: int) -> str:
        """host:port, as clients write it."""
        return host_port(self.host, port)

    @property
    def endpoints(self) -> str:
        """Where clients find what, for the terminal."""
        front = "" if self.front is None else f"OpenAI {self.front.url}/v1, "
        http = "" if self.http_port is None else f"HTTP {LOOPBACK}:{self.http_port}, "
        return f"{front}gRPC {self.address(self.grpc_port)}, {http}metrics {LOOPBACK}:{self.metrics_port}/metrics"


def check_ports(config: ServeConfig) -> None:
    """Raises ConfigError if two ports are the same and SetupError if one is taken, naming port and flag."""
    seen: dict[int, str] = {}
    wanted = [(flag, config.address_of(flag), port) for flag, port in config.ports().items()]
    if config.front is not None:
        wanted.append(("--openai", config.front.host, config.front.port))
    for flag, host, port in wanted:
        if port in seen:
            raise ConfigError(f"{seen[port]} and {flag} are both {port}; give each its own port")
        seen[port] = flag
        _check_port(flag, host, port)


def _check_port(flag: str, host: str, port: int) -> None:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise SetupError(f"--host {host!r} is not an address of this machine: {error.strerror}") from None
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise SetupError(f"--host {host!r} is not an address of this machine: {error.strerror}") from None
            raise SetupError(
                f"port {port} ({flag}) on {host} cannot be used: {error.strerror}; choose another with {flag}"
            ) from None


@dataclass
class ServerProcess:
    """A running tritonserver and the pulse of its model; `eyes` is that of what the model sees with, where it is a
    model of its own."""

    config: ServeConfig
    process: subprocess.Popen[bytes]
    pulse: Pulse
    server_fd: int
    eyes: Pulse | None = None
    stub_fd: int = -1
    eyes_fd: int = -1
    frozen: bool = False

    @classmethod
    def start(
        cls,
        install: ServerInstall,
        config: ServeConfig,
        family: Family,
        repository: Path,
        model: Path,
        engine_json: str,
    ) -> ServerProcess:
        """Start the server in a session of its own, so that the terminal's Ctrl-C reaches the supervisor alone.

        Raises:
            OSError: the machine has no room for it; nothing is left of it then.
        """
        port = config.grpc_port
        remove_shared_memory(port)
        undo = ExitStack()
        pulse = Pulse()
        undo.callback(pulse.close)
        names = {MODEL_VARIABLE: str(model), ENGINE_VARIABLE: engine_json, PULSE_VARIABLE: str(pulse.path)}
        if family.name == DECODER:
            names[ADAPTERS_VARIABLE] = str(adapters_path(port))
        supervisor = os.getpid()

        def prepare() -> None:
            confine(config.shared_memory_bytes if family.name == DECODER else None)
            end_with(supervisor, signal.SIGKILL)

        with undo, opened_log(port) as log:
            process = subprocess.Popen(
                command_line(install, config, repository),
                env=install.environment() | names,
                # The embedded Python takes no PYTHONPATH; its sys.path starts with the working directory.
                cwd=install.numpy_folder or install.binary.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=prepare,
            )
            undo.callback(process.wait)
            undo.callback(process.kill)
            eyes = Pulse(pulse.path, EYES_SLOT) if SIGHT in models_of(repository) else None
            started = cls(config, process, pulse, os.pidfd_open(process.pid), eyes)
            undo.pop_all()
        return started

    def watch_stubs(self) -> None:
        """Watch the processes of models too, from their first beats on."""
        self.stub_fd = self._watched(self.stub_fd, self.pulse)
        self.eyes_fd = self._watched(self.eyes_fd, self.eyes)

    def _watched(self, fd: int, pulse: Pulse | None) -> int:
        if fd < 0 and pulse is not None and pulse.stub_pid:
            try:
                return os.pidfd_open(pulse.stub_pid)
            except ProcessLookupError:  # it ended right after its first beat: `wait` will see the server end
                os.killpg(self.process.pid, signal.SIGKILL)
        return fd

    def command(self, command: Command) -> None:
        """Tell the processes of models."""
        for pulse in filter(None, (self.pulse, self.eyes)):
            pulse.command = command

    def wait(self, seconds: float, wake_fd: int) -> str | None:
        """Wait until a process ends (says which), `wake_fd` becomes readable, or `seconds` pass."""
        self.watch_stubs()
        names = {self.server_fd: "tritonserver", self.stub_fd: MODEL_PROCESS, self.eyes_fd: EYES_PROCESS}
        readable, _, _ = select.select([fd for fd in (*names, wake_fd) if fd >= 0], [], [], seconds)
        if wake_fd in readable:
            os.read(wake_fd, 64)
        for fd, name in names.items():
            if fd in readable:
                return f"{name} ended unexpectedly"
        return None

    def stub_is_stopped(self) -> bool:
        """Whether the model's process is stopped by a signal."""
        return _is_stopped(self.pulse.stub_pid)

    def is_stopped(self) -> bool:
        """Whether the server is stopped by a signal that was not ours."""
        return not self.frozen and _is_stopped(self.process.pid)

    def freeze(self) -> None:
        """Stop answering, health checks included, without ending anything: a short hang costs no request."""
        if not self.frozen:
            self.frozen = True
            os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Answer again."""
        if self.frozen:
            self.frozen = False
            os.kill(self.process.pid, signal.SIGCONT)

    def ask_to_end(self) -> None:
        """Triton server refuses what comes, answers what it has queued, and ends."""
        self.thaw()
        self.process.terminate()

    def exit(self) -> None:
        """Ask the server to end, with nothing running any more; `kill` is to follow."""
        self.ask_to_end()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_SECONDS + 3)

    def kill(self) -> None:
        """End server and model at once (connections break, so no client waits in vain) and clean up behind them."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for fd in (self.server_fd, self.stub_fd, self.eyes_fd):
            if fd >= 0:
                os.close(fd)
        for pulse in filter(None, (self.eyes, self.pulse)):
            pulse.close()
        remove_shared_memory(self.config.grpc_port)


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] == "T"


def command_line(install: ServerInstall, config: ServeConfig, repository: Path) -> list[str]:
    """The tritonserver command: the models of the repository, explicit control, sensitive APIs closed."""
    closed = f"{RESTRICTED}:penjing={secrets.token_hex(KEY_BYTES)}"
    http = ["--allow-http=false"]
    if config.http_port is not None:
        http = [f"--http-address={LOOPBACK}", f"--http-port={config.http_port}", f"--http-restricted-api={closed}"]
    return [
        str(install.binary),
        f"--model-repository={repository}",
        f"--backend-directory={install.backends}",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in models_of(repository)),
        "--disable-auto-complete-config",
        f"--grpc-address={config.host}",
        f"--grpc-port={config.grpc_port}",
        *http,
        f"--metrics-address={LOOPBACK}",
        f"--metrics-port={config.metrics_port}",
        f"--grpc-restricted-protocol={closed}",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix(config.grpc_port)}",
        f"--backend-config=python,stub-timeout-seconds={int(config.start_timeout)}",
        f"--exit-timeout-secs={ANSWER_SECONDS}",
        "--pinned-memory-pool-byte-size=0",
        "--allow-cpu-metrics=false",
        "--allow-gpu-metrics=false",
    ]
