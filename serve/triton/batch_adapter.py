"""A batched model in Triton server's Python backend; `model_repository/batched/1/model.py` calls this."""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penjing.core.config import parse_config
from penjing.core.errors import InputError, OverloadedError, PenjingError, RequestError, ServerError
from penjing.serve.client.errors import code_of, message_of
from penjing.serve.client.protocol import PING
from penjing.serve.engine.config import BatchConfig
from penjing.serve.families.base import BatchModel, BatchPart, family_at
from penjing.serve.triton.batch_metrics import BatchMetrics, BatchSamples
from penjing.serve.triton.journal import client_id, log_request, log_to_server
from penjing.serve.triton.lifecycle import Life
from penjing.serve.triton.metrics import Refusals, registered
from penjing.serve.triton.pulse import MODEL_SLOT, Phase
from penjing.serve.triton.reply import send_error
from penjing.serve.triton.settings import read_settings
from penjing.serve.triton.strings import bound_strings, refuse_too_long
from penjing.serve.triton.tensors import MAX_TEXT_BYTES

log = logging.getLogger(__name__)
METRICS_SECONDS = 0.25
MAX_STRING_BYTES = 256 << 20  # of a text or an encoded image; each model has limits of its own below
LEFT_SECONDS = 0.1
"""What has waited so long is computed only if its client is still there: to ask costs a message to the server, a fifth
of a millisecond, which a request that waits for nobody is spared."""
EXPIRY_SECONDS = 0.1  # while a batch runs, requests that have waited too long are looked for so often


@dataclass
class _Waiting:
    """A request that is not computed yet; `arrived`, and `until`, when it has waited too long (monotonic seconds).
    `client_id` is what the client calls it, in the log alone."""

    sender: Any
    prepared: Any
    arrived: float
    until: float
    client_id: str


@dataclass
class _Batch:
    """`wait` gives an answer, or an error, for each of `requests`; `begun_at` is when it began (monotonic seconds)."""

    requests: list[_Waiting]
    wait: Callable[[], Sequence[Any]]
    begun_at: list[float]


