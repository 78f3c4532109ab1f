"""The whole parity matrix: every mesh × accumulation × unequal token counts × recomputation, as one process.

Three updates each: SGD in float64 and in float32, then AdamW in float32; float64 for experts (`spread_variants`).
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.train.parallel.test_parity import SPREAD, check
from tests.train.parallel.worlds import run_world

MESHES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        **{f"{name} 2": {"parallel": {name: 2}} for name in ("dp", "tp", "pp", "cp")},
        "ep 2": {"parallel": {"ep": 2}, "model": SPREAD["ep 2"]["model"]},
        **{f"zero {level}": {"parallel": {"zero": level}} for level in (1, 2, 3)},
    },
    4: {
        f"{one} 2, {other} 2": {"parallel": {one: 2, other: 2}}
        for one, other in (("dp", "tp"), ("dp", "pp"), ("tp", "pp"))
    },
    8: {"dp 2, tp 2, pp 2": {"parallel": {"dp": 2, "tp": 2, "pp": 2}}},
}
UPDATES = {
    "SGD, float64": {"double": True},
    "SGD, float32": {},
    "AdamW, float32": {"optimizer": "adamw"},
    "AdamW, float64": {"optimizer": "adamw", "double": True},
}


def product(size: int) -> dict[str, dict[str, Any]]:
    """The cases of `size` processes by name."""
    cases = {}
    for (mesh, case), accumulation, ragged, recompute, (update, how) in itertools.product(
        MESHES[size].items(), (1, 3), (False, True), ("none", "full"), UPDATES.items()
    ):
        if update == ("AdamW, float32" if mesh == "ep 2" else "AdamW, float64"):
            continue
        counts = "unequal" if ragged else "equal"
        cases[f"{mesh}, {accumulation} accumulated, {counts}, recompute {recompute}, {update}"] = {
            "accumulation": accumulation, "ragged": ragged, "recompute": recompute, **how, **case,
        }  # fmt: skip
    return cases


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    return {
        size: run_world(tmp_path_factory.mktemp("product"), size, product(size), timeout_s=900.0) for size in MESHES
    }


@pytest.mark.full
@pytest.mark.parametrize(("size", "name"), [(size, name) for size in MESHES for name in product(size)])
def test_every_combination_is_as_one_process(results: dict[int, dict[str, Any]], size: int, name: str) -> None:
    check(dict(results[size][name]), product(size)[name])
