"""What each engine wants of a quantized network, as data: formats, where Q/DQ pairs stand, how biases are stored.

- ONNX Runtime on CPUs has integer kernels for u8 activations × s8 weights, adds and pools integers, and fuses a
  convolution only if its bias is INT32. On x64 without VNNI these kernels add pairs of products in 16 bits, which
  saturate (measured: 70 % of the outputs of a 3 × 3 convolution differ, by up to 14 steps). Either the session option
  `session.x64quantprecision` (slower, with VNNI too: `open_graph` sets it only without) or weights within ±63 avoid it.
- TensorRT 10 and 11 take explicit Q/DQ, signed and symmetric; biases stay floating. A convolution takes the addition
  and ReLU after it into its own kernel, so the *other* input of the addition is the one to quantize. Products with
  fewer than 16 rows or columns have no INT8 kernel worth its conversions.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penjing.compress.rounding.formats import FormatName
from penjing.compress.rounding.observers import Method
from penjing.core.config import Config
from penjing.core.errors import ConfigError
from penjing.core.runtime.onnx_runtime import EXACT_PRODUCTS

X64_REASON = (
    "x64 processors without VNNI otherwise add products of u8 and s8 in 16 bits, which saturate; leave it out with VNNI"
)
NO_TENSORRT = "needs the tensorrt package and a GPU; the file follows its rules for explicit Q/DQ"
TargetName = Literal["onnxruntime-cpu", "onnxruntime-avx2", "tensorrt"]


class Engine(Config):
    """One engine. The first format of a list is the default."""

    name: TargetName = Field(description="Name of the engine.")
    activations: tuple[FormatName, ...] = Field(description="Formats that it takes for activations.")
    weights: tuple[FormatName, ...] = Field(description="Formats that it takes for weights.")
    residual: Literal["both", "shortcut"] = Field(description="Inputs of an addition that are quantized.")
    pooling: bool = Field(description="Whether the global average is computed on integers.")
    smallest_product: int = Field(description="Layers with fewer inputs or outputs stay floating.")
    integer_products: bool = Field(
        default=False,
        description="Whether products of matrices are written as products of integers, which take a bias along.",
    )
    bias: Literal["int32", "float32"] = Field(description="How biases are stored.")
    session_options: dict[str, str] = Field(
        default_factory=dict, description="Of ONNX Runtime, needed for exact integers."
    )


TARGETS: dict[TargetName, Engine] = {
    target.name: target
    for target in (
        Engine(
            name="onnxruntime-cpu",
            activations=("uint8",),
            weights=("int8", "int7"),
            residual="both",
            pooling=True,
            smallest_product=0,
            integer_products=True,
            bias="int32",
            session_options={EXACT_PRODUCTS: "1"},
        ),
        Engine(
            name="onnxruntime-avx2",
            activations=("uint8",),
            weights=("int7",),
            residual="both",
            pooling=True,
            smallest_product=0,
            integer_products=True,
            bias="int32",
        ),
        Engine(
            name="tensorrt",
            activations=("int8", "fp8"),
            weights=("int8", "fp8"),
            residual="shortcut",
            pooling=False,
            smallest_product=16,
            bias="float32",
        ),
    )
}


class QuantizeSettings(Config):
    """How a network is quantized for a target."""

    activations: FormatName | None = Field(default=None, description="Format; none given: the target's first.")
    weights: FormatName | None = Field(default=None, description="Format; none given: the target's first.")
    observer: Method = Field(default="minmax", description="How static ranges of activations are found.")
    percentile: float = Field(default=0.9999, gt=0.5, le=1, description='Of the observer "percentile".')
    keep: tuple[str, ...] = Field(
        default=(),
        description='Shell patterns of layers or of modules that hold them, which stay floating: "stem", "blocks.0.*".',
    )


class NetworkSettings(QuantizeSettings):
    """What can be done about a network that is a graph of layers."""

    target: TargetName = Field(default="onnxruntime-cpu", description="The engine that will run it.")
    learn_activations: bool = Field(
        default=True, description="Training learns the scales of activations (LSQ); else they stay as calibrated."
    )
    learn_weights: bool = Field(
        default=False, description="Training learns the scales of weights; else they cover the largest magnitude."
    )
    effective_bits: float | None = Field(
        default=None,
        gt=8,
        lt=32,
        description="Bits of a weight on average: layers that lose most by rounding stay floating; none given: none.",
    )
    equalize: bool = Field(default=False, description="Bring channels to similar ranges first.")
    correct_bias: bool = Field(default=False, description="Take what rounding shifts on average out of biases.")


class EncoderSettings(QuantizeSettings):
    """What can be done about a text encoder besides."""

    target: TargetName = Field(default="onnxruntime-cpu", description="The engine that will run it.")
    smooth: bool = Field(default=True, description="Divide channels of inputs where that lowers the error.")
    embedding: Literal["int8", "float32"] = Field(
        default="int8", description="Of the word table, half of a small encoder: INT8 with a scale a word, or floating."
    )


class GraphSettings(NetworkSettings):
    """What can be done about a graph besides."""

    embedding: Literal["int8", "float32"] = Field(
        default="float32", description="Of tables that rows are looked up in: INT8 with a scale a row, or floating."
    )
    attention: bool = Field(default=False, description="Whether products of two activations are rounded, too.")
    smooth: bool = Field(
        default=True,
        description="Divide channels of what linear layers of sequences read, where that lowers the error of rounding.",
    )


def resolve(target_name: TargetName, settings: QuantizeSettings) -> tuple[Engine, FormatName, FormatName]:
    """The target and the formats of activations and weights.

    Raises:
        ConfigError: the target cannot express what the settings ask for.
    """
    target = TARGETS[target_name]
    activations = settings.activations or target.activations[0]
    weights = settings.weights or target.weights[0]
    if settings.weights is None and settings.activations == "fp8":
        weights = "fp8"
    for what, chosen, known in (
        ("activations", activations, target.activations),
        ("weights", weights, target.weights),
    ):
        if chosen not in known:
            raise ConfigError(f"target {target.name} has no {what} in {chosen}; use {' or '.join(known)}")
    if (activations == "fp8") != (weights == "fp8"):
        raise ConfigError(f"activations in {activations} and weights in {weights} do not mix; use fp8 for both or none")
    return target, activations, weights
