"""The fused step by itself: what it refuses, rotary tables that grow, logits independent of company and threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.decoder_step import FIRST_POSITIONS, DecoderStep
from penjing.kernels.int8_linear import prepack_int8
from penjing.kernels.step_layers import ExpertLayers, FloatLinear, LayerWeights
from tests.kernels.cpu import needs_extension, the_extension

pytestmark = needs_extension
VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 100, 48, 80, 4, 2, 8, 3
BLOCK_SIZE, NUM_BLOCKS = 4, 64
STYLES: dict[str, dict[str, Any]] = {
    "llama": {},
    "neox": {"up": None, "activation": "gelu", "parallel": True},
    "arcee": {"up": None, "activation": "relu2"},
    "starcoder2": {"up": None, "activation": "gelu_tanh"},
    "opt": {"up": None, "activation": "relu"},
    "apertus": {"up": None, "activation": "xielu", "curve": (0.7, 1.2)},
    "gemma2": {"activation": "gelu_tanh", "out_norm": torch.ones(HIDDEN), "down_norm": torch.ones(HIDDEN)},
    "bitnet": {
        "activation": "relu2",
        "attended_norm": torch.linspace(0.5, 1.5, HEADS * HEAD_DIM),
        "inner_norm": torch.linspace(1.5, 0.5, INNER),
    },
    "laguna": {"gate_function": "softplus"},
    "mixtral": {},
    "gpt_oss": {"activation": "clamped_swiglu", "sinks": torch.linspace(-1, 1, HEADS)},
    "qwen2_moe": {"out_norm": torch.ones(HIDDEN), "down_norm": torch.ones(HIDDEN)},
    "phimoe": {"parallel": True},
}
"""What layers of a kind have; gemma2 has caps too."""
EXPERTS = ("mixtral", "gpt_oss", "qwen2_moe", "phimoe")
INT8_POOL = torch.ones(LAYERS, 2, NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.int8)


def make_step(
    int8: bool,
    windows: tuple[int | None, ...] = (None, 11, 5),
    vocab_repeats: int = 1,
    style: str = "llama",
    **changes: Any,
) -> DecoderStep:
    """A random step; with `vocab_repeats` the rows of the LM head repeat, so that logits tie."""
    generator = torch.Generator().manual_seed(0)

    def linear(n: int, k: int) -> Any:
        weight = torch.randn(n, k, generator=generator) / k**0.5
        if n == VOCAB:
            weight = weight[: n // vocab_repeats].repeat(vocab_repeats, 1)
        if not int8:
            return FloatLinear(weight)
        scale = weight.abs().amax(1) / 127
        return prepack_int8(torch.round(weight / scale[:, None]).to(torch.int8), scale)

    def layer(window: int | None) -> LayerWeights:
        q_size, kv_size = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        qkv = linear(q_size, HIDDEN), linear(kv_size, HIDDEN), linear(kv_size, HIDDEN)
        mlp = linear(INNER, HIDDEN), linear(INNER, HIDDEN), linear(HIDDEN, INNER)
        norms = torch.ones(HIDDEN), torch.ones(HIDDEN)
        experts, gate = None, linear(HEADS, HIDDEN) if style == "laguna" else None
        if style in EXPERTS:
            others = [(linear(INNER, HIDDEN), linear(INNER, HIDDEN), linear(HIDDEN, INNER)) for _ in range(4)]
            how: dict[str, Any] = {"factor": 0.9}
            if style == "gpt_oss":
                how |= {"normed": False, "logistic": True, "bias": torch.linspace(0.1, -0.1, 4), "shared": True}
            elif style == "qwen2_moe":
                wide = 2 * INNER
                others[-1] = linear(wide, HIDDEN), linear(wide, HIDDEN), linear(HIDDEN, wide)
                how |= {"bias": torch.linspace(0.1, -0.1, 4), "shared": True, "shared_gate": True}
                how |= {"logistic": True, "bias_of_logits": True}
            elif style == "phimoe":
                how |= {"margin": 0.3}
            gates, ups, downs = zip(mlp, *others, strict=True)
            rows = 4 if style == "gpt_oss" else 5
            router = FloatLinear(torch.randn(rows, HIDDEN, generator=generator), torch.linspace(-0.1, 0.1, rows))
            experts = ExpertLayers(router, gates, ups, downs, 2, **how)
        weights = LayerWeights(*qkv, linear(HIDDEN, q_size), *mlp, *norms, window=window, experts=experts)
        return replace(weights, head_gate=gate, **STYLES[style])

    arguments: dict[str, Any] = {
        "layers": [layer(window) for window in windows],
        "embedding_VE": torch.randn(VOCAB, HIDDEN, generator=generator),
        "final_norm": torch.ones(HIDDEN),
        "lm_head": linear(VOCAB, HIDDEN),
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "eps": 1e-5,
        "inverse_frequency_F": 10000.0 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)),
        "max_positions": 10_000,
    }
    if style == "gemma2":
        arguments |= {"attention_cap": 1.5, "logit_cap": 2.0}
    return DecoderStep(the_extension(), **(arguments | changes))


def new_pool() -> Tensor:
    return torch.full((LAYERS, 2, NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM), torch.nan)


def inputs(parts: list[tuple[Tensor, int, list[int]]], pool: Tensor, first_position: int = 0) -> dict[str, Any]:
    """Arguments of `step` for (new ids, tokens before them, blocks) of each sequence; logits of all rows."""
    positions = [torch.arange(past, past + len(ids)) for ids, past, _ in parts]
    tables = [torch.tensor(blocks) for _, _, blocks in parts]
    size = pool.shape[4]
    slots = [t[p // size] * size + p % size for t, p in zip(tables, positions, strict=True)]
    num_rows = sum(map(len, positions))
    return {
        "token_ids_T": torch.cat([ids for ids, _, _ in parts]).int(),
        "positions_T": (torch.cat(positions) + first_position).int(),
        "slot_T": torch.cat(slots),
        "cu_query_S1": torch.tensor([0] + [len(ids) for ids, _, _ in parts]).cumsum(0).int(),
        "context_len_S": torch.tensor([past + len(ids) for ids, past, _ in parts]).int(),
        "block_table_SB": torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=-1).int(),
        "logit_rows_R": torch.arange(num_rows).int(),
        "kv_pool": pool,
    }


def draw_ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
def test_logits_do_not_depend_on_chunks_company_blocks_or_threads(
    isa: CpuExtension, threads: CpuExtension, int8: bool, style: str
) -> None:
    step, ids, other = make_step(int8, style=style), draw_ids(120), draw_ids(40, seed=1)
    whole = step.step(**inputs([(ids, 0, list(range(30)))], new_pool())).clone()
    assert whole.isfinite().all()
    for chunk, count in ((1, 1), (7, 2), (50, 3), (96, 1)):
        threads.set_num_threads(count)
        pool, blocks, rows = new_pool(), torch.randperm(NUM_BLOCKS).tolist(), []
        for start in range(0, 120, chunk):
            end = min(start + chunk, 120)
            parts = [(ids[start:end], start, blocks[:30])]
            if start % 2 == 0 and end <= 40:
                parts.insert(0, (other[start:end], start, blocks[30:40]))
            rows.append(step.step(**inputs(parts, pool))[-(end - start) :].clone())
        assert torch.equal(torch.cat(rows), whole)


@pytest.mark.parametrize("style", STYLES)
def test_int8_weights_change_the_logits_little(isa: CpuExtension, style: str) -> None:
    ids = draw_ids(20)
    floats, eights = (
        make_step(int8, style=style).step(**inputs([(ids, 0, [0, 1, 2, 3, 4])], new_pool())).clone()
        for int8 in (False, True)
    )
    error_R = (eights - floats).square().mean(-1)
    # Of few rows a router chooses another expert.
    error = error_R.median() if style in EXPERTS else error_R.mean()
    assert error.sqrt() < 0.05 * floats.std()


def test_float16_cache(isa: CpuExtension, threads: CpuExtension) -> None:
    """Nearer to a float32 cache than INT8, the same bits in any chunks and blocks, and the halves that torch stores."""
    step, ids, pool = make_step(False), draw_ids(100), new_pool().half()
    floats_pool = new_pool()
    floats = step.step(**inputs([(ids, 0, list(range(25)))], floats_pool)).clone()
    whole = step.step(**inputs([(ids, 0, list(range(25)))], pool)).clone()
    assert 1e-6 < (whole - floats).abs().max() / floats.std() < 2e-3
    for chunk, count in ((7, 2), (1, 1)):
        threads.set_num_threads(count)
        chunked, blocks = new_pool().half(), torch.randperm(NUM_BLOCKS).tolist()
        rows = [
            step.step(**inputs([(ids[start : start + chunk], start, blocks[:25])], chunked)).clone()
            for start in range(0, 100, chunk)
        ]
        assert torch.equal(torch.cat(rows), whole)
        assert torch.equal(chunked[:, :, blocks[:25]], pool[:, :, :25])
    assert pool[:, :, 25:].isnan().all()
    # The first layer's keys come from the embedding alone: both caches hold the same ones.
    assert torch.equal(pool[0, :, :25], floats_pool[0, :, :25].half())


def new_int8_pool() -> dict[str, Any]:
    pages = torch.full((LAYERS, 2, NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM), -128, dtype=torch.int8)
    return {"kv_pool": pages, "kv_scale": torch.full(pages.shape[:-1], torch.nan)}


def test_int8_cache(isa: CpuExtension, threads: CpuExtension) -> None:
    """Near what a float32 cache gives, the same bits in any chunks and blocks, and the bytes that `write_kv` stores."""
    step, ids = make_step(False), draw_ids(100)
    floats = step.step(**inputs([(ids, 0, list(range(25)))], new_pool())).clone()
    pool = new_int8_pool()
    whole = step.step(**inputs([(ids, 0, list(range(25)))], pool["kv_pool"]) | pool).clone()
    difference = (whole - floats).abs().max() / floats.std()
    assert 1e-4 < difference < 0.1
    for chunk, count in ((7, 2), (1, 1)):
        threads.set_num_threads(count)
        chunked, blocks, rows = new_int8_pool(), torch.randperm(NUM_BLOCKS).tolist(), []
        for start in range(0, 100, chunk):
            part = [(ids[start : start + chunk], start, blocks[:25])]
            rows.append(step.step(**inputs(part, chunked["kv_pool"]) | chunked).clone())
        assert torch.equal(torch.cat(rows), whole)
        for stored, expected in zip(chunked.values(), pool.values(), strict=True):
            assert torch.equal(stored[:, :, blocks[:25]], expected[:, :, :25])
    scale, pages = pool["kv_scale"], pool["kv_pool"]
    assert scale[:, :, 25:].isnan().all()
    assert (pages[:, :, 25:] == -128).all()
    # The first layer's keys come from the embedding alone: both caches hold the same ones.
    first = new_pool()
    step.step(**inputs([(ids, 0, list(range(25)))], first))
    assert torch.equal(scale[0, :, :25], first[0, :, :25].abs().amax(-1) / 127)


def test_blocks_that_left_the_window_may_be_given_away() -> None:
    # Every layer has a window here, so that what lies before is not needed and its table entries may be stale.
    for windows in ((11, 11, 11), (3, 11, 5)):
        step = make_step(False, windows=windows)
        ids, pool = draw_ids(40), new_pool()
        expected = step.step(**inputs([(ids, 0, list(range(10)))], new_pool()))[-1].clone()
        step.step(**inputs([(ids[:39], 0, list(range(10)))], pool))
        pool[:, :, :7] = torch.nan  # the last token sees positions 29 … 39
        given_away = [-1, 10_000, *[-1] * 5, 7, 8, 9]
        last = inputs([(ids[39:], 39, [0] * 7 + [7, 8, 9])], pool)
        last["block_table_SB"] = torch.tensor([given_away], dtype=torch.int32)
        assert torch.equal(step.step(**last)[-1], expected)


def test_rotary_tables_grow_with_the_positions() -> None:
    short, long = make_step(True, max_positions=40_000), make_step(True, max_positions=40_000)
    far = inputs([(draw_ids(5), 0, [0, 1])], new_pool(), first_position=30_000)
    near = inputs([(draw_ids(5), 0, [0, 1])], new_pool(), first_position=FIRST_POSITIONS - 5)
    expected_near, expected_far = short.step(**near).clone(), short.step(**far).clone()
    assert torch.equal(long.step(**far), expected_far)
    assert torch.equal(long.step(**near), expected_near)
    with pytest.raises(ValueError, match="position"):
        short.step(**inputs([(draw_ids(5), 0, [0, 1])], new_pool(), first_position=40_000 - 4))


def test_skipped_slots_are_not_stored() -> None:
    step, pool = make_step(False), new_pool()
    arguments = inputs([(draw_ids(3), 0, [1])], pool)
    pool[:, :, 1] = 0  # the skipped token's key is read all the same
    arguments["slot_T"] = torch.tensor([4, -1, 6])
    step.step(**arguments)
    stored = pool[:, :, 1].ne(0).any(dim=(0, 1, 2, 4))
    assert stored.tolist() == [True, False, True, False]
    assert pool[:, :, [0, *range(2, NUM_BLOCKS)]].isnan().all()


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"token_ids_T": int32(1, 2, VOCAB)}, "token id"),
        ({"token_ids_T": int32(1, -2, 3)}, "token id"),
        ({"token_ids_T": torch.tensor([1, 2, 3])}, "token_ids_T.*int32"),
        ({"token_ids_T": int32(1, 2)}, "positions_T"),
        ({"positions_T": int32(0, 1, -2)}, "position"),
        ({"slot_T": torch.tensor([0, 1, NUM_BLOCKS * BLOCK_SIZE])}, "slot"),
        ({"slot_T": torch.tensor([0, 1, -2])}, "slot"),
        ({"logit_rows_R": int32(3)}, "logit row"),
        ({"logit_rows_R": int32(-1)}, "logit row"),
        ({"cu_query_S1": int32(0, 2)}, "cu_query_S1"),
        ({"cu_query_S1": int32(1, 3)}, "cu_query_S1"),
        (
            {"cu_query_S1": int32(0, 3, 3), "context_len_S": int32(3, 1), "block_table_SB": int32(0, 1).view(2, 1)},
            "1 ≤",
        ),
        ({"context_len_S": int32(2)}, "context_len"),
        ({"context_len_S": int32(9)}, "block table"),
        ({"block_table_SB": int32(NUM_BLOCKS, 0).view(1, 2)}, "outside the cache"),
        ({"block_table_SB": int32(-1, 0).view(1, 2)}, "outside the cache"),
        ({"block_table_SB": int32(0, 1, 2, 3).view(1, 4)[:, ::2]}, "contiguous"),
        ({"kv_pool": torch.zeros(LAYERS, 2, NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM + 1)}, "kv_pool"),
        ({"kv_pool": torch.zeros(LAYERS, 2, NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM).double()}, "kv_pool"),
        ({"kv_pool": torch.zeros(LAYERS, 2, 0, KV_HEADS, BLOCK_SIZE, HEAD_DIM)}, "cache of shape"),
        ({"kv_pool": INT8_POOL}, "INT8 pool needs kv_scale"),
        ({"kv_scale": INT8_POOL[..., 0].float()}, "kv_pool.*int8"),
        ({"kv_pool": INT8_POOL, "kv_scale": INT8_POOL[..., 0].half()}, "kv_scale.*float16"),
        ({"kv_pool": INT8_POOL, "kv_scale": torch.ones(LAYERS, 2, NUM_BLOCKS)}, "kv_scale has shape"),
    ],
)
def test_refuses_before_it_computes(changed: dict[str, Any], message: str) -> None:
    step, pool = make_step(True), new_pool()
    arguments = inputs([(draw_ids(3), 0, [0, 1])], pool)
    with pytest.raises(ValueError, match=message):
        step.step(**(arguments | changed))
    assert pool.isnan().all()
    assert step.step(**arguments).isfinite().all()


def test_no_tokens() -> None:
    empty = torch.empty(0, dtype=torch.int32)
    with pytest.raises(ValueError, match="0 tokens"):
        make_step(True).step(
            empty, empty, empty.long(), int32(0), empty, torch.empty(0, 1, dtype=torch.int32), empty, new_pool()
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": []}, "without layers"),
        ({"final_norm": torch.ones(HIDDEN + 1)}, "norm"),
        ({"embedding_VE": torch.ones(VOCAB + 1, HIDDEN)}, "LM head"),
        ({"embedding_VE": torch.ones(VOCAB, HIDDEN + 2)}, "layer 0: q"),
        ({"embedding_VE": torch.ones(VOCAB, HIDDEN, dtype=torch.float64)}, "float64"),
        ({"num_heads": 8}, r"layer 0: q"),
        ({"inverse_frequency_F": torch.ones(3)}, "inverse_frequency_F"),
    ],
)
def test_construction_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_step(True, **changes)


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
@pytest.mark.parametrize("top", [1, 5, VOCAB, VOCAB + 3])
def test_largest_logits_are_those_of_all(isa: CpuExtension, threads: CpuExtension, int8: bool, top: int) -> None:
    step, ids = make_step(int8, vocab_repeats=2 if int8 else 1), draw_ids(30)
    arguments = inputs([(ids, 0, list(range(8)))], new_pool())
    for count in (1, 2, 3):
        threads.set_num_threads(count)
        every = step.step(**arguments).clone()
        values, tokens = step.step_top(top, *arguments.values())
        order = every.sort(dim=1, descending=True, stable=True)  # equals by ascending id
        known = min(top, VOCAB)
        assert torch.equal(values[:, :known], order.values[:, :known])
        assert torch.equal(tokens[:, :known].long(), order.indices[:, :known])
        assert (values[:, known:] == -torch.inf).all()
        assert (tokens[:, known:] == -1).all()


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
def test_logits_that_a_cap_makes_equal_tie(isa: CpuExtension, threads: CpuExtension, int8: bool) -> None:
    """Whether a row's logits are asked for, or the largest alone, its first token is the same."""
    step = make_step(int8, style="gemma2", logit_cap=0.02)
    arguments = inputs([(draw_ids(30), 0, list(range(8)))], new_pool())
    for count in (1, 2):
        threads.set_num_threads(count)
        every = step.step(**arguments).clone()
        assert (every == every.amax(1, keepdim=True)).sum(1).max() > 1
        order = every.sort(dim=1, descending=True, stable=True)
        values, tokens = step.step_top(7, *arguments.values())
        assert torch.equal(values, order.values[:, :7])
        assert torch.equal(tokens.long(), order.indices[:, :7])


