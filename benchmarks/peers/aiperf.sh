#!/usr/bin/env bash
# aiperf.sh: NVIDIA's load generator, which run_load_peer.py sets beside `penjing bench server --openai`.
PEER=aiperf
source "$(dirname "$0")/common.sh"
[ -x "$BIN/aiperf" ] || { "$PYTHON" -m venv --clear "$HOME_OF_PEER/venv" && "$BIN/python" -m pip install -q aiperf==0.13.0; }
