"""Mixed precision of a graph: which layers stay floating when weights may take a few more bits on average than INT8.

A layer's score is ½ Δyᵀ F Δy, averaged over samples: Δy is the error of the layer's outputs, F = Jᵀ (diag p − p pᵀ) J
the Fisher information of the network's answer p in them, J the derivative of the logits. This is the second-order
estimate of the Kullback-Leibler divergence, in nats a sample, between the answers of the floating network and those
with this layer quantized. diag p − p pᵀ = S Sᵀ with S = diag √p − p √pᵀ, so that (Δy · Jᵀ S ε)² with random signs ε has
the wanted mean: one backward pass a batch serves all layers. (Drawing classes from p instead, the usual way, rests on
rare draws where the network is sure. Kin: https://arxiv.org/abs/1911.03852 and ModelOpt's AutoQuantize, which take
diagonals.) Where outputs are no classes, F = Jᵀ J, and the score is half the squared change of the outputs.

The set of layers with the largest sum of scores within the budget stays floating.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from penjing.compress.graph.calibrate import Watched, calibrate_graph, rounded_arguments
from penjing.compress.graph.place import place_quantizers, products
from penjing.compress.quantize.bits import FLOAT_BITS, STORED_BITS, keep_floating
from penjing.compress.quantize.targets import GraphSettings
from penjing.compress.rounding.modes import set_mode
from penjing.core.errors import ConfigError
from penjing.core.graph.network import Network, tensor_at

SMALLEST_SHARE = 1e-12  # of an answer that the network gives as a share already


def fisher_scores(network: Network, batches: Iterable[tuple[Tensor, ...]]) -> dict[str, float]:
    """Quantized layer → its score, see above.

    Args:
        network: calibrated; ends with all quantizers off.
    """
    found = {each.node.name: each for each in products(network) if each.rounding is not None}
    sums = dict.fromkeys((each.name for each in found.values()), 0.0)
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if node.name in found:
            with torch.no_grad():
                rounded = node.target(*rounded_arguments(found[node.name], args), **kwargs)  # type: ignore[operator]
                seen[node.name] = output, rounded - output
        return output

    generator = torch.Generator().manual_seed(0)  # of the signs
    classes = network.config.meaning == "classes"
    set_mode(network.module, "off")
    count = 0
    with torch.enable_grad():
        for inputs in batches:
            seen.clear()
            answers = [each for each in Watched(network.module, watch).run(*inputs) if each.is_floating_point()]
            outputs, errors = zip(*seen.values(), strict=True)
            wanted = [logits_of(answers[0])] if classes else answers
            upstream = [_upstream(each.detach(), classes, generator) for each in wanted]
            gradients = torch.autograd.grad(wanted, outputs, upstream, allow_unused=True)
            for name, gradient, error in zip(seen, gradients, errors, strict=True):
                if gradient is not None:
                    sums[found[name].name] += float((gradient * error).flatten(1).sum(1).double().square().sum())
            count += len(inputs[0])
    return {name: value / (2 * count) for name, value in sums.items()}


def within_bits(
    network: Network, settings: GraphSettings, batches: Callable[[], Iterable[tuple[Tensor, ...]]]
) -> GraphSettings:
    """`settings` with `effective_bits` resolved: the layers that the budget lets stay floating are added to `keep`.

    Args:
        network: `prepared`, without quantizers; it stays as it is.
        batches: gives samples of its inputs, more than once.

    Raises:
        ConfigError: the layers that stay floating anyway exceed the budget.
    """
    if settings.effective_bits is None:
        return settings
    made = place_quantizers(network.copy(), settings)
    sizes = _sizes(made)
    total = sum(sizes.values())
    found = list(dict.fromkeys(each.name for each in products(made) if each.rounding is not None))
    needed = graph_bits(made)
    if needed > settings.effective_bits:
        raise ConfigError(
            f"effective_bits={settings.effective_bits:g} cannot be kept: target {settings.target} and keep leave "
            f"{', '.join(name for name in sizes if name not in found)} floating, {needed:.2f} bits a weight already; "
            "raise it"
        )
    calibrate_graph(made, batches())
    scores = fisher_scores(made, batches())
    budget = (settings.effective_bits - needed) * total / (FLOAT_BITS - STORED_BITS)
    kept = keep_floating(scores, {name: sizes[name] for name in found}, budget)
    return settings.model_copy(update={"keep": (*settings.keep, *kept), "effective_bits": None})


def graph_bits(network: Network) -> float:
    """Mean bits of a weight of the convolutions and linear layers of a quantized graph."""
    sizes = _sizes(network)
    stored = {each.name for each in products(network) if each.rounding is not None}
    rounded = sum(size for name, size in sizes.items() if name in stored)
    return FLOAT_BITS - rounded * (FLOAT_BITS - STORED_BITS) / sum(sizes.values())


def _sizes(network: Network) -> dict[str, int]:
    """Layer → how many weights it has."""
    return {each.name: tensor_at(network.module, str(each.weight.target)).numel() for each in products(network)}


def logits_of(answers: Tensor) -> Tensor:
    """(N, classes) logits of a network's answers; of shares, which some networks give, their logarithms."""
    shares = answers.detach()
    if bool((shares >= 0).all()) and bool(((shares.sum(1) - 1).abs() < 1e-3).all()):
        return answers.clamp(min=SMALLEST_SHARE).log()
    return answers


def _upstream(answers: Tensor, classes: bool, generator: torch.Generator) -> Tensor:
    """S ε of answers (N, …), and ε where they are no classes."""
    signs = torch.randint(0, 2, answers.shape, generator=generator).to(answers.dtype) * 2 - 1
    if not classes:
        return signs
    shares = answers.softmax(1)
    root = shares.sqrt()
    return root * signs - shares * (root * signs).sum(1, keepdim=True)
