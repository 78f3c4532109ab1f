"""Meshes that collect, send and compute in fewer bits, or compiled, give the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.parallel.parity import faults, layered
from tests.train.parallel.worlds import run_world

pytestmark = pytest.mark.xdist_group("formats")  # one world for all

# 8 bits are not exact: within a tenth of the largest gradient, far from the 1e-5 of the rest.
PACKED: dict[str, dict[str, Any]] = {
    "dp 2 in int8": {"parallel": {"dp": 2, "gradients": "int8"}, "limit": 2e-2},
    "zero 2 in int8": {"parallel": {"zero": 2, "gradients": "int8"}, "limit": 2e-2, "accumulation": 3},
    "cp 2 in int8": {
        "saved_by": {"cp": 2, "gradients": "int8"},
        "folder": "packed",
        "ragged": True,
        "parallel": {"cp": 2, "gradients": "int8"},
        "limit": 2e-2,
    },
    "dp 2 by PowerSGD, which begins later": {"parallel": {"dp": 2, "gradients": "powersgd"}},
}
FOUR_PACKED: dict[str, dict[str, Any]] = {
    f"{mesh}, zero {zero} in int8": {
        "parallel": {"dp": 2, mesh[:2]: 2, "zero": zero, "gradients": "int8"}, "accumulation": 3, "ragged": True,
        "limit": 2e-2 if zero else 4e-2,  # without shards, sums are rounded too
    }
    for mesh in ("tp 2", "pp 2") for zero in (0, 2)
}  # fmt: skip
# Means in 8 bits of one process's part of each matrix: its blocks are others than those of whole matrices.
_LARGER = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 256}
NARROW: dict[str, dict[str, Any]] = {
    "dp 2, AdamW in 8 bits": {"parallel": {"dp": 2}, "optimizer": "adamw8bit", "model": _LARGER},
    "zero 3 to dp 2, AdamW in 8 bits": {
        "saved_by": {"zero": 3}, "parallel": {"dp": 2}, "folder": "narrow", "optimizer": "adamw8bit",
        "model": _LARGER, "limit": 2e-3,
    },
}  # fmt: skip
# Rounded as autocast rounds them in one process, so float32's limit holds; parts of products in 16 bits differ.
KINDS = ("norm", "lm_head", "embed_tokens", "q_proj", "o_proj")
MIXED: dict[str, dict[str, Any]] = {
    f"zero {zero} in {mode}": {
        "parallel": {"zero": zero}, "precision": {"mode": mode}, "accumulation": 3, "recompute": recompute,
        "optimizer": "adamw",
    }
    for zero, mode, recompute in ((3, "bf16", "full"), (3, "hybrid", "none"))
} | {
    "zero 3, first in float32, then in bf16, one product wide": {
        "parallel": {"zero": 3}, "accumulation": 3,
        "precision": {
            "mode": "bf16", "schedule": [{"until": 0.5, "mode": "fp32"}],
            "policy": [{"match": "*.o_proj", "compute": "fp32"}],
        },
    },
    "tp 2 in bf16": {"parallel": {"tp": 2}, "precision": {"mode": "bf16"}, "accumulation": 1, "limit": 2e-2},
}  # fmt: skip
MORE_MIXED: dict[str, dict[str, Any]] = {
    f"zero {zero} in bf16": {
        "parallel": {"zero": zero}, "precision": {"mode": "bf16"}, "accumulation": 3, "optimizer": "adamw",
    }
    for zero in (1, 2)
}  # fmt: skip
_MOE = {"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
FOUR_MIXED: dict[str, dict[str, Any]] = {
    "zero 3 over 2 of 4 in bf16": {
        "parallel": {"zero": 3, "shards": 2}, "precision": {"mode": "bf16"}, "accumulation": 3,
    },
    "zero 3 over 2 of 4 to zero 2": {
        "saved_by": {"zero": 3, "shards": 2}, "parallel": {"zero": 2}, "folder": "shards", "accumulation": 3,
        "precision": {"mode": "bf16"},
    },
    "zero 3 to zero 1 over 2 of 4": {
        "saved_by": {"zero": 3}, "parallel": {"zero": 1, "shards": 2}, "folder": "whole", "accumulation": 3,
        "precision": {"mode": "bf16"},
    },
    "zero 3, tp 2 in bf16": {
        "parallel": {"dp": 2, "zero": 3, "tp": 2}, "precision": {"mode": "bf16"}, "accumulation": 3, "limit": 2e-2,
    },
    "zero 3, pp 2 in bf16": {
        "parallel": {"dp": 2, "zero": 3, "pp": 2}, "precision": {"mode": "bf16"}, "accumulation": 3,
    },
    "zero 2, ep 2 in bf16": {
        "model": {"moe": _MOE, "model_type": "mixtral", "qk_norm": False}, "parallel": {"dp": 4, "zero": 2, "ep": 2},
        "precision": {"mode": "bf16"}, "accumulation": 3, "limit": 2e-2,
    },
}  # fmt: skip
# Nothing is compiled in the one process.
COMPILED: dict[str, dict[str, Any]] = {
    "zero 3 in bf16, compiled": {"parallel": {"zero": 3}, "precision": {"mode": "bf16"}, "optimizer": "adamw"},
}
MORE_COMPILED: dict[str, dict[str, Any]] = {
    "tp 2 with sequence, compiled": {"parallel": {"tp": 2, "sequence": True}},
    "zero 2, recomputed, compiled": {"parallel": {"zero": 2}, "recompute": "full"},
    "zero 3, recomputed, compiled": {"parallel": {"zero": 3}, "recompute": "full"},
    "zero 3, compiled by inductor": {"parallel": {"zero": 3}, "compile": "inductor"},
    "tp 2, recomputed, compiled by inductor": {"parallel": {"tp": 2}, "recompute": "full", "compile": "inductor"},
    "pp 2, compiled": {"parallel": {"pp": 2}},
    "pp 2, interleaved, compiled": {
        "parallel": {"pp": 2, "schedule": "interleaved"},
        "accumulation": 4,
        "model": {"num_hidden_layers": 4},
    },
    "cp 2, compiled": {"parallel": {"cp": 2}},
}
for _case in (*COMPILED.values(), *MORE_COMPILED.values()):
    _case |= {"accumulation": 3, "compile": "aot_eager"} | _case


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("formats"), 2, layered(PACKED | NARROW | MIXED | COMPILED))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("compiled"), 2, MORE_COMPILED | layered(MORE_MIXED))


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("four-formats"), 4, FOUR_PACKED | FOUR_MIXED)


@pytest.mark.parametrize("name", PACKED)
def test_packed_gradients_are_near(two: dict[str, Any], name: str) -> None:
    assert two[name]["gradients"] > 1e-6 or "limit" not in PACKED[name]  # they were packed
    assert not faults(two[name], PACKED[name])


@pytest.mark.full
@pytest.mark.parametrize("name", FOUR_PACKED)
def test_packed_gradients_of_four_are_near(four: dict[str, Any], name: str) -> None:
    assert four[name]["gradients"] > 1e-6 or "limit" not in FOUR_PACKED[name]  # they were packed
    assert not faults(four[name], FOUR_PACKED[name])


@pytest.mark.parametrize("name", NARROW)
def test_two_processes_with_means_in_8_bits_are_as_one(two: dict[str, Any], name: str) -> None:
    assert not faults(two[name], NARROW[name])


def check_formats(result: dict[str, Any], name: str) -> None:
    read = {kind: {f for n, formats in result["read"].items() if kind in n for f in formats} for kind in KINDS}
    for kind in ("norm", "lm_head", "embed_tokens"):
        assert read[kind] == {"torch.float32"}
    assert "torch.bfloat16" in read["q_proj"]
    assert read["o_proj"] == ({"torch.float32"} if "wide" in name else read["q_proj"])
    assert ("torch.float32" in read["q_proj"]) == ("first in float32" in name)


@pytest.mark.parametrize("name", MIXED)
def test_parameters_are_collected_in_the_format_that_they_are_read_in(two: dict[str, Any], name: str) -> None:
    check_formats(two[name], name)
    assert not faults(two[name], MIXED[name])


@pytest.mark.full
@pytest.mark.parametrize("name", MORE_MIXED)
def test_parameters_that_are_not_split_are_read_in_16_bits_too(compiled: dict[str, Any], name: str) -> None:
    check_formats(compiled[name], name)
    assert not faults(compiled[name], MORE_MIXED[name])


@pytest.mark.full
@pytest.mark.parametrize("name", FOUR_MIXED)
def test_four_processes_collect_in_16_bits(four: dict[str, Any], name: str) -> None:
    assert any("torch.bfloat16" in formats for formats in four[name]["read"].values())
    assert not faults(four[name], FOUR_MIXED[name])


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks_are_as_one_process_that_compiles_nothing(two: dict[str, Any], name: str) -> None:
    assert two[name]["graphs"] == 2  # of all blocks, in training and in evaluation, and cut nowhere
    assert not faults(two[name], COMPILED[name])


@pytest.mark.full
@pytest.mark.parametrize("name", MORE_COMPILED)
def test_more_compiled_blocks_are_as_one_process(compiled: dict[str, Any], name: str) -> None:
    assert compiled[name]["graphs"] >= 2
    assert not faults(compiled[name], MORE_COMPILED[name])
