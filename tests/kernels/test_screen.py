"""The largest logit found by a copy of the LM head: the same value and place as among all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.decoder_step import DecoderStep
from penjing.kernels.int8_linear import PackedInt8, int8_linear_torch, prepack_int8
from penjing.kernels.quantize import quantize_per_token_torch
from penjing.kernels.screen import DIRECTIONS, Screen, make_screen, why_not_screened
from penjing.kernels.step_layers import FloatLinear, LayerWeights
from tests.kernels.cpu import needs_extension, the_extension

pytestmark = needs_extension
VOCAB, HIDDEN, PAGE = 3000, 128, 4


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs_like(count: int, seed: int, noise: float = 0.3) -> Tensor:
    """(count, HIDDEN) rows that lie along six directions and a little beside."""
    return draw(count, 6, seed=seed) @ draw(6, HIDDEN, seed=99) + noise * draw(count, HIDDEN, seed=seed + 1)


def make_head(vocab: int = VOCAB, ties: int = 1, spread: float = 1.0) -> PackedInt8:
    """A random head; with `ties` its rows repeat, with little `spread` they hardly differ."""
    weight_VE = draw(1, HIDDEN, seed=7) + spread * draw(vocab // ties, HIDDEN, seed=8)
    scale_V = weight_VE.abs().amax(1) / 127
    code_VE = torch.round(weight_VE / scale_V[:, None]).to(torch.int8)
    return prepack_int8(code_VE.repeat(ties, 1), scale_V.repeat(ties))


def make_step(head: PackedInt8) -> DecoderStep:
    """A decoder whose head reads what enters its only layer."""
    none = FloatLinear(torch.zeros(HIDDEN, HIDDEN))
    layer = LayerWeights(none, none, none, none, none, none, none, None, None)
    return DecoderStep(
        the_extension(),
        [layer],
        torch.zeros(head.out_features, HIDDEN),
        None,
        head,
        num_heads=1,
        num_kv_heads=1,
        head_dim=HIDDEN,
        eps=1e-5,
        inverse_frequency_F=torch.ones(HIDDEN // 2),
        max_positions=4,
    )


def largest(step: DecoderStep, inputs_RE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Value and place of each row's largest logit, `rows` rows a step."""
    found = []
    for some_RE in inputs_RE.split(rows):
        count = len(some_RE)
        numbers = torch.arange(count, dtype=torch.int32)
        found.append(
            step.step_top(
                1,
                step.vocab + numbers,
                torch.zeros_like(numbers),
                numbers.long() * PAGE,
                torch.arange(count + 1, dtype=torch.int32),
                torch.ones_like(numbers),
                numbers[:, None],
                numbers,
                torch.zeros(1, 2, count, 1, PAGE, HIDDEN),
                seen_XE=some_RE.contiguous(),
            )
        )
    values, ids = zip(*found, strict=True)
    return torch.cat(values)[:, 0], torch.cat(ids)[:, 0]


def check_equal(head: PackedInt8, screen: Screen, inputs_RE: Tensor, rows: int) -> None:
    plain, screened = make_step(head), make_step(head)
    screened.screen(screen)
    for found, wanted in zip(largest(screened, inputs_RE, rows), largest(plain, inputs_RE, rows), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("rows", [1, 3, 4, 5])
def test_value_and_place_are_those_among_all(isa: CpuExtension, threads: CpuExtension, rows: int) -> None:
    head = make_head(ties=3)
    screen = make_screen(head, inputs_like(100, seed=1))
    for count in (1, 2, 3):
        threads.set_num_threads(count)
        check_equal(head, screen, inputs_like(60, seed=2), rows)


@pytest.mark.parametrize("vocab", [1, 15, 64, 385, 1153])
def test_any_number_of_logits_will_do(threads: CpuExtension, vocab: int) -> None:
    head = make_head(vocab)
    threads.set_num_threads(2)
    check_equal(head, make_screen(head, inputs_like(70, seed=1)), inputs_like(20, seed=2), 1)


def test_logits_that_hardly_differ_are_all_computed(isa: CpuExtension, threads: CpuExtension) -> None:
    head = make_head(spread=1e-2)
    threads.set_num_threads(2)
    check_equal(head, make_screen(head, inputs_like(70, seed=1)), inputs_like(20, seed=2), 2)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 3.0]), st.sampled_from([1e-30, 1.0, 1e12]))
