"""Checkpoint folders of graphs.

config.json           inputs, outputs, what they mean (`GraphConfig`)
graph.json            the operators, in order
model.safetensors     weights, under the names that operators use; "parameters" of its metadata lists what is trained
example.safetensors   inputs that show the network ("input.NAME"), and what it answered when it came in ("output.NAME")
tokenizer.json        how texts become its inputs, where it came in with one
penjing.json          kind "checkpoint", SHA-256 of each file above
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text
from penjing.core.graph.config import graph_config
from penjing.core.graph.network import Network, tensors_of
from penjing.core.graph.store import dump_graph, load_graph
from penjing.core.manifest import read_json_object, verify, write_manifest
from penjing.core.text.text_tokenizer import TOKENIZER

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_SMALL = 4096
WEIGHTS, GRAPH, EXAMPLE = "model.safetensors", "graph.json", "example.safetensors"
SHAPES = "shapes.json"  # of an artifact, whose weights lie in ONNX: what `graph_skeleton` reads


def save_graph(folder: Path, network: Network, created_by: dict[str, Any]) -> None:
    """Fill `folder`, not yet published (see `publish_folder`)."""
    config, module = network.config, network.module
    atomic_write_text(folder / "config.json", json.dumps(config.model_dump(), indent=2) + "\n")
    atomic_write_text(folder / GRAPH, dump_graph(module.graph))
    trained = sorted(name for name, _ in module.named_parameters())
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors_of(module).items()}
    save_file(_apart(tensors), folder / WEIGHTS, {"parameters": json.dumps(trained)})
    with torch.no_grad():
        answers = network(*network.inputs())
    shown = {f"input.{name}": value for name, value in network.example.items()}
    shown |= {f"output.{spec.name}": value for spec, value in zip(config.outputs, answers, strict=True)}
    save_file(_apart({name: value.detach().cpu().contiguous() for name, value in shown.items()}), folder / EXAMPLE)
    save_tokenizer(folder, network)
    write_manifest(folder, "checkpoint", created_by)


def save_tokenizer(folder: Path, network: Network) -> None:
    """Put the network's tokenizer into `folder`, a checkpoint or an artifact that is not yet published; or nothing."""
    if network.tokenizer is not None:
        atomic_write_text(folder / TOKENIZER, network.tokenizer)


def load_network(folder: Path) -> Network:
    """The network in evaluation mode, on the CPU; every hash is checked.

    Raises:
        InputError: missing, damaged, or of another kind.
    """
    verify(folder)
    config = graph_config(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            trained = _names(json.loads((file.metadata() or {}).get("parameters", "[]")))
        shown = load_file(folder / EXAMPLE)
        text = (folder / GRAPH).read_text()
        example = {spec.name: shown[f"input.{spec.name}"] for spec in config.inputs}
        tokenizer = folder / TOKENIZER
        words = tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder} cannot be loaded: {error}; import the network again") from error
    module = load_graph(text, tensors, str(folder / GRAPH), trained)
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    results = next(node for node in module.graph.nodes if node.op == "output").args[0]
    if [node.target for node in places] != [spec.name for spec in config.inputs] or (
        not isinstance(results, (list, tuple)) or len(results) != len(config.outputs)
    ):
        raise InputError(f"{folder}: config.json and {GRAPH} name other inputs or outputs; import the network again")
    return Network(module, config, example, words)


def _names(said: Any) -> frozenset[str]:
    if not isinstance(said, list) or not all(isinstance(name, str) for name in said):
        raise ValueError(f"the parameters are {said!r:.100}, no list of names")
    return frozenset(said)


def save_skeleton(folder: Path, network: Network) -> None:
    """Put what `graph_skeleton` needs into `folder`, an artifact that is not yet published and holds no weights."""
    tensors = tensors_of(network.module)
    trained = {name for name, _ in network.module.named_parameters()}
    facts = {
        "tensors": {name: _facts(tensor, name not in trained) for name, tensor in tensors.items()},
        "inputs": {name: _facts(tensor) for name, tensor in network.example.items()},
        "parameters": sorted(trained),
    }
    atomic_write_text(folder / GRAPH, dump_graph(network.module.graph))
    atomic_write_text(folder / SHAPES, json.dumps({"schema_version": 1, **facts}) + "\n")


def graph_skeleton(folder: Path) -> Network:
    """The network of a checkpoint or an artifact with fake tensors, which have no storage, in evaluation mode.

    Only constants of at most `_SMALL` numbers hold values: an index or a size may decide the shapes behind it. Hashes
    are not checked.

    Raises:
        InputError: missing, damaged, or of another kind.
    """
    config = graph_config(folder)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        facts = _stored_facts(folder)
        trained = _names(facts["parameters"])
        tensors = {name: _without_storage(stored, mode) for name, stored in facts["tensors"].items()}
        example = {spec.name: _without_storage(facts["inputs"][spec.name], mode) for spec in config.inputs}
        text = (folder / GRAPH).read_text()
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(f"{folder} cannot be loaded: {error!r}; import the network again") from error
    with mode:
        module = load_graph(text, tensors, str(folder / GRAPH), trained)
    return Network(module, config, example)


def parameters_of(module: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in module.parameters())


def _facts(tensor: Tensor, constant: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    if constant and tensor.numel() <= _SMALL and not tensor.is_floating_point() and not tensor.is_complex():
        found["values"] = tensor.flatten().tolist()
    return found


def _stored_facts(folder: Path) -> dict[str, Any]:
    if not (folder / WEIGHTS).is_file():
        return read_json_object(folder / SHAPES)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        trained = json.loads((file.metadata() or {}).get("parameters", "[]"))
        tensors = {name: _sliced(file, name, name not in trained) for name in file.keys()}  # noqa: SIM118
    with safe_open(folder / EXAMPLE, framework="pt") as file:
        shown = {name.removeprefix("input."): _sliced(file, name) for name in file.keys()}  # noqa: SIM118
    return {"tensors": tensors, "inputs": shown, "parameters": trained}


def _sliced(file: Any, name: str, constant: bool = False) -> dict[str, Any]:
    stored = file.get_slice(name)
    shape, dtype = stored.get_shape(), _DTYPES[stored.get_dtype()]
    if constant and math.prod(shape) <= _SMALL:
        return _facts(file.get_tensor(name), True)
    return {"dtype": str(dtype).removeprefix("torch."), "shape": shape}


def _without_storage(stored: dict[str, Any], mode: FakeTensorMode) -> Tensor:
    dtype = getattr(torch, stored["dtype"])
    if "values" in stored:
        return torch.tensor(stored["values"], dtype=dtype).reshape(stored["shape"])
    with mode:
        return torch.empty(stored["shape"], dtype=dtype)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share memory as copies: safetensors refuses them."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return result
