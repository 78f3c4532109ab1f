# Sourced by build.sh and test.sh: which tool, which image.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
IMAGE=${IMAGE:-penjing:cpu}
BASE_PINNED=debian:12-slim
BASE_LOCAL=localhost/penjing-base:debian-12 # made by debootstrap where no registry answers

say() { printf 'image: %s\n' "$*" >&2; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# engine: prints docker (its engine answers) or buildah, which needs neither an engine nor a daemon.
engine() {
  if [ -n "${ENGINE:-}" ]; then
    echo "$ENGINE"
  elif command -v docker >/dev/null && docker info >/dev/null 2>&1; then
    echo docker
  elif command -v buildah >/dev/null; then
    echo buildah
  else
    fail "no docker engine answers and buildah is not installed; try: apt-get install buildah debootstrap"
  fi
}

# chroot: needs no namespaces, so it works inside a container; vfs: needs no mounts.
export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot} STORAGE_DRIVER=${STORAGE_DRIVER:-vfs}
