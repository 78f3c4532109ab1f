"""`python -m penjing.serve.site.server`: the front's process, as the supervisor starts it (see `FrontProcess`)."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import uvicorn
import uvloop

from penjing.serve.gate.config import MODELS, VARIABLE, FrontJob
from penjing.serve.gate.connection import connection_class, loop_factory
from penjing.serve.gate.log import open_log
from penjing.serve.site.app import Front
from penjing.serve.site.process import ALIVE, BEAT_SECONDS, READY

STDIN = 0
MAX_READ = 1 << 16
GRACE_SECONDS = 3  # for answers that are under way when the process shall end


def uvicorn_config(front: Front) -> uvicorn.Config:
    """How uvicorn runs a front."""
    config = front.job.front
    return uvicorn.Config(
        front.application,
        host=config.host,
        port=config.port,
        loop="uvloop",
        http=connection_class(config.limits),
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(max(1, config.limits.idle_timeout)),
        timeout_graceful_shutdown=GRACE_SECONDS,
        ssl_certfile=config.certificate,
        ssl_keyfile=config.private_key,
    )


def listen(front: Front, loop: asyncio.AbstractEventLoop) -> None:
    """Take from standard input what the supervisor says: a line with all models whenever they change."""
    os.set_blocking(STDIN, False)
    said = bytearray()

    def read() -> None:
        with suppress(BlockingIOError):
            if not (part := os.read(STDIN, MAX_READ)):
                loop.remove_reader(STDIN)
            said.extend(part)
        *lines, said[:] = said.split(b"\n")
        for line in lines:  # each: one that was taken away in between is another one, though it has the same port
            front.show(MODELS.validate_json(bytes(line)))

    loop.add_reader(STDIN, read)


async def _run(job: FrontJob) -> None:
    front = Front(job)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, front.drain)

    def beat() -> None:
        with suppress(BlockingIOError):  # the supervisor is stopped: it has enough to read
            os.write(job.beat_fd, READY if front.ready else ALIVE)
        loop.call_later(BEAT_SECONDS, beat)

    if job.beat_fd >= 0:
        beat()
        listen(front, loop)
    await uvicorn.Server(uvicorn_config(front)).serve()


def main() -> None:
    """Run the job that the environment names."""
    job = FrontJob.model_validate_json(os.environ[VARIABLE])
    os.umask(0o077)  # what this process writes is its owner's
    open_log(job.log)
    uvloop.run(_run(job), loop_factory=loop_factory(job.front.limits))


if __name__ == "__main__":
    main()
