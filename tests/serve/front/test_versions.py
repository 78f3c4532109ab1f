"""Which version answers a client, which models a front lists and finds ready, and several servers' figures as one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from penjing.core.errors import OverloadedError, PenjingError, UnavailableError
from penjing.serve.access.keys import Key
from penjing.serve.access.limits import Account
from penjing.serve.client.wire_text import Chunk
from penjing.serve.front import upstream as upstream_module
from penjing.serve.front.answers import Ask, answer
from penjing.serve.front.backend import Backend
from penjing.serve.front.figures import Joined
from penjing.serve.front.versions import chosen, sharer
from penjing.serve.gate.config import MODELS, FrontConfig, FrontJob, FrontModel
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.guard import Exchange
from penjing.serve.site import server as site_server
from penjing.serve.site.app import Front
from penjing.serve.site.server import listen

CLIENTS = [f"client {number}" for number in range(2000)]


def model(version: int | None = None, share: float = 1.0, name: str = "llm", kind: str = "llm") -> FrontModel:
    return FrontModel(
        id=name if version is None else f"{name}:{version}",
        group=None if version is None else name,
        version=version,
        share=share,
        kind=kind,
        name=name,
        folder=Path("anywhere"),
        grpc=f"127.0.0.1:{1 + (version or 0) + 10 * len(name)}",
        metrics="127.0.0.1:2",
    )


def versions(share: float) -> list[FrontModel]:
    return [model(1, 1 - share), model(2, share)]


def of(share: float) -> list[int | None]:
    """The version that each of `CLIENTS` gets."""
    return [chosen("llm", versions(share), client).version for client in CLIENTS]


def test_a_share_is_one_and_who_is_in_stays_in_as_it_grows() -> None:
    tenth, half = of(0.1), of(0.5)
    assert 140 < tenth.count(2) < 260  # 200 expected, σ = 13.4
    assert 900 < half.count(2) < 1100
    assert all(after == 2 for before, after in zip(tenth, half, strict=True) if before == 2)
    assert set(of(0.0)) == {1}
    assert set(of(1.0)) == {2}


@given(st.text(), st.floats(0, 1))
def test_any_client_has_one_version(client: str, share: float) -> None:
    assert chosen("llm", versions(share), client) == chosen("llm", versions(share), client)


def test_a_conversation_is_the_keys_user_the_key_the_user_or_the_request() -> None:
    key = Account(Key(name="alice", sha256="0" * 64, created="2026-11-23T00:00:00Z"))
    assert sharer(Exchange("r", account=key), None) == "alice"
    assert sharer(Exchange("r", account=key), "bob") == "alice\0bob"
    assert sharer(Exchange("r"), "bob") == "\0bob"
    assert sharer(Exchange("r"), None) == "r"


def test_the_backend_finds_models_by_name_and_goes_round_one_that_does_not_answer() -> None:
    async def check() -> None:
        models = (model(1, 0.0), model(2, 1.0), model(name="embed", kind="encoder"))
        backend = Backend(FrontJob(front=FrontConfig(port=8080), models=models, log=Path("log")))
        exchange = Exchange("r")
        try:
            assert backend.listed == ["llm", "llm:1", "llm:2", "embed"]
            assert backend.decoder("llm", exchange).id == "llm:2"
            assert backend.decoder(None, exchange).id == "llm:2"
            assert backend.decoder("llm:1", exchange).id == "llm:1"
            assert backend.encoder("embed", exchange).id == "embed"
            for name, status in (("embed", 400), ("llm:3", 404), ("encoder", 404)):
                with pytest.raises(ApiError) as error:
                    backend.decoder(name, exchange)
                assert error.value.status == status
            assert not backend.ready
            backend.upstream(models[0]).alive()
            assert backend.decoder("llm", exchange).id == "llm:1"  # the other one does not answer
            assert backend.decoder("llm:2", exchange).id == "llm:2"
            backend.upstream(models[1]).alive()
            assert backend.decoder("llm", exchange).id == "llm:2"
            assert not backend.ready
            backend.upstream(models[2]).alive()
            assert backend.ready
            assert backend.error(OverloadedError("too much"), backend.upstream(models[1])).status == 429
            assert backend.decoder("llm", exchange).id == "llm:2"
            assert backend.error(UnavailableError("it restarts"), backend.upstream(models[1])).status == 503
            assert backend.decoder("llm", exchange).id == "llm:1"
            assert backend.decoder("llm:2", exchange).id == "llm:2"
            backend.upstream(models[1]).alive()
            assert backend.decoder("llm", exchange).id == "llm:2"
        finally:
            await backend.close()

    asyncio.run(check())


def test_an_adapter_is_a_model_by_name_and_lives_with_its_base() -> None:
    async def check() -> None:
        adapted = model().model_copy(update={"adapters": ("alice", "bob"), "aliases": ("decoder",)})
        versioned = [model(v, s, "new").model_copy(update={"adapters": ("eve",)}) for v, s in ((1, 0.0), (2, 1.0))]
        backend = Backend(FrontJob(front=FrontConfig(port=8080), models=(adapted, *versioned), log=Path("log")))
        exchange = Exchange("r")
        try:
            assert backend.listed[:3] == ["llm", "llm:alice", "llm:bob"]
            assert backend.listed[3:] == ["new", "new:1", "new:eve", "new:1:eve", "new:2", "new:2:eve"]
            for name in ("llm:alice", "decoder:alice"):
                found = backend.decoder(name, exchange)
                assert (found.id, found.adapter, found.key) == ("llm:alice", "alice", adapted.grpc)
            assert backend.decoder("new:eve", exchange).id == "new:2:eve"
            assert backend.decoder("new:1:eve", exchange).id == "new:1:eve"
            assert backend.decoder("llm", exchange).adapter is None
            with pytest.raises(ApiError, match="no model 'llm:eve'"):
                backend.decoder("llm:eve", exchange)
            for each in backend.models:
                backend.upstream(each).alive()
            assert backend.ready
            going = backend.upstream(backend.decoder("new:eve", exchange))
            assert backend.error(UnavailableError("it restarts"), going).status == 503
            assert backend.decoder("new:eve", exchange).id == "new:1:eve"
            ask = Ask(backend.decoder("llm:bob", exchange), {"max_tokens": 1}, exchange, ["a"])
            assert (ask.sampling["lora_name"], exchange.model) == ("bob", "llm:bob")
        finally:
            await backend.close()

    asyncio.run(check())


class FakeClient:
    """Says `error` after `chunks`."""

    def __init__(self, chunks: int, error: PenjingError | None) -> None:
        self._chunks, self._error = chunks, error

    async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Chunk, None]:
        for _number in range(self._chunks):
            yield Chunk("a", num_tokens=1, num_input_tokens=1)
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        pass


def test_a_request_that_finds_a_version_gone_goes_to_another_unless_it_has_begun() -> None:
    gone = UnavailableError("it ends")

    async def asked(name: str, *clients: FakeClient) -> tuple[str, int]:
        models = tuple(versions(0.999999))
        backend = Backend(FrontJob(front=FrontConfig(port=8080), models=models, log=Path("log")))
        for each, client in zip(models, clients, strict=True):
            upstream = backend.upstream(each)
            await upstream.client.close()
            upstream.client = client  # type: ignore[assignment]
            upstream.alive()
        exchange = Exchange("r")
        ask = Ask(backend.decoder(name, exchange), {"max_tokens": 2}, exchange, ["a"], stream=True)
        count = 0
        try:
            async for _ in answer(backend, ask):
                count += 1
        except ApiError as error:
            return f"{ask.model.id} {error.status}", count
        finally:
            await backend.close()
        assert exchange.model == ask.model.id
        return ask.model.id, count

    fine, lost, cut = FakeClient(2, None), FakeClient(0, gone), FakeClient(1, gone)
    assert asyncio.run(asked("llm", fine, fine)) == ("llm:2", 2)
    assert asyncio.run(asked("llm", fine, lost)) == ("llm:1", 2)
    assert asyncio.run(asked("llm:2", fine, lost)) == ("llm:2 503", 0)
    assert asyncio.run(asked("llm", lost, lost)) == ("llm:1 503", 0)
    assert asyncio.run(asked("llm", fine, cut)) == ("llm:2 503", 1)
    assert asyncio.run(asked("llm", fine, FakeClient(0, OverloadedError("much")))) == ("llm:2 429", 0)


def test_models_change_while_requests_run() -> None:
    async def check() -> None:
        first, second = versions(0.0)
        backend = Backend(FrontJob(front=FrontConfig(port=8080), models=(first,), log=Path("log")))
        watching = asyncio.create_task(backend.watch())
        closed: list[bool] = []
        try:
            await asyncio.sleep(0)
            upstream = backend.upstream(first)

            async def close() -> None:
                closed.append(True)

            real, upstream.client.close = upstream.client.close, close  # type: ignore[method-assign]
            with upstream.running():
                backend.update((second,))
                assert backend.listed == ["llm", "llm:2"]
                with pytest.raises(ApiError, match="taken away"):
                    backend.upstream(first)
                await asyncio.sleep(0.01)
                assert not closed
            async with asyncio.timeout(10):
                while not closed:
                    await asyncio.sleep(0.01)
            await real()
        finally:
            watching.cancel()
            await backend.close()

    asyncio.run(check())


def test_what_a_foreign_server_answers_ends_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One model's surprise ended the watches of all: from then on the front was not ready, though every model was."""
    monkeypatch.setattr(upstream_module, "CANARY_SECONDS", 0.01)

    class Foreign(FakeClient):
        asked = 0

        async def generate(self, *_: Any, **__: Any) -> None:
            self.asked += 1
            if self.asked < 3:
                raise ValueError("not enough values to unpack (expected 1, got 0)")

    async def check() -> None:
        models = tuple(versions(0.5))
        backend = Backend(FrontJob(front=FrontConfig(port=8080), models=models, log=Path("log")))
        for each in models:
            await backend.upstream(each).client.close()
        foreign, fine = (Foreign(0, None) for _ in models)
        fine.asked = 3
        backend.upstream(models[0]).client, backend.upstream(models[1]).client = foreign, fine  # type: ignore[assignment]
        watching = asyncio.create_task(backend.watch())
        try:
            async with asyncio.timeout(30):
                while not backend.ready:
                    await asyncio.sleep(0.01)
            assert not watching.done()
            assert foreign.asked >= 3
        finally:
            watching.cancel()

    asyncio.run(check())


