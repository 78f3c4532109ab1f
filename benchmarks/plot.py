"""Draw docs/figures/*.svg: small files, readable on light and dark pages.

python benchmarks/plot.py                    # engine.svg and engine-int4.svg: the engine beside its peers
python benchmarks/plot.py attention          # attention.svg: time and memory of attention by its length
python benchmarks/plot.py train docs/figures/decoder-tiny.svg "held-out loss=build/decoder-tiny-run"
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lib.plot_attention import draw as draw_attention
from lib.plot_engine import FIGURES, draw_engine, draw_int4
from lib.plot_train import draw as draw_training
from lib.plot_train import read_runs
from lib.rows import RESULTS, read

from penjing.core.cli import guarded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="figure")
    for name, what in (("engine", "the engine beside its peers"), ("attention", "time and memory of attention")):
        command = commands.add_parser(name, help=what)
        command.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
        command.add_argument("--out", type=Path, default=FIGURES, help="folder of the figures")
    command.add_argument("--subject", choices=["layer", "model"], default="layer")
    command = commands.add_parser("train", help="the losses of training runs")
    command.add_argument("out", type=Path, help="the SVG to write")
    command.add_argument("runs", nargs="+", metavar="NAME=FOLDER", help="a name for the legend and a run's folder")
    command.add_argument("--label", default="loss (nats per token)", help="of the vertical axis")
    arguments = parser.parse_args(sys.argv[1:] or ["engine"])
    if arguments.figure == "train":
        drawn = draw_training(read_runs(arguments.runs), arguments.out, arguments.label)
    elif arguments.figure == "attention":
        drawn = draw_attention(read("attention", arguments.results), arguments.out, arguments.subject)
    else:
        rows = read("engine", arguments.results), read("server", arguments.results)
        print(draw_int4(rows[0], arguments.out))
        drawn = draw_engine(*rows, arguments.out)
    print(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
