"""`python -m penjing.train RECIPE …`: what torchrun starts; the same flags as `penjing train`."""

import sys

from penjing.core.cli import main

if __name__ == "__main__":
    sys.argv = ["penjing", "train", *sys.argv[1:]]
    main()
