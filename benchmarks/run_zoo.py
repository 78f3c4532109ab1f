"""Which networks come in, are pruned, trained, quantized and exported: a row for each cell, or the reason.

    benchmarks/peers/zoo.sh && benchmarks/peers/nncf.sh && python benchmarks/run_zoo.py
    python benchmarks/run_zoo.py --only timm/ --columns import prune torch_pruning --again

The first line makes two folders of packages, which the environment that runs this keeps out of itself: torchvision,
timm and the packages that carry trained ONNX files in build/peers/zoo/site, NNCF in build/peers/nncf. Each network has
a process of its own with a time limit, and its rows are written before the next one begins. A cell that has a row is
left alone, unless --again says otherwise. Weights are random where the network is no file, and inputs small.

A cell's value is a number of the result; a row without a value has the reason. Ours go from one to the next:
`import`: operators of the graph. `prune`: what stays of the parameters without 30 % of the units, after each result was
compared with the network whose units are zero. `train`: one update of the pruned network. `onnx`: the pruned network's
largest difference in ONNX Runtime, relative to its outputs. `int8`: how far the pruned network in INT8, behind its
parity gate, is from the one in floating point, in units of how much outputs vary. `int8_drift`: how far ONNX Runtime is
from the network that rounds in torch, in the same units; beyond 0.02 the gate let it pass because it is hardly further
from the floating network (`parity_share`).

A peer gets what it takes. `torch_pruning` (the torch module): what it leaves of the parameters at 30 %, where the
result runs and gives the same shapes. `torch_pruning_train`: one update of that. `onnxruntime_int8` and `nncf_int8`
(the ONNX file, or our export of the whole network): how far the INT8 file is from the network, as above, where it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

from lib.rows import RESULTS, new_row, read, write
from lib.zoo import names, packages_from
from lib.zoo_cells import COLUMNS, UNITS, Cell, Entry, cells

from penjing.core.cli import guarded

BENCHMARK, PEERS = "zoo", Path("build/peers")
SECONDS = 240
IMPORTED = ("onnxruntime.quantization", "onnxscript", "timm", "torch_pruning", "torchvision", "transformers")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names")
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=COLUMNS)
    parser.add_argument("--site", type=Path, default=PEERS / "zoo/site", help="where zoo.sh put its packages")
    parser.add_argument("--nncf", type=Path, default=PEERS / "nncf/venv/bin/python", help="the Python that has NNCF")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="that one network may take")
    parser.add_argument("--again", action="store_true", help="also what has rows")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    for folder in ("site", "nncf", "results"):  # each network's process works in a folder of its own
        setattr(arguments, folder, getattr(arguments, folder).absolute())
    done = set() if arguments.again else {row.metric for row in read(BENCHMARK, arguments.results)}
    warnings.filterwarnings("ignore")
    packages_from(arguments.site)
    for module in IMPORTED:
        importlib.import_module(module)
    for name in names():
        if not any(part in name for part in arguments.only):
            continue
        columns = [column for column in arguments.columns if f"{name}/{column}" not in done]
        if columns:
            run(name, columns, arguments)
    return 0


def run(name: str, columns: list[str], arguments: argparse.Namespace) -> None:
    """One network in a process of its own; each cell is a row, also of a process that did not end well."""
    told, ended = in_a_process(name, columns, arguments)
    rows = []
    for column in columns:
        cell = told.get(column, Cell(column, None, ended, 0.0))
        shown = {"runs": 1, "reason": cell.reason, "more_versions": cell.versions}
        rows.append(new_row(BENCHMARK, f"{name}/{column}", cell.value, UNITS[column], **shown))
        print(f"{name:34s} {column:20s} {cell.seconds:6.1f} s  {cell.reason or f'{cell.value:.4g}'}", flush=True)
    write(BENCHMARK, rows, arguments.results)


def in_a_process(name: str, columns: list[str], arguments: argparse.Namespace) -> tuple[dict[str, Cell], str]:
    """The cells that came before the process ended or was ended, and why there are no more."""
    context = multiprocessing.get_context("fork")  # what is imported here need not be imported again
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(there, name, columns, arguments), daemon=False)
    process.start()
    there.close()
    told: dict[str, Cell] = {}
    until = time.monotonic() + arguments.seconds
    try:
        while here.poll(max(until - time.monotonic(), 0)):
            cell = here.recv()
            told[cell.column] = cell
        process.kill()
        ended = f"takes longer than {arguments.seconds} s"
    except EOFError:
        ended = ""
    process.join()
    return told, ended or f"its process ended with {process.exitcode}"


def send(to: Connection, name: str, columns: list[str], arguments: argparse.Namespace) -> None:
    """In the other process: each cell as soon as it is known."""
    # Peers write large weights into the current folder, and leave them there when their time is over.
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        for cell in cells(Entry(name, Path(place), arguments.site, arguments.nncf), columns):
            to.send(cell)


if __name__ == "__main__":
    raise SystemExit(guarded(main))
