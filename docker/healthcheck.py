"""Healthy (exit code 0) when the supervisor calls its server ready and the engine behind gRPC answers, now.

Triton server's own health endpoint cannot be used: it stays good when the model's process is dead.
"""

import sys

from penjing.serve.client.client import Client
from penjing.serve.supervisor import state

ANSWER_SECONDS = 5.0


def problem() -> str | None:
    """What is wrong, in words."""
    ports = state.running_ports()
    if not ports:
        return "no server is running"
    for port in ports:
        found = state.read_state(port)
        if found is None or found.state != "ready":
            return f"port {port}: " + ("starting" if found is None else f"{found.state} {found.message}".strip())
        host = "127.0.0.1" if found.host == "0.0.0.0" else found.host
        with Client(f"{host}:{port}") as client:
            if not client.is_ready(ANSWER_SECONDS):
                return f"port {port}: the engine does not answer within {ANSWER_SECONDS:.0f} s"
    return None


if __name__ == "__main__":
    reason = problem()
    print(reason or "healthy")
    sys.exit(reason is not None)
