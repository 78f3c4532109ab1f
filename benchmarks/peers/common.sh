# Sourced by each peer's script: makes build/peers/NAME/venv and keeps what is finished.
# The caller sets PEER. PYTHON chooses the interpreter of the environments.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-python3}
HOME_OF_PEER=build/peers/$PEER
BIN=$HOME_OF_PEER/venv/bin
mkdir -p "$HOME_OF_PEER"

say() { printf '%s: %s\n' "$PEER" "$*" >&2; }

# environment PACKAGE…: a virtual environment with torch's pinned CPU build first, so that no package chooses a CUDA one.
environment() {
  local wanted="torch $*" stamp=$HOME_OF_PEER/.environment
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    say "environment is ready"
    return
  fi
  say "making $HOME_OF_PEER/venv: $*"
  "$PYTHON" -m venv --clear "$HOME_OF_PEER/venv"
  "$BIN/python" -m pip install -q "$(grep -E '^torch==' constraints.txt)"
  if [ $# -gt 0 ]; then "$BIN/python" -m pip install -q "$@"; fi
  printf '%s' "$wanted" >"$stamp"
}

# model_files NAME SOURCE COMMAND…: runs COMMAND with the output path appended; the output gets its final name when it is
# complete, and is made again when SOURCE differs from the one that it was made from: a folder's manifest, or a file.
model_files() {
  local out=$HOME_OF_PEER/$1 source=$2
  shift 2
  local wanted
  if [ -d "$source" ]; then source=$source/penjing.json; fi
  wanted="$(sha256sum "$source" | cut -d' ' -f1) $*"
  if [ -e "$out" ] && [ "$(cat "$out.made-from" 2>/dev/null)" = "$wanted" ]; then
    say "$out is ready"
    return
  fi
  say "making $out"
  rm -rf "$out" "$out.partial"
  "$@" "$out.partial" >"$out.log" 2>&1 || { tail -n 20 "$out.log" >&2; say "failed; the whole log is $out.log"; return 1; }
  mv "$out.partial" "$out"
  printf '%s' "$wanted" >"$out.made-from"
}
