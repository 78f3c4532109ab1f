"""`python -m penjing.serve.site.server`: the front's process, as the supervisor starts it (see `FrontProcess`)."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from contextlib import suppress

import uvicorn
import uvloop

from penjing.serve.gate.config import MODELS, VARIABLE, FrontJob, FrontLimits
from penjing.serve.gate.connection import connection_class, loop_factory
from penjing.serve.gate.log import open_log
from penjing.serve.site.app import Front
from penjing.serve.site.process import ALIVE, BEAT_SECONDS, READY

STDIN = 0
MAX_READ = 1 << 16
SPARE_DESCRIPTORS = 200  # for logs, pipes and models
GRACE_SECONDS = 3  # for answers that are under way when the process shall end


log = logging.getLogger("penjing.front")


def allow_descriptors(limits: FrontLimits) -> None:
    """Let this process have a descriptor for each connection, and for each that is refused and still read: most systems
    give 1024 unless asked for more, and what came beyond them would be reset without an answer."""
    wanted = 2 * limits.max_connections + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < found:
        resource.setrlimit(resource.RLIMIT_NOFILE, (found, hard))
    if found < wanted:
        log.warning(
            "max_connections=%d may need %d open files, and the system allows %d; lower the one or raise the other "
            "with ulimit -n",
            limits.max_connections,
            wanted,
            found,
        )


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
    allow_descriptors(job.front.limits)
    uvloop.run(_run(job), loop_factory=loop_factory(job.front.limits))


if __name__ == "__main__":
    main()
