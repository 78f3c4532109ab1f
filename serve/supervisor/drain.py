"""The end of a server that was asked to stop: what runs is finished, what comes is refused."""

from __future__ import annotations

import time
from collections.abc import Callable

from penjing.serve.supervisor.process import EXIT_SECONDS, ServerProcess
from penjing.serve.triton.pulse import Command, Phase

POLL_SECONDS = 0.05
REFUSE_SECONDS = 0.2  # until the model refuses by itself, and asks nothing of a server that ends
FLUSH_SECONDS = 0.2  # for the last responses to leave the server's buffers


class Drain:
    """Ends `server`, whose running answers have `timeout` seconds.

    Args:
        wake_fd: becomes readable with each signal to stop.
        stops: how many of these have come: with the second nothing is waited for any more.
        say: tells the user.
    """

    def __init__(
        self,
        server: ServerProcess,
        timeout: float,
        wake_fd: int,
        stops: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        self._server, self._timeout = server, timeout
        self._wake_fd, self._stops, self._say = wake_fd, stops, say

    def own_queue(self) -> None:
        """Of a model that holds its requests itself."""
        server = self._server
        if server.pulse.stub_pid and server.pulse.phase is Phase.SERVING:
            owed = server.pulse.unanswered
            self._say(f"stopping: {owed} running answers have {self._timeout:.0f} s; Ctrl-C again ends them now")
            server.command(Command.DRAIN)
            self._drained(REFUSE_SECONDS, cut_short=False)
            self._seen()
            server.ask_to_end()  # its health is bad from now on, and what runs still gets its answer
            if not self._drained(self._timeout):
                server.command(Command.ABORT)
                self._drained(2.0, cut_short=False)
            time.sleep(FLUSH_SECONDS)
        server.exit()

    def servers_queue(self) -> None:
        """Let Triton server, which holds the queue, answer it. For a request that it has lost, as it may when a client
        cancels, it would wait without an end: seconds without a batch say that nothing else is left."""
        server = self._server
        self._say(f"stopping: running requests have {self._timeout:.0f} s; Ctrl-C again ends them now")
        server.command(Command.DRAIN)  # it asks nothing of a server that ends
        time.sleep(REFUSE_SECONDS)
        server.ask_to_end()
        busy_at = now = time.monotonic()
        deadline = now + self._timeout
        while server.process.poll() is None and self._stops() < 2 and now < min(deadline, busy_at + EXIT_SECONDS):
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if server.pulse.unanswered:
                busy_at = now

    def _drained(self, timeout: float, cut_short: bool = True) -> bool:
        deadline = time.monotonic() + timeout
        while self._server.pulse.phase is not Phase.DRAINED:
            ended = self._server.wait(POLL_SECONDS, self._wake_fd) is not None
            if ended or time.monotonic() > deadline or (cut_short and self._stops() > 1):
                return False
        return True

    def _seen(self) -> None:
        """Wait for images that another model computes: it takes no request once the server ends."""
        deadline = time.monotonic() + self._timeout
        while self._server.pulse.unseen and self._stops() < 2 and time.monotonic() < deadline:
            if self._server.wait(POLL_SECONDS, self._wake_fd) is not None:
                return
