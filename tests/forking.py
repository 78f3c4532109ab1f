"""Python processes that need not import anything: forked from one that has imported what training imports.

Importing takes four seconds of processor time of each process that trains, more than a small run itself. `Forked`
starts such processes as `subprocess.Popen` does. What is tested of starting itself needs a new interpreter: take Popen.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.utils.flop_counter",
    "penjing.core.cli",
    "penjing.train.run",
    "penjing.train.families.decoder",
    "penjing.train.parallel.mesh",
    "penjing.train.parallelize",
)
_LONGEST = 1 << 20  # of a request, bytes


class Forked:
    """A process that runs `command`, [python, script, …], [python, "-m", module, …] or [python, "-c", code, …]; what
    tests use of Popen.

    Args:
        stdout, stderr: open files; None is what the tests' own process has, `subprocess.STDOUT` what stdout is.
        pass_fds: stay open in the process, under other numbers.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
        **_: Any,  # stdin, sessions and what ends with whom: each is in a session of its own, and reads nothing
    ) -> None:
        out = sys.__stdout__ if stdout is None else stdout
        error = out if stderr == subprocess.STDOUT else sys.__stderr__ if stderr is None else stderr
        assert out is not None
        assert error is not None
        status, ended = os.pipe()
        request: dict[str, Any] = {"command": [str(part) for part in command[1:]], "env": dict(env or os.environ)}
        request["cwd"] = str(cwd or Path.cwd())
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asks:
            asks.connect(_server())
            socket.send_fds(asks, [json.dumps(request).encode()], [out.fileno(), error.fileno(), ended, *pass_fds])
            os.close(ended)
            self.pid = int(asks.recv(64))
        self.args = command
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended; negative: the signal that ended it."""
        if (code := self._wait(timeout)) is None:
            raise subprocess.TimeoutExpired([str(part) for part in self.args], timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Nothing happens where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            said = os.read(self._status, 64)
            os.close(self._status)
            self.returncode = int(said or -signal.SIGKILL)  # nothing is said where the server was ended
        return self.returncode


def run(
    command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of such a process, which keeps what it says."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        code = Forked(command, stdout=out, stderr=error, env=env).wait(timeout)
        for file in (out, error):
            file.seek(0)
        return subprocess.CompletedProcess([str(part) for part in command], code, out.read(), error.read())


@cache
def _server() -> str:
    """The address of this process's server, which ends with it."""
    address = f"\0penjing-tests-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        server = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C is for the tests, which close its input
            env=os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"},  # as penjing/train/__main__.py sets it
        )
    assert server.stdin is not None
    atexit.register(server.wait, 60)
    atexit.register(server.stdin.close)  # what is registered last comes first
    return address


def serve(listener: socket.socket) -> list[str]:
    """Fork a process for each request until standard input is closed. Returns in a forked one, with its command."""
    statuses: dict[int, int] = {}
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([listener, wake, sys.stdin], [], [])[0]
        if wake in ready:
            os.read(wake, 1024)
            while statuses and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                os.write(statuses[ended[0]], str(os.waitstatus_to_exitcode(ended[1])).encode())
                os.close(statuses.pop(ended[0]))
        if sys.stdin in ready:
            for pid in statuses:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if listener in ready:
            asks = listener.accept()[0]
            data, fds, _, _ = socket.recv_fds(asks, _LONGEST, 16)
            request = json.loads(data)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (wake, woken, fds[2], listener.detach(), asks.detach(), *statuses.values()):
                    os.close(fd)
                _become(request, fds[0], fds[1])
                return request["command"]
            asks.send(str(pid).encode())
            asks.close()
            statuses[pid] = fds[2]
            for fd in (*fds[:2], *fds[3:]):
                os.close(fd)


def _become(request: dict[str, Any], out: int, error: int) -> None:
    """Give this process the files, the environment and the folder of a new one."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, fd in enumerate((nothing, out, error)):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    import torch

    if threads := os.environ.get("OMP_NUM_THREADS"):  # which is read when torch is loaded
        torch.set_num_threads(int(threads))


def main() -> None:
    """Import, then serve at the socket whose number is the argument."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    os.fsync = lambda _: None  # as in the tests' own process (conftest.py)
    program, *arguments = serve(socket.socket(fileno=int(sys.argv[1])))
    if program == "-c":
        code, *arguments = arguments
        sys.path[0] = ""
        sys.argv = ["-c", *arguments]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif program == "-m":
        program, *arguments = arguments
        sys.path[0] = ""
        sys.argv = [program, *arguments]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program).parent)
        sys.argv = [program, *arguments]
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
