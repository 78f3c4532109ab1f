"""One thread that owns the engine: callers on any thread submit and cancel, outputs come back through callbacks."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from penjing.core.errors import BrokenEngineError, OverloadedError, RequestError, ServerError, UnavailableError
from penjing.serve.engine.engine import LLMEngine, PreparedRequest
from penjing.serve.engine.request import Request, RequestOutput
from penjing.serve.engine.stats import MASKS, EngineStats

OnOutputs = Callable[[list[RequestOutput]], None]

IDLE_WAIT_SECONDS = 0.1  # an idle loop still beats ten times a second
MAX_CONSECUTIVE_FAILURES = 3

log = logging.getLogger(__name__)


class EngineLoop:
    """Runs `engine.step()` while there is work.

    `on_outputs` runs on the loop's thread with what one step gave one request: it must hand the outputs over (to a
    queue) and return. Each request gets exactly one final output per sequence (`finish_reason` set), also when it is
    cancelled, fails, or the loop stops.

    `heartbeat` is the `time.monotonic()` of the last pass. A pass that takes long, or a loop that gave up (`failure` is
    set), shows in its age: that is what readiness should look at.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.heartbeat = time.monotonic()
        self.failure: str | None = None
        self._wake = threading.Condition()
        self._inbox: deque[PreparedRequest] = deque()
        self._cancelled: deque[str] = deque()
        self._works: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._callbacks: dict[str, OnOutputs] = {}
        self._draining = False
        self._paused = ""  # why no requests are taken for a while
        self._stopping = False
        self._consecutive_failures = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; once per loop."""
        assert self._thread is None, "the loop runs already"
        self.heartbeat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="penjing-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_outputs: OnOutputs) -> None:
        """Validate and queue `request`, on the caller's thread.

        Raises:
            RequestError: the request is invalid or its id is in use.
            OverloadedError: too many requests or tokens wait; the message says how long to back off.
            ServerError: the loop drains, has stopped or has failed.
        """
        prepared = self.engine.prepare(request)
        with self._wake:
            if self._draining:
                raise ServerError("the engine takes no requests: it is shutting down")
            if (request_id := request.request_id) in self._callbacks:
                raise RequestError(f"request_id {request_id!r} is in use; choose another")
            self._admit(prepared)
            self._callbacks[request_id] = on_outputs  # from now on it is owed an answer
            if not request.images:
                return self._queue(prepared)
        try:  # after the look above, because nobody waits for an image of a request that is refused
            prepared = self.engine.preparer.see(prepared)
            with self._wake:
                self._admit(prepared)
                self._queue(prepared)
        except BaseException:
            with self._wake:
                del self._callbacks[request.request_id]
                self._wake.notify_all()
            raise

    def _queue(self, prepared: PreparedRequest) -> None:
        self._inbox.append(prepared)
        self._wake.notify()

    def _admit(self, prepared: PreparedRequest) -> None:
        """Raise what `submit` raises where there is no place for `prepared`; the lock is held."""
        if self._stopping or self.failure:
            raise ServerError(f"the engine takes no requests: {self.failure or 'it is shutting down'}")
        if self._paused:
            raise UnavailableError(f"the engine takes no requests: {self._paused}")
        self.engine.check_admission(
            prepared,
            pending_requests=len(self._inbox),
            pending_tokens=sum(len(queued.prompt_ids) for queued in self._inbox),
        )

    def cancel(self, request_id: str) -> None:
        """End a request before the next step; its callback gets the final output. Unknown ids are ignored: the request
        may just have finished."""
        with self._wake:
            self._cancelled.append(request_id)
            self._wake.notify()

    def between_steps(self, work: Callable[[], None]) -> Future[None]:
        """Do `work` on the engine's thread before the next step. What it raises is the future's; so is the end of the
        loop, which cancels it."""
        future: Future[None] = Future()
        with self._wake:
            if self._stopping or self.failure:
                future.cancel()
            else:
                self._works.append((work, future))
                self._wake.notify()
        return future

    def pause(self, reason: str) -> None:
        """Refuse requests until `resume`; nothing runs meanwhile. Again, it changes the reason.

        Raises:
            OverloadedError: requests are unanswered.
        """
        with self._wake:
            if self._callbacks:
                raise OverloadedError(f"{len(self._callbacks)} requests are unanswered; retry in 1 s")
            self._paused = reason

    def resume(self) -> None:
        """Take requests again; what was kept of earlier ones is forgotten, since it is of before the pause."""
        with self._wake:
            if self._paused:
                self.engine.forget()
            self._paused = ""

    @property
    def paused(self) -> str:
        """Why no requests are taken for a while; empty: they are."""
        return self._paused

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait until all others are answered; False if that takes longer than `timeout` s."""
        with self._wake:
            self._draining = True
            return self._wake.wait_for(lambda: not self._callbacks or self.failure is not None, timeout)

    def stop(self, timeout: float = 30.0) -> None:
        """Stop after the current step; unfinished requests get a final output with `finish_reason` "abort"."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout)

    def stats(self) -> EngineStats:
        """A snapshot, from any thread."""
        return self.engine.stats()

    def take_samples(self) -> dict[str, list[float]]:
        """Histogram samples since the last call (see `Samples`)."""
        return self.engine.samples.take() | {MASKS: self.engine.constraints.take_seconds()}

    def _run(self) -> None:
        checked = True
        while not self.failure:
            self.heartbeat = time.monotonic()
            with self._wake:
                woken = self._has_work() or self._wake.wait(IDLE_WAIT_SECONDS)
                arrived, cancelled, works = list(self._inbox), list(self._cancelled), list(self._works)
                self._works.clear()
                self._inbox.clear()
                self._cancelled.clear()
                stopping = self._stopping
            for work, future in works:
                _do(work, future)
            for prepared in arrived:
                self.engine.add_prepared(prepared)
            for request_id in cancelled:
                self._deliver(self.engine.abort(request_id))
            if stopping:
                self._deliver(self.engine.abort_all())
                return
            if self.engine.has_work():
                self._step()
                checked = False
            elif not checked and not woken:
                checked = True
                self._check_idle()

    def _has_work(self) -> bool:
        return bool(self._inbox or self._works or self._cancelled or self._stopping or self.engine.has_work())

    def _check_idle(self) -> None:
        broken = self.engine.broken_invariants()
        if broken:
            self._fail(f"the scheduler's state is inconsistent: {'; '.join(broken)}")

    def _fail(self, reason: str) -> None:
        """Give up: readiness goes, and whoever still waits is told."""
        log.error("the engine loop stops: %s", reason)
        with self._wake:
            self.failure = reason
            arrived = list(self._inbox)
            self._inbox.clear()
            for _, future in self._works:
                future.cancel()
            self._works.clear()
            self._wake.notify_all()
        for prepared in arrived:
            self.engine.add_prepared(prepared)
        self._deliver(self.engine.abort_all(ServerError(f"the engine has failed: {reason}")))

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
            self._consecutive_failures = 0
        except BrokenEngineError as error:
            self._fail(str(error))
            return
        except Exception as error:  # a defect of ours: fail what runs, keep serving the next request
            log.exception("an engine step failed")
            self._consecutive_failures += 1
            outputs = self.engine.abort_all(ServerError(f"the engine step failed: {error}"))
            if self._consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
                self._fail(f"{MAX_CONSECUTIVE_FAILURES} steps in a row failed, the last with: {error}")
        self._deliver(outputs)

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        by_request: dict[str, list[RequestOutput]] = {}
        for output in outputs:
            by_request.setdefault(output.request_id, []).append(output)
        for request_id, group in by_request.items():
            callback = self._callbacks[request_id]
            if any(output.finish_reason for output in group) and not self.engine.is_active(request_id):
                with self._wake:
                    del self._callbacks[request_id]
                    self._wake.notify_all()
            try:
                callback(group)
            except Exception:  # the caller's defect ends the caller's request alone
                log.exception("the output callback of request %s failed; the request is cancelled", request_id)
                self.cancel(request_id)


def _do(work: Callable[[], None], future: Future[None]) -> None:
    try:
        future.set_result(work())
    except Exception as error:  # whoever asked for it is told
        future.set_exception(error)
