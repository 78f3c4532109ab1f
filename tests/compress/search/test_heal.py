"""Healed points: what is judged is what the recipe makes, a kill loses nothing, and what healing forgives is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch

from penjing.compress.families.base import family_at
from penjing.compress.preflight import input_hashes
from penjing.compress.recipe import load_recipe
from penjing.compress.run import run_recipe
from penjing.compress.search.decoder import DecoderTrials
from penjing.compress.search.families import open_trials
from penjing.compress.search.heal import Healer, Recovery, fit_recovery, left_out
from penjing.compress.search.predict import Prediction
from penjing.compress.search.recipe import Choices, Heal
from penjing.compress.search.search import run_joint_search
from penjing.compress.search.trial import Trials
from penjing.compress.steps.base import Context
from penjing.compress.steps.train import Distill
from penjing.core.config import dump_toml
from penjing.core.errors import ConfigError
from penjing.core.progress import Silent
from penjing.core.work import Tasks
from tests.compress.conftest import Notes
from tests.compress.distill.test_graph import FAST, PIXELS
from tests.compress.graphs import graph_folder
from tests.compress.search.test_decoder import apart
from tests.compress.search.test_decoder import base as decoder_base
from tests.core.graph.networks import Residual
from tests.train.sources.photos import folder_of

GENERATOR = np.random.default_rng(3)


def prediction(kinds: list[str], power: float = 0.5) -> Prediction:
    singles = tuple(np.array([0.0, *sorted(GENERATOR.random(2))]) for _ in kinds)
    pairs = {
        (0, 1): 0.2 * np.outer(singles[0], singles[1]),
        (1, len(kinds) - 1): 0.1 * np.outer(singles[1], singles[-1]),
    }
    return Prediction(singles, pairs, power, 0.1, 1.0, 1.0)


def test_what_healing_forgives_is_found() -> None:
    kinds = ["width", "width", "width", "bits", "bits"]
    before = prediction(kinds)
    choices = GENERATOR.integers(0, 3, (12, 5))
    choices[:, 0] = 1 + choices[:, 0] % 2
    truth = Recovery(tuple(kinds), {"width": 0.2, "bits": 0.9}).applied(before)
    found = fit_recovery(before, kinds, choices, truth.of(choices))
    assert found.factors["width"] == pytest.approx(0.2, rel=0.2)
    assert found.factors["bits"] == pytest.approx(0.9, rel=0.25)  # pulled to a common one
    even = before.scaled([0.3] * 5)
    assert fit_recovery(before, kinds, choices, even.of(choices)).factors == pytest.approx({"width": 0.3, "bits": 0.3})
    assert left_out(before, kinds, choices, even.of(choices)) == pytest.approx(even.of(choices))
    assert np.isnan(left_out(before, kinds, choices[:1], np.array([0.1]))).all()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Values of a recipe that prunes, distils and quantizes a small graph with classes."""
    folder = tmp_path_factory.mktemp("heal")
    model = Residual()
    model.last = torch.nn.Linear(16, 2)
    network = graph_folder(folder / "net", model, torch.randn(4, 3, 16, 16), meaning="classes", pixels=PIXELS)
    photos = folder_of(folder / "photos", {"cat": 12, "dog": 12})
    return {
        "model": str(network),
        "output": str(folder / "out"),
        "data": {"images": str(photos), "held_out": 0.3},
        "evaluate": {"resamples": 100},
        "guard": {"accuracy_points": 100},
        "measure": {"rounds": 0},
        "steps": [
            {"kind": "prune", "ratio": 0.5, "round_to": 4},
            FAST | {"kind": "distill", "steps": 50},
            {"kind": "quantize", "parity_bound": 10.0},
        ],
    }


def written(folder: Path, values: dict[str, Any], **changes: Any) -> Path:
    (folder / "base.toml").write_text(dump_toml(values))
    search = {"base": str(folder / "base.toml"), "output": str(folder / "search"), "combinations": 8, "points": 3}
    search |= {"space": {"widths": [1.0, 0.5]}, "heal": {"points": 2, "second": 1, "steps": 3, "uniform": True}}
    (folder / "search.toml").write_text(dump_toml(search | changes))
    return folder / "search.toml"


