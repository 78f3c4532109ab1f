"""Impossible meshes are one line that names the setting."""

from __future__ import annotations

from typing import Any

import pytest

from penjing.core.errors import ConfigError
from penjing.train.parallel.config import ParallelConfig, check_parallel
from tests.conftest import tiny_config

TOKENS = {"model_type": "penjing", "token_inputs": 8, "shared_keys": 1, "layer_scales": True}
CONV = {"model_type": "penjing", "layer_types": ("short_conv", "full_attention"), "conv_taps": 3}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("parallel", "model", "world", "message"),
    [
        ({"dp": 2, "tp": 2, "pp": 2}, {}, 9, r"parallel\.dp=2 × pp=2 × cp=1 × tp=2 needs 8 processes, this run has 9"),
        ({"tp": 2}, {}, 3, "needs a multiple of 2 processes, this run has 3"),
        ({"tp": 3}, {}, 3, r"parallel\.tp=3 does not divide model\.num_attention_heads=4; take one of 1, 2, 4"),
        ({"tp": 4}, {}, 4, r"parallel\.tp=4 does not divide model\.num_key_value_heads=2"),
        ({"tp": 2}, {"vocab_size": 321}, 2, r"parallel\.tp=2 does not divide model\.vocab_size=321"),
        ({"tp": 2, "sequence": True}, {}, 2, r"parallel\.tp=2 does not divide data\.sequence_length"),
        ({"cp": 2}, {}, 2, r"sequence_length=25 is cut into 2 × parallel\.cp = 4 pieces, .*; take 24 or 28"),
        ({"sequence": True}, {}, 2, r"set parallel\.tp above 1"),
        ({"pp": 3}, {}, 3, r"parallel\.pp=3 \(3 stages with schedule '1f1b'\) is more than .*=2; take pp = 2 or less"),
        ({"pp": 2, "schedule": "interleaved"}, {}, 2, r"parallel\.pp=2 \(4 stages .* take pp = 1 or less"),
        ({"pp": 2, "schedule": "zbv"}, {"num_hidden_layers": 4}, 2, "tie_word_embeddings = true does not allow"),
        ({"pp": 2, "stage_layers": (2, 1)}, {}, 2, r"parallel\.stage_layers=\[2, 1\]: 2 numbers of 1 or more"),
        ({"balance": True}, {}, 2, r"parallel\.balance .* set parallel\.pp above 1"),
        ({"stage_layers": "cost"}, {}, 2, r"parallel\.stage_layers are for pipelines"),
        ({"ep": 2}, {}, 2, r"parallel\.ep=2 spreads experts, and the model has none"),
        ({"ep": 4}, {"moe": MOE, "model_type": "mixtral"}, 4, r"parallel\.ep=4 does not divide .*num_experts=6"),
        ({"ep": 2}, {"moe": MOE, "model_type": "mixtral"}, 3, r"parallel\.ep=2 does not divide parallel\.dp=3"),
        ({"ep": 2, "gradients": "int8", "zero": 1}, {"moe": MOE, "model_type": "mixtral"}, 2, "gradients = 'float32'"),
        ({"tp": 2}, {"moe": MOE | {"moe_intermediate_size": 15}, "model_type": "mixtral"}, 2, "intermediate_size=15"),
        ({"pp": 2, "balance": True}, {"moe": MOE, "model_type": "mixtral"}, 2, r"balance = true .* load of experts"),
        (
            {"pp": 2, "schedule": "zbv"}, {"moe": MOE, "model_type": "penjing", "num_hidden_layers": 4,
            "tie_word_embeddings": False}, 2, "splits the backward pass, which experts do not",
        ),
        ({"tp": 2}, CONV, 2, r"parallel\.tp=2: it does not split a model with conv_taps=3; use zero = 3"),
        ({"tp": 2}, TOKENS, 2, "does not split a model with layer_scales=True, token_inputs=8, shared_keys=1"),
        ({"pp": 2}, TOKENS, 2, r"parallel\.pp=2: stages do not know model\.token_inputs; use zero = 3"),
        ({"cp": 2}, CONV, 2, r"parallel\.cp=2: it does not know model\.conv_taps; leave cp = 1"),
        ({"zero": 3}, {"shared_layers": 2}, 2, "layers that share weights"),
        ({"shards": 2}, {}, 4, r"parallel\.shards is how many processes ZeRO spreads over"),
        ({"zero": 3, "shards": 3}, {}, 4, r"parallel\.shards=3 does not divide parallel\.dp=4"),
        ({"zero": 3, "shards": 2, "gradients": "int8"}, {}, 4, "not between their copies; leave parallel.shards out"),
        ({"shares": "auto", "zero": 2}, {}, 2, r"parallel\.shares = 'auto' is for data .* with parallel\.zero = 2"),
        ({"shares": "auto", "pp": 2}, {}, 4, r"with parallel\.pp = 2 processes exchange"),
        ({"shares": "auto"}, {"moe": MOE, "model_type": "mixtral"}, 2, "the load of experts .* set it to 'equal'"),
        ({"zero": 3, "shards": 2, "ep": 2}, {"moe": MOE, "model_type": "mixtral"}, 4, "leave parallel.shards out"),
    ],
)  # fmt: skip
def test_an_impossible_mesh_is_refused(
    parallel: dict[str, Any], model: dict[str, Any], world: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_parallel(ParallelConfig(**parallel), tiny_config(**model), world, 25, compiled=False)


def test_what_is_no_decoder_is_spread_by_data_alone() -> None:
    check_parallel(ParallelConfig(zero=3), None, 2, None, compiled=False)
    with pytest.raises(ConfigError, match="for decoders"):
        check_parallel(ParallelConfig(tp=2), None, 2, None, compiled=False)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            {"pp": 2, "schedule": "zbv"},
            "parallel.schedule = 'zbv' splits the backward pass, which compiled blocks do not",
        ),
        ({"pp": 2, "balance": True}, "parallel.balance = true resizes micro-batches, and each size would be compiled"),
    ],
)
def test_what_compiled_blocks_cannot_do_is_refused(parallel: dict[str, Any], message: str) -> None:
    model = tiny_config(num_hidden_layers=4, tie_word_embeddings=False)
    check_parallel(ParallelConfig(zero=3), model, 2, 25, compiled=True)
    with pytest.raises(ConfigError, match=message):
        check_parallel(ParallelConfig(**parallel), model, 2, 25, compiled=True)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv", "dualpipev"])
def test_every_stage_has_one_owner(schedule: Any) -> None:
    config = ParallelConfig(pp=4, schedule=schedule)
    owned = sorted(stage for rank in range(4) for stage in config.stages_of(rank))
    assert owned == list(range(config.num_stages))
    assert all(stage in config.stages_of(config.owner(stage)) for stage in owned)


@pytest.mark.parametrize(
    ("parallel", "share", "size"),
    [
        ({}, 16, 16),
        ({"pp": 2}, 16, 4),
        ({"pp": 2}, 6, 1),  # 3 would leave two micro-batches, which is as many as stages
        ({"pp": 2, "balance": True}, 6, 3),
        ({"pp": 2, "schedule": "zbv"}, 16, 2),
        ({"pp": 8}, 4, 1),
        ({"pp": 2, "micro_batches": 2}, 16, 8),
        ({"shares": "auto"}, 16, 2),
        ({"shares": "auto"}, 21, 3),
        ({"shares": "auto"}, 7, 1),
    ],
)
def test_a_pipeline_gets_several_micro_batches_by_itself(parallel: dict[str, Any], share: int, size: int) -> None:
    assert ParallelConfig(**parallel).default_micro_batch(share) == size
