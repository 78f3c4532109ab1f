#!/usr/bin/env bash
# presidio.sh: presidio's recognisers of patterns and detect-secrets, which run_pii_peers.py measures beside ours.
PEER=presidio
source "$(dirname "$0")/common.sh"
[ -x "$BIN/detect-secrets" ] || {
  "$PYTHON" -m venv --clear "$HOME_OF_PEER/venv"
  "$BIN/python" -m pip install -q presidio_analyzer==2.2.366 detect-secrets==1.5.0 phonenumbers==9.0.43 spacy==3.8.18
}
