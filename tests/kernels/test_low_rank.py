"""Adapters in a step: near the step of merged weights, and rows keep their bits in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.decoder_step import DecoderStep
from penjing.kernels.low_rank import PROJECTIONS, LowRank, low_rank
from penjing.kernels.step_layers import FloatLinear, LayerWeights
from tests.kernels.cpu import needs_extension
from tests.kernels.test_decoder_step import draw_ids, inputs, make_step, new_pool

pytestmark = needs_extension
HIDDEN, INNER, VOCAB = 48, 72, 100  # 72: the last block of outputs is not full
SHAPES = {
    "q": (32, 48),
    "k": (16, 48),
    "v": (16, 48),
    "head_gate": (32, 48),
    "out": (48, 32),
    "gate": (72, 48),
    "up": (72, 48),
    "down": (48, 72),
}


def draw_weights(seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{name: torch.randn(s, generator=generator) / s[1] ** 0.5 for name, s in SHAPES.items()} for _ in range(3)]


def draw_pairs(
    seed: int, rank: int, dtype: torch.dtype = torch.float32, of: Any = PROJECTIONS
) -> list[dict[str, LowRank]]:
    generator = torch.Generator().manual_seed(seed)

    def pair(shape: tuple[int, int]) -> LowRank:
        a_RK = torch.randn(rank, shape[1], generator=generator) / shape[1] ** 0.5
        return LowRank(a_RK.to(dtype), torch.randn(shape[0], rank, generator=generator).to(dtype), 0.3)

    return [{name: pair(SHAPES[name]) for name in of} for _ in range(3)]


def step_of(weights: list[dict[str, Tensor]], hadamard: int = 0) -> DecoderStep:
    ones = torch.ones(HIDDEN)

    def layer(held: dict[str, Tensor]) -> LayerWeights:
        linears: dict[str, Any] = {name: FloatLinear(weight) for name, weight in held.items()}
        return LayerWeights(**linears, input_norm=ones, post_norm=ones, hadamard=hadamard)

    return make_step(False, layers=[layer(held) for held in weights])


def merged(weights: list[dict[str, Tensor]], pairs: list[dict[str, LowRank]]) -> list[dict[str, Tensor]]:
    return [
        {n: w + p[n].scale * (p[n].b_NR.float() @ p[n].a_RK.float()) if n in p else w for n, w in held.items()}
        for held, p in zip(weights, pairs, strict=True)
    ]


def run(step: DecoderStep, ids: Tensor, slots: list[int] | None, past: int = 0, **changes: Any) -> Tensor:
    adapter = None if slots is None else torch.tensor(slots, dtype=torch.int32)
    return step.step(
        **inputs([(ids, past, list(range(40)))], changes.pop("pool", new_pool())), adapter_T=adapter
    ).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rank", "of"), [(4, PROJECTIONS), (17, PROJECTIONS), (8, ("q", "v")), (3, ("down",))])
def test_as_the_merged_weights(isa: CpuExtension, dtype: torch.dtype, rank: int, of: tuple[str, ...]) -> None:
    weights, ids = draw_weights(), draw_ids(9)
    pairs = draw_pairs(1, rank, dtype, of)
    step = step_of(weights)
    slot = step.adapters.add(pairs)
    expected = run(step_of(merged(weights, pairs)), ids, None)
    assert (run(step, ids, [slot] * 9) - expected).abs().max() < 2e-4 * expected.std()
    assert (run(step, ids, None) - expected).abs().max() > 0.1 * expected.std()


def test_the_transform_before_down_does_not_reach_the_adapter(isa: CpuExtension) -> None:
    """A step that transforms the input of `down` computes the same function; so does an adapter beside it."""
    from penjing.kernels.hadamard import hadamard

    weights, ids, pairs = draw_weights(), draw_ids(9), draw_pairs(1, 4)
    turned = [held | {"down": hadamard(held["down"], 8)} for held in weights]
    plain, step = step_of(weights), step_of(turned, hadamard=8)
    slots = [plain.adapters.add(pairs)] * 9
    assert [step.adapters.add(pairs)] * 9 == slots
    expected = run(plain, ids, slots)
    assert (run(step, ids, slots) - expected).abs().max() < 2e-4 * expected.std()


@pytest.mark.parametrize("style", ["llama", "neox", "mixtral", "laguna"])
@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
def test_rows_keep_their_bits_in_any_company(isa: CpuExtension, threads: CpuExtension, int8: bool, style: str) -> None:
    """Alone, beside other adapters and none, in chunks, by rows and by columns; rows without one as in a step that
    knows of none."""
    step = make_step(int8, style=style)  # of INT8 the gate and up projections are one
    shapes = SHAPES | {"gate": (80, 48), "up": (80, 48), "down": (48, 80), "head_gate": (4, 48)}
    if style != "laguna":
        del shapes["head_gate"]
    lacks = {"neox": ("up",), "mixtral": ("gate", "up", "down")}  # experts have no adapters
    for name in lacks.get(style, ()):
        del shapes[name]
    generator = torch.Generator().manual_seed(3)

    def pair(shape: tuple[int, int], rank: int) -> LowRank:
        return LowRank(
            torch.randn(rank, shape[1], generator=generator), torch.randn(shape[0], rank, generator=generator), 0.1
        )

    if style == "mixtral":
        with pytest.raises(ValueError, match="'down' is no projection; those are q, k, v, out"):
            step.adapters.add([{"down": pair((48, 80), 4)} for _ in range(3)])
    slots = [step.adapters.add([{n: pair(s, rank) for n, s in shapes.items()} for _ in range(3)]) for rank in (4, 9)]
    ids = draw_ids(120)
    alone = {slot: run(step, ids, None if slot < 0 else [slot] * 120) for slot in (-1, *slots)}
    assert not torch.equal(alone[0], alone[-1])
    for chunk, count in ((1, 1), (5, 2), (50, 3), (119, 1)):
        threads.set_num_threads(count)
        pools = {slot: new_pool() for slot in alone}
        for start in range(0, 120, chunk):
            part = ids[start : start + chunk]
            pool = torch.cat(list(pools.values()), dim=2)  # each sequence has blocks of its own
            parts = [(part, start, list(range(64 * i, 64 * i + 30))) for i in range(3)]
            who = torch.tensor([slot for slot in alone for _ in part], dtype=torch.int32)
            rows = step.step(**inputs(parts, pool), adapter_T=who).clone()
            top = step.step_top(1, *inputs(parts, pool).values(), adapter_T=who)[1]
            assert torch.equal(top[:, 0].long(), rows.argmax(1))
            for slot, piece, got in zip(alone, pool.split(64, dim=2), rows.split(len(part)), strict=True):
                assert torch.equal(got, alone[slot][start : start + len(part)]), (chunk, slot)
                pools[slot] = piece.contiguous()


def test_a_slot_is_used_again() -> None:
    step, ids = step_of(draw_weights()), draw_ids(5)
    pairs = [draw_pairs(seed, 2) for seed in range(3)]
    assert [step.adapters.add(each) for each in pairs[:2]] == [0, 1]
    of_first = run(step, ids, [0] * 5)
    step.adapters.remove(0)
    with pytest.raises(ValueError, match="slot is free"):
        run(step, ids, [-1, 0, 1, 1, 1])
    with pytest.raises(ValueError, match="slot is free"):
        run(step, ids, [2] * 5)
    assert step.adapters.add(pairs[2]) == 0
    assert not torch.equal(run(step, ids, [0] * 5), of_first)
    assert step.adapters.add(pairs[0]) == 2
    assert torch.equal(run(step, ids, [2] * 5), of_first)


def test_the_reference() -> None:
    pair = draw_pairs(0, 4)[0]["q"]
    x = torch.randn(3, 48)
    assert torch.allclose(low_rank(x, pair), x @ (0.3 * pair.b_NR @ pair.a_RK).t(), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: pairs[:2], "2 layers beside a decoder of 3"),
        (lambda pairs: [pairs[0] | {"head": pairs[0]["q"]}, *pairs[1:]], "'head' is no projection"),
        (lambda pairs: [*pairs[:2], pairs[2] | {"k": pairs[2]["q"]}], "layer 2, k: .* beside a layer \\(16, 48\\)"),
        (
            lambda pairs: [pairs[0] | {"q": LowRank(pairs[0]["q"].a_RK.half(), pairs[0]["q"].b_NR, 1.0)}, *pairs[1:]],
            "one float",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_of(draw_weights()).adapters.add(change(draw_pairs(0, 2)))
