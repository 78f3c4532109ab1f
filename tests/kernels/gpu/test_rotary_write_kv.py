"""Rotation and storing of keys and values in one launch against the two steps on torch, in every type of page."""

import pytest
import torch
from torch import Tensor

from penjing.kernels.dispatch import force_torch
from penjing.kernels.rotary import rotary_cos_sin, rotary_write_kv

BLOCKS, BLOCK_SIZE = 5, 16


def step(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k, v, cos, sin; keys and values are views of one projection, as in a model."""
    generator = torch.Generator().manual_seed(tokens)
    fused = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator).to(device, dtype)
    frequency = 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    positions = torch.randint(0, 4096, (tokens,), generator=generator)
    return [*fused.split((heads, kv_heads, kv_heads), 1), *(x.to(device) for x in rotary_cos_sin(frequency, positions))]


def cache(kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    shape = (BLOCKS, kv_heads, BLOCK_SIZE, head_dim)
    scales = [torch.zeros(shape[:3], device=device) for _ in range(2)] if dtype == torch.int8 else []
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)] + scales


def run(inputs: list[Tensor], pages: list[Tensor], slots: Tensor) -> Tensor:
    q, k, v, cos, sin = inputs
    k_cache, v_cache, k_scale, v_scale = [*pages, None, None][:4]
    assert k_cache is not None
    assert v_cache is not None
    return rotary_write_kv(q, k, v, cos, sin, k_cache, v_cache, slots, k_scale, v_scale)


@pytest.mark.parametrize(
    ("dtype", "pages"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.float16),
        (torch.float32, torch.int8),
        (torch.float16, torch.int8),
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (5, 5, 24)])
def test_both_steps(
    gpu_device: str, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, pages: torch.dtype
) -> None:
    inputs = step(7, heads, kv_heads, head_dim, dtype, gpu_device)
    slots = torch.tensor([3, 79, -1, 0, 17, 16, 40], device=gpu_device)
    actual, expected = (cache(kv_heads, head_dim, pages, gpu_device) for _ in range(2))
    q = run(inputs, actual, slots)
    with force_torch():
        q_expected = run(inputs, expected, slots)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(q, q_expected, rtol=tolerance, atol=tolerance)
    for a, e in zip(actual, expected, strict=True):
        if a.dtype == torch.int8:
            assert (a.int() - e.int()).abs().max() <= 1
            assert (a != e).float().mean() < 0.01
        else:
            limit = 2e-3 if pages == torch.float16 else tolerance
            torch.testing.assert_close(a, e, rtol=limit, atol=limit)
    assert torch.equal(actual[0] == 0, expected[0] == 0) or pages == torch.int8  # nothing else was written


def test_slots_beyond_two_billion_values(gpu_device: str) -> None:
    num_blocks = 2**31 // (BLOCK_SIZE * 64) + 3
    pages = [torch.empty(num_blocks, 1, BLOCK_SIZE, 64, dtype=torch.int8, device=gpu_device) for _ in range(2)]
    scales = [torch.empty(num_blocks, 1, BLOCK_SIZE, device=gpu_device) for _ in range(2)]
    inputs = step(1, 1, 1, 64, torch.float32, gpu_device)
    slot = torch.tensor([num_blocks * BLOCK_SIZE - 2], device=gpu_device)
    run(inputs, pages + scales, slot)
    restored = pages[1][-1, 0, -2].float() * scales[1][-1, 0, -2]
    torch.testing.assert_close(restored, inputs[2][0, 0], rtol=0, atol=float(scales[1][-1, 0, -2]) * 0.501)


def test_a_slot_outside_the_cache_is_skipped_or_refused(gpu_device: str) -> None:
    inputs, pages = step(2, 2, 1, 16, torch.float32, gpu_device), cache(1, 16, torch.float32, gpu_device)
    slots = torch.tensor([BLOCKS * BLOCK_SIZE, 4], device=gpu_device)
    run(inputs, pages, slots)
    assert int(pages[0].ne(0).any(-1).sum()) == 1
    with force_torch(), pytest.raises(ValueError, match="slots 4 … 80"):
        run(inputs, pages, slots)


def test_refusals() -> None:
    q, k, v, cos, sin = step(2, 2, 1, 16, torch.float32, "cpu")
    pages, slots = cache(1, 16, torch.float32, "cpu"), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="float16"):
        run([q.half(), k, v, cos, sin], pages, slots)
    with pytest.raises(ValueError, match=r"cos is \(1, 8\)"):
        run([q, k, v, cos[:1], sin[:1]], pages, slots)
    with pytest.raises(ValueError, match="int32"):
        run([q, k, v, cos, sin], pages, slots.int())
