"""bench_nncf.py MODEL.onnx IMAGES.npy OUT.onnx MODE: NNCF's post-training quantization of an ONNX file.

IMAGES are (N, C, H, W) float32, as the model takes them. MODE is "int8", or "int7" for processors without VNNI.
Prints one JSON line with NNCF's version and its seconds.
"""

# pyright: reportMissingImports=false

import json
import sys
import time

import nncf
import numpy as np
import onnx
from bench_nncf_any import loaded, one_scale
from nncf.quantization.advanced_parameters import OverflowFix


def main(source: str, images: str, out: str, mode: str) -> None:
    model = loaded(source)
    name, batches = model.graph.input[0].name, np.load(images)[:, None]
    fix = {"int8": OverflowFix.DISABLE, "int7": OverflowFix.ENABLE}[mode]
    began = time.perf_counter()
    quantized = nncf.quantize(
        model,
        nncf.Dataset(list(batches), lambda image: {name: image}),
        subset_size=len(batches),
        advanced_parameters=one_scale(overflow_fix=fix),
    )
    seconds = time.perf_counter() - began
    onnx.save(quantized, out)
    print(json.dumps({"version": nncf.__version__.split("+")[0].split("-")[0], "seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
