"""Mixed precision: which layers stay floating when weights may take a few more bits on average than INT8 does.

Of a decoder a file says what each layer costs, which `penjing compress sensitivity --bits` made, and the most score for
its size goes first. Of a classifier the scores are found here, and the set of layers with the largest sum is chosen.

Its score is ½ Δyᵀ F Δy, averaged over images: Δy is the error of the layer's outputs, F = Jᵀ (diag p − p pᵀ) J the
Fisher information of the network's answer p in them, J the derivative of the logits. This is the second-order estimate
of the Kullback-Leibler divergence, in nats an image, between the answers of the floating network and those with this
layer quantized. diag p − p pᵀ = S Sᵀ with S = diag √p − p √pᵀ, so that (Δy · Jᵀ S ε)² with random signs ε has the
wanted mean: one backward pass a batch serves all layers. (Drawing classes from p instead, the usual way, rests on rare
draws where the network is sure. Kin: https://arxiv.org/abs/1911.03852 and ModelOpt's AutoQuantize, which take
diagonals.)
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from penjing.compress.decoder.check import checkpoint_hashes
from penjing.compress.decoder.settings import Int8Settings
from penjing.compress.quantize.place_resnet import Layer, apply_quantization, calibrate, layers, set_mode
from penjing.compress.quantize.targets import ClassifierSettings, TargetName
from penjing.compress.samples.data import ImageData
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError
from penjing.core.models.resnet import ResNet

FLOAT_BITS, STORED_BITS = 32, 8  # of a weight; those within ±63 are stored in 8 too
GRAINS = 1 << 14  # of a larger budget, to which sizes are rounded up
RESULT_FILE = "sensitivity.json"  # of `penjing compress sensitivity`
S = TypeVar("S", bound=ClassifierSettings)
D = TypeVar("D", bound=Int8Settings)


def fisher_scores(model: nn.Module, data: ImageData, seed: int = 0) -> dict[str, float]:
    """Quantized layer → its score, see above. `model` is calibrated, in evaluation mode, and ends with all quantizers
    off.

    Args:
        seed: of the signs.
    """
    found = quantized_layers(model)
    sums = {name: 0.0 for name, _ in found}
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str, layer: Layer) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            with torch.no_grad(), quantizers_on(layer):
                seen[name] = output, layer.forward(*arguments) - output  # not the call, which would come here again

        return hook

    generator = torch.Generator().manual_seed(seed)
    set_mode(model, "off")
    count = 0
    with ExitStack() as stack:
        for name, layer in found:
            stack.callback(layer.register_forward_hook(watch(name, layer)).remove)
        for (images,) in data.inputs():
            logits = model(images)
            answer = logits.detach().softmax(1)
            root = answer.sqrt()
            signs = torch.randint(0, 2, answer.shape, generator=generator) * 2 - 1
            upstream = root * signs - answer * (root * signs).sum(1, keepdim=True)
            outputs, errors = zip(*(seen[name] for name, _ in found), strict=True)
            gradients = torch.autograd.grad(logits, outputs, upstream)
            for (name, _), gradient, error in zip(found, gradients, errors, strict=True):
                sums[name] += float((gradient * error).flatten(1).sum(1).double().square().sum())
            count += len(images)
    return {name: value / (2 * count) for name, value in sums.items()}


def quantized_layers(model: nn.Module) -> list[tuple[str, Layer]]:
    """The layers that a target does not leave floating."""
    return [(name, layer) for name, layer in layers(model) if layer.weight_quantizer is not None]


@contextmanager
def quantizers_on(layer: nn.Module) -> Iterator[None]:
    """The quantizers inside `layer` are on inside the block."""
    set_mode(layer, "on")
    try:
        yield
    finally:
        set_mode(layer, "off")


def within_bits(floating: ResNet, target: TargetName, settings: S, data: ImageData) -> S:
    """`settings` with `effective_bits` resolved: the layers of `floating` that the budget lets stay floating are added
    to `keep`, so chosen that their scores' sum is the largest.

    Raises:
        ConfigError: the layers that stay floating anyway exceed the budget.
    """
    if settings.effective_bits is None:
        return settings
    model = apply_quantization(copy.deepcopy(floating), target, settings)
    sizes = weights_of(model)
    total = sum(sizes.values())
    found = [name for name, _ in quantized_layers(model)]
    needed = FLOAT_BITS - sum(sizes[name] for name in found) * (FLOAT_BITS - STORED_BITS) / total
    if needed > settings.effective_bits:
        raise ConfigError(
            f"effective_bits={settings.effective_bits:g} cannot be kept: target {target} and keep leave "
            f"{', '.join(name for name in sizes if name not in found)} floating, {needed:.2f} bits a weight already; "
            "raise it"
        )
    calibrate(model, data.inputs())
    scores = fisher_scores(model, data)
    budget = (settings.effective_bits - needed) * total / (FLOAT_BITS - STORED_BITS)
    kept = keep_floating(scores, {name: sizes[name] for name in found}, budget)
    return settings.model_copy(update={"keep": (*settings.keep, *kept), "effective_bits": None})


def effective_bits(model: nn.Module) -> float:
    """Mean bits of a weight of the convolutions and linear layers of a quantized model."""
    sizes = weights_of(model)
    stored = sum(sizes[name] for name, _ in quantized_layers(model))
    return FLOAT_BITS - stored * (FLOAT_BITS - STORED_BITS) / sum(sizes.values())


def weights_of(model: nn.Module) -> dict[str, int]:
    """Layer → how many weights it has."""
    return {name: layer.weight.numel() for name, layer in layers(model)}


def keep_floating(scores: dict[str, float], sizes: dict[str, int], budget: float) -> tuple[str, ...]:
    """The names whose sizes together are within `budget` and whose scores sum up to the most (a knapsack, by dynamic
    programming over sizes)."""
    names = [name for name in scores if scores[name] > 0 and sizes[name] <= budget]
    grains = min(int(budget), GRAINS)
    best = np.zeros(grains + 1)
    taken = np.zeros((len(names), grains + 1), dtype=np.bool_)
    costs = [-(-sizes[name] * grains // int(budget)) for name in names]
    for row, name, cost in zip(taken, names, costs, strict=True):
        with_it = np.full_like(best, -np.inf)
        with_it[cost:] = best[: grains + 1 - cost] + scores[name]
        row[:] = with_it > best
        best = np.maximum(best, with_it)
    room, chosen = grains, []
    for row, name, cost in zip(taken[::-1], names[::-1], costs[::-1], strict=True):
        if row[room]:
            chosen.append(name)
            room -= cost
    return tuple(chosen[::-1])


def choose_kept(result: dict[str, Any], budget: float) -> list[str]:
    """The linear layers that stay floating so that weights take `budget` bits on average, INT8 being 8.

    Most score for its size first; what no longer fits is passed over.

    Args:
        result: of `sensitivity.bits.sensitivity_to_bits` of a decoder, with a width of 8.
    """
    linears = result["linears"]
    room = round((budget - STORED_BITS) * sum(row["parameters"] for row in linears), 3)  # bits; 9.2 is not quite 9.2
    kept = []
    for row in sorted(linears, key=lambda row: -row["scores"]["8"] / row["parameters"]):
        cost = (FLOAT_BITS - STORED_BITS) * row["parameters"]
        if cost <= room:
            kept.append(row["name"])
            room -= cost
    return sorted(kept)


def kept_by_budget(settings: D, model: Path) -> D:
    """`settings` for the decoder in `model` with their budget of effective bits resolved into `keep`.

    Raises:
        ConfigError: the sensitivity file is missing, was made of another model, or has no width of 8.
    """
    if settings.effective_bits is None or settings.sensitivity is None:
        return settings
    path = settings.sensitivity / RESULT_FILE if settings.sensitivity.is_dir() else settings.sensitivity
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        is_bits = result["kind"] == "bits"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"sensitivity = {path}: {error!r}; make it with 'penjing compress sensitivity {model} --bits'"
        ) from None
    if not is_bits or 8 not in result["settings"]["widths"]:
        raise ConfigError(f"sensitivity = {path} has no scores of 8 bits; make it with --bits --widths 8")
    if result["input"] != checkpoint_hashes(open_checkpoint(model)):
        raise ConfigError(f"sensitivity = {path} was made of another model than {model}; make it again")
    keep = tuple(dict.fromkeys((*settings.keep, *choose_kept(result, settings.effective_bits))))
    resolved = settings.model_copy(update={"keep": keep, "effective_bits": None, "sensitivity": None})
    return resolved.model_copy(update={"lm_head": "keep"}) if "lm_head" in keep else resolved
