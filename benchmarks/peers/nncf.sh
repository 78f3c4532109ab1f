#!/usr/bin/env bash
# nncf.sh: NNCF, post-training quantization of ONNX files.
PEER=nncf
source "$(dirname "$0")/common.sh"
environment nncf==3.4.0 "$(grep -E '^onnx==' constraints.txt)" "$(grep -E '^onnxruntime==' constraints.txt)"
