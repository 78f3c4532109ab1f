"""Long prompts on their way to the engine: chat templates and tokenizers work beside the server's thread, not on it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from penjing.core.errors import OverloadedError

INLINE_BYTES = 4096  # a shorter prompt takes about a millisecond: less than handing it over may cost the others
MAX_PENDING_BYTES = 64 << 20
NUM_THREADS = 2
WAITING_THREADS = 32  # where those of images wait for another process, which computes what is there in one batch

log = logging.getLogger(__name__)


class Intake:
    """Runs what prepares a request, at once where that is short, else on threads of its own; what waits is bounded."""

    def __init__(self) -> None:
        self._pool = self._slow_pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="penjing-intake")
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self.num_slow = 0
        """Of the prompts that wait or are read, those that are not quick."""

    def widen(self, threads: int) -> None:
        """Give those that are not quick threads of their own, on which they mostly wait. Before the first prompt."""
        self._slow_pool = ThreadPoolExecutor(threads, thread_name_prefix="penjing-images")

    def run(self, num_bytes: int, work: Callable[[], None], quick: bool = True) -> None:
        """Do `work` for a prompt of `num_bytes`; whatever it raises is its own matter off this thread. It may take
        long though the prompt is short unless it is `quick`.

        Raises:
            OverloadedError: too many bytes wait already.
        """
        if quick and num_bytes <= INLINE_BYTES:
            return work()
        with self._lock:
            if self._pending_bytes and self._pending_bytes + num_bytes > MAX_PENDING_BYTES:
                raise OverloadedError(
                    f"prompts of {self._pending_bytes} bytes wait to be read, at most {MAX_PENDING_BYTES} may; "
                    "retry in 1 s"
                )
            self._pending_bytes += num_bytes
            self.num_slow += not quick
        (self._pool if quick else self._slow_pool).submit(self._do, num_bytes, work, quick)

    def stop(self) -> None:
        """Wait for what has begun or waits."""
        self._pool.shutdown()
        self._slow_pool.shutdown()

    def _do(self, num_bytes: int, work: Callable[[], None], quick: bool) -> None:
        try:
            work()
        except Exception:
            log.exception("a prompt could not be handed to the engine")
        finally:
            with self._lock:
                self._pending_bytes -= num_bytes
                self.num_slow -= not quick