def test_each_line_of_the_supervisor_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front that was stopped for a while reads several at once. That of them one lacked a model, and the next had
    another model on its port, was lost, and the new one's texts were read with the old one's tokenizer."""
    first, second = versions(0.5)
    new = second.model_copy(update={"id": "llm:3", "version": 3, "folder": Path("elsewhere")})

    async def check() -> None:
        front = Front(FrontJob(front=FrontConfig(port=8080), models=(first, second), log=Path("log")))
        front.backend, front._backend_made = Backend(front.job), True
        before = [front.backend.upstream(each) for each in (first, second)]
        reader, writer = os.pipe()
        monkeypatch.setattr(site_server, "STDIN", reader)
        loop = asyncio.get_running_loop()
        listen(front, loop)
        lines = [MODELS.dump_json(models) + b"\n" for models in ((first,), (first, new), ())]
        os.write(writer, b"".join(lines)[:-2])  # the last line has not come as a whole
        await asyncio.sleep(0.05)
        assert front.backend.models == (first, new)
        assert front.backend.upstream(first) is before[0]
        assert front.backend.upstream(new) is not before[1]
        loop.remove_reader(reader)
        os.close(reader)
        os.close(writer)
        await front.backend.close()

    asyncio.run(check())


PAGE = """# HELP penjing:prompt_tokens Prompt tokens of accepted requests.
# TYPE penjing:prompt_tokens counter
penjing:prompt_tokens{model="llm"} 5
# HELP batch_seconds Of a batch.
# TYPE batch_seconds histogram
batch_seconds_count{model="llm"} 2
batch_seconds_sum{model="llm"} 0.5
batch_seconds_bucket{model="llm",le="0.1"} 0
batch_seconds_bucket{model="llm",le="+Inf"} 2
# HELP requests Those of a text with a brace.
# TYPE requests counter
requests{model="llm",reason="a}b,c",version="1"} 4
# HELP pool_bytes Of the server.
# TYPE pool_bytes gauge
pool_bytes 7
"""


def test_figures_of_several_servers_are_one_page_of_prometheus() -> None:
    joined = Joined()
    joined.add(PAGE, {"model": "llm", "version": "1"})
    joined.add(PAGE.replace(" 5\n", " 6\n").replace('version="1"', 'version="2"'), {"model": "llm", "version": "2"})
    families = list(text_string_to_metric_families(joined.page.decode()))
    heads = [line.split()[1:3] for line in joined.page.decode().splitlines() if line.startswith("#")]
    assert len(heads) == 2 * len(families) == len({tuple(head) for head in heads})
    assert sorted(family.name for family in families) == [
        "batch_seconds",
        "penjing:prompt_tokens",
        "pool_bytes",
        "requests",
    ]
    found = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    assert len(found) == 2 * 7
    for version in ("1", "2"):
        own = ("model", "llm"), ("version", version)
        assert found["penjing:prompt_tokens_total", own] == (5.0 if version == "1" else 6.0)
        assert found["pool_bytes", own] == 7.0
        assert found["requests_total", (own[0], ("reason", "a}b,c"), own[1])] == 4.0
        assert found["batch_seconds_bucket", (("le", "+Inf"), *own)] == 2.0
