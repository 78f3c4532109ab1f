#!/usr/bin/env bash
# ort_genai.sh CHECKPOINT: ONNX Runtime GenAI (static batch), INT8 weights.
PEER=ort_genai
source "$(dirname "$0")/common.sh"
checkpoint=${1:?usage: ort_genai.sh CHECKPOINT}
environment onnxruntime-genai==0.18.0 "$(grep -E '^transformers==' constraints.txt)" onnx onnx-ir onnxruntime
build() { "$BIN/python" -m onnxruntime_genai.models.builder -i "$checkpoint" -p int8 -e cpu -c "$HOME_OF_PEER/cache" -o "$1"; }
model_files model "$checkpoint" build
