"""Shares by group: each group loses its own, patterns stand for several, and wrong names are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from penjing.compress.steps.prune import Prune
from penjing.core.config import parse_config
from penjing.core.errors import ConfigError
from tests.compress.prune.checkpoints import decoder, prune, resnet


def test_each_group_loses_its_own_share(tmp_path: Path) -> None:
    resnet(tmp_path / "dense")
    every = prune(tmp_path / "dense", tmp_path / "all", ratio=0.5, round_to=1)
    sizes = {row["name"].removesuffix(".weight[dim 0]"): row["before"] for row in every["groups"]}
    first, second, *others = sizes
    assert others
    record = prune(tmp_path / "dense", tmp_path / "own", ratios={first: 0.5, second: 0.25}, round_to=1)
    left = {row["name"].removesuffix(".weight[dim 0]"): row["after"] for row in record["groups"]}
    assert left == {first: sizes[first] // 2, second: sizes[second] - sizes[second] // 4}
    assert 0 < record["share_removed"] == record["share"] < 0.5
    # What leaves of a group is what a share for all takes of it.
    assert record["groups"][0]["removed"] == every["groups"][0]["removed"]


def test_the_first_pattern_that_fits_counts(tmp_path: Path) -> None:
    decoder(tmp_path / "dense")
    layer = "model.layers.1.mlp.gate_proj"
    record = prune(tmp_path / "dense", tmp_path / "own", ratios={layer: 0.5, "model.layers.*": 0.25}, round_to=1)
    assert [row["after"] for row in record["groups"]] == [36, 24, 36]


def test_what_is_no_group_or_share_is_refused(tmp_path: Path) -> None:
    resnet(tmp_path / "dense")
    with pytest.raises(ConfigError, match=r"'stem\.cnov' is no group that can lose units; there are .*blocks\.0"):
        prune(tmp_path / "dense", tmp_path / "no", ratios={"stem.cnov": 0.5})
    for wrong in ({"ratios": {}}, {"ratios": {"stem": 1.0}}, {"ratios": {"stem": 0.5}, "ratio": 0.5}):
        with pytest.raises(ConfigError, match=r"shares above 0 and below 1|give one of ratio"):
            parse_config(Prune, wrong, "recipe")


def test_a_milder_one_removes_less_of_every_group() -> None:
    step = Prune(ratios={"a": 0.4, "b": 0.04})
    assert step.milder(0.5, 0.05).ratios == {"a": 0.2, "b": 0.04}
    assert step.milder(0.5, 0.3).ratios == {"a": 0.3, "b": 0.04}
