"""Settings that a search draws."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError
from penjing.train.search.recipe import Range, SearchRecipe
from penjing.train.search.space import Drawer, Settings, starting_point, with_whole_ranges

SPACE: dict[str, Any] = {
    "learning_rate.peak": [1e-4, 1e-1],
    "data.batch_size": [2, 64],
    "clip.norm": {"low": -1.0, "high": 1.0, "scale": "linear"},
    "optimizer.name": {"values": ["adamw", "lion"]},
}
START: Settings = {"learning_rate.peak": 1e-2, "data.batch_size": 8, "clip.norm": 0.5, "optimizer.name": "adamw"}


def search(**changes: Any) -> SearchRecipe:
    given = {"base": "x", "output": "out", "space": SPACE, "trials": 24, "first": 1}
    return parse_config(SearchRecipe, given | changes, "search.toml")


def drawn(recipe: SearchRecipe, start: Settings = START) -> list[Settings]:
    """All trials, judged by how far the learning rate is from 3e-4."""
    drawer, results = Drawer(with_whole_ranges(recipe, start), start), []
    for _ in range(drawer.num_trials):
        settings = drawer.draw(results)
        results.append((settings, abs(math.log(float(settings["learning_rate.peak"]) / 3e-4))))
    return [settings for settings, _ in results]


@pytest.mark.parametrize("sampler", ["spread", "random", "tpe"])
def test_trials_begin_with_the_base_and_stay_in_the_space(sampler: str) -> None:
    found = drawn(search(sampler=sampler))
    assert found[0] == START
    assert len({tuple(each.values()) for each in found}) == len(found)
    for settings in found:
        assert 1e-4 <= float(settings["learning_rate.peak"]) <= 1e-1
        assert settings["data.batch_size"] in range(2, 65)
        assert -1 <= float(settings["clip.norm"]) <= 1
        assert settings["optimizer.name"] in ("adamw", "lion")
    assert drawn(search(sampler=sampler)) == found
    assert drawn(search(sampler=sampler, seed=1))[1:] != found[1:]


def test_a_spread_fills_every_decade_of_a_learning_rate() -> None:
    """Of 15 points of Sobol's sequence, each third of the range holds 4 to 6; chance would leave some nearly empty."""
    found = drawn(search(sampler="spread", trials=16))[1:]
    decades = [int(math.log10(float(each["learning_rate.peak"]) / 1e-4)) for each in found]
    assert all(4 <= decades.count(decade) <= 6 for decade in range(3))


@pytest.mark.parametrize("goal", ["lowest", "highest"])
def test_tpe_learns_where_the_good_ones_are(goal: str) -> None:
    recipe = search(sampler="tpe", trials=30, goal=goal, space={"learning_rate.peak": [1e-4, 1e-1]})
    drawer, start, results = Drawer(recipe, {"learning_rate.peak": 1e-2}), 0.0, []
    for _ in range(30):
        settings = drawer.draw(results)
        start = abs(math.log(float(settings["learning_rate.peak"]) / 3e-4))
        results.append((settings, start if goal == "lowest" else math.inf if start > 5 else -start))
    found = [value for _, value in results[15:]]
    assert sum(abs(value) < 1.0 for value in found) >= 7  # of 15; by chance 0.29 of them, so four


def test_a_grid_crosses_equal_distances() -> None:
    recipe = search(
        sampler="grid", trials=8, space={"a": [1e-3, 1e-1], "b": {"values": [True, False]}, "c": [1, 3]}
    )  # 2 × 2 points of the ranges with 2 choices are 8; 3 × 3 would be 18
    found = drawn_grid(recipe, {"a": 1e-3, "b": True, "c": 1})
    assert len(found) == 8
    assert {each["a"] for each in found} == {1e-3, 1e-1}
    assert {each["c"] for each in found} == {1, 3}
    one = drawn_grid(search(sampler="grid", trials=6, space={"a": [1e-3, 1e1]}), {"a": 0.5})
    assert [each["a"] for each in one] == [0.5, *(pytest.approx(10.0 ** (index * 0.8 - 3)) for index in range(5))]


