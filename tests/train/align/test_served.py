"""Servers that sample, where none is: whoever waits is told so. What real ones do is under tests/serve/triton."""

from __future__ import annotations

import socket

import pytest

from penjing.core.errors import PenjingError, UnavailableError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.remote import late
from penjing.serve.client import calls
from penjing.train.align import served
from penjing.train.align.served import ServerSampler, check_servers
from penjing.train.processes.world import World
from tests.serve.triton.serving import free_ports

CONFIG = DecoderConfig(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
    vocab_size=16, max_position_embeddings=16,
)  # fmt: skip


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "_said_at", {})
    monkeypatch.setattr(calls, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(served, "RETRIES", 3)


def test_a_server_that_went_away_is_named_while_it_is_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    server = f"127.0.0.1:{free_ports(1)[0]}"
    sampler = ServerSampler(Decoder(CONFIG), CONFIG, [server], World(), None)
    with pytest.raises(UnavailableError, match="go on with --resume auto"):
        sampler.refresh()
    told = f"data.servers: {server} does not answer, and is asked again for nearly half a minute\n"
    assert capsys.readouterr().err == told


def test_a_server_that_says_nothing_at_the_start_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "LATE_S", 0.05)
    monkeypatch.setattr(late, "LATE_S", 0.05)
    monkeypatch.setattr(served, "SECONDS", 0.5)
    with socket.socket() as quiet:
        quiet.bind(("127.0.0.1", 0))
        quiet.listen()
        server = f"127.0.0.1:{quiet.getsockname()[1]}"
        with pytest.raises(PenjingError, match=r"data\.servers"):
            check_servers([server], CONFIG)
    assert f"data.servers: {server} has not answered for 0.05 s; it is waited for" in capsys.readouterr().err
