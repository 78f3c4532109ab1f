"""The front as a process of the supervisor's: started, kept alive, drained and ended."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from penjing.core.cluster.tied import end_with
from penjing.core.errors import PenjingError, SetupError
from penjing.core.files import writing
from penjing.serve.access.keys import read_keys
from penjing.serve.gate.config import MODELS, VARIABLE, FrontConfig, FrontJob, FrontModel
from penjing.serve.gate.traces import check_traces
from penjing.serve.triton.hang_clock import HangClock

BEAT_SECONDS = 0.5
ALIVE, READY = b".", b"+"  # beats: the latter where every model has just answered
HANG_SECONDS = 15.0
START_SECONDS = 30.0  # to the first beat: imports from a slow disk
STARVE_SECONDS = 60.0  # beside these, in which it waits for a processor
END_SECONDS = 5.0
MAX_BACKOFF_SECONDS = 10.0
STABLE_SECONDS = 30.0
NEEDS = ("starlette", "uvicorn", "httptools", "uvloop", "prometheus_client")


def check_front(config: FrontConfig) -> None:
    """Refuse what would fail after the model was loaded.

    Raises:
        SetupError: a package, also of traces, the certificate or its key is missing, or they do not belong together.
        InputError: the file of keys cannot be used.
    """
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        raise SetupError(f"--openai needs {', '.join(missing)}; install with: pip install 'penjing[front]'")
    check_traces()
    if config.keys is not None:
        read_keys(config.keys)
    if config.certificate is not None:
        import ssl

        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.certificate, config.private_key)
        except (OSError, ssl.SSLError) as error:
            raise SetupError(
                f"--tls {config.certificate} {config.private_key} cannot be used: {error.strerror or error}; give a "
                "PEM certificate and its key"
            ) from None


class FrontProcess:
    """Keeps one front process; `keep` is called often and starts it again when it ended or hangs."""

    def __init__(self, job: FrontJob, stderr: Path) -> None:
        self._job, self._stderr = job, stderr
        self._backoff = 0.0
        self._restart_at = 0.0
        self._draining = False
        self._process: subprocess.Popen[bytes] | None = None
        self._beats = -1
        self._unsaid = b""
        self.restarts = 0
        self._start()

    @property
    def pid(self) -> int:
        """Of the process; 0 while there is none."""
        return 0 if self._process is None else self._process.pid

    def keep(self) -> str | None:
        """Start the process again when it is time to; what went wrong with it, once."""
        now = time.monotonic()
        if self._process is None:
            return self._start_again(now) if now >= self._restart_at else None
        self._say()
        with suppress(BlockingIOError):
            if beats := os.read(self._beats, 4096):
                if not self._alive:
                    self._alive, self._clock = True, HangClock(HANG_SECONDS, STARVE_SECONDS)
                self._last_beat = now
                self._ready = beats.endswith(READY)
        if (code := self._process.poll()) is not None:
            reason = f"the HTTP front ended unexpectedly (exit code {code})"
        elif (failure := self._clock.verdict(self._process.pid, now, now - self._last_beat)) is not None:
            reason = f"the HTTP front {failure}"
        else:
            return None
        self._kill()
        self._backoff = 0.0 if now - self._started > STABLE_SECONDS else self._backoff
        self._wait_longer(now)
        self.restarts += 1
        return reason

    def _start_again(self, now: float) -> str | None:
        """Why it could not be started, which must not end the models that answer: a full disk, or a machine without
        room for processes."""
        try:
            self._start()
        except (PenjingError, OSError) as error:
            if self._beats >= 0:  # without room for descriptors there is no pipe, either
                os.close(self._beats)
            self._beats = -1
            self._wait_longer(now)
            return f"the HTTP front cannot be started: {error}"
        return None

    def _wait_longer(self, now: float) -> None:
        self._restart_at = now + self._backoff
        self._backoff = min(max(1.0, 2 * self._backoff), MAX_BACKOFF_SECONDS)

    def show(self, models: tuple[FrontModel, ...]) -> None:
        """From now on it serves these; so does one that is started later."""
        self._job = self._job.model_copy(update={"models": models})
        self._unsaid += MODELS.dump_json(models) + b"\n"
        self._say()

    @property
    def has_heard(self) -> bool:
        """Whether all that `show` said has left this process."""
        return not self._unsaid

    @property
    def ready(self) -> bool:
        """What it last said: whether every model behind it has answered within ten seconds."""
        return self._process is not None and self._ready

    def answers(self) -> bool:
        """Whether it listens, and every model behind it has answered within ten seconds."""
        if self._process is None or not self._ready:
            return False
        front = self._job.front
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(front.host, front.host)
        try:
            socket.create_connection((host, front.port), timeout=1).close()
        except OSError:
            return False
        return self._process.poll() is None

    def drain(self) -> None:
        """From now on it refuses requests with 503; running answers go on."""
        self._draining = True
        self._signal(signal.SIGUSR1)

    def end(self) -> None:
        """End it; answers that are still under way have `END_SECONDS`."""
        if self._process is not None:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
            self._kill()

    def _start(self) -> None:
        self._beats, theirs = os.pipe()
        os.set_blocking(self._beats, False)
        os.set_blocking(theirs, False)
        job = self._job.model_copy(update={"beat_fd": theirs, "draining": self._draining})
        supervisor = os.getpid()

        def die_with_supervisor() -> None:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until it listens to it
            end_with(supervisor, signal.SIGKILL)

        try:
            with writing(self._stderr), open(self._stderr, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "penjing.serve.site.server"],
                    env=os.environ | {VARIABLE: job.model_dump_json()},
                    stdin=subprocess.PIPE,
                    bufsize=0,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs,),
                    start_new_session=True,  # the terminal's Ctrl-C reaches the supervisor alone
                    preexec_fn=die_with_supervisor,
                )
        finally:
            os.close(theirs)
        assert self._process.stdin is not None, "it is a pipe"
        os.set_blocking(self._process.stdin.fileno(), False)
        self._unsaid = b""  # the job says it all
        self._started = self._last_beat = time.monotonic()
        self._clock = HangClock(START_SECONDS, STARVE_SECONDS)
        self._alive = self._ready = False

    def _say(self) -> None:
        if self._process is not None and self._process.stdin is not None and self._unsaid:
            with suppress(BlockingIOError, BrokenPipeError):  # it is stopped, or gone: then it is started again
                self._unsaid = self._unsaid[os.write(self._process.stdin.fileno(), self._unsaid) :]

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _kill(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        os.close(self._beats)
        self._process, self._beats = None, -1
