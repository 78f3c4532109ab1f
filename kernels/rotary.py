"""Rotary position embedding (Su et al., https://arxiv.org/abs/2104.09864), half-rotation layout.

Dimension i is paired with i + D/2, as in Hugging Face checkpoints.
"""

from __future__ import annotations

import torch


def rotary_cos_sin(inverse_frequency_F: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position × frequency, each (…, T, F) float32; positions (…, T) integer, F = head_dim / 2."""
    angle = positions.to(torch.float32)[..., None] * inverse_frequency_F
    return angle.cos(), angle.sin()


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
    cos, sin = cos_TF[..., None, :].to(x_THD.dtype), sin_TF[..., None, :].to(x_THD.dtype)
    left, right = x_THD.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
