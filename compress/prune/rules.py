"""What each ATen operation does to labels. What flows through one that is not listed stays whole; nothing is guessed.

A rule takes the labeler and the call and returns the label of the result, or a list of labels for several results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node

from penjing.compress.prune.labels import NONE, Label, Labeler


class UnknownOperation(Exception):  # noqa: N818  (the analysis freezes what flows through it, and says so)
    """No rule says what an operation, or this use of it, does to labels."""


@dataclass(frozen=True)
class Call:
    """One node with the labels of the tensors that it takes."""

    name: str  # "conv2d" for aten.conv2d.default
    node: Node
    labels: dict[Node, Any]

    def arg(self, index: int, name: str = "", default: Any = None) -> Any:
        """The argument as the graph has it."""
        if index < len(self.node.args):
            return self.node.args[index]
        return self.node.kwargs.get(name, default)

    def label(self, argument: Any) -> Label:
        """The label of an argument; numbers and None have none."""
        return self.labels[argument] if isinstance(argument, Node) else NONE

    def shape(self, argument: Any = None) -> tuple[int, ...]:
        """The shape of an argument, or of the result."""
        return tuple(value_of(self.node if argument is None else argument).shape)


Rule = Callable[[Labeler, Call], Any]
RULES: dict[Any, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for `aten` operations, all overloads."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def value_of(argument: Any) -> Any:
    """The fake tensor of a node; a plain number is itself."""
    return argument.meta["val"] if isinstance(argument, Node) else argument


def tensors_of(arguments: Sequence[Any]) -> list[Node]:
    """The nodes among `arguments` that are tensors."""
    return [a for a in arguments if isinstance(a, Node) and isinstance(value_of(a), torch.Tensor)]


ELEMENTWISE = """
add sub mul div rsub pow neg abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square sign sgn floor ceil
round trunc frac remainder fmod floor_divide true_divide sin cos tan asin acos atan atan2 sinh cosh tanh erf erfc erfinv
relu relu6 silu gelu sigmoid hardswish hardsigmoid hardtanh leaky_relu elu celu selu mish softplus softsign log_sigmoid
hardshrink softshrink tanhshrink threshold logit sinc expit special_expit rrelu
clamp clamp_min clamp_max maximum minimum fmax fmin where lerp addcmul addcdiv logaddexp hypot xlogy heaviside
nan_to_num dropout feature_dropout alpha_dropout clone contiguous detach alias to _to_copy type_as float
eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor
isfinite isnan isinf masked_fill lift_fresh_copy lift_fresh __and__ __or__
zeros_like ones_like full_like empty_like rand_like fill _weight_norm
"""


@rule(*ELEMENTWISE.split())
def elementwise(labeler: Labeler, call: Call) -> Label:
    nodes = tensors_of([*call.node.args, *call.node.kwargs.values()])
    return labeler.broadcast([call.label(node) for node in nodes], [call.shape(node) for node in nodes])


@rule("prelu")
def prelu(labeler: Labeler, call: Call) -> Label:
    """One slope for each channel, or one for all."""
    x, slope = call.arg(0), call.arg(1)
    shape = call.shape(x)
    if call.shape(slope) in ((), (1,)) or len(shape) < 2:
        return call.label(x)
    slopes = tuple(factor.reshape([-1 if dim == 1 else 1 for dim in range(len(shape))]) for factor in call.label(slope))
    channels = [shape[1] if dim == 1 else 1 for dim in range(len(shape))]
    return labeler.broadcast([call.label(x), slopes], [shape, channels])


@rule(
    *("arange", "scalar_tensor", "randn", "rand", "linspace", "eye", "_assert_tensor_metadata", "tensor"),
    *("sym_size", "sym_numel", "sym_stride", "numel"),
)
def constant(labeler: Labeler, call: Call) -> Label:
    return NONE


@rule("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty")
def filled(labeler: Labeler, call: Call) -> Label:
    """One value everywhere: it is as large as what it meets."""
    if not labeler.rewrites:
        return NONE
    sizes = call.arg(1 if call.name.startswith("new_") else 0, "size")
    return labeler.fresh([size if isinstance(size, int) else 1 for size in sizes])


def num_results(call: Call) -> int | None:
    """How many tensors the operation gives; None for one that is no tuple."""
    value = value_of(call.node)
    return len(value) if isinstance(value, (tuple, list)) else None


def for_each(call: Call, label: Label) -> Any:
    """`label` for each of the results."""
    count = num_results(call)
    return label if count is None else [label] * count


MIXED_DIM = {"sort": (1, -1), "argsort": (1, -1), "topk": (2, -1), "argmax": (1, None), "argmin": (1, None)}


@rule(
    *("softmax", "_softmax", "log_softmax", "_log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin"),
    *("normalize", "sort", "argsort", "topk"),
)
def mixing(labeler: Labeler, call: Call) -> Any:
    """Each result along a dimension depends on all its elements: none can go alone."""
    x = call.arg(0)
    place, default = MIXED_DIM.get(call.name, (1, None))
    dim = cast(Any, call.node.kwargs).get("dim", call.arg(place, default=default))
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise UnknownOperation("without a dimension")
    return for_each(call, labeler.pinned(call.label(x), [dim % len(call.shape(x))]))


POOLED = """
max_pool avg_pool adaptive_avg_pool adaptive_max_pool _adaptive_avg_pool upsample_nearest _upsample_nearest_exact
upsample_bilinear upsample_bicubic upsample_linear upsample_trilinear _upsample_bilinear_aa _upsample_bicubic_aa
reflection_pad replication_pad
"""


@rule(
    *(
        name.replace("_aa", "2d_aa") if name.endswith("_aa") else f"{name}{d}d"
        for name in POOLED.split()
        for d in "123"
    ),
    "max_pool2d_with_indices",
)
def spatial(labeler: Labeler, call: Call) -> Any:
    """Channels stay apart; places mix."""
    x = call.arg(0)
    num_dims, wide = len(call.shape(x)), int(next(letter for letter in call.name if letter.isdigit()))
    return for_each(call, labeler.pinned(call.label(x), range(num_dims - wide, num_dims)))


@rule("grid_sampler", "grid_sampler_2d")
def sampler(labeler: Labeler, call: Call) -> Label:
    """Channels stay apart; where they are read is fixed."""
    x, places = call.arg(0), call.arg(1)
    labeler.freeze(call.label(places))
    return labeler.pinned(call.label(x), range(2, len(call.shape(x))))


@rule(
    *("mean", "sum", "amax", "amin", "var", "std", "var_mean", "std_mean", "any", "all", "max", "min", "prod"),
    *("norm", "linalg_vector_norm", "logsumexp", "argmax", "argmin", "median"),
)
def reduction(labeler: Labeler, call: Call) -> Any:
    """Sums and means are over what is left; what counts places, or adds exponentials, needs them all."""
    x = call.arg(0)
    if tensors_of([call.arg(1)]):
        return elementwise(labeler, call)  # max.other
    num_dims = len(call.shape(x))
    dims = cast(Any, call.node.kwargs).get("dim", call.arg(2 if "norm" in call.name else 1))
    dims = (
        list(range(num_dims))
        if dims is None or dims == [] or isinstance(dims, bool)
        else [dims]
        if isinstance(dims, int)
        else list(dims)
    )
    dims = sorted(dim % num_dims for dim in dims)
    label = call.label(x)
    counted = num_results(call) is not None and call.name in ("max", "min")
    if counted or call.name in ("logsumexp", "argmax", "argmin", "median"):
        label = labeler.pinned(label, dims)
    label = labeler.reduce(label, dims)
    result = value_of(call.node)
    if len((result[0] if isinstance(result, (tuple, list)) else result).shape) != num_dims:
        label = tuple(factor.squeeze(tuple(dims)) for factor in label)
    return for_each(call, label)
