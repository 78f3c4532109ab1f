"""What both clients share: where to ask, how long, when to ask again, and the unary calls of batched models."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penjing.core.errors import ConfigError, PenjingError, RequestError
from penjing.serve.client.errors import CallFailedError, call_failed
from penjing.serve.client.protocol import CLASSIFIER, DECODER, ENCODER, GRAPH, TOWERS
from penjing.serve.client.wire_tensors import (
    Classification,
    build_infer,
    config_request,
    image_tensor,
    named_tensors,
    picture_tensor,
    probe,
    read_infer,
    text_tensor,
)
from penjing.serve.client.wire_text import Chunk, build_request

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int]
FIRST_DELAY, MAX_DELAY = 0.25, 5.0


class CallSettings:
    """What both clients share: where to ask, and when to ask again."""

    def __init__(
        self,
        server: str,
        model: str | None,
        timeout: float | None,
        retries: int,
        retrying: Callable[[PenjingError], None] | None = None,
    ) -> None:
        host, colon, port = server.rpartition(":") if isinstance(server, str) else ("", "", "")
        if not colon or not host or "/" in host or not port.isdigit():
            raise ConfigError(f"server {server!r} must be host:port, such as localhost:8001")
        self.server = server
        self.model = model
        self.timeout = timeout
        self.retries = retries
        self.retrying = retrying

    def request(
        self,
        prompt: str | Sequence[int] | None,
        messages: Messages | None,
        sampling: Mapping[str, Any],
        *,
        stream: bool,
    ) -> Any:
        try:
            return build_request(self.model or DECODER, prompt, messages, sampling, stream=stream)
        except (TypeError, ValueError) as error:
            raise RequestError(f"the request cannot be sent: {error}") from None

    def images_request(self, images: Any, deadline: float | None, request_id: str) -> Any:
        return build_infer(self.model or CLASSIFIER, image_tensor(images), remaining(deadline), request_id)

    def texts_request(self, texts: Any, deadline: float | None, request_id: str) -> Any:
        return build_infer(self.model or ENCODER, text_tensor(texts), remaining(deadline), request_id)

    def pictures_request(self, images: Any, deadline: float | None, request_id: str) -> Any:
        return build_infer(self.model or TOWERS, picture_tensor(images), remaining(deadline), request_id)

    def tensors_request(self, inputs: Mapping[str, Any], deadline: float | None, request_id: str) -> Any:
        return build_infer(self.model or GRAPH, named_tensors(inputs), remaining(deadline), request_id)

    def batched_names(self) -> tuple[str, ...]:
        """Names of batched models that may be behind the server."""
        if self.model is None:
            return (CLASSIFIER, ENCODER, GRAPH, TOWERS)
        return () if self.model == DECODER else (self.model,)

    def of(self, answer: Mapping[str, np.ndarray], name: str) -> np.ndarray:
        """The tensor of an answer that a model of the kind that was asked for gives.

        Raises:
            RequestError: there is none, since a model of another kind takes the same inputs.
        """
        if name not in answer:
            raise RequestError(
                f"the model at {self.server} answers with {', '.join(answer)} and without {name!r}: it is of another "
                "kind; ask it with infer, which takes and gives tensors by name"
            )
        return answer[name]

    def deadline(self, timeout: float | None) -> float | None:
        timeout = self.timeout if timeout is None else timeout
        return None if timeout is None else time.monotonic() + timeout

    def delay_before_retry(
        self, failure: CallFailedError, chunks: list[Chunk], attempt: int, deadline: float | None
    ) -> float:
        """Seconds to wait before another attempt.

        Raises:
            PenjingError: there shall be none: the failure is not transient, something has come already, the retries are
                used up, or the deadline would pass.
        """
        if failure.transient and not chunks and attempt < self.retries:
            delay = min(FIRST_DELAY * 2**attempt, MAX_DELAY) * random.uniform(0.75, 1.25)
            if deadline is None or time.monotonic() + delay < deadline:
                if self.retrying is not None:
                    self.retrying(failure.error)
                return delay
        raise failure.error


def remaining(deadline: float | None) -> float | None:
    """Seconds until `deadline`; None when there is none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def classify(stub: Any, settings: CallSettings, images: Any, timeout: float | None, request_id: str) -> Classification:
    """See `Client.classify`."""
    deadline = settings.deadline(timeout)
    answer = _infer(stub, settings, settings.images_request(images, deadline, request_id), deadline)
    return Classification(settings.of(answer, "logits"))


