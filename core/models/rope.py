"""Rotary frequencies of a decoder, with the scalings of long-context checkpoints."""

from __future__ import annotations

import math

import torch

from penjing.core.models.config import DecoderConfig
from penjing.kernels.rotary import rotary_cos_sin


def inverse_frequencies(config: DecoderConfig) -> torch.Tensor:
    """Radians a token for each pair of dimensions, (head_dim / 2,) float32.

    `linear` divides all by the factor. `llama3` (Llama 3.1, https://arxiv.org/abs/2407.21783) divides only those whose
    wavelength is long against the original context, and blends between.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32) / config.head_dim
    frequency = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling.rope_type == "default":
        return frequency
    if scaling.rope_type == "linear":
        return frequency / scaling.factor
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def cos_sin_table(config: DecoderConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of positions 0 … length − 1, each (length, head_dim / 2) float32."""
    return rotary_cos_sin(inverse_frequencies(config), torch.arange(length))
