"""Attention to listed blocks of keys against all scores in float64, forward and backward, in any order of tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.kernels.block_sparse_attention import block_sparse_attention, block_sparse_attention_torch
from penjing.kernels.dispatch import force_torch
from penjing.kernels.lsh_attention import lsh_attention, rotations

Shape = tuple[int, int, int, int, int]  # B, H, KV, T, D


def draw(*shape: int, seed: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def problem(shape: Shape, block_size: int, dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v; lists of up to three blocks (some empty); positions in random order."""
    batch, heads, kv_heads, tokens, head_dim = shape
    tensors = [
        draw(batch, count, tokens, head_dim, seed=seed, device=device, dtype=dtype)
        for seed, count in enumerate((heads, kv_heads, kv_heads))
    ]
    blocks = -(-tokens // block_size)
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(batch, kv_heads, blocks, blocks, generator=generator)
    lists = scores.argsort(-1)[..., :3].to(torch.int32)
    lists[torch.rand(lists.shape, generator=generator) < 0.2] = -1
    positions = torch.rand(batch, kv_heads, tokens, generator=generator).argsort(-1)
    return tensors, lists.to(device), positions.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("shape", "block_size"), [((1, 1, 1, 1, 8), 16), ((2, 2, 1, 45, 24), 16), ((1, 3, 3, 70, 16), 32)]
)
def test_output_and_gradients(gpu_device: str, shape: Shape, block_size: int, dtype: torch.dtype) -> None:
    tensors, lists, positions = problem(shape, block_size, dtype, gpu_device)
    upstream = draw(*tensors[0].shape, seed=9, device=gpu_device, dtype=dtype)

    def run(function: str, kind: torch.dtype) -> list[Tensor]:
        q, k, v = (tensor.detach().to(kind).requires_grad_() for tensor in tensors)
        if function == "reference":
            out = block_sparse_attention_torch(q, k, v, lists, block_size, positions, shape[-1] ** -0.5)
        else:
            out = block_sparse_attention(q, k, v, lists, block_size=block_size, positions_BKT=positions)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), upstream.to(kind))]

    results = run("kernel", dtype), run("reference", dtype), run("reference", torch.float64)
    for actual, same_type, expected in zip(*results, strict=True):
        atol = 2e-6 if dtype == torch.float32 else 2e-3
        assert actual.dtype == dtype
        assert (actual.double() - expected).abs().max() <= 2 * (same_type.double() - expected).abs().max() + atol


def test_all_blocks_are_causal_attention(gpu_device: str) -> None:
    (q, k, v), _, _ = problem((1, 2, 1, 50, 16), 16, torch.float32, gpu_device)
    lists = torch.arange(4, device=gpu_device).expand(1, 1, 4, 4)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    actual = block_sparse_attention(q, k, v, lists, block_size=16)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_query_without_keys_gets_zeros(gpu_device: str) -> None:
    tensors, lists, _ = problem((1, 1, 1, 20, 16), 16, torch.float32, gpu_device)
    q, k, v = (tensor.requires_grad_() for tensor in tensors)
    out = block_sparse_attention(q, k, v, torch.full_like(lists, -1), block_size=16)
    assert out.eq(0).all()
    assert all(gradient.eq(0).all() for gradient in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("tokens", [60, pytest.param(64, marks=pytest.mark.full)])
def test_hashed_attention_of_one_round(gpu_device: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v), _, _ = problem((2, 4, 2, tokens, 16), 16, torch.float32, gpu_device)
    inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    table = rotations(3, 2, 16, 1, q.device)
    with force_torch():
        expected = lsh_attention(*inputs, table, 16)
        wanted = torch.autograd.grad(expected.square().sum(), inputs)
    monkeypatch.setattr("penjing.kernels.lsh_attention._Attend", None)  # the other way is not taken
    actual = lsh_attention(*inputs, table, 16)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(torch.autograd.grad(actual.square().sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_refusals() -> None:
    (q, k, v), lists, positions = problem((1, 2, 1, 20, 16), 16, torch.float32, "cpu")
    with pytest.raises(ValueError, match="block_size=48"):
        block_sparse_attention(q, k, v, lists, block_size=48)
    with pytest.raises(ValueError, match=r"key_blocks is \(1, 1, 2, 2\).*\(1, 1, 1\)"):
        block_sparse_attention(q, k, v, lists, block_size=32)
    with pytest.raises(ValueError, match=r"key blocks .* are outside −1 … 1"):
        block_sparse_attention(q, k, v, torch.full_like(lists, 2), block_size=16)
    with pytest.raises(ValueError, match="float16"):
        block_sparse_attention(q.half(), k, v, lists, block_size=16)
    with pytest.raises(ValueError, match="positions"):
        block_sparse_attention(q, k, v, lists, block_size=16, positions_BKT=positions[..., :5])
