#!/usr/bin/env bash
# zoo.sh: torchvision and timm beside the torch that is installed here. Their own dependencies are left out: PyPI's
# torchvision wants a CUDA build of torch, and run_zoo.py needs none of its compiled operators.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
SITE=build/peers/zoo/site
"$PYTHON" -m pip install -q --no-deps --upgrade --target "$SITE" torchvision==0.28.0 timm==1.0.31
printf 'zoo: %s is ready\n' "$SITE" >&2
