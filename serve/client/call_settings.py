"""What both clients share: where to ask, how long, and when to ask again."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from penjing.core.errors import ConfigError, RequestError
from penjing.serve.client.wire_tensors import NAMES, build_infer, image_tensor, text_tensor
from penjing.serve.client.wire_text import CallFailedError, Chunk, build_request

Messages = Sequence[Mapping[str, Any]]
FIRST_DELAY, MAX_DELAY = 0.25, 5.0
DECODER, CLASSIFIER, ENCODER = "llm", "classifier", "encoder"


class CallSettings:
    """What both clients share: where to ask, and when to ask again."""

    def __init__(self, server: str, model: str | None, timeout: float | None, retries: int) -> None:
        host, colon, port = server.rpartition(":")
        if not colon or not host or not port.isdigit():
            raise ConfigError(f"server {server!r} must be host:port, such as localhost:8001")
        self.server = server
        self.model = model
        self.timeout = timeout
        self.retries = retries

    def request(
        self, prompt: str | None, messages: Messages | None, sampling: Mapping[str, Any], *, stream: bool
    ) -> Any:
        try:
            return build_request(self.model or DECODER, prompt, messages, sampling, stream=stream)
        except TypeError as error:
            raise RequestError(f"a sampling parameter or message cannot be sent: {error}") from None

    def images_request(self, images: Any, deadline: float | None) -> Any:
        return build_infer(self.model or CLASSIFIER, image_tensor(images), remaining(deadline))

    def texts_request(self, texts: Any, deadline: float | None) -> Any:
        return build_infer(self.model or ENCODER, text_tensor(texts), remaining(deadline))

    def batched_names(self) -> tuple[str, ...]:
        """Names of batched models that may be behind the server."""
        return NAMES if self.model is None else () if self.model == DECODER else (self.model,)

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
                return delay
        raise failure.error


def remaining(deadline: float | None) -> float | None:
    """Seconds until `deadline`; None when there is none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
