"""From a row of logits to a token: penalties, filters and a draw, each row by itself, in numpy.

The reference for the C++ kernels (`kernels/cpu/sample.cpp`), which give the same tokens from the same logits: every
step is one that IEEE 754 defines to the last bit, and weights are added as multiples of 2⁻³⁴, whose sums are exact in
float64 up to 2¹⁹ tokens, so that no order of summation is better than another. It serves where there are no kernels.

A row's token depends on that row, its sequence's tokens, its seed and its position alone, never on the batch: the draw
is a pure function of (seed, index, position), so a preempted or re-batched sequence samples the same tokens again.
"""

from __future__ import annotations

import numpy as np

from penjing.serve.sampling.params import SamplingParams

GREEDY_BELOW = 1e-5  # a temperature below it would overflow float32 logits; vLLM's bound too
# Parameters and penalized logits stay finite in float32: ∞ − ∞ and 0 ÷ 0 would make the weights NaN.
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_MASK64 = (1 << 64) - 1


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments: SplitMix64 (Steele, Lea, Flood 2014), chained over
    them."""
    state = 0
    for value in (seed, index, position):
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


class TokenCounts:
    """How often each token occurred: what the penalties look at. Updated by one token a step, in O(1)."""

    def __init__(self, prompt_ids: list[int]) -> None:
        unique = list(dict.fromkeys(prompt_ids))
        self._slots = {token: slot for slot, token in enumerate(unique)}
        room = len(unique) + 64
        self._ids, self._counts = np.zeros(room, np.int32), np.zeros(room, np.int32)
        self._ids[: len(unique)] = unique

    @property
    def ids(self) -> np.ndarray:
        """(N,) int32: the tokens of prompt and answer, each once."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray:
        """(N,) int32: how often each stands in the answer."""
        return self._counts[: len(self._slots)]

    def addresses(self) -> tuple[int, int, int]:
        """Where `ids` and `counts` lie until the next `add`, and N."""
        return self._ids.ctypes.data, self._counts.ctypes.data, len(self._slots)

    def add(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids, self._counts = (np.concatenate([x, np.zeros_like(x)]) for x in (self._ids, self._counts))
        self._ids[slot] = token_id
        self._counts[slot] += 1


def apply_penalties(logits_V: np.ndarray, params: SamplingParams, counts: TokenCounts) -> None:
    """In place. Repetition divides the positive and multiplies the negative logits of tokens seen in prompt or output
    (Keskar et al. 2019); presence and frequency subtract for tokens of the output (OpenAI's definition)."""
    if params.repetition_penalty != 1:
        values = logits_V[counts.ids]
        penalty = np.float32(min(max(params.repetition_penalty, SMALLEST), LARGEST))
        logits_V[counts.ids] = np.clip(np.where(values > 0, values / penalty, values * penalty), -LARGEST, LARGEST)
    if params.presence_penalty or params.frequency_penalty:
        written = counts.counts > 0
        occurrences = counts.counts[written].astype(np.float32)
        logits_V[counts.ids[written]] -= (
            np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * occurrences
        )


def apply_bias(logits_V: np.ndarray, params: SamplingParams) -> None:
    """In place: add `logit_bias`."""
    for token_id, bias in (params.logit_bias or {}).items():
        logits_V[token_id] += np.float32(bias)


def keep_top(logits_V: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that temperature, top-k, top-p and min-p leave, in order of id: `(ids int64, weights float32)`, the
    weights proportional to probabilities, the largest 1.

    Tokens that tie with the last one kept are kept too, so that the result does not depend on a sort's order.
    """
    ids: np.ndarray | None = None
    kept = logits_V
    if 0 < params.top_k < len(logits_V):
        threshold = np.partition(logits_V, -params.top_k)[-params.top_k]
        ids = np.flatnonzero(logits_V >= threshold)
        kept = logits_V[ids]
    ids, weights = _weigh(ids, kept, params)
    return np.arange(len(logits_V)) if ids is None else ids, weights


def _weigh(ids: np.ndarray | None, kept: np.ndarray, params: SamplingParams) -> tuple[np.ndarray | None, np.ndarray]:
    weights = exp_unfused((kept - kept.max()) / np.float32(min(params.temperature, LARGEST)))
    if params.top_p < 1:
        ids, weights = _select(ids, weights, weights >= _nucleus_threshold(weights, params.top_p))
    if params.min_p > 0:
        ids, weights = _select(ids, weights, weights >= params.min_p)
    return ids, weights


def _nucleus_threshold(weights: np.ndarray, top_p: float) -> np.float32:
    """The smallest weight of the smallest set of largest weights that holds `top_p` of the sum."""
    goal = top_p * float(exact(weights).sum())
    # A set is rarely large: sorting the 512 largest first takes a fifth of the time of sorting 49k.
    for size in (512, len(weights)):
        largest = weights if size >= len(weights) else np.partition(weights, -size)[-size:]
        descending = np.sort(largest)[::-1]
        cumulative = np.cumsum(exact(descending))
        if cumulative[-1] >= goal:
            break
    return descending[min(int(np.searchsorted(cumulative, goal)), len(descending) - 1)]


def _select(ids: np.ndarray | None, weights: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (np.flatnonzero(mask) if ids is None else ids[mask]), weights[mask]


def draw(ids: np.ndarray, weights: np.ndarray, number: float) -> int:
    """The token at `number` ∈ [0, 1) of the cumulative weights, in order of id; never one of weight 0."""
    cumulative = np.cumsum(exact(weights))
    # Rounding may put the goal at the total: then the last weight that is not 0 is meant.
    last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return int(ids[min(int(np.searchsorted(cumulative, number * float(cumulative[-1]), side="right")), last)])


def exp_unfused(x: np.ndarray) -> np.ndarray:
    """e^x for float32 x ≤ 0 within 2 units in the last place (Cephes' expf), each product and sum rounded by itself;
    e⁻⁸⁷ below −87."""
    x = np.maximum(x, np.float32(-87))
    n = np.rint(x * np.float32(1.44269504))
    r = (x - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
    p = np.full_like(x, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + np.float32(coefficient)
    return np.ldexp((p * (r * r) + r) + np.float32(1), n.astype(np.int32))


def exact(weights: np.ndarray) -> np.ndarray:
    """float32 weights of at most 1 as the nearest multiples of 2⁻³⁴, in float64."""
    shift = 1.5 * 2.0**18
    return (weights.astype(np.float64) + shift) - shift


def sample(
    logits_V: np.ndarray,
    params: SamplingParams,
    number: float,
    counts: TokenCounts | None,
    forbidden: np.ndarray | None,
    allowed_V: np.ndarray | None = None,
) -> int:
    """One token id from a row of float32 logits, which is left as it is.

    `number` in [0, 1) says where to draw; `counts` is needed when there are penalties; `forbidden` ids cannot
    be chosen (what would end the answer before `min_tokens`), nor what `allowed_V`, bool, leaves out.
    """
    logits_V = logits_V.copy()
    with np.errstate(over="ignore", divide="ignore"):  # extreme parameters: an overflow to −∞ is a weight of 0
        if counts is not None:
            apply_penalties(logits_V, params, counts)
        apply_bias(logits_V, params)
        if forbidden is not None:
            logits_V[forbidden] = -np.inf
        if allowed_V is not None:
            logits_V[~allowed_V] = -np.inf
        if params.temperature < GREEDY_BELOW:
            return int(logits_V.argmax())
        ids, weights = keep_top(logits_V, params)
    return draw(ids, weights, number)


def top_logprobs(logits_V: np.ndarray, chosen: int, count: int) -> list[tuple[int, float, int]]:
    """`(token id, natural log of the probability, rank)` of the `count` most likely tokens and of `chosen`, under the
    raw logits; ranks start at 1 and equals rank by id."""
    logits = logits_V.astype(np.float64)
    largest = logits.max()
    log_total = largest + np.log(np.exp(logits - largest).sum())
    ids = np.arange(len(logits) if count else 0)
    if 0 < count < len(logits):
        ids = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    ids = ids[np.lexsort((ids, -logits[ids]))][:count]
    rows = [(int(token), float(logits[token] - log_total), rank) for rank, token in enumerate(ids, start=1)]
    if all(token != chosen for token, _, _ in rows):
        value = logits[chosen]
        rank = int((logits > value).sum() + (logits[:chosen] == value).sum()) + 1
        rows.append((chosen, float(value - log_total), rank))
    return rows
