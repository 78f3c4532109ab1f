"""Adapters by the name of a model, through a real Triton server."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from penjing.core.errors import ConfigError, InputError, RequestError
from penjing.serve.engine.config import EngineConfig
from penjing.serve.families.decoder import FAMILY
from penjing.serve.fleet.adapters import add_adapter, remove_adapter, show_adapters
from penjing.serve.runner.load import load_engine
from penjing.serve.supervisor import state
from penjing.serve.triton.adapter_list import (
    AdapterEntry,
    ServedAdapters,
    WantedAdapters,
    read_list,
    said_path,
    write_list,
)
from tests.core.artifact.adapters import adapter_tensors, write_adapter
from tests.serve.engine.test_adapters import answers, request
from tests.serve.front.asking import Fronted
from tests.serve.triton.serving import serving, wait_until


@pytest.fixture
def adapters(tiny_checkpoint: Path, tmp_path: Path) -> dict[str, Path]:
    ranks = {"alice": 4, "bob": 9}
    return {
        name: write_adapter(tmp_path / name, adapter_tensors(tiny_checkpoint, rank, seed=rank), rank)
        for name, rank in ranks.items()
    }


@pytest.mark.server
@pytest.mark.xdist_group("front")
def test_requests_choose_adapters_by_name(tiny_checkpoint: Path, adapters: dict[str, Path]) -> None:
    texts = {name: str(folder) for name, folder in adapters.items()}
    with serving(tiny_checkpoint, {"adapters": texts}, front={}) as served:
        front, name = Fronted(served), tiny_checkpoint.name
        listed = [model["id"] for model in front.ask("/v1/models").json["data"]]
        assert listed == [name, f"{name}:alice", f"{name}:bob"]
        engine = load_engine(tiny_checkpoint, EngineConfig(num_blocks=512, adapters=adapters))
        prompt = [40, 50, 60]
        for adapter in (None, "alice", "bob"):
            said = "llm" if adapter is None else f"llm:{adapter}"
            body: dict[str, Any] = {
                "model": said,
                "prompt": prompt,
                "max_tokens": 12,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = front.ask("/v1/completions", body)
            assert answer.json["model"] == (name if adapter is None else f"{name}:{adapter}")
            expected = [token for token, _ in answers(engine, [request("r", adapter, prompt)])["r"]]
            assert answer.json["choices"][0]["text"] == engine.tokenizer.decode(expected)

        assert front.ask("/v1/completions", {"model": "llm:eve", "prompt": "a"}).status == 404
        with served.client() as client, pytest.raises(RequestError, match="no adapter 'eve'; there are alice, bob"):
            client.generate("a", lora_name="eve")


@pytest.mark.parametrize(
    ("text", "example"), [("one:carol", "one:carol=build/carol"), ("carol=", "carol=build/carol"), ("=x", "alice=")]
)
def test_an_adapter_to_add_has_a_name_and_a_folder(text: str, example: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{text}' does not say .*; write NAME=FOLDER, such as {example}"):
        add_adapter(1, text)


@pytest.mark.parametrize("folder", ["carol", "carol/adapter"])
def test_a_folder_without_a_name_is_told_one(tmp_path: Path, folder: str) -> None:
    given = tmp_path / folder
    given.mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"write NAME=FOLDER, such as carol={given}$"):
        add_adapter(1, str(given))


@pytest.mark.server
@pytest.mark.xdist_group("front")
def test_adapters_come_and_go_and_a_restart_keeps_them(
    tiny_long: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {
        name: write_adapter(tmp_path / name, adapter_tensors(tiny_long, 4, seed=seed), 4)
        for seed, name in enumerate(("one", "two", "été"))
    }
    with serving(tiny_long, front={}) as served:
        front, name, port = Fronted(served), tiny_long.name, served.config.grpc_port

        def listed() -> list[str]:
            return [model["id"].removeprefix(name) for model in front.ask("/v1/models").json["data"]]

        def text(model: str, length: int = 12) -> str:
            sampling = {"max_tokens": length, "temperature": 0, "ignore_eos": True}
            answer = front.ask("/v1/completions", {"model": model, "prompt": [40, 50, 60]} | sampling)
            assert answer.status == 200, answer.body
            return answer.json["choices"][0]["text"]

        plain = text("llm")
        with served.client() as client:
            long = client.stream("a tree", max_tokens=3000, temperature=0.0, ignore_eos=True)
            next(long)
            add_adapter(port, f"alice={folders['one']}")
            wait_until(lambda: listed() == ["", ":alice"], 10, "the list of models")
            first = text("llm:alice")
            assert first != plain
            add_adapter(port, f"alice={folders['two']}")
            second = text("llm:alice")
            assert second not in (first, plain)
            add_adapter(port, f"eve={folders['été']}")
            with pytest.raises(InputError, match=r"adapter bob .* no such folder"):
                add_adapter(port, f"bob={tmp_path / 'nowhere'}")
            with pytest.raises(ConfigError, match="llm has no adapter 'bob'; it has alice, eve"):
                remove_adapter(port, "bob")
            for _ in long:
                pass
            assert long.result.num_output_tokens == 3000
        wait_until(lambda: listed() == ["", ":alice", ":eve"], 10, "the list of models")
        show_adapters(port)
        assert str(folders["two"]) in capsys.readouterr().err
        os.kill(served.stub_pid, signal.SIGKILL)
        served.wait_ready(restarts=1)
        body = {"model": "llm", "prompt": "a", "max_tokens": 1}
        wait_until(lambda: front.ask("/v1/completions", body).status == 200, 30, "an answer")
        assert (text("llm"), text("llm:alice")) == (plain, second)
        path = state.adapters_path(port)
        wide = adapter_tensors(tiny_long, 4, seed=1)
        write_adapter(tmp_path / "wide", {n: t[:, :-1].contiguous() for n, t in wide.items()}, 4)
        said = read_list(said_path(path), ServedAdapters)
        assert said is not None
        bad = {"alice": AdapterEntry(folder=tmp_path / "wide", id="x")}
        write_list(path, WantedAdapters(id="y", adapters=said.adapters | bad))
        wait_until(lambda: (found := read_list(said_path(path), ServedAdapters)) and found.id == "y", 10, "the refusal")
        found = read_list(said_path(path), ServedAdapters)
        assert found is not None
        assert "has shape" in found.refused["alice"]
        assert text("llm:alice") == second
        remove_adapter(port, "alice")
        wait_until(lambda: listed() == ["", ":eve"], 10, "the list of models")
        assert front.ask("/v1/completions", {"model": "llm:alice", "prompt": "a"}).status == 404
        assert text("llm") == plain
    assert not path.exists()


def test_what_does_not_fit_is_refused_before_anything_starts(
    tiny_checkpoint: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    wide = write_adapter(
        tmp_path / "wide", {n: t[:, :-1].contiguous() for n, t in adapter_tensors(tiny_checkpoint).items()}
    )
    for folder, error, says in (
        (tmp_path / "nowhere", InputError, "adapter eve .* no such folder"),
        (wide, InputError, "adapter eve .* has shape"),
    ):
        with pytest.raises(error, match=says):
            FAMILY.check(tiny_checkpoint, EngineConfig(adapters=adapters | {"eve": folder}))
    assert FAMILY.check(tiny_checkpoint, EngineConfig(adapters=adapters)) == tiny_checkpoint
    with pytest.raises(ConfigError, match="a model repository has no adapters"):
        FAMILY.entry(tiny_checkpoint, EngineConfig(adapters=adapters), None)
