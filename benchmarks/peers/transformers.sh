#!/usr/bin/env bash
# transformers.sh: transformers, eager, on the checkpoint itself.
PEER=transformers
source "$(dirname "$0")/common.sh"
environment "$(grep -E '^transformers==' constraints.txt)" "$(grep -E '^numpy==' constraints.txt)"
