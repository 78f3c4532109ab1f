"""Clients of a served model: `Client`, and `AsyncClient` for asyncio. gRPC, streaming, cancellation, timeouts, retries.

    with Client("localhost:8001") as client:
        print(client.generate("Once upon a time", max_tokens=32))
        with client.stream(messages=[{"role": "user", "content": "Hello"}], temperature=0.7) as stream:
            for chunk in stream:
                print(chunk.text, end="")

        print(client.classify(images).classes)  # of a served classifier: uint8 pixels, or normalised floats
        vectors = client.embed(["one text", "another"])  # of a served text encoder
        outputs = client.infer({"x": array})  # of any served graph, by the names of its inputs

Keyword arguments of texts are those of `penjing.serve.sampling.params.SamplingParams`, and `key`, `priority` and
`chat_template_kwargs` of the request. Leaving a stream early cancels it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from penjing.core.errors import PenjingError, ServerError
from penjing.serve.client import calls
from penjing.serve.client.calls import CallSettings, Messages, Prompt, remaining
from penjing.serve.client.errors import CallFailedError, broken
from penjing.serve.client.protocol import DECODER
from penjing.serve.client.weights import check_weights, send_weights
from penjing.serve.client.wire_tensors import Classification
from penjing.serve.client.wire_text import (
    CHANNEL_OPTIONS,
    Chunk,
    Result,
    build_ping,
    build_weights,
    is_last,
    read_response,
)

END_SECONDS = 5.0  # between the last message of a call and its end; a server takes milliseconds


class Client:
    """A connection to a served model; safe to use from several threads.

    Args:
        server: host:port of the gRPC endpoint.
        model: the model's name on the server; None takes the one that 'penjing serve' gives its kind.
        timeout: seconds for a whole request, unless the call gives its own; None waits as long as it takes.
        retries: how often a request that found no server, or an overloaded one, is tried again. Once a token has come
            nothing is tried again.
        retrying: is told of the error before a request is tried again.

    Errors of all calls:
        RequestError: the server refuses the request; names the field and the rule.
        OverloadedError: the server has too much to do, also after the retries; `retry_after` is its hint in seconds.
        UnavailableError: no server, or one that loads, restarts or shuts down, also after the retries.
        ServerError: a broken connection, a timeout, or a failure inside the server.
    """

    def __init__(
        self,
        server: str = "localhost:8001",
        *,
        model: str | None = None,
        timeout: float | None = None,
        retries: int = 4,
        retrying: Callable[[PenjingError], None] | None = None,
    ) -> None:
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        self.server = server
        self._settings = CallSettings(server, model, timeout, retries, retrying)
        self._channel = grpc.insecure_channel(server, options=CHANNEL_OPTIONS)
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Result:
        """The whole answer to `prompt`, or to the chat `messages`; `images=[bytes, …]` are JPEG or PNG files for one
        that sees."""
        settings = self._settings
        request = settings.request(prompt, messages, sampling, stream=False)
        with Stream(self._stub, settings, request, settings.deadline(timeout)) as stream:
            return Result.of(list(stream))

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        whole: bool = False,
        **sampling: Any,
    ) -> Stream:
        """The answer chunk by chunk, as it is generated. The request is sent now. A `whole` one comes at its end, as
        one chunk for each of the `n` answers."""
        settings = self._settings
        request = settings.request(prompt, messages, sampling, stream=not whole)
        return Stream(self._stub, settings, request, settings.deadline(timeout))

    def classify(self, images: Any, *, timeout: float | None = None, request_id: str = "") -> Classification:
        """Classify (N, C, H, W) images: uint8, which the server normalises, or floating, normalised by the caller."""
        return calls.classify(self._stub, self._settings, images, timeout, request_id)

    def embed(self, texts: str | Sequence[str], *, timeout: float | None = None, request_id: str = "") -> np.ndarray:
        """(N, hidden) float32 embeddings of length 1 of N texts, by a served text encoder; or by two
        towers, where the client was made with `model="towers"`."""
        return calls.embed(self._stub, self._settings, texts, timeout, request_id)

    def embed_images(self, images: Any, *, timeout: float | None = None, request_id: str = "") -> np.ndarray:
        """(N, D) float32 embeddings of length 1 of N images, by two served towers: JPEG or PNG files as bytes, or uint8
        (N, C, H, W) at the model's size."""
        return calls.embed_images(self._stub, self._settings, images, timeout, request_id)

    def infer(
        self, inputs: Mapping[str, Any], *, timeout: float | None = None, request_id: str = ""
    ) -> dict[str, np.ndarray]:
        """The outputs, by name, of a served graph, for tensors by the names of its inputs. An input of bytes, such as
        `image`, takes a file's content or a list of them, and `text` a text or a list."""
        return calls.infer(self._stub, self._settings, inputs, timeout, request_id)

    def send_weights(self, tensors: Mapping[str, np.ndarray], *, timeout: float | None = None) -> str:
        """Replace the weights of a served decoder that takes them (`take_weights=true`) by float32 `tensors`, all by
        their names; those that it has already are not sent. Requests with the digest that comes back, as `of_weights`,
        are answered by no others."""
        return send_weights(partial(self._ask_about_weights, timeout), tensors)

    def check_weights(self, shapes: Mapping[str, Sequence[int]], *, timeout: float | None = None) -> None:
        """Whether `send_weights` could send weights of these names and shapes.

        Raises:
            RequestError: the server takes none, or others.
        """
        check_weights(partial(self._ask_about_weights, timeout), shapes)

    def _ask_about_weights(self, timeout: float | None, asked: Any, values: np.ndarray | None) -> str:
        settings = self._settings
        request = build_weights(settings.model or DECODER, asked, values)
        with Stream(self._stub, settings, request, settings.deadline(timeout)) as stream:
            return "".join(chunk.text for chunk in stream)

    def is_ready(self, timeout: float = 1.0) -> bool:
        """Whether the model behind the server answers within `timeout` seconds. Triton server's own health knows less:
        it stays good when the model's process is dead."""

        deadline = time.monotonic() + timeout
        if self._decoder_answers(deadline):
            return True
        return calls.answers(self._stub, self._settings, deadline)

    def _decoder_answers(self, deadline: float) -> bool:
        import grpc

        ping = build_ping(self._settings.model or DECODER)
        call = self._stub.ModelStreamInfer(iter([ping]), timeout=remaining(deadline))
        try:
            # All messages are read, to the end of the call: see `Stream._end_call`.
            return not [message for message in call if message.error_message]
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

    def __init__(self, stub: Any, settings: CallSettings, request: Any, deadline: float | None) -> None:
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
        self._end_call()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return next(self._iterator)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._answered = False
        self._call = self._stub.ModelStreamInfer(iter([self._request]), timeout=remaining(self._deadline))

    def _end_call(self) -> None:
        # A call that is cancelled between its last message and its end makes Triton server 24.10 keep the request for
        # ever, and with it the model, which cannot be unloaded any more.
        ended = threading.Event()
        if self._answered and self._call.add_callback(ended.set):
            ended.wait(END_SECONDS)
        self._call.cancel()

    def _run(self) -> Iterator[Chunk]:
        import grpc

        attempt, settings = 0, self._settings
        while True:
            try:
                for message in self._call:
                    self._answered = is_last(message)
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
                self._end_call()
            time.sleep(settings.delay_before_retry(failure, self._chunks, attempt, self._deadline))
            attempt += 1
            if self._closed:  # meanwhile, by another thread: nobody wants the answer
                return
            self._start()


