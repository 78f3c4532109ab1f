"""A quantized graph sees samples: ranges of activations, corrections of biases, and how far each layer is off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from penjing.compress.graph.place import Product, products
from penjing.compress.quantize.targets import GraphSettings
from penjing.compress.rounding.modes import activation_quantizers, set_mode
from penjing.compress.samples.data import Samples
from penjing.core.errors import InputError, first_line
from penjing.core.graph.network import Network, tensor_at

See = Callable[[Node, tuple[Any, ...], dict[str, Any], Any], Any]


@torch.no_grad()
def prepare_graph(network: Network, floating: Network, settings: GraphSettings, samples: Samples) -> None:
    """Calibrate `network` on `samples`, and correct its biases if the settings say so: all that precedes training.

    Args:
        floating: the network that quantizers were placed into, `prepared` and without them.

    Raises:
        InputError: a weight or an activation is not finite, or the data do not fit.
    """
    calibrate_graph(network, samples.inputs())
    if settings.correct_bias:
        correct_graph_biases(network, floating, samples.inputs())


@torch.no_grad()
def calibrate_graph(network: Network, batches: Iterable[tuple[Tensor, ...]]) -> None:
    """Find every range by running the floating graph over `batches` (its inputs), then round.

    Raises:
        InputError: a weight or an activation holds NaN or infinity, or nothing was seen; the layer is named.
    """
    module = network.module
    check_weights(module)
    module.eval()
    set_mode(module, "observe")
    try:
        look(module, batches)
    finally:
        set_mode(module, "off")
    for quantizer in activation_quantizers(module):
        quantizer.calibrate()
    for product in products(network):
        if product.rounding is not None:
            product.rounding.calibrate(tensor_at(module, str(product.weight.target)))


def check_weights(model: nn.Module) -> None:
    """Refuse a damaged network.

    Raises:
        InputError: a weight holds NaN or infinity.
    """
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise InputError(f"the weight {name} holds NaN or infinity; the checkpoint is damaged, train it again")


def look(run: Callable[..., Any], batches: Iterable[tuple[Tensor, ...]]) -> None:
    """Run a network over calibration data for what its observers see.

    Raises:
        InputError: the data do not fit the network.
    """
    try:
        for inputs in batches:
            run(*inputs)
    except RuntimeError as error:  # torch names no layer for a wrong shape
        raise InputError(f"calibration: the data do not fit the model ({first_line(error)})") from error


@torch.no_grad()
def correct_graph_biases(network: Network, floating: Network, batches: Iterable[tuple[Tensor, ...]]) -> None:
    """Change the biases of `network`, calibrated, so that the mean of each channel of its layers is `floating`'s.

    https://arxiv.org/abs/1906.04721, section 4.2, with means measured on calibration data. Layers are corrected in
    order, each on inputs from layers that are corrected already; one pass over `batches`: after n of them a bias holds
    the mean of n corrections. Layers without a bias are left alone. A bias that several layers read gets the mean of
    their corrections; what comes behind each of them is corrected as if it had its own.

    Args:
        floating: as `prepared` made it of the same network.
    """
    means: dict[str, Tensor] = {}
    found = {product.node.name for product in products(network) if product.rounding is not None}
    readers = Counter(_bias(node) for node in network.module.graph.nodes if node.name in found)
    wanted: dict[str, list[Tensor]] = {}  # of a bias, what the readers that ran would add to it
    count = 1

    def keep(node: Node, _: tuple[Any, ...], __: dict[str, Any], output: Any) -> Any:
        if node.name in found:
            means[node.name] = _channels(node, output)
        return output

    def correct(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        name = _bias(node) if node.name in found else None
        if name is None:
            return output
        correction = (means[node.name] - _channels(node, output)) / count
        output = node.target(*args[:2], args[2] + correction, *args[3:], **kwargs)  # type: ignore[operator]
        corrections = wanted.setdefault(name, [])
        corrections.append(correction)
        if len(corrections) == readers[name]:
            tensor_at(network.module, name).add_(torch.stack(wanted.pop(name)).mean(0))
        return output

    for inputs in batches:
        Watched(floating.module, keep).run(*inputs)
        Watched(network.module, correct).run(*inputs)
        count += 1


@torch.no_grad()
def graph_layer_errors(network: Network, batches: Iterable[tuple[Tensor, ...]]) -> list[dict[str, Any]]:
    """Relative root-mean-square errors of a calibrated graph's layers: of the weight, and of the output when the
    layer's own quantizers alone are on; JSON-ready, in order. All quantizers are on before and after."""
    found = {product.node.name: product for product in products(network)}
    sums = {name: torch.zeros(2, dtype=torch.float64) for name in found}

    def compare(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        product = found.get(node.name)
        if product is not None and product.rounding is not None:
            rounded = node.target(*rounded_arguments(product, args), **kwargs)  # type: ignore[operator]
            sums[node.name] += torch.stack([(rounded - output).double().square().sum(), output.double().square().sum()])
        return output

    set_mode(network.module, "off")
    try:
        for inputs in batches:
            Watched(network.module, compare).run(*inputs)
    finally:
        set_mode(network.module, "on")
    return [
        {
            "name": product.name,
            "format": "float32" if product.rounding is None else product.rounding.format.name,
            "weight": _weight_error(network, product),
            "output": _ratio(*sums[name].tolist()),
        }
        for name, product in found.items()
    ]


class Watched(fx.Interpreter):
    """Runs a graph; after each operator `see` (node, its arguments, its result) says what others read."""

    def __init__(self, module: fx.GraphModule, see: See) -> None:
        super().__init__(module)
        self._see = see

    def run_node(self, n: Node) -> Any:
        output = super().run_node(n)
        if n.op != "call_function":
            return output
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return self._see(n, args, kwargs, output)


def rounded_arguments(product: Product, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a product with its input and weight rounded."""
    x, weight, *rest = args
    assert product.rounding is not None
    quantizers = [each for each in (product.before, product.rounding) if each is not None]
    for each in quantizers:
        each.mode = "on"
    result = (x if product.before is None else product.before(x), product.rounding(weight), *rest)
    for each in quantizers:
        each.mode = "off"
    return result


def _weight_error(network: Network, product: Product) -> float:
    if product.rounding is None:
        return 0.0
    weight = tensor_at(network.module, str(product.weight.target))
    error = (product.rounding(weight) - weight).double().square().sum()
    return _ratio(float(error), float(weight.double().square().sum()))


def _ratio(error: float, size: float) -> float:
    """The root of `error` / `size`, two sums of squares; 0 where there is nothing."""
    return (error / size) ** 0.5 if size > 0 else 0.0


def _bias(node: Node) -> str | None:
    """The name of the bias that a product adds."""
    bias = node.args[2] if len(node.args) > 2 else None
    return str(bias.target) if isinstance(bias, Node) and bias.op == "get_attr" else None


def _channels(node: Node, output: Tensor) -> Tensor:
    """(channels,) means of what a product gives."""
    axis = output.dim() - 1 if node.target is torch.ops.aten.linear.default else 1
    return output.transpose(0, axis).flatten(1).mean(1) if output.dim() > 1 else output
