"""bench_nncf_any.py MODEL.onnx INPUTS.npz OUT.onnx: NNCF's post-training quantization of any ONNX file.

INPUTS has one batch by the names of inputs. Prints one JSON line with NNCF's version."""

# pyright: reportMissingImports=false

import json
import sys

import nncf
import numpy as np
import onnx


def main(source: str, inputs: str, out: str) -> None:
    given = dict(np.load(inputs))
    quantized = nncf.quantize(onnx.load(source), nncf.Dataset([given]), subset_size=1)
    onnx.save(quantized, out)
    print(json.dumps({"version": nncf.__version__.split("+")[0].split("-")[0]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
