"""What stands open around a running server, for whom, and what it takes to bring it down through that."""

from __future__ import annotations

import os
import re
import socket
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, service_pb2, service_pb2_grpc

from penjing.serve.engine.config import BatchConfig, EngineConfig
from penjing.serve.gate.config import FrontLimits
from penjing.serve.supervisor import state
from penjing.serve.supervisor.process import RESTRICTED, ServeConfig, command_line
from penjing.serve.triton.intake import MAX_PENDING_BYTES
from penjing.serve.triton.tensors import MAX_TEXT_BYTES
from tests.disk import run_in
from tests.serve.triton.serving import SHARED_MEMORY_BYTES, Served, free_ports, serving

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("triton")]
ANSWER_SECONDS = 30.0
ROOT = Path(__file__).parents[3]


def post(port: int, path: str, body: bytes, chunked: bool = False) -> str:
    """The status line of the answer; "" if the connection breaks before one came."""
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode()
    if chunked:
        body = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS) as connection:
        try:
            connection.sendall(head + body)
            return connection.recv(4096).decode(errors="replace").partition("\r\n")[0]
        except (ConnectionError, BrokenPipeError):
            return ""


@pytest.mark.parametrize("port", ["http_port", "metrics_port"])
@pytest.mark.parametrize("path", ["/v2/models/llm/generate", "/v2/models/llm/infer", "/metrics"])
def test_bodies_that_fill_a_stack_get_an_error(server: Served, port: str, path: str) -> None:
    stub = server.stub_pid
    text = b'{"text_input": "' + b"a" * 5_000_000 + b'"}'
    nested = b'{"a": ' + b"[" * 120_000 + b"]" * 120_000 + b"}"
    for body in (text, nested, b'{"a": ' + b"[" * 3_000_000):
        assert re.match(r"HTTP/1.1 (4|5)\d\d", post(getattr(server.config, port), path, body))
    assert server.stub_pid == stub


def test_a_body_of_many_pieces_gets_an_error(server: Served) -> None:
    stub = server.stub_pid
    assert server.config.http_port is not None
    answer = post(server.config.http_port, "/v2/models/llm/generate", b"x" * 700_000, chunked=True)
    assert re.match(r"HTTP/1.1 (4|5)\d\d", answer)
    with server.client() as client:
        assert client.generate("a", max_tokens=2).num_output_tokens == 2
    assert server.stub_pid == stub


