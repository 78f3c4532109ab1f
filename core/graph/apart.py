"""Operators that torch's exporter to ONNX takes apart, taken apart before.

The exporter traces a program once more for that, with arithmetic on symbolic sizes, which takes a third of an export.
It need not where nothing is left to take apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.export import ExportedProgram

from penjing.core.errors import InputError

_aten = torch.ops.aten


def _reshaped(x: Tensor, sizes: Sequence[int]) -> Tensor:
    # A view of a copy, which is no operator in ONNX, for a view of what lies otherwise in memory is refused.
    return _aten.view.default(_aten.clone.default(x, memory_format=torch.contiguous_format), sizes)


def _flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    if x.dim() == 0:
        return _reshaped(x, [1])
    start, end = start_dim % x.dim(), end_dim % x.dim() + 1
    return _reshaped(x, [*x.shape[:start], math.prod(x.shape[start:end]), *x.shape[end:]])


def _unflatten(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    axis, known = dim % x.dim(), math.prod(size for size in sizes if size != -1)
    inside = [x.shape[axis] // known if size == -1 else size for size in sizes]
    return _reshaped(x, [*x.shape[:axis], *inside, *x.shape[axis + 1 :]])


def _transposed(x: Tensor) -> Tensor:
    return x.permute(tuple(reversed(range(x.dim()))))


def _expanded(x: Tensor, other: Tensor) -> Tensor:
    return x.expand(other.shape)


def _as_type(x: Tensor, dtype: torch.dtype, *_: Any, **__: Any) -> Tensor:
    return x if x.dtype == dtype else _aten._to_copy.default(x, dtype=dtype)


def _subtracted_from(x: Tensor, other: float, alpha: float = 1) -> Tensor:
    return _aten.sub.Tensor(other, x, alpha=alpha)


def _kept(x: Tensor, p: float, train: bool) -> Tensor:
    return _aten.dropout.default(x, p, train) if train else x


def _normalized(  # as the operator has them
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Tensor:
    if training or mean is None or variance is None:
        return _aten.batch_norm.default(x, weight, bias, mean, variance, training, momentum, eps, cudnn)
    return _aten._native_batch_norm_legit_no_training.default(x, weight, bias, mean, variance, momentum, eps)[0]


def _log_sigmoid(x: Tensor) -> Tensor:
    # ONNX Runtime takes no sigmoid below that of −18, and the exporter the logarithm of it.
    return -_aten.softplus.default(-x)


def _added_exponentials(x: Tensor, other: Tensor) -> Tensor:
    return _aten.maximum.default(x, other) + _aten.softplus.default(-(x - other).abs())  # the exporter's overflows


def _averaged(pool: OpOverload) -> Callable[..., Tensor]:
    """An average with a divisor of its own, which the exporter would leave out."""

    def averaged(
        x: Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: int | Sequence[int] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        if divisor_override is None:
            return pool(x, kernel_size, stride, padding, ceil_mode, count_include_pad)
        if ceil_mode:
            raise InputError("an average pool with divisor_override and ceil_mode has no form in ONNX")
        mean = pool(x, kernel_size, stride, padding)
        places = math.prod(kernel_size) ** (x.dim() - 2 if len(kernel_size) == 1 else 1)
        return mean * (places / divisor_override)

    return averaged


_PARTS: dict[Any, Callable[..., Tensor]] = {
    _aten.reshape.default: _reshaped,
    _aten.flatten.using_ints: _flatten,
    _aten.unflatten.int: _unflatten,
    _aten.numpy_T.default: _transposed,
    _aten.expand_as.default: _expanded,
    _aten.to.dtype: _as_type,
    _aten.rsub.Scalar: _subtracted_from,
    _aten.dropout.default: _kept,
    _aten.batch_norm.default: _normalized,
    _aten.log_sigmoid.default: _log_sigmoid,
    _aten.logaddexp.default: _added_exponentials,
    _aten.avg_pool2d.default: _averaged(_aten.avg_pool2d.default),
    _aten.avg_pool3d.default: _averaged(_aten.avg_pool3d.default),
}
WHOLE = (
    _aten.conv1d.default,
    _aten.conv2d.default,
    _aten.conv3d.default,
    _aten.group_norm.default,
    _aten.instance_norm.default,
    _aten.layer_norm.default,
    _aten.linear.default,
    _aten.log_softmax.int,
    _aten.matmul.default,
    _aten.max_pool2d.default,
    _aten.pad.default,
    _aten.prelu.default,
    _aten.softmax.int,
    _aten.sym_size.int,
    _aten.where.ScalarOther,
    _aten.where.ScalarSelf,
)
"""Made of other operators, and translated as one all the same."""


def take_apart(graph: fx.Graph) -> None:
    """Have those operators of `graph` that the exporter would take apart traced as what they are made of, in place."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = _PARTS.get(node.target, node.target)


def leave_whole(program: ExportedProgram) -> None:
    """Let torch's exporter take `program` as it is, unless something in it has to be taken apart still."""
    decompose = program.run_decompositions

    def run_decompositions(table: dict[Any, Any] | None = None, **options: Any) -> ExportedProgram:
        operators = {node.target for node in program.graph.nodes if node.op == "call_function"}
        if table is not None and not any(target in table or _is_made_of_others(target) for target in operators):
            return program
        return decompose(table, **options)

    program.run_decompositions = run_decompositions  # type: ignore[method-assign]


def _is_made_of_others(target: Any) -> bool:
    if not isinstance(target, OpOverload) or target in WHOLE:
        return False
    return target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
