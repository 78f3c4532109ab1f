"""bench_nncf_any.py MODEL.onnx INPUTS.npz OUT.onnx: NNCF's post-training quantization of any ONNX file.

INPUTS has one batch by the names of inputs. Prints one JSON line with NNCF's version.

Two things are done for it. The file is given in operators of version 20 at most, because what NNCF 3.4 writes into
newer ones is refused by ONNX Runtime ("output_dtype INT8 does not match y_zero_point type UINT8"). And activations get
one scale each, because ONNX Runtime refuses one for each channel in front of a depthwise convolution."""

# pyright: reportMissingImports=false

import json
import sys

import nncf
import numpy as np
import onnx
from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, QuantizationParameters
from onnx import version_converter

NEWEST = 20


def loaded(path: str) -> onnx.ModelProto:
    """The model, in operators of version `NEWEST` at most."""
    model = onnx.load(path)
    if any(each.domain in ("", "ai.onnx") and each.version > NEWEST for each in model.opset_import):
        return version_converter.convert_version(model, NEWEST)
    return model


def one_scale(**more: object) -> AdvancedQuantizationParameters:
    """Settings with one scale for each activation."""
    return AdvancedQuantizationParameters(
        activations_quantization_params=QuantizationParameters(per_channel=False), **more
    )


def main(source: str, inputs: str, out: str) -> None:
    given = dict(np.load(inputs))
    data = nncf.Dataset([given])
    quantized = nncf.quantize(loaded(source), data, subset_size=1, advanced_parameters=one_scale())
    onnx.save(quantized, out)
    print(json.dumps({"version": nncf.__version__.split("+")[0].split("-")[0]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
