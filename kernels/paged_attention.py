"""Causal attention over a paged key-value cache: grouped heads, sliding window, many sequences a call.

A row's result is bit-equal whatever shares the call. Rows are tiled by absolute position (query tiles of G × Q rows,
key tiles of TILE_KEYS), so each matrix product has one shape; the online softmax (Milakov and Gimelshein,
https://arxiv.org/abs/1805.02867) walks the key tiles in order, and a tile a row may not see leaves it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, takewhile

import torch

from penjing.kernels.cpu.kv_layout import LayerCache, check_cache, is_native
from penjing.kernels.dispatch import cpu_extension, gpu_kernels
from penjing.kernels.scored_attention import soft_cap_
from penjing.kernels.selected_attention import selected_attention_torch

TILE_KEYS = 128
TILE_ROWS = 16  # query positions × heads of a group, at most (or one position)

# (index of the key tile, number of problems) → keys and values, (problems or 1, TILE_KEYS, head_dim) float32
KeyTile = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


def paged_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_query_S1: torch.Tensor,
    context_len_S: torch.Tensor,
    block_table_SB: torch.Tensor,
    scale: float,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    selected_SN: torch.Tensor | None = None,
    cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the newest tokens of S sequences to their cached keys.

    Sequence s owns query rows cu_query[s] : cu_query[s + 1]; they are the last rows of its context_len[s] keys. A row
    at position p sees the keys p − window + 1 … p (0 … p without a window).

    Args:
        q_THD: (T, num_heads, head_dim) float32.
        k_cache, v_cache: (num_blocks, num_kv_heads, block_size, head_dim), floating or int8.
        cu_query_S1: (S + 1,) int32, 0 first, T last.
        context_len_S: (S,) int32, keys of each sequence, at least 1, its new tokens included.
        block_table_SB: (S, B) int32, block of the keys b × block_size …; entries no row sees are not read.
        scale: factor of the scores, usually head_dim ** −0.5.
        window: keys a row sees, itself included; None for all.
        k_scale, v_scale: (num_blocks, num_kv_heads, block_size) float32 of an INT8 cache, see `kv_layout`.
        selected_SN: (S, N) int32, with a window: blocks of each sequence, by their place in its row of the block table,
            whose keys before the window are seen too; −1 for none. A block stands once in a row and, where it holds
            keys before the window, has a page.
        cap: scores become cap × tanh(score / cap); not beside selected_SN.
        sinks_H: (num_heads,) float32, a score more in each sum that attention divides by; not beside selected_SN.

    On CUDA the Triton language computes it (pages of q's dtype or INT8, head sizes up to 256; torch does the rest) and
    the host does not wait: lengths are not checked there; a row beyond the block table, and one that sees a block id
    outside the cache, is NaN, a row without keys 0.

    Returns:
        (T, num_heads, head_dim), dtype of `q_THD`.

    Raises:
        ValueError: a wrong shape, dtype or length, an INT8 cache without scales, or a block id outside the cache.
    """
    check_cache(k_cache, v_cache, k_scale, v_scale)
    if selected_SN is not None:
        _check_selected(selected_SN, block_table_SB, window)
        if cap is not None or sinks_H is not None:
            raise ValueError("there are no caps and sinks where blocks are selected; leave them out, or selected_SN")
    gpu = gpu_kernels("paged_attention", q_THD, k_cache, cu_query_S1, context_len_S, block_table_SB)
    if gpu is not None:
        _check_shapes(q_THD, k_cache, cu_query_S1, context_len_S, block_table_SB, window)
        if cap is None and sinks_H is None and gpu.supports(q_THD, k_cache):
            lengths = cu_query_S1.contiguous(), context_len_S.contiguous(), block_table_SB
            return gpu.paged_attention(q_THD, k_cache, v_cache, *lengths, scale, window, k_scale, v_scale, selected_SN)
    cu_query, context_len = _check_sequences(q_THD, k_cache, cu_query_S1, context_len_S, block_table_SB, window)
    cache = LayerCache(k_cache, v_cache, k_scale, v_scale)
    if selected_SN is not None:
        assert window is not None
        _check_listed_once(selected_SN, block_table_SB.shape[1])
        return selected_attention_torch(q_THD, cache, cu_query, context_len, block_table_SB, scale, window, selected_SN)
    extension = cpu_extension(q_THD, k_cache, block_table_SB)
    if extension is not None and q_THD.dtype == torch.float32 and is_native(k_cache):
        lengths = cu_query_S1.contiguous(), context_len_S.contiguous(), block_table_SB.contiguous()
        return extension.paged_attention(
            q_THD.detach().contiguous(),
            *(k_cache, v_cache, *lengths, scale, window, k_scale, v_scale),
            cap=cap,
            sinks_H=None if sinks_H is None else sinks_H.detach().contiguous(),
        )
    return paged_attention_torch(q_THD, cache, cu_query, context_len, block_table_SB, scale, window, cap, sinks_H)


