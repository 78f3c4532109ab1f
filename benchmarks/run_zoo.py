"""Which networks come in, are pruned, trained, quantized and exported: a row for each cell, or the reason.

    benchmarks/peers/zoo.sh && python benchmarks/run_zoo.py
    python benchmarks/run_zoo.py --only timm/ --columns import prune torch_pruning

Weights are random and images small. A cell's value is a number of the result; a row without a value has the reason.
`import`: operators of the graph. `prune`: what stays of the parameters without 30 % of the units, after each result was
compared with the network whose units are zero. `train`: one update of the pruned network. `onnx`: the pruned network's
largest difference in ONNX Runtime, relative to its outputs. `int8`: the INT8 artifact's distance after its parity gate,
which two random images seldom pass. `torch_pruning`: what it leaves of the parameters at 30 %, where the result runs.
"""

from __future__ import annotations

import argparse
import copy
import gc
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import onnxruntime
import torch
from lib.rows import RESULTS, Row, append, new_row
from lib.zoo import Made, architectures, torchvision_operators

from penjing.compress.export.onnx_graph import export_network
from penjing.compress.families.base import family_at
from penjing.compress.quantizers.graph import GraphQuantize, quantize
from penjing.compress.samples.data import DataSettings
from penjing.compress.steps.prune import Prune, prune_checkpoint
from penjing.core.checkpoint.graph import load_network, save_graph
from penjing.core.cli import guarded
from penjing.core.files import publish_folder
from penjing.core.graph.trace import from_torch
from penjing.core.progress import Silent
from penjing.core.work import Places

BENCHMARK, SITE = "zoo", Path("build/peers/zoo/site")
COLUMNS = ("import", "prune", "train", "onnx", "int8", "torch_pruning")
UNITS = {"import": "operators", "train": "loss", "onnx": "of the largest output", "int8": "of the outputs' spread"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names")
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=COLUMNS)
    parser.add_argument("--site", type=Path, default=SITE, help="where zoo.sh put torchvision and timm")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torchvision_operators(arguments.site)
    rows: list[Row] = []
    for name, make in architectures().items():
        if any(part in name for part in arguments.only):
            rows += cells(name, make, arguments.columns)
            gc.collect()
    append(BENCHMARK, rows, arguments.results)
    return 0


def cells(name: str, make: Callable[[], Made], columns: list[str]) -> list[Row]:
    """A row for each column of one network; what a column needs and did not get is its reason."""
    rows, failed = [], ""
    with tempfile.TemporaryDirectory() as place:
        entry = Entry(make, Path(place))
        for column in COLUMNS:
            began, value, reason = time.perf_counter(), None, None
            own = column != "torch_pruning"
            if own and failed:
                reason = failed
            elif column in columns or (own and column in ("import", "prune")):
                try:
                    value = float(getattr(entry, f"do_{column}")())
                except Exception as error:  # whatever a network or a peer raises is the cell's content
                    reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['?'])[0][:300]}"
                    failed = f"no {column}" if own and column in ("import", "prune") else failed
            if column in columns:
                unit = UNITS.get(column, "of the parameters")
                rows.append(new_row(BENCHMARK, f"{name}/{column}", value, unit, runs=1, reason=reason))
                shown = f"{value:.4g}" if reason is None else reason
                print(f"{name:44s} {column:14s} {time.perf_counter() - began:6.1f} s  {shown}", flush=True)
    return rows


class Entry:
    """One network on its way; each `do_` is a cell and returns its value."""

    def __init__(self, make: Callable[[], Made], place: Path) -> None:
        torch.manual_seed(0)
        self.make, self.dense, self.pruned, self.int8 = make, place / "dense", place / "pruned", place / "int8"

    def do_import(self) -> int:
        model, example = self.make()
        network = from_torch(model, example)
        with publish_folder(self.dense) as partial:
            save_graph(partial, network, {"command": "zoo"})
        return len(load_network(self.dense).module.graph.nodes)

    def do_prune(self) -> float:
        pruner = family_at(self.dense).need("pruner", "pruned")
        with publish_folder(self.pruned) as partial:
            record = prune_checkpoint(self.dense, partial, Prune(ratio=0.3, round_to=1), pruner, None, Silent())
        return record["parameters"]["after"] / record["parameters"]["before"]

    def do_train(self) -> float:
        network = load_network(self.pruned)
        network.module.train()
        optimizer = torch.optim.SGD(network.module.parameters(), 1e-6)
        loss = network(*network.inputs())[0].float().square().mean()
        loss.backward()
        optimizer.step()
        if not all(torch.isfinite(parameter).all() for parameter in network.module.parameters()):
            raise ValueError("an update gives NaN")
        return loss.item()

    def do_onnx(self) -> float:
        network = load_network(self.pruned)
        file = self.pruned.parent / "pruned.onnx"
        export_network(network, file, {})
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        inputs = {spec.name: network.example[spec.name].numpy() for spec in network.config.inputs}
        with torch.no_grad():
            expected = network(*network.inputs())[0]
        found = torch.from_numpy(session.run(None, inputs)[0])
        difference = float((found - expected).abs().max() / expected.abs().max())
        if not difference < 1e-3:
            raise ValueError(f"ONNX Runtime is {difference:.2g} off")
        return difference

    def do_int8(self) -> float:
        self.int8.mkdir()
        places = Places(source=self.pruned, partial=self.int8, scratch=self.int8.parent / "scratch")
        record: dict[str, Any] = quantize(
            places, GraphQuantize(parity_samples=2), DataSettings(), self.pruned, Silent()
        )
        return record["quantized"]["differences"][0]["mean"]

    def do_torch_pruning(self) -> float:
        import torch_pruning

        model, example = self.make()
        model = copy.deepcopy(model)
        before, shape = sum(p.numel() for p in model.parameters()), _first(model(*example)).shape
        heads = [each for each in model.modules() if getattr(each, "out_features", None) == shape[-1]]
        pruner = torch_pruning.pruner.MagnitudePruner(
            model,
            cast(Any, example),
            importance=torch_pruning.importance.MagnitudeImportance(p=1),
            pruning_ratio=0.3,
            ignored_layers=heads[-1:],
        )
        pruner.step()
        if _first(model(*example)).shape != shape:
            raise ValueError(f"its output is {list(_first(model(*example)).shape)}, not {list(shape)}")
        return sum(p.numel() for p in model.parameters()) / before


def _first(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


if __name__ == "__main__":
    raise SystemExit(guarded(main))
