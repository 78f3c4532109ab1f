"""Every mesh gives the numbers of one process: losses, norms, gradients, weights after three updates, evaluation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.parallel.worlds import run_world

UNEVEN = {"accumulation": 3, "ragged": True, "clip": 0.5}
TWO: dict[str, dict[str, Any]] = {
    "cp 2": {"parallel": {"cp": 2}},
    "cp 2, zero 3, sliding": {
        "parallel": {"cp": 2, "zero": 3},
        "model": {"sliding_window": 3, "model_type": "penjing"},
    },
    "dp 2": {"parallel": {"dp": 2}},
    "pp 2": {"parallel": {"pp": 2}, "accumulation": 3},
    "pp 2, gpipe": {"parallel": {"pp": 2, "schedule": "gpipe"}, "accumulation": 1},
    "zero 1": {"parallel": {"zero": 1}},
    "zero 2": {"parallel": {"zero": 2}},
    "zero 3": {"parallel": {"zero": 3}},
    "tp 2": {"parallel": {"tp": 2}},
    "tp 2 with sequence": {"parallel": {"tp": 2, "sequence": True}},
}


def variants(meshes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each mesh in float64 and, with clipping, recomputation and AdamW, in float32; both of unequal token counts."""
    cases: dict[str, dict[str, Any]] = {}
    for name, case in meshes.items():
        cases[f"{name}, exact"] = {"double": True, "accumulation": 3, "ragged": True, **case}
        cases[f"{name}, float32"] = {**UNEVEN, "recompute": "full", "optimizer": "adamw", **case}
    return cases


# 8 bits are not exact: within a tenth of the largest gradient, far from the 1e-5 of the rest.
PACKED: dict[str, dict[str, Any]] = {
    "dp 2 in int8": {"parallel": {"dp": 2, "gradients": "int8"}, "limit": 2e-2},
    "zero 2 in int8": {"parallel": {"zero": 2, "gradients": "int8"}, "limit": 2e-2, "accumulation": 3},
    "dp 2 by PowerSGD, which begins later": {"parallel": {"dp": 2, "gradients": "powersgd"}},
}
# Routing is in float32, and so few tokens leave experts idle in one process or the other.
_MOE = {"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
EXPERTS: dict[str, dict[str, Any]] = {
    "zero 3 with experts": {
        "parallel": {"zero": 3}, "accumulation": 6, "ragged": True,
        "model": {"moe": _MOE, "model_type": "mixtral", "qk_norm": False},
    },
}  # fmt: skip
# Stopped on one mesh after two steps, resumed on another.
MOVED: dict[str, dict[str, Any]] = {
    "zero 3 to tp 2": {"saved_by": {"zero": 3}, "parallel": {"tp": 2}, "optimizer": "adamw"},
    "tp 2 to zero 1": {"saved_by": {"tp": 2, "sequence": True}, "parallel": {"zero": 1}},
    "pp 2 to zero 3": {"saved_by": {"pp": 2}, "parallel": {"zero": 3}, "accumulation": 3},
    "zero 3 to pp 2": {"saved_by": {"zero": 3}, "parallel": {"pp": 2}, "accumulation": 3, "optimizer": "adamw"},
}
for _name, _case in MOVED.items():
    _case |= {"folder": _name.replace(" ", "-"), "ragged": True}
FOUR: dict[str, dict[str, Any]] = {
    "zero 2, untied, one micro-batch": {
        "parallel": {"dp": 2, "zero": 2, "tp": 2},
        "accumulation": 1,
        "model": {"tie_word_embeddings": False},
    },
    "cp 2, tp 2 with sequence": {"parallel": {"cp": 2, "tp": 2, "sequence": True}},
    "cp 2, pp 2": {"parallel": {"cp": 2, "pp": 2}, "accumulation": 3},
    "dp 2, cp 2, zero 2": {"parallel": {"dp": 2, "cp": 2, "zero": 2}},
    "dp 2, tp 2": {"parallel": {"dp": 2, "tp": 2}},
    "zero 3, tp 2 with sequence": {"parallel": {"dp": 2, "zero": 3, "tp": 2, "sequence": True}},
    "dp 2, pp 2": {"parallel": {"dp": 2, "pp": 2}, "accumulation": 3},
    "zero 3, pp 2": {"parallel": {"dp": 2, "zero": 3, "pp": 2}, "accumulation": 3},
    "tp 2 with sequence, pp 2": {"parallel": {"tp": 2, "pp": 2, "sequence": True}, "accumulation": 3},
    "pp 4, two rounds": {"parallel": {"pp": 4, "schedule": "gpipe", "micro_batches": 3}, "accumulation": 6},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "pp 2, interleaved": {"parallel": {"pp": 2, "schedule": "interleaved"}, "accumulation": 4},
    # Recomputation is not for schedules that split the backward pass.
    **{
        f"pp 2, {schedule}": {
            "parallel": {"pp": 2, "schedule": schedule}, "accumulation": 6, "recompute": "none",
            "model": {"tie_word_embeddings": False},
        }
        for schedule in ("zbv", "dualpipev")
    },
}  # fmt: skip
EIGHT: dict[str, dict[str, Any]] = {
    "dp 2, tp 2, pp 2": {"parallel": {"dp": 2, "tp": 2, "pp": 2}, "accumulation": 3},
    "2 × 2 × 2 to 4 × 1 × 2": {
        "saved_by": {"dp": 2, "tp": 2, "pp": 2}, "parallel": {"dp": 4, "zero": 3, "tp": 2}, "accumulation": 3,
        "folder": "eight",
    },
    "zero 3, tp 2 with sequence, pp 2": {
        "parallel": {"dp": 2, "zero": 3, "tp": 2, "pp": 2, "sequence": True}, "accumulation": 3,
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("two"), 2, variants(TWO) | MOVED | PACKED | EXPERTS)


@pytest.fixture(scope="session")
def more_of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("more"), 2, variants(SCHEDULES))


@pytest.fixture(scope="session")
def eight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("eight"), 8, variants(EIGHT))


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("four"), 4, variants(FOUR))