class BatchAdapter:
    """Serves one model: `execute` queues requests, a thread gathers and starts batches, another sends the answers.

    Triton server's own queue would do, but not with limits: then it looks whether an instance is idle when a request
    comes, and else twice a second (core's `WaitForPayloadSlotAvailable`), so that the last of a burst wait seconds for
    work of milliseconds. Without limits it holds nothing back: `execute` returns at once, and the limits are kept here.
    The next batch stands behind the one that runs, so no core waits between them; a third is gathered meanwhile.

    The artifact's folder and the settings come from where those of an engine do (`settings.py`).

    Args:
        part: None is the model of the folder's family.
        slot: of the pulse.

    Raises:
        PenjingError: the model cannot be loaded, or does not run.
    """

    def __init__(
        self, args: Mapping[str, str], pb_utils: Any, part: BatchPart | None = None, slot: int = MODEL_SLOT
    ) -> None:
        log_to_server()
        self._pb_utils = pb_utils
        self._life = Life(slot)
        try:
            folder, values = read_settings(args)
            part = part or _part_of(folder)
            config = parse_config(part.settings, values, "engine settings")
            self._config = config
            self._model: BatchModel = part.load(folder, self._config)
            bound_strings(pb_utils, MAX_STRING_BYTES)
            self._model.start([self._model.example()], lambda: None)()
            self._waiting: deque[_Waiting] = deque()
            self._changed, self._finalizing = threading.Condition(), False
            self._started: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
            self._refusals, self._samples, self._batch_seconds = Refusals(), BatchSamples(), 0.0
            make_metrics = partial(BatchMetrics, pb_utils, str(args.get("model_name", part.name)))
            self._metrics = registered(pb_utils, make_metrics)
            self._ending = threading.Event()
            self._threads = [
                threading.Thread(target=work, name=f"penjing-{name}", daemon=True)
                for name, work in (("batcher", self._start_batches), ("sender", self._send_answers))
            ]
            self._shower = threading.Thread(target=self._show_metrics, name="penjing-metrics", daemon=True)
            for thread in (*self._threads, self._shower):
                thread.start()
        except BaseException:
            self._life.end(Phase.FAILED)  # a last word to the supervisor: Triton server can take long to give up
            raise
        self._life.phase = Phase.SERVING
        log.info("serving %s with %s", folder, self._config)

    def execute(self, requests: Sequence[Any]) -> None:
        """Take the requests over, at once; what is wrong with one is that one's alone."""
        self._life.owe(len(requests))
        most = self._config.max_queue_size
        for request in requests:
            sender, name = request.get_response_sender(), client_id(request)
            if len(self._waiting) >= most:  # nobody else adds; refused before its tensors are copied
                seconds = max(1, math.ceil(most / self._config.max_batch_size * self._batch_seconds))
                message = f"the queue is full: {most} requests wait; retry in {seconds} s"
                self._refuse(sender, OverloadedError(message, seconds), name)
                continue
            prepared = self._prepare(request)
            if isinstance(prepared, PenjingError):
                self._refuse(sender, prepared, name)
                continue
            seconds = min(self._config.queue_timeout, (request.timeout() or math.inf) / 1e6)
            with self._changed:
                self._waiting.append(_Waiting(sender, prepared, now := time.monotonic(), now + seconds, name))
                self._changed.notify()

    def finalize(self) -> None:
        """Called when the model is unloaded: what it took over is answered."""
        with self._changed:
            self._finalizing = True
            self._changed.notify()
        self._ending.set()
        self._shower.join(2)  # it may wait in vain for a server that ends
        for thread in self._threads:
            thread.join()
        self._life.end(Phase.DRAINED)

    def _refuse(self, sender: Any, error: PenjingError, name: str, *, late: bool = False) -> None:
        """Now, from whichever thread: answers of batches that run are not waited for."""
        log_request({"request": name, "refused": code_of(error).name})
        self._refusals.count(None if late else error)
        self._send(sender, error)
        self._life.answered(1)

    def _send(self, sender: Any, answer: dict[str, np.ndarray] | PenjingError) -> None:
        try:
            sender.send(self._response(answer), flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception:  # one answer that cannot be sent must not end the thread that sends all others
            log.exception("an answer could not be sent")

    def _start_batches(self) -> None:
        while (batch := self._next_batch()) is not None:
            begun, begun_at = threading.Event(), list[float]()

            def on_begun(begun: threading.Event = begun, begun_at: list[float] = begun_at) -> None:
                begun_at.append(time.monotonic())
                self._life.began()
                begun.set()

            wait = self._start([each.prepared for each in batch], on_begun)
            self._started.put(_Batch(batch, wait, begun_at))
            while not begun.wait(EXPIRY_SECONDS):
                self._refuse_late()
        self._started.put(None)

    def _next_batch(self) -> list[_Waiting] | None:
        """As many of the requests that wait as make up a batch; None when the model is unloaded and none is left."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._finalizing)
                if not self._waiting:
                    return None
            self._refuse_late()
            batch: list[_Waiting] = []
            rows = 0
            with self._changed:
                while self._waiting:
                    rows += len(self._waiting[0].prepared)
                    if batch and rows > self._config.max_batch_size:
                        break
                    batch.append(self._waiting.popleft())
            if batch := [each for each in batch if not self._has_left(each)]:
                return batch

    def _has_left(self, request: _Waiting) -> bool:
        """Whether the client of a request that has waited for long is gone; then it is over."""
        if time.monotonic() - request.arrived < LEFT_SECONDS or not request.sender.is_cancelled():
            return False
        log_request({"request": request.client_id, "refused": "CANCELLED"})
        send_error(self._pb_utils, request.sender, None)
        self._life.answered(1)
        return True

    def _refuse_late(self) -> None:
        with self._changed:
            now = time.monotonic()
            late = [each for each in self._waiting if now > each.until]
            if late:
                self._waiting = deque(each for each in self._waiting if now <= each.until)
        for each in late:
            error = OverloadedError("timeout expired: the request has waited too long")
            self._refuse(each.sender, error, each.client_id, late=True)

    def _send_answers(self) -> None:
        while (batch := self._started.get()) is not None:
            answers = batch.wait()
            self._life.ended()
            self._note(batch)
            for request, answer in zip(batch.requests, answers, strict=True):
                if isinstance(answer, PenjingError):
                    self._refusals.count(answer)
                else:
                    self._samples.answered += 1
                self._send(request.sender, answer)
                _log(request, answer, batch.begun_at[0])
            self._life.answered(len(batch.requests))

    def _note(self, batch: _Batch) -> None:
        """What the metrics show of a batch that has just ended."""
        begun_at = batch.begun_at[0]
        self._batch_seconds = time.monotonic() - begun_at
        self._samples.note("batch_time_seconds", self._batch_seconds)
        self._samples.note("batch_rows", sum(len(each.prepared) for each in batch.requests))
        for each in batch.requests:
            self._samples.note("request_queue_time_seconds", begun_at - each.arrived)

    def _show_metrics(self) -> None:
        """From a drain on nothing is asked of the server: while it unloads the model, a call would never return."""
        while self._metrics is not None and not (self._ending.wait(METRICS_SECONDS) or self._life.ending):
            waiting = len(self._waiting)
            running = max(0, self._life.unanswered - waiting)
            try:
                self._metrics.update(waiting, running, self._samples, self._refusals.snapshot())
            except Exception:  # one failed observation must not be the last
                log.exception("showing the metrics failed")

    def _prepare(self, request: Any) -> Any:
        """What the model makes of the request, or the error that answers it."""
        try:
            parameters = request.parameters()
            if len(parameters) > MAX_TEXT_BYTES:
                raise RequestError(f"the parameters have {len(parameters)} bytes, at most {MAX_TEXT_BYTES} are read")
            if parameters and json.loads(parameters).get(PING) is True:
                return self._model.example()
            # Tensors live in memory that the server takes back when `execute` returns: they are copied.
            inputs = {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}
            for name, array in inputs.items():
                refuse_too_long(name, array, MAX_STRING_BYTES)
            return self._model.prepare(inputs)
        except PenjingError as error:
            return error
        except Exception as error:  # a defect of ours, in one request
            log.exception("a request could not be read")
            return ServerError(f"{type(error).__name__}: {error}")

    def _start(self, prepared: list[Any], begun: Callable[[], None]) -> Callable[[], Sequence[Any]]:
        """`BatchModel.start`, with errors for answers where it fails."""
        try:
            wait = self._model.start(prepared, begun)
        except Exception as error:
            failures = _failures(error, len(prepared))
            begun()
            return lambda: failures

        def answers() -> Sequence[Any]:
            try:
                return wait()
            except Exception as error:
                return _failures(error, len(prepared))

        return answers

    def _response(self, answer: dict[str, np.ndarray] | PenjingError) -> Any:
        if isinstance(answer, PenjingError):
            codes = self._pb_utils.TritonError
            status = getattr(codes, code_of(answer).server)
            return self._pb_utils.InferenceResponse(error=codes(message_of(answer), status))
        tensors = [self._pb_utils.Tensor(name, array) for name, array in answer.items()]
        return self._pb_utils.InferenceResponse(output_tensors=tensors)


def _part_of(folder: Path) -> BatchPart:
    family = family_at(folder)
    if family.load is None:
        raise InputError(f"{folder} holds no model whose requests are batched; serve it with 'penjing serve'")
    assert issubclass(family.settings, BatchConfig), f"settings of {family.name} are no BatchConfig"
    return BatchPart(family.name, family.settings, family.load)


def _log(request: _Waiting, answer: dict[str, np.ndarray] | PenjingError, begun: float) -> None:
    """A line for a request that has its answer, if its client has named it."""
    facts = {
        "request": request.client_id,
        "seconds": round(time.monotonic() - request.arrived, 4),
        "queue": round(begun - request.arrived, 4),
        "rows": len(request.prepared),
    }
    log_request(facts | ({"refused": code_of(answer).name} if isinstance(answer, PenjingError) else {}))


def _failures(error: Exception, requests: int) -> list[PenjingError]:
    log.error("a batch of %d requests failed", requests, exc_info=error)
    return [error if isinstance(error, PenjingError) else ServerError(f"{type(error).__name__}: {error}")] * requests