@pytest.mark.parametrize("style", STYLES)
def test_a_row_with_a_nan_says_so_first(isa: CpuExtension, style: str) -> None:
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
    embedding[7] = torch.nan
    step = make_step(True, style=style, embedding_VE=embedding)
    arguments = inputs([(torch.tensor([token]), 0, [block]) for block, token in enumerate((3, 7, 4))], new_pool())
    values, _ = step.step_top(4, *arguments.values())
    assert values[:, 0].isnan().tolist() == [False, True, False]
    assert step.step(**arguments).isnan().any(1).tolist() == [False, True, False]
    with pytest.raises(ValueError, match="top=0"):
        step.step_top(0, *arguments.values())


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
def test_ids_beyond_the_vocabulary_are_rows_of_a_table(isa: CpuExtension, threads: CpuExtension, int8: bool) -> None:
    """A table that holds the rows of ordinary tokens gives their logits, bit by bit, in steps of any size."""
    step, seen = make_step(int8), torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(5))
    ordinary = make_step(int8, embedding_VE=torch.cat([seen, torch.zeros(VOCAB - 2, HIDDEN)]))
    everywhere = make_step(int8, embedding_VE=torch.zeros(VOCAB, HIDDEN))
    for count, num_threads in ((3, 1), (120, 1), (120, 2)):
        threads.set_num_threads(num_threads)
        ids = torch.arange(count) % 2
        blocks = list(range(30))
        wanted = ordinary.step(**inputs([(ids, 0, blocks)], new_pool())).clone()
        found = everywhere.step(**inputs([(ids + VOCAB, 0, blocks)], new_pool()), seen_XE=seen).clone()
        assert torch.equal(found, wanted)
    arguments = inputs([(torch.tensor([1, VOCAB + 2]), 0, [0])], new_pool())
    for table, message in ((seen, "rows of images"), (seen.double(), "seen_XE"), (seen[:, 1:], "seen_XE")):
        with pytest.raises(ValueError, match=message):
            step.step(**arguments, seen_XE=table)
    assert step.step(**arguments, seen_XE=torch.ones(3, HIDDEN)).isfinite().all()