def test_a_search_heals_and_goes_round_again(
    tmp_path: Path, classifier: dict[str, Any], notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, healed, stop = written(tmp_path, classifier), Trials.healed, [2]

    def counted(self: Trials, *given: Any) -> float:
        stop[0] -= 1
        if not stop[0]:
            raise KeyboardInterrupt
        return healed(self, *given)

    monkeypatch.setattr(Trials, "healed", counted)
    with pytest.raises(KeyboardInterrupt):
        run_joint_search(path)
    result = run_joint_search(path, progress=notes)
    assert any("1 are kept from before" in line for line in notes.lines)
    rows = result["rows"]
    done = [row for row in rows if "healed" in row]
    assert [row["round"] for row in done].count(2) == result["healing"]["second"] > 0
    assert result["healing"]["first"] + result["healing"]["second"] == len(done)
    assert result["healing"]["steps"] == [3]
    assert set(result["healing"]["left"]) == {"width", "bits"}
    uniform = [rows[each["row"]] for each in result["baselines"]]
    assert len(uniform) == 3
    assert [row["healed"] == row["divergence"] for row in uniform].count(True) == 1  # INT8 alone is not trained
    front = [rows[entry["row"]] for entry in result["front"]]
    assert all("healed" in row for row in front)
    assert [row["healed"] for row in front] == sorted((row["healed"] for row in front), reverse=True)
    assert not any(other["cost"] <= row["cost"] and other["healed"] < row["healed"] for row in front for other in done)
    for entry in result["baselines"]:
        assert rows[entry["healed"]]["healed"] <= rows[entry["row"]]["healed"]
    page = (tmp_path / "search/report.html").read_text()
    assert "Healed points" in page
    assert page.count("<td>2</td>") == result["healing"]["second"]
    assert page.count("<td>1, uniform</td>") == 3
    first = load_recipe(tmp_path / "search" / result["front"][0]["recipe"])
    assert "after the search's" in (tmp_path / "search" / result["front"][0]["recipe"]).read_text()
    assert [step.steps for step in first.steps if isinstance(step, Distill)] in (
        [],
        [50],
    )  # the base's, not the search's
    assert not list(tmp_path.glob(".search.work"))
    few = ["heal={points=1,second=0,steps=3}", f'output="{tmp_path / "few"}"']  # nothing beside the front
    rows = [row for row in run_joint_search(path, few)["rows"] if "healed" in row]
    assert sum(row["healed"] != row["divergence"] for row in rows) == 1  # others have nothing to train


def test_a_healed_decoder_is_judged_as_the_recipe_makes_it(
    make_tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in sorted(topics)[:20]:
        (texts / f"{name}.txt").write_text(topics[name], encoding="utf-8")
    model = make_tiny_checkpoint(num_hidden_layers=3)
    values = decoder_base(model, tmp_path / "out")
    distill = {
        "kind": "distill", "sources": [str(texts)], "sequence_length": 16, "held_out": 0.2, "batch_size": 4,
        "steps": 99, "learning_rate": {"peak": 5e-3}, "evaluation_samples": 0,
    }  # fmt: skip
    values["steps"].insert(1, distill)
    recipe, family = load_recipe(values), family_at(model)
    trials = open_trials(recipe, Choices(widths=(1.0, 0.5), bits=(8, 4), layers=True), family, Silent())
    assert isinstance(trials, DecoderTrials)
    work = Tasks(tmp_path / "work")
    work.path.mkdir()
    trials.prepare(work, Silent())
    context = Context(model, family, recipe.data, Silent())
    healer = Healer(Heal(steps=5), trials, values, context, input_hashes(recipe, context))
    kinds = [each.kind for each in trials.space.variables]
    assert kinds == ["layer"] * 3 + ["bits"] * 3
    choice = [1, 2, 0, 0, 1, 1]  # a narrower layer in 8 bits, one gone, one whole in 4 bits
    found = healer.divergence(choice, work)
    assert healer.divergence(choice, work) == found  # kept
    assert not (work.path / healer.name(choice)).exists()
    assert not healer.changes([0, 0, 0, 1, 1, 1])
    values["steps"][1]["steps"] = 5
    values["steps"] = trials.point(values, choice)
    values["steps"][-1] |= {"weights_bits": 4}
    run_recipe(values)
    assert found == pytest.approx(apart(model, Path(values["output"]), trials.judged_WT), rel=0.1)
    assert found < 0.95 * trials.divergence(choice)


def test_nothing_heals_without_a_step_that_trains(tmp_path: Path, classifier: dict[str, Any]) -> None:
    values = classifier | {"steps": [classifier["steps"][0], classifier["steps"][2]]}
    with pytest.raises(ConfigError, match="none of kind 'distill' or 'finetune'; add one, or leave"):
        run_joint_search(written(tmp_path, values))
    with pytest.raises(ConfigError, match=r"heal\.points"):
        run_joint_search(written(tmp_path, classifier, heal={"points": 0}))
