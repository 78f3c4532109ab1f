"""A server for as long as a command needs one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penjing.serve.supervisor.process import ServeConfig
from penjing.serve.supervisor.stop import stop
from penjing.serve.supervisor.supervisor import serve


@contextmanager
def temporary_server(model: Path, overrides: list[str] | None = None) -> Iterator[str]:
    """Serve `model` on free ports of the loopback interface; yields host:port of gRPC, and stops the server at the end,
    which a signal that kills this process is too.

    Raises:
        PenjingError: as of `serve`.
    """
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    grpc_port, metrics_port = (probe.getsockname()[1] for probe in probes)
    for probe in probes:
        probe.close()
    config = ServeConfig(grpc_port=grpc_port, metrics_port=metrics_port)
    try:
        serve(model, config, detach=True, tied=True, engine_overrides=overrides)
        yield f"127.0.0.1:{grpc_port}"
    finally:
        stop(grpc_port, tell=lambda _: None)
