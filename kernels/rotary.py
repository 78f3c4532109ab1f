"""Rotary position embedding (Su et al., https://arxiv.org/abs/2104.09864), half-rotation layout.

Dimension i is paired with i + D/2, as in Hugging Face checkpoints.
"""

from __future__ import annotations

import torch

from penjing.kernels.cpu.kv_layout import check_cache
from penjing.kernels.dispatch import gpu_kernels
from penjing.kernels.kv_cache import write_kv


def rotary_cos_sin(
    inverse_frequency_F: torch.Tensor, positions: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position × frequency, each (…, T, F) float32, times `scale`, by which what they rotate grows;
    positions (…, T) integer, F = head_dim / 2."""
    angle = positions.to(torch.float32)[..., None] * inverse_frequency_F
    cos, sin = angle.cos(), angle.sin()
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def apply_rotary(x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    """Rotate each head of each token.

    Args:
        x_THD: (…, T, heads, head_dim) floating.
        cos_TF, sin_TF: (…, T, head_dim / 2), from `rotary_cos_sin`.

    Returns:
        The shape and dtype of `x_THD`.

    Raises:
        ValueError: shapes that do not fit.
    """
    if x_THD.dim() < 3 or cos_TF.shape != sin_TF.shape or 2 * cos_TF.shape[-1] != x_THD.shape[-1]:
        raise ValueError(
            f"x has shape {tuple(x_THD.shape)}, cos {tuple(cos_TF.shape)}, sin {tuple(sin_TF.shape)}; "
            "(…, T, heads, D) and (…, T, D / 2) are needed"
        )
    gpu = gpu_kernels("rotary", x_THD, cos_TF, sin_TF)
    if gpu is not None and gpu.takes(x_THD, cos_TF):
        return gpu.apply_rotary(x_THD, cos_TF, sin_TF)
    return apply_rotary_torch(x_THD, cos_TF, sin_TF)


def apply_rotary_torch(x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    """The reference of `apply_rotary`; differentiable."""
    cos, sin = cos_TF[..., None, :].to(x_THD.dtype), sin_TF[..., None, :].to(x_THD.dtype)
    left, right = x_THD.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def rotary_write_kv(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_T: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, and store keys and values with `write_kv`; on a GPU in one launch. No gradient.

    Args:
        q_THD: (T, heads, D) floating; k_TKD, v_TKD: (T, kv_heads, D) of the same type.
        cos_TF, sin_TF: (T, D / 2) float32, from `rotary_cos_sin`.
        k_cache, v_cache, slot_T, k_scale, v_scale: see `write_kv`; written in place. On a GPU a slot outside the cache
            is skipped like −1: looking at it would make the host wait.

    Returns:
        The rotated queries, (T, heads, D).

    Raises:
        ValueError: shapes or types that do not fit; on a CPU also a slot outside the cache.
    """
    check_cache(k_cache, v_cache, k_scale, v_scale)
    num_tokens, head_dim = len(q_THD), k_cache.shape[3]
    fitting = q_THD.dim() == 3 and q_THD.shape[2] == head_dim and q_THD.dtype == k_TKD.dtype == v_TKD.dtype
    if not fitting or k_TKD.shape != v_TKD.shape or k_TKD.shape != (num_tokens, k_cache.shape[1], head_dim):
        raise ValueError(
            f"q is {tuple(q_THD.shape)} {q_THD.dtype}, k {tuple(k_TKD.shape)} {k_TKD.dtype}, v {tuple(v_TKD.shape)} "
            f"{v_TKD.dtype}; (T, heads, {head_dim}) and (T, {k_cache.shape[1]}, {head_dim}) of one type are needed"
        )
    if not cos_TF.shape == sin_TF.shape == (num_tokens, head_dim // 2) or slot_T.shape != (num_tokens,):
        raise ValueError(
            f"cos is {tuple(cos_TF.shape)}, sin {tuple(sin_TF.shape)}, slots {tuple(slot_T.shape)}; "
            f"({num_tokens}, {head_dim // 2}) and ({num_tokens},) are needed"
        )
    if slot_T.dtype != torch.int64:
        raise ValueError(f"slot_T is {slot_T.dtype}; int64 is needed")
    tensors = q_THD, k_TKD, v_TKD, cos_TF, sin_TF, k_cache, v_cache, slot_T
    with torch.no_grad():
        gpu = gpu_kernels("rotary", *tensors)
        if gpu is not None and gpu.takes(q_THD, cos_TF):
            return gpu.rotary_write_kv(*tensors, k_scale, v_scale)
        write_kv(apply_rotary_torch(k_TKD, cos_TF, sin_TF), v_TKD, k_cache, v_cache, slot_T, k_scale, v_scale)
        return apply_rotary_torch(q_THD, cos_TF, sin_TF)