def paged_attention_torch(
    q_THD: torch.Tensor,
    cache: LayerCache,
    cu_query: list[int],
    context_len: list[int],
    block_table_SB: torch.Tensor,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_attention` on torch, after its checks; float32 inside, blocks that no row sees are not read."""
    out_THD = torch.empty_like(q_THD)
    tile_queries = max(1, TILE_ROWS // (q_THD.shape[1] // cache.k.shape[1]))
    short: list[_QueryTile] = []  # the only tile of its sequence: these share their matrix products
    for sequence, (start, end) in enumerate(pairwise(cu_query)):
        last = context_len[sequence] - 1
        first = last - (end - start) + 1
        tiles = [
            _QueryTile(sequence, tile * tile_queries, start, first, last)
            for tile in range(last // tile_queries, first // tile_queries - 1, -1)
            if start < end
        ]
        if len(tiles) == 1:
            short += tiles
        elif tiles:
            _attend(tiles, True, q_THD, out_THD, cache, block_table_SB, tile_queries, scale, window, cap, sinks_H)
    if short:
        short.sort(key=lambda tile: -tile.last)
        _attend(short, False, q_THD, out_THD, cache, block_table_SB, tile_queries, scale, window, cap, sinks_H)
    return out_THD


@dataclass(frozen=True)
class _Step:
    """One key tile of a walk; the problems come in falling order of their last positions."""

    first_key: int
    count: int  # leading problems that reach the tile
    clear: int  # leading problems whose every row sees all of it


@dataclass(frozen=True)
class _QueryTile:
    sequence: int
    base: int  # absolute position of the tile's first row, a multiple of the tile's size
    start: int  # row of q_THD that holds position `first`
    first: int  # positions of the sequence's new tokens
    last: int

    @property
    def lowest(self) -> int:
        return max(self.base, self.first)


def _attend(
    tiles: list[_QueryTile],
    one_sequence: bool,
    q_THD: torch.Tensor,
    out_THD: torch.Tensor,
    cache: LayerCache,
    block_table_SB: torch.Tensor,
    tile_queries: int,
    scale: float,
    window: int | None,
    cap: float | None,
    sinks_H: torch.Tensor | None,
) -> None:
    """Fill the rows of `out_THD` that `tiles` cover; they come in falling order of their last position."""
    device, (_, num_heads, head_dim), num_kv_heads = q_THD.device, q_THD.shape, cache.k.shape[1]
    group = num_heads // num_kv_heads
    fields = torch.tensor([[t.sequence, t.base, t.start, t.first, t.last] for t in tiles], device=device)
    sequence_I, base_I, start_I, first_I, last_I = fields.unbind(1)

    # Rows of a tile that are not new tokens repeat the nearest new one; their results are dropped.
    position_IQ = base_I[:, None] + torch.arange(tile_queries, device=device)
    new_IQ = (position_IQ >= first_I[:, None]) & (position_IQ <= last_I[:, None])
    position_IQ = position_IQ.clamp(first_I[:, None], last_I[:, None])
    row_IQ = start_I[:, None] + position_IQ - first_I[:, None]
    q = q_THD[row_IQ].to(torch.float32) * scale
    q = q.view(len(tiles), tile_queries, num_kv_heads, group, head_dim).transpose(1, 2)
    q = q.reshape(len(tiles), num_kv_heads, tile_queries * group, head_dim)
    position_IR = position_IQ.repeat_interleave(group, dim=1)

    keys = slice(0, 1) if one_sequence else slice(None)
    low_I = first_I[keys] - window + 1 if window is not None else torch.zeros_like(first_I[keys])
    begin = max(int(low_I.min()), 0) // TILE_KEYS
    pages = _Pages(cache, block_table_SB[sequence_I[keys]], low_I, last_I[keys], begin, tiles[0].last)
    highest = [min(t.base + tile_queries - 1, t.last) for t in tiles]
    steps = [
        _Step(
            first_key=tile * TILE_KEYS,
            count=sum(high >= tile * TILE_KEYS for high in highest),
            clear=sum(1 for _ in takewhile(lambda t, last=(tile + 1) * TILE_KEYS - 1: t.lowest >= last, tiles))
            if window is None
            else 0,
        )
        for tile in range(begin, tiles[0].last // TILE_KEYS + 1)
    ]
    sink_KR = None
    if sinks_H is not None:
        sink_KR = sinks_H.view(num_kv_heads, 1, group).expand(-1, tile_queries, -1).flatten(1)
    if one_sequence:
        sink_1R = [None] * num_kv_heads if sink_KR is None else sink_KR.split(1)
        heads = [
            _walk(q[:, head], position_IR, steps, pages.head(head), window, cap, sink_1R[head])
            for head in range(num_kv_heads)
        ]
        out = torch.stack(heads, dim=1)
    else:
        position_PR = position_IR.repeat_interleave(num_kv_heads, dim=0)
        steps = [_Step(s.first_key, s.count * num_kv_heads, s.clear * num_kv_heads) for s in steps]
        sink_PR = None if sink_KR is None else sink_KR.repeat(len(tiles), 1)
        out = _walk(q.flatten(0, 1), position_PR, steps, pages.all_heads(), window, cap, sink_PR)
    out = out.view(len(tiles), num_kv_heads, tile_queries, group, head_dim).transpose(1, 2)
    out_THD[row_IQ[new_IQ]] = out.reshape(len(tiles), tile_queries, num_heads, head_dim)[new_IQ].to(out_THD.dtype)


class _Pages:
    """Keys and values of some sequences, gathered a key tile at a time."""

    def __init__(
        self,
        cache: LayerCache,
        block_table_SB: torch.Tensor,
        low_S: torch.Tensor,
        last_S: torch.Tensor,
        begin: int,
        last: int,
    ):
        self.cache = cache
        num_blocks, self.num_kv_heads, block_size, _ = cache.k.shape
        position_K = torch.arange(begin * TILE_KEYS, (last // TILE_KEYS + 1) * TILE_KEYS, device=cache.k.device)
        # A key that no row sees is replaced by the last one, so that stale pages (NaN, freed ids) are never read.
        seen_SK = (position_K >= low_S[:, None]) & (position_K <= last_S[:, None])
        position_SK = torch.where(seen_SK, position_K, last_S[:, None])
        block_SK = block_table_SB.to(torch.int64).gather(1, position_SK // block_size)
        low, high = (int(value) for value in torch.aminmax(block_SK))
        if low < 0 or high >= num_blocks:
            raise ValueError(f"the block table holds block {low if low < 0 else high}; the cache has {num_blocks}")
        head_1H1 = torch.arange(self.num_kv_heads, device=cache.k.device)[None, :, None]
        row_SHK = (block_SK[:, None] * self.num_kv_heads + head_1H1) * block_size + (position_SK % block_size)[:, None]
        self.row_SHJK = row_SHK.unflatten(2, (-1, TILE_KEYS))

    def head(self, head: int) -> KeyTile:
        """Tile → (1, TILE_KEYS, head_dim) of the first sequence, for any number of query tiles."""
        return lambda tile, count: self._gather(self.row_SHJK[:1, head, tile])

    def all_heads(self) -> KeyTile:
        """Tile → (count, TILE_KEYS, head_dim) of the first count / num_kv_heads sequences."""
        return lambda tile, count: self._gather(self.row_SHJK[: count // self.num_kv_heads, :, tile].flatten(0, 1))

    def _gather(self, row_PK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.cache.gather(row_PK.reshape(-1))
        return k.unflatten(0, row_PK.shape), v.unflatten(0, row_PK.shape)


def _walk(
    q_PRD: torch.Tensor,
    position_PR: torch.Tensor,
    steps: list[_Step],
    key_tile: KeyTile,
    window: int | None,
    cap: float | None,
    sink_PR: torch.Tensor | None,
) -> torch.Tensor:
    """Online softmax of P problems over the key tiles `steps`; problem p has the rows position_PR[p]. A single row of
    `sink_PR` is that of all."""
    num_problems, num_rows, _ = q_PRD.shape
    peak = q_PRD.new_full((num_problems, num_rows, 1), -torch.inf)
    total, out = torch.zeros_like(peak), torch.zeros_like(q_PRD)
    for tile, step in enumerate(steps):
        count = step.count
        k, v = key_tile(tile, count)
        score = torch.bmm(q_PRD[:count], k.expand(count, -1, -1).transpose(1, 2))
        if cap is not None:
            soft_cap_(score, cap)
        if step.clear < count:
            position_K = torch.arange(step.first_key, step.first_key + TILE_KEYS, device=q_PRD.device)
            position_PR1 = position_PR[step.clear : count, :, None]
            hidden = position_K > position_PR1
            if window is not None:
                hidden |= position_K <= position_PR1 - window
            score[step.clear :].masked_fill_(hidden, -torch.inf)
        new_peak = torch.maximum(peak[:count], score.amax(-1, keepdim=True))
        # A row that has seen no key yet has peak −inf; 0 in its place keeps exp(−inf − peak) = 0.
        reference = new_peak.masked_fill(new_peak == -torch.inf, 0.0)
        weight = score.sub_(reference).exp_()
        decay = (peak[:count] - reference).exp_()
        total[:count].mul_(decay).add_(weight.sum(-1, keepdim=True))
        out[:count].mul_(decay).add_(torch.bmm(weight, v.expand(count, -1, -1)))
        peak[:count] = new_peak
    return out / (total if sink_PR is None else total + (sink_PR[..., None] - peak).exp())


def _check_selected(selected_SN: torch.Tensor, block_table_SB: torch.Tensor, window: int | None) -> None:
    if selected_SN.dim() != 2 or len(selected_SN) != len(block_table_SB) or selected_SN.dtype != torch.int32:
        raise ValueError(
            f"selected_SN is {tuple(selected_SN.shape)} {selected_SN.dtype}; int32 ({len(block_table_SB)}, N) is needed"
        )
    if window is None:
        raise ValueError("selected_SN adds blocks of keys to a window; give one")
    if selected_SN.device != block_table_SB.device:
        raise ValueError(f"selected_SN is on {selected_SN.device}, the block table on {block_table_SB.device}")


def _check_listed_once(selected_SN: torch.Tensor, num_table_blocks: int) -> None:
    for sequence, row in enumerate(selected_SN.tolist()):
        chosen = [block for block in row if block >= 0]
        if len({*chosen}) < len(chosen) or any(block >= num_table_blocks for block in chosen):
            raise ValueError(
                f"sequence {sequence} selects the blocks {row}; each once, from 0 to {num_table_blocks - 1}, is needed"
            )


def _check_shapes(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    cu_query_S1: torch.Tensor,
    context_len_S: torch.Tensor,
    block_table_SB: torch.Tensor,
    window: int | None,
) -> None:
    if (
        q_THD.dim() != 3
        or q_THD.shape[2] != k_cache.shape[3]
        or 0 in (q_THD.shape[1], k_cache.shape[1])
        or q_THD.shape[1] % k_cache.shape[1]
    ):
        raise ValueError(
            f"q has shape {tuple(q_THD.shape)}; (T, num_heads, {k_cache.shape[3]}) with num_heads a multiple of "
            f"{k_cache.shape[1]} is needed"
        )
    num_sequences = context_len_S.shape[0]
    for name, tensor, shape in (
        ("cu_query_S1", cu_query_S1, (num_sequences + 1,)),
        ("context_len_S", context_len_S, (num_sequences,)),
        ("block_table_SB", block_table_SB, (num_sequences, *block_table_SB.shape[1:])),
    ):
        if tensor.shape != shape or tensor.dtype != torch.int32:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)} and {tensor.dtype}; int32 {shape} is needed")
    if block_table_SB.dim() != 2:
        raise ValueError(f"block_table_SB has {block_table_SB.dim()} dimensions; (S, B) is needed")
    if window is not None and window < 1:
        raise ValueError(f"window={window}; at least 1 key, or None for all")


def _check_sequences(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    cu_query_S1: torch.Tensor,
    context_len_S: torch.Tensor,
    block_table_SB: torch.Tensor,
    window: int | None,
) -> tuple[list[int], list[int]]:
    _check_shapes(q_THD, k_cache, cu_query_S1, context_len_S, block_table_SB, window)
    cu_query, context_len = cu_query_S1.tolist(), context_len_S.tolist()
    if cu_query[0] != 0 or cu_query[-1] != q_THD.shape[0]:
        raise ValueError(f"cu_query runs from {cu_query[0]} to {cu_query[-1]}; 0 to T = {q_THD.shape[0]} is needed")
    room = block_table_SB.shape[1] * k_cache.shape[2]
    for sequence, context in enumerate(context_len):
        num_queries = cu_query[sequence + 1] - cu_query[sequence]
        if num_queries < 0 or context < max(num_queries, 1) or context > room:
            raise ValueError(
                f"sequence {sequence} has {num_queries} queries and {context} keys; "
                f"0 ≤ queries ≤ keys and 1 ≤ keys ≤ {room} (the block table) is needed"
            )
    return cu_query, context_len
