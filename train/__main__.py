"""`python -m penjing.train RECIPE …`: what torchrun starts; the same flags as `penjing train`."""

import os
import sys

from penjing.core.cli import main

if __name__ == "__main__":
    # Before torch is imported: its C++ prints a stack for each connection that breaks; the watch (watch.py) says why.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.argv = ["penjing", "train", *sys.argv[1:]]
    main()
