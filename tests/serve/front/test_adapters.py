"""Adapters by the name of a model, through a real Triton server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penjing.core.errors import ConfigError, InputError, RequestError
from penjing.serve.engine.config import EngineConfig
from penjing.serve.families.decoder import FAMILY
from penjing.serve.runner.load import load_engine
from tests.core.artifact.adapters import adapter_tensors, write_adapter
from tests.serve.engine.test_adapters import answers, request
from tests.serve.front.asking import Fronted
from tests.serve.triton.serving import serving


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
