"""smoke.py CHECK …: what test.sh runs inside the container, as its user, against the container's server.

stream   an answer comes token by token
front=N  OpenAI's interface on port N is ready and streams a chat; its page and its figures are there
user     nobody runs as root: this process, the supervisor, the server, the model's process
recover  after SIGKILL of the model's process the health check fails, and is good again within 30 s
drain    SIGTERM to the supervisor: the running answer is finished, the health check says so, new requests are refused
"""

import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

from healthcheck import problem

from penjing.core.errors import PenjingError
from penjing.serve.client.client import Client
from penjing.serve.supervisor import state

STREAMED, LONG_ANSWER = 48, 200  # tokens; several come in one piece when the client is slower than the engine
REFUSE_SECONDS = 10  # generous: a request on a loaded machine takes a second or two itself


def found() -> state.ServerState:
    (port,) = state.running_ports()
    server = state.read_state(port)
    assert server is not None
    return server


def connect() -> Client:
    return Client(f"127.0.0.1:{found().grpc_port}", retries=0, timeout=120)


def expect(condition: bool, message: str) -> None:
    if not condition:
        sys.exit(f"failed: {message}")


def wait_for(healthy: bool, seconds: float) -> float:
    """Seconds until the health check says `healthy`."""
    started = time.monotonic()
    while (problem() is None) != healthy:
        wanted = "healthy" if healthy else "unhealthy"
        expect(time.monotonic() - started < seconds, f"not {wanted} within {seconds:.0f} s: {problem()}")
        time.sleep(0.1)
    return time.monotonic() - started


def stream() -> None:
    with connect() as client, client.stream("Once upon a time", max_tokens=STREAMED, ignore_eos=True) as answer:
        chunks = list(answer)
    tokens = answer.result.num_output_tokens
    expect(tokens == STREAMED, f"{STREAMED} tokens were asked for, {tokens} came")
    expect(len(chunks) > 1, "the answer came in one piece")
    print(f"streamed {tokens} tokens in {len(chunks)} chunks: {answer.result.text!r}")


def front(port: str) -> None:
    address = f"http://127.0.0.1:{port}"

    def ask(path: str, content: dict[str, object] | None = None) -> str:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    expect(json.loads(ask("/health/ready")) == {"status": "ready"}, "the front is not ready")
    (model,) = json.loads(ask("/v1/models"))["data"]
    messages = [{"role": "user", "content": "Say hello."}]
    chat = {"model": model["id"], "messages": messages, "max_tokens": STREAMED, "ignore_eos": True, "stream": True}
    lines = [line for line in ask("/v1/chat/completions", chat).splitlines() if line.startswith("data: ")]
    expect(lines[-1] == "data: [DONE]", "the chat has no end")
    expect(len(lines) > 3, "the chat came in one piece")
    expect("<!doctype html>" in ask("/"), "there is no page")
    expect("penjing:num_requests_running" in ask("/metrics"), "there are no figures")
    print(f"{model['id']}: a chat of {len(lines)} events over HTTP")


def user() -> None:
    server = found()
    for pid in (os.getpid(), server.supervisor_pid, server.server_pid, server.stub_pid):
        status = Path(f"/proc/{pid}/status").read_text()
        uids = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1:]
        expect("0" not in uids, f"process {pid} runs as root")
    expect(not os.access("/opt/penjing/lib", os.W_OK), "the program's files can be written")
    print(f"user {os.getuid()}")


def recover() -> None:
    os.kill(found().stub_pid, signal.SIGKILL)
    noticed = wait_for(False, 5)
    back = wait_for(True, 30)
    print(f"the model's process was killed: unhealthy after {noticed:.1f} s, healthy again {back:.1f} s later")


def refusal() -> str:
    """What a new request is told. The engine hears of the drain a moment after the health check, so one may slip in."""
    deadline = time.monotonic() + REFUSE_SECONDS
    while time.monotonic() < deadline:
        try:
            with connect() as late:
                late.generate("Too late", max_tokens=1)
        except PenjingError as error:
            return str(error)
    sys.exit(f"failed: requests are taken {REFUSE_SECONDS} s after SIGTERM")


def drain() -> None:
    supervisor = found().supervisor_pid
    with connect() as client, client.stream("A long story:", max_tokens=LONG_ANSWER, ignore_eos=True) as answer:
        next(answer)
        os.kill(supervisor, signal.SIGTERM)
        wait_for(False, 5)
        refused = refusal()
        chunks = list(answer)
    reason = chunks[-1].finish_reason if chunks else None
    expect(reason == "length", f"the running answer ended with {reason!r}")
    expect(answer.result.num_output_tokens == LONG_ANSWER, "the running answer was cut")
    print(f"SIGTERM: the running answer was finished ({LONG_ANSWER} tokens); a new one was refused: {refused}")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        name, _, value = argument.partition("=")
        if name == "front":
            front(value)
        else:
            {"stream": stream, "user": user, "recover": recover, "drain": drain}[name]()
