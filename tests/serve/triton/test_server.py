"""A real Triton server with the tiny model: streaming, concurrency, cancellation, bad requests, metrics."""

from __future__ import annotations

import json
import queue
import random
import re
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from penjing.core.errors import OverloadedError, RequestError, ServerError
from penjing.serve.client import wire_text as wire
from penjing.serve.engine.config import EngineConfig
from penjing.serve.generate import generate_stream
from penjing.serve.sampling.params import SamplingParams
from tests.serve.triton.serving import Served, wait_until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("triton")]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PROMPT = "the bonsai"
NUM_TOKENS = 600  # the tiny model gives a token in 0.2 ms: fewer would leave in one response


@pytest.fixture(scope="module")
def expected(tiny_long: Path) -> str:
    """NUM_TOKENS greedy tokens after PROMPT, from the engine in this process."""
    params = SamplingParams(max_tokens=NUM_TOKENS, **GREEDY)
    return "".join(output.text for output in generate_stream(tiny_long, PROMPT, params, EngineConfig(num_blocks=64)))


def test_streamed_answer_is_the_engines(server: Served, expected: str) -> None:
    with server.client() as client, client.stream(PROMPT, max_tokens=NUM_TOKENS, **GREEDY) as stream:
        chunks = list(stream)
        assert len(chunks) > 1
        assert "".join(chunk.text for chunk in chunks) == expected
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
        assert chunks[-1].finish_reason == "length"
        assert stream.result.num_output_tokens == NUM_TOKENS
        assert stream.result.num_input_tokens == client.generate(PROMPT, max_tokens=1, **GREEDY).num_input_tokens > 0


def test_concurrent_clients_get_what_they_get_alone(server: Served) -> None:
    prompts = [f"tree number {index}" * (1 + index % 5) for index in range(16)]
    with server.client(retries=20) as client, ThreadPoolExecutor(16) as pool:
        alone = [client.generate(prompt, max_tokens=24, **GREEDY).text for prompt in prompts]
        together = list(pool.map(lambda prompt: client.generate(prompt, max_tokens=24, **GREEDY).text, prompts))
    assert together == alone


