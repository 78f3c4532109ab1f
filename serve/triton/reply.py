"""Answers on their way to the client: one reply a request, one thread that sends what has gathered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from penjing.core.errors import PenjingError, ServerError, UnavailableError
from penjing.serve.client.errors import code_of, message_of
from penjing.serve.engine.request import RequestOutput
from penjing.serve.triton.journal import Journal
from penjing.serve.triton.tensors import Call, OutputTensors

SENDING_SHARE = 0.05
MAX_INTERVAL = 0.1  # seconds that a token may wait for others

log = logging.getLogger(__name__)


class Reply:
    """What is owed to one request. It ends with exactly one FINAL response, whatever happens."""

    def __init__(self, request_id: str, call: Call, sender: Any, timeout_us: int, client_id: str = "") -> None:
        self.request_id = request_id
        self.client_id = client_id
        """What the client calls the request, in logs alone: several may have the same."""
        self.journal = Journal()
        self.call = call
        self.sender: Any = sender
        self.deadline = time.monotonic() + timeout_us / 1e6 if timeout_us else None
        self.ended_by: PenjingError | None = None
        """Why we ended it early: the client left (None is sent), its timeout passed."""
        self.client_left = False
        self.started = False
        """Whether outputs have been sent."""
        self.prompt = ""
        """Its text, which begins the answer where a client wants that."""
        self._tensors = OutputTensors(call)
        self._unfinished = call.params.n
        self._kept: list[RequestOutput] = []
        self._closing = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Before the FINAL response: from now on the sender is not asked anything."""
        with self._closing:
            self._closed = True

    def is_cancelled(self) -> bool:
        """Whether the client has left. Triton server frees what this reads when FINAL is sent, and a look after that
        ends it with a segmentation fault; hence the lock."""
        with self._closing:
            return not self._closed and self.sender.is_cancelled()

    def take(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The outputs to send now: all that gathered, or none before the end when the client does not stream."""
        self.journal.add(outputs)
        self._unfinished -= sum(output.finish_reason is not None for output in outputs)
        self._kept += outputs
        if not self.finished and not (self.call.stream and self._worth_sending()):
            return []
        gathered, self._kept = self._kept, []
        self.started = True
        return gathered

    def is_urgent(self, outputs: list[RequestOutput]) -> bool:
        """Whether `outputs`, which just came, are the first or the last ones of an answer."""
        return (self.call.stream and not self.started) or any(output.finish_reason for output in outputs)

    @property
    def finished(self) -> bool:
        """Whether every answer of the request has ended."""
        return self._unfinished <= 0

    def tensors(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Tensors by name of a response with `outputs`."""
        return self._tensors.build(outputs, self.prompt)

    def _worth_sending(self) -> bool:
        # A token whose text is held back (half a character, perhaps a stop string) says nothing by itself.
        return bool(self.call.returns) or any(output.text or output.finish_reason for output in self._kept)


class Outbox:
    """A thread that builds and sends responses, so that the engine never waits for the server.

    The first token of a request and its end are sent at once. Other tokens go out together, a response a request, at
    most every `interval` seconds, and less often where sending would take more than `SENDING_SHARE` of the time:
    client, server and sender share the processor with the kernels.
    """

    def __init__(self, pb_utils: Any, on_ended: Callable[[Reply], None], interval: float) -> None:
        self._pb_utils = pb_utils
        self._on_ended = on_ended
        self._interval = interval
        self._wake = threading.Condition()
        self._gathered: dict[Reply, list[RequestOutput]] = {}
        self._urgent: set[Reply] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="penjing-sender", daemon=True)
        self._thread.start()

    def put(self, reply: Reply, outputs: list[RequestOutput]) -> None:
        """Hand over what a step gave one request."""
        with self._wake:
            self._gathered.setdefault(reply, []).extend(outputs)
            if reply.is_urgent(outputs):
                self._urgent.add(reply)
            if self._urgent or len(self._gathered) == 1:
                self._wake.notify()

    def stop(self) -> None:
        """Send what is queued and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(10)

    def _run(self) -> None:
        due = 0.0
        while True:
            with self._wake:
                while not (self._urgent or self._stopping or (self._gathered and time.monotonic() >= due)):
                    self._wake.wait(max(due - time.monotonic(), 0) if self._gathered else None)
                started = time.monotonic()
                everything = self._stopping or started >= due
                replies = list(self._gathered) if everything else self._urgent
                batch = {reply: self._gathered.pop(reply) for reply in replies}
                self._urgent = set()
                stopping = self._stopping
            for reply, outputs in batch.items():
                self._send(reply, reply.take(outputs))
            if stopping:
                return
            if everything and self._interval > 0:
                needed = (time.monotonic() - started) / SENDING_SHARE
                due = started + max(self._interval, min(needed, MAX_INTERVAL))

    def _send(self, reply: Reply, outputs: list[RequestOutput]) -> None:
        if not outputs:
            return
        failure = _failure(reply, outputs) if reply.finished else None
        if reply.finished:
            reply.close()
        try:
            if failure is not None or (reply.finished and reply.client_left):
                send_error(self._pb_utils, reply.sender, failure)
            else:
                tensors = [self._pb_utils.Tensor(name, value) for name, value in reply.tensors(outputs).items()]
                flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if reply.finished else 0
                reply.sender.send(self._pb_utils.InferenceResponse(output_tensors=tensors), flags=flags)
        except Exception:  # one reply that cannot be sent must not end the thread that sends all others
            log.exception("sending a response of request %s failed", reply.request_id)
        if reply.finished:
            reply.sender = None  # of a cancelled request it would keep Triton server from unloading the model
            self._on_ended(reply)


def _failure(reply: Reply, outputs: list[RequestOutput]) -> PenjingError | None:
    reasons = {output.finish_reason: output.error for output in outputs}
    if "error" in reasons:
        return reasons["error"] or ServerError("the engine failed")
    if "abort" in reasons and not reply.client_left:
        return reply.ended_by or UnavailableError("the server shuts down before this answer was complete; try again")
    return None


def send_error(pb_utils: Any, sender: Any, error: BaseException | None) -> None:
    """End a request with an error, or with a bare CANCELLED when nobody listens any more (None)."""
    codes = pb_utils.TritonError
    if error is None:
        status, message = codes.CANCELLED, "the request was cancelled"
    else:
        status, message = getattr(codes, code_of(error).server), message_of(error)
    response = pb_utils.InferenceResponse(error=codes(message, status))
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
