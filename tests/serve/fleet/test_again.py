"""The command that starts a changed server again: read by the command line itself, it makes the same plan."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from penjing.core.errors import ConfigError, SetupError
from penjing.serve import cli
from penjing.serve.fleet import commands
from penjing.serve.fleet.again import command_again
from penjing.serve.fleet.change import found_fleet
from penjing.serve.fleet.names import changed_shares, read_names
from penjing.serve.fleet.plan import FleetModel, FleetPlan
from penjing.serve.gate.config import FrontConfig
from penjing.serve.supervisor import state
from penjing.serve.supervisor.process import ServeConfig
from tests.serve.triton.serving import free_ports


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], FleetPlan]:
    """What `penjing serve` with these words would start."""
    plans: list[FleetPlan] = []
    monkeypatch.setattr("penjing.serve.fleet.start.serve_fleet", lambda plan, detach: plans.append(plan))

    def plan(words: list[str]) -> FleetPlan:
        done = CliRunner().invoke(cli.app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return plans.pop()

    return plan


def facts(plan: FleetPlan) -> list[Any]:
    models = [(m.id, m.folder, m.share, json.loads(m.engine_json), m.config) for m in plan.models]
    return [models, plan.front]


def test_the_command_makes_the_plan_again(
    planned: Callable[[list[str]], FleetPlan], make_tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_tiny_checkpoint(max_position_embeddings=4096)
    odd = tmp_path / "a folder"
    odd.symlink_to(folder)
    port = free_ports(1)[0]
    words = ["serve", f"llm:1={folder}", f"llm:2={odd}", f"b={folder}", "--share", "llm:2=0.25", "--openai", "8080"]
    words += ["--grpc-port", str(port), "--kv-cache-bytes", "30000000", "--set", "llm:2.max_num_sequences=8"]
    words += ["--set", "b.kv_dtype=int8", "--front", 'allowed_hosts=["x.org", "\U0001f333.org"]', "--host", "0.0.0.0"]
    words += ["--keys", str(tmp_path / "keys.toml"), "--tls", str(tmp_path / "cert"), str(tmp_path / "key")]
    first = planned(words)
    again = shlex.split(command_again(first))
    assert again[:2] == ["penjing", "serve"]
    assert facts(planned(again[1:])) == facts(first)


@pytest.mark.parametrize(
    ("host", "said"),
    [("127.0.0.1", []), ("::1", ["--host", "::1"]), ("127.0.0.2", ["--host", "127.0.0.2"])],
)
def test_every_host_but_the_usual_one_is_said(host: str, said: list[str]) -> None:
    model = FleetModel(id="llm", folder=Path("/m"), engine_json="{}", config=ServeConfig())
    words = shlex.split(command_again(FleetPlan(models=(model,), front=FrontConfig(host=host, port=8080))))
    assert words == ["penjing", "serve", "llm=/m", "--openai", "8080", *said]


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0, 1)), max_size=8))
def test_shares_are_read_again_however_they_were_moved(moves: list[tuple[int, float]]) -> None:
    shares = {f"llm:{version}": 0.25 for version in range(1, 5)}
    for version, share in [(1, 0.0), *moves]:  # at once three thirds, which no decimal number is
        shares = changed_shares(shares, {f"llm:{version}": share})
    models = [
        FleetModel(id=name, group="llm", share=share, folder=Path("/m"), engine_json="{}", config=ServeConfig())
        for name, share in shares.items()
    ]
    front = FrontConfig(port=8080)
    words = shlex.split(command_again(FleetPlan(models=tuple(models), front=front)))
    again = read_names(words[2:6], [word for word in words if word.startswith("llm:") and "/m" not in word])
    assert {model.id: model.share for model in again} == shares


def test_without_a_front_nothing_is_shared(
    planned: Callable[[list[str]], FleetPlan], make_tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = make_tiny_checkpoint(max_position_embeddings=4096)
    words = ["serve", f"llm:1={folder}", f"llm:2={folder}", "--kv-cache-bytes", "30000000"]
    with pytest.raises(ConfigError, match="--share needs --openai PORT"):
        planned([*words, "--share", "llm:2=0.25"])
    first = planned(words)
    again = shlex.split(command_again(first))
    assert "--share" not in again
    assert facts(planned(again[1:])) == facts(first)


def test_shares_of_a_server_without_a_front_cannot_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    running = SimpleNamespace(pid=1, port=1, front_url="", models={"llm:1": {}, "llm:2": {}})
    monkeypatch.setattr(commands, "found_fleet", lambda port: running)
    for ask in (
        lambda: commands.share_to_terminal(1, ["llm:2=0.5"]),
        lambda: commands.rollback_to_terminal(1, "llm"),
        lambda: commands.load_to_terminal(1, "llm:3=build/c", 0.5, [], None),
    ):
        with pytest.raises(ConfigError, match="needs --openai PORT"):
            ask()


def test_a_server_without_names_is_told_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports(1)[0]
    with pytest.raises(SetupError, match="no server of models with names runs"):
        found_fleet(port)
    with state.owning(port):
        state.write_state(state.ServerState("ready", "/models/a", "127.0.0.1", port, 0, 2, 1, name="llm"))
        with pytest.raises(SetupError, match="penjing serve llm=/models/a"):
            found_fleet(port)
        assert state.served_name(f"localhost:{port}") == "llm"
        assert state.served_name(f"elsewhere:{port}") is None
    assert state.served_name(f"localhost:{port}") is None
