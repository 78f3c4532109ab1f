#!/usr/bin/env bash
# ort_genai.sh CHECKPOINT [FOLDER]: ONNX Runtime GenAI (static batch). FOLDER is `model`, INT8 weights, or `model-int4`,
# 4-bit ones in groups of 32 around zero, the LM head too; its activations are rounded to INT8 (accuracy_level 4, its
# fastest on a processor). Both are the defaults of its model builder.
PEER=ort_genai
source "$(dirname "$0")/common.sh"
checkpoint=${1:?usage: ort_genai.sh CHECKPOINT [FOLDER]}
folder=${2:-model}
precision=(-p int8)
if [ "$folder" = model-int4 ]; then precision=(-p int4 --extra_options block_size=32 accuracy_level=4); fi
environment onnxruntime-genai==0.18.0 "$(grep -E '^transformers==' constraints.txt)" onnx onnx-ir onnxruntime
build() {
  "$BIN/python" -m onnxruntime_genai.models.builder -i "$checkpoint" -e cpu -c "$HOME_OF_PEER/cache" -o "$1" "${precision[@]}"
}
model_files "$folder" "$checkpoint" build
