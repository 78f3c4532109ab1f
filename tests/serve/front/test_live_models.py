"""Versions that are loaded, promoted, rolled back and taken away while clients ask: no request fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penjing.core.errors import ConfigError, InputError, ServerError, SetupError
from penjing.serve.fleet import commands
from penjing.serve.fleet.change import ask_for, change_path, take_change
from penjing.serve.fleet.names import read_names
from penjing.serve.fleet.plan import make_plan
from penjing.serve.fleet.state import fleet_path
from penjing.serve.supervisor import state
from penjing.serve.supervisor.process import ServeConfig
from penjing.serve.supervisor.stop import stop
from tests.serve.front.test_fleet import ServedFleet
from tests.serve.triton.serving import START_SECONDS, free_ports, leftovers, wait_until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("front")]


@pytest.fixture
def served(tiny_long: Path) -> Iterator[ServedFleet]:
    fleet = ServedFleet([f"llm={tiny_long}"], [])
    fleet.start()
    try:
        wait_until(fleet.is_ready, START_SECONDS, "getting ready")
        yield fleet
    finally:
        fleet.end()


class Load:
    """Clients that ask again and again, half of them with streams; what each was answered. Requests are under way at
    any time, but the clients leave the processor time for what they are to see change."""

    def __init__(self, fleet: ServedFleet) -> None:
        self._fleet = fleet
        self._ending = threading.Event()
        self.answers: list[tuple[int, str]] = []
        self.broken: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(4)]

    def _ask(self, number: int) -> None:
        while not self._ending.wait(0.05):
            if number % 2:
                answer = self._fleet.complete("llm", max_tokens=24, stream=True)
                text = answer.body.decode()
                if answer.status != 200 or not text.endswith("data: [DONE]\n\n") or '"error"' in text:
                    self.broken.append(text)
                continue
            answer = self._fleet.complete("llm", max_tokens=24)
            self.answers.append((answer.status, answer.json.get("model", answer.body.decode())))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(60)

    def seen(self) -> set[str]:
        """Who answers from now on."""
        count = len(self.answers)
        wait_until(lambda: len(self.answers) >= count + 8, 30, "eight answers")
        return {model for _, model in self.answers[count + 2 :]}  # two may have been under way


def test_versions_change_under_load_and_no_request_fails(
    served: ServedFleet, make_tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    other = make_tiny_checkpoint(max_position_embeddings=4096, seed=7)
    port = served.plan.port
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in other.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    with Load(served) as load:
        assert load.seen() == {"llm"}
        commands.load_to_terminal(port, f"llm:2={other}", 0.0, ["num_blocks=512"], None)
        assert [each["id"] for each in served.ask("/v1/models").json["data"]] == ["llm", "llm:1", "llm:2"]
        assert load.seen() == {"llm:1"}
        base = ServeConfig(grpc_port=free_ports(2)[0], metrics_port=free_ports(2)[1])
        (model,) = make_plan(read_names([f"llm:3={broken}"], []), base, ["llm.num_blocks=512"]).models
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-64])
        with pytest.raises(InputError, match="not a complete safetensors file"):
            commands.load_to_terminal(port, f"llm:3={broken}", 0.5, ["num_blocks=512"], None)
        with pytest.raises(ServerError, match=r"llm:3 cannot be loaded: .*(?s:.*); the others go on"):
            ask_for(port, served.process.pid, load=model)
        with pytest.raises(ServerError, match="llm:2 is served already"):
            commands.load_to_terminal(port, f"llm:2={other}", 0.0, [], None)
        commands.share_to_terminal(port, ["llm:2=0.5"])
        wait_until(lambda: load.seen() == {"llm:1", "llm:2"}, 30, "both to answer")  # eight may be of one by chance
        commands.share_to_terminal(port, ["llm:2=1"])
        assert load.seen() == {"llm:2"}
        commands.rollback_to_terminal(port, "llm")
        wait_until(lambda: load.seen() == {"llm:1", "llm:2"}, 30, "both to answer")  # eight may be of one by chance
        with pytest.raises(ServerError, match="llm:1 has 50% of the requests for llm; promote another first"):
            commands.unload_to_terminal(port, "llm:1")
        commands.share_to_terminal(port, ["llm:2=1"])
        commands.unload_to_terminal(port, "llm:1")
        assert load.seen() == {"llm:2"}
        with pytest.raises(ServerError, match="llm:1 had a part of the requests for llm and is served no more"):
            commands.rollback_to_terminal(port, "llm")
        with pytest.raises(ServerError, match="llm:2 is the only model"):
            commands.unload_to_terminal(port, "llm:2")
    assert not load.broken
    assert {status for status, _ in load.answers} == {200}
    assert state.is_running(port)  # nobody else takes the port by which the fleet is known
    change_path(port).write_text('{"id": "x", "load": {"id": ')
    wait_until(lambda: not change_path(port).exists(), 10, "the damaged change to be dropped")
    assert served.complete("llm").status == 200
    found = served.state
    assert found is not None
    ports = [port, *(model["grpc_port"] for model in found.models.values())]
    stop(port)
    wait_until(lambda: served.process.poll() is not None, 30, "the end")
    assert not fleet_path(port).exists()
    assert [leftovers(each) for each in ports] == [[], []]


def test_what_cannot_be_asked_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no server of models with names runs from gRPC port 1;"):
        commands.share_to_terminal(1, ["llm:2=0.5"])
    with pytest.raises(ConfigError, match="'llm:2=much' is no share"):
        commands.share_to_terminal(1, ["llm:2=much"])
    assert take_change(1) is None