def test_directions_decide_nothing(seed: int, noise: float, size: float) -> None:
    """Inputs unlike those that the directions are of, and of any size."""
    head = make_head(600)
    screen = make_screen(head, draw(DIRECTIONS, HIDDEN, seed=seed))
    check_equal(head, screen, size * inputs_like(12, seed=seed, noise=noise), 1)


def test_a_bound_that_is_too_small_is_seen() -> None:
    """What the tests above would find."""
    head = make_head()
    screen = make_screen(head, draw(DIRECTIONS, HIDDEN))
    with pytest.raises(AssertionError):
        check_equal(head, replace(screen, lost_V=0 * screen.lost_V), inputs_like(200, seed=2, noise=3.0), 1)


def test_the_copy_is_off_by_no_more_than_it_says() -> None:
    head, inputs_RE = make_head(), inputs_like(300, seed=2)
    screen = make_screen(head, inputs_like(100, seed=1))
    code_RE, scale_R = quantize_per_token_torch(inputs_RE)
    parts_RD = (code_RE.float() @ screen.directions_DE.T * screen.factors_D).round().clamp(-127, 127)
    rest_RE = code_RE - parts_RD @ screen.directions_DE
    weight_VK = screen.rough.weight_NK.float()
    rough_RV = torch.cat([code_RE.float(), parts_RD], dim=1) @ weight_VK.T * scale_R[:, None] * head.scale_N
    reach_R = scale_R * (rest_RE.norm(dim=1) + screen.beside * parts_RD.norm(dim=1))
    share_RV = (int8_linear_torch(inputs_RE, head) - rough_RV).abs() / (reach_R[:, None] * screen.lost_V)
    assert 0.05 < share_RV.max() <= 1
    assert weight_VK[:, :HIDDEN].sub(head.weight_NK).abs().max() <= 9  # half of the largest step and of a whole number


def test_logits_too_small_for_bounds_are_all_computed() -> None:
    """Below what float32 keeps in full, a bound may be rounded to nothing."""
    head = make_head()
    head = replace(head, scale_N=1e-3 * head.scale_N)
    screen = make_screen(head, inputs_like(100, seed=1))
    for size in (1e-36, 1e-42, 3e-44, 0.0):
        check_equal(head, screen, size * inputs_like(60, seed=2), 2)


def test_the_bound_holds_what_its_own_sums_are_off() -> None:
    """Long directions, and a head whose copy lacks little along them."""
    head = make_head(600)
    screen = make_screen(head, 1.0 - 2.0 * (draw(DIRECTIONS, HIDDEN) > 0))
    copy_VK, directions_DE = screen.rough.weight_NK.double(), screen.directions_DE.double()
    lacks_VE = head.weight_NK - copy_VK[:, :HIDDEN]
    beside_V = (lacks_VE @ directions_DE.T - copy_VK[:, HIDDEN:]).norm(dim=1) / lacks_VE.norm(dim=1)
    assert screen.beside - beside_V.max() >= 0.9e-5 * directions_DE.norm()


def test_a_row_with_a_nan_says_so(threads: CpuExtension) -> None:
    head = make_head()
    step, inputs_RE = make_step(head), inputs_like(2, seed=2)
    step.screen(make_screen(head, inputs_like(100, seed=1)))
    inputs_RE[1, 5] = torch.nan
    assert largest(step, inputs_RE, 2)[0].isnan().tolist() == [False, True]


def test_heads_that_are_not_taken() -> None:
    head = make_head(70)
    assert why_not_screened(head, None) is None
    reasons = {
        "bias or a cap": why_not_screened(head, 30.0),
        "a bias": why_not_screened(replace(head, bias_N=torch.zeros(70)), None),
        "stored in 8 bits": why_not_screened(FloatLinear(torch.zeros(3, 128)), None),
        "one scale a token": why_not_screened(replace(head, zero_points=True), None),
        "100 inputs": why_not_screened(prepack_int8(torch.ones(9, 100, dtype=torch.int8), torch.ones(9)), None),
        "no numbers": why_not_screened(replace(head, scale_N=torch.full((70,), torch.nan)), None),
        "too small": why_not_screened(replace(head, scale_N=torch.full((70,), 1e-40)), None),
    }
    for words, reason in reasons.items():
        assert reason is not None
        assert words in reason
