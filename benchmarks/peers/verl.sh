#!/usr/bin/env bash
# verl.sh: the source of verl, whose formulas of PPO are compared with. Only some pure functions of it are run, so that
# its requirements (ray, vLLM) stay out.
PEER=verl
source "$(dirname "$0")/common.sh"
environment "$(grep -E '^numpy==' constraints.txt)"
"$BIN/python" -m pip install -q --no-deps verl==0.9.1
