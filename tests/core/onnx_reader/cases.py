"""One operator each: what it reads, its attributes, its version."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

rng = np.random.default_rng(0)


def f(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def i(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def scales(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


@dataclass
class Case:
    """`inputs` are what the network takes, `weights` what the file holds; both in the order of the operator's."""

    operator: str
    inputs: list[np.ndarray]
    weights: list[np.ndarray | None] = field(default_factory=list)
    opset: int = 17
    outputs: int = 1
    attributes: dict[str, Any] = field(default_factory=dict)
    close: float = 1e-5

    def __str__(self) -> str:
        said = ",".join(
            f"{key}={value}" for key, value in self.attributes.items() if not isinstance(value, onnx.TensorProto)
        )
        return f"{self.operator}-{self.opset}-{said}"[:70]

    def model(self) -> onnx.ModelProto:
        names = [f"x{index}" for index in range(len(self.inputs))]
        held = [("" if value is None else f"w{index}") for index, value in enumerate(self.weights)]
        outputs = [f"y{index}" for index in range(self.outputs)]
        node = helper.make_node(self.operator, [*names, *held], outputs, name="it", **self.attributes)
        kinds = [helper.np_dtype_to_tensor_dtype(value.dtype) for value in self.inputs]
        graph = helper.make_graph(
            [node],
            "case",
            [
                helper.make_tensor_value_info(name, kind, value.shape)
                for name, kind, value in zip(names, kinds, self.inputs, strict=True)
            ],
            [helper.make_empty_tensor_value_info(name) for name in outputs],
            [
                numpy_helper.from_array(value, name)
                for name, value in zip(held, self.weights, strict=True)
                if value is not None
            ],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)


def case(
    operator: str,
    inputs: Any,
    weights: Any = (),
    opset: int = 17,
    outputs: int = 1,
    close: float = 1e-5,
    **attributes: Any,
) -> Case:
    inputs = [np.array(inputs)] if isinstance(inputs, (np.ndarray, np.generic)) else list(inputs)
    weights = (
        [np.array(weights)]
        if isinstance(weights, (np.ndarray, np.generic))
        else [None if one is None else np.array(one) for one in weights]
    )
    return Case(operator, inputs, weights, opset, outputs, attributes, close)


X = f(2, 3, 4)
EQUAL = np.random.default_rng(1).integers(0, 3, (12, 40)).astype(np.float32)
IMAGE = f(2, 4, 7, 6)
POSITIVE = np.abs(X) + 0.5
LOGICAL = X > 0
SMALL = (np.arange(24).reshape(2, 3, 4) % 7 - 3).astype(np.int32)
NUMBERS = rng.integers(-5, 6, (2, 3, 4)).astype(np.int64)

