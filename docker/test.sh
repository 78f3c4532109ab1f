#!/usr/bin/env bash
# test.sh: starts the image's server on a model and proves that it streams by gRPC and by OpenAI's interface, is not root, tells the truth about its health,
# recovers, and drains on SIGTERM. Called by `make image-test`.
#   IMAGE=penjing:cpu  MODEL=build/smollm2-int8  ENGINE=docker|buildah
source "$(dirname "$0")/common.sh"
MODEL=$(realpath -m "${MODEL:-build/smollm2-int8}")
ENGINE=$(engine)
[ -e "$MODEL/penjing.json" ] || fail "$MODEL is no model; make one with 'make demo' or set MODEL"
log=build/docker/test.log
# One thread (OMP_NUM_THREADS): this proves that it works, and threads that wait for each other stall on a busy machine.
mkdir -p build/docker
started=$SECONDS

# With buildah the container shares the host's network, so the ports must be free ones.
ports=$(python3 -c '
import socket
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
print(*(one.getsockname()[1] for one in held))')
read -r grpc http metrics front <<<"$ports"
arguments=(serve /model --host 127.0.0.1 --grpc-port "$grpc" --http-port "$http" --metrics-port "$metrics"
  --openai "$front")
container= server=

if [ "$ENGINE" = docker ]; then
  container=$(docker run -d --read-only --tmpfs /tmp --tmpfs /opt/penjing/cache/run:uid=10001,gid=10001 --cap-drop ALL \
    --security-opt no-new-privileges --env OMP_NUM_THREADS=1 \
    -v "$MODEL:/model:ro" -v "$PWD/docker:/smoke:ro" "$IMAGE" "${arguments[@]}")
  inside() { docker exec "$container" "$@"; }
  running() { [ "$(docker inspect --format '{{.State.Running}}' "$container")" = true ]; }
  await_exit() { code=$(docker wait "$container"); }
  logs() { docker logs "$container"; }
  remove() { docker rm -f "$container" >/dev/null; }
else
  container=$(buildah from "$IMAGE")
  # what an engine takes from the image, read from the image; tini is process 1 only where an engine makes it so
  entrypoint=$(buildah inspect --format '{{range .OCIv1.Config.Entrypoint}}{{.}} {{end}}' "$container")
  mounts=(--volume "$MODEL:/model:ro" --volume "$PWD/docker:/smoke:ro")
  inside() { buildah run "${mounts[@]}" "$container" -- "$@"; }
  # shellcheck disable=SC2086 # the entrypoint is a list of words
  buildah run --env TINI_SUBREAPER=1 --env OMP_NUM_THREADS=1 "${mounts[@]}" "$container" -- \
    $entrypoint "${arguments[@]}" >"$log" 2>&1 &
  server=$!
  running() { kill -0 "$server" 2>/dev/null; }
  await_exit() { wait "$server" || code=$?; }
  logs() { cat "$log"; }
  remove() {
    if running; then
      inside penjing stop --grpc-port "$grpc" --timeout 1 >/dev/null 2>&1 || true
      wait "$server" || true
    fi
    buildah rm "$container" >/dev/null
  }
fi
trap remove EXIT
show_logs() { logs 2>&1 | tail -n 20 >&2; }
healthy() { inside python3 /opt/penjing/healthcheck.py >/dev/null 2>&1; }

if healthy; then fail "healthy before the model is loaded"; fi
until healthy; do
  running || { show_logs; fail "the container ended before it was healthy"; }
  [ $((SECONDS - started)) -lt 180 ] || { show_logs; fail "not healthy within 180 s"; }
  sleep 1
done
say "healthy after $((SECONDS - started)) s"
inside env PYTHONPATH=/smoke python3 /smoke/smoke.py user stream front="$front" recover stream front="$front" drain || { show_logs; fail "smoke.py"; }
code=0
await_exit
[ "$code" = 0 ] || { show_logs; fail "the container ended with exit code $code"; }
say "drained, exit code 0; all passed in $((SECONDS - started)) s"
