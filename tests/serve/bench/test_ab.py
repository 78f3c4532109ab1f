"""The figures of `penjing bench ab`: arithmetic by hand, intervals beside the normal distribution's."""

from __future__ import annotations

import math
import os
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from penjing.core.errors import ConfigError, InputError, ServerError
from penjing.serve.bench import ab
from penjing.serve.bench.ab import Tried, bench_ab, compared, paragraphs, read_prompts
from penjing.serve.bench.intervals import bootstrap
from penjing.serve.fleet.state import FleetState, write_fleet
from penjing.serve.supervisor import state
from tests.serve.triton.serving import free_ports


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    value, low, high = bootstrap(lambda at: float(values[at].mean()), len(values))
    normal = NormalDist(float(values.mean()), float(values.std() / math.sqrt(len(values))))
    assert value == values.mean()
    assert low == pytest.approx(normal.inv_cdf(0.025), abs=0.02)
    assert high == pytest.approx(normal.inv_cdf(0.975), abs=0.02)


def test_figures_by_hand() -> None:
    texts = ["abcd"] * 8 + ["éé"] * 8  # each has four bytes
    pairs = [(Tried("same", 1.0, 10, 8.0, 4), Tried("same", 2.0, 10, 6.0, 4))] * 8
    pairs += [(Tried("abcd", 1.0, 10, 8.0, 4), Tried("abxyz", 2.0, 10, 6.0, 4))] * 8
    found = compared(pairs, texts)
    assert found["same_answers"]["value"] == 0.5
    assert 0.2 < found["same_answers"]["low"] < 0.5 < found["same_answers"]["high"] < 0.8
    assert found["agreement"]["value"] == pytest.approx((1 + 2 / 5) / 2)
    assert found["bits_per_byte"] == {"first": 2.0, "second": 1.5}
    assert list(found["bits_per_byte_difference"].values()) == pytest.approx([-0.5] * 3)
    assert found["perplexity"] == {"first": 4.0, "second": pytest.approx(2**1.5)}
    assert list(found["speed_ratio"].values()) == pytest.approx([0.5] * 3)
    assert found["tokens_per_second"] == {"first": 10.0, "second": 5.0}


def test_prompts_are_long_paragraphs_or_a_files_lines(tmp_path: Path) -> None:
    assert [len(text) for text in paragraphs(5)] == [400] * 5
    (tmp_path / "prompts").write_text("one\ntwo\n")
    assert read_prompts(tmp_path / "prompts") == ["one", "two"]
    (tmp_path / "unusual").write_bytes("one\u2028still one\r\n\x0ctwo".encode())
    assert read_prompts(tmp_path / "unusual") == ["one\u2028still one", "\x0ctwo"]
    (tmp_path / "binary").write_bytes(b"\xff")
    for file in ("binary", "missing"):
        with pytest.raises(InputError, match="cannot be read as a file of prompts"):
            read_prompts(tmp_path / file)
    with pytest.raises(ConfigError, match="1 prompts say nothing"):
        bench_ab("a", "b", prompts=["one", " "])
    with pytest.raises(ServerError, match="no model 'nobody:7' runs here"):
        bench_ab("nobody:7", "nobody:8", prompts=["one"] * 8)


@pytest.mark.parametrize(("host", "address"), [("192.0.2.1", "192.0.2.1"), ("2001:db8::1", "[2001:db8::1]")])
def test_a_model_is_asked_where_it_listens(
    host: str, address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """127.0.0.1 was asked, whatever `penjing serve --host` had said."""
    monkeypatch.setattr(state, "run_folder", lambda: tmp_path)
    monkeypatch.setattr("penjing.serve.fleet.state.run_folder", lambda: tmp_path)
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(ab, "Client", lambda server, *, model, timeout: asked.append((server, model)))
    port = free_ports(1)[0]
    with state.owning(port):
        state.write_state(
            state.ServerState("ready", "/models/a", host, port, 0, 2, 1, name="llm", fleet_pid=os.getpid())
        )
        assert write_fleet(FleetState("ready", port, os.getpid(), models={"llm:1": {"grpc_port": port}}))
        ab._client("llm:1")
    assert asked == [(f"{address}:{port}", "llm")]


def test_an_address_here_is_asked_for_its_own_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server of `penjing serve --name chat` has no model `llm`."""
    monkeypatch.setattr(state, "run_folder", lambda: tmp_path)
    monkeypatch.setattr("penjing.serve.fleet.state.run_folder", lambda: tmp_path)
    asked: list[tuple[str, str | None]] = []
    monkeypatch.setattr(ab, "Client", lambda server, *, model=None, timeout: asked.append((server, model)))
    port = free_ports(1)[0]
    with state.owning(port):
        state.write_state(state.ServerState("ready", "/models/a", "127.0.0.1", port, 0, 2, 1, name="chat"))
        ab._client(f"localhost:{port}")
    ab._client("192.0.2.1:8001")
    assert asked == [(f"localhost:{port}", "chat"), ("192.0.2.1:8001", None)]
