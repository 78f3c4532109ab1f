"""SmoothQuant (https://arxiv.org/abs/2211.10438): move the spread of activation channels into the weights, absorbed.

A linear computes (x / s)·(W × s)ᵀ for any positive s, one value an input channel. Dividing by s costs nothing where
what produces x can absorb it: a norm's weight, the rows of `up_proj` (the gated product is linear in it; an MLP without
a gate and gpt-oss's experts absorb nothing), the rows of `v_proj` (attention mixes positions, not channels), those of
the gate behind a convolution. Where a norm stands before `down_proj` or `o_proj`, as in BitNet, its weight absorbs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penjing.compress.decoder.parts import inner_norm, mixer, mlps, norm_readers
from penjing.compress.decoder.settings import Transform
from penjing.compress.decoder.stream import Weights
from penjing.core.artifact.transform import behind_gate
from penjing.core.models.config import DecoderConfig

QUANTILE = 0.99  # over tokens: the attention-sink tokens are too few to decide, and too large to be typical
SMALLEST = 1e-5  # of the largest magnitude: a channel that is never active must not blow up its weights


def channel_magnitude(x_MK: Tensor) -> Tensor:
    """(K,) how large each channel gets relative to the largest of its token, for which the token's scale is set.

    The paper takes the largest value over all tokens. With one scale a token that overrates the channels of a few
    tokens with huge activations; measured on SmolLM2's down_proj, this one gives a third less output error.

    Args:
        x_MK: (M, K) activations of M tokens.
    """
    relative_MK = x_MK.abs()
    relative_MK /= relative_MK.amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    # `torch.quantile` sorts all tokens: 1.3 s of 6144 × 1536, 0.07 s for the largest ones alone.
    place = QUANTILE * (len(relative_MK) - 1)
    below = int(place)
    largest_KC = relative_MK.t().contiguous().topk(len(relative_MK) - below, dim=1).values
    return largest_KC[:, -1].lerp(largest_KC[:, max(0, largest_KC.shape[1] - 2)], place - below)


def smoothing_scale(activation_K: Tensor, weight_K: Tensor, alpha: float) -> Tensor:
    """s_K = activation^α / weight^(1−α), scaled to geometric mean 1; float32.

    Args:
        activation_K: magnitude of each input channel on calibration text.
        weight_K: largest magnitude of each input channel over all weights that read it.
        alpha: 1 makes all activation channels alike, towards 0 the weights' channels.
    """
    log_scale = alpha * _log_magnitude(activation_K) - (1 - alpha) * _log_magnitude(weight_K)
    return (log_scale - log_scale.mean()).exp().to(torch.float32)


def input_magnitude(*weights_NK: Tensor) -> Tensor:
    """(K,) largest magnitude of each input channel over all the weights that read it."""
    return torch.stack([weight_NK.abs().amax(dim=0) for weight_NK in weights_NK]).amax(dim=0)


class FindScale(Protocol):
    """Which scale an input gets."""

    def __call__(self, x_MK: Tensor, weight_NK: Tensor, alpha: float, heads: Heads | None) -> Tensor:
        """(K,) not 0; with `heads` one value for each channel of the value heads.

        Args:
            x_MK: (M, K) activations.
            weight_NK: (N, K) all weights that read them.
            alpha: of the recipe, above 0.
        """
        ...


@dataclass(frozen=True)
class Heads:
    """How o_proj's input, (query heads · head_dim), maps to the value heads that make it."""

    num_value_heads: int
    head_dim: int

    def of_values(self, value_K: Tensor) -> Tensor:
        """(H·D,) → (KV·D,): the largest over the query heads that read one value head."""
        return value_K.view(self.num_value_heads, -1, self.head_dim).amax(dim=1).flatten()

    def of_queries(self, value_C: Tensor, num_channels: int) -> Tensor:
        """(KV·D,) → (H·D,) = (num_channels,): every query head gets the values of the value head it reads."""
        groups = num_channels // value_C.numel()
        return value_C.view(self.num_value_heads, 1, -1).expand(-1, groups, -1).flatten()


