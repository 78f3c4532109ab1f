"""The attention of a decoder layer, and causal attention among the tokens of a batch, without a cache.

Shapes: T tokens, E hidden, H heads, KV key-value heads, D head_dim; leading dimensions are free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.core.layers.short_conv import Before
from penjing.core.models.config import DecoderConfig
from penjing.core.models.norm import RMSNorm
from penjing.core.models.rope import yarn_magnitudes
from penjing.kernels.attention_gate import GateFunction, open_gate
from penjing.kernels.dispatch import gpu_kernels
from penjing.kernels.flash_attention import flash_attention, flash_attention_packed
from penjing.kernels.lsh_attention import lsh_attention, rotations
from penjing.kernels.rotary import apply_rotary
from penjing.kernels.scored_attention import scored_attention
from penjing.kernels.sliding_attention import sliding_attention


@dataclass(frozen=True)
class Attend:
    """How tokens reach those before them, wherever these are kept.

    Attributes:
        attention: (layer, q (…, T, H, D), k (…, T, KV, D), v (…, T, KV, D), sinks (H,) or None) → (…, T, H, D).
        before: what layers without attention read.
        kept: layer → keys and values of these tokens, where layers behind it read them, too.
    """

    attention: Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor]
    before: Before
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """(…, T, H, D) of q (…, T, H, D), k (…, T, KV, D) and v (…, T, KV, D); q and k are rotated. `sinks`, (H,), are
        a score more in each sum that attention divides by."""
        return self.attention(layer, q, k, v, sinks)


class Attention(nn.Module):
    """Projections, optional norms of queries and keys (Qwen3, OLMo 2; behind the rotation in Hunyuan) and of values
    (Gemma 4), rotation around an `Attend`, and an optional gate (Trinity, Laguna) or norm (BitNet) before the last
    projection."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.layer = layer
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(hidden, heads * config.head_dim, bias=config.attention_bias)
        self.keys_of = config.keys_of(layer)
        self.lends_keys = config.lends_keys(layer)
        self.has_keys = self.keys_of == layer
        if self.has_keys:
            self.k_proj = nn.Linear(hidden, kv_heads * config.head_dim, bias=config.attention_bias)
            self.v_proj = nn.Linear(hidden, kv_heads * config.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * config.head_dim, hidden, bias=config.attention_output_bias)
        if config.qk_norm:
            whole = config.qk_norm_over == "all"
            self.q_norm = RMSNorm(config.head_dim * (heads if whole else 1), config.rms_norm_eps)
            if self.has_keys:
                self.k_norm = RMSNorm(config.head_dim * (kv_heads if whole else 1), config.rms_norm_eps)
        normed = config.value_norm and self.has_keys
        self.v_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if normed else None
        self.g_proj = nn.Linear(hidden, config.gate_size, bias=False) if config.attention_gate is not None else None
        self.channels_of_gate = config.head_dim if config.attention_gate == "channel" else 1
        self.gate_function: GateFunction = config.attention_gate_function
        inner_norm = RMSNorm(heads * config.head_dim, config.rms_norm_eps) if config.inner_norms else None
        self.attn_sub_norm = inner_norm
        self.sinks = nn.Parameter(torch.zeros(heads)) if config.attention_sinks else None
        self.qk_norm = config.qk_norm
        self.whole_norm = config.qk_norm_over == "all"
        self.norm_rotated = config.qk_norm_rotated
        main = config.layer_rotary is None or config.layer_rotary[layer] == "main"
        self.rotated_scale = yarn_magnitudes(config.rope_scaling)[0] if main else 1.0

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        if self.rotated_scale != 1.0:
            cos, sin = cos * self.rotated_scale, sin * self.rotated_scale
        q = self._rotated(self.q_proj(x), "q_norm", cos, sin)
        if self.has_keys:
            k = self._rotated(self.k_proj(x), "k_norm", cos, sin)
            v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
            v = v if self.v_norm is None else self.v_norm(v)
        else:
            k, v = attend.kept[self.keys_of]
        if self.lends_keys:
            attend.kept[self.keys_of] = k, v
        attended = attend(self.layer, q, k, v, self.sinks)
        if self.g_proj is not None:
            gate = open_gate(self.g_proj(x), self.gate_function).unflatten(-1, (-1, self.channels_of_gate))
            attended = attended * gate.to(attended.dtype)
        attended = attended.flatten(-2)
        return self.o_proj(attended if self.attn_sub_norm is None else self.attn_sub_norm(attended))

    def _rotated(self, x: Tensor, norm: str, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries or keys (…, T, H · D) as heads, normed and rotated in the order of the network."""
        normed = getattr(self, norm) if self.qk_norm else None
        if normed is not None and self.whole_norm:
            x = normed(x)
        x = x.unflatten(-1, (-1, self.head_dim))
        if normed is not None and not self.whole_norm and not self.norm_rotated:
            x = normed(x)
        x = apply_rotary(x, cos, sin)
        return normed(x) if normed is not None and self.norm_rotated else x


def causal_attention(config: DecoderConfig, documents: Tensor | None = None) -> Attend:
    """The `Attend` without a cache: each token sees itself and, of the tokens before it, those that the layer's type
    lets it see.

    Args:
        documents: (…, T) int64, equal where neighbours are of one document; nothing sees beyond its own. Every document
            then runs by itself, so that attention costs what the documents cost, not what the row does.
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        leading = q.shape[:-3]
        scored = config.attention_cap is not None or sinks is not None
        if not scored and _on_gpu(config, layer, q, k, v):
            rows = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
            return flash_attention(*rows, window=config.layer_window(layer)).view(q.shape)
        q, k, v = (x.transpose(-3, -2).reshape(-1, x.shape[-2], x.shape[-3], x.shape[-1]) for x in (q, k, v))
        window = config.layer_window(layer)
        if scored:
            out = scored_attention(q, k, v, config.attention_cap, window, sinks)
        elif window is not None:
            out = sliding_attention(q, k, v, window)
        elif config.layer_type(layer) == "lsh_attention":
            lsh = config.lsh
            table = rotations((lsh.seed << 16) + layer, k.shape[1], k.shape[3], lsh.rounds, k.device)
            out = lsh_attention(q, k, v, table, lsh.chunk_size)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out = out.transpose(1, 2)
        return out.reshape(*leading, *out.shape[1:])

    if documents is None:
        return Attend(attend, _shifted)
    runs = _document_runs(documents)
    longest = max(size for _, size in runs)
    ends = torch.tensor([0, *(size for count, size in runs for _ in range(count))]).cumsum(0)
    ends = ends.to(documents.device, torch.int32)

    def attend_inside(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        if config.attention_cap is None and sinks is None and _on_gpu(config, layer, q, k, v):
            q_TH, k_TK, v_TK = (x.flatten(0, -3) for x in (q, k, v))
            window = config.layer_window(layer)
            out = flash_attention_packed(q_TH, k_TK, v_TK, ends, ends, longest, longest, window=window)
            return out.view(q.shape)
        sizes = [count * size for count, size in runs]
        done: list[Tensor] = []
        for run, *part in zip(runs, *(x.flatten(0, -3).split(sizes) for x in (q, k, v)), strict=True):
            q_run, k_run, v_run = (x.unflatten(0, run) for x in part)
            done.append(attend(layer, q_run, k_run, v_run, sinks).flatten(0, 1))
        return torch.cat(done).view(*q.shape[:-1], v.shape[-1])

    place = document_positions(documents)[..., None]

    def before_inside(layer: int, x: Tensor, count: int) -> list[Tensor]:
        shifted = zip(range(count, 0, -1), _shifted(layer, x, count), strict=True)
        return [torch.where(place >= distance, far, 0.0) for distance, far in shifted]

    return Attend(attend_inside, before_inside)


def _shifted(layer: int, x: Tensor, count: int) -> list[Tensor]:
    """The `Before` of (…, T, E) whose leading indices are sequences."""
    return [F.pad(x, (0, 0, distance, 0))[..., : x.shape[-2], :] for distance in range(count, 0, -1)]


def attend_last(
    config: DecoderConfig, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Attention of the last tokens, q (…, T, H, D), to keys and values (…, S, KV, D) of all so far, S ≥ T, which were
    kept; LSH layers attend fully, as they do when served. (…, T, H, D)."""
    leading, new, window = q.shape[:-3], q.shape[-3], config.layer_window(layer)
    if window is not None:
        k, v = (x[..., -(window + new - 1) :, :, :] for x in (k, v))
    q, k, v = (x.transpose(-3, -2).reshape(-1, x.shape[-2], x.shape[-3], x.shape[-1]) for x in (q, k, v))
    if config.attention_cap is not None or sinks is not None:
        out = scored_attention(q, k, v, config.attention_cap, window, sinks)
    else:
        query = torch.arange(k.shape[2] - new, k.shape[2], device=q.device)[:, None]
        key = torch.arange(k.shape[2], device=q.device)
        visible = key <= query if window is None else (key <= query) & (key > query - window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if new == 1 else visible, enable_gqa=True)
    out = out.transpose(1, 2)
    return out.reshape(*leading, *out.shape[1:])


def positions_and_attention(
    config: DecoderConfig, token_ids: Tensor, paths_NW: Tensor | None = None
) -> tuple[Tensor, Attend]:
    """Where each token stands in its sequence, int64 of the shape of `token_ids`, and what it attends to: itself and
    what comes before it.

    Sequences that begin alike, such as a prompt and the answers to it, can have their common tokens computed once. All
    tokens then stand in one row, and a table of paths says which of them each sequence is made of. What treats tokens
    one by one (projections, norms, MLPs, the head) has each once. Only attention sees sequences: queries, keys and
    values are laid out along the paths, attended to by whatever kind of attention a layer has, and the results are
    picked up again. A shared token has the same tokens before it in each sequence, so its output is the same in each,
    and its gradient is the sum of theirs.

    Args:
        token_ids: (…, T) int64; each leading index is a sequence, unless there are paths.
        paths_NW: (N, W) int64, the places in the flattened tokens of which N sequences are made, in order. Each place
            is in one of them at least, and in the same column wherever it is; shorter sequences repeat their last one.
    """
    attend = causal_attention(config)
    if paths_NW is None:
        return torch.arange(token_ids.shape[-1], device=token_ids.device).expand(token_ids.shape), attend
    flat, sequences = paths_NW.flatten(), paths_NW.shape
    order = torch.arange(len(flat), device=flat.device)
    first = torch.full((token_ids.numel(),), len(flat), dtype=torch.int64, device=flat.device)
    first = first.scatter_reduce(0, flat, order, "amin")  # the first place on a path of each token

    def attend_along(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        q_NW, k_NW, v_NW = (_rows(x.flatten(0, -3), flat).unflatten(0, sequences) for x in (q, k, v))
        out = attend(layer, q_NW, k_NW, v_NW, sinks).flatten(0, 1)
        return _rows(out, first).view(*q.shape[:-1], v.shape[-1])

    def before_along(layer: int, x: Tensor, count: int) -> list[Tensor]:
        x_NW = _rows(x.flatten(0, -2), flat).unflatten(0, sequences)
        return [_rows(far.flatten(0, 1), first).view(x.shape) for far in attend.before(layer, x_NW, count)]

    return (first % sequences[1]).view(token_ids.shape), Attend(attend_along, before_along)


def _rows(x: Tensor, places: Tensor) -> Tensor:
    # On processors the gradient of indexing goes element by element, and that of a selection row by row; on GPUs the
    # sum of a selection's gradient has no fixed order.
    return x.index_select(0, places) if x.device.type == "cpu" else x[places]


def _on_gpu(config: DecoderConfig, layer: int, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the Triton language computes the layer; it wants values as wide as keys."""
    exact = config.layer_type(layer) != "lsh_attention" and q.shape[-1] == v.shape[-1]
    return exact and gpu_kernels("flash_attention", q, k, v) is not None


def document_positions(documents: Tensor) -> Tensor:
    """(…, T) int64: the place of each token in its document, from 0; see `causal_attention`."""
    places = torch.arange(documents.shape[-1], device=documents.device).expand(documents.shape)
    return places - torch.where(_begins(documents), places, 0).cummax(-1).values


def _begins(documents: Tensor) -> Tensor:
    return torch.cat((torch.ones_like(documents[..., :1]), documents.diff(dim=-1)), -1) != 0


def _document_runs(documents: Tensor) -> list[tuple[int, int]]:
    """(count, tokens of each) of neighbouring documents of equal length, which run together."""
    flat = _begins(documents).flatten()
    ends = torch.cat((flat.nonzero().flatten()[1:], torch.tensor([flat.numel()], device=flat.device)))
    runs: list[tuple[int, int]] = []
    begin = 0
    for end in ends.tolist():
        size, begin = end - begin, end
        if runs and runs[-1][1] == size:
            runs[-1] = (runs[-1][0] + 1, size)
        else:
            runs.append((1, size))
    return runs
