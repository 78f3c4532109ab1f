"""llama_cpp_quantize.py IN.gguf OUT_FOLDER KIND…: llama.cpp's own quantizer, from the package cyllama 0.2.18.

Runs in an environment of its own (`python -m venv V && V/bin/pip install --no-deps cyllama==0.2.18 numpy`), without the
half hour that building llama.cpp takes.
"""

import sys
from pathlib import Path

from cyllama.llama import llama_cpp  # pyright: ignore[reportMissingImports]

KINDS = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K_M": 15}  # llama_ftype of llama.h

if __name__ == "__main__":
    source, folder, *kinds = sys.argv[1:]
    for kind in kinds:
        settings = llama_cpp.LlamaModelQuantizeParams()
        settings.ftype, settings.nthread = KINDS[kind], 1
        llama_cpp.model_quantize(source, str(Path(folder) / f"{kind}.gguf"), settings)
