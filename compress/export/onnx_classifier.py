"""A quantized ResNet as ONNX with explicit Q/DQ, batch norms folded, weights stored as integers, dynamic batch.

Written node by node, not traced: tracing breaks fake quantization (pytorch #167063), and each Q/DQ must stand where
the target fuses it. Without quantizers (a model to which `apply_quantization` was not done) it is written in float32.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from penjing.compress.export.graph import GraphBuilder
from penjing.compress.quantize.modules import Folded, QuantizedBlock, QuantizedConvNorm, QuantizedLinear
from penjing.compress.quantize.targets import TARGETS, Engine, TargetName
from penjing.compress.rounding.fake_quantize import ActivationQuantizer
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_bytes
from penjing.core.models.resnet import Block, ConvNorm, ResNet
from penjing.core.runtime.onnx_runtime import INPUT, OUTPUT


def export_onnx(model: ResNet, image_size: tuple[int, int], target: TargetName, path: Path) -> int:
    """Write `model`, in evaluation mode and calibrated, to `path`.

    The graph takes "images" (batch, channels, *image_size) float32, normalised as for the model, and gives "logits"
    (batch, classes) float32.

    Returns:
        Bytes written.

    Raises:
        InputError: a quantizer was never calibrated.
    """
    for module in model.modules():
        if isinstance(module, ActivationQuantizer) and not bool(module.ready):
            raise InputError(f"the range of {module.name} is unknown; calibrate the model before it is exported")
    size = (model.config.in_channels, *image_size)
    about = {"penjing.target": target}
    proto = _Writer(model, TARGETS[target]).graph.model(
        {INPUT: ["batch", *size]}, {OUTPUT: ["batch", model.config.num_classes]}, about
    )
    data = proto.SerializeToString()
    atomic_write_bytes(path, data)
    return len(data)


class _Writer:
    def __init__(self, model: ResNet, target: Engine) -> None:
        self.graph, self.target = GraphBuilder(), target
        self._scales: dict[str, Tensor] = {}  # of values that come out of a DQ
        x = self._conv("stem", model.stem, INPUT)
        x = self.graph.node("Relu", [x], "stem/relu")
        for index, block in enumerate(model.blocks):
            assert isinstance(block, Block | QuantizedBlock)
            pool = model.pool if index == 0 and isinstance(model.pool, nn.MaxPool2d) else None
            x = self._block(f"blocks.{index}", block, x, pool)
        x = self.graph.node("GlobalAveragePool", [x], "pool")
        self._linear(model.fc, x)

    def _quantize(self, quantizer: ActivationQuantizer | None, x: str, name: str) -> str:
        if quantizer is None:
            return x
        output = self.graph.quantize(x, quantizer, name)
        self._scales[output] = quantizer.positive_scale().detach()
        return output

    def _block(self, name: str, block: Block | QuantizedBlock, x: str, pool: nn.MaxPool2d | None) -> str:
        before = getattr(block, "input_quantizer", None)
        x = self._quantize(before, x, f"{name}.input")
        if pool is not None:  # a maximum commutes with rounding: integers are pooled, and keep their scale
            assert isinstance(pool.kernel_size, int)
            assert isinstance(pool.stride, int)
            assert isinstance(pool.padding, int)
            x = self.graph.node(
                "MaxPool",
                [x],
                "maxpool",
                kernel_shape=[pool.kernel_size] * 2,
                strides=[pool.stride] * 2,
                pads=[pool.padding] * 4,
            )
            x = self._quantize(before, x, f"{name}.pooled")
        y = x
        for index, layer in enumerate(block.layers):
            if index:
                y = self.graph.node("Relu", [y], f"{name}.layers.{index - 1}/relu")
            y = self._conv(f"{name}.layers.{index}", layer, y)
        shortcut = x if isinstance(block.shortcut, nn.Identity) else self._conv(f"{name}.shortcut", block.shortcut, x)
        y = self.graph.node("Add", [y, shortcut], f"{name}/sum")
        y = self.graph.node("Relu", [y], f"{name}/relu")
        return self._quantize(getattr(block, "output_quantizer", None), y, f"{name}.output")

    def _conv(self, name: str, layer: nn.Module, x: str) -> str:
        if not isinstance(layer, QuantizedConvNorm):
            assert isinstance(layer, ConvNorm)
            layer = QuantizedConvNorm(layer, None)
        x = self._quantize(layer.input_quantizer, x, f"{name}.input")
        folded, bias = self._folded(name, layer, x)
        conv = layer.conv
        assert isinstance(conv.padding, tuple)
        output = self.graph.node(
            "Conv",
            [x, self.graph.weight(name, folded), bias],
            name,
            kernel_shape=list(conv.kernel_size),
            strides=list(conv.stride),
            pads=[*conv.padding, *conv.padding],
            group=conv.groups,
        )
        return self._quantize(layer.output_quantizer, output, f"{name}.output")

    def _linear(self, layer: nn.Module, x: str) -> None:
        if not isinstance(layer, QuantizedLinear):
            assert isinstance(layer, nn.Linear)
            layer = QuantizedLinear(layer, None, None)
        if self.target.pooling:  # an integer average, flattened between two equal pairs, is fused away
            x = self._quantize(layer.input_quantizer, x, "pool.output")
        x = self.graph.node("Flatten", [x], "flat")
        x = self._quantize(layer.input_quantizer, x, "fc.input")
        folded, bias = self._folded("fc", layer, x)
        self.graph.node("Gemm", [x, self.graph.weight("fc", folded), bias], OUTPUT, transB=1)

    def _folded(self, name: str, layer: QuantizedConvNorm | QuantizedLinear, x: str) -> tuple[Folded, str]:
        scale = self._scales.get(x)
        folded = layer.fold(scale)
        return folded, self.graph.bias(name, folded, scale if self.target.bias == "int32" else None)


def integer_weights(path: Path) -> dict[str, torch.Tensor]:
    """Layer → its stored weight in a file of `export_onnx`, int8; floating layers are left out."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(str(path))
    return {
        constant.name.removesuffix(".weight"): torch.from_numpy(numpy_helper.to_array(constant).copy())
        for constant in model.graph.initializer
        if constant.name.endswith(".weight") and constant.data_type == onnx.TensorProto.INT8
    }
