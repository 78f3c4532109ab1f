"""When the sender sends: the first token and the end at once, what lies between joined."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from penjing.core.errors import PenjingError, RequestError, ServerError
from penjing.serve.client.errors import code_of
from penjing.serve.engine.request import RequestOutput
from penjing.serve.sampling.params import SamplingParams
from penjing.serve.triton.reply import Outbox, Reply
from penjing.serve.triton.tensors import Call

FINAL = 1


class Sender:
    """Keeps the text of each response."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.sent, self.ended = threading.Semaphore(0), threading.Event()

    def send(self, response: Any, flags: int = 0) -> None:
        ((value,),) = response.values()
        self.texts.append(value.decode())
        self.sent.release()
        if flags == FINAL:
            self.ended.set()


PB_UTILS = SimpleNamespace(
    Tensor=lambda name, value: (name, value),
    InferenceResponse=lambda output_tensors: dict(output_tensors),
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
)


def ask(stream: bool = True) -> Reply:
    call = Call("a", None, SamplingParams(), stream, prepend_input=False, returns=frozenset())
    return Reply("1", call, Sender(), 0)


def token(text: str, last: bool = False) -> list[RequestOutput]:
    output = RequestOutput("1", 0, num_prompt_tokens=1, num_output_tokens=1, num_cached_tokens=0)
    output.text, output.finish_reason = text, "stop" if last else None
    return [output]


def test_between_the_first_token_and_the_end_tokens_are_joined() -> None:
    outbox = Outbox(PB_UTILS, lambda reply: None, interval=1000.0)
    one, other = ask(), ask()
    senders = one.sender, other.sender
    outbox.put(one, token("a"))
    assert one.sender.sent.acquire(timeout=10), "the first token does not wait"
    for text in "bcd":
        outbox.put(one, token(text))
    outbox.put(other, token("x"))
    assert other.sender.sent.acquire(timeout=10), "nor does that of a later request"
    outbox.put(one, token("e", last=True))
    assert senders[0].ended.wait(10)
    assert senders[0].texts == ["a", "bcde"]
    outbox.put(other, token("y"))
    outbox.stop()
    assert senders[1].texts == ["x", "y"], "what waits is sent at the end"


@pytest.mark.parametrize(
    ("error", "code"), [(RequestError("too complex"), "INVALID_ARGUMENT"), (ServerError("a defect"), "INTERNAL")]
)
def test_an_error_says_whose_fault_it_is(error: PenjingError, code: str) -> None:
    class Codes:
        INVALID_ARG, INTERNAL = "INVALID_ARG", "INTERNAL"

        def __new__(cls, message: str, status: str) -> Any:
            return f"{status} {message}".encode()

    failing = SimpleNamespace(
        TritonError=Codes,
        InferenceResponse=lambda error: {"error": (error,)},
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    )
    outbox = Outbox(failing, lambda reply: None, interval=0.0)
    reply = ask()
    sender = reply.sender
    outbox.put(reply, [RequestOutput("1", finish_reason="error", error=error)])
    assert sender.ended.wait(10)
    assert sender.texts == [f"{code_of(error).server} {code}: {error}"]
    outbox.stop()


@pytest.mark.parametrize("interval", [0.0, 0.001])
def test_every_token_arrives_once_and_in_order(interval: float) -> None:
    outbox = Outbox(PB_UTILS, lambda reply: None, interval)
    replies = [ask() for _ in range(5)]
    senders = [reply.sender for reply in replies]
    for i in range(300):
        for reply in replies:
            outbox.put(reply, token(f"{i} ", last=i == 299))
    assert all(sender.ended.wait(10) for sender in senders)
    assert ["".join(sender.texts) for sender in senders] == ["".join(f"{i} " for i in range(300))] * 5
    outbox.stop()


def test_an_answer_that_is_not_streamed_comes_whole() -> None:
    outbox = Outbox(PB_UTILS, lambda reply: None, interval=0.001)
    reply = ask(stream=False)
    sender = reply.sender
    for text in "abc":
        outbox.put(reply, token(text))
    outbox.put(reply, token("d", last=True))
    assert sender.ended.wait(10)
    assert sender.texts == ["abcd"]
    outbox.stop()
