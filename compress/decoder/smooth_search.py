"""The smoothing scale of each input channel, searched on calibration activations instead of set by one alpha.

Rounding to INT8 adds noise of a twelfth of a squared step. For inputs x_MK divided by s_K and weights multiplied by it,
the noise of the outputs follows from amplitudes alone, without a pass through the layer:

    Σ_m u_m · max_k(x_mk / s_k)² · Σ_nk (w_nk · s_k)²       activations: a step a token
  + Σ_n max_k(w_nk · s_k)² · Σ_mk u_m · (x_mk / s_k)²       weights: a step a row

Where a token has a zero point, half of its range stands for the maximum in the first line, and a scale may be negative
(`compress/rounding/signs.py`). With 4-bit weights the second line has a step for each group of a row, 127 / 7 times as
long; it sums over groups. Beside them activations may be bfloat16: then the first line is left out.

Its gradient is written out, so that Adam finds scales better than any alpha of SmoothQuant, from whose best it starts.
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
TINY = torch.finfo(torch.float32).tiny
SEARCH_ROWS = 1024  # tokens a step, others in the next: all of 5120 in every step gives SmolLM2 the same error


class _Largest:
    """The largest product x · f of each row, or of each group of its channels.

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
        if self._channel_RGC is not None:
            return (self._x_RGK * factor_K[self._channel_RGC]).amax(dim=2)
        factor_GK = factor_K.view(self._x_RGK.shape[1:])  # the same values, eight times as fast as by places
        return torch.cat([(rows * factor_GK).amax(dim=2) for rows in self._x_RGK.split(SEARCH_ROWS)])

    def winners(self, factor_K: Tensor) -> tuple[Tensor, Tensor]:
        """The same (R, G), and the channel of each."""
        if self._channel_RGC is not None:
            largest = (self._x_RGK * factor_K[self._channel_RGC]).max(dim=2)
            return largest.values, self._channel_RGC.gather(2, largest.indices[..., None])[..., 0]
        groups, size = self._x_RGK.shape[1:]
        largest = (self._x_RGK * factor_K.view(groups, size)).max(dim=2)
        return largest.values, largest.indices + torch.arange(groups) * size


class RoundingNoise:
    """The formula above, proportional to the expected squared error of the outputs.

    Sums over tokens and rows do not depend on the scale but for a factor a channel, and are taken once. Of the maxima
    only the winners carry a gradient, so that it takes one pass over each matrix; `near` leaves the few channels that
    can win.

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
        """A scalar, for positive `scale_K`."""
        inverse_K = 1 / scale_K
        of_weights = self._coarser * (self._weights(scale_K).square().sum(dim=0) * self._inputs(inverse_K)).sum()
        if not self._rounds:
            return of_weights
        step_M = self._steps([side(inverse_K)[:, 0] for side in self._sides])
        return (step_M.square() * self._token_M).sum() * (self._energy_K * scale_K.square()).sum() + of_weights

    def gradient(self, scale_K: Tensor) -> tuple[Tensor, Tensor]:
        """The same scalar, and its gradient (K,) by the logarithm of `scale_K`."""
        inverse_K = 1 / scale_K
        row_NG, channel_NG = self._weights.winners(scale_K)
        square_NG, input_G = row_NG.square(), self._inputs(inverse_K)
        weight_G = square_NG.sum(dim=0)
        noise = (weight_G * input_G).sum()
        of_steps_K = torch.zeros_like(scale_K).index_add_(0, channel_NG.flatten(), (square_NG * input_G).flatten())
        of_inputs_GK = (self._input_K * inverse_K.square()).view(-1, self._group) * weight_G[:, None]
        noise, gradient_K = self._coarser * noise, 2 * self._coarser * (of_steps_K - of_inputs_GK.flatten())
        if not self._rounds:
            return noise, gradient_K
        largest = [side.winners(inverse_K) for side in self._sides]
        step_M = self._steps([side_M1[:, 0] for side_M1, _ in largest])
        stored_K = self._energy_K * scale_K.square()
        energy, tokens = stored_K.sum(), (step_M.square() * self._token_M).sum()
        gradient_K += 2 * tokens * stored_K
        counts_M = -2 * energy * self._token_M * step_M / len(largest)
        for side_M1, channel_M1 in largest:
            side_M = side_M1[:, 0].clamp(min=0)
            gradient_K.index_add_(0, channel_M1[:, 0], counts_M * side_M)
        return noise + tokens * energy, gradient_K

    def _inputs(self, inverse_K: Tensor) -> Tensor:
        """(G,) squares of the inputs of each group, divided."""
        return (self._input_K * inverse_K.square()).view(-1, self._group).sum(dim=1)

    def _steps(self, sides: list[Tensor]) -> Tensor:
        """(M,) the largest of each token, or half of its range, in which 0 always is."""
        return sides[0] if len(sides) == 1 else (sides[0].clamp(min=0) + sides[1].clamp(min=0)) / 2

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

        count = x_MK.shape[1]
        found = magnitudes(x_MK, weight_NK, heads)
        place_K = torch.arange(len(found[0]))  # of the scale of each channel
        if heads is not None:
            place_K = heads.of_queries(place_K, count)
        candidates = [smoothing_scale(*found, each) for each in ALPHAS]
        candidates.append(torch.ones_like(candidates[0]))
        noises = [float(parts[0](scale[place_K])) for scale in candidates]
        best = candidates[noises.index(min(noises))]
        weights = whole.near_weights(best[place_K])
        parts = [part.near_inputs(best[place_K], weights) for part in parts]
        logarithm = best.log()
        adam = torch.optim.Adam([logarithm], lr=RATE)
        for step in range(self.steps):
            adam.param_groups[0]["lr"] = RATE * (1 - step / self.steps)
            noise, gradient_K = parts[step % every].gradient(logarithm.exp()[place_K])
            gradient_K /= noise.clamp(min=TINY)  # of the noise's logarithm; of zeros nothing is rounded
            logarithm.grad = torch.zeros_like(best).index_add_(0, place_K, gradient_K)
            adam.step()
        searched = logarithm.exp()
        return searched if float(whole(searched[place_K])) < float(whole(best[place_K])) else best
