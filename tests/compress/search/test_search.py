"""A whole search on a small graph: what it measures is what its recipes make, and it goes on after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penjing.compress.families.base import family_at
from penjing.compress.recipe import load_recipe
from penjing.compress.run import run_recipe
from penjing.compress.search.recipe import Choices
from penjing.compress.search.search import run_joint_search
from penjing.compress.search.trial import Trials
from penjing.core.checkpoint.graph import load_network
from penjing.core.config import read_recipe
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Silent
from tests.compress.conftest import Notes
from tests.compress.graphs import graph_folder
from tests.compress.prune_graph.traits import image


class Two(nn.Module):
    """Two convolutions and a head, without norms: pruning needs no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3, 2), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).relu().mean((2, 3)))


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return graph_folder(tmp_path_factory.mktemp("search") / "dense", Two(), image(12))


def write(folder: Path, model: Path, **lines: str) -> Path:
    """A search recipe; `lines` replace or add to it."""
    (folder / "base.toml").write_text(
        f'model = "{model}"\noutput = "{folder / "out"}"\n[measure]\nrounds = 0\n[guard]\nsimilarity_loss = 1.0\n'
        '[[steps]]\nkind = "prune"\nratio = 0.5\nround_to = 2\n[[steps]]\nkind = "quantize"\nparity_bound = 1.0\n'
    )
    given = {
        "base": f'"{folder / "base.toml"}"',
        "output": f'"{folder / "search"}"',
        "combinations": "12",
        "points": "4",
    }
    values = "".join(f"{name} = {value}\n" for name, value in (given | lines).items())
    (folder / "search.toml").write_text(values)
    return folder / "search.toml"


SPACE = "{ widths = [1.0, 0.75, 0.5], bits = [32, 8] }"


