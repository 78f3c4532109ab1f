"""The whole parity matrix: every mesh × accumulation × unequal token counts × recomputation, as one process.

Three updates each: SGD in float64 and AdamW in float32, for experts the other way round (see `spread_variants` of
test_experts.py). A pipeline of two stages takes two micro-batches at once; what is accumulated are such passes.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.train.parallel.parity import faults
from tests.train.parallel.test_experts import SPREAD
from tests.train.parallel.worlds import run_world

MESHES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        **{f"{name} 2": {name: 2} for name in ("dp", "tp", "pp", "cp", "ep")},
        **{f"zero {level}": {"zero": level} for level in (1, 2, 3)},
    },
    4: {f"{one} 2, {other} 2": {one: 2, other: 2} for one, other in (("dp", "tp"), ("dp", "pp"), ("tp", "pp"))},
    8: {"dp 2, tp 2, pp 2": {"dp": 2, "tp": 2, "pp": 2}},
}
UPDATES = {"SGD, float64": {"double": True}, "AdamW, float32": {"optimizer": "adamw"}}
EXPERT_UPDATES = {"AdamW, float64": {"double": True, "optimizer": "adamw"}, "SGD, float32": {}}


def product(size: int) -> dict[str, dict[str, Any]]:
    """The cases of `size` processes by name."""
    cases = {}
    for (mesh, parallel), accumulation, ragged, recompute, update in itertools.product(
        MESHES[size].items(), (1, 3), (False, True), ("none", "full"), (0, 1)
    ):
        at_once = 2 if "pp" in parallel else 1
        how, details = list((EXPERT_UPDATES if "ep" in parallel else UPDATES).items())[update]
        counts = "unequal" if ragged else "equal"
        cases[f"{mesh}, {accumulation} accumulated, {counts}, recompute {recompute}, {how}"] = {
            **details, "parallel": parallel | ({"micro_batches": 2} if at_once == 2 else {}), "ragged": ragged,
            "accumulation": accumulation * at_once, "recompute": recompute,
            "model": {"num_hidden_layers": 2, **(SPREAD["ep 2"]["model"] if "ep" in parallel else {})},
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
    assert not faults(results[size][name], product(size)[name])
