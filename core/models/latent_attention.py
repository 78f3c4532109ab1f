"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434).

Keys and values of all heads are expanded from one vector of `kv_lora_rank` a token; each key ends in rotated dimensions
that all heads share. Shapes: T tokens, E hidden, H heads, D = qk_nope_head_dim + qk_rope_head_dim, R rotated
dimensions; leading dimensions are free. An `Attend` gets v with v_head_dim ≤ D.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.core.models.attention import Attend
from penjing.core.models.config import DecoderConfig
from penjing.core.models.norm import RMSNorm
from penjing.core.models.rope import yarn_magnitudes
from penjing.kernels.rotary import apply_rotary

EPS = 1e-6  # of the norms inside, whatever rms_norm_eps says: as in DeepSeek's code


def pad_values(attend: Attend) -> Attend:
    """An `Attend` over a cache that keeps keys and values of one size: v gets zeros up to D, its output is cut."""

    def padded(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        size, missing = v.shape[-1], k.shape[-1] - v.shape[-1]
        return attend(layer, q, k, F.pad(v, (0, missing)) if missing else v, sinks)[..., :size]

    return replace(attend, attention=padded)


class LatentAttention(nn.Module):
    """Projections down to the latent vectors and up again, and rotation, around an `Attend`."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        assert config.latent_attention is not None
        self.layer = layer
        self.config = latent = config.latent_attention
        hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        if latent.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, latent.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(latent.q_lora_rank, EPS)
            self.q_b_proj = nn.Linear(latent.q_lora_rank, heads * head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent.kv_lora_rank + latent.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(latent.kv_lora_rank, EPS)
        self.kv_b_proj = nn.Linear(
            latent.kv_lora_rank, heads * (latent.qk_nope_head_dim + latent.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * latent.v_head_dim, hidden, bias=False)
        self.num_heads = heads
        self.rotated_scale, self.query_scale = yarn_magnitudes(config.rope_scaling)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        latent = self.config
        q = self.q_proj(x) if latent.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_rotated = q.unflatten(-1, (self.num_heads, -1)).split(
            [latent.qk_nope_head_dim, latent.qk_rope_head_dim], dim=-1
        )
        compressed, k_rotated = self.kv_a_proj_with_mqa(x).split([latent.kv_lora_rank, latent.qk_rope_head_dim], -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(compressed)).unflatten(-1, (self.num_heads, -1))
        k_nope, v = expanded.split([latent.qk_nope_head_dim, latent.v_head_dim], dim=-1)
        q_rotated, k_rotated = self._rotate(q_rotated, cos, sin), self._rotate(k_rotated[..., None, :], cos, sin)
        q = torch.cat((q_nope, q_rotated), dim=-1)
        k = torch.cat((k_nope, k_rotated.expand(*k_nope.shape[:-1], -1)), dim=-1)
        if self.query_scale != 1.0:
            q = q * self.query_scale
        return self.o_proj(attend(self.layer, q, k, v).flatten(-2))

    def _rotate(self, x_THR: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.config.rope_interleave:  # pairs (2i, 2i + 1) → (i, i + R/2): q · k does not change
            x_THR = x_THR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        x_THR = apply_rotary(x_THR, cos, sin)
        return x_THR if self.rotated_scale == 1.0 else x_THR * self.rotated_scale
