"""Quantization-aware training of any graph: a task of train's loop whose network rounds while it learns.

Batch norms behind convolutions are folded before training, and the others keep their statistics: the network that
learns is the one that is exported, number by number, and differs in nothing between training and evaluation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from penjing.compress.distill.task import WrappedTask
from penjing.compress.graph.calibrate import prepare_graph
from penjing.compress.graph.place import place_quantizers
from penjing.compress.graph.prepare import prepared
from penjing.compress.quantize.place_resnet import set_mode
from penjing.compress.quantize.targets import GraphSettings
from penjing.compress.samples.data import Samples
from penjing.core.checkpoint.graph import WEIGHTS
from penjing.core.graph.network import GraphModule, Network, tensors_of
from penjing.core.manifest import write_manifest
from penjing.train.families.base import Task
from penjing.train.families.graph import GraphTraining, copy_tensors, rebuilt


class FrozenGraph(GraphModule):
    """A graph whose batch norms and dropouts stay as in evaluation while it learns."""

    def train(self, mode: bool = True) -> FrozenGraph:
        """As of every module, but operators stay as they are."""
        nn.Module.train(self, mode)
        return self


class QuantizedGraphTask(WrappedTask):
    """`task`, learnt with rounded weights and activations; exported with the quantizers' ranges beside the weights.

    Args:
        graph: the graph's own task, which `task` is or wraps; it trains the prepared network from here on.
        samples: what its ranges are calibrated on.
    """

    def __init__(self, task: Task, graph: GraphTraining, settings: GraphSettings, samples: Samples) -> None:
        super().__init__(task)
        graph.network = prepared(graph.network)
        self._network, self._settings, self._samples = graph.network, settings, samples

    def build_model(self) -> nn.Module:
        """See `Task`; every quantizer is on."""
        placed = place_quantizers(self._network.with_module(rebuilt(self._network)), self._settings).module
        model = FrozenGraph(placed, placed.graph)
        set_mode(model, "on")
        return model

    @torch.no_grad()
    def initialize(self, model: nn.Module) -> None:
        """See `Task`: the weights of the checkpoint, and calibrated ranges."""
        assert isinstance(model, FrozenGraph)
        own = tensors_of(model)
        for name, value in tensors_of(self._network.module).items():
            own[name].copy_(value)
        prepare_graph(self._network.with_module(model), self._network, self._settings, self._samples)

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """See `Task`; `trained_network` reads it."""
        tensors = {name: value.detach().cpu().contiguous().clone() for name, value in tensors_of(model).items()}
        save_file(tensors, folder / WEIGHTS)
        write_manifest(folder, "checkpoint", created_by)


def trained_network(floating: Network, settings: GraphSettings, folder: Path) -> Network:
    """What `QuantizedGraphTask` exported to `folder`: `floating` as it rounds after training."""
    network = place_quantizers(prepared(floating), settings)
    copy_tensors(load_file(folder / WEIGHTS), network.module)
    set_mode(network.module, "on")
    return network
