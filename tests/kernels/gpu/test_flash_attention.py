"""Attention and its gradients against a 64-bit reference: odd shapes, grouped heads, windows, packed sequences."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from penjing.kernels.flash_attention import flash_attention, flash_attention_packed
from penjing.kernels.gpu.flash_attention import precision_of
from tests.kernels.gpu.error_rule import assert_as_close_as_torch

gpu = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16]
if gpu:
    DTYPES.append(torch.bfloat16)  # wrong under the interpreter


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> Tensor:
    """(T, H, D) and (S, G, D) → (T, H, D), written out, in the tensors' dtype; a row that sees nothing gives zeros."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    score = torch.einsum("thd,shd->hts", q, k) * q.shape[2] ** -0.5
    position = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
    key = torch.arange(len(k), device=q.device)[None]
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    if causal:
        seen = key <= position
        if window is not None:
            seen &= key > position - window
    weight = torch.softmax(score.masked_fill(~seen, -1e4), -1) * seen
    return torch.einsum("hts,shd->thd", weight, v)


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def gradients(out: Tensor, grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, inputs, grad)]


BATCH = 2
NAMES = ("out", "dq", "dk", "dv")
SHAPES = [  # T, S, H, G, D, causal, window
    (1, 1, 1, 1, 16, True, None),
    (113, 203, 2, 1, 16, True, None),
    (103, 70, 2, 1, 32, True, None),
    (64, 64, 2, 2, 64, False, None),
    (47, 101, 3, 1, 24, False, None),
    (239, 1, 2, 2, 16, True, None),
    (1, 239, 2, 1, 16, True, None),
    (66, 66, 2, 1, 32, True, 1),
    (80, 131, 2, 1, 16, True, 37),
    (131, 80, 2, 1, 16, True, 70),
    (40, 40, 2, 2, 96, True, None),
]


