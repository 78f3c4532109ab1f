"""Every mesh gives the numbers of one process: losses, norms, gradients, weights after three updates, evaluation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.parallel.worlds import run_world

UNEVEN = {"accumulation": 3, "ragged": True, "clip": 0.5}
TWO: dict[str, dict[str, Any]] = {
    "zero 1": {"parallel": {"zero": 1}},
    "zero 2": {"parallel": {"zero": 2}},
    "zero 3": {"parallel": {"zero": 3}},
    "tp 2": {"parallel": {"tp": 2}},
    "tp 2 with sequence": {"parallel": {"tp": 2, "sequence": True}},
}


def variants(meshes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each mesh in float64 as it is and in float32 with accumulation, unequal token counts, clipping, recomputation."""
    cases: dict[str, dict[str, Any]] = {}
    for name, case in meshes.items():
        cases[f"{name}, exact"] = {"double": True, "accumulation": 3, "ragged": True, **case}
        cases[f"{name}, float32"] = {**UNEVEN, "recompute": "full", "optimizer": "adamw", **case}
        cases[f"{name}, one micro-batch"] = {"double": True, "model": {"tie_word_embeddings": False}, **case}
    return cases


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("two"), 2, variants(TWO))


def check(result: dict[str, Any], case: dict[str, Any]) -> None:
    limit = 1e-10 if case.get("double") else 1e-5
    assert result.pop("missing") == []
    assert result.pop("scale") > 1e-3  # so that the limit means something
    assert all(difference <= limit for difference in result.values()), str(result)


@pytest.mark.parametrize("name", variants(TWO))
def test_two_processes_are_as_one(two: dict[str, Any], name: str) -> None:
    check(dict(two[name]), variants(TWO)[name])
