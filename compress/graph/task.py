"""Quantization-aware training of any graph: a task of train's loop whose network rounds while it learns.

Batch norms behind convolutions are folded before training, and the others keep their statistics: the network that
learns is the one that is exported, number by number, and differs in nothing between training and evaluation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from penjing.compress.distill.task import WrappedTask
from penjing.compress.graph.calibrate import prepare_graph
from penjing.compress.graph.place import place_quantizers
from penjing.compress.quantize.targets import GraphSettings
from penjing.compress.rounding.modes import set_mode
from penjing.compress.samples.data import Samples
from penjing.core.checkpoint.graph import WEIGHTS
from penjing.core.graph.network import GraphModule, Network, tensors_of
from penjing.core.manifest import write_manifest
from penjing.train.families.base import Task
from penjing.train.families.graph import copy_tensors, laid_out, rebuilt
from penjing.train.processes.devices import choose_device


class FrozenGraph(GraphModule):
    """A graph whose batch norms and dropouts stay as in evaluation while it learns."""

    def train(self, mode: bool = True) -> FrozenGraph:
        """As of every module, but operators stay as they are."""
        nn.Module.train(self, mode)
        return self


class OneAnswer(nn.Module):
    """A graph's first output alone, as a task wants it whose networks give one tensor."""

    def __init__(self, graph: FrozenGraph) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *inputs: Tensor) -> Tensor:
        """Whatever the graph takes → its first output."""
        return self.graph(*inputs)[0]


class QuantizedTask(WrappedTask):
    """`task`, learnt with rounded weights and activations; exported with the quantizers' ranges beside the weights.

    Args:
        network: `ready` for quantizers; what is trained.
        samples: what its ranges are calibrated on.
        one_answer: whether the task's networks give one tensor, not a tuple.
    """

    def __init__(
        self, task: Task, network: Network, settings: GraphSettings, samples: Samples, one_answer: bool = False
    ) -> None:
        super().__init__(task)
        self._network, self._settings, self._samples, self._one = network, settings, samples, one_answer

    def build_model(self) -> nn.Module:
        """See `Task`; every quantizer is on."""
        placed = place_quantizers(self._network.with_module(rebuilt(self._network)), self._settings).module
        model = FrozenGraph(placed, placed.graph)
        laid_out(model, choose_device("auto"))
        set_mode(model, "on")
        return OneAnswer(model) if self._one else model

    @torch.no_grad()
    def initialize(self, model: nn.Module) -> None:
        """See `Task`: the weights of the checkpoint, and calibrated ranges."""
        graph = _graph_of(model)
        own = tensors_of(graph)
        for name, value in tensors_of(self._network.module).items():
            own[name].copy_(value)
        prepare_graph(self._network.with_module(graph), self._network, self._settings, self._samples)

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """See `Task`; `trained_network` reads it."""
        tensors = {
            name: value.detach().cpu().contiguous().clone() for name, value in tensors_of(_graph_of(model)).items()
        }
        save_file(tensors, folder / WEIGHTS)
        write_manifest(folder, "checkpoint", created_by)


def trained_network(made: Network, settings: GraphSettings, folder: Path) -> Network:
    """What `QuantizedTask` exported to `folder`: `made`, the network that it was given, as it rounds after training."""
    network = place_quantizers(made.copy(), settings)
    copy_tensors(load_file(folder / WEIGHTS), network.module)
    set_mode(network.module, "on")
    return network


def _graph_of(model: nn.Module) -> FrozenGraph:
    graph = model.graph if isinstance(model, OneAnswer) else model
    assert isinstance(graph, FrozenGraph)
    return graph
