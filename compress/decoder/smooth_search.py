"""The smoothing scale of each input channel, searched on calibration activations instead of set by one alpha.

Rounding to INT8 adds noise of a twelfth of a squared step. For inputs x_MK divided by s_K and weights multiplied by it,
the noise of the outputs follows from amplitudes alone, without a pass through the layer:

    Σ_m u_m · max_k(x_mk / s_k)² · Σ_nk (w_nk · s_k)²       activations: a step a token
  + Σ_n max_k(w_nk · s_k)² · Σ_mk u_m · (x_mk / s_k)²       weights: a step a row

Where a token has a zero point, half of its range stands for the maximum in the first line, and a scale may be negative
(`compress/rounding/signs.py`). With 4-bit weights the second line has a step for each group of a row, 127 / 7 times as
long; it sums over groups. Beside them activations may be bfloat16: then the first line is left out.

It is differentiable in s, so that Adam finds scales better than any alpha of SmoothQuant, from whose best it starts.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from penjing.compress.decoder.smooth import Heads, magnitudes, smoothing_scale
from penjing.compress.rounding.signs import aligned_signs

INT4_STEP = 127 / 7  # of a group of 4-bit weights, in steps of 8 bits
ALPHAS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
RATE = 0.03  # of the logarithm of a scale a step, decaying to zero
CANDIDATES = 16  # channels of a token or row that can become its largest while scales are searched
SEARCH_ROWS = 1024  # tokens a step, others in the next: all of 5120 in every step gives SmolLM2 the same error


class _Largest:
    """The largest product x · f of each row, or of each group of its channels; only the winner carries a gradient.

    Args:
        x_RGK: (R, G, K / G) float32.
        channel_RGC: of which of the K channels these are; None: of all in order.
    """

    def __init__(self, x_RGK: Tensor, channel_RGC: Tensor | None = None) -> None:
        self._x_RGK, self._channel_RGC = x_RGK, channel_RGC

    def near(self, factor_K: Tensor) -> _Largest:
        """The same among the CANDIDATES channels that come first where f is `factor_K`."""
        first_G1 = torch.arange(self._x_RGK.shape[1])[:, None] * self._x_RGK.shape[2]
        count = min(CANDIDATES, self._x_RGK.shape[2])
        place_RGC = (self._x_RGK * factor_K.view(self._x_RGK.shape[1:])).topk(count, sorted=False).indices
        return _Largest(self._x_RGK.gather(2, place_RGC), place_RGC + first_G1)

    def __call__(self, factor_K: Tensor) -> Tensor:
        """(R, G)."""
        if self._channel_RGC is None and not factor_K.requires_grad:
            factor_GK = factor_K.view(self._x_RGK.shape[1:])  # the same values, eight times as fast as by places
            return torch.cat([(rows * factor_GK).amax(dim=2) for rows in self._x_RGK.split(SEARCH_ROWS)])
        fixed_K = factor_K.detach()
        if self._channel_RGC is None:
            groups, size = self._x_RGK.shape[1:]
            place_RG1 = (self._x_RGK * fixed_K.view(groups, size)).argmax(dim=2, keepdim=True)
            channel_RG1 = place_RG1 + torch.arange(groups)[:, None] * size
        else:
            place_RG1 = (self._x_RGK * fixed_K[self._channel_RGC]).argmax(dim=2, keepdim=True)
            channel_RG1 = self._channel_RGC.gather(2, place_RG1)
        return self._x_RGK.gather(2, place_RG1)[..., 0] * factor_K[channel_RG1[..., 0]]


class RoundingNoise:
    """The formula above, proportional to the expected squared error of the outputs.

    Sums over tokens and rows do not depend on the scale but for a factor a channel, and are taken once. Of the maxima
    only the winners carry a gradient, so that a step is one pass over each matrix, and none backward; `near` leaves
    the few channels that can win.

    Args:
        x_MK: (M, K) float32 activations before they are divided.
        weight_NK: (N, K) float32, all weights that read them, before they are multiplied.
        token_M: (M,) u, how much each token's error counts.
        group: inputs that share a step of a 4-bit weight; 0: 8 bits, a step a row.
        above: tokens have zero points.
        rounds: activations are rounded to 8 bits.
    """

    def __init__(
        self,
        x_MK: Tensor,
        weight_NK: Tensor,
        token_M: Tensor,
        group: int = 0,
        above: bool = False,
        rounds: bool = True,
    ) -> None:
        self._rounds = rounds
        self._group, self._coarser = group or weight_NK.shape[1], INT4_STEP**2 if group else 1.0
        self._weights = _Largest(weight_NK.abs().unflatten(1, (-1, self._group)))
        self._energy_K = weight_NK.square().sum(dim=0)
        self._x_MK, self._above = x_MK, above
        self._of_tokens(x_MK, token_M)

    def part(self, rows: slice) -> RoundingNoise:
        """The same of some of the tokens."""
        found = copy(self)
        found._of_tokens(self._x_MK[rows], self._token_M[rows])
        return found

    def near(self, scale_K: Tensor) -> RoundingNoise:
        """Nearly the same, and fast, for scales not far from `scale_K`: only the channels that are largest there are
        looked at."""
        return self.near_inputs(scale_K, self.near_weights(scale_K))

    def near_weights(self, scale_K: Tensor) -> _Largest:
        """What `near` looks at of the weights, the same for all parts of the tokens."""
        return self._weights.near(scale_K)

    def near_inputs(self, scale_K: Tensor, weights: _Largest) -> RoundingNoise:
        """`near` with the weights of `near_weights`."""
        found = copy(self)
        found._weights = weights
        found._sides = [side.near(1 / scale_K) for side in self._sides]
        return found

    def __call__(self, scale_K: Tensor) -> Tensor:
        """A scalar that can be differentiated by the positive `scale_K`."""
        inverse_K = 1 / scale_K
        input_G = (self._input_K * inverse_K.square()).view(-1, self._group).sum(dim=1)
        of_weights = self._coarser * (self._weights(scale_K).square().sum(dim=0) * input_G).sum()
        if not self._rounds:
            return of_weights
        token_M = self._sides[0](inverse_K)[:, 0]
        if self._above:  # 0 is always in the range
            token_M = (token_M.clamp(min=0) + self._sides[1](inverse_K)[:, 0].clamp(min=0)) / 2
        activation = (token_M.square() * self._token_M).sum() * (self._energy_K * scale_K.square()).sum()
        return activation + of_weights

    def _of_tokens(self, x_MK: Tensor, token_M: Tensor) -> None:
        sides = (x_MK, -x_MK) if self._above else (x_MK.abs(),)
        self._sides = [_Largest(side_MK[:, None]) for side_MK in sides]
        self._x_MK, self._token_M = x_MK, token_M
        self._input_K = token_M @ x_MK.square()


@dataclass(frozen=True)
class Search:
    """A `FindScale`: what Adam finds, or the alpha that it starts from if that is better. Deterministic; an alpha of
    the recipe only says that there is one.

    Each step looks at other tokens, in turn. A sixth of the tokens alone, the same in every step, missed neurons that
    few tokens excite: 18 % more error on text of every kind.

    Attributes:
        token_M: (M,) how much each token's error counts.
        steps: of Adam after the best of ALPHAS.
        group, above, rounds: see `RoundingNoise`; with `above` scales have the signs that fit.
    """

    token_M: Tensor  # noqa: N815
    steps: int
    group: int = 0
    above: bool = False
    rounds: bool = True

    def __call__(self, x_MK: Tensor, weight_NK: Tensor, alpha: float, heads: Heads | None) -> Tensor:
        """See `FindScale`."""
        if not self.above or heads is not None or x_MK.shape[1] < 2:
            return self._search(x_MK, weight_NK, heads)
        first_K = aligned_signs(x_MK, self.token_M)
        scale_K = self._search(x_MK * first_K, weight_NK, heads) * first_K
        return scale_K * aligned_signs(x_MK / scale_K, self.token_M)

    def _search(self, x_MK: Tensor, weight_NK: Tensor, heads: Heads | None) -> Tensor:
        every = max(1, x_MK.shape[0] // SEARCH_ROWS)
        whole = RoundingNoise(x_MK, weight_NK, self.token_M, self.group, self.above, self.rounds)
        parts = [whole.part(slice(first, None, every)) for first in range(every)] if every > 1 else [whole]

        def wide(scale: Tensor) -> Tensor:
            return scale if heads is None else heads.of_queries(scale, x_MK.shape[1])

        def noise(of_inputs: RoundingNoise, scale: Tensor) -> Tensor:
            return of_inputs(wide(scale))

        found = magnitudes(x_MK, weight_NK, heads)
        candidates = [smoothing_scale(*found, each) for each in ALPHAS]
        candidates.append(torch.ones_like(candidates[0]))
        noises = [float(noise(parts[0], scale)) for scale in candidates]
        best = candidates[noises.index(min(noises))]
        weights = whole.near_weights(wide(best))
        parts = [part.near_inputs(wide(best), weights) for part in parts]
        logarithm = best.log().requires_grad_(True)
        adam = torch.optim.Adam([logarithm], lr=RATE)
        for step in range(self.steps):
            adam.param_groups[0]["lr"] = RATE * (1 - step / self.steps)
            with torch.enable_grad():
                reached = noise(parts[step % every], logarithm.exp())
                adam.zero_grad()
                reached.clamp(min=torch.finfo(torch.float32).tiny).log().backward()  # of zeros nothing is rounded
            adam.step()
        searched = logarithm.detach().exp()
        return searched if float(noise(whole, searched)) < float(noise(whole, best)) else best