class AsyncClient:
    """`Client` for asyncio: `await client.generate(…)`, `async for chunk in client.stream(…)`. Closing the iterator or
    cancelling the task cancels the request. Make it inside the event loop that uses it."""

    def __init__(
        self,
        server: str = "localhost:8001",
        *,
        model: str | None = None,
        timeout: float | None = None,
        retries: int = 4,
    ) -> None:
        import grpc.aio
        from tritonclient.grpc import service_pb2_grpc

        self._settings = CallSettings(server, model, timeout, retries)
        self._channel = grpc.aio.insecure_channel(server, options=CHANNEL_OPTIONS)
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def generate(
        self,
        prompt: Prompt | None = None,
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
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        whole: bool = False,
        **sampling: Any,
    ) -> AsyncGenerator[Chunk, None]:
        """The answer chunk by chunk; the request is sent when iteration starts. A `whole` one comes at its end, as one
        chunk for each of the `n` answers."""
        request = self._settings.request(prompt, messages, sampling, stream=not whole)
        return self._run(request, self._settings.deadline(timeout))

    async def classify(self, images: Any, *, timeout: float | None = None, request_id: str = "") -> Classification:
        """Classify (N, C, H, W) images: uint8, which the server normalises, or floating, normalised by the caller."""
        return await calls.classify_async(self._stub, self._settings, images, timeout, request_id)

    async def embed(
        self, texts: str | Sequence[str], *, timeout: float | None = None, request_id: str = ""
    ) -> np.ndarray:
        """(N, hidden) float32 embeddings of length 1 of N texts; see `Client.embed`."""
        return await calls.embed_async(self._stub, self._settings, texts, timeout, request_id)

    async def embed_images(self, images: Any, *, timeout: float | None = None, request_id: str = "") -> np.ndarray:
        """(N, D) float32 embeddings of length 1 of N images; see `Client.embed_images`."""
        return await calls.embed_images_async(self._stub, self._settings, images, timeout, request_id)

    async def infer(
        self, inputs: Mapping[str, Any], *, timeout: float | None = None, request_id: str = ""
    ) -> dict[str, np.ndarray]:
        """The outputs, by name, of a served graph; see `Client.infer`."""
        return await calls.infer_async(self._stub, self._settings, inputs, timeout, request_id)

    async def is_ready(self, timeout: float = 1.0) -> bool:
        """Whether the model behind the server answers within `timeout` seconds."""

        deadline = time.monotonic() + timeout
        if await self._decoder_answers(deadline):
            return True
        return await calls.answers_async(self._stub, self._settings, deadline)

    async def _decoder_answers(self, deadline: float) -> bool:
        import grpc

        ping = build_ping(self._settings.model or DECODER)
        try:
            call = self._stub.ModelStreamInfer(iter([ping]), timeout=remaining(deadline))
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

    async def _run(self, request: Any, deadline: float | None) -> AsyncGenerator[Chunk, None]:
        import grpc

        attempt, settings = 0, self._settings
        chunks: list[Chunk] = []
        while True:
            call, answered = self._stub.ModelStreamInfer(iter([request]), timeout=remaining(deadline)), False
            try:
                async for message in call:
                    answered = is_last(message)
                    for chunk in read_response(message):
                        chunks.append(chunk)
                        yield chunk
                return
            except grpc.RpcError as error:
                failure = broken(error, settings.server, sum(chunk.num_tokens for chunk in chunks))
            except CallFailedError as error:
                failure = error
            finally:
                if answered:  # as in `Stream._end_call`
                    with suppress(TimeoutError):
                        await asyncio.wait_for(call.code(), END_SECONDS)
                call.cancel()
            await asyncio.sleep(settings.delay_before_retry(failure, chunks, attempt, deadline))
            attempt += 1
