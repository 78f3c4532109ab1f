"""Clients of a served model: `Client`, and `AsyncClient` for asyncio. gRPC, streaming, cancellation, timeouts, retries.

    with Client("localhost:8001") as client:
        print(client.generate("Once upon a time", max_tokens=32))
        with client.stream(messages=[{"role": "user", "content": "Hello"}], temperature=0.7) as stream:
            for chunk in stream:
                print(chunk.text, end="")

Keyword arguments are those of `penjing.serve.request.SamplingParams`. Leaving a stream early cancels its request.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from penjing.core.errors import ConfigError, RequestError, ServerError
from penjing.serve.wire import (
    CHANNEL_OPTIONS,
    CallFailedError,
    Chunk,
    Result,
    broken,
    build_ping,
    build_request,
    read_response,
)

Messages = Sequence[Mapping[str, Any]]
FIRST_DELAY, MAX_DELAY = 0.25, 5.0


class _Settings:
    """What both clients share: where to ask, and when to ask again."""

    def __init__(self, server: str, model: str, timeout: float | None, retries: int) -> None:
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
            return build_request(self.model, prompt, messages, sampling, stream=stream)
        except TypeError as error:
            raise RequestError(f"a sampling parameter or message cannot be sent: {error}") from None

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


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class Client:
    """A connection to a served model; safe to use from several threads.

    Args:
        server: host:port of the gRPC endpoint.
        model: the model's name on the server.
        timeout: seconds for a whole request, unless the call gives its own; None waits as long as it takes.
        retries: how often a request that found no server, or an overloaded one, is tried again. Once a token has come
            nothing is tried again.

    Errors of all calls:
        RequestError: the server refuses the request; names the field and the rule.
        OverloadedError: the server has too much to do or shuts down, also after the retries.
        ServerError: no server, a broken connection, a timeout, or a failure inside the server.
    """

    def __init__(
        self, server: str = "localhost:8001", *, model: str = "llm", timeout: float | None = None, retries: int = 4
    ) -> None:
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        self._settings = _Settings(server, model, timeout, retries)
        self._channel = grpc.insecure_channel(server, options=CHANNEL_OPTIONS)
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Result:
        """The whole answer to `prompt`, or to the chat `messages`."""
        settings = self._settings
        request = settings.request(prompt, messages, sampling, stream=False)
        with Stream(self._stub, settings, request, settings.deadline(timeout)) as stream:
            return Result.of(list(stream))

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Stream:
        """The answer chunk by chunk, as it is generated. The request is sent now."""
        settings = self._settings
        request = settings.request(prompt, messages, sampling, stream=True)
        return Stream(self._stub, settings, request, settings.deadline(timeout))

    def is_ready(self, timeout: float = 1.0) -> bool:
        """Whether the model behind the server answers within `timeout` seconds. Triton server's own health knows less:
        it stays good when the model's process is dead."""
        import grpc

        call = self._stub.ModelStreamInfer(iter([build_ping(self._settings.model)]), timeout=timeout)
        try:
            return all(not message.error_message for message in call)
        except grpc.RpcError:
            return False

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Return when the model answers.

        Raises:
            ServerError: it does not within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self.is_ready():
            if time.monotonic() > deadline:
                raise ServerError(f"the model at {self._settings.server} was not ready within {timeout:.0f} s")
            time.sleep(0.05)

    def close(self) -> None:
        """End the connection; running streams are cancelled."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream:
    """An answer on its way: iterate over its chunks. `close`, or leaving a `with` block, cancels what is left."""

    def __init__(self, stub: Any, settings: _Settings, request: Any, deadline: float | None) -> None:
        self._stub, self._settings, self._request, self._deadline = stub, settings, request, deadline
        self._chunks: list[Chunk] = []
        self._closed = False
        self._start()
        self._iterator = self._run()

    @property
    def result(self) -> Result:
        """What has come so far, joined."""
        return Result.of(self._chunks)

    def close(self) -> None:
        """Cancel the request unless it has ended. Any thread may call it."""
        self._closed = True
        self._call.cancel()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return next(self._iterator)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._call = self._stub.ModelStreamInfer(iter([self._request]), timeout=_remaining(self._deadline))

    def _run(self) -> Iterator[Chunk]:
        import grpc

        attempt, settings = 0, self._settings
        while True:
            try:
                for message in self._call:
                    for chunk in read_response(message):
                        self._chunks.append(chunk)
                        yield chunk
                return
            except grpc.RpcError as error:
                if self._closed:
                    return
                failure = broken(error, settings.server, sum(chunk.num_tokens for chunk in self._chunks))
            except CallFailedError as error:
                failure = error
            finally:
                self._call.cancel()
            time.sleep(settings.delay_before_retry(failure, self._chunks, attempt, self._deadline))
            attempt += 1
            self._start()


class AsyncClient:
    """`Client` for asyncio: `await client.generate(…)`, `async for chunk in client.stream(…)`. Closing the iterator or
    cancelling the task cancels the request. Make it inside the event loop that uses it."""

    def __init__(
        self, server: str = "localhost:8001", *, model: str = "llm", timeout: float | None = None, retries: int = 4
    ) -> None:
        import grpc.aio
        from tritonclient.grpc import service_pb2_grpc

        self._settings = _Settings(server, model, timeout, retries)
        self._channel = grpc.aio.insecure_channel(server, options=CHANNEL_OPTIONS)
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Result:
        """The whole answer to `prompt`, or to the chat `messages`."""
        request = self._settings.request(prompt, messages, sampling, stream=False)
        return Result.of([chunk async for chunk in self._run(request, self._settings.deadline(timeout))])

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> AsyncIterator[Chunk]:
        """The answer chunk by chunk; the request is sent when iteration starts."""
        request = self._settings.request(prompt, messages, sampling, stream=True)
        return self._run(request, self._settings.deadline(timeout))

    async def is_ready(self, timeout: float = 1.0) -> bool:
        """Whether the model behind the server answers within `timeout` seconds."""
        import grpc

        try:
            call = self._stub.ModelStreamInfer(iter([build_ping(self._settings.model)]), timeout=timeout)
            return all([not message.error_message async for message in call])
        except grpc.RpcError:
            return False

    async def close(self) -> None:
        """End the connection; running streams are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, request: Any, deadline: float | None) -> AsyncIterator[Chunk]:
        import grpc

        attempt, settings = 0, self._settings
        chunks: list[Chunk] = []
        while True:
            call = self._stub.ModelStreamInfer(iter([request]), timeout=_remaining(deadline))
            try:
                async for message in call:
                    for chunk in read_response(message):
                        chunks.append(chunk)
                        yield chunk
                return
            except grpc.RpcError as error:
                failure = broken(error, settings.server, sum(chunk.num_tokens for chunk in chunks))
            except CallFailedError as error:
                failure = error
            finally:
                call.cancel()
            await asyncio.sleep(settings.delay_before_retry(failure, chunks, attempt, deadline))
            attempt += 1
