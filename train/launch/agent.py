"""torchrun as `penjing train --launch` starts it: it ends when its starter does, and adds nothing to what the run says.

Its exit code is that of the process that failed first; torchrun's own is always 1, after a long report. Its standard
input is a pipe that its starter holds open and writes nothing to. The pipe ends when the starter does, whatever kills
it, also before this process has begun to look; torchrun then stops its processes as for SIGTERM, so that they save
their state.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main(arguments: list[str]) -> int:
    """Run torchrun with `arguments`; the exit code."""
    threading.Thread(target=_end_with_the_input, daemon=True).start()
    logging.disable(logging.ERROR)
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        print(f"rank {rank} (process {failure.pid}) was ended by {failure.signal_name()}", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _end_with_the_input() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