def test_a_message_that_inflates_beyond_the_shared_memory_is_refused(server: Served) -> None:
    """A thousandth of it comes over the wire; the model's process would copy it all while nothing else runs there."""
    stub = server.stub_pid
    text = np.array([b"a" * (SHARED_MEMORY_BYTES + (1 << 20))], np.object_)
    inputs = [InferInput("text_input", [1], "BYTES")]
    inputs[0].set_data_from_numpy(text)
    ended, errors = threading.Event(), []

    def take(result: Any, error: Any) -> None:
        errors.append(str(error))
        ended.set()

    with InferenceServerClient(server.address) as client:
        client.start_stream(take, compression_algorithm="gzip")
        client.async_stream_infer("llm", inputs)
        assert ended.wait(60)
    assert "shared memory" in errors[0]
    with server.client() as client:
        assert client.generate("a", max_tokens=2).num_output_tokens == 2
    assert server.stub_pid == stub


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Addresses and ports on which processes take connections; of all protocols that the kernel lists."""
    own = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                own.add(os.readlink(link))
            except FileNotFoundError:
                continue
    found = set()
    for table, states in (("tcp", {"0A"}), ("tcp6", {"0A"}), ("udp", {"07"}), ("udp6", {"07"})):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] in states and f"socket:[{fields[9]}]" in own:
                address, _, port = fields[1].partition(":")
                parts = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                kind = socket.AF_INET if len(parts) == 1 else socket.AF_INET6
                text = socket.inet_ntop(kind, b"".join(parts)).removeprefix("::ffff:")
                found.add((text, int(port, 16)))
    return found


def pids(server: Served) -> list[int]:
    found = server.state
    assert found is not None
    return [found.supervisor_pid, found.server_pid, found.stub_pid]


def test_nothing_listens_but_what_was_asked_for_and_on_loopback(server: Served) -> None:
    config = server.config
    ports = (config.grpc_port, config.http_port, config.metrics_port)
    assert listening(pids(server)) == {("127.0.0.1", port) for port in ports}


def test_only_grpc_listens_for_others_and_http_is_closed_unless_asked_for(server: Served) -> None:
    argv = Path(f"/proc/{pids(server)[1]}/cmdline").read_text().split("\0")
    assert f"--http-port={server.config.http_port}" in argv
    anything: Any = MagicMock()  # neither what is installed nor the family matters to the addresses
    argv = command_line(anything, ServeConfig(host="0.0.0.0"), Path("models"))
    assert "--allow-http=false" in argv
    assert [each for each in argv if "0.0.0.0" in each] == ["--grpc-address=0.0.0.0"]
    assert "--metrics-address=127.0.0.1" in argv
    assert not [each for each in argv if each.startswith(("--http-port", "--http-address"))]
    argv = command_line(anything, ServeConfig(host="0.0.0.0", http_port=1), Path("models"))
    assert "--http-address=127.0.0.1" in argv
    assert any(each.startswith(f"--http-restricted-api={RESTRICTED}:") for each in argv)


def rows(heading: str) -> list[list[str]]:
    """Cells of the table under a heading of docs/security.md."""
    text = (ROOT / "docs" / "security.md").read_text()
    lines = text.partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]


def test_the_page_says_what_listens_where() -> None:
    config = ServeConfig()
    listed = rows("What listens where")
    opened = {row[3].strip("`"): row for row in listed if row[1] != "closed"}
    assert {flag: int(row[1]) for flag, row in opened.items()} == config.ports()
    away = ServeConfig(host="0.0.0.0", http_port=8000)
    addresses = {flag.strip("`"): address for _, _, address, flag, _ in listed}
    assert "or `--host`" in addresses.pop("--openai")
    for flag, address in addresses.items():
        assert away.address_of(flag) == ("0.0.0.0" if "`--host`" in address else "127.0.0.1"), flag


def test_the_page_says_every_limit_with_its_default() -> None:
    kinds = {kind.__name__: kind for kind in (EngineConfig, BatchConfig, ServeConfig, FrontLimits)}
    checked = 0
    for name, default, _ in rows("Limits and their defaults"):
        if name.startswith("`"):
            kind, _, field = name.strip("`").partition(".")
            assert str(kinds[kind].model_fields[field].default) == default, name
            checked += 1
    assert checked >= 9
    listed = {name.strip("`") for name, _, _ in rows("Limits and their defaults")}
    bounds = [name for name, field in FrontLimits.model_fields.items() if field.annotation in (int, float)]
    assert {f"FrontLimits.{name}" for name in bounds} <= listed
    others = {name: default for name, default, _ in rows("Limits and their defaults") if not name.startswith("`")}
    assert others["other JSON of a request"] == f"{MAX_TEXT_BYTES >> 20} MiB"
    assert others["prompts that wait to be tokenized"] == f"{MAX_PENDING_BYTES >> 20} MiB"
    assert others["a log"] == f"{state.MAX_LOG_BYTES >> 20} MiB and one older file"


def test_what_a_front_opens_and_writes(tiny_long: Path) -> None:
    with serving(tiny_long, front={"host": "0.0.0.0"}, http_port=None) as served:
        config, found = served.config, served.state
        assert found is not None
        assert config.front is not None
        assert listening([*pids(served), found.front_pid]) == {
            ("0.0.0.0", config.front.port),
            ("127.0.0.1", config.grpc_port),
            ("127.0.0.1", config.metrics_port),
        }
        with socket.create_connection(("127.0.0.1", config.front.port), timeout=5) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        modes = {path.name: path.stat().st_mode & 0o077 for path in state.run_folder().glob(f"{config.grpc_port}.*")}
        assert f"{config.grpc_port}.front.log" in modes
        assert {name for name, others in modes.items() if others and not name.endswith(".lock")} == set()
        argv = Path(f"/proc/{found.front_pid}/cmdline").read_text().split("\0")[1:]
        assert [word for word in argv if word] == ["-m", "penjing.serve.site.server"]


def test_what_lies_on_the_disk_and_in_shared_memory_is_for_its_user_alone(server: Served) -> None:
    port = server.config.grpc_port
    folder = state.run_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    files = [path for path in folder.glob(f"{port}.*") if path.suffix != ".lock"]
    assert {path.suffix for path in files} >= {".json", ".log"}
    regions = list(state.SHM_FOLDER.glob(f"{state.shm_prefix(port)}*"))
    assert regions
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in [*files, *regions]} == {
        path.name: "0o600" for path in [*files, *regions]
    }


def test_the_key_that_everybody_can_read_opens_nothing(server: Served) -> None:
    argv = Path(f"/proc/{pids(server)[1]}/cmdline").read_text().split("\0")
    closed = next(each for each in argv if each.startswith("--grpc-restricted-protocol="))
    name, _, key = closed.partition(":")[2].partition("=")
    assert len(key) > 16384
    with grpc.insecure_channel(server.address, options=[("grpc.max_metadata_size", 1 << 20)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = [(f"triton-grpc-protocol-{name}", key)]
        messages: Any = service_pb2  # its classes are made when it is imported: type checkers see none
        requests = {
            "RepositoryIndex": messages.RepositoryIndexRequest(),
            "RepositoryModelUnload": messages.RepositoryModelUnloadRequest(model_name="llm"),
            "SystemSharedMemoryStatus": messages.SystemSharedMemoryStatusRequest(),
            "TraceSetting": messages.TraceSettingRequest(),
            "LogSettings": messages.LogSettingsRequest(),
        }
        for call, request in requests.items():
            with pytest.raises(grpc.RpcError) as error:
                getattr(stub, call)(request, metadata=metadata, timeout=10)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, call
    assert server.config.http_port is not None
    with socket.create_connection(("127.0.0.1", server.config.http_port), timeout=10) as connection:
        head = f"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\n{name}: {key}\r\nContent-Length: 0\r\n\r\n"
        connection.sendall(head.encode())
        try:
            answer = connection.recv(4096)
        except ConnectionError:
            answer = b""
    assert b" 200 " not in answer
    assert server.health() == 200


def test_a_full_disk_ends_nothing(tiny_long: Path) -> None:
    """The state, the log and a restart, while no file can grow; what the state should say is written when it can."""
    code = """
    import os, signal, sys, time
    from pathlib import Path
    sys.path.insert(0, sys.argv[3])
    from penjing.core.errors import UnavailableError
    from tests.serve.triton.serving import serving, wait_until

    folder, model = Path(sys.argv[1]), Path(sys.argv[2])
    with serving(model) as served:
        stub = served.stub_pid
        with open(folder / "filler", "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError as error:
                print(error.strerror)
        os.kill(stub, signal.SIGSTOP)  # its state becomes "not ready", which cannot be written
        wait_until(lambda: served.health() == 0, 2, "silence")
        os.kill(stub, signal.SIGCONT)
        wait_until(lambda: served.health() == 200, 10, "an answer")
        os.kill(stub, signal.SIGKILL)
        with served.client(retries=30) as client:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                try:
                    print(client.generate("a", max_tokens=3, ignore_eos=True).num_output_tokens)
                    break
                except UnavailableError:
                    time.sleep(0.1)
        assert served.process.poll() is None, served.errors()
        assert served.stub_pid == stub  # nothing new could be written
        (folder / "filler").unlink()
        wait_until(lambda: served.stub_pid != stub, 5, "a state that is up to date")
        print(served.state.state, served.state.restarts)
    print(served.process.returncode)
    """
    repository = str(ROOT)
    state.run_folder().mkdir(parents=True, exist_ok=True)
    lines = run_in("tiny disk", 1 << 20, state.run_folder(), code, str(tiny_long), repository)
    assert lines == ["No space left on device", "3", "ready 1", "0"]


def test_a_log_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports(1)[0]
    monkeypatch.setattr(state, "MAX_LOG_BYTES", 1000)
    path = state.log_path(port)
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.with_name(f"{path.name}.1")
    with state.opened_log(port) as log:
        for number in range(40):
            log.write(f"line {number:03} {'x' * 100}\n".encode())
            log.flush()
            state.rotate_log(path)
            assert path.stat().st_size + (old.stat().st_size if old.exists() else 0) < 2300
        assert old.read_bytes().startswith(b"line ")
        assert b"line 039" in old.read_bytes() + path.read_bytes()
    path.unlink()
    old.unlink()
    state.rotate_log(path)  # there is none: nothing to do
