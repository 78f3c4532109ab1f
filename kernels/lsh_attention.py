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
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from penjing.kernels.block_sparse_attention import BLOCK_SIZES, block_sparse_attention
from penjing.kernels.dispatch import SCORES_AT_ONCE, autocast_together, gpu_kernels

_FACTOR_BITS = 4  # one argmax tells 16 buckets apart; more bits take more of them: O(log T) work a token
_MAX_BITS = 32


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
    q_BHTD, k_BKTD, v_BKTD = autocast_together(q_BHTD, k_BKTD, v_BKTD)
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
        places, one_round = order.shape[2], order.shape[1] == 1
        out, total = None, None
        with torch.autocast(q.device.type, enabled=False):
            for round_ in range(order.shape[1]):
                value = q.new_empty(rows, group, places, v.shape[-1], dtype=v.dtype if one_round else _wide(v))
                log_sum = q.new_empty(rows, group, places, 1, dtype=_wide(q))
                for piece in _pieces(q, order, place, round_, chunk_size):
                    score = piece.scores(q, k)
                    log_piece = score.logsumexp(-1, keepdim=True)
                    piece.put(value, score.sub_(log_piece).exp_().to(v.dtype) @ piece.keys(v))
                    piece.put(log_sum, log_piece)
                value, log_sum = (_take(x, place[:, round_, :num_tokens]) for x in (value, log_sum))
                if out is None or total is None:
                    out, total = value, log_sum
                else:
                    both = torch.logaddexp(total, log_sum)
                    out = out.mul_(torch.exp(total - both)).add_(value.mul_(torch.exp(log_sum - both)))
                    total = both
        assert out is not None
        assert total is not None
        out = out.to(v.dtype)
        ctx.save_for_backward(q, k, v, order, place, out, total)
        ctx.chunk_size = chunk_size
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, order, place, out, total = ctx.saved_tensors
        gradient = gradient.contiguous()  # or each piece would copy all of it
        rows, group, num_tokens, size = q.shape
        places, one_round = order.shape[2], order.shape[1] == 1
        gradients: list[Tensor] | None = None
        with torch.autocast(q.device.type, enabled=False):
            for round_ in range(order.shape[1]):
                grad_q = q.new_empty(rows, group, places, size, dtype=q.dtype if one_round else _wide(q))
                grad_k = k.new_zeros(rows, places, size, dtype=_wide(k))
                grad_v = v.new_zeros(rows, places, v.shape[-1], dtype=_wide(v))
                for piece in _pieces(q, order, place, round_, ctx.chunk_size):
                    probability = piece.scores(q, k).sub_(piece.queries(total)).exp_()
                    grad_out = piece.queries(gradient)
                    piece.add_keys(grad_v, probability.to(v.dtype).mT @ grad_out)
                    change = (grad_out @ piece.keys(v).mT).to(probability.dtype)
                    change -= (grad_out.to(change.dtype) * piece.queries(out)).sum(-1, keepdim=True)
                    change = change.mul_(probability).mul_(size**-0.5).to(q.dtype)
                    piece.put(grad_q, change @ piece.keys(k))
                    piece.add_keys(grad_k, change.mT @ piece.queries(q))
                index = place[:, round_, :num_tokens]
                grad_k, grad_v = (_take(x[:, None], index)[:, 0] for x in (grad_k, grad_v))
                found = [_take(grad_q, index), grad_k, grad_v]
                gradients = found if gradients is None else [x.add_(y) for x, y in zip(gradients, found, strict=True)]
        assert gradients is not None
        return *(x.to(like.dtype) for x, like in zip(gradients, (q, k, v), strict=True)), None, None, None


