"""The task of training any graph further, on samples of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from penjing.core.checkpoint.graph import load_network, save_graph
from penjing.core.errors import ConfigError, InputError
from penjing.core.graph.network import GraphModule, Network, set_tensor, tensors_of
from penjing.core.memory import keep_freed_memory
from penjing.core.progress import Progress, once, typed
from penjing.train.data.order import permute
from penjing.train.data.stream import Stream, one_pass, shuffled
from penjing.train.families.base import NOTHING_HELD_OUT, Family
from penjing.train.numerics.layout import channels_last
from penjing.train.objective.objective import Batch, TaskObjective
from penjing.train.objective.outputs import Classes
from penjing.train.processes.devices import choose_device
from penjing.train.processes.world import World
from penjing.train.recipe.data import SampleData
from penjing.train.recipe.recipe import RunRecipe, TrainRecipe
from penjing.train.sources.mix import MixedSamples
from penjing.train.sources.open import open_source
from penjing.train.sources.reader import Reader, form_of
from penjing.train.sources.stream import ReadSamples


class GraphTraining:
    """The graph in `folder`, its weights those that it has there.

    Args:
        features: nodes of the graph whose results the model gives after its outputs, while it is trained.
    """

    unit = "samples"

    def __init__(
        self, folder: Path, recipe: RunRecipe, data: SampleData, progress: Progress, features: tuple[str, ...] = ()
    ) -> None:
        self._recipe, self._data = recipe, data
        self.features = features
        self.network = load_network(folder)
        config = self.network.config
        if not config.batched:
            raise ConfigError(
                f"{folder} does not take any number of samples at a time ({', '.join(map(str, config.inputs))}), which "
                "training needs; import it with a dynamic first axis"
            )
        if data.source is None:
            raise ConfigError("training a graph needs samples; set data.source (or data.images), such as 'photos/'")
        source = open_source(data)
        learnt, held = source.halves(data.held_out)
        held = held[permute(np.arange(len(held), dtype=np.uint64), len(held), 0)]  # folders hold a class after another
        form = form_of(config, folder)
        self._learnt = Reader(source, learnt, form, data, once(progress))
        self._held = Reader(source, held, form, data, once(progress)) if recipe.evaluation.every and len(held) else None
        if recipe.evaluation.every and self._held is None:
            raise ConfigError(NOTHING_HELD_OUT)
        self.num_classes = form.classes
        self.labelled = self._learnt.targets is not None
        if data.mix and not (self.labelled and all(spec.dtype.startswith("float") for spec in config.inputs)):
            raise ConfigError(
                f"mix = {data.mix:g} needs samples with classes, and inputs that are floating numbers; {source.where} "
                f"and {', '.join(map(str, config.inputs))} are not both: set it to 0"
            )
        self.objective: TaskObjective = Classes(recipe.objective.label_smoothing)

    def build_model(self) -> nn.Module:
        """See `Task`."""
        return laid_out(rebuilt(self.network, self.features), choose_device(self._recipe.device))

    def initialize(self, model: nn.Module) -> None:
        """See `Task`."""
        copy_tensors(tensors_of(self.network.module), model)

    def weights(self) -> None:
        """See `Task`."""

    def example(self, micro_batch: int) -> Batch:
        """See `Task`."""
        return next(iter(self.stream(micro_batch, World(size=self._data.batch_size // micro_batch))))

    def stream(self, micro_batch: int, world: World) -> Stream:
        """See `Task`."""
        samples = ReadSamples(self._learnt, self._data)
        return shuffled(
            MixedSamples(samples, self._data.mix) if self._data.mix else samples,
            batch_size=self._data.batch_size,
            micro_batch=micro_batch,
            rank=world.rank,
            world_size=world.size,
            seed=self._recipe.seed,
        )

    def held_out(self, micro_batch: int, world: World) -> Iterator[Batch]:
        """See `Task`."""
        assert self._held is not None
        held, most = ReadSamples(self._held, self._data), self._recipe.evaluation.samples
        return one_pass(held, most, micro_batch=micro_batch, rank=world.rank, world_size=world.size)

    def after_update(self, model: nn.Module, world: World) -> tuple[Callable[[int], None], ...]:
        """See `Task`: nothing."""
        return ()

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """See `Task`."""
        trained = self.network.copy()
        copy_tensors(tensors_of(model), trained.module)
        trained.module.eval()
        save_graph(folder, trained, created_by)

    def next_command(self, folder: Path) -> str:
        """See `Task`."""
        return f"penjing graph {typed(folder)}"


def laid_out(model: GraphModule, device: torch.device) -> GraphModule:
    """`model`, made fast to train where that is a processor: memory is kept, and images have their channels last."""
    if device.type == "cpu":
        keep_freed_memory()
        channels_last(model)
    return model


def rebuilt(network: Network, features: tuple[str, ...] = ()) -> GraphModule:
    """The network's graph with tensors of its own, on torch's default device, that hold the same values.

    Args:
        features: nodes whose results follow the outputs.

    Raises:
        InputError: there is no such node.
    """
    root = nn.Module()
    own: dict[int, Tensor] = {}
    for name, tensor in tensors_of(network.module).items():
        if id(tensor) not in own:
            made = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
            trains = isinstance(tensor, nn.Parameter)
            own[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if trains else made
        set_tensor(root, name, own[id(tensor)])
    graph, places = fx.Graph(), dict[fx.Node, fx.Node]()
    results = graph.graph_copy(network.module.graph, places)
    by_name = {node.name: made for node, made in places.items() if node.op == "call_function"}
    if unknown := [name for name in features if name not in by_name]:
        raise InputError(f"the graph has no node {unknown[0]!r}; 'penjing graph' shows the names of all")
    assert isinstance(results, tuple | list)
    graph.output((*results, *(by_name[name] for name in features)))
    return GraphModule(root, graph)


@torch.no_grad()
def copy_tensors(values: dict[str, Tensor], module: nn.Module) -> None:
    """Give each parameter and buffer of `module` the values of its name."""
    for name, tensor in tensors_of(module).items():
        tensor.copy_(values[name])


def _new_task(recipe: TrainRecipe, progress: Progress) -> GraphTraining:
    raise ConfigError("a graph cannot be trained from the beginning; import one, and fine-tune it in a compress recipe")


def _checkpoint_task(folder: Path, recipe: RunRecipe, progress: Progress) -> GraphTraining:
    assert isinstance(recipe.data, SampleData)
    return GraphTraining(folder, recipe, recipe.data, progress)


FAMILY = Family(data=(SampleData,), new_task=_new_task, checkpoint_task=_checkpoint_task)
