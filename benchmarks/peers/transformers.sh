#!/usr/bin/env bash
# transformers.sh SOURCE [FOLDER]: transformers, eager, on the checkpoint SOURCE itself. SOURCE may be a GGUF file too, of
# which transformers then makes FOLDER, in FP32.
PEER=transformers
source "$(dirname "$0")/common.sh"
model=${1:?usage: transformers.sh SOURCE [FOLDER]}
pinned() { grep -E "^$1==" constraints.txt; }
environment "$(pinned transformers)" "$(pinned numpy)" "$(pinned gguf)" "$(pinned sentencepiece)" accelerate==1.15.0
from_gguf() { "$BIN/python" benchmarks/peers/gguf_folder.py "$model" "$1"; }
if [ $# -gt 1 ]; then model_files "$2" "$model" from_gguf; fi