def embed(stub: Any, settings: CallSettings, texts: Any, timeout: float | None, request_id: str) -> np.ndarray:
    """See `Client.embed`."""
    deadline = settings.deadline(timeout)
    answer = _infer(stub, settings, settings.texts_request(texts, deadline, request_id), deadline)
    return settings.of(answer, "embedding")


def embed_images(stub: Any, settings: CallSettings, images: Any, timeout: float | None, request_id: str) -> np.ndarray:
    """See `Client.embed_images`."""
    deadline = settings.deadline(timeout)
    answer = _infer(stub, settings, settings.pictures_request(images, deadline, request_id), deadline)
    return settings.of(answer, "embedding")


def infer(
    stub: Any, settings: CallSettings, inputs: Mapping[str, Any], timeout: float | None, request_id: str
) -> dict[str, np.ndarray]:
    """See `Client.infer`."""
    deadline = settings.deadline(timeout)
    return _infer(stub, settings, settings.tensors_request(inputs, deadline, request_id), deadline)


def _infer(stub: Any, settings: CallSettings, request: Any, deadline: float | None) -> dict[str, np.ndarray]:
    import grpc

    for attempt in itertools.count():
        try:
            return read_infer(stub.ModelInfer(request, timeout=remaining(deadline)))
        except grpc.RpcError as error:
            failure = call_failed(error, settings.server)
        time.sleep(settings.delay_before_retry(failure, [], attempt, deadline))
    raise AssertionError("itertools.count has no end")


def answers(stub: Any, settings: CallSettings, deadline: float) -> bool:
    """Whether a batched model computes an answer before `deadline`."""
    import grpc

    for name in settings.batched_names():
        try:
            found = stub.ModelConfig(config_request(name), timeout=remaining(deadline))
            stub.ModelInfer(probe(found.config), timeout=remaining(deadline))
            return True
        except grpc.RpcError:
            continue
    return False


async def classify_async(
    stub: Any, settings: CallSettings, images: Any, timeout: float | None, request_id: str
) -> Classification:
    """See `AsyncClient.classify`."""
    deadline = settings.deadline(timeout)
    answer = await _infer_async(stub, settings, settings.images_request(images, deadline, request_id), deadline)
    return Classification(settings.of(answer, "logits"))


async def embed_async(
    stub: Any, settings: CallSettings, texts: Any, timeout: float | None, request_id: str
) -> np.ndarray:
    """See `AsyncClient.embed`."""
    deadline = settings.deadline(timeout)
    answer = await _infer_async(stub, settings, settings.texts_request(texts, deadline, request_id), deadline)
    return settings.of(answer, "embedding")


async def embed_images_async(
    stub: Any, settings: CallSettings, images: Any, timeout: float | None, request_id: str
) -> np.ndarray:
    """See `AsyncClient.embed_images`."""
    deadline = settings.deadline(timeout)
    answer = await _infer_async(stub, settings, settings.pictures_request(images, deadline, request_id), deadline)
    return settings.of(answer, "embedding")


async def infer_async(
    stub: Any, settings: CallSettings, inputs: Mapping[str, Any], timeout: float | None, request_id: str
) -> dict[str, np.ndarray]:
    """See `AsyncClient.infer`."""
    deadline = settings.deadline(timeout)
    return await _infer_async(stub, settings, settings.tensors_request(inputs, deadline, request_id), deadline)


async def _infer_async(
    stub: Any, settings: CallSettings, request: Any, deadline: float | None
) -> dict[str, np.ndarray]:
    import grpc

    for attempt in itertools.count():
        try:
            return read_infer(await stub.ModelInfer(request, timeout=remaining(deadline)))
        except grpc.RpcError as error:
            failure = call_failed(error, settings.server)
        await asyncio.sleep(settings.delay_before_retry(failure, [], attempt, deadline))
    raise AssertionError("itertools.count has no end")


async def answers_async(stub: Any, settings: CallSettings, deadline: float) -> bool:
    """Whether a batched model computes an answer before `deadline`."""
    import grpc

    for name in settings.batched_names():
        try:
            found = await stub.ModelConfig(config_request(name), timeout=remaining(deadline))
            await stub.ModelInfer(probe(found.config), timeout=remaining(deadline))
            return True
        except grpc.RpcError:
            continue
    return False
