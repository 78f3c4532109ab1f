"""Every mesh gives the numbers of one process: losses, norms, gradients, weights after three updates, evaluation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.parallel.parity import by_default, faults, layered, variants
from tests.train.parallel.worlds import run_world

pytestmark = pytest.mark.xdist_group("parity")  # one world for all

CONVOLUTIONS = {"model_type": "penjing", "layer_types": ["short_conv", "full_attention"], "conv_taps": 3}
GATES = {"model_type": "penjing", "attention_gate": "channel"}
TWO: dict[str, dict[str, Any]] = {
    "cp 2": {"parallel": {"cp": 2}},
    "cp 2, zero 3, sliding": {
        "parallel": {"cp": 2, "zero": 3},
        "model": {"sliding_window": 3, "model_type": "penjing"},
    },
    "dp 2": {"parallel": {"dp": 2}},
    "dp 2, five micro-batches and one": {"parallel": {"dp": 2, "shares": "auto"}, "shares": [5, 1]},
    "pp 2": {"parallel": {"pp": 2}, "accumulation": 3},
    "pp 2, gpipe": {"parallel": {"pp": 2, "schedule": "gpipe"}, "accumulation": 1},
    "pp 2, resized": {"parallel": {"pp": 2, "balance": True}, "accumulation": 3},
    "pp 2, convolutions": {"parallel": {"pp": 2}, "accumulation": 3, "model": CONVOLUTIONS},
    "tp 2 with sequence, gates": {"parallel": {"tp": 2, "sequence": True}, "model": GATES},
    "tp 2, gates of heads": {"parallel": {"tp": 2}, "model": GATES | {"attention_gate": "head"}},
    "cp 2, gates": {"parallel": {"cp": 2}, "model": GATES},
    "zero 3, convolutions": {"parallel": {"zero": 3}, "model": CONVOLUTIONS},
    "zero 1": {"parallel": {"zero": 1}},
    "zero 2": {"parallel": {"zero": 2}},
    "zero 3": {"parallel": {"zero": 3}},
    "tp 2": {"parallel": {"tp": 2}},
    "tp 2 with sequence": {"parallel": {"tp": 2, "sequence": True}},
    "tp 2, smoothed": {"parallel": {"tp": 2}, "smoothing": 0.1, "model": {"tie_word_embeddings": False}},
}
TWO_FIRST = by_default(variants(TWO), ("cp 2, zero 3, sliding", "pp 2, resized", "zero 3", "tp 2 with sequence"))
TWO_MORE = {name: case for name, case in variants(TWO).items() if name not in TWO_FIRST}
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
    "zero 3 over 2 of 4": {"parallel": {"zero": 3, "shards": 2}},
    "zero 2 over 2 of 4": {"parallel": {"zero": 2, "shards": 2}},
    "zero 1 over 2 of 4": {"parallel": {"zero": 1, "shards": 2}},
    "zero 3, tp 2 with sequence": {"parallel": {"dp": 2, "zero": 3, "tp": 2, "sequence": True}},
    "dp 2, pp 2": {"parallel": {"dp": 2, "pp": 2}, "accumulation": 3},
    "zero 3, pp 2": {"parallel": {"dp": 2, "zero": 3, "pp": 2}, "accumulation": 3},
    "zero 2, pp 2, resized": {"parallel": {"dp": 2, "zero": 2, "pp": 2, "balance": True}, "accumulation": 1},
    "tp 2 with sequence, pp 2": {"parallel": {"tp": 2, "pp": 2, "sequence": True}, "accumulation": 3},
    "pp 4, two rounds": {"parallel": {"pp": 4, "schedule": "gpipe", "micro_batches": 3}, "accumulation": 6},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "pp 2, interleaved": {"parallel": {"pp": 2, "schedule": "interleaved"}, "accumulation": 4},
    "pp 2, interleaved, resized": {
        "parallel": {"pp": 2, "schedule": "interleaved", "balance": True}, "accumulation": 1,
    },
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
    "zero 3 over 2 of 4, tp 2": {"parallel": {"dp": 4, "zero": 3, "shards": 2, "tp": 2}},
    "zero 2 over 2 of 4, pp 2": {"parallel": {"dp": 4, "zero": 2, "shards": 2, "pp": 2}, "accumulation": 3},
    "zero 3 over 2 of 4, cp 2": {"parallel": {"dp": 4, "zero": 3, "shards": 2, "cp": 2}},
    "zero 3, tp 2 with sequence, pp 2": {
        "parallel": {"dp": 2, "zero": 3, "tp": 2, "pp": 2, "sequence": True}, "accumulation": 3,
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("two"), 2, layered(TWO_FIRST | MOVED))


@pytest.fixture(scope="session")
def two_more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("two-more"), 2, layered(TWO_MORE))


@pytest.fixture(scope="session")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("schedules"), 2, variants(SCHEDULES))


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("four"), 4, variants(FOUR))


@pytest.fixture(scope="session")
def eight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("eight"), 8, variants(EIGHT))


@pytest.mark.parametrize("name", TWO_FIRST)
def test_two_processes_are_as_one(two: dict[str, Any], name: str) -> None:
    assert not faults(two[name], TWO_FIRST[name])


@pytest.mark.full
@pytest.mark.parametrize("name", TWO_MORE)
def test_two_processes_in_float32_are_as_one(two_more: dict[str, Any], name: str) -> None:
    assert not faults(two_more[name], TWO_MORE[name])


@pytest.mark.parametrize("name", MOVED)
def test_another_mesh_goes_on_from_a_checkpoint(two: dict[str, Any], name: str) -> None:
    assert not faults(two[name], MOVED[name])


@pytest.mark.full
@pytest.mark.parametrize("name", variants(FOUR))
def test_four_processes_are_as_one(four: dict[str, Any], name: str) -> None:
    assert not faults(four[name], variants(FOUR)[name])


@pytest.mark.full
@pytest.mark.parametrize("name", variants(SCHEDULES))
def test_schedules_are_as_one(schedules: dict[str, Any], name: str) -> None:
    assert not faults(schedules[name], variants(SCHEDULES)[name])


@pytest.mark.full
@pytest.mark.parametrize("name", variants(EIGHT))
def test_eight_processes_are_as_one(eight: dict[str, Any], name: str) -> None:
    assert not faults(eight[name], variants(EIGHT)[name])
