"""Rotation of a decoder's residual stream and value heads, so that no channel holds outliers; all of it absorbed.

Activations of language models have a few channels a hundred times larger than the rest, and one INT8 scale a token must
span them. An orthogonal matrix spreads them evenly. RMSNorm without its weight commutes with a rotation, so after the
norm weights are folded into the linears that follow, every rotation merges into neighbouring weights: the architecture
and the function stay the same and inference pays nothing. QuaRot (https://arxiv.org/abs/2404.00456), SpinQuant
(https://arxiv.org/abs/2405.16406), without their online transforms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penjing.compress.decoder.parts import mixer, mlps, norm_readers
from penjing.compress.decoder.stream import Weights
from penjing.core.artifact.transform import flat_matrix
from penjing.core.models.config import DecoderConfig


def rotation_matrix(size: int, seed: int) -> Tensor:
    """A random orthogonal (size, size) float64 matrix whose entries are all about 1/√size: random signs times
    `flat_matrix`. Computed, so the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator).to(torch.float64) * 2 - 1
    return signs[:, None] * flat_matrix(size)


def rotation_signs(rotation_EE: Tensor) -> Tensor:
    """(size,) int8: the signs that made a matrix of `rotation_matrix`."""
    return rotation_EE[:, 0].sign().to(torch.int8)


def fold_norm(norm_E: Tensor, *linears_NE: Tensor) -> None:
    """Move a norm's weight into the linears that read it, in place; the norm's weight becomes ones."""
    for weight_NE in linears_NE:
        weight_NE.mul_(norm_E)
    norm_E.fill_(1.0)


def rotate_input(weight_NE: Tensor, rotation_EE: Tensor) -> Tensor:
    """The weight that reads rotated activations x·R and gives what it gave for x: W·R, in float32."""
    return (weight_NE.to(rotation_EE.dtype) @ rotation_EE).to(torch.float32)


def rotate_output(weight_NK: Tensor, rotation_NN: Tensor) -> Tensor:
    """The weight (or bias, (N,)) that gives y·R where it gave y: Rᵀ·W, in float32."""
    return (rotation_NN.t() @ weight_NK.to(rotation_NN.dtype)).to(torch.float32)


def rotate_layer(weights: Weights, config: DecoderConfig, residual_EE: Tensor, head_DD: Tensor) -> None:
    """Rotate one layer in place: its residual stream by `residual_EE`, each value head by `head_DD`.

    Args:
        weights: the layer's float32 tensors.
        residual_EE: (hidden_size, hidden_size) orthogonal, shared by all layers.
        head_DD: (head_dim, head_dim) orthogonal. Attention mixes positions, not channels, so it passes through, and
            through one gate a head.
    """
    for norm, linears in norm_readers(weights).items():
        fold_norm(weights[f"{norm}.weight"], *(weights[f"{linear}.weight"] for linear in linears))
        for linear in linears:
            weights[f"{linear}.weight"] = rotate_input(weights[f"{linear}.weight"], residual_EE)
    mixed = mixer(weights)[1]
    for linear in (mixed, *(f"{mlp}.down_proj" for mlp in mlps(weights))):
        for name in (f"{linear}.weight", f"{linear}.bias"):
            if name in weights:
                weights[name] = rotate_output(weights[name], residual_EE)
    if mixed != "self_attn.o_proj" or not config.rotates_values:
        return  # each channel of a convolution has weights of its own
    per_head_q = torch.block_diag(*[head_DD] * config.num_attention_heads)
    per_head_v = torch.block_diag(*[head_DD] * config.num_key_value_heads)
    for name in ("self_attn.v_proj.weight", "self_attn.v_proj.bias"):
        if name in weights:
            weights[name] = rotate_output(weights[name], per_head_v)
    weights["self_attn.o_proj.weight"] = rotate_input(weights["self_attn.o_proj.weight"], per_head_q)
