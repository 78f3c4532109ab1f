#!/usr/bin/env bash
# packed.sh: the layers of AutoGPTQ and AutoAWQ, which penjing's reading of such folders is compared with. Only what
# packs and dequantizes is used, so their other requirements, and their CUDA kernels, stay out.
PEER=packed
source "$(dirname "$0")/common.sh"
environment "$(grep -E '^transformers==' constraints.txt)" "$(grep -E '^numpy==' constraints.txt)" accelerate
if [ ! -d "$HOME_OF_PEER/sources/awq" ]; then
  partial=$HOME_OF_PEER/sources.partial
  rm -rf "$partial" && mkdir -p "$partial"
  # --no-deps and --no-build-isolation: nothing of them is built or run, but AutoAWQ's setup imports torch to say its name.
  "$BIN/python" -m pip install -q setuptools wheel
  "$BIN/python" -m pip download -q --no-deps --no-build-isolation -d "$partial" auto-gptq==0.7.1 autoawq==0.2.9
  "$BIN/python" -m zipfile -e "$partial"/auto_gptq-0.7.1-*.whl "$partial"
  tar -xzf "$partial"/autoawq-0.2.9.tar.gz -C "$partial" --strip-components=1 autoawq-0.2.9/awq
  mv "$partial" "$HOME_OF_PEER/sources"
fi
