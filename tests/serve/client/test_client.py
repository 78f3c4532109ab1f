"""The clients beside a server that misbehaves on purpose: retries, deadlines, cancellation, errors."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, cast

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from penjing.core.errors import (
    ConfigError,
    OverloadedError,
    PenjingError,
    RequestError,
    ServerError,
    UnavailableError,
)
from penjing.serve.client import calls
from penjing.serve.client.client import AsyncClient, Client
from penjing.serve.client.errors import call_failed, refused
from penjing.serve.client.protocol import PING

service_pb2: Any = __import__("tritonclient.grpc.service_pb2", fromlist=["service_pb2"])
Answer = Callable[["Script", Any], Iterator[Any]]


class Script(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers call after call as it was told; the last instruction holds for all further calls."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[Any] = []
        self.cancelled = threading.Event()
        self.ended = list[bool]()
        self.address = ""

    def ModelStreamInfer(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802 (its gRPC name)
        self.requests.append(next(request_iterator))
        context.add_callback(lambda: self.cancelled.set() if not context.is_active() else None)
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        yield from answer(self, context)


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    server = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(script, server)
    script.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield script
    server.stop(0)


def text(*pieces: str, reason: str = "stop") -> Answer:
    def answer(script: Script, context: Any) -> Iterator[Any]:
        for index, piece in enumerate(pieces):
            yield message(piece, reason if index == len(pieces) - 1 else "None")

    return answer


def message(piece: str, reason: str = "None") -> Any:
    response = service_pb2.ModelStreamInferResponse()
    values = {"text_output": ("BYTES", _bytes(piece)), "finish_reason": ("BYTES", _bytes(reason))}
    values |= {"num_output_tokens": ("UINT32", struct.pack("<I", 1)), "num_input_tokens": ("UINT32", b"\3\0\0\0")}
    for name, (datatype, data) in values.items():
        response.infer_response.outputs.add(name=name, datatype=datatype, shape=[1])
        response.infer_response.raw_output_contents.append(data)
    return response


def _bytes(piece: str) -> bytes:
    return struct.pack("<I", len(piece.encode())) + piece.encode()


def refuse(error_message: str) -> Answer:
    return lambda script, context: iter([service_pb2.ModelStreamInferResponse(error_message=error_message)])


def ends_late(last: Any) -> Answer:
    """Gives `last` and ends a little later; notes whether the client waited for that."""

    def answer(script: Script, context: Any) -> Iterator[Any]:
        yield last
        time.sleep(0.2)
        script.ended.append(context.is_active())

    return answer


def fail(code: Any, *first: str) -> Answer:
    def answer(script: Script, context: Any) -> Iterator[Any]:
        yield from (message(piece) for piece in first)
        context.abort(code, "as told")

    return answer


def endless(script: Script, context: Any) -> Iterator[Any]:
    yield message("a")
    while context.is_active():
        time.sleep(0.01)
        yield message("b")


UNAVAILABLE = fail(grpc.StatusCode.UNAVAILABLE)
OVERLOADED = refuse("RESOURCE_EXHAUSTED: the engine is overloaded: retry in 2 s")
DRAINING = refuse("UNAVAILABLE: the engine takes no requests: it is shutting down")
UNLOADED = refuse("Request for unknown model: 'llm' has no available versions")
UNHEALTHY = refuse("Stub process 'llm_0_0' is not healthy.")


def generate(address: str, kind: str, **options: Any) -> Any:
    """`generate` of either client."""
    arguments = {name: options.pop(name) for name in ("timeout", "max_tokens", "stop") if name in options}
    if kind == "sync":
        with Client(address, **options) as client:
            return client.generate("hi", **arguments)

    async def run() -> Any:
        async with AsyncClient(address, **options) as client:
            return await client.generate("hi", **arguments)

    return asyncio.run(run())


both = pytest.mark.parametrize("kind", ["sync", "async"])


@both
def test_an_answer_is_joined_and_the_request_says_what_was_asked(script: Script, kind: str) -> None:
    script.answers = [text("o", "n", "e", reason="length")]
    result = generate(script.address, kind, max_tokens=3, stop=["x"])
    assert (result.text, str(result), result.finish_reason) == ("one", "one", "length")
    assert (result.num_input_tokens, result.num_output_tokens) == (3, 3)
    request = script.requests[0]
    sent = dict(zip((tensor.name for tensor in request.inputs), request.raw_input_contents, strict=True))
    assert sent["text_input"] == _bytes("hi")
    assert sent["sampling_parameters"] == _bytes('{"max_tokens": 3, "stop": ["x"]}')
    assert sent["stream"] == b"\0"


def test_fields_of_the_request_are_sent_beside_the_sampling_parameters(script: Script) -> None:
    script.answers = [text("o", reason="length")]
    with Client(script.address) as client:
        client.generate([5, 70000], key="alice", priority=-2, chat_template_kwargs={"tools": []}, prompt_logprobs=1)
        with pytest.raises(RequestError, match="prompt_token_ids must be 32-bit integers"):
            client.generate([2**40])
    (request,) = script.requests
    sent = dict(zip((tensor.name for tensor in request.inputs), request.raw_input_contents, strict=True))
    assert sent["prompt_token_ids"] == struct.pack("<2i", 5, 70000)
    assert list(request.inputs[0].shape) == [2]
    assert sent["key"] == _bytes("alice")
    assert sent["priority"] == struct.pack("<i", -2)
    assert sent["chat_template_kwargs"] == _bytes('{"tools": []}')
    assert sent["sampling_parameters"] == _bytes('{"prompt_logprobs": 1}')
    assert sent["return_prompt_logprobs"] == b"\1"


@both
@pytest.mark.parametrize("failure", [UNAVAILABLE, OVERLOADED, DRAINING, UNLOADED, UNHEALTHY])
def test_what_is_unavailable_is_tried_again(script: Script, kind: str, failure: Answer) -> None:
    script.answers = [failure, failure, text("ok")]
    assert generate(script.address, kind, retries=2).text == "ok"
    assert len(script.requests) == 3


@both
def test_retries_come_to_an_end(script: Script, kind: str) -> None:
    script.answers = [OVERLOADED]
    with pytest.raises(OverloadedError, match="retry in 2 s") as error:
        generate(script.address, kind, retries=1)
    assert error.value.retry_after == 2.0
    assert len(script.requests) == 2
    with pytest.raises(OverloadedError):
        generate(script.address, kind, retries=100, timeout=1.0)  # ends before the deadline would pass
    assert len(script.requests) < 8


@both
@pytest.mark.parametrize("answer", [UNAVAILABLE, DRAINING, UNLOADED, UNHEALTHY])
def test_overload_is_told_from_a_server_that_is_not_there(script: Script, kind: str, answer: Answer) -> None:
    script.answers = [answer]
    with pytest.raises(UnavailableError):
        generate(script.address, kind, retries=0)
    assert not issubclass(UnavailableError, OverloadedError)


@pytest.mark.parametrize(
    ("status", "details", "error", "retry_after"),
    [
        ("UNAVAILABLE", "RESOURCE_EXHAUSTED: the queue is full: 3 requests wait; retry in 1.5 s", OverloadedError, 1.5),
        ("UNAVAILABLE", "Exceeds maximum queue size", OverloadedError, None),
        ("UNAVAILABLE", "Server is stopping, scheduler for model has stopped", UnavailableError, None),
        ("UNAVAILABLE", "failed to connect to all addresses", UnavailableError, None),
        ("RESOURCE_EXHAUSTED", "Received message larger than max", ServerError, None),
        ("INVALID_ARGUMENT", "INVALID_ARGUMENT: pixels must be", RequestError, None),
    ],
)
def test_unary_calls_tell_overload_too(status: str, details: str, error: type[Exception], retry_after: Any) -> None:
    class Failed(grpc.RpcError):
        def code(self) -> Any:
            return grpc.StatusCode[status]

        def details(self) -> str:
            return details

    found = call_failed(Failed(), "host:1").error
    assert type(found) is error
    assert getattr(found, "retry_after", None) == retry_after
    assert "RESOURCE_EXHAUSTED: " not in str(found)


@pytest.mark.parametrize(
    ("status", "details"),
    [
        ("NOT_FOUND", "Request for unknown model: 'classifier' is not found"),
        ("UNIMPLEMENTED", "ModelInfer RPC doesn't support models with decoupled transaction policy"),
    ],
)
def test_a_model_of_another_kind_is_told_as_one(status: str, details: str) -> None:
    class Failed(grpc.RpcError):
        def code(self) -> Any:
            return grpc.StatusCode[status]

        def details(self) -> str:
            return details

    said = "a model of another name or kind is served there, and 'penjing server status' shows what runs; "
    said += "Client(ADDRESS, model=NAME) asks it by its name"
    assert str(call_failed(Failed(), "host:1").error) == f"host:1: {details}; {said}"
    streamed = refused("[request id: <id_unknown>] expected 1 inputs, but missing required input(s) ['text']. ").error
    assert str(streamed) == f"expected 1 inputs, but missing required input(s) ['text']; {said}"


@both
def test_after_the_first_token_nothing_is_tried_again(script: Script, kind: str) -> None:
    script.answers = [fail(grpc.StatusCode.UNAVAILABLE, "a", "b"), text("never")]
    with pytest.raises(ServerError, match="broke after 2 tokens"):
        generate(script.address, kind)
    assert len(script.requests) == 1


@both
@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (refuse("INVALID_ARGUMENT: top_p must be: more"), RequestError, "^top_p must be: more$"),
        (refuse("INTERNAL: it broke"), ServerError, "^it broke$"),
        (refuse("unexpected shape for input"), ServerError, "unexpected shape"),
        (fail(grpc.StatusCode.NOT_FOUND), ServerError, "as told"),
    ],
)
def test_other_failures_are_not_tried_again(
    script: Script, kind: str, answer: Answer, error: type[PenjingError], words: str
) -> None:
    script.answers = [answer, text("never")]
    with pytest.raises(error, match=words):
        generate(script.address, kind)
    assert len(script.requests) == 1


@both
def test_a_timeout_cancels_the_request(script: Script, kind: str) -> None:
    script.answers = [endless]
    with pytest.raises(ServerError, match=r"within the timeout; \d+ tokens had come"):
        generate(script.address, kind, timeout=0.4)
    assert script.cancelled.wait(5)


@both
def test_no_server_is_said_with_the_next_step(kind: str) -> None:
    with pytest.raises(ServerError, match=r"no server answers at 127\.0\.0\.1:9; start one with 'penjing serve MODEL'"):
        generate("127.0.0.1:9", kind, retries=0)
    for address in ("localhost", "http://localhost:8001", cast("str", 8001)):
        with pytest.raises(ConfigError, match="must be host:port"):
            generate(address, kind)


def test_leaving_a_stream_cancels_it(script: Script) -> None:
    script.answers = [endless]
    with Client(script.address) as client:
        with client.stream("hi") as stream:
            assert next(stream).text == "a"
            assert next(stream).text == "b"
        assert script.cancelled.wait(5)
        assert stream.result.text == "ab"
        assert list(stream) == []


def test_another_thread_may_close_a_stream(script: Script) -> None:
    script.answers = [endless]
    with Client(script.address) as client:
        stream = client.stream("hi")
        threading.Timer(0.2, stream.close).start()
        assert len(list(stream)) > 1
        assert script.cancelled.wait(5)


def test_a_stream_that_is_closed_before_it_tries_again_does_not(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked again all the same, and nobody could cancel that."""
    monkeypatch.setattr(calls, "FIRST_DELAY", 2.0)
    script.answers = [UNAVAILABLE, text("ok")]
    with Client(script.address) as client:
        stream = client.stream("hi")
        threading.Timer(0.1, stream.close).start()
        assert list(stream) == []
        assert len(script.requests) == 1


