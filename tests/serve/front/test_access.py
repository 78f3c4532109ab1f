"""A front that asks for keys, over TLS."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penjing.core.errors import InputError, SetupError
from penjing.serve.access.keys import add_key, revoke_key
from penjing.serve.gate.config import FrontConfig
from penjing.serve.site.process import check_front
from tests.serve.certificates import localhost_certificate
from tests.serve.front.asking import Fronted
from tests.serve.triton.serving import serving, wait_until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("front")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With cert.pem and key.pem of localhost, by openssl."""
    made = tmp_path_factory.mktemp("tls")
    localhost_certificate(made)
    return made


@pytest.fixture(scope="module")
def secrets(folder: Path) -> dict[str, str]:
    limits: dict[str, dict[str, object]] = {
        "alice": {},
        "slow": {"tokens_per_minute": 10},
        "one": {"max_concurrent": 1},
        "prom": {"metrics": True},
    }
    return {name: add_key(folder / "keys.toml", name, values) for name, values in limits.items()}


@pytest.fixture(scope="module")
def guarded(tiny_long: Path, folder: Path, secrets: dict[str, str]) -> Iterator[Fronted]:
    files = {"certificate": str(folder / "cert.pem"), "private_key": str(folder / "key.pem")}
    with serving(tiny_long, {}, front={"keys": str(folder / "keys.toml"), **files}) as served:
        yield Fronted(served, ssl.create_default_context(cafile=str(folder / "cert.pem")))


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


ASK: dict[str, Any] = {"model": "llm", "prompt": "x", "max_tokens": 12, "ignore_eos": True}


def test_who_has_a_key_is_let_in(guarded: Fronted, secrets: dict[str, str]) -> None:
    assert guarded.url.startswith("https://")
    wait_until(lambda: guarded.ask("/health/ready").status == 200, 10, "readiness")
    assert guarded.ask("/v1/models", headers=bearer(secrets["alice"])).status == 200
    assert guarded.ask("/v1/models", headers={"x-api-key": secrets["alice"]}).status == 200
    assert guarded.ask("/v1/completions", ASK, headers=bearer(secrets["alice"])).status == 200


@pytest.mark.parametrize("shown", ["", "Bearer", "Bearer ", "Bearer pj-unknown", "Basic YTpi", "Bearer " + "x" * 5000])
def test_nobody_else_is(guarded: Fronted, shown: str) -> None:
    for path in ("/v1/models", "/nothing", "/metrics"):
        answer = guarded.ask(path, headers={"authorization": shown} if shown else {})
        assert answer.status == 401
        assert answer.error["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert guarded.ask("/v1/completions", raw=b"x" * 100_000, headers={"authorization": shown}).status == 401


def test_metrics_need_a_key_of_their_own(guarded: Fronted, secrets: dict[str, str]) -> None:
    assert guarded.ask("/metrics", headers=bearer(secrets["alice"])).status == 403
    assert guarded.ask("/metrics", headers=bearer(secrets["prom"])).status in (200, 404)


def test_tokens_a_minute(guarded: Fronted, secrets: dict[str, str]) -> None:
    first = guarded.ask("/v1/completions", ASK, headers=bearer(secrets["slow"]))
    assert (first.status, first.headers["x-ratelimit-limit-tokens"]) == (200, "10")
    second = guarded.ask("/v1/completions", ASK, headers=bearer(secrets["slow"]))
    assert (second.status, second.error["code"]) == (429, "rate_limit_exceeded")
    assert 5 < int(second.headers["retry-after"]) < 60
    assert guarded.ask("/v1/models", headers=bearer(secrets["slow"])).status == 200  # costs nothing
    assert guarded.ask("/v1/completions", ASK, headers=bearer(secrets["alice"])).status == 200


def test_at_once(guarded: Fronted, secrets: dict[str, str]) -> None:
    import httpx2

    client = openai.OpenAI(
        base_url=f"{guarded.url}/v1",
        api_key=secrets["one"],
        max_retries=0,
        http_client=httpx2.Client(verify=guarded.context),  # type: ignore[arg-type]
    )
    endless: dict[str, Any] = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    with client, client.completions.create(model="llm", prompt="x", stream=True, **endless) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="1 requests at once"):
            client.completions.create(model="llm", prompt="x")
    wait_until(
        lambda: guarded.ask("/v1/completions", ASK, headers=bearer(secrets["one"])).status == 200, 10, "a free place"
    )


def test_keys_come_and_go_without_a_restart(guarded: Fronted, folder: Path) -> None:
    path = folder / "keys.toml"
    secret = add_key(path, "bob", {})
    assert guarded.ask("/v1/models", headers=bearer(secret)).status == 200
    revoke_key(path, "bob")
    assert guarded.ask("/v1/models", headers=bearer(secret)).status == 401
    whole = path.read_bytes()
    for harm in (lambda: path.chmod(0o644), lambda: path.write_bytes(whole[: len(whole) // 2])):
        harm()
        answer = guarded.ask("/v1/models", headers=bearer(secret))
        assert (answer.status, answer.error["code"]) == (503, "keys_unreadable")
        path.write_bytes(whole)
        path.chmod(0o600)
    assert guarded.ask("/v1/models", headers=bearer(secret)).status == 401


def test_what_would_fail_later_is_refused_first(folder: Path, secrets: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "other.pem").write_text("no key")
    wrong: dict[str, Any] = {"certificate": folder / "cert.pem", "private_key": tmp_path / "other.pem"}
    with pytest.raises(SetupError, match="PEM"):
        check_front(FrontConfig(port=1, **wrong))
    with pytest.raises(InputError, match="penjing keys add"):
        check_front(FrontConfig(port=1, keys=tmp_path / "none.toml"))
