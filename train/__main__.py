"""`python -m penjing.train RECIPE …`: what torchrun starts; the same flags as `penjing train`."""

import os
import signal
import sys

from penjing.core.cli import main
from penjing.core.cluster.tied import end_with

if __name__ == "__main__":
    # torchrun that is killed ends none of its processes: they would go on unseen, beside the run that resumes theirs.
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid(), signal.SIGTERM)
    # Before torch is imported: its C++ prints a stack for each connection that breaks; the watch (watch.py) says why.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.argv = ["penjing", "train", *sys.argv[1:]]
    main()