class _Piece:
    """Some chunks of one round: moves tensors from the order of tokens to that of places, where chunks lie together.

    S rows (sequence × key head), G queries a key, T tokens, N places, C chunks of m.
    """

    def __init__(
        self, rows: slice, chunks: range, order_SRN: Tensor, place_SRN: Tensor, round_: int, size: int
    ) -> None:
        self._rows = rows
        self._chunks = chunks
        self._size = size
        self._order = order_SRN[rows, round_]
        self._places = place_SRN[rows]

    def scores(self, q_SGTD: Tensor, k_STD: Tensor) -> Tensor:
        """(S, C, G · m, 2m) float32 or wider: scaled products − log N, N the rounds in which the pair meets; −∞ for
        the future."""
        score = (self.queries(q_SGTD) @ self.keys(k_STD).mT).to(_wide(q_SGTD))
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
        each_head = score.mul_(q_SGTD.shape[-1] ** -0.5).unflatten(2, (-1, self._size))
        each_head += bias[:, :, None]
        return score

    def queries(self, x_SGTD: Tensor) -> Tensor:
        """→ (S, C, G · m, D)."""
        index = self._own(self._order).clamp(max=x_SGTD.shape[2] - 1)  # what does not exist reads the last token
        return _take(x_SGTD[self._rows], index).unflatten(2, (-1, self._size)).transpose(1, 2).flatten(2, 3)

    def keys(self, x_STD: Tensor) -> Tensor:
        """→ (S, C, 2m, D): the chunk before, then the own one."""
        index = self._with_chunk_before(self._order).clamp(max=x_STD.shape[1] - 1)
        x_SCMD = _take(x_STD[self._rows, None], index)[:, 0].unflatten(1, (-1, self._size))
        return torch.cat((x_SCMD[:, :-1], x_SCMD[:, 1:]), 2)

    def put(self, out_SGND: Tensor, x_SCQD: Tensor) -> None:
        """Write (S, C, G · m, D) to its places."""
        x = x_SCQD.unflatten(2, (-1, self._size)).transpose(1, 2)
        self._own(out_SGND[self._rows], 2).unflatten(2, (-1, self._size)).copy_(x)

    def add_keys(self, out_SND: Tensor, x_SCLD: Tensor) -> None:
        """Add the gradients of `keys`, (S, C, 2m, D), to their places."""
        before, own = x_SCLD.chunk(2, 2)
        out_SCMD = out_SND[self._rows].unflatten(1, (-1, self._size))
        out_SCMD[:, self._chunks.start : self._chunks.stop] += own
        if self._chunks.start == 0:
            out_SCMD[:, -1] += before[:, 0]
            before = before[:, 1:]
        first = max(self._chunks.start - 1, 0)
        out_SCMD[:, first : first + before.shape[1]] += before

    def _pairs(self, x_SN: Tensor, relation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """(S, C, m, 2m): `relation` of each query's value and each of its keys'."""
        both = self._with_chunk_before(x_SN).unflatten(-1, (-1, self._size))
        return relation(both[:, 1:, :, None], torch.cat((both[:, :-1], both[:, 1:]), -1)[..., None, :])

    def _own(self, x: Tensor, dim: int = 1) -> Tensor:
        return x.narrow(dim, self._chunks.start * self._size, len(self._chunks) * self._size)

    def _with_chunk_before(self, x_SN: Tensor) -> Tensor:
        if self._chunks.start:
            return x_SN[:, (self._chunks.start - 1) * self._size : self._chunks.stop * self._size]
        return torch.cat((x_SN[:, -self._size :], self._own(x_SN)), 1)


def _take(x_SGTD: Tensor, index_SN: Tensor) -> Tensor:
    """(S, G, N, D): whole rows are copied, which a gather with an expanded index does element by element."""
    rows, group, num_tokens, size = x_SGTD.shape
    begin = torch.arange(0, rows * group * num_tokens, num_tokens, device=index_SN.device).view(rows, group, 1)
    index = (begin + index_SN[:, None]).flatten()
    return x_SGTD.reshape(-1, size).index_select(0, index).view(rows, group, -1, size)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _pieces(q_SGTD: Tensor, order_SRN: Tensor, place_SRN: Tensor, round_: int, chunk_size: int) -> Iterator[_Piece]:
    """Several rows at once, or a part of one."""
    rows, num_chunks = order_SRN.shape[0], order_SRN.shape[2] // chunk_size
    scores = SCORES_AT_ONCE.get(q_SGTD.device.type, SCORES_AT_ONCE["cpu"])
    most = scores // (q_SGTD.shape[1] * 2 * chunk_size**2)  # chunks
    step_rows, step_chunks = max(1, most // num_chunks), min(max(1, most), num_chunks)
    for row in range(0, rows, step_rows):
        for chunk in range(0, num_chunks, step_chunks):
            chunks = range(chunk, min(chunk + step_chunks, num_chunks))
            yield _Piece(slice(row, row + step_rows), chunks, order_SRN, place_SRN, round_, chunk_size)
