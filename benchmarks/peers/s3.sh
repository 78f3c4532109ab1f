#!/usr/bin/env bash
# s3.sh: moto, a server that speaks S3, for try_s3.py.
PEER=s3
source "$(dirname "$0")/common.sh"
[ -x "$BIN/moto_server" ] || { "$PYTHON" -m venv --clear "$HOME_OF_PEER/venv" && "$BIN/python" -m pip install -q 'moto[server]==5.2.5'; }
