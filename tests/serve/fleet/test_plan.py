"""Where several models listen, which settings each gets, and how they share the memory of keys and values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.core.errors import ConfigError
from penjing.serve.fleet.budget import divided
from penjing.serve.fleet.names import read_names
from penjing.serve.fleet.plan import FleetPlan, make_plan
from penjing.serve.gate.config import FrontConfig
from penjing.serve.supervisor.process import ServeConfig


@pytest.fixture
def tiny(make_tiny_checkpoint: Callable[..., Path]) -> Path:
    return make_tiny_checkpoint(max_position_embeddings=4096)


def planned(names: list[str], folder: Path, overrides: list[str] | None = None, **options: Any) -> FleetPlan:
    base = options.pop("base", ServeConfig())
    return make_plan(read_names([f"{name}={folder}" for name in names], []), base, overrides or [], **options)


def settings(plan: FleetPlan) -> list[dict[str, Any]]:
    return [json.loads(model.engine_json) for model in plan.models]


def test_each_model_has_its_ports_its_name_and_its_settings(tiny: Path) -> None:
    plan = planned(
        ["m.x:1", "m.x:2", "m"],
        tiny,
        ["m.x.max_num_sequences=8", "m.x:2.block_size=8", "m.stream_interval=0.5"],
        decoder_settings=["kv_dtype=int8"],
        kv_cache_bytes=3_000_000,
        base=ServeConfig(front=FrontConfig(port=8080)),
    )
    assert plan.port == 8001
    assert [(m.config.grpc_port, m.config.metrics_port) for m in plan.models] == [
        (8001, 8002),
        (8003, 8004),
        (8005, 8006),
    ]
    assert [(m.config.model_name, m.config.model_version) for m in plan.models] == [("m.x", 1), ("m.x", 2), ("m", 1)]
    assert all(model.config.front is None for model in plan.models)
    chosen = [{k: v for k, v in values.items() if k != "kv_cache_bytes"} for values in settings(plan)]
    assert chosen == [
        {"kv_dtype": "int8", "max_num_sequences": 8},
        {"kv_dtype": "int8", "max_num_sequences": 8, "block_size": 8},
        {"kv_dtype": "int8", "stream_interval": 0.5},
    ]
    assert FleetPlan.model_validate_json(plan.model_dump_json()) == plan


def test_the_caches_are_bounded_together_and_said(tiny: Path) -> None:
    plan = planned(["a", "b", "c"], tiny, ["b.kv_cache_bytes=1000000"], kv_cache_bytes=5_000_000)
    caches = [model.kv_cache for model in plan.models]
    assert all(cache is not None for cache in caches)
    sizes = [cache.bytes for cache in caches if cache is not None]
    assert sum(sizes) <= 5_000_000
    assert sizes[1] <= 1_000_000
    assert sizes[0] == sizes[2] > 1_900_000
    assert [values["kv_cache_bytes"] for values in settings(plan)] == sizes
    assert f"{caches[0].tokens:,} tokens" in plan.endpoints  # type: ignore[union-attr]
    alone = planned(["a"], tiny).models[0].kv_cache
    assert alone is not None
    assert alone.bytes <= 4 << 30


@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**6), max_size=8))
def test_what_one_cannot_use_goes_to_the_others(total: int, needs: list[int]) -> None:
    parts = divided(total, needs)
    assert all(part <= need for part, need in zip(parts, needs, strict=True))
    assert sum(parts) <= total
    short = [part for part, need in zip(parts, needs, strict=True) if part < need]
    if short:  # all is given away, and whoever goes short has as much as any other
        assert total - sum(parts) < len(needs)
        assert max(parts) - min(short) <= 1


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (["max_num_sequences=8"], {}, r"say of which model, such as --set a\.max_num_sequences=8"),
        (["c.max_num_sequences=8"], {}, "say of which model"),
        (["a.sequences=8"], {}, "sequences"),
        (["a.kv_cache_bytes=2000000"], {"kv_cache_bytes": 1_000_000}, "take 2 MB of 1 MB"),
        ([], {"kv_cache_bytes": 10}, "a: the KV cache holds 0 blocks"),
        ([], {"base": ServeConfig(http_port=8000)}, "--http-port"),
        ([], {"base": ServeConfig(metrics_port=8003)}, "of a and --grpc-port of b are both 8003"),
        ([], {"base": ServeConfig(front=FrontConfig(port=8004))}, "--openai and --metrics-port of b are both 8004"),
        ([], {"base": ServeConfig(grpc_port=65535)}, "would be 65537"),
    ],
)
def test_what_cannot_be_is_refused(tiny: Path, overrides: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(["a", "b"], tiny, overrides, **options)
