#!/usr/bin/env bash
# build.sh: the CPU image, by docker or, where no engine answers, by buildah. Called by `make image`.
#   IMAGE=penjing:cpu  ENGINE=docker|buildah  STORAGE_DRIVER=vfs|overlay  PYTHON=python3
# pip's configuration of this machine (index, certificate, proxy) goes into the build as secrets: nothing of it stays.
source "$(dirname "$0")/common.sh"
PYTHON=${PYTHON:-python3}
ENGINE=$(engine)
started=$SECONDS

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The torch that constraints.txt pins, in its CPU build, where pip's configuration knows one: the default build carries CUDA.
torch=$(sed -n 's/^torch==//p' constraints.txt)
cpu_wheel() { ls docker/wheels/torch-"$torch"+cpu-cp311-*.whl >/dev/null 2>&1; }
cpu_wheel || "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version 3.11 --implementation cp \
  --platform manylinux_2_28_x86_64 -d docker/wheels "torch==$torch+cpu" >/dev/null 2>&1 ||
  say "no CPU build of torch $torch in pip's indexes: the default build is taken (gigabytes more);" \
    "add the index of CPU wheels that torch's install page names to pip's configuration"

# pip's settings from its files and PIP_* variables as one pip.conf, without what only this machine can reach.
"$PYTHON" -m pip config list | "$PYTHON" -c '
import ast, sys
print("[global]")
for line in sys.stdin:
    name, value = line.rstrip("\n").split("=", 1)
    name, value = name.split(".", 1)[1], ast.literal_eval(value)
    if name in ("index-url", "extra-index-url", "trusted-host", "default-timeout", "retries", "proxy", "client-cert"):
        kept = [part for part in value.split() if not part.startswith(("file:", "/"))]
        if kept:
            print(f"{name} = {chr(32).join(kept)}")
' >"$scratch/pip.conf"
certificates=$("$PYTHON" -m pip config get global.cert 2>/dev/null || true)
certificates=${PIP_CERT:-${certificates:-/etc/ssl/certs/ca-certificates.crt}}
options=(--secret "id=pip_config,src=$scratch/pip.conf")
if [ -r "$certificates" ]; then options+=(--secret "id=certificates,src=$certificates"); fi
for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
  if [ -n "${!name:-}" ]; then options+=(--build-arg "$name=${!name}"); fi
done

# A base without a registry: Debian's own packages, as unpacked by debootstrap, with the slim image's exclusions.
local_base() {
  if buildah inspect --type image "$BASE_LOCAL" >/dev/null 2>&1; then return; fi
  command -v debootstrap >/dev/null ||
    fail "no registry gives $BASE_PINNED and debootstrap is not installed; try: apt-get install debootstrap"
  [ "$(id -u)" = 0 ] || fail "no registry gives $BASE_PINNED and debootstrap needs root; run make image as root"
  say "no registry gives $BASE_PINNED: making $BASE_LOCAL with debootstrap"
  debootstrap --variant=minbase bookworm "$scratch/rootfs" >"$scratch/debootstrap.log" 2>&1 ||
    { tail -n 5 "$scratch/debootstrap.log" >&2; fail "debootstrap failed: is Debian's package mirror reachable?"; }
  # security updates come from the same host
  sed -n 's#^deb \(.*\)/debian/\? bookworm main#deb \1/debian bookworm-updates main\ndeb \1/debian-security bookworm-security main#p' \
    "$scratch/rootfs/etc/apt/sources.list" >"$scratch/more.list"
  cat "$scratch/more.list" >>"$scratch/rootfs/etc/apt/sources.list"
  rm -rf "$scratch"/rootfs/var/cache/apt/archives/*.deb "$scratch"/rootfs/var/lib/apt/lists/* \
    "$scratch"/rootfs/usr/share/{doc,man,info,locale}/*
  printf 'path-exclude /usr/share/%s/*\n' doc man info locale >"$scratch/rootfs/etc/dpkg/dpkg.cfg.d/slim"
  local container
  container=$(buildah from scratch)
  buildah add -q "$container" "$scratch/rootfs" / >/dev/null
  buildah config --cmd bash "$container"
  buildah commit -q --rm "$container" "$BASE_LOCAL" >/dev/null
  rm -rf "$scratch/rootfs"
}

say "building $IMAGE with $ENGINE"
if [ "$ENGINE" = docker ]; then
  DOCKER_BUILDKIT=1 docker build "${options[@]}" -f docker/cpu.Dockerfile -t "$IMAGE" .
  size=$(docker images --format '{{.Size}}' "$IMAGE")
else
  base=docker.io/library/$BASE_PINNED
  if ! buildah inspect --type image "$base" >/dev/null 2>&1 && ! timeout 60 buildah pull -q "$base" >/dev/null 2>&1; then
    local_base
    base=$BASE_LOCAL
  fi
  buildah build --layers --force-rm --format docker --build-arg "BASE=$base" "${options[@]}" -f docker/cpu.Dockerfile -t "$IMAGE" .
  size=$(buildah images --json "$IMAGE" | "$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)[0]["size"])')
fi
say "$IMAGE is ready: $size, $((SECONDS - started)) s"
