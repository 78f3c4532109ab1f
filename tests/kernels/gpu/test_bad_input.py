# pyright: reportCallIssue=false, reportArgumentType=false
# Tensors are passed as one list of arguments.
"""Input that the kernels do not take: an error that names it, or another way to the right answer; never a wrong one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from penjing.kernels.cross_entropy import linear_cross_entropy
from penjing.kernels.dispatch import force_torch
from penjing.kernels.flash_attention import flash_attention, flash_attention_packed
from penjing.kernels.int8_linear import int8_linear, int8_matmul, int8_weight_linear, prepack_int8
from penjing.kernels.paged_attention import paged_attention
from penjing.kernels.quantize import quantize_per_token
from penjing.kernels.quantize_gradient import quantize_gradient
from penjing.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quantize
from penjing.kernels.rotary import apply_rotary, rotary_write_kv
from penjing.kernels.swiglu import swiglu, swiglu_quantize

pytest.importorskip("triton")


def draw(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def same_on_torch(run: Callable[[], object]) -> None:
    """What `run` returns with the kernels is what it returns without."""
    found = run()
    with force_torch():
        expected = run()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def codes(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(0)).to(torch.int8).to(device)


def test_columns_apart(gpu_device: str) -> None:
    """Every second column: no kernel reads such rows as they are."""
    x, y = draw(3, 80, device=gpu_device)[:, ::2], draw(3, 120, device=gpu_device)[:, ::3]
    weight = draw(80, device=gpu_device)[::2]
    for run in (
        lambda: rms_norm(x, weight, 1e-6),
        lambda: add_rms_norm(x, y, weight, 1e-6),
        lambda: swiglu(x, y),
        lambda: quantize_per_token(x),
        lambda: int8_linear(x, prepack_int8(codes(40, 5, device=gpu_device).t(), weight[:5])),
    ):
        same_on_torch(run)
    heads, angles = draw(3, 2, 32, device=gpu_device)[..., ::2], draw(3, 16, device=gpu_device)[:, ::2]
    same_on_torch(lambda: apply_rotary(heads, angles, angles))


def test_addresses_that_are_not_aligned(gpu_device: str) -> None:
    a, b = codes(4 * 32 + 3, device=gpu_device)[3:].view(4, 32), codes(5 * 32 + 1, device=gpu_device)[1:].view(5, 32)
    assert torch.equal(int8_matmul(a, b).cpu().long(), a.cpu().long() @ b.cpu().long().t())
    x = draw(3 * 32 + 1, device=gpu_device)[1:].view(3, 32)
    same_on_torch(lambda: quantize_per_token(x))
    same_on_torch(lambda: swiglu(x, x))
    same_on_torch(lambda: int8_linear(x, prepack_int8(b, draw(5, device=gpu_device))))
    odd = codes(4, 17, device=gpu_device)  # rows of 17 bytes
    assert torch.equal(int8_matmul(odd, odd).cpu().long(), odd.cpu().long() @ odd.cpu().long().t())


def test_no_rows(gpu_device: str) -> None:
    x, weight = draw(2, 32, device=gpu_device)[:0], draw(32, device=gpu_device)
    packed = prepack_int8(codes(8, 32, device=gpu_device), draw(8, device=gpu_device))
    assert rms_norm(x, weight, 1e-6).shape == swiglu(x, x).shape == (0, 32)
    assert [tuple(y.shape) for y in rms_norm_quantize(x, weight, 1e-6)] == [(0, 32), (0,), (0, 32)]
    assert [tuple(y.shape) for y in swiglu_quantize(x, x)] == [(0, 32), (0,)]
    assert [tuple(y.shape) for y in quantize_per_token(x)] == [(0, 32), (0,)]
    assert int8_linear(x, packed).shape == int8_weight_linear(x, packed).shape == (0, 8)
    assert quantize_gradient(x, 0).shape == (0,)
    targets = torch.zeros(0, dtype=torch.int64, device=gpu_device)
    assert float(linear_cross_entropy(x, draw(9, 32, device=gpu_device), targets)) == 0
    heads = draw(1, 2, 16, device=gpu_device)[:0]
    assert apply_rotary(heads, heads[:, 0, :8], heads[:, 0, :8]).shape == (0, 2, 16)
    pages = torch.zeros(2, 2, 16, 16, device=gpu_device)
    slots = torch.zeros(0, dtype=torch.int64, device=gpu_device)
    assert rotary_write_kv(heads, heads, heads, heads[:, 0, :8], heads[:, 0, :8], pages, pages, slots).shape == (
        0,
        2,
        16,
    )


@pytest.mark.parametrize("head_dim", [12, 264])
def test_head_sizes_that_the_kernels_do_not_take_run_on_torch(gpu_device: str, head_dim: int) -> None:
    q = draw(1, 3, 2, head_dim, device=gpu_device)
    same_on_torch(lambda: flash_attention(q, q, q))
    pages = draw(2, 2, 16, head_dim, device=gpu_device)
    numbers = [torch.tensor(x, dtype=torch.int32, device=gpu_device) for x in ([0, 1], [20], [[0, 1]])]
    same_on_torch(lambda: paged_attention(q[0, :1], pages, pages, *numbers, 0.1))


def test_other_types(gpu_device: str) -> None:
    wide = draw(1, 3, 2, 16, device=gpu_device).double()
    same_on_torch(lambda: flash_attention(wide, wide, wide))
    same_on_torch(lambda: rms_norm(wide, wide[0, 0, 0], 1e-6))
    same_on_torch(lambda: swiglu(wide, wide))
    for run in (
        lambda: flash_attention(wide, wide.float(), wide),
        lambda: quantize_per_token(codes(2, 4, device=gpu_device)),
        lambda: swiglu_quantize(wide[0, 0], wide[0, 0].float()),
        lambda: quantize_gradient(codes(4, device=gpu_device), 0),
        lambda: int8_linear(
            codes(2, 4, device=gpu_device), prepack_int8(codes(2, 4, device=gpu_device), wide[0, 0, :, 0])
        ),
    ):
        with pytest.raises(ValueError, match=r"float|int8"):
            run()


def test_sequences_of_no_tokens(gpu_device: str) -> None:
    q = draw(3, 2, 16, device=gpu_device)
    ends = torch.tensor([0, 0, 3, 3], dtype=torch.int32, device=gpu_device)
    torch.testing.assert_close(
        flash_attention_packed(q, q, q, ends, ends, 3, 3), flash_attention(q[None], q[None], q[None])[0]
    )
    none = torch.zeros(1, dtype=torch.int32, device=gpu_device)
    assert flash_attention_packed(q[:0], q[:0], q[:0], none, none, 0, 0).shape == (0, 2, 16)


def paged(gpu_device: str, context: int, num_pages: int = 2, page: int = 16) -> Tensor:
    """A token of a sequence of `context` keys, beside one of a single key, by tables of `num_pages`: one segment of 64
    keys, or two, each of which has a block of its own."""
    from penjing.kernels.gpu.paged_attention import paged_attention as launch

    pages = draw(16, 1, page, 16, device=gpu_device)
    table = torch.arange(2 * num_pages, dtype=torch.int32, device=gpu_device).view(2, num_pages)
    numbers = [torch.tensor(x, dtype=torch.int32, device=gpu_device) for x in ([0, 1, 2], [context, 1])]
    return launch(draw(2, 2, 16, device=gpu_device), pages, pages, *numbers, table, 0.25, segment_keys=64).cpu()


@pytest.mark.parametrize(("num_pages", "page"), [(1, 16), (8, 16)])
def test_a_context_beyond_the_block_table_gives_nan(gpu_device: str, num_pages: int, page: int) -> None:
    """The next sequence's blocks follow in memory; they must not be read."""
    out = paged(gpu_device, num_pages * page + 1, num_pages, page)
    assert out[0].isnan().all()
    assert torch.isfinite(out[1]).all()


