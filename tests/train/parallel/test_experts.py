"""Mixtures of experts give the numbers of one process on every mesh, wherever their experts lie."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.parallel.parity import UNEVEN, by_default, faults, layered
from tests.train.parallel.worlds import run_world

pytestmark = pytest.mark.xdist_group("experts")  # one world for all

# Routing is in float32, and so few tokens leave experts idle in one process or the other.
_MOE = {"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
EXPERTS: dict[str, dict[str, Any]] = {
    "zero 3 with experts": {
        "parallel": {"zero": 3}, "accumulation": 6, "ragged": True,
        "model": {"moe": _MOE, "model_type": "mixtral", "qk_norm": False},
    },
    **{
        f"{mesh} 2 with idle experts": {
            "parallel": {mesh: 2}, "accumulation": 6, "ragged": True, "recompute": "selective",
            "balancing": {"auxiliary_loss": 0.1},
            "model": {"moe": _MOE, "model_type": "mixtral", "qk_norm": False},
        }
        for mesh in ("ep", "pp", "tp")
    },
}  # fmt: skip
FOUR_EXPERTS: dict[str, dict[str, Any]] = {
    f"ep 2, {mesh} 2 with idle experts": {
        **EXPERTS["ep 2 with idle experts"], "parallel": {"ep": 2, mesh: 2, "zero": 2},
    }
    for mesh in ("pp", "tp")
}  # fmt: skip


def spread_variants(meshes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """As `variants`, with AdamW in float64: some weights of experts have gradients so small that it makes rounding in
    float32 large."""
    cases: dict[str, dict[str, Any]] = {}
    for name, case in meshes.items():
        cases[f"{name}, exact"] = {"double": True, "accumulation": 3, "ragged": True, "optimizer": "adamw", **case}
        cases[f"{name}, float32"] = {**UNEVEN, "recompute": "full", **case}
    return cases


_SPREAD = {
    "moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 8,
        "scoring_func": "sigmoid", "router_bias": True, "mlp_only_layers": [0],
    },
    "model_type": "penjing",
}  # fmt: skip
SPREAD: dict[str, dict[str, Any]] = {
    "ep 2": {"parallel": {"ep": 2}, "model": _SPREAD, "balancing": {"bias_rate": 0.1}},
    "ep 2, zero 3": {"parallel": {"ep": 2, "zero": 3}, "model": _SPREAD},
    "pp 2 with experts": {"parallel": {"pp": 2}, "model": _SPREAD, "balancing": {"bias_rate": 0.1}},
}
SPREAD_FIRST = by_default(spread_variants(SPREAD), ("ep 2, zero 3",))
SPREAD_MORE = {name: case for name, case in spread_variants(SPREAD).items() if name not in SPREAD_FIRST}
# Stopped on one mesh after two steps, resumed on another.
MOVED: dict[str, dict[str, Any]] = {
    "ep 2 to zero 3": {"saved_by": {"ep": 2}, "parallel": {"zero": 3}, "model": _SPREAD, "optimizer": "adamw"},
    "zero 1 to ep 2": {"saved_by": {"zero": 1}, "parallel": {"ep": 2, "zero": 2}, "model": _SPREAD},
}
for _name, _case in MOVED.items():
    _case |= {"folder": _name.replace(" ", "-"), "ragged": True}
MORE_SPREAD: dict[str, dict[str, Any]] = {
    f"ep 2, zero {zero}{f', {recompute}' if recompute else ''}": {
        "parallel": {"ep": 2, "zero": zero}, "model": _SPREAD, "recompute": recompute,
    }
    for zero in (0, 1, 2, 3) for recompute in ("none", "selective")
}  # fmt: skip
FOUR_SPREAD: dict[str, dict[str, Any]] = {
    "ep 4": {"parallel": {"ep": 4}, "model": _SPREAD},
    "ep 4, zero 3": {"parallel": {"ep": 4, "zero": 3}, "model": _SPREAD},
    **{
        f"dp 4, ep 2, zero {zero}": {
            "parallel": {"dp": 4, "ep": 2, "zero": zero}, "model": _SPREAD,
            "balancing": {"bias_rate": 0.1},
        }
        for zero in (0, 1, 2, 3)
    },
    "dp 2, ep 2, cp 2": {"parallel": {"dp": 2, "ep": 2, "cp": 2}, "model": _SPREAD},
    "dp 2, ep 2, cp 2, zero 2": {"parallel": {"dp": 2, "ep": 2, "cp": 2, "zero": 2}, "model": _SPREAD},
    **{
        f"ep 2, {mesh}, zero {zero}": {
            "parallel": {"ep": 2, mesh[:2]: 2, "zero": zero, "sequence": "sequence" in mesh}, "model": _SPREAD,
            "balancing": {"bias_rate": 0.1},
        }
        for mesh in ("pp 2", "tp 2", "tp 2 with sequence") for zero in (0, 3)
    },
    "pp 2, tp 2 with experts": {"parallel": {"pp": 2, "tp": 2}, "model": _SPREAD, "balancing": {"bias_rate": 0.1}},
    "pp 2, interleaved, with experts": {
        "parallel": {"dp": 2, "pp": 2, "schedule": "interleaved"}, "model": _SPREAD, "accumulation": 2,
        "balancing": {"bias_rate": 0.1},
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("experts"), 2, layered(EXPERTS | SPREAD_FIRST | MOVED))


@pytest.fixture(scope="session")
def spread(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("spread"), 2, SPREAD_MORE | spread_variants(MORE_SPREAD))


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("four-experts"), 4, spread_variants(FOUR_SPREAD) | FOUR_EXPERTS)


@pytest.mark.parametrize("name", SPREAD_FIRST)
def test_experts_in_two_processes_are_as_in_one(two: dict[str, Any], name: str) -> None:
    assert not faults(two[name], SPREAD_FIRST[name])


@pytest.mark.parametrize("name", EXPERTS)
def test_idle_experts_do_not_matter(two: dict[str, Any], name: str) -> None:
    assert not faults(two[name], EXPERTS[name])


@pytest.mark.parametrize("name", MOVED)
def test_another_mesh_of_experts_goes_on_from_a_checkpoint(two: dict[str, Any], name: str) -> None:
    assert not faults(two[name], MOVED[name])


@pytest.mark.full
@pytest.mark.parametrize("name", SPREAD_MORE | spread_variants(MORE_SPREAD))
def test_experts_are_as_one_with_every_zero(spread: dict[str, Any], name: str) -> None:
    assert not faults(spread[name], (SPREAD_MORE | spread_variants(MORE_SPREAD))[name])


@pytest.mark.full
@pytest.mark.parametrize("name", spread_variants(FOUR_SPREAD))
def test_experts_in_four_processes_are_as_in_one(four: dict[str, Any], name: str) -> None:
    assert not faults(four[name], spread_variants(FOUR_SPREAD)[name])


@pytest.mark.full
@pytest.mark.parametrize("name", FOUR_EXPERTS)
def test_idle_experts_of_four_do_not_matter(four: dict[str, Any], name: str) -> None:
    assert not faults(four[name], FOUR_EXPERTS[name])
