"""The cells of one network of the zoo; see run_zoo.py."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor

from lib.zoo import FILES, make
from penjing.compress.export.onnx_graph import export_network
from penjing.compress.families.base import family_at
from penjing.compress.quantizers.graph import GraphQuantize, quantize
from penjing.compress.samples.data import DataSettings
from penjing.compress.steps.prune import Prune, prune_checkpoint
from penjing.core.artifact.base import MODEL_FILE, PARITY_FILE
from penjing.core.artifact.parity import Parity
from penjing.core.checkpoint.graph import load_network
from penjing.core.config import parse_config
from penjing.core.files import publish_folder
from penjing.core.graph.network import Network
from penjing.core.imports.graph import GraphOptions, import_graph
from penjing.core.progress import Silent
from penjing.core.work import Places

OURS = {
    "import": "operators",
    "prune": "of the parameters",
    "train": "loss",
    "onnx": "of the largest output",
    "int8": "of the outputs' spread",
    "int8_drift": "of the outputs' spread",
}
UNITS = OURS | {
    "torch_pruning": "of the parameters",
    "torch_pruning_train": "loss",
    "onnxruntime_int8": "of the outputs' spread",
    "nncf_int8": "of the outputs' spread",
}
COLUMNS = tuple(UNITS)
NEEDS = {
    "prune": "import",
    "train": "prune",
    "onnx": "prune",
    "int8": "prune",
    "int8_drift": "int8",
    "torch_pruning_train": "torch_pruning",
}
SHARE = 0.3
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Cell:
    """What came of one network in one column: a value, or the reason why there is none."""

    column: str
    value: float | None
    reason: str | None
    seconds: float
    versions: dict[str, str] | None = None


def cells(entry: Entry, columns: Sequence[str]) -> Iterator[Cell]:
    """A cell for each of `columns` and what they need: its value, or the reason why there is none."""
    wanted = set(columns)
    for column in reversed(COLUMNS):
        if column in wanted and column in NEEDS:
            wanted.add(NEEDS[column])
    found: dict[str, Cell] = {}
    for column in COLUMNS:
        if column not in wanted:
            continue
        began, value, reason = time.perf_counter(), None, None
        needed = found.get(NEEDS.get(column, ""))
        if needed and needed.reason:
            reason = f"no {needed.column}"
        else:
            try:
                value = float(getattr(entry, f"do_{column}")())
                if not np.isfinite(value):
                    value, reason = None, f"the result is {value}"
            except Exception as error:  # whatever a network or a peer raises is the cell's content
                lines = str(error).strip().splitlines() or ["?"]
                reason = f"{type(error).__name__}: {lines[0][:300]}"
        seconds = time.perf_counter() - began
        found[column] = Cell(column, value, reason, seconds, entry.versions.get(column))
        yield found[column]


class Entry:
    """One network on its way; each `do_` is a cell and returns its value."""

    def __init__(self, name: str, place: Path, site: Path, nncf: Path) -> None:
        self.name, self.place, self.site, self.nncf = name, place, site, nncf
        self.dense, self.pruned = place / "dense", place / "pruned"
        self.versions: dict[str, dict[str, str]] = {}

    def do_import(self) -> int:
        kind, _, called = self.name.partition("/")
        if kind == "onnx":
            file = FILES[called]
            options = GraphOptions(shapes=file.shapes, dynamic=file.dynamic, fixed=file.fixed)
            import_graph(str(self.site / file.path), self.dense, options)
        else:
            code = self.place / "zoo_network.py"
            code.write_text(f"from lib.zoo import make\n\n\ndef build():\n    return make({self.name!r})\n")
            import_graph(f"{code}:build", self.dense)
        return sum(node.op == "call_function" for node in load_network(self.dense).module.graph.nodes)

    def do_prune(self) -> float:
        pruner = family_at(self.dense).need("pruner", "pruned")
        with publish_folder(self.pruned) as partial:
            record = prune_checkpoint(self.dense, partial, Prune(ratio=SHARE, round_to=1), pruner, None, Silent())
        return record["parameters"]["after"] / record["parameters"]["before"]

    def do_train(self) -> float:
        network = load_network(self.pruned)
        network.module.train()
        return updated(network.module, network.inputs())

    def do_onnx(self) -> float:
        network, file = load_network(self.pruned), self.place / "pruned.onnx"
        export_network(network, file, {})
        expected, found = answers(network), run(file, network)
        difference = float(np.abs(found - expected).max() / np.abs(expected).max())
        if not difference < 1e-3:
            raise ValueError(f"ONNX Runtime is {difference:.2g} off")
        return difference

    def do_int8(self) -> float:
        artifact = self.place / "int8"
        artifact.mkdir()
        places = Places(source=self.pruned, partial=artifact, scratch=self.place / "scratch")
        quantize(places, GraphQuantize(parity_samples=2), DataSettings(), self.pruned, Silent())
        return spread_apart(load_network(self.pruned), artifact / MODEL_FILE)

    def do_int8_drift(self) -> float:
        parity = parse_config(Parity, json.loads((self.place / "int8" / PARITY_FILE).read_text()), PARITY_FILE)
        pairs = ({"onnxruntime", "fake_quantized"}, "outputs")
        return max(each.mean for each in parity.differences if (set(each.between), each.quantity) == pairs)

    @cached_property
    def _torch_pruned(self) -> tuple[torch.nn.Module, tuple[Any, ...], float]:
        if self.name.startswith("onnx/"):
            raise ValueError("takes no ONNX file")
        import torch_pruning

        model, example = make(self.name)
        before, shapes = sum(p.numel() for p in model.parameters()), _shapes(model(*example))
        heads = [each for each in model.modules() if getattr(each, "out_features", None) == shapes[0][-1]]
        pruner = torch_pruning.pruner.MagnitudePruner(
            model,
            cast(Any, example),
            importance=torch_pruning.importance.MagnitudeImportance(p=1),
            pruning_ratio=SHARE,
            ignored_layers=heads[-1:],
        )
        pruner.step()
        if _shapes(model(*example)) != shapes:
            raise ValueError(f"its outputs are {_shapes(model(*example))}, not {shapes}")
        left = sum(p.numel() for p in model.parameters()) / before
        if left == 1:
            raise ValueError("nothing leaves")
        return model, example, left

    def do_torch_pruning(self) -> float:
        return self._torch_pruned[2]

    def do_torch_pruning_train(self) -> float:
        model, example, _ = self._torch_pruned
        return updated(model.train(), example)

    @cached_property
    def _whole(self) -> tuple[Network, Path]:
        """The network as the peers get it: a file of ONNX, and what it computes."""
        if not self.dense.exists():
            self.do_import()
        network = load_network(self.dense)
        if self.name.startswith("onnx/") and not FILES[self.name.partition("/")[2]].fixed:
            file = self.site / FILES[self.name.partition("/")[2]].path
            if set(_inputs(network)) == {each.name for each in onnx.load(file).graph.input}:  # ours have no ":"
                return network, file
        file = self.place / "whole.onnx"
        export_network(network, file, {})
        return network, file

    def do_onnxruntime_int8(self) -> float:
        from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process

        network, file = self._whole

        class Once(CalibrationDataReader):
            def __init__(self) -> None:
                self.left = [_inputs(network)]

            def get_next(self) -> Any:
                return self.left.pop() if self.left else None

        prepared, out = self.place / "prepared.onnx", self.place / "onnxruntime.onnx"
        self.versions["onnxruntime_int8"] = {"onnxruntime": onnxruntime.__version__}
        quant_pre_process(str(file), str(prepared))
        settings: dict[str, Any] = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
        quantize_static(str(prepared), str(out), Once(), per_channel=True, **settings)
        return quantized_apart(network, out)

    def do_nncf_int8(self) -> float:
        network, file = self._whole
        given, out = self.place / "given.npz", self.place / "nncf.onnx"
        np.savez(given, **cast(dict[str, Any], _inputs(network)))
        script = Path(__file__).resolve().parents[1] / "peers" / "bench_nncf_any.py"
        command = [str(self.nncf), str(script), str(file), str(given), str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError((done.stderr.strip().splitlines() or ["?"])[-1][:300])
        self.versions["nncf_int8"] = {"nncf": json.loads(done.stdout.splitlines()[-1])["version"]}
        return quantized_apart(network, out)


def updated(module: torch.nn.Module, inputs: tuple[Any, ...]) -> float:
    """The mean square of the outputs before one small step down; the step changed weights and left them finite."""
    parameters = [each for each in module.parameters() if each.requires_grad]
    before = [each.detach().clone() for each in parameters]
    optimizer = torch.optim.SGD(parameters, 1e-4)
    loss = _tensors(module(*inputs))[0].float().square().mean()
    loss.backward()
    optimizer.step()
    if not all(torch.isfinite(each).all() for each in parameters):
        raise ValueError("an update gives NaN")
    if all(torch.equal(one, other) for one, other in zip(parameters, before, strict=True)):
        raise ValueError("an update changes nothing")
    return loss.item()


def spread_apart(network: Network, file: Path) -> float:
    """Mean difference between the first output of `file` and of `network`, in units of its standard deviation."""
    expected = answers(network)
    return float(np.abs(run(file, network) - expected).mean() / max(float(expected.std()), 1e-12))


def quantized_apart(network: Network, file: Path) -> float:
    """As `spread_apart`, of a peer's file, which must hold something quantized."""
    if not any("QuantizeLinear" in node.op_type for node in onnx.load(file).graph.node):
        raise ValueError("nothing is quantized")
    return spread_apart(network, file)


def answers(network: Network) -> NDArray[Any]:
    """The first output on the example, in float64."""
    with torch.no_grad():
        return network(*network.inputs())[0].double().numpy()


def run(file: Path, network: Network) -> NDArray[Any]:
    """The first output of `file` on the network's example, in float64."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    found = np.asarray(session.run(None, _inputs(network))[0])
    expected = tuple(network.config.outputs[0].shape)
    if found.ndim != len(expected):
        raise ValueError(f"the output has the shape {found.shape}, not {expected}")
    return found.astype(np.float64)


def _inputs(network: Network) -> Arrays:
    return {spec.name: network.example[spec.name].numpy() for spec in network.config.inputs}


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [each for part in value for each in _tensors(part)]


def _shapes(value: Any) -> list[list[int]]:
    return [list(each.shape) for each in _tensors(value)]
