"""A search over how far back a decoder's layers see: what it judges is what transformers computes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penjing.compress.recipe import load_recipe
from penjing.compress.run import run_recipe
from penjing.compress.search.decoder import STRIDE
from penjing.compress.search.points import decoder_steps, point_recipe
from penjing.compress.search.recipe import Workload
from penjing.compress.search.search import run_joint_search
from penjing.compress.search.space import Space, Variable
from penjing.core.checkpoint.dtypes import DTYPES
from penjing.core.config import dump_toml
from penjing.core.errors import ConfigError
from penjing.core.progress import Silent
from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.cpu.library import TURNED_KEYS
from penjing.serve.engine.config import EngineConfig
from penjing.serve.runner.device import resolve_device
from tests.compress.search.test_decoder import base, opened

NONE: dict[str, Any] = {"widths": (1.0,), "bits": (8,), "layers": False}


@pytest.fixture(scope="module")
def qwen(make_tiny_checkpoint: Callable[..., Path]) -> Path:
    return make_tiny_checkpoint(num_hidden_layers=4, model_type="qwen3", qk_norm=True, head_dim=32)


def values_of(model: Path, tmp_path: Path) -> dict[str, Any]:
    values = base(model, tmp_path / "out")
    return values | {"steps": values["steps"][1:]}  # without the prune, which these have no use for


@torch.no_grad()
def apart(one: Any, other: Any, windows_WT: torch.Tensor) -> float:
    """Nats, of every fourth token."""
    before, after = (each(windows_WT).logits[:, ::STRIDE].double().log_softmax(-1) for each in (one, other))
    return float((before.exp() * (before - after)).sum(-1).mean())


def test_what_is_judged_is_what_transformers_computes(qwen: Path, tmp_path: Path) -> None:
    values = values_of(qwen, tmp_path)
    trials = opened(values, tmp_path / "work", **NONE, windows=(24, 8))
    assert [each.kind for each in trials.space.variables] == ["attention"] * 4
    assert trials.space.variables[0].options == (512.0, 24.0, 8.0)
    assert trials.divergence(trials.space.start) == 0.0
    choice = (1, 0, 1, 1)
    made = point_recipe(values, trials.point(values, choice), tmp_path / "search", "front-01.toml")
    assert made["steps"][0] == {"kind": "window", "windows": [24, 0, 24, 24]}
    run_recipe(made | {"steps": made["steps"][:1]})
    config = json.loads((Path(made["output"]) / "config.json").read_text())
    assert config["layer_types"] == [f"{each}_attention" for each in ("sliding", "full", "sliding", "sliding")]
    whole, changed = (AutoModelForCausalLM.from_pretrained(each).eval() for each in (qwen, made["output"]))
    assert trials.divergence(choice) == pytest.approx(apart(whole, changed, trials.judged_WT), rel=1e-4)
    assert trials.divergence((0, 2, 0, 0)) > trials.divergence((0, 1, 0, 0)) > 0


def test_a_window_of_one_looks_nothing_up(qwen: Path, tmp_path: Path) -> None:
    values = values_of(qwen, tmp_path)
    trials = opened(values, tmp_path / "work", **NONE, windows=(24, 1))
    choice = (0, 2, 0, 2)
    made = point_recipe(values, trials.point(values, choice), tmp_path / "search", "front-01.toml")
    assert made["steps"][0]["windows"] == [0, 1, 0, 1]
    run_recipe(made | {"steps": made["steps"][:1]})
    whole, changed = (AutoModelForCausalLM.from_pretrained(each).eval() for each in (qwen, made["output"]))
    blind = AutoModelForCausalLM.from_pretrained(qwen).eval()
    for layer in (1, 3):  # what is left of attention: values, heads that share one, and the output
        own = blind.model.layers[layer].self_attn
        shared = own.config.num_attention_heads // own.config.num_key_value_heads

        def alone(hidden_states: torch.Tensor, own: Any = own, shared: int = shared, **_: Any) -> Any:
            values_TD = own.v_proj(hidden_states).unflatten(-1, (-1, own.head_dim))
            return own.o_proj(values_TD.repeat_interleave(shared, -2).flatten(-2)), None

        own.forward = alone
    with torch.no_grad():
        torch.testing.assert_close(changed(trials.judged_WT).logits, blind(trials.judged_WT).logits)
    assert trials.divergence(choice) == pytest.approx(apart(whole, blind, trials.judged_WT), rel=1e-4)


def test_windows_are_timed_by_the_keys_that_are_read(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = opened(values_of(qwen, tmp_path), tmp_path / "work", **NONE, windows=(24, 8))
    clock = trials.clock(Workload(streams=2, context=40, rounds=3))
    ticks = itertools.count()
    monkeypatch.setattr(type(clock), "now", property(lambda _: lambda: float(next(ticks))))
    parts, table = clock.parts(3, Silent())
    assert [entry["keys"] for entry in table["entries"] if entry["layer"] == "attention"] == [41, 24, 8]
    assert [part.scope for part in parts] == [(0,), (1,), (2,), (3,)]
    assert (parts[0].kinds["of_its_time"] == 4).all()
    assert (parts[0].kinds["of_attention"] == 1).all()
    shapes = [clock.shape(layer, (0, 1, 2, 0)) for layer in range(4)]
    assert [shape.window for shape in shapes if shape is not None] == [None, 24, 8, None]
    logits, ids = clock.network((0, 1, 2, 0))()  # type: ignore[misc]
    assert logits.shape == ids.shape == (2, 1)
    with pytest.raises(ConfigError, match=r"workload\.context=20: a window of 24 tokens saves nothing there"):
        trials.clock(Workload(context=20))


def test_keys_are_timed_as_the_engine_keeps_them(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set[tuple[torch.dtype, bool]]()
    attention = CpuExtension.paged_attention

    def watched(self: CpuExtension, q_THD: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        seen.add((given[0].dtype, named.get("turned", False)))
        return attention(self, q_THD, *given, **named)

    monkeypatch.setattr(CpuExtension, "paged_attention", watched)
    clock = opened(values_of(qwen, tmp_path), tmp_path / "work", **NONE, windows=(24,)).clock(
        Workload(streams=2, context=40, rounds=3)
    )
    clock.parts(1, Silent())
    kept = resolve_device(EngineConfig(device="cpu"), clock.config, is_quantized=True)
    assert seen == {(DTYPES[kept.kv_dtype], kept.block_size % TURNED_KEYS == 0)}
    assert clock._cache(1)[1].dtype == DTYPES[kept.kv_dtype]
    assert clock._cache(1)[1].shape[-2] == kept.block_size


def test_a_search_of_windows_writes_recipes_with_them(qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(dump_toml(values_of(qwen, tmp_path)))
    search: dict[str, Any] = {
        "base": str(tmp_path / "base.toml"),
        "output": str(tmp_path / "search"),
        "cost": "latency",
        "combinations": 8,
        "points": 4,
        "space": {"widths": [1.0], "bits": [8], "windows": [24, 8]},
        "workload": {"rounds": 3, "context": 500},
    }
    (tmp_path / "search.toml").write_text(dump_toml(search))
    result = run_joint_search(tmp_path / "search.toml")
    assert {row["kind"] for row in result["rows"]} >= {"start", "single", "uniform"}
    assert [result["rows"][each["row"]]["choice"] for each in result["baselines"]] == [[1] * 4, [2] * 4]
    page = (tmp_path / "search/report.html").read_text()
    assert "<th>sees</th>" in page
    assert "8 tokens" in page
    for entry in result["front"]:
        window = load_recipe(tmp_path / "search" / entry["recipe"]).steps[0]
        choice = result["rows"][entry["row"]]["choice"]
        assert window.model_dump()["windows"] == tuple((0, 24, 8)[each] for each in choice)
    (tmp_path / "search.toml").write_text(dump_toml(search | {"cost": "bytes"}))
    with pytest.raises(ConfigError, match=r"a window takes no weights away, but time; set cost=\"latency\""):
        run_joint_search(tmp_path / "search.toml")


def test_windows_are_numbered_by_the_layers_that_stay() -> None:
    layers = [Variable(f"model.layers.{at}", "layer", (1.0, 0.5, 0.0), None, ((), (1, 2), ())) for at in range(4)]
    sees = [Variable(f"model.layers.{at}", "attention", (512.0, 64.0, 16.0)) for at in range(4)]
    steps = [{"kind": "prune"}, {"kind": "distill"}, {"kind": "quantize"}]
    found = decoder_steps({"steps": steps}, Space((*layers, *sees), ()), (0, 2, 0, 0, 1, 1, 0, 2), 8, 4)
    assert [step["kind"] for step in found] == ["prune", "window", "distill", "quantize"]
    assert found[1]["windows"] == [64, 0, 16]
    found = decoder_steps({"steps": steps}, Space((*layers, *sees), ()), (0, 0, 0, 0, 0, 0, 0, 2), 8, 4)
    assert [step["kind"] for step in found] == ["window", "distill", "quantize"]  # there is something to heal
    assert found[0]["windows"] == [0, 0, 0, 16]


def test_uniform_choices_have_one_window() -> None:
    sees = [
        Variable(f"model.layers.{at}", "attention", options) for at, options in enumerate([(512.0, 16.0), (8.0, 4.0)])
    ]
    space = Space(tuple(sees), ())
    assert space.uniform(1.0, 8) == (0, 0)
    assert space.uniform(1.0, 8, 16) == (1, 0)  # the second sees less already
    assert space.uniform(1.0, 8, np.inf) == (0, 0)


@pytest.mark.parametrize(
    ("windows", "steps", "said"),
    [
        ((64,), [], r"texts of 64 tokens show nothing of a window of 64"),
        ((8,), [{"kind": "window", "windows": [8]}], "leave it out of base"),
    ],
)
def test_windows_that_cannot_be_searched_are_refused(
    qwen: Path, tmp_path: Path, windows: tuple[int, ...], steps: list[dict[str, Any]], said: str
) -> None:
    values = values_of(qwen, tmp_path)
    with pytest.raises(ConfigError, match=said):
        opened(values | {"steps": [*steps, *values["steps"]]}, tmp_path / "work", **NONE, windows=windows)