def test_names_of_the_vllm_backend(server: Served, expected: str) -> None:
    """A client written for that backend, with NVIDIA's own client library."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = triton.InferenceServerClient(server.address)
    client.start_stream(lambda result, error: answers.put((result, error)))
    inputs = [
        _tensor("text_input", PROMPT),
        _tensor("stream", True),
        _tensor(
            "sampling_parameters", json.dumps({"max_tokens": str(NUM_TOKENS), "temperature": "0", "ignore_eos": "true"})
        ),
        _tensor("return_finish_reason", True),
        _tensor("return_cumulative_logprob", True),
        _tensor("return_num_input_tokens", True),
        _tensor("return_num_output_tokens", True),
    ]
    client.async_stream_infer("llm", inputs, enable_empty_final_response=True)
    text, tokens, reasons, cumulative = "", 0, [], 0.0
    while True:
        result, error = answers.get(timeout=30)
        assert error is None
        if result.as_numpy("text_output") is not None:
            text += result.as_numpy("text_output")[0].decode()
            tokens += int(result.as_numpy("num_output_tokens")[0])
            reasons.append(result.as_numpy("finish_reason")[0].decode())
            assert result.as_numpy("cumulative_logprob")[0] < cumulative
            cumulative = result.as_numpy("cumulative_logprob")[0]
            assert result.as_numpy("num_input_tokens")[0] > 0
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    client.stop_stream()
    assert (text, tokens, reasons[-1], set(reasons[:-1])) == (expected, NUM_TOKENS, "length", {"None"})


def test_several_answers_logprobs_and_chat(server: Served) -> None:
    with server.client() as client:
        result = client.generate(PROMPT, n=3, max_tokens=6, temperature=1.0, seed=1, logprobs=2, ignore_eos=True)
        assert len(set(result.choices)) > 1
        assert len(result.choices) == 3
        assert len(result.logprobs) == 6
        assert all(2 <= len(entry) <= 3 for entry in result.logprobs)
        again = client.generate(PROMPT, n=3, max_tokens=6, temperature=1.0, seed=1, ignore_eos=True)
        assert again.choices == result.choices
        rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        chat = client.generate(messages=[{"role": "user", "content": "hi"}], max_tokens=8, **GREEDY)
        assert chat.text == client.generate(rendered, max_tokens=8, **GREEDY).text


def test_http_generate_and_stream(server: Served, expected: str) -> None:
    """As curl does it: sampling parameters beside the tensors, server-sent events back."""
    body = {"text_input": PROMPT, "stream": True, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    with _post(server, "generate_stream", body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert len(events) > 1
    assert "".join(event["text_output"] for event in events) == expected
    with _post(server, "generate", body | {"stream": False}) as answer:
        assert json.load(answer)["text_output"] == PROMPT + expected  # the prompt unless told otherwise
    with pytest.raises(urllib.error.HTTPError) as error:
        _post(server, "generate", body | {"temperature": -3})
    assert b"temperature must be" in error.value.read()


def test_http_client_that_leaves_is_noticed(server: Served) -> None:
    before = server.metrics()
    with _post(server, "generate_stream", {"text_input": "go", "stream": True, "max_tokens": 4000, **GREEDY}) as answer:
        answer.readline()
    aborted = 'request_success{finished_reason="abort"}'
    wait_until(lambda: server.shown_metrics()[aborted] == before[aborted] + 1, 10, "the end of the request")


def test_cancelled_requests_free_their_blocks(server: Served) -> None:
    before = server.metrics()
    with server.client() as client:
        streams = [client.stream(PROMPT, max_tokens=4000, **GREEDY) for _ in range(6)]
        for stream in streams:
            assert next(stream).index == 0
        # Gauges are set one after the other, and a reading may come between.
        shows = lambda shown: shown["num_requests_running"] == 6 and shown["kv_cache_usage_perc"] > 0  # noqa: E731
        wait_until(lambda: shows(server.shown_metrics()), 10, "the sight of six requests and their blocks")
        for stream in streams:
            stream.close()
        after = _idle(server)
    aborted = 'request_success{finished_reason="abort"}'
    assert after[aborted] == before[aborted] + 6
    assert after["kv_cache_usage_perc"] == 0
    assert after["generation_tokens"] - before["generation_tokens"] < 6 * 3900


def test_a_client_that_times_out_is_cancelled(server: Served) -> None:
    with server.client() as client, pytest.raises(ServerError, match="timeout"):
        client.generate(PROMPT, max_tokens=4000, timeout=0.05, **GREEDY)
    assert _idle(server)["num_requests_running"] == 0


def test_the_requests_own_timeout_is_kept(server: Served) -> None:
    request = wire.build_request("llm", PROMPT, None, {"max_tokens": 4000, **GREEDY}, stream=False)
    request.parameters["timeout"].int64_param = 50_000
    started = time.monotonic()
    assert "RESOURCE_EXHAUSTED: the request's timeout passed" in str(_send(server, request))
    assert time.monotonic() - started > 0.045


def test_more_than_may_wait_is_refused_and_the_rest_is_answered(server: Served) -> None:
    refused: list[str] = []

    def ask(_: int) -> str | None:
        try:
            return client.generate(PROMPT, max_tokens=1000, **GREEDY).text
        except OverloadedError as error:
            refused.append(str(error))
            return None

    with server.client() as client, ThreadPoolExecutor(32) as pool:
        answers = {answer for answer in pool.map(ask, range(32)) if answer is not None}
    assert 0 < len(refused) < 32  # eight run, eight wait, and by the time the last comes some may have ended
    assert all("max_waiting_requests=8" in message and "retry in" in message for message in refused)
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ("", {}, "the prompt is empty"),
        ("x" * 5000, {}, "with a context of 4096"),
        ("a\ud800", {}, "text_input is not valid UTF-8"),
        ("a", {"temperature": -1}, "temperature must be a number of at least 0"),
        ("a", {"temperature": "warm"}, "temperature must be"),
        ("a", {"top_p": 0}, "top_p must be"),
        ("a", {"max_tokens": 0}, "max_tokens must be"),
        ("a", {"max_tokens": [1]}, "max_tokens must be"),
        ("a", {"n": 10**9}, "n must be"),
        ("a", {"logit_bias": {"9999": 1}}, "logit_bias has token id 9999"),
        ("a", {"stop": [""]}, "stop must be"),
        ("a", {"temprature": 1}, "unknown sampling parameter 'temprature'"),
    ],
)
def test_invalid_requests_name_the_field(server: Served, prompt: str, sampling: dict[str, Any], message: str) -> None:
    with server.client() as client, pytest.raises(RequestError, match=message):
        client.generate(prompt, **sampling)


def test_special_tokens_in_a_prompt_are_only_tokens(server: Served) -> None:
    with server.client() as client:
        assert client.generate("<|im_end|><|endoftext|>" * 100, max_tokens=2, **GREEDY).num_output_tokens == 2


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "."),
        (
            {"text_input": "a", "messages": "[]"},
            "give one of text_input, messages and prompt_token_ids, got text_input, messages",
        ),
        ({"stream": True}, "give one of text_input, .*, got none"),
        ({"messages": "[{]"}, "messages is not valid JSON"),
        ({"messages": '{"role": "user"}'}, "messages must be a JSON list"),
        ({"messages": '[{"role": "user", "content": 3}]'}, r"messages\[0\].content must be text"),
        ({"text_input": "a", "sampling_parameters": "{"}, "not valid JSON"),
        ({"text_input": "a", "sampling_parameters": "[1]"}, "must be a JSON object"),
        ({"text_input": "a", "sampling_parameters": "[" * 100_000}, "not valid JSON"),
        ({"text_input": "a", "stream": True, "exclude_input_in_output": False}, "exclude_input_in_output"),
        ({"text_input": 3.5}, "text_input"),
        ({"text_input": "a", "stream": 1}, "stream"),
        ({"text_input": "a", "no_such_input": True}, "no_such_input"),
        ({"text_input": ["a", "b"]}, "text_input"),
        ({"text_input": [["a"]]}, "text_input"),
        ({"text_input": []}, "text_input"),
    ],
)
def test_malformed_tensors_get_an_error_and_the_server_lives(
    server: Served, inputs: dict[str, Any], message: str
) -> None:
    stub = server.stub_pid
    client = triton.InferenceServerClient(server.address)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("llm", [_tensor(name, value) for name, value in inputs.items()])
    _, error = answers.get(timeout=10)
    client.stop_stream()
    assert isinstance(error, InferenceServerException)
    assert re.search(message, str(error))
    _lives(server, stub)


def test_random_bytes_never_bring_the_server_down(server: Served) -> None:
    """Wrong types, shapes, lengths and contents; an answer or an error, always within the deadline."""
    draw = random.Random(7)
    stub = server.stub_pid
    names = ["text_input", "messages", "stream", "sampling_parameters", "return_logprobs", "nothing", ""]
    types = ["BYTES", "BOOL", "FP32", "INT64", "UINT8", "XYZ", ""]
    for _ in range(150):
        request = wire.build_request("llm", "a", None, {"max_tokens": 2}, stream=draw.random() < 0.5)
        for _ in range(draw.randint(1, 3)):
            index = draw.randrange(len(request.inputs))
            kind = draw.randrange(5)
            if kind == 0:
                request.raw_input_contents[index] = draw.randbytes(draw.choice([0, 1, 3, 4, 5, 8, 40, 3000]))
            elif kind == 1:
                request.inputs[index].datatype = draw.choice(types)
            elif kind == 2:
                request.inputs[index].shape[:] = [draw.choice([-1, 0, 1, 2, 2**40]) for _ in range(draw.randint(0, 3))]
            elif kind == 3:
                request.inputs[index].name = draw.choice(names)
            else:
                length = draw.choice([0, 5, 100]).to_bytes(4, "little")
                request.raw_input_contents[index] = length + draw.randbytes(draw.choice([5, 100]))
        _send(server, request, timeout=20)  # fails on a broken connection and after the timeout
    _lives(server, stub)


def test_oversized_requests_are_refused(server: Served) -> None:
    stub = server.stub_pid
    for text, message in (
        ("a " * (4 << 20), r"text_input has 8388608 bytes, at most \d+ are read"),
        ("word " * 5000, "context of 4096"),
    ):
        answer = str(_send(server, wire.build_request("llm", text, None, {}, stream=False), timeout=60))
        assert answer.startswith("INVALID_ARGUMENT: ")
        assert re.search(message, answer)
    _lives(server, stub)


def test_sensitive_interfaces_are_closed(server: Served) -> None:
    client = triton.InferenceServerClient(server.address)
    for call in (
        client.get_system_shared_memory_status,
        client.get_model_repository_index,
        lambda: client.register_system_shared_memory("mine", "/penjing", 64),
        lambda: client.unload_model("llm"),
    ):
        with pytest.raises(InferenceServerException, match="restricted"):
            call()
    for path in ("/v2/systemsharedmemory/status", "/v2/repository/index"):
        assert server.health(path) in (400, 403, 405)


def test_metrics_are_there_and_right(server: Served) -> None:
    _idle(server)
    before = server.metrics()
    with server.client() as client:
        result = client.generate("a prompt for the metrics", max_tokens=17, **GREEDY)
        assert client.generate("b", max_tokens=3, **GREEDY).num_input_tokens == 1
    wait_until(lambda: server.shown_metrics()["generation_tokens"] >= before["generation_tokens"] + 20, 10, "20 tokens")
    after = server.metrics()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["prompt_tokens"] == result.num_input_tokens + 1
    assert grown["generation_tokens"] == 20
    assert grown['request_success{finished_reason="length"}'] == 2
    assert grown['request_success{finished_reason="error"}'] == 0
    assert grown["prefix_cache_queries"] >= result.num_input_tokens
    assert 0 <= grown["prefix_cache_hits"] <= grown["prefix_cache_queries"]
    assert grown["num_preemptions"] == 0
    assert grown["time_to_first_token_seconds_count"] == 2
    assert 0 < grown["time_to_first_token_seconds_sum"] < 10
    assert grown["time_per_output_token_seconds_count"] == 18
    assert grown["iteration_tokens_total_sum"] == result.num_input_tokens + 1 + 18 - grown["prefix_cache_hits"]
    assert grown["iteration_tokens_total_count"] == 20
    assert grown['iteration_tokens_total_bucket{le="1"}'] == 19
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[gauge] == 0


def test_readiness_asks_the_model(server: Served) -> None:
    with server.client() as client:
        assert client.is_ready()
    wait_until(lambda: server.health() == server.health("/v2/models/llm/ready") == 200, 10, "ready")


def test_many_threads_share_one_client_and_cancel_at_random(server: Served) -> None:
    draw = random.Random(3)
    plans = [(draw.randint(0, 20), f"{index}" * draw.randint(1, 40)) for index in range(60)]
    errors: list[BaseException] = []

    def ask(leave_after: int, prompt: str) -> None:
        try:
            with client.stream(prompt, max_tokens=30, **GREEDY) as stream:
                for number, _ in enumerate(stream):
                    if number == leave_after:
                        break
        except OverloadedError:
            return
        except BaseException as error:
            errors.append(error)

    with server.client(retries=10) as client:
        threads = [threading.Thread(target=ask, args=plan) for plan in plans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not errors
    assert _idle(server)["kv_cache_usage_perc"] == 0


def _tensor(name: str, value: Any) -> triton.InferInput:
    array = np.array(value if isinstance(value, list) else [value])
    if array.dtype.kind in "US" or (isinstance(value, list) and not value):
        array = np.array([text.encode() for text in array.reshape(-1)], np.object_).reshape(array.shape)
    types = {"O": "BYTES", "b": "BOOL", "f": "FP64", "i": "INT64"}
    tensor = triton.InferInput(name, list(array.shape), types[array.dtype.kind])
    tensor.set_data_from_numpy(array)
    return tensor


def _send(server: Served, request: Any, timeout: float = 10) -> str | None:
    """What became of one raw request: None for an answer, the error message otherwise."""
    with grpc.insecure_channel(server.address, options=wire.CHANNEL_OPTIONS) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        messages = list(stub.ModelStreamInfer(iter([request]), timeout=timeout))
    return next((message.error_message for message in messages if message.error_message), None)


def _post(server: Served, operation: str, body: dict[str, Any]) -> Any:
    url = f"http://127.0.0.1:{server.config.http_port}/v2/models/llm/{operation}"
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=30)


def _idle(server: Served) -> dict[str, float]:
    """Metrics once nothing runs."""
    wait_until(lambda: server.metrics()["num_requests_running"] == 0, 10, "the end of all requests")
    return server.metrics()


def _lives(server: Served, stub: int) -> None:
    with server.client() as client:
        assert client.generate("still there?", max_tokens=3, **GREEDY).num_output_tokens == 3
    assert server.stub_pid == stub
