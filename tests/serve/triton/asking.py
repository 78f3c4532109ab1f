"""Streams that run beside a test, and what each got."""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from penjing.core.errors import (
    PenjingError,
)
from tests.serve.triton.serving import Served

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def server_ready(served: Served) -> bool:
    """Triton server's own health by gRPC."""
    with grpc.insecure_channel(served.address) as channel:
        messages: Any = service_pb2  # its classes are made when it is imported: type checkers see none
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            return stub.ServerReady(messages.ServerReadyRequest()).ready
        except grpc.RpcError:
            return False


class Asking:
    """Streams that run in threads; what each got, and when it ended."""

    def __init__(self, served: Served, count: int, max_tokens: int) -> None:
        self.texts: list[str | None] = [None] * count
        self.errors: list[Exception | None] = [None] * count
        self.started = threading.Barrier(count + 1)
        self._client = served.client()
        self._threads = [threading.Thread(target=self._ask, args=(i, max_tokens)) for i in range(count)]
        for thread in self._threads:
            thread.start()
        self.started.wait(60)

    def _ask(self, index: int, max_tokens: int) -> None:
        stream = self._client.stream("a tree " * (index + 1), max_tokens=max_tokens, **GREEDY)
        next(stream)
        self.started.wait(60)
        try:
            for _ in stream:
                pass
            result = stream.result
            assert result.finish_reason == "length"
            assert result.num_output_tokens == max_tokens
            self.texts[index] = result.text
        except (PenjingError, AssertionError) as error:
            self.errors[index] = error

    def join(self, seconds: float) -> None:
        """Fails if a stream has not ended after `seconds`."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a request hangs"
        self._client.close()
