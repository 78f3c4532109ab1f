"""Rotary frequencies of a decoder, with the scalings of long-context checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from penjing.core.errors import ConfigError, InputError
from penjing.core.layers.settings import MAX_SIZE, RopeScaling
from penjing.core.models.config import DecoderConfig, Rotary
from penjing.kernels.rotary import rotary_cos_sin

ROTARIES: tuple[Rotary, ...] = ("main", "local", "none")
"""Rows of `inverse_frequencies` where layers differ."""


def inverse_frequencies(config: DecoderConfig) -> torch.Tensor:
    """Radians a token for each pair of rotated dimensions, (rotary_dim / 2,) float32; with `layer_rotary` a row for
    each of ROTARIES. A pair that does not rotate has 0.

    `linear` divides all by the factor. `llama3` (Llama 3.1, https://arxiv.org/abs/2407.21783) and `yarn`
    (https://arxiv.org/abs/2309.00071) divide only those whose wavelength is long against the original context, and
    blend between: by the number of turns, or by the index of the pair. `longrope` (https://arxiv.org/abs/2402.13753)
    divides each by a number of its own: by those for the original context where the network's context is within it, by
    others where it is beyond, whatever the length of a text; so do vLLM and llama.cpp. `dynamic` changes nothing within
    the context of training.
    """
    if config.layer_rotary is None:
        return _filled(config, _main_frequencies(config))
    pairs = config.rotary_pairs if config.rotary_local_pairs is None else config.rotary_local_pairs
    plain = {"rope_theta": config.rope_local_theta, "rope_scaling": RopeScaling(), "rotary_pairs": pairs}
    rows = [_main_frequencies(config), _main_frequencies(config.model_copy(update=plain))]
    filled = [_filled(config, row) for row in rows]
    return torch.stack([*filled, torch.zeros_like(filled[0])])


def layer_angles(config: DecoderConfig, frequency: Tensor, positions: Tensor) -> Callable[[int], tuple[Tensor, Tensor]]:
    """layer → cos and sin of `rotary_cos_sin` for `positions`, computed once for layers that rotate alike.

    Args:
        frequency: what `inverse_frequencies` gives for `config`.
    """
    if config.layer_rotary is None:
        angles = rotary_cos_sin(frequency, positions)
        return lambda layer: angles
    kinds = config.layer_rotary
    of_kind = {kind: rotary_cos_sin(frequency[ROTARIES.index(kind)], positions) for kind in sorted(set(kinds))}
    return lambda layer: of_kind[kinds[layer]]


def _filled(config: DecoderConfig, frequency: Tensor) -> Tensor:
    still = config.rotary_dim // 2 - frequency.shape[0]
    return frequency if not still else torch.cat((frequency, torch.zeros(still, device=frequency.device)))


def _main_frequencies(config: DecoderConfig) -> Tensor:
    size = config.rotary_dim if config.rotary_pairs is None else 2 * config.rotary_pairs
    # On the CPU also while a model is made on the meta device, whose arange imports sympy: a second of start-up.
    steps = torch.arange(0, size, 2, dtype=torch.int64, device="cpu")
    exponent = steps.to(torch.float32) / size
    frequency = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling.rope_type in ("default", "dynamic"):
        return frequency
    if scaling.rope_type == "linear":
        return frequency / scaling.factor
    if scaling.rope_type == "longrope":
        if len(scaling.short_factor) != len(frequency):
            many = len(scaling.short_factor)
            raise InputError(f"short_factor of longrope has {many} numbers for {len(frequency)} pairs of dimensions")
        beyond = config.max_position_embeddings > scaling.original_max_position_embeddings
        divisors = scaling.long_factor if beyond and scaling.long_factor else scaling.short_factor
        return frequency / torch.tensor(divisors, dtype=torch.float32, device="cpu")
    if scaling.rope_type == "yarn":
        kept = _yarn_kept(config, size)
    else:
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def _yarn_kept(config: DecoderConfig, size: int) -> torch.Tensor:
    """Share of each pair's frequency that stays, falling from 1 to 0 between the pairs that turn `beta_fast` and
    `beta_slow` times within the original context."""
    scaling = config.rope_scaling

    def pair_of(turns: float) -> float:
        wavelengths = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return size * math.log(wavelengths) / (2 * math.log(config.rope_theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, size - 1)
    pairs = torch.arange(size // 2, dtype=torch.float32, device="cpu")
    ramp = (pairs - low) / max(high - low, 0.001)
    return 1 - ramp.clamp(0.0, 1.0)


def usual_context(config: DecoderConfig) -> int:
    """Tokens that a network is taken for unless others are asked for: its context, but of longrope the original one,
    within which all texts are computed as in transformers."""
    scaling, whole = config.rope_scaling, config.max_position_embeddings
    return min(whole, scaling.original_max_position_embeddings) if scaling.rope_type == "longrope" else whole


def at_context(config: DecoderConfig, context: int) -> DecoderConfig:
    """The network whose texts have `context` tokens at most, rotating as transformers does where one has so many.

    `dynamic` is then a base of the frequencies, larger beyond the context of training.

    Raises:
        ConfigError: it was published for fewer, or they are none.
    """
    scaling, most = config.rope_scaling, config.max_position_embeddings
    dynamic = scaling.rope_type == "dynamic"
    longest = max(most, min(int(most * scaling.factor), MAX_SIZE)) if dynamic else most
    if context < 2:
        raise ConfigError(f"context={context}: at least 2 tokens are needed")
    if context > longest:
        raise ConfigError(f"context={context} is above the {longest} tokens that the network was published for")
    changed: dict[str, object] = {"max_position_embeddings": context}
    if dynamic and context != most:
        changed["rope_scaling"] = RopeScaling()
        if context > most:
            size = config.rotary_dim if config.rotary_pairs is None else 2 * config.rotary_pairs
            growth = scaling.factor * context / most - (scaling.factor - 1)
            changed["rope_theta"] = config.rope_theta * growth ** (size / (size - 2))
    return config.model_copy(update=changed)


def yarn_magnitudes(scaling: RopeScaling) -> tuple[float, float]:
    """(factor of rotated queries and keys, factor of all queries) under `yarn` and `longrope`; ones otherwise. The
    second is for latent attention alone."""
    if scaling.rope_type == "longrope":
        return scaling.attention_factor or 1.0, 1.0
    if scaling.rope_type != "yarn":
        return 1.0, 1.0

    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    both = scaling.mscale and scaling.mscale_all_dim
    rotated = growth(scaling.mscale) / growth(scaling.mscale_all_dim) if both else growth(1.0)
    if scaling.attention_factor is not None:
        rotated = scaling.attention_factor
    return rotated, growth(scaling.mscale_all_dim) ** 2