def test_what_is_answered_is_not_cancelled(script: Script) -> None:
    """Triton server keeps a request for ever whose call is cancelled between its last message and its end."""
    error = service_pb2.ModelStreamInferResponse(error_message="INVALID_ARGUMENT: no")
    final = message("a", "stop")
    final.infer_response.parameters["triton_final_response"].bool_param = True
    script.answers = [ends_late(error), ends_late(error), ends_late(final), ends_late(error), ends_late(final)]
    with Client(script.address) as client:
        with pytest.raises(RequestError):
            client.generate("hi")
        assert not client.is_ready()
        with client.stream("hi") as stream:
            assert next(stream).finish_reason == "stop"

    async def run() -> None:
        async with AsyncClient(script.address) as client:
            with pytest.raises(RequestError):
                await client.generate("hi")
            stream: Any = client.stream("hi")
            async with aclosing(stream) as chunks:
                async for _ in chunks:
                    break

    asyncio.run(run())
    assert script.ended == [True] * 5


def test_leaving_an_async_stream_or_cancelling_its_task_cancels_it(script: Script) -> None:
    script.answers = [endless]

    async def leave(stream: Any) -> None:
        async with aclosing(stream) as chunks:
            async for _ in chunks:
                break

    async def read(chunks: AsyncIterator[Any]) -> None:
        async for _ in chunks:
            pass

    async def run() -> None:
        async with AsyncClient(script.address) as client:
            await leave(client.stream("hi"))
            assert await asyncio.to_thread(script.cancelled.wait, 5)
            script.cancelled.clear()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read(client.stream("hi")), 0.3)
            assert await asyncio.to_thread(script.cancelled.wait, 5)

    asyncio.run(run())


def test_readiness_is_a_question_to_the_model(script: Script) -> None:
    def sleep(script: Script, context: Any) -> Iterator[Any]:
        time.sleep(0.6)
        yield message("")

    script.answers = [text(""), OVERLOADED, sleep, text("")]
    with Client(script.address) as client:
        assert [client.is_ready(), client.is_ready(), client.is_ready(timeout=0.2)] == [True, False, False]
        client.wait_ready(5)
        assert all(request.parameters[PING].bool_param for request in script.requests)

    async def run() -> bool:
        async with AsyncClient(script.address) as client:
            return await client.is_ready()

    assert asyncio.run(run())
    with Client("127.0.0.1:9") as client, pytest.raises(ServerError, match="was not ready within"):
        client.wait_ready(0.2)


def test_what_cannot_be_sent_is_refused_here(script: Script) -> None:
    with Client(script.address) as client, pytest.raises(RequestError, match="cannot be sent"):
        client.generate("hi", stop=object())
    for prompt in (5, b"hi"):
        with (
            Client(script.address) as client,
            pytest.raises(RequestError, match="must be a text or a list of token ids, "),
        ):
            client.generate(cast("str", prompt))
