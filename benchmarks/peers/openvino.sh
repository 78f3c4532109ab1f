#!/usr/bin/env bash
# openvino.sh CHECKPOINT [FOLDER]: OpenVINO GenAI (continuous batching, paged KV). FOLDER is `model`, INT8 weights, or
# `model-int4`, 4-bit ones in groups of 64, since its default of 128 does not divide SmolLM2's width.
PEER=openvino
source "$(dirname "$0")/common.sh"
checkpoint=${1:?usage: openvino.sh CHECKPOINT [FOLDER]}
folder=${2:-model}
weights=(--weight-format int8)
if [ "$folder" = model-int4 ]; then weights=(--weight-format int4 --group-size 64); fi
environment openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf
build() { "$BIN/optimum-cli" export openvino -m "$checkpoint" --task text-generation-with-past "${weights[@]}" "$1"; }
model_files "$folder" "$checkpoint" build
