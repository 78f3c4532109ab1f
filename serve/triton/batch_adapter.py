"""A batched model in Triton server's Python backend; `model_repository/batched/1/model.py` calls this."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penjing.core.errors import PenjingError, RequestError, ServerError
from penjing.serve.batch_model import BatchModel
from penjing.serve.config import BatchConfig
from penjing.serve.triton.kinds import load_batched
from penjing.serve.triton.life import Life
from penjing.serve.triton.pulse import Phase
from penjing.serve.triton.settings import read_settings

log = logging.getLogger(__name__)


@dataclass
class _Batch:
    """`answers` are at first what the model made of each request, or the error that answers it."""

    senders: list[Any]
    answers: list[Any]
    begun: threading.Event = field(default_factory=threading.Event)


class BatchAdapter:
    """Serves one model: Triton server queues and gathers requests, `execute` takes a batch over when it begins to run.

    So the next batch is at hand when one is done, and the server's instance is idle when answers leave. That matters:
    with limits on its queue, Triton server looks whether an instance is idle when a request comes, and else twice a
    second (core's `WaitForPayloadSlotAvailable`). Requests that clients send on an answer are to find it idle.

    The artifact's folder and the settings come from where those of an engine do (`settings.py`).

    Raises:
        PenjingError: the model cannot be loaded, or does not run.
    """

    def __init__(self, args: Mapping[str, str], pb_utils: Any) -> None:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s: %(message)s")
        self._pb_utils = pb_utils
        self._life = Life()
        try:
            folder, config = read_settings(args, BatchConfig)
            self._model: BatchModel = load_batched(folder, config)
            self._model.warm_up()
            self._waiting: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
            self._computed: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
            self._threads = [
                threading.Thread(target=work, name=f"penjing-{name}", daemon=True)
                for name, work in (("model", self._compute_batches), ("sender", self._send_answers))
            ]
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._life.end(Phase.FAILED)  # a last word to the supervisor: Triton server can take long to give up
            raise
        self._life.phase = Phase.SERVING
        log.info("serving %s with %s", folder, config)

    def execute(self, requests: Sequence[Any]) -> None:
        """Take the requests over and return when they run; what is wrong with one is that one's alone."""
        senders = [request.get_response_sender() for request in requests]
        batch = _Batch(senders, [self._prepare(request) for request in requests])
        self._life.owe(len(requests))
        self._waiting.put(batch)
        batch.begun.wait()

    def finalize(self) -> None:
        """Called when the model is unloaded: what it took over is answered."""
        self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._life.end(Phase.DRAINED)

    def _compute_batches(self) -> None:
        while (batch := self._waiting.get()) is not None:
            with self._life.running():
                batch.begun.set()
                good = [index for index, answer in enumerate(batch.answers) if not isinstance(answer, PenjingError)]
                if good:
                    for index, answer in zip(good, self._run([batch.answers[index] for index in good]), strict=True):
                        batch.answers[index] = answer
            self._computed.put(batch)
        self._computed.put(None)

    def _send_answers(self) -> None:
        while (batch := self._computed.get()) is not None:
            for sender, answer in zip(batch.senders, batch.answers, strict=True):
                try:
                    final = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                    sender.send(self._response(answer), flags=final)
                except Exception:  # one answer that cannot be sent must not end the thread that sends all others
                    log.exception("an answer could not be sent")
            self._life.answered(len(batch.senders))

    def _prepare(self, request: Any) -> Any:
        """What the model makes of the request, or the error that answers it."""
        try:
            # Tensors live in memory that the server takes back when `execute` returns: they are copied.
            return self._model.prepare({tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()})
        except PenjingError as error:
            return error
        except Exception as error:  # a defect of ours, in one request
            log.exception("a request could not be read")
            return ServerError(f"{type(error).__name__}: {error}")

    def _run(self, prepared: list[Any]) -> Sequence[Any]:
        try:
            return self._model.run(prepared)
        except Exception as error:
            log.exception("a batch of %d requests failed", len(prepared))
            failure = error if isinstance(error, PenjingError) else ServerError(f"{type(error).__name__}: {error}")
            return [failure] * len(prepared)

    def _response(self, answer: dict[str, np.ndarray] | PenjingError) -> Any:
        if isinstance(answer, PenjingError):
            codes = self._pb_utils.TritonError
            code = codes.INVALID_ARG if isinstance(answer, RequestError) else codes.INTERNAL
            return self._pb_utils.InferenceResponse(error=codes(str(answer), code))
        tensors = [self._pb_utils.Tensor(name, array) for name, array in answer.items()]
        return self._pb_utils.InferenceResponse(output_tensors=tensors)
