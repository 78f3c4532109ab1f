#!/usr/bin/env bash
# libfaketime.sh: the library by which run_chaos.py lets a server's time of day jump.
PEER=libfaketime
source "$(dirname "$0")/common.sh"
[ -x "$BIN/python-libfaketime" ] || { "$PYTHON" -m venv --clear "$HOME_OF_PEER/venv" && "$BIN/python" -m pip install -q libfaketime==3.0.1; }
cc -O2 -shared -fPIC -o "$HOME_OF_PEER/timed_locks.so" benchmarks/peers/timed_locks.c
