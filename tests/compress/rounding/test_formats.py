"""Number formats against ONNX's reference operators and what the ranges promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from penjing.compress.rounding.formats import (
    DEAD_SCALE,
    FP8,
    INT7_WEIGHT,
    INT8_ACTIVATION,
    INT8_WEIGHT,
    UINT8,
    NumberFormat,
    activation_format,
    weight_format,
)
from penjing.core.errors import ConfigError

FORMATS = [INT8_WEIGHT, INT7_WEIGHT, INT8_ACTIVATION, UINT8, FP8]
finite = st.floats(-1e6, 1e6, width=32)


@pytest.mark.parametrize("number_format", FORMATS)
@given(low=finite, high=finite)
def test_the_ends_of_a_range_are_stored_within_half_a_step(
    number_format: NumberFormat, low: float, high: float
) -> None:
    low, high = min(low, high, 0.0), max(low, high, 0.0)
    scale, zero = number_format.parameters(torch.tensor(low), torch.tensor(high))
    values = torch.tensor([low, 0.0, high])
    back = (number_format.store(values / scale, zero) - zero) * scale
    assert back[1] == 0
    step = scale * (16 if number_format is FP8 else 0.5)  # of FP8 at the top: 448 to 416
    # An affine zero point is rounded too, so an end may lose another half step.
    assert bool(((back - values).abs() <= step * (2.001 if number_format is UINT8 else 1.001)).all())


@pytest.mark.parametrize(("number_format", "kind"), [(INT8_ACTIVATION, TensorProto.INT8), (UINT8, TensorProto.UINT8)])
def test_rounding_is_that_of_onnx(number_format: NumberFormat, kind: int) -> None:
    x = torch.linspace(-3, 5, 4001)
    scale, zero = number_format.parameters(torch.tensor(-2.0), torch.tensor(4.0))
    graph = helper.make_graph(
        [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])],
        "q",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"]),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, []),
            helper.make_tensor_value_info("z", kind, []),
        ],
        [helper.make_tensor_value_info("q", kind, ["n"])],
    )
    evaluator = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))
    integer = np.int8 if kind == TensorProto.INT8 else np.uint8
    q = np.asarray(
        next(iter(evaluator.run(None, {"x": x.numpy(), "s": scale.numpy(), "z": zero.numpy().astype(integer)})))
    )
    assert np.array_equal(number_format.store(x / scale, zero).numpy().astype(np.int32), q.astype(np.int32))


def test_ties_go_to_even_and_fp8_saturates() -> None:
    assert INT8_WEIGHT.store(torch.tensor([0.5, 1.5, -0.5, 200.0, -200.0])).tolist() == [0, 2, 0, 127, -127]
    assert INT8_ACTIVATION.store(torch.tensor(-200.0)) == -128
    assert FP8.store(torch.tensor([1000.0, -1000.0, 17.0, 19.0])).tolist() == [448, -448, 16, 20]


def test_zeros_and_tiny_ranges_have_a_usable_scale() -> None:
    for number_format in FORMATS:
        scale, zero = number_format.parameters(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1e-42]))
        assert scale[0] == DEAD_SCALE
        assert scale[1] > 0
        assert bool(torch.isfinite(1 / scale).all())
        assert bool((zero == 0).all())


def test_unknown_combinations_are_refused() -> None:
    with pytest.raises(ConfigError, match="weights cannot be uint8"):
        weight_format("uint8")
    with pytest.raises(ConfigError, match="activations cannot be int7"):
        activation_format("int7")