def check(result: dict[str, Any], case: dict[str, Any]) -> None:
    limit = case.get("limit", 1e-10 if case.get("double") else 1e-5)
    assert result.pop("missing") == []
    assert result.pop("scale") > 1e-3  # so that the limit means something
    assert all(difference <= limit for difference in result.values()), str(result)


@pytest.mark.parametrize("name", variants(TWO))
def test_two_processes_are_as_one(two: dict[str, Any], name: str) -> None:
    check(dict(two[name]), variants(TWO)[name])


@pytest.mark.parametrize("name", EXPERTS)
def test_idle_experts_do_not_matter(two: dict[str, Any], name: str) -> None:
    check(dict(two[name]), EXPERTS[name])


@pytest.mark.parametrize("name", PACKED)
def test_packed_gradients_are_near(two: dict[str, Any], name: str) -> None:
    result = dict(two[name])
    if "limit" in PACKED[name]:
        assert result["gradients"] > 1e-6  # they were packed
    check(result, PACKED[name])


@pytest.mark.parametrize("name", MOVED)
def test_another_mesh_goes_on_from_a_checkpoint(two: dict[str, Any], name: str) -> None:
    check(dict(two[name]), MOVED[name])


@pytest.mark.full
@pytest.mark.parametrize("name", variants(FOUR))
def test_four_processes_are_as_one(four: dict[str, Any], name: str) -> None:
    check(dict(four[name]), variants(FOUR)[name])


@pytest.mark.full
@pytest.mark.parametrize("name", variants(SCHEDULES))
def test_schedules_are_as_one(more_of_two: dict[str, Any], name: str) -> None:
    check(dict(more_of_two[name]), variants(SCHEDULES)[name])


@pytest.mark.full
@pytest.mark.parametrize("name", variants(EIGHT))
def test_eight_processes_are_as_one(eight: dict[str, Any], name: str) -> None:
    check(dict(eight[name]), variants(EIGHT)[name])