# Tiles of float32 are smaller, and the interpreter takes its time for each of them.
IN_FLOAT32 = (0, 3, 7, 8)
CASES = [
    pytest.param(
        shape, dtype, id=f"{shape}-{dtype}",
        marks=() if gpu or dtype == torch.float16 or number in IN_FLOAT32 else pytest.mark.full,
    )
    for number, shape in enumerate(SHAPES)
    for dtype in DTYPES
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_attention_and_gradients(gpu_device: str, shape: tuple, dtype: torch.dtype) -> None:
    num_queries, num_keys, heads, kv_heads, head_dim, causal, window = shape
    generator = torch.Generator().manual_seed(sum(shape[:5]))
    q = random((BATCH, num_queries, heads, head_dim), dtype, gpu_device, generator)
    k, v = (random((BATCH, num_keys, kv_heads, head_dim), dtype, gpu_device, generator) for _ in range(2))
    grad = random(q.shape, dtype, gpu_device, generator).detach()
    found = gradients(flash_attention(q, k, v, causal=causal, window=window), grad, q, k, v)

    def explicit(dtype: torch.dtype) -> list[Tensor]:
        q_, k_, v_ = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
        rows = [explicit_attention(*row, causal, window) for row in zip(q_, k_, v_, strict=True)]
        return gradients(torch.stack(rows), grad.to(dtype), q_, k_, v_)

    for name, mine, same, exact in zip(NAMES, found, explicit(dtype), explicit(torch.double), strict=True):
        assert_as_close_as_torch(name, mine, same, exact)


def test_float32_is_shortened_where_torch_shortens_its_own(gpu_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of TF32 have 10 bits behind the point; the interpreter computes them in float32."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (random((1, 70, 2, 64), torch.float32, gpu_device, generator) for _ in range(3))
    grad = random(q.shape, torch.float32, gpu_device, generator).detach()
    exact = gradients(flash_attention(q, k, v), grad, q, k, v)
    assert precision_of(torch.float32) == "ieee"
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    assert [precision_of(dtype) for dtype in (torch.float32, torch.bfloat16)] == ["tf32", "ieee"]
    for name, mine, wanted in zip(NAMES, gradients(flash_attention(q, k, v), grad, q, k, v), exact, strict=True):
        largest = (mine - wanted).abs().max().item()
        assert largest <= 5e-3 * wanted.abs().max().item(), name
        assert largest > 1e-6 or gpu_device == "cpu"  # nothing else would be as near


@pytest.mark.parametrize("window", [pytest.param(None, marks=() if gpu else pytest.mark.full), 19])
def test_packed_sequences(gpu_device: str, window: int | None) -> None:
    lengths_q, lengths_k = [0, 33, 1, 40, 0, 5], [0, 33, 35, 60, 7, 0]
    generator = torch.Generator().manual_seed(0)
    q = random((sum(lengths_q), 4, 16), torch.float32, gpu_device, generator)
    k, v = (random((sum(lengths_k), 2, 16), torch.float32, gpu_device, generator) for _ in range(2))
    cu_query, cu_key = ([0, *accumulate(lengths)] for lengths in (lengths_q, lengths_k))
    grad = random(q.shape, torch.float32, gpu_device, generator).detach()
    lengths = [torch.tensor(x, dtype=torch.int32, device=gpu_device) for x in (cu_query, cu_key)]
    found = gradients(flash_attention_packed(q, k, v, lengths[0], lengths[1], 40, 60, window=window), grad, q, k, v)

    def explicit(dtype: torch.dtype) -> list[Tensor]:
        q_, k_, v_ = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
        rows = [
            explicit_attention(q_[a:b], k_[c:d], v_[c:d], True, window)
            for (a, b), (c, d) in zip(pairwise(cu_query), pairwise(cu_key), strict=True)
        ]
        return gradients(torch.cat(rows), grad.to(dtype), q_, k_, v_)

    exact = explicit(torch.double)
    for name, mine, same, reference in zip(NAMES, found, explicit(torch.float32), exact, strict=True):
        assert_as_close_as_torch(name, mine, same, reference)


def test_a_row_does_not_depend_on_the_batch(gpu_device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (random((3, 50, 2, 16), torch.float16, gpu_device, generator).detach() for _ in range(3))
    whole = flash_attention(q, k, v)
    for row in range(3):
        assert torch.equal(flash_attention(q[row : row + 1], k[row : row + 1], v[row : row + 1])[0], whole[row])


def test_strided_and_misaligned_tensors(gpu_device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    packed = random((1, 40, 3, 2, 16), torch.float32, gpu_device, generator).detach()
    q, k, v = packed.unbind(2)  # as one projection makes them
    expected = flash_attention(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(flash_attention(q, k, v), expected)
    shifted = torch.empty(q.numel() + 1, device=gpu_device)[1:].view(q.shape).copy_(q)
    assert torch.equal(flash_attention(shifted, k, v), expected)
    transposed = q.transpose(1, 3).contiguous().transpose(1, 3)  # last stride not 1
    assert torch.equal(flash_attention(transposed, k, v), expected)


@pytest.mark.parametrize("shape", [(0, 5, 2, 16), (2, 0, 2, 16)])
def test_nothing_to_attend(gpu_device: str, shape: tuple[int, ...]) -> None:
    q = torch.zeros(shape, device=gpu_device, requires_grad=True)
    flash_attention(q, q, q).sum().backward()
    assert q.grad is not None
    assert q.grad.shape == shape


def test_no_keys_give_zeros(gpu_device: str) -> None:
    q = torch.ones(1, 3, 2, 16, device=gpu_device)
    none = torch.ones(1, 0, 2, 16, device=gpu_device)
    assert torch.equal(flash_attention(q, none, none), torch.zeros_like(q))


@pytest.mark.parametrize("head_dim", [20, 264])
def test_other_head_sizes_and_dtypes_run_on_torch(gpu_device: str, head_dim: int) -> None:
    q = torch.randn(1, 5, 2, head_dim, device=gpu_device, dtype=torch.double, requires_grad=True)
    expected = explicit_attention(q[0], q[0], q[0], True, None)
    torch.testing.assert_close(flash_attention(q, q, q)[0], expected)
    assert torch.autograd.gradcheck(lambda x: flash_attention(x, x, x), (q,), fast_mode=True)


def bad(**changes: object) -> dict:
    return {"q": torch.zeros(1, 4, 4, 16), "k": torch.zeros(1, 4, 2, 16), "options": {}} | changes


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (bad(k=torch.zeros(1, 4, 2, 8)), "one head_dim"),
        (bad(k=torch.zeros(1, 4, 3, 16)), "4 query heads and 3"),
        (bad(k=torch.zeros(2, 4, 2, 16)), "batch 1, k 2"),
        (bad(k=torch.zeros(1, 4, 2, 16, dtype=torch.half)), "one floating dtype"),
        (bad(options={"window": 0}), "window=0"),
        (bad(options={"window": 4, "causal": False}), "needs causal"),
        (bad(options={"scale": 0.0}), "positive"),
    ],
)
def test_bad_input_is_named(case: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attention(case["q"], case["k"], case["k"], **case["options"])


@pytest.mark.parametrize(
    ("cu_query", "longest", "message"),
    [([0, 3], 4, "rise from 0 to 4"), ([0, 5, 4], 4, "rise"), ([0, 4], 3, "max_query=3"), ([0.0, 4.0], 4, "int32")],
)
def test_bad_lengths_are_named(cu_query: list, longest: int, message: str) -> None:
    q = torch.zeros(4, 2, 16)
    lengths = torch.tensor(cu_query, dtype=None if isinstance(cu_query[0], float) else torch.int32)
    with pytest.raises(ValueError, match=message):
        flash_attention_packed(q, q, q, lengths, lengths, longest, 4)
