"""Several models and versions of one command on real servers: each answers as itself, and falls by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penjing.core.artifact.onnx_encoder import EncoderArtifact
from penjing.serve.bench.ab import bench_ab
from penjing.serve.client.client import Client
from penjing.serve.fleet.names import read_names
from penjing.serve.fleet.plan import FleetPlan, make_plan
from penjing.serve.fleet.state import FleetState, fleet_path, read_fleet
from penjing.serve.front.versions import chosen
from penjing.serve.gate.config import FrontConfig, FrontModel
from penjing.serve.supervisor import state
from penjing.serve.supervisor.process import ServeConfig
from penjing.serve.supervisor.stop import stop
from tests.serve.front.asking import Answer, Asking
from tests.serve.triton.serving import START_SECONDS, free_ports, leftovers, wait_until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("front")]
PROMPT = "The quick brown fox"
TEXTS = ["the value of a list", "objets d'été ✓"]
SHARE = 0.3


class ServedFleet(Asking):
    """A running fleet on free ports."""

    def __init__(self, models: list[str], shares: list[str]) -> None:
        ports = free_ports(2 * len(models) + 1)
        super().__init__(ports.pop())
        base = ServeConfig(front=FrontConfig(port=self.port))
        plan = make_plan(read_names(models, shares), base, [], kv_cache_bytes=64 << 20)
        moved = [
            model.model_copy(
                update={
                    "config": model.config.model_copy(
                        update={"grpc_port": ports.pop(), "metrics_port": ports.pop()},
                    )
                }
            )
            for model in plan.models
        ]
        self.plan = FleetPlan(models=tuple(moved), front=plan.front)

    def start(self) -> None:
        command = [sys.executable, "-m", "penjing.serve.fleet.fleet", self.plan.model_dump_json()]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    @property
    def state(self) -> FleetState | None:
        return read_fleet(self.plan.port)

    def is_ready(self) -> bool:
        if self.process.poll() is not None:
            assert self.process.stderr is not None
            pytest.fail(f"the fleet ended: {self.process.stderr.read()}")
        found = self.state
        return found is not None and found.pid == self.process.pid and found.state == "ready"

    def client(self, name: str) -> Client:
        (model,) = [model for model in self.plan.models if model.id == name]
        address = f"127.0.0.1:{model.config.grpc_port}"
        return Client(address, model=model.config.model_name, timeout=60.0, retries=0)

    def server(self, name: str) -> state.ServerState:
        (model,) = [model for model in self.plan.models if model.id == name]
        found = state.read_state(model.config.grpc_port)
        assert found is not None
        return found

    def complete(self, model: str, **fields: Any) -> Answer:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        return self.ask("/v1/completions", body | fields)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture(scope="module")
def fleet(
    tiny_long: Path, make_tiny_checkpoint: Callable[..., Path], artifact: EncoderArtifact
) -> Iterator[ServedFleet]:
    other = make_tiny_checkpoint(max_position_embeddings=4096, seed=7)
    served = ServedFleet([f"llm:1={tiny_long}", f"llm:2={other}", f"embed={artifact.folder}"], [f"llm:2={SHARE}"])
    served.start()
    try:
        wait_until(served.is_ready, START_SECONDS, "getting ready")
        yield served
    finally:
        served.end()


def test_all_models_are_listed_and_answer_as_themselves(fleet: ServedFleet) -> None:
    listed = fleet.ask("/v1/models").json["data"]
    assert [model["id"] for model in listed] == ["llm", "llm:1", "llm:2", "embed"]
    texts = {}
    for name in ("llm:1", "llm:2"):
        with fleet.client(name) as client:
            expected = client.generate(PROMPT, max_tokens=12, temperature=0.0, ignore_eos=True)
        answer = fleet.complete(name).json
        assert answer["model"] == name
        texts[name] = answer["choices"][0]["text"]
        assert texts[name] == expected.text
    assert texts["llm:1"] != texts["llm:2"]
    answer = fleet.ask("/v1/embeddings", {"model": "embed", "input": TEXTS}).json
    with fleet.client("embed") as client:
        assert np.array_equal(np.array([each["embedding"] for each in answer["data"]], np.float32), client.embed(TEXTS))
    assert fleet.complete("embed").error["code"] == "wrong_model"
    assert fleet.complete("llm:3").error["message"] == ("There is no model 'llm:3'; there is llm, llm:1, llm:2, embed.")


def test_a_share_of_the_users_gets_the_canary_and_stays_with_it(fleet: ServedFleet) -> None:
    texts = {name: fleet.complete(name).json["choices"][0]["text"] for name in ("llm:1", "llm:2")}
    facts = {"group": "llm", "kind": "llm", "name": "llm", "folder": Path(), "grpc": "", "metrics": ""}
    models = [FrontModel(id=model.id, share=model.share, **facts) for model in fleet.plan.models[:2]]
    seen = []
    for number in range(24):
        user = f"user {number % 12}"
        answer = fleet.complete("llm", user=user).json
        assert answer["model"] == chosen("llm", models, f"\0{user}").id
        assert answer["choices"][0]["text"] == texts[answer["model"]]
        seen.append(answer["model"])
    assert seen[:12] == seen[12:]
    assert set(seen) == {"llm:1", "llm:2"}


def test_figures_are_of_each_model_and_version(fleet: ServedFleet) -> None:
    def shown(name: str) -> dict[tuple[str, str | None], float]:
        page = fleet.ask("/metrics").body.decode()
        (family,) = [family for family in text_string_to_metric_families(page) if family.name == f"penjing:{name}"]
        return {(s.labels["model"], s.labels.get("version")): s.value for s in family.samples}

    def tokens() -> dict[tuple[str, str | None], float]:
        return shown("generation_tokens")

    all_ready = {("llm", "1"): 1.0, ("llm", "2"): 1.0, ("embed", None): 1.0}
    wait_until(lambda: shown("model_ready") == all_ready, START_SECONDS, "readiness of all")
    before = tokens()
    assert set(before) == {("llm", "1"), ("llm", "2")}
    fleet.complete("llm:2", max_tokens=500)
    wait_until(lambda: tokens()["llm", "2"] >= before["llm", "2"] + 499, 20, "the figures")
    assert tokens()["llm", "1"] < before["llm", "1"] + 499  # a token each two seconds shows its health


def test_versions_are_compared_in_turns(fleet: ServedFleet) -> None:
    first, second = (f"127.0.0.1:{model.config.grpc_port}" for model in fleet.plan.models[:2])
    texts = [f"{PROMPT} {number}" for number in range(8)]
    found = bench_ab(first, second, prompts=texts, num_new_tokens=8)
    assert found["prompts"] == 8
    assert found["agreement"]["value"] < 0.5
    assert found["bits_per_byte"]["first"] != found["bits_per_byte"]["second"]
    alike = bench_ab(first, first, prompts=texts, num_new_tokens=8)
    assert alike["same_answers"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert alike["bits_per_byte_difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert alike["bits_per_byte"]["first"] == found["bits_per_byte"]["first"]


def test_a_model_that_dies_takes_no_other_along(fleet: ServedFleet) -> None:
    body = {"model": "embed", "input": TEXTS}
    embeddings = fleet.ask("/v1/embeddings", body).json["data"]
    before = fleet.server("embed")
    others = [fleet.server(name).server_pid for name in ("llm:1", "llm:2")]
    assert before.stub_pid

    def asked() -> int:
        status = fleet.ask("/v1/embeddings", body).status
        assert status in (200, 503)
        return status

    with fleet.client("llm:1") as client:
        stream = client.stream("a tree", max_tokens=3000, temperature=0.0, ignore_eos=True)
        next(stream)
        os.kill(before.stub_pid, signal.SIGKILL)
        wait_until(lambda: asked() and fleet.server("embed").restarts > before.restarts, 30, "the restart")
        assert fleet.complete("llm:1").status == 200
        assert fleet.complete("llm:2").status == 200
        for _ in stream:
            pass
        assert stream.result.num_output_tokens == 3000
    wait_until(lambda: asked() == 200, START_SECONDS, "embeddings again")
    assert fleet.ask("/v1/embeddings", body).json["data"] == embeddings
    wait_until(fleet.is_ready, START_SECONDS, "readiness of all")
    assert fleet.server("embed").server_pid != before.server_pid
    assert [fleet.server(name).server_pid for name in ("llm:1", "llm:2")] == others


def test_a_supervisor_that_dies_is_started_again(fleet: ServedFleet) -> None:
    before = fleet.server("llm:2")
    os.kill(before.supervisor_pid, signal.SIGKILL)
    assert fleet.complete("llm:1").status == 200

    def is_back() -> bool:
        found = state.read_state(before.grpc_port)
        return found is not None and found.supervisor_pid != before.supervisor_pid and found.state == "ready"

    wait_until(is_back, START_SECONDS, "another supervisor")
    wait_until(lambda: fleet.complete("llm:2").status == 200, START_SECONDS, "an answer")
    wait_until(lambda: (found := fleet.state) and found.models["llm:2"]["restarts"], 20, "the count of restarts")


def test_a_stop_by_any_port_drains_all(fleet: ServedFleet, capsys: pytest.CaptureFixture[str]) -> None:
    ports = [model.config.grpc_port for model in fleet.plan.models]
    wait_until(fleet.is_ready, START_SECONDS, "readiness of all")
    with fleet.client("llm:1") as client:
        stream = client.stream("a tree", max_tokens=2000, temperature=0.0, ignore_eos=True)
        next(stream)
        ending = threading.Thread(target=stop, args=(ports[-1],))
        ending.start()
        for _ in stream:
            pass
        assert stream.result.num_output_tokens == 2000
    ending.join(60)
    assert f"the servers on gRPC ports {', '.join(map(str, sorted(ports)))} have stopped" in capsys.readouterr().err
    wait_until(lambda: fleet.process.poll() is not None, 30, "the end")
    assert fleet.process.returncode == 0
    assert not fleet_path(fleet.plan.port).exists()
    assert [leftovers(port) for port in ports] == [[], [], []]


def test_a_model_that_cannot_be_loaded_ends_the_start_and_is_named(tiny_long: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_long.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    served = ServedFleet([f"good={tiny_long}", f"bad={broken}"], [])
    weights.write_bytes(weights.read_bytes()[:-64])
    served.start()
    try:
        wait_until(lambda: served.process.poll() is not None, START_SECONDS, "the end")
        assert served.process.returncode != 0
        assert served.process.stderr is not None
        assert served.process.stderr.read().startswith("error: bad: ")
        assert [leftovers(model.config.grpc_port) for model in served.plan.models] == [[], []]
    finally:
        served.end()