_EACH = [
    "Abs",
    "Neg",
    "Sign",
    "Floor",
    "Ceil",
    "Round",
    "Exp",
    "Erf",
    "Sin",
    "Cos",
    "Tan",
    "Atan",
    "Sinh",
    "Cosh",
    "Tanh",
    "Asinh",
    "Relu",
    "Sigmoid",
    "Softplus",
    "Softsign",
    "HardSwish",
    "Identity",
    "IsNaN",
]
CASES = [
    *(case(name, X) for name in _EACH),
    *(case(name, POSITIVE) for name in ["Sqrt", "Reciprocal", "Log"]),
    *(case(name, np.clip(X, -0.9, 0.9)) for name in ["Asin", "Acos", "Atanh"]),
    case("Acosh", POSITIVE + 1),
    case("IsInf", np.where(X > 1, np.inf, np.where(X < -1, -np.inf, X)).astype(np.float32), detect_negative=0),
    case("Mish", X, opset=18),
    case("Not", LOGICAL),
    case("LeakyRelu", X, alpha=0.2),
    case("Elu", X, alpha=0.7),
    case("Celu", X, alpha=0.7),
    case("Selu", X),
    case("Selu", X, alpha=1.2, gamma=0.9),
    case("ThresholdedRelu", X, alpha=0.4),
    case("HardSigmoid", X),
    case("HardSigmoid", X, alpha=1 / 6, beta=0.5),
    case("Gelu", X, opset=20),
    case("Gelu", X, opset=20, approximate="tanh"),
    case("Shrink", X, lambd=0.4, bias=0.2),
    case("Swish", X, opset=24, alpha=1.5),
    case("PRelu", IMAGE, f(4, 1, 1)),
    case("PRelu", X, f(1)),
    case("PRelu", X, f(4)),
    case("Clip", X, [np.float32(-0.3), np.float32(0.6)]),
    case("Clip", X, [None, np.float32(0.6)]),
    case("Clip", X, opset=10, min=0.0, max=6.0),
    case("Clip", NUMBERS, [np.int64(-1), np.int64(2)]),
    case("Clip", X, [np.float32(0.6), np.float32(-0.3)]),
    case("Cast", X, to=7),
    case("Cast", NUMBERS, to=1),
    case("Cast", X, to=9),
    case("CastLike", [X, NUMBERS]),
    *(case(name, [X, f(3, 1)]) for name in ["Add", "Sub", "Mul", "Div"]),
    *(case(name, X, np.float32(1.5)) for name in ["Add", "Sub", "Mul", "Div", "Pow", "Equal", "Greater", "Less"]),
    *(case(name, X, f(4)) for name in ["Add", "Mul", "GreaterOrEqual", "LessOrEqual"]),
    case("Add", f(4), f(1, 1)),
    case("Sub", f(), f(3)),
    case("Div", NUMBERS, i(3)),
    case("Div", [NUMBERS, np.where(NUMBERS == 0, 2, NUMBERS)[::-1].copy()]),
    case("Pow", POSITIVE, f(4)),
    case("Pow", NUMBERS, np.int64(2)),
    case("Mod", NUMBERS, i(3)),
    case("Mod", NUMBERS, i(-3)),
    case("Mod", [X, POSITIVE], fmod=1),
    case("BitShift", [NUMBERS.astype(np.uint8), np.full_like(NUMBERS, 2).astype(np.uint8)], direction="RIGHT"),
    *(case(name, [LOGICAL, LOGICAL[:, ::-1].copy()]) for name in ["And", "Or", "Xor"]),
    *(case(name, [NUMBERS, NUMBERS[:, ::-1].copy()], opset=18) for name in ["BitwiseAnd", "BitwiseOr", "BitwiseXor"]),
    case("BitwiseNot", NUMBERS, opset=18),
    *(case(name, [X, f(3, 4), f(4)]) for name in ["Min", "Max", "Sum", "Mean"]),
    case("Where", [LOGICAL, X, f(4)]),
    case("Where", LOGICAL, [np.float32(0), np.float32(1)]),
    *(
        case(name, X, opset=opset, axis=axis)
        for name in ["Softmax", "LogSoftmax", "Hardmax"]
        for opset in (11, 13)
        for axis in (1, -1)
    ),
    case("Softmax", X, opset=11),
    case("Dropout", X),
    case("Dropout", X, opset=7, ratio=0.3),
    *(
        case(name, X, opset=13, axes=[1])
        for name in [
            "ReduceMean",
            "ReduceMax",
            "ReduceMin",
            "ReduceProd",
            "ReduceL1",
            "ReduceL2",
            "ReduceLogSumExp",
            "ReduceSumSquare",
        ]
    ),
    *(
        case(name, X, i(0, -1), opset=18, keepdims=0)
        for name in ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"]
    ),
    case("ReduceLogSum", POSITIVE, axes=[1]),
    *(
        case(name, POSITIVE if "Log" in name else X, i(), opset=18, noop_with_empty_axes=1)
        for name in ["ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare", "ReduceMax"]
    ),
    *(case(name, np.float32(-1.5), opset=13, keepdims=0) for name in ["ReduceL1", "ReduceL2", "ReduceSum"]),
    *(case(name, np.abs(SMALL) + 1, opset=13, axes=[1]) for name in ["ReduceLogSum", "ReduceLogSumExp"]),
    *(case(name, SMALL, opset=13, axes=[1]) for name in ["ReduceMean", "ReduceL1", "ReduceL2", "ReduceProd"]),
    case("ReduceSum", X),
    case("ReduceSum", X, [None], noop_with_empty_axes=1),
    case("ReduceSum", NUMBERS, i(1)),
    case("ArgMax", X, axis=1),
    case("ArgMin", X, axis=-1, keepdims=0),
    case("ArgMax", NUMBERS, axis=2, select_last_index=1),
    case("CumSum", X, np.int64(1)),
    case("CumSum", X, np.int64(1), exclusive=1, reverse=1),
    case("Conv", IMAGE, [f(5, 4, 3, 3), f(5)], pads=[1, 1, 1, 1], strides=[2, 2]),
    case("Conv", IMAGE, [f(4, 2, 3, 3)], pads=[0, 1, 2, 1], group=2, dilations=[2, 1]),
    *(
        case("Conv", IMAGE, [f(5, 4, 3, 2)], auto_pad=how, strides=[2, 1])
        for how in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    case("Conv", f(2, 3, 9), [f(4, 3, 3), f(4)], pads=[1, 1]),
    case("Conv", f(1, 2, 5, 5, 5), [f(3, 2, 2, 2, 2)]),
    case("ConvTranspose", IMAGE, [f(4, 5, 3, 3), f(5)], strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1]),
    case("ConvTranspose", IMAGE, [f(4, 3, 3, 3)], strides=[2, 2], pads=[0, 1, 1, 0], group=2),
    case("ConvTranspose", IMAGE, [f(4, 5, 3, 3)], strides=[2, 2], auto_pad="SAME_UPPER"),
    case("ConvTranspose", IMAGE, [f(4, 5, 3, 3)], strides=[2, 2], output_shape=[14, 12]),
    case("Gemm", f(3, 4), [f(5, 4), f(5)], transB=1),
    case("Gemm", f(3, 4), [f(4, 5), f(1, 5)], alpha=0.5, beta=2.0),
    case("Gemm", f(4, 3), [f(4, 5)], transA=1),
    case("Gemm", [f(3, 4), f(4, 5), f(3, 1)]),
    case("Gemm", f(4, 3), [f(3, 4), f(4, 1)]),
    case("MatMul", X, f(4, 5)),
    case("MatMul", X, f(2, 4, 5)),
    case("MatMul", [X, f(2, 4, 5)]),
    case("MatMul", f(4), f(4, 3)),
    case("Einsum", [X, f(2, 4, 5)], equation="bij,bjk->bik"),
    case("BatchNormalization", IMAGE, [f(4), f(4), f(4), np.abs(f(4)) + 0.1], epsilon=1e-3),
    case("BatchNormalization", f(3, 4), [f(4), f(4), f(4), np.abs(f(4)) + 0.1], opset=9),
    case("InstanceNormalization", IMAGE, [f(4), f(4)]),
    case("LayerNormalization", X, [f(4), f(4)]),
    case("LayerNormalization", X, [f(3, 4)], axis=1),
    case("RMSNormalization", X, f(4), opset=23),
    case("GroupNormalization", IMAGE, [f(2), f(2)], opset=18, num_groups=2),
    case("GroupNormalization", IMAGE, [f(4), f(4)], opset=21, num_groups=2),
    case("GroupNormalization", [IMAGE, f(2), f(2)], opset=18, num_groups=2),
    case("LRN", IMAGE, size=3, alpha=0.1),
    case("LRN", IMAGE, size=5, alpha=0.1, bias=2.0),
    case("LpNormalization", X, axis=1),
    case("LpNormalization", np.stack([X[0], 0 * X[0]]), axis=2, p=1),
    case("MeanVarianceNormalization", IMAGE),
    case("MaxPool", IMAGE, kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 1]),
    case("MaxPool", IMAGE, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    case("MaxPool", IMAGE, kernel_shape=[3, 3], auto_pad="SAME_UPPER", strides=[2, 2]),
    case("MaxPool", IMAGE, kernel_shape=[2, 2], dilations=[2, 2]),
    case("AveragePool", IMAGE, kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    case("AveragePool", IMAGE, kernel_shape=[3, 3], pads=[0, 0, 1, 1], strides=[2, 2]),
    case("AveragePool", IMAGE, kernel_shape=[3, 3], pads=[0, 0, 1, 1], count_include_pad=1),
    *(
        case(name, IMAGE, kernel_shape=[2, 2], pads=[0, 0, 1, 1], strides=[2, 2], ceil_mode=1)
        for name in ("MaxPool", "AveragePool")
    ),
    case("MaxPool", (IMAGE * 9).astype(np.int8), kernel_shape=[2, 2], pads=[0, 0, 1, 1]),
    case("AveragePool", f(2, 3, 9), kernel_shape=[2], strides=[2]),
    case("LpPool", IMAGE, kernel_shape=[2, 2], p=2),
    case("GlobalAveragePool", IMAGE),
    case("GlobalMaxPool", IMAGE),
    case("Shape", X),
    case("Shape", X, start=1),
    case("Size", X),
    case("Reshape", X, i(0, -1)),
    case("Reshape", X, i(4, 6)),
    *(case("Flatten", X, axis=axis) for axis in (0, 1, 2, -1)),
    case("Squeeze", f(1, 3, 1), i(0)),
    case("Squeeze", f(1, 3, 1), opset=11, axes=[0, 2]),
    case("Squeeze", f(1, 3, 1)),
    case("Unsqueeze", X, i(0, -1)),
    case("Unsqueeze", X, opset=11, axes=[1]),
    case("Transpose", X),
    case("Transpose", X, perm=[1, 0, 2]),
    case("Expand", f(3, 1), i(2, 1, 4)),
    case("Tile", f(2, 3), i(2, 1)),
    case("Concat", [X, f(2, 1, 4)], axis=1),
    case("Concat", X, np.zeros((2, 0, 4), np.float32), axis=1),
    case("Split", X, i(1, 3), outputs=2, axis=2),
    case("Split", X, opset=11, outputs=2, axis=0),
    case("Split", f(7, 2), opset=18, outputs=3, num_outputs=3),
    case("Slice", X, [i(0, 1), i(2, 4), i(1, 2), i(1, 2)]),
    case("Slice", X, [i(-1), i(-100), i(2), i(-1)]),
    case("Slice", X, [i(3), i(0), i(2), i(-2)]),
    case("Slice", X, [i(1), i(3), i(2), i(-1)]),
    case("Slice", X, opset=9, starts=[0, 1], ends=[100, -1], axes=[1, 2]),
    case("Gather", X, i(1, 0, -1), axis=1),
    case("Gather", X, np.int64(1), axis=2),
    case("Gather", X, np.array([[0, 1], [2, 0]]), axis=1),
    case("Gather", [X, i(1, -2)], axis=0),
    case("GatherElements", X, np.array([[[0, -1, 1, 0]], [[1, 1, 0, -1]]]), axis=0),
    case("GatherND", X, np.array([[0, 1], [1, 2]])),
    case("ScatterElements", X, [np.array([[[0, 2, 1, -1]]]), f(1, 1, 4)], axis=1),
    case("ScatterElements", X, [np.array([[[0, 2, 1, 1]]]), f(1, 1, 4)], axis=1, opset=18, reduction="add"),
    case("ScatterND", X, [np.array([[0, 1], [1, 2]]), f(2, 4)]),
    case("Pad", X, [i(0, 1, 0, 0, 2, 1), np.float32(0.5)]),
    case("Pad", X, opset=9, pads=[0, 0, 1, 0, 0, 2], value=1.0),
    case("Pad", IMAGE, i(0, 0, 1, 2, 0, 0, 2, 1), mode="reflect"),
    case("Pad", IMAGE, i(0, 0, 1, 2, 0, 0, 2, 1), mode="edge"),
    case("Pad", X, i(0, 0, 1, 0, 0, 2), mode="reflect"),
    case("Pad", f(2, 5), i(0, 1, 0, 1), mode="reflect"),
    case("Pad", X, [i(1, 2), None, i(1)], opset=18),
    case("OneHot", i(1, 0, -1), [np.int64(3), f(2)]),
    case("OneHot", i(1, 0), [np.int64(3), f(2)], axis=0),
    case("TopK", X, i(2), outputs=2, axis=2),
    case("TopK", X, i(2), outputs=2, axis=1, largest=0),
    case("TopK", EQUAL, i(9), outputs=2),
    case("TopK", EQUAL, i(9), outputs=2, axis=0, largest=0),
    case("Trilu", f(4, 4), upper=0),
    case("Trilu", f(2, 3, 4), np.int64(1)),
    case("DepthToSpace", f(1, 8, 2, 3), blocksize=2),
    case("DepthToSpace", f(1, 8, 2, 3), blocksize=2, mode="CRD"),
    case("SpaceToDepth", f(1, 2, 4, 6), blocksize=2),
    case("EyeLike", f(3, 4)),
    case("Resize", IMAGE, [None, scales(1, 1, 2, 2)], mode="nearest"),
    case(
        "Resize",
        IMAGE,
        [None, scales(1, 1, 2, 2)],
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    ),
    case("Resize", IMAGE, [None, scales(1, 1, 0.5, 0.5)], mode="nearest"),
    case("Resize", IMAGE, [None, scales(1, 1, 2, 1.5)], mode="linear"),
    case("Resize", IMAGE, [None, None, i(2, 4, 10, 5)], mode="linear", coordinate_transformation_mode="align_corners"),
    case("Resize", IMAGE, [None, None, i(2, 4, 10, 5)], mode="linear", coordinate_transformation_mode="asymmetric"),
    case("Resize", IMAGE, [None, None, i(2, 4, 10, 5)], mode="cubic"),
    case("Resize", IMAGE, [None, None, i(2, 4, 10, 5)], mode="cubic", cubic_coeff_a=-0.5, exclude_outside=1),
    case("Resize", IMAGE, [None, None, i(2, 4, 3, 3)], opset=18, mode="linear", antialias=1),
    case(
        "Resize",
        IMAGE,
        [None, None, i(2, 4, 1, 5)],
        mode="linear",
        coordinate_transformation_mode="pytorch_half_pixel",
    ),
    case("Resize", IMAGE, scales(1, 1, 2, 2), opset=10, mode="linear"),
    case("Upsample", IMAGE, scales(1, 1, 2, 2), opset=9, mode="nearest"),
    case("Upsample", IMAGE, opset=7, mode="linear", scales=[1.0, 1.0, 2.0, 2.0]),
    case("GridSample", [IMAGE, np.clip(f(2, 3, 3, 2), -1, 1)], mode="bilinear", opset=16),
    *(
        case("LSTM", f(5, 2, 3), [f(d, 16, 3), f(d, 16, 4), f(d, 32)], outputs=3, hidden_size=4, direction=w)
        for d, w in ((1, "forward"), (1, "reverse"), (2, "bidirectional"))
    ),
    case("LSTM", f(5, 2, 3), [f(1, 16, 3), f(1, 16, 4), None, None, f(1, 2, 4), f(1, 2, 4)], outputs=3, hidden_size=4),
    case(
        "GRU",
        f(5, 2, 3),
        [f(2, 12, 3), f(2, 12, 4), f(2, 24)],
        outputs=2,
        hidden_size=4,
        direction="bidirectional",
        linear_before_reset=1,
    ),
    case("RNN", f(5, 2, 3), [f(1, 4, 3), f(1, 4, 4), f(1, 8)], outputs=2, hidden_size=4),
    case("RNN", f(5, 2, 3), [f(1, 4, 3), f(1, 4, 4)], outputs=2, hidden_size=4, activations=["Relu"]),
    case("Attention", [f(2, 4, 5, 8), f(2, 2, 6, 8), f(2, 2, 6, 8)], opset=23),
    case("Attention", [f(2, 5, 16), f(2, 5, 16), f(2, 5, 16)], opset=23, q_num_heads=4, kv_num_heads=4, is_causal=1),
    case("RotaryEmbedding", [f(2, 3, 5, 8), f(2, 5, 4), f(2, 5, 4)], opset=23),
    case("RotaryEmbedding", f(2, 5, 24), [f(2, 5, 4), f(2, 5, 4)], opset=23, num_heads=3, interleaved=1),
]
