"""Every mesh gives the numbers of one process: losses, norms, gradients, weights after three updates, evaluation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.parallel.matrix import VOCAB
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
    "pp 2, resized": {"parallel": {"pp": 2, "balance": True}, "accumulation": 3},
    "zero 1": {"parallel": {"zero": 1}},
    "zero 2": {"parallel": {"zero": 2}},
    "zero 3": {"parallel": {"zero": 3}},
    "tp 2": {"parallel": {"tp": 2}},
    "tp 2 with sequence": {"parallel": {"tp": 2, "sequence": True}},
    "tp 2, smoothed": {"parallel": {"tp": 2}, "smoothing": 0.1, "model": {"tie_word_embeddings": False}},
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


# Rounded as autocast rounds them in one process, so float32's limit holds; parts of products in 16 bits differ.
KINDS = ("norm", "lm_head", "embed_tokens", "q_proj", "o_proj")
MIXED: dict[str, dict[str, Any]] = {
    f"zero {zero} in {mode}": {
        "parallel": {"zero": zero}, "precision": {"mode": mode}, "accumulation": 3, "recompute": recompute,
        "optimizer": "adamw",
    }
    for zero, mode, recompute in ((3, "bf16", "full"), (3, "hybrid", "none"), (2, "bf16", "none"), (1, "bf16", "none"))
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


# Nothing is compiled in the one process.
COMPILED: dict[str, dict[str, Any]] = {
    "zero 3 in bf16, compiled": {"parallel": {"zero": 3}, "precision": {"mode": "bf16"}, "optimizer": "adamw"},
    "zero 2, recomputed, compiled": {"parallel": {"zero": 2}, "recompute": "full"},
    "tp 2 with sequence, compiled": {"parallel": {"tp": 2, "sequence": True}},
}
MORE_COMPILED: dict[str, dict[str, Any]] = {
    "zero 3, partly recomputed, compiled": {"parallel": {"zero": 3}, "recompute": "selective"},
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
# Stopped on one mesh after two steps, resumed on another.
MOVED: dict[str, dict[str, Any]] = {
    "zero 3 to tp 2": {"saved_by": {"zero": 3}, "parallel": {"tp": 2}, "optimizer": "adamw"},
    "tp 2 to zero 1": {"saved_by": {"tp": 2, "sequence": True}, "parallel": {"zero": 1}},
    "pp 2 to zero 3": {"saved_by": {"pp": 2}, "parallel": {"zero": 3}, "accumulation": 3},
    "zero 3 to pp 2": {"saved_by": {"zero": 3}, "parallel": {"pp": 2}, "accumulation": 3, "optimizer": "adamw"},
}
MOVED |= {
    "ep 2 to zero 3": {"saved_by": {"ep": 2}, "parallel": {"zero": 3}, "model": _SPREAD, "optimizer": "adamw"},
    "zero 1 to ep 2": {"saved_by": {"zero": 1}, "parallel": {"ep": 2, "zero": 2}, "model": _SPREAD},
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
    cases = variants(TWO) | MOVED | PACKED | NARROW | EXPERTS | spread_variants(SPREAD) | MIXED | COMPILED
    for name, case in cases.items():  # in a pipeline stages of one and of two
        cases[name] = case | {"model": {"num_hidden_layers": 3 if "pp 2" in name else 2} | case.get("model", {})}
    return run_world(tmp_path_factory.mktemp("two"), 2, cases)


@pytest.fixture(scope="session")
def more_of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = variants(SCHEDULES) | spread_variants(MORE_SPREAD) | MORE_COMPILED
    return run_world(tmp_path_factory.mktemp("more"), 2, cases)


@pytest.fixture(scope="session")
def eight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(tmp_path_factory.mktemp("eight"), 8, variants(EIGHT))


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = variants(FOUR) | spread_variants(FOUR_SPREAD) | FOUR_PACKED | FOUR_EXPERTS | FOUR_MIXED
    return run_world(tmp_path_factory.mktemp("four"), 4, cases)


def check(result: dict[str, Any], case: dict[str, Any]) -> None:
    limit = case.get("limit", 1e-10 if case.get("double") else 1e-5)
    assert result.pop("initial") == 0  # in every bit
    assert result.pop("missing") == []
    assert result.pop("apart") == []  # who has the same parameter has the same bits of it
    assert len(result.pop("sizes")) == (2 if case["parallel"].get("balance") else 0)  # the last of 3 steps has another
    result.pop("read")
    result.pop("graphs")
    width = VOCAB // case["parallel"].get("tp", 1)
    assert result.pop("widths") in ([width], [])  # no process has all logits; rank 0 may have no head
    assert result.pop("scale") > 1e-3  # so that the limit means something
    assert result.pop("experts") <= 1e-5  # loads and balance loss are in float32
    assert all(difference <= limit for difference in result.values()), str(result)


def check_packed(result: dict[str, Any], case: dict[str, Any]) -> None:
    if "limit" in case:
        assert result["gradients"] > 1e-6  # they were packed
    check(result, case)


@pytest.mark.parametrize("name", variants(TWO))
def test_two_processes_are_as_one(two: dict[str, Any], name: str) -> None:
    check(dict(two[name]), variants(TWO)[name])


@pytest.mark.parametrize("name", NARROW)
def test_two_processes_with_means_in_8_bits_are_as_one(two: dict[str, Any], name: str) -> None:
    check(dict(two[name]), NARROW[name])


@pytest.mark.parametrize("name", MIXED)
def test_parameters_are_collected_in_the_format_that_they_are_read_in(two: dict[str, Any], name: str) -> None:
    result = dict(two[name])
    read = {kind: {f for n, formats in result["read"].items() if kind in n for f in formats} for kind in KINDS}
    for kind in ("norm", "lm_head", "embed_tokens"):
        assert read[kind] == {"torch.float32"}
    assert "torch.bfloat16" in read["q_proj"]
    assert read["o_proj"] == ({"torch.float32"} if "wide" in name else read["q_proj"])
    assert ("torch.float32" in read["q_proj"]) == ("first in float32" in name)
    check(result, MIXED[name])


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks_are_as_one_process_that_compiles_nothing(two: dict[str, Any], name: str) -> None:
    assert two[name]["graphs"] == 2  # of all blocks, in training and in evaluation, and cut nowhere
    check(dict(two[name]), COMPILED[name])


@pytest.mark.full
@pytest.mark.parametrize("name", MORE_COMPILED)
def test_more_compiled_blocks_are_as_one_process(more_of_two: dict[str, Any], name: str) -> None:
    assert more_of_two[name]["graphs"] >= 2
    check(dict(more_of_two[name]), MORE_COMPILED[name])


@pytest.mark.full
@pytest.mark.parametrize("name", FOUR_MIXED)
def test_four_processes_collect_in_16_bits(four: dict[str, Any], name: str) -> None:
    assert any("torch.bfloat16" in formats for formats in four[name]["read"].values())
    check(dict(four[name]), FOUR_MIXED[name])


@pytest.mark.parametrize("name", spread_variants(SPREAD))
def test_experts_in_two_processes_are_as_in_one(two: dict[str, Any], name: str) -> None:
    check(dict(two[name]), spread_variants(SPREAD)[name])


@pytest.mark.parametrize("name", EXPERTS)
def test_idle_experts_do_not_matter(two: dict[str, Any], name: str) -> None:
    check(dict(two[name]), EXPERTS[name])


@pytest.mark.parametrize("name", PACKED)
def test_packed_gradients_are_near(two: dict[str, Any], name: str) -> None:
    check_packed(dict(two[name]), PACKED[name])


@pytest.mark.full
@pytest.mark.parametrize("name", FOUR_PACKED)
def test_packed_gradients_of_four_are_near(four: dict[str, Any], name: str) -> None:
    check_packed(dict(four[name]), FOUR_PACKED[name])


@pytest.mark.parametrize("name", MOVED)
def test_another_mesh_goes_on_from_a_checkpoint(two: dict[str, Any], name: str) -> None:
    check(dict(two[name]), MOVED[name])


@pytest.mark.full
@pytest.mark.parametrize("name", spread_variants(MORE_SPREAD))
def test_experts_are_as_one_with_every_zero(more_of_two: dict[str, Any], name: str) -> None:
    check(dict(more_of_two[name]), spread_variants(MORE_SPREAD)[name])


@pytest.mark.full
@pytest.mark.parametrize("name", spread_variants(FOUR_SPREAD))
def test_experts_in_four_processes_are_as_in_one(four: dict[str, Any], name: str) -> None:
    check(dict(four[name]), spread_variants(FOUR_SPREAD)[name])


@pytest.mark.full
@pytest.mark.parametrize("name", FOUR_EXPERTS)
def test_idle_experts_of_four_do_not_matter(four: dict[str, Any], name: str) -> None:
    check(dict(four[name]), FOUR_EXPERTS[name])


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
