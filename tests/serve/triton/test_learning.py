"""Runs that learn from answers which real Triton servers sample."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penjing.core.errors import ConfigError, RequestError, UnavailableError
from penjing.serve.client.client import Client
from penjing.train.run import train
from tests.serve.triton.serving import Served, serving
from tests.train.align.test_rollouts import CODE, RECIPE

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("triton")]

KILLS = """
import os, pathlib

def kills(prompt, answer, row):
    victim = pathlib.Path(__file__).with_name("victim")
    if victim.exists():
        os.kill(int(victim.read_text()), 9)
        victim.unlink()
    return 0.5
"""


@pytest.fixture(scope="module")
def learning(tiny_long: Path) -> Iterator[Served]:
    """A server of the tiny model that takes weights."""
    with serving(tiny_long, {"take_weights": True}) as served:
        yield served


@pytest.fixture
def recipe(tiny_long: Path, tmp_path: Path) -> Path:
    rows = [{"prompt": f"Say {place}.", "answer": place} for place in range(20)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(CODE + KILLS)
    path = tmp_path / "rollouts.toml"
    path.write_text(RECIPE.format(folder=tmp_path, base=tiny_long))
    return path


def learnt(recipe: Path, settings: list[str]) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """The weights and the records of a run, without what the clock says."""
    train(recipe, ["steps=3", "evaluation.every=2", *settings], force=True)
    lines = (recipe.parent / "out-run/metrics.jsonl").read_text().splitlines()
    named = ("reward", "length", "gap", "eval/reward")
    found = [{name: value for name, value in json.loads(line).items() if name in named} for line in lines]
    return load_file(recipe.parent / "out/model.safetensors"), found


@pytest.mark.parametrize("settings", [[], ["algorithm.redraws=1", "adapter.rank=4"], ["data.ahead=true"]])
def test_answers_of_a_server_are_those_of_the_own_engine(learning: Served, recipe: Path, settings: list[str]) -> None:
    ours, records = learnt(recipe, settings)
    theirs, other_records = learnt(recipe, [*settings, f'data.servers=["{learning.address}"]'])
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert records == other_records
    assert len(records) >= 4


def test_a_server_that_dies_is_sent_its_weights_again(learning: Served, recipe: Path, other: Path) -> None:
    """It dies between two draws, and starts anew with the weights of its folder, which are others."""
    settings = [
        f"initial={other}", f"reward.kind={recipe.parent}/reward.py:kills", "algorithm.redraws=1", "steps=2",
        "evaluation.every=0",
    ]  # fmt: skip
    ours, _ = learnt(recipe, settings)
    (recipe.parent / "victim").write_text(str(learning.stub_pid))
    theirs, _ = learnt(recipe, [*settings, f'data.servers=["{learning.address}"]'])
    assert not (recipe.parent / "victim").exists()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_server_that_dies_while_it_is_sent_weights_is_sent_them_again(
    learning: Served, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["steps=2", "evaluation.every=0"]
    ours, _ = learnt(recipe, settings)
    ask, victim = Client._ask_about_weights, [learning.stub_pid]

    def killing(client: Client, timeout: float | None, asked: Any, values: Any) -> str:
        if victim and isinstance(asked, dict) and asked.get("begin") == 1024:  # between two pieces of a tensor
            os.kill(victim.pop(), signal.SIGKILL)
        return ask(client, timeout, asked, values)

    monkeypatch.setattr("penjing.serve.client.weights.VALUES_AT_ONCE", 1024)
    monkeypatch.setattr(Client, "_ask_about_weights", killing)
    theirs, _ = learnt(recipe, [*settings, f'data.servers=["{learning.address}"]'])
    assert not victim
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_servers_that_do_not_fit_are_named(server: Served, recipe: Path, learning: Served, smaller: Path) -> None:
    with pytest.raises(UnavailableError, match=r"data\.servers: no server answers at 127\.0\.0\.1:9"):
        train(recipe, ['data.servers=["127.0.0.1:9"]'])
    with pytest.raises(RequestError, match=r"data\.servers: .*start it with --set take_weights=true"):
        train(recipe, [f'data.servers=["{server.address}"]'], force=True)
    with pytest.raises(RequestError, match=r"data\.servers: .*the served model is another one"):
        train(recipe, [f'data.servers=["{learning.address}"]', f"initial={smaller}"], force=True)
    with pytest.raises(ConfigError, match=r"data\.servers: server 'here' must be host:port"):
        train(recipe, ['data.servers=["here"]'], force=True)


@pytest.fixture(scope="session")
def smaller(make_tiny_checkpoint: Callable[..., Path]) -> Path:
    """A model of another shape."""
    return make_tiny_checkpoint(num_hidden_layers=1)
