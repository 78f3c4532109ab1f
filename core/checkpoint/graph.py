"""Checkpoint folders of graphs.

config.json           inputs, outputs, what they mean (`GraphConfig`)
graph.json            the operators, in order
model.safetensors     weights, under the names that operators use; "parameters" of its metadata lists what is trained
example.safetensors   inputs that show the network ("input.NAME"), and what it answered when it came in ("output.NAME")
penjing.json          kind "checkpoint", SHA-256 of each file above
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text
from penjing.core.graph.config import graph_config
from penjing.core.graph.network import Network, tensors_of
from penjing.core.graph.store import dump_graph, load_graph
from penjing.core.manifest import verify, write_manifest

WEIGHTS, GRAPH, EXAMPLE = "model.safetensors", "graph.json", "example.safetensors"


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
    write_manifest(folder, "checkpoint", created_by)


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
            trained = json.loads((file.metadata() or {}).get("parameters", "[]"))
        shown = load_file(folder / EXAMPLE)
        text = (folder / GRAPH).read_text()
        example = {spec.name: shown[f"input.{spec.name}"] for spec in config.inputs}
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder} cannot be loaded: {error}; import the network again") from error
    module = load_graph(text, tensors, str(folder / GRAPH), frozenset(map(str, trained)))
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    results = next(node for node in module.graph.nodes if node.op == "output").args[0]
    if [node.name for node in places] != [spec.name for spec in config.inputs] or (
        not isinstance(results, (list, tuple)) or len(results) != len(config.outputs)
    ):
        raise InputError(f"{folder}: config.json and {GRAPH} name other inputs or outputs; import the network again")
    return Network(module, config, example)


def answers_at_import(folder: Path) -> dict[str, Tensor]:
    """What the network answered to its example when it came in, by output.

    Raises:
        InputError: missing or damaged.
    """
    try:
        shown = load_file(folder / EXAMPLE)
        return {spec.name: shown[f"output.{spec.name}"] for spec in graph_config(folder).outputs}
    except (SafetensorError, OSError, KeyError) as error:
        raise InputError(f"{folder / EXAMPLE} cannot be read: {error}; import the network again") from error


def parameters_of(module: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in module.parameters())


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share memory as copies: safetensors refuses them."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return result
