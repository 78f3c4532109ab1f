"""Causal attention among tokens whose keys hash alike, after Reformer (Kitaev et al., https://arxiv.org/abs/2001.04451).

Every round sorts the tokens by the bucket of their key (angular hashing: the largest of ±rotated coordinates; stable,
so by position within a bucket) and cuts the order into chunks of m. A query sees the keys of its token's chunk and of
the chunk before it (the first chunk: of the last) that are not in its future: O(R · T · m) pairs, O(T log T) sorting.
The rounds together are one softmax over the union of their pairs: a pair that meets N times counts 1/N each time.

Reformer shares queries and keys, and masks a token's look at itself, so that a query's bucket holds its keys. Here a
token lies where its *key* hashes to and queries are free: equal projections give Reformer's pairs, grouped key heads
sort once for all their queries, and the checkpoint keeps the parameters of full attention.

What a chunk holds depends on all tokens of the sequence, the later ones too (as in Reformer): values never flow back
in time, but a longer text may bring a query other keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from penjing.kernels.block_sparse_attention import BLOCK_SIZES, block_sparse_attention
from penjing.kernels.dispatch import gpu_kernels

_FACTOR_BITS = 4  # one argmax tells 16 buckets apart; more bits take more of them: O(log T) work a token
_MAX_BITS = 32
_SCORES_AT_ONCE = 1 << 22  # 16 MiB in float32, of which backward holds three


def lsh_attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, rotations_KDRF: Tensor, chunk_size: int) -> Tensor:
    """Attention within hashed chunks, scaled by 1/√D; full causal attention up to 2 × chunk_size tokens, where it is
    the same. Differentiable; softmax in float32, memory O(T · (D + R)) between forward and backward.

    Args:
        q_BHTD: (B, H, T, D) floating.
        k_BKTD, v_BKTD: (B, KV, T, D) and (B, KV, T, any); H is a multiple of KV.
        rotations_KDRF: (KV, D, R rounds, F), from `rotations`.
        chunk_size: m, tokens.

    Returns:
        (B, H, T, D) of v's last size.

    Raises:
        ValueError: shapes that do not fit.
    """
    kv_heads, num_tokens, size = k_BKTD.shape[1:]
    fitting = k_BKTD.shape[:3] == v_BKTD.shape[:3] and q_BHTD.shape[1] % kv_heads == 0 and q_BHTD.shape[3] == size
    if not fitting or rotations_KDRF.shape[:2] != (kv_heads, size) or chunk_size < 1:
        raise ValueError(
            f"q has shape {tuple(q_BHTD.shape)}, k {tuple(k_BKTD.shape)}, v {tuple(v_BKTD.shape)}, rotations "
            f"{tuple(rotations_KDRF.shape)}, chunk_size {chunk_size}; (B, H, T, D), (B, KV, T, D), (B, KV, T, any), "
            "(KV, D, R, F) and 1 or more are needed"
        )
    if num_tokens <= 2 * chunk_size:
        return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True)
    if torch.is_autocast_enabled(q_BHTD.device.type):
        dtype = torch.get_autocast_dtype(q_BHTD.device.type)
        q_BHTD, k_BKTD, v_BKTD = q_BHTD.to(dtype), k_BKTD.to(dtype), v_BKTD.to(dtype)
    with torch.no_grad():
        factors = bucket_factors(num_tokens, chunk_size)
        order_BKRN, place_BKRN = _sort(hash_keys(k_BKTD, rotations_KDRF, factors), chunk_size)
    one_round = order_BKRN.shape[2] == 1 and chunk_size in BLOCK_SIZES and k_BKTD.shape == v_BKTD.shape
    if one_round and gpu_kernels("block_sparse_attention", q_BHTD, k_BKTD, v_BKTD) is not None:
        return _attend_in_blocks(q_BHTD, k_BKTD, v_BKTD, order_BKRN[:, :, 0], place_BKRN[:, :, 0], chunk_size)
    group = q_BHTD.shape[1] // kv_heads
    # One row for each sequence and key head, with the queries that share it.
    q_SGTD = q_BHTD.unflatten(1, (kv_heads, group)).flatten(0, 1).contiguous()
    k_STD, v_STD = k_BKTD.flatten(0, 1).contiguous(), v_BKTD.flatten(0, 1).contiguous()
    out_SGTD = _Attend.apply(q_SGTD, k_STD, v_STD, order_BKRN.flatten(0, 1), place_BKRN.flatten(0, 1), chunk_size)
    return out_SGTD.reshape(*q_BHTD.shape[:3], v_BKTD.shape[3])  # pyright: ignore[reportOptionalMemberAccess]


def rotations(seed: int, kv_heads: int, size: int, rounds: int, device: torch.device) -> Tensor:
    """(KV, D, R, F) float32 standard normals for any number of tokens, fixed by `seed` (counter-based: splitmix64,
    Box–Muller; nothing is drawn from torch's generators)."""
    width = _MAX_BITS // _FACTOR_BITS * 2 ** (_FACTOR_BITS - 1)
    shape = (kv_heads, size, rounds, width)
    counter = torch.arange(2 * math.prod(shape), device=device) + (seed << 32)
    z = counter * -7046029254386353131  # 0x9E3779B97F4A7C15
    z = (z ^ ((z >> 30) & (1 << 34) - 1)) * -4658895280553007687
    z = (z ^ ((z >> 27) & (1 << 37) - 1)) * -7723592293110705685
    z = z ^ ((z >> 31) & (1 << 33) - 1)
    uniform = (((z >> 11) & (1 << 53) - 1) + 0.5) / (1 << 53)
    radius, angle = uniform.to(torch.float64).chunk(2)
    return ((-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()).to(torch.float32).view(shape)


def bucket_factors(num_tokens: int, chunk_size: int) -> list[int]:
    """Buckets as a product of powers of two: about two for each chunk, as the paper has it."""
    bits = min(max((2 * (num_tokens // chunk_size)).bit_length() - 1, 1), _MAX_BITS)
    whole, rest = divmod(bits, _FACTOR_BITS)
    return [1 << _FACTOR_BITS] * whole + ([1 << rest] if rest else [])


def hash_keys(k_BKTD: Tensor, rotations_KDRF: Tensor, factors: list[int]) -> Tensor:
    """(B, KV, R, T) int64 buckets below the product of `factors`: each takes factor / 2 rotated coordinates x and is
    the argmax of (x, −x)."""
    wide, table = k_BKTD.to(torch.float32), rotations_KDRF.to(torch.float32)
    buckets, scale, column = torch.zeros((), dtype=torch.int64, device=wide.device), 1, 0
    for factor in factors:
        part = table[..., column : column + factor // 2]
        rotated = torch.einsum("bktd,kdrf->bkrtf", wide, part)
        buckets = buckets + scale * torch.cat((rotated, -rotated), -1).argmax(-1)
        scale, column = scale * factor, column + factor // 2
    return buckets


def _sort(buckets_BKRT: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """order (B, KV, R, N) int64: the token at each place, N a multiple of chunk_size (tokens T … N − 1 do not exist and
    lie last); place (B, KV, R, N) int64: the place of each token."""
    padding = -buckets_BKRT.shape[-1] % chunk_size
    order = F.pad(buckets_BKRT, (0, padding), value=1 << _MAX_BITS).argsort(dim=-1, stable=True)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return order, torch.empty_like(order).scatter_(-1, order, places)


def _attend_in_blocks(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, order_BKN: Tensor, place_BKN: Tensor, chunk_size: int
) -> Tensor:
    """One round on a GPU: tokens are brought into the order of their buckets, where chunks are blocks."""
    num_tokens, num_chunks = k_BKTD.shape[2], order_BKN.shape[2] // chunk_size
    index = order_BKN.clamp(max=num_tokens - 1)  # what does not exist reads the last token; nobody sees it
    chunk = torch.arange(num_chunks, device=order_BKN.device)
    lists = torch.stack((chunk, (chunk - 1) % num_chunks), -1).expand(*order_BKN.shape[:2], -1, -1)
    q, k, v = (_of_each_head(x, index) for x in (q_BHTD, k_BKTD, v_BKTD))
    out = block_sparse_attention(q, k, v, lists, block_size=chunk_size, positions_BKT=order_BKN)
    return _of_each_head(out, place_BKN[..., :num_tokens])


def _of_each_head(x_BHTD: Tensor, index_BKN: Tensor) -> Tensor:
    """Rows of each head by the index of its key head: (B, H, N, D)."""
    index_BHN = index_BKN.repeat_interleave(x_BHTD.shape[1] // index_BKN.shape[1], 1)
    return x_BHTD.gather(2, index_BHN[..., None].expand(-1, -1, -1, x_BHTD.shape[3]))


class _Attend(torch.autograd.Function):
    """FlashAttention's bookkeeping: output and log-sum-exp of each row are kept, probabilities are recomputed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, order: Tensor, place: Tensor, chunk_size: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, group, num_tokens, _ = q.shape
        out = torch.empty(rows, group, num_tokens, v.shape[-1], dtype=v.dtype, device=v.device)
        total = torch.empty(rows, group, num_tokens, device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            for piece in _pieces(rows, group * order.shape[-1] * 2 * chunk_size):
                done, log_sum = None, None
                for one in _rounds(order[piece], place[piece], chunk_size, num_tokens):
                    score = one.scores(q[piece], k[piece])
                    log_round = score.logsumexp(-1, keepdim=True)
                    value = torch.exp(score - log_round).to(v.dtype) @ one.with_chunk_before(v[piece])
                    value, log_round = one.queries_back(value.to(torch.float32)), one.queries_back(log_round)
                    if done is None or log_sum is None:
                        done, log_sum = value, log_round
                    else:
                        both = torch.logaddexp(log_sum, log_round)
                        done = done * torch.exp(log_sum - both) + value * torch.exp(log_round - both)
                        log_sum = both
                assert done is not None
                assert log_sum is not None
                out[piece], total[piece] = done.to(v.dtype), log_sum.squeeze(-1)
        ctx.save_for_backward(q, k, v, order, place, out, total)
        ctx.chunk_size = chunk_size
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, order, place, out, total = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        delta = (gradient.to(torch.float32) * out.to(torch.float32)).sum(-1, keepdim=True)
        scale = q.shape[-1] ** -0.5
        with torch.autocast(q.device.type, enabled=False):
            for piece in _pieces(q.shape[0], q.shape[1] * order.shape[-1] * 2 * ctx.chunk_size):
                for one in _rounds(order[piece], place[piece], ctx.chunk_size, q.shape[2]):
                    probability = torch.exp(one.scores(q[piece], k[piece]) - one.queries(total[piece][..., None]))
                    grad_out = one.queries(gradient[piece])
                    grad_v[piece] += one.keys_back(probability.to(v.dtype).transpose(-1, -2) @ grad_out)
                    change = (grad_out @ one.with_chunk_before(v[piece]).transpose(-1, -2)).to(torch.float32)
                    change = (probability * (change - one.queries(delta[piece])) * scale).to(q.dtype)
                    grad_q[piece] += one.queries_back(change @ one.with_chunk_before(k[piece]))
                    grad_k[piece] += one.keys_back(change.transpose(-1, -2) @ one.queries(q[piece]))
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


class _Round:
    """One round of a piece: moves tensors between the order of tokens and that of chunks.

    S rows (sequence × key head), G queries a key, T tokens, N places, C chunks of m.
    """

    def __init__(self, order_SRN: Tensor, place_SRN: Tensor, index: int, chunk_size: int, num_tokens: int) -> None:
        self._order = order_SRN[:, index]
        self._place = place_SRN[:, index, :num_tokens]
        self._places = place_SRN
        self._size = chunk_size

    def scores(self, q_SGTD: Tensor, k_STD: Tensor) -> Tensor:
        """(S, C, G · m, 2m) float32: scaled products − log N, N the rounds in which the pair meets; −∞ for the
        future."""
        score = (self.queries(q_SGTD) @ self.with_chunk_before(k_STD).transpose(-1, -2)).to(torch.float32)
        num_tokens = k_STD.shape[1]
        bias = self._pairs(
            self._order, lambda query, key: torch.where((query >= key) & (query < num_tokens), 0.0, -torch.inf)
        )
        if self._places.shape[1] > 1:
            num_chunks = self._order.shape[1] // self._size
            met = torch.zeros((), dtype=torch.int8, device=bias.device)
            for place_SN in self._places.unbind(1):
                chunk_SN = place_SN.gather(-1, self._order).to(torch.int32) // self._size
                met = met + self._pairs(chunk_SN, lambda query, key: (query - key) % num_chunks <= 1)
            bias = bias - met.to(torch.float32).log()
        return score.mul_(q_SGTD.shape[-1] ** -0.5).add_(bias.repeat(1, 1, q_SGTD.shape[1], 1))

    def queries(self, x_SGTD: Tensor) -> Tensor:
        """→ (S, C, G · m, D)."""
        index = self._order.clamp(max=x_SGTD.shape[2] - 1)  # what does not exist reads the last token; nobody sees it
        return _take(x_SGTD, index).unflatten(2, (-1, self._size)).transpose(1, 2).flatten(2, 3)

    def queries_back(self, x_SCQD: Tensor) -> Tensor:
        """(S, C, G · m, D) → (S, G, T, D) in the order of tokens."""
        return _take(x_SCQD.unflatten(2, (-1, self._size)).transpose(1, 2).flatten(2, 3), self._place)

    def with_chunk_before(self, x_STD: Tensor) -> Tensor:
        """→ (S, C, 2m, D): the chunk before, then the own one."""
        index = self._order.clamp(max=x_STD.shape[1] - 1)
        x_SCMD = _take(x_STD[:, None], index)[:, 0].unflatten(1, (-1, self._size))
        return torch.cat((x_SCMD.roll(1, 1), x_SCMD), 2)

    def keys_back(self, x_SCLD: Tensor) -> Tensor:
        """(S, C, 2m, D) gradients of `with_chunk_before` → (S, T, D)."""
        before, own = x_SCLD.chunk(2, 2)
        return _take((own + before.roll(-1, 1)).flatten(1, 2)[:, None], self._place)[:, 0]

    def _pairs(self, x_SN: Tensor, relation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """(S, C, m, 2m): `relation` of each query's value and each of its keys'."""
        own = x_SN.unflatten(-1, (-1, self._size))
        return relation(own[..., None], torch.cat((own.roll(1, 1), own), -1)[..., None, :])


def _take(x_SGTD: Tensor, index_SN: Tensor) -> Tensor:
    """(S, G, N, D): whole rows are copied, which a gather with an expanded index does element by element."""
    rows, group, num_tokens, size = x_SGTD.shape
    begin = torch.arange(0, rows * group * num_tokens, num_tokens, device=index_SN.device).view(rows, group, 1)
    index = (begin + index_SN[:, None]).flatten()
    return x_SGTD.reshape(-1, size).index_select(0, index).view(rows, group, -1, size)


def _rounds(order_SRN: Tensor, place_SRN: Tensor, chunk_size: int, num_tokens: int) -> list[_Round]:
    return [_Round(order_SRN, place_SRN, index, chunk_size, num_tokens) for index in range(order_SRN.shape[1])]


def _pieces(rows: int, scores_per_row: int) -> list[slice]:
    size = max(1, _SCORES_AT_ONCE // scores_per_row)
    return [slice(begin, begin + size) for begin in range(0, rows, size)]