@pytest.mark.parametrize("num_pages", [1, 8])
def test_a_context_of_no_keys_gives_zeros(gpu_device: str, num_pages: int) -> None:
    out = paged(gpu_device, 0, num_pages)
    assert not out[0].any()
    assert torch.isfinite(out[1]).all()


def test_an_empty_batch(gpu_device: str) -> None:
    numbers = [torch.tensor(x, dtype=torch.int32, device=gpu_device) for x in ([0], [])]
    table = torch.zeros(0, 2, dtype=torch.int32, device=gpu_device)
    pages = torch.zeros(2, 1, 16, 16, device=gpu_device)
    assert paged_attention(draw(1, 2, 16, device=gpu_device)[:0], pages, pages, *numbers, table, 0.25).shape == (
        0,
        2,
        16,
    )


def test_tensors_without_data_have_nothing_to_read(gpu_device: str) -> None:
    """What a step takes is counted on such tensors before a run; a kernel would read addresses that are none."""
    with FakeTensorMode():
        x = torch.empty(2, 3, 2, 16, device=gpu_device)
        found = flash_attention(x, x, x), rms_norm(x, x[0, 0, 0], 1e-6), swiglu(x, x)
        assert all(isinstance(y, FakeTensor) and y.shape == x.shape for y in found)