def drawn_grid(recipe: SearchRecipe, start: Settings) -> list[Settings]:
    drawer = Drawer(with_whole_ranges(recipe, start), start)
    return [drawer.draw([(start, 0.0)] * number) for number in range(drawer.num_trials)]


@pytest.mark.parametrize(
    ("space", "says"),
    [
        ({"a": [1, 2, 3]}, r"a list is two numbers.*choices are \{ values = \[1, 2, 3\] \}"),
        ({"a": ["x", "y"]}, "a list is two numbers"),
        ({"a": [2.0, 1.0]}, r"^search.toml: space: a: high: must be above low = 2 \(got 1.0\) \(got [^;]*$"),
        ({"a": {"values": [1, 2], "low": 1}}, r"space: a: unknown key 'low'. Valid keys: values \(got [^;]*$"),
        ({"a": {"lowest": 1, "high": 2}}, "unknown key 'lowest'; did you mean 'low'"),
        ({"a": {"low": 0.0, "high": 1.0, "scale": "log"}}, 'set scale = "linear"'),
        ({"a": {"low": 0.5, "high": 4.0, "scale": "linear", "whole": True}}, "needs whole numbers"),
        ({"a": {"values": [1]}}, "at least 2 items"),
        ({}, "at least 1 item"),
    ],
)
def test_bad_spaces(space: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        search(space=space)


def test_ranges_as_they_are_written() -> None:
    space = search().space
    assert space["learning_rate.peak"] == Range(low=1e-4, high=1e-1, scale="log")
    assert space["data.batch_size"] == Range(low=2, high=64, scale="log")
    resolved = with_whole_ranges(search(), START).space
    assert {key: allowed.whole for key, allowed in resolved.items() if isinstance(allowed, Range)} == {
        "learning_rate.peak": False, "data.batch_size": True, "clip.norm": False,
    }  # fmt: skip


@pytest.mark.parametrize("sampler", ["spread", "random", "tpe", "grid"])
@pytest.mark.parametrize("first", [0.0, 0.1])
def test_whole_ends_of_a_real_setting_are_no_whole_numbers(sampler: str, first: float) -> None:
    start: Settings = {"learning_rate.peak": 1e-2, "optimizer.weight_decay": first}
    space = {"learning_rate.peak": [1e-4, 1e-1], "optimizer.weight_decay": [0, 1]}
    found = {settings["optimizer.weight_decay"] for settings in drawn(search(space=space, sampler=sampler), start)}
    assert len(found) > 3
    assert all(0 <= float(value) <= 1 for value in found)
    base = {"optimizer": {"weight_decay": 0.1}}
    whole = search(space={"optimizer.weight_decay": {"low": 0, "high": 1, "scale": "linear", "whole": True}})
    with pytest.raises(ConfigError, match=r"weight_decay = 0.1 of x is not in \[0, 1\] of whole numbers"):
        starting_point(whole, base)
    with pytest.raises(ConfigError, match=r"data.batch_size is a whole number, and \[1.5, 8\] has ends that are not"):
        with_whole_ranges(search(space={"data.batch_size": [1.5, 8]}), {"data.batch_size": 4})


def test_the_base_recipe_is_part_of_the_space() -> None:
    base = {
        "learning_rate": {"peak": 1e-2},
        "data": {"batch_size": 8},
        "clip": {"norm": 0.5},
        "optimizer": {"name": "adamw"},
    }
    assert starting_point(search(), base) == START
    with pytest.raises(
        ConfigError, match=r"learning_rate.peak = 1.0 of x is not in \[0.0001, 0.1\]; .* make the space wider"
    ):
        starting_point(search(), base | {"learning_rate": {"peak": 1.0}})
    with pytest.raises(ConfigError, match=r"optimizer.name = sgd of x is not in \{adamw, lion\}"):
        starting_point(search(), base | {"optimizer": {"name": "sgd"}})
    with pytest.raises(ConfigError, match=r"x has no value of clip\.norm"):
        starting_point(search(), base | {"clip": {"norm": None}})
