#!/usr/bin/env bash
# openvino.sh CHECKPOINT: OpenVINO GenAI (continuous batching, paged KV), INT8 weights.
PEER=openvino
source "$(dirname "$0")/common.sh"
checkpoint=${1:?usage: openvino.sh CHECKPOINT}
environment openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf
model_files model "$checkpoint" "$BIN/optimum-cli" export openvino -m "$checkpoint" --task text-generation-with-past --weight-format int8