def test_a_search_writes_recipes_that_make_what_it_measured(tmp_path: Path, network: Path) -> None:
    result = run_joint_search(write(tmp_path, network, space=SPACE))
    assert json.loads((tmp_path / "search/search.json").read_text()) == result
    page = (tmp_path / "search/report.html").read_text()
    assert "Uniform choices" in page
    assert page.count("front-0") == len(result["front"])
    assert [each["name"] for each in result["variables"]] == ["first", "second", "first", "second", "last"]
    shares = [result["rows"][entry["row"]]["share"] for entry in result["front"]]
    losses = [result["rows"][entry["row"]]["divergence"] for entry in result["front"]]
    assert shares == sorted(shares)
    assert losses == sorted(losses, reverse=True)
    assert all(share < 1 for share in shares)
    pruned = [
        entry
        for entry in result["front"]
        if load_recipe(tmp_path / "search" / entry["recipe"]).steps[0].kind == "prune"
    ]
    assert pruned
    values = read_recipe(tmp_path / "search" / pruned[0]["recipe"])
    values["steps"] = values["steps"][:1]  # without INT8 the cost is that of the pruned network
    run_recipe(values)
    record = json.loads(next((Path(values["output"]) / "steps").glob("*prune.json")).read_text())["result"]
    trials = opened(tmp_path / "base.toml")
    choice = list(result["rows"][pruned[0]["row"]]["choice"])
    choice[2:] = [0, 0, 0]
    assert record["macs"]["after"] == trials.space.costs("macs", np.array([choice]))[0]
    # What the search judged with zeros is what the pruned network answers.
    before, after = (load_network(folder) for folder in (network, Path(values["output"])))
    with torch.no_grad():
        (x,) = before.inputs()
        judged = x[len(x) // 2 :]  # the other half estimates ranges
        whole, left = before(judged)[0].double(), after(judged)[0].double()
    apart = ((left - whole).square().sum(1) / whole.square().sum(1)).mean()
    assert trials.divergence(choice) == pytest.approx(float(apart), rel=1e-4)


def opened(base: Path, **choices: Any) -> Trials:
    recipe = load_recipe(base)
    return Trials(recipe, Choices(**choices), family_at(recipe.model), Silent())


def test_a_killed_search_measures_nothing_twice(
    tmp_path: Path, network: Path, monkeypatch: pytest.MonkeyPatch, notes: Notes
) -> None:
    (tmp_path / "once").mkdir()
    space = "{ widths = [1.0, 0.75, 0.5], bits = [32] }"
    path, once = (write(each, network, space=space, combinations="8") for each in (tmp_path, tmp_path / "once"))
    measured, stop_at = [0], [5]
    divergence = Trials.divergence

    def counted(self: Trials, choice: Any) -> float:
        if measured[0] == stop_at[0]:
            raise KeyboardInterrupt
        measured[0] += 1
        return divergence(self, choice)

    monkeypatch.setattr(Trials, "divergence", counted)
    with pytest.raises(KeyboardInterrupt):
        run_joint_search(path)
    assert not (tmp_path / "search").exists()
    stop_at[0] = -1
    other = ['cost="bytes"']  # another cost, under which what was measured stays true
    result = run_joint_search(path, other)
    total = measured[0]
    assert total == len(result["rows"]) - 1
    measured[0] = 0
    again = run_joint_search(once, other)
    assert measured[0] == total
    assert [row["divergence"] for row in result["rows"]] == [row["divergence"] for row in again["rows"]]
    assert run_joint_search(path, other, progress=notes) == result  # already done
    assert measured[0] == total
    assert "already done" in notes.lines[0]


def test_a_search_of_another_model_is_refused(tmp_path: Path, network: Path) -> None:
    path = write(tmp_path, network, space="{ widths = [1.0, 0.5], bits = [32] }", combinations="8")
    run_joint_search(path)
    other = graph_folder(tmp_path / "other", Two(), image(12), seed=1)
    with pytest.raises(
        InputError,
        match="settings or files that they name, or by another version of penjing; replace it",
    ):
        run_joint_search(path, [f'settings={{model="{other}"}}'])
    (tmp_path / "search/search.json").write_text('{"key": ')
    with pytest.raises(InputError, match=r"search\.json"):
        run_joint_search(path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"mine exists and holds no search\.json, so it is not replaced"):
        run_joint_search(path, [f'output="{tmp_path / "mine"}"'])


def test_other_samples_under_the_same_name_are_searched_anew(
    tmp_path: Path, network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def samples(seed: int) -> None:
        images = np.random.default_rng(seed).standard_normal((20, 3, 12, 12))
        np.savez(tmp_path / "mine.npz", images=images.astype(np.float32))

    samples(0)
    path = write(tmp_path, network, space="{ widths = [1.0, 0.5], bits = [32] }", combinations="8")
    base = tmp_path / "base.toml"
    base.write_text(f'{base.read_text()}[data]\nsource = "{tmp_path / "mine.npz"}"\n')
    first = run_joint_search(path)
    assert run_joint_search(path) == first
    samples(1)
    with pytest.raises(InputError, match="files that they name"):
        run_joint_search(path)

    judge = Trials.divergence
    measured = list[int]()

    def dying(self: Trials, choice: Any) -> float:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(1)
        return judge(self, choice)

    monkeypatch.setattr(Trials, "divergence", dying)
    with pytest.raises(KeyboardInterrupt):
        run_joint_search(path, force=True)
    monkeypatch.undo()
    samples(2)  # what was measured before the kill is of other samples
    after = run_joint_search(path, force=True)
    fresh = run_joint_search(path, [f'output="{tmp_path / "fresh"}"'])
    assert [row["divergence"] for row in after["rows"]] == [row["divergence"] for row in fresh["rows"]]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ({"space": "{ widths = [0.75, 0.5] }"}, r"begin with 1\.0, the network as it is"),
        ({"space": "{ bits = [8] }"}, r"stay floating or have 8 bits; write \[32, 8\]"),
        ({"space": "{ widths = [1.0, 0.5, 0.75] }"}, "each below the one before"),
        ({"space": "{ widths = [1.0], bits = [32] }"}, "there is nothing to choose"),
        ({"space": SPACE, "budget": "0.02"}, r"budget=0\.02 is below the cheapest choice .* costs 0\.\d+ of the"),
        ({"space": SPACE, "budget": "0.3", "floor": "0.3"}, r"floor=0\.3 leaves nothing below budget=0\.3"),
        ({"space": SPACE, "floor": "0.9999"}, r"no change of the network costs between floor=0\.9999 and 1 of"),
        ({"space": "{ widths = [1.0, 0.95] }"}, "no group gets narrower .* with round_to=2"),
        ({"space": SPACE, "settings": "{ steps = [] }"}, "steps is empty"),
        ({"space": SPACE, "settings": '{ steps = [{ kind = "quantize" }] }'}, "needs a step of kind 'prune' in base"),
        (
            {"space": SPACE, "settings": '{ steps = [{ kind = "prune", ratio = 0.5 }] }'},
            "needs a step of kind 'quantize' in base",
        ),
        ({"space": SPACE, "wdiths": "[1.0]"}, "wdiths"),
        ({"base": '"decoder-tiny"', "space": SPACE}, "is a recipe of 'penjing train'"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, network: Path, lines: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_joint_search(write(tmp_path, network, **lines))
    assert not (tmp_path / "search").exists()


def test_a_space_of_two_is_searched_too(tmp_path: Path, network: Path) -> None:
    path = write(tmp_path, network, space="{ widths = [1.0], bits = [32, 8] }")
    result = run_joint_search(path, ['settings={"steps.1.keep" = ["first", "second"]}'])
    assert [each["name"] for each in result["variables"]] == ["last"]
    (entry,) = result["front"]
    assert [step.kind for step in load_recipe(tmp_path / "search" / entry["recipe"]).steps] == ["quantize"]


def test_a_budget_limits_the_front(tmp_path: Path, network: Path) -> None:
    space = "{ widths = [1.0, 0.75, 0.5], bits = [32] }"
    lines = {"space": space, "cost": '"bytes"', "budget": "0.6", "floor": "0.4"}
    result = run_joint_search(write(tmp_path, network, **lines))
    assert all(0.4 <= result["rows"][entry["row"]]["share"] <= 0.6 for entry in result["front"])
    assert min(row["share"] for row in result["rows"]) < 0.4  # that were measured all the same
