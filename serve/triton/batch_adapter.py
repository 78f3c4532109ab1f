"""A batched model in Triton server's Python backend; `model_repository/batched/1/model.py` calls this."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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


class BatchAdapter:
    """Serves one model: Triton server queues and gathers requests, `execute` answers those that it gathered.

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
        except BaseException:
            self._life.end(Phase.FAILED)  # a last word to the supervisor: Triton server can take long to give up
            raise
        self._life.phase = Phase.SERVING
        log.info("serving %s with %s", folder, config)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """A response for each request; what is wrong with one is that one's alone."""
        with self._life.running(len(requests)):
            answers: list[Any] = [self._prepare(request) for request in requests]
            good = [index for index, answer in enumerate(answers) if not isinstance(answer, PenjingError)]
            if good:
                for index, answer in zip(good, self._run([answers[index] for index in good]), strict=True):
                    answers[index] = answer
            return [self._response(answer) for answer in answers]

    def finalize(self) -> None:
        """Called when the model is unloaded; Triton server has then waited for the running answers."""
        self._life.end(Phase.DRAINED)

    def _prepare(self, request: Any) -> Any:
        """What the model makes of the request, or the error that answers it."""
        try:
            return self._model.prepare({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
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
