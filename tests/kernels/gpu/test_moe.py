"""Experts' products in the Triton language against one expert after the other in float64, with all gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penjing.kernels.moe import experts_mlp, experts_mlp_torch


def problem(
    tokens: int, hidden: int, inner: int, experts: int, chosen: int, dtype: torch.dtype, device: str
) -> tuple[list[Tensor], Tensor]:
    """x, shares, gates, ups and downs in one list, and the experts of each token."""
    generator = torch.Generator().manual_seed(tokens * 31 + experts)
    shapes = [(tokens, hidden), (tokens, chosen)]
    shapes += [(inner, hidden)] * (2 * experts) + [(hidden, inner)] * experts
    tensors = [(torch.randn(*shape, generator=generator) / shape[1] ** 0.5).to(device, dtype) for shape in shapes]
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, experts // 2] -= 1.0 if experts > chosen else 0.0  # an expert without tokens
    return tensors, scores.topk(chosen).indices.to(device)


def run(
    function: Callable[..., Tensor], tensors: list[Tensor], expert_TK: Tensor, experts: int, dtype: torch.dtype
) -> list[Tensor]:
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    x, share, weights = inputs[0], inputs[1], inputs[2:]
    out = function(x, share, expert_TK, weights[:experts], weights[experts : 2 * experts], weights[2 * experts :])
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.device, out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "experts", "chosen"), [(1, 16, 24, 1, 1), (21, 40, 33, 4, 2), (71, 33, 20, 2, 1)]
)
def test_output_and_gradients(
    gpu_device: str, tokens: int, hidden: int, inner: int, experts: int, chosen: int, dtype: torch.dtype
) -> None:
    tensors, expert_TK = problem(tokens, hidden, inner, experts, chosen, dtype, gpu_device)
    expected = run(experts_mlp_torch, tensors, expert_TK, experts, torch.float64)
    same_type = run(experts_mlp_torch, tensors, expert_TK, experts, dtype)
    actual = run(experts_mlp, tensors, expert_TK, experts, dtype)
    for a, s, e in zip(actual, same_type, expected, strict=True):
        assert a.dtype == dtype
        atol = 2e-6 if dtype == torch.float32 else 2e-3
        assert (a.double() - e).abs().max() <= 2 * (s.double() - e).abs().max() + atol


def test_the_reference_against_every_token_alone() -> None:
    tensors, expert_TK = problem(6, 8, 12, 4, 2, torch.float64, "cpu")
    x, share, weights = tensors[0], tensors[1], tensors[2:]
    out = experts_mlp(x, share, expert_TK, weights[:4], weights[4:8], weights[8:])
    for token in range(6):
        expected = torch.zeros(8, dtype=torch.float64)
        for part, expert in zip(share[token], expert_TK[token].tolist(), strict=True):
            gate, up = weights[expert] @ x[token], weights[4 + expert] @ x[token]
            expected += part * (weights[8 + expert] @ (gate * torch.sigmoid(gate) * up))
        torch.testing.assert_close(out[token], expected, rtol=1e-6, atol=1e-6)


def test_float32_shares_of_half_tokens(gpu_device: str) -> None:
    tensors, expert_TK = problem(9, 16, 16, 3, 2, torch.float16, gpu_device)
    share = tensors[1].float().requires_grad_()
    weights = tensors[2:]
    out = experts_mlp(tensors[0], share, expert_TK, weights[:3], weights[3:6], weights[6:])
    assert out.dtype == torch.float16
    assert torch.autograd.grad(out.sum(), share)[0].dtype == torch.float32


def test_refusals() -> None:
    tensors, expert_TK = problem(4, 8, 12, 2, 1, torch.float32, "cpu")
    x, share, weights = tensors[0], tensors[1], tensors[2:]
    parts = weights[:2], weights[2:4], weights[4:]
    with pytest.raises(ValueError, match=r"x has shape \(0, 8\)"):
        experts_mlp(x[:0], share[:0], expert_TK[:0], *parts)
    with pytest.raises(ValueError, match="int32"):
        experts_mlp(x, share, expert_TK.int(), *parts)
    with pytest.raises(ValueError, match=r"down of expert 0 has shape \(12, 8\)"):
        experts_mlp(x, share, expert_TK, parts[0], parts[1], parts[0])
    with pytest.raises(ValueError, match="there are 2"):
        experts_mlp(x, share, expert_TK + 2, *parts)
