"""A search over a decoder: what it judges is what its recipes make, its steps are those of the engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penjing.compress.families.base import family_at
from penjing.compress.recipe import Recipe, load_recipe
from penjing.compress.run import run_recipe
from penjing.compress.search import latency
from penjing.compress.search.decoder import STRIDE, DecoderTrials
from penjing.compress.search.decoder_clock import Shape
from penjing.compress.search.families import open_trials
from penjing.compress.search.latency import TimedLayer, clock_of, fit_latency, fit_nonnegative
from penjing.compress.search.points import decoder_steps, point_recipe
from penjing.compress.search.recipe import Choices, Workload
from penjing.compress.search.search import run_joint_search
from penjing.compress.search.space import Space, Variable
from penjing.core.checkpoint.load import load_model
from penjing.core.config import dump_toml
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Silent
from penjing.core.work import Tasks

PRUNE = {"kind": "prune", "ratio": 0.3, "method": "l1", "round_to": 32}
FOUR = {
    "kind": "quantize",
    "weights_bits": 4,
    "group": 32,
    "offsets": True,
    "rounding": "nearest",
    "lm_head": "keep",
    "embedding_dtype": "float32",
    "transform": {"rotate": False, "smooth_down": 0, "smooth_output": 0},
}
ALL = {"widths": (1.0, 0.7, 0.4), "bits": (8, 4), "layers": True}


@pytest.fixture(scope="module")
def decoder(make_tiny_checkpoint: Callable[..., Path]) -> Path:
    return make_tiny_checkpoint(num_hidden_layers=4)


def base(model: Path, output: Path, **quantize: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "output": str(output),
        "data": {"tokens": 256, "window": 64},
        "evaluate": {"prose_tokens": 64, "code_tokens": 64, "window": 64},
        "measure": {"rounds": 0},
        "guard": {"perplexity_ratio": 1e9},
        "steps": [dict(PRUNE), FOUR | quantize],
    }


def opened(values: dict[str, Any], folder: Path, **choices: Any) -> DecoderTrials:
    recipe: Recipe = load_recipe(values)
    trials = open_trials(recipe, Choices(**(ALL | choices)), family_at(recipe.model), Silent())
    assert isinstance(trials, DecoderTrials)
    folder.mkdir(exist_ok=True)
    trials.prepare(Tasks(folder), Silent())
    return trials


@torch.no_grad()
def apart(model: Path, made: Path, windows_WT: torch.Tensor) -> float:
    """Nats, of every fourth token."""
    before, after = (
        load_model(folder).model(windows_WT)[:, ::STRIDE].double().log_softmax(-1) for folder in (model, made)
    )
    return float((before.exp() * (before - after)).sum(-1).mean())


def test_what_is_judged_is_what_the_recipe_makes(decoder: Path, tmp_path: Path) -> None:
    values = base(decoder, tmp_path / "out")
    trials = opened(values, tmp_path / "work")
    assert trials.space.variables[0].options == (1.0, 0.4)  # one layer has to stay
    assert trials.space.variables[1].options == (1.0, 0.4, 0.0)  # 0.7 of 96 channels, rounded up, are all
    start = trials.space.start
    assert trials.divergence(start) == 0.0
    gone, narrow = 2, 1
    choice = list(start)
    choice[0], choice[2] = narrow, gone  # of the layers
    found = trials.divergence(choice)
    made = point_recipe(values, trials.point(values, choice), tmp_path / "search", "front-01.toml")
    made["steps"] = made["steps"][:1]
    run_recipe(made)
    assert found == pytest.approx(apart(decoder, Path(made["output"]), trials.judged_WT), rel=1e-4)

    four = [*choice[:4], 1, 1, 0, 1]  # the third layer has left
    made = point_recipe(values, trials.point(values, four), tmp_path / "search", "front-02.toml")
    assert made["steps"][1]["keep_int8"] == []
    run_recipe(made)  # its 4-bit weights weigh errors by what it sees itself, which are all windows
    assert trials.divergence(four) == pytest.approx(apart(decoder, Path(made["output"]), trials.judged_WT), rel=0.02)
    assert trials.divergence(choice) == found  # nothing of the last combination is left
    assert trials.divergence(start) == 0.0


def test_transforms_come_before_four_bits(decoder: Path, tmp_path: Path) -> None:
    transform = {"rotate": True, "smooth_down": 0.5, "smooth_output": 0, "search_steps": 0}
    values = base(decoder, tmp_path / "out", transform=transform)
    trials = opened(values, tmp_path / "work", widths=(1.0,), layers=False)
    four = [1] * 4
    values["steps"] = trials.point(values, four)
    assert [step["kind"] for step in values["steps"]] == ["quantize"]
    values["data"]["tokens"] = 128  # that the transforms see the windows that the search shows them
    run_recipe(values)
    found = apart(decoder, Path(values["output"]), trials.judged_WT)
    assert trials.divergence(four) == pytest.approx(found, rel=0.1)  # it sees other windows


def space_of(layers: int) -> Space:
    widths = [Variable(f"model.layers.{at}", "layer", (1.0, 0.5, 0.0), None, ((), (1, 2), ())) for at in range(layers)]
    return Space((*widths, *(Variable(f"model.layers.{at}", "bits", (8.0, 4.0)) for at in range(layers))), ())


def test_steps_number_the_layers_that_stay() -> None:
    steps = [PRUNE | {"target": None}, {"kind": "distill"}, dict(FOUR) | {"effective_bits": 9}]
    found = decoder_steps({"steps": steps}, space_of(4), (0, 2, 1, 0, 1, 1, 1, 0), 8, 4)
    assert found[0]["layers"] == [1]
    assert found[0]["ratios"] == {"model.layers.1.mlp.gate_proj": 0.5}  # that was the third
    assert found[0]["parts"] == ["ffn", "layers"]
    assert found[2]["keep_int8"] == ["model.layers.2.*"]
    assert "effective_bits" not in found[2]
    found = decoder_steps({"steps": steps}, space_of(4), (0, 0, 0, 0, 0, 0, 0, 0), 8, 4)
    assert [step["kind"] for step in found] == ["quantize"]
    assert not found[0].keys() & {"weights_bits", "group", "offsets", "keep_int8"}


def test_a_search_by_latency_writes_recipes_that_run(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = base(decoder, tmp_path / "out")
    search: dict[str, Any] = {
        "base": str(tmp_path / "base.toml"),
        "output": str(tmp_path / "search"),
        "cost": "latency",
        "floor": 0.01,  # on a crowded machine times of tiny layers say little
        "combinations": 8,
        "points": 3,
        "space": {name: list(value) if isinstance(value, tuple) else value for name, value in ALL.items()},
        "workload": {"rounds": 3, "streams": 2, "context": 20},
    }
    (tmp_path / "base.toml").write_text(dump_toml(values))
    (tmp_path / "search.toml").write_text(dump_toml(search))
    result = run_joint_search(tmp_path / "search.toml")
    assert json.loads((tmp_path / "search/search.json").read_text()) == result
    timing = result["latency"]
    assert {entry["layer"] for entry in timing["entries"]} == {"qkv", "out", "gate_up", "down", "attention"}
    assert result["whole"] == pytest.approx(timing["fitted"][0]["predicted"])
    for point in timing["points"]:
        assert point["predicted"] == result["rows"][point["row"]]["cost"]
    assert "predicted, ms" in (tmp_path / "search/report.html").read_text()
    for entry in result["front"]:
        assert load_recipe(tmp_path / "search" / entry["recipe"]).steps
    monkeypatch.setattr("penjing.compress.search.search.TIMING", latency.TIMING + 1)
    with pytest.raises(InputError, match="made from another checkpoint, settings or files"):
        run_joint_search(tmp_path / "search.toml")


def test_a_step_has_the_layers_of_its_combination(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = opened(base(decoder, tmp_path / "out"), tmp_path / "work")
    clock = trials.clock(Workload(streams=2, context=20, rounds=3))
    ticks = itertools.count()
    monkeypatch.setattr(type(clock), "now", property(lambda _: lambda: float(next(ticks))))
    parts, table = clock.parts(3, Silent())
    assert {entry["seconds"] for entry in table["entries"]} == {1.0}  # a call lasts a tick
    gone = trials.space.variables[1].options.index(0.0)
    assert parts[1].scope == (1, 5)
    kinds = parts[1].kinds
    assert all((values[gone] == 0).all() for values in kinds.values())
    assert (kinds["of_its_time"][:gone] == 4).all()
    assert (kinds["of_attention"][:gone] == 1).all()
    assert (kinds["a_layer"][:, 0] == [*([1] * gone), 0]).all()
    choice = (0, gone, 1, 0, 0, 0, 1, 1)
    logits, ids = clock.network(choice)()  # type: ignore[misc]
    assert logits.shape == ids.shape == (2, 1)
    shapes = [clock.shape(layer, choice) for layer in range(4)]
    assert shapes[1] is None
    assert [shape.bits for shape in shapes if shape is not None] == [8, 4, 4]
    with pytest.raises(ConfigError, match=r"workload\.context=512: the model's context is 512 tokens"):
        trials.clock(Workload(context=512))


def test_an_mlp_without_a_gate_costs_two_matrices(make_tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    plain = make_tiny_checkpoint(model_type="penjing", mlp_gated=False, activation="relu2")
    trials = opened(base(plain, tmp_path / "out"), tmp_path / "work", widths=(1.0,), layers=False)
    held = [tensor.numel() for name, tensor in load_model(plain).model.named_parameters() if tensor.dim() == 2]
    whole = np.array([trials.space.start])
    assert trials.space.costs("bytes", whole)[0] == sum(held)
    clock = trials.clock(Workload(streams=2, context=20, rounds=3))
    step = clock._step({0: Shape(96, 8, None), 1: Shape(96, 4, None)})
    assert [set(each) for each in step.adapters._shapes] == [{"q", "k", "v", "out", "gate", "down"}] * 2
    clock.parts(3, Silent())
    assert clock.network((0, 1))()[0].shape == (2, 1)  # type: ignore[index]


def test_a_fitted_sum_finds_what_it_was_made_of(tmp_path: Path) -> None:
    space, made = space_of(3), []

    class Made:
        now = staticmethod(clock_of(1))

        def parts(self, rounds: int, progress: Any) -> tuple[list[TimedLayer], dict[str, Any]]:
            seconds = np.array([[4.0, 2.0], [3.0, 1.5], [0.0, 0.0]])
            stays = np.array([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
            reading = np.array([[2.0, 0.5], [2.0, 2.0], [0.0, 0.0]])
            kinds = {"layers": seconds, "a_layer": stays, "of_attention": reading}
            layers = [TimedLayer((layer, 3 + layer), kinds) for layer in range(3)]
            return layers, {"entries": []}

        def network(self, choice: tuple[int, ...]) -> Callable[[], object]:
            raise AssertionError("kept")

    def timed(clock: Any, choice: tuple[int, ...], workload: Workload, tasks: Tasks) -> dict[str, float]:
        made.append(choice)
        parts = clock.parts(1, None)[0]
        taken, around, read = (
            sum(part.kinds[name][tuple(choice[each] for each in part.scope)] for part in parts)
            for name in ("layers", "a_layer", "of_attention")
        )
        whole = 0.5 + 0.75 + 24 + 18
        return {"ratio": float(0.5 + 0.25 * around + 2 * taken + 3 * read) / whole, "start": whole}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency, "time_network", timed)
        found = fit_latency(space, Made(), Workload(), 0, Tasks(tmp_path), Silent())  # type: ignore[arg-type]
    assert found.record["coefficients"] == pytest.approx(
        {"once": 0.5, "layers": 2.0, "a_layer": 0.25, "of_attention": 3.0}
    )
    costs = space.timed(found.tables).costs("latency", np.array([(0, 1, 2, 0, 1, 0)]))
    assert costs[0] == pytest.approx(0.5 + 2 * 0.25 + 2 * (4 + 1.5) + 3 * (2 + 2))
    assert len(set(made)) == len(made) >= 8


def test_no_coefficient_is_negative() -> None:
    generator = np.random.default_rng(0)
    features = generator.random((20, 3))
    seconds = features @ [1.0, -0.5, 2.0] + 0.5
    assert (fit_nonnegative(features, seconds) >= 0).all()
    assert fit_nonnegative(features, features @ [1.0, 0.0, 2.0]) == pytest.approx([1.0, 0.0, 2.0])


@pytest.mark.parametrize(
    ("choices", "changed", "said"),
    [
        ({"bits": (32, 8)}, {}, r"layers of a decoder have 8 bits or 4; write \[8, 4\]"),
        ({}, {"weights_bits": 8, "offsets": False}, "the quantize step of base stores 8"),
        ({}, {"keep": ["*.down_proj"]}, r"set steps\.N\.keep=\[\]"),
        ({"bits": (8,), "widths": (1.0,), "layers": False}, {}, "there is nothing to choose"),
        ({"widths": (1.0, 0.4)}, {"group": 96}, "an MLP of 64 channels cannot have groups of 96 inputs"),
        ({}, {"transform": {"hadamard_down": 32}}, "cannot cut what hadamard_down mixes"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    decoder: Path, tmp_path: Path, choices: dict[str, Any], changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(base(decoder, tmp_path / "out", **changed), tmp_path / "work", **choices)


def test_networks_with_convolutions_are_not_searched(make_tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(model_type="penjing", layer_types=("short_conv", "full_attention"), conv_taps=3)
    with pytest.raises(InputError, match="short convolutions, whose time a search does not know"):
        opened(base(folder, tmp_path / "out"), tmp_path / "work")


def test_one_window_is_too_little(decoder: Path, tmp_path: Path) -> None:
    values = base(decoder, tmp_path / "out")
    values["data"] = {"tokens": 64, "window": 64}
    with pytest.raises(InputError, match="two windows of calibration text or more"):
        opened(values, tmp_path / "work")


def test_layers_leave_decoders_alone(make_tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    values = base(make_tiny_checkpoint(num_hidden_layers=4), tmp_path / "out")
    values["steps"] = values["steps"][1:]
    with pytest.raises(ConfigError, match=r"space\.widths and space\.layers need a step of kind 'prune'"):
        opened(values, tmp_path / "work", widths=(1.0,))


def test_timings_of_another_way_to_time_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unfinished search went on with what it had timed before what is timed had been changed, beside new figures."""
    made = []

    class Made:
        now = staticmethod(clock_of(1))

        def parts(self, rounds: int, progress: Any) -> tuple[list[TimedLayer], dict[str, Any]]:
            made.append("parts")
            return [], {}

        def whole(self) -> object:
            return sum(range(1000))

        def network(self, choice: tuple[int, ...]) -> Callable[[], object]:
            made.append(choice)
            return self.whole

    clock: Any = Made()
    for way in (latency.TIMING, latency.TIMING, latency.TIMING + 1):
        monkeypatch.setattr(latency, "TIMING", way)
        latency.time_network(clock, (0, 1), Workload(rounds=3), Tasks(tmp_path))
        latency._parts(space_of(3), clock, Workload(rounds=3), Tasks(tmp_path), Silent())
    monkeypatch.setattr(latency, "processor", lambda: {"name": "another", "cores": 2})
    for _ in range(2):
        latency.time_network(clock, (0, 1), Workload(rounds=3), Tasks(tmp_path))
        latency._parts(space_of(3), clock, Workload(rounds=3), Tasks(tmp_path), Silent())
    assert made == [(0, 1), "parts"] * 3
