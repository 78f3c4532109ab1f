#!/usr/bin/env bash
# schemathesis.sh: what run_schema_fuzz.py makes requests with, out of the server's own OpenAPI document.
PEER=schemathesis
source "$(dirname "$0")/common.sh"
[ -x "$BIN/schemathesis" ] || { "$PYTHON" -m venv --clear "$HOME_OF_PEER/venv" && "$BIN/python" -m pip install -q schemathesis==4.32.5; }