def by_alpha(x_MK: Tensor, weight_NK: Tensor, alpha: float, heads: Heads | None) -> Tensor:
    """`FindScale` as the paper has it."""
    return smoothing_scale(*magnitudes(x_MK, weight_NK, heads), alpha)


def magnitudes(x_MK: Tensor, weight_NK: Tensor, heads: Heads | None) -> tuple[Tensor, Tensor]:
    """(K,) each, of the activations and of the weights; with `heads` one value for each channel of the value heads."""
    activation_K, weight_K = channel_magnitude(x_MK), input_magnitude(weight_NK)
    if heads is None:
        return activation_K, weight_K
    return heads.of_values(activation_K), heads.of_values(weight_K)


def smooth_linears(
    weights: Weights,
    samples: dict[str, Tensor],
    config: DecoderConfig,
    transform: Transform,
    rule_of: Callable[[str], FindScale] = lambda _: by_alpha,
) -> dict[str, Tensor]:
    """Smooth one layer in place, as far as `transform` asks.

    Args:
        weights: the layer's float32 tensors.
        samples: first linear layer of those that share an input → (M, K) activations on calibration text.
        rule_of: how the scale of the input of that linear layer is found; it may be negative but for o_proj's.

    Returns:
        For each input that changed, the (K,) scale that it is now divided by.
    """
    scales: dict[str, Tensor] = {}
    if transform.smooth_norm > 0:
        for norm, readers in norm_readers(weights).items():
            names = [f"{reader}.weight" for reader in readers]
            weight_NK = torch.cat([weights[name] for name in names])
            scale_K = rule_of(readers[0])(samples[readers[0]], weight_NK, transform.smooth_norm, None)
            weights[f"{norm}.weight"].div_(scale_K)
            for name in names:
                weights[name].mul_(scale_K)
            scales |= dict.fromkeys(readers, scale_K)
    linear = config.moe is None or config.moe.activation != "clamped_swiglu"
    if transform.smooth_down > 0 and linear:
        for mlp in mlps(weights):
            down = f"{mlp}.down_proj"
            before = inner_norm(weights, down) or f"{mlp}.up_proj"
            if f"{before}.weight" not in weights:
                continue  # what an activation gives is not linear in anything before it
            scale_K = rule_of(down)(samples[down], weights[f"{down}.weight"], transform.smooth_down, None)
            _divide_outputs(weights, before, scale_K)
            weights[f"{down}.weight"].mul_(scale_K)
            scales[down] = scale_K
    out = mixer(weights)[1]
    if transform.smooth_output > 0 and out == "conv.out_proj":
        scale_K = rule_of(out)(samples[out], weights[f"{out}.weight"], transform.smooth_output, None)
        _divide_outputs(weights, "conv.in_proj", behind_gate(scale_K))
        weights[f"{out}.weight"].mul_(scale_K)
        scales[out] = scale_K
    elif transform.smooth_output > 0:
        weight_NK = weights[f"{out}.weight"]
        norm, heads = inner_norm(weights, out), None
        if norm is None:  # a norm of values is the same for all heads
            heads = Heads(1 if config.value_norm else config.num_key_value_heads, config.head_dim)
            norm = "self_attn.v_norm" if config.value_norm else None
        scale_C = rule_of(out)(samples[out], weight_NK, transform.smooth_output, heads)
        _divide_outputs(weights, norm or "self_attn.v_proj", scale_C)
        scale_K = scale_C if heads is None else heads.of_queries(scale_C, weight_NK.shape[1])
        weight_NK.mul_(scale_K)
        scales[out] = scale_K
    return scales


def _log_magnitude(magnitude_K: Tensor) -> Tensor:
    magnitude_K = magnitude_K.to(torch.float64)
    return magnitude_K.clamp(min=max(float(magnitude_K.max()) * SMALLEST, 1e-30)).log()


def _divide_outputs(weights: Weights, module: str, scale_N: Tensor) -> None:
    """Of a linear layer or a norm."""
    weight = weights[f"{module}.weight"]
    weight.div_(scale_N if weight.dim() == 1 else scale_N[:, None])
    if f"{module}.bias" in weights:
        weights[f"{module}.bias"].div_(scale_N)
