"""torchrun as `penjing train --launch` starts it: it ends when its starter does, and adds nothing to what the run says.

Its exit code is that of the process that failed first; torchrun's own is always 1, after a long report.
With `--while-input-is-open` as its first argument it ends when its standard input does.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

TIED = "--while-input-is-open"
_PR_SET_PDEATHSIG = 1  # prctl(2)


def main(arguments: list[str]) -> int:
    """Run torchrun with `arguments`; the exit code."""
    if arguments[:1] == [TIED]:
        arguments = arguments[1:]
        threading.Thread(target=_end_with_the_input, daemon=True).start()
    elif sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
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
