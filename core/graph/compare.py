"""How far answers are apart, and what of it is accepted when a network comes in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from penjing.core.errors import InputError, first_line
from penjing.core.graph.config import TensorSpec
from penjing.core.graph.network import Network, propagate

CLOSE = 1e-5
"""How far an answer may be from the original's, as a share of the output's largest value."""
MOST = 1.0
"""The largest tolerance that a user may give: more is no answer at all."""
HALF = (torch.float16, torch.bfloat16)
Measure = tuple[str, Callable[[], float]]
"""What the answers are compared with, and how far they are from it."""


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference as a share of the largest value; infinite where shapes or what is no number differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    known = theirs.double()[theirs.isfinite()]
    scale = known.abs().max().item() if known.numel() else 0.0
    largest = gaps(ours, theirs).max().item()
    return largest if largest == 0 or not largest < float("inf") else largest / max(scale, 1e-30)


def gaps(ours: Tensor, theirs: Tensor) -> Tensor:
    """How far each value is from the other, in float64: 0 where both are the same infinity, or no number."""
    one, other = ours.detach().double(), theirs.double()
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0.0, (one - other).abs())


def farthest(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The largest `distance` of any output."""
    return max(distance(one, other) for one, other in zip(ours, theirs, strict=True))


def wider(value: Any, dtype: torch.dtype) -> Any:
    """`value` (a tensor or a type) in `dtype` if it is floating and narrower; else as it is."""
    kind = value.dtype if isinstance(value, Tensor) else value
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point or kind.itemsize >= dtype.itemsize:
        return value
    return value.to(dtype) if isinstance(value, Tensor) else dtype


def widened(network: Network, dtype: torch.dtype) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """What the network computes where every narrower floating number is one of `dtype`, with its example's inputs.

    Raises, when called:
        InputError: an operator does not run so.
    """
    copied = _converted(network, lambda value: wider(value, dtype))

    def compute(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        try:
            with torch.no_grad():
                return copied(*[wider(value, dtype) for value in inputs])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"the network does not run in {str(dtype).removeprefix('torch.')}: {first_line(error)}"
            ) from None

    return compute


def float32_of(value: Any) -> Any:
    """`value` (a tensor or a type) in float32 if it is floating; else as it is."""
    kind = value.dtype if isinstance(value, Tensor) else value
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        return value
    return value.float() if isinstance(value, Tensor) else torch.float32


def in_float32(network: Network) -> Network:
    """`network` whose every floating number is float32: weights, inputs, outputs, casts and the example.

    Raises:
        InputError: an operator does not run so.
    """

    def changed(spec: TensorSpec) -> TensorSpec:
        kind = float32_of(getattr(torch, spec.dtype))
        return spec.model_copy(update={"dtype": str(kind).removeprefix("torch.")})

    found, config = _converted(network, float32_of), network.config
    sides = {"inputs": tuple(map(changed, config.inputs)), "outputs": tuple(map(changed, config.outputs))}
    example = {name: float32_of(value) for name, value in network.example.items()}
    found = replace(found, example=example, config=config.model_copy(update=sides))
    propagate(found)
    return found


def _converted(network: Network, change: Callable[[Any], Any]) -> Network:
    copied = network.copy()
    module = copied.module
    for owner in module.modules():
        owner._apply(change, recurse=False)
    for node in module.graph.nodes:
        node.args = map_aggregate(node.args, change)
        node.kwargs = map_aggregate(node.kwargs, change)
    module.recompile()
    return copied


def judged(
    source: str, measures: Sequence[Measure], tolerance: float | None, hint: Callable[[], str] = lambda: ""
) -> dict[str, Any]:
    """The record for the manifest of the first comparison whose distance is at most `CLOSE`.

    Rounding may move the answers of a deep network, or the other runtime's approximations may, by more than that: the
    next measure computes both sides in wider numbers, where a wrong operator stays wrong and rounding is gone.

    Args:
        measures: tried in order; a later one that raises `InputError` cannot be made, and is said in a refusal.
        tolerance: a larger distance that the user accepts, of the last measure.
        hint: said in a refusal: what the reason may be.

    Returns:
        "oracle", "distance", "bound"; "before", the measures that did not do; "tolerance" where it was needed.

    Raises:
        InputError: every distance is larger than `CLOSE`, and the last one than `tolerance`.
    """
    tried: list[dict[str, Any]] = []
    problems: list[str] = []
    for oracle, measure in measures:
        try:
            tried.append({"oracle": oracle, "distance": measure()})
        except InputError as error:
            if not tried:
                raise
            problems.append(str(error))
            continue
        if not tried[-1]["distance"] < float("inf") or tried[-1]["distance"] <= CLOSE:
            break
    *before, last = tried
    record = {**last, "bound": CLOSE, "before": before}
    if last["distance"] <= CLOSE:
        return record
    if tolerance is not None and last["distance"] <= tolerance <= MOST:
        return {**record, "tolerance": tolerance}
    said = " and ".join(f"{one['distance']:.1e} of the output's scale from those of {one['oracle']}" for one in tried)
    raise InputError(
        f"{source}: the imported network's answers are {said}; at most {CLOSE:.0e} is accepted"
        + "".join(f"; {problem}" for problem in (*problems, hint()) if problem)
        + "; please report this"
        + (f", or accept it with --tolerance {1.1 * last['distance']:.1e}" if last["distance"] < MOST / 1.1 else "")
    )
