"""A network that is changed and judged again and again: units masked, norms estimated anew, layers rounded.

Units that leave are set to zero, which computes what their removal does (up to norms over channels), so that the
network is traced once. Half of the calibration batches estimate statistics and ranges, the other half judges: how far
the answers are from those of the network as it is, in nats a sample where the first output has classes, else as the
squared error over the squared size. Neither half is what `[evaluate]` looks at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.compress.families.base import Family
from penjing.compress.graph.bits import logits_of
from penjing.compress.graph.calibrate import prepare_graph
from penjing.compress.graph.place import place_quantizers, products
from penjing.compress.graph.prepare import prepared
from penjing.compress.graph.ready import ready
from penjing.compress.measure.perplexity import LARGEST_LOSS
from penjing.compress.measure.skeleton import count_macs
from penjing.compress.prune.graph import dependency_graph
from penjing.compress.prune.ranking import select, short_name
from penjing.compress.prune.subject import Subject
from penjing.compress.prune.surgery import Selection, mask
from penjing.compress.prune_graph.statistics import reestimate_graph
from penjing.compress.quantize.targets import GraphSettings
from penjing.compress.recipe import Recipe
from penjing.compress.samples.data import Samples
from penjing.compress.samples.graph import ExampleData
from penjing.compress.search.base import only_step
from penjing.compress.search.graph_clock import GraphClock
from penjing.compress.search.points import graph_steps
from penjing.compress.search.recipe import FLOATING, STORED, WHOLE, Choices, Workload
from penjing.compress.search.space import Space, Variable, Weighted
from penjing.compress.steps.prune import Prune
from penjing.compress.steps.prune_scores import unit_scores
from penjing.compress.steps.quantize import Quantize
from penjing.core.errors import ConfigError, InputError
from penjing.core.graph.network import Network, tensor_at, tensors_of
from penjing.core.progress import Progress, Silent
from penjing.core.work import Tasks

FEW = 8  # samples: where only time is asked for, ranges need no more


@dataclass(frozen=True)
class Batches:
    """Calibration batches in memory; see `Samples`."""

    batches: tuple[tuple[Tensor, ...], ...]

    def inputs(self) -> Iterator[tuple[Tensor, ...]]:
        """See `Samples`."""
        yield from self.batches

    def losses(self, model: torch.nn.Module) -> Iterator[Tensor]:
        """See `Samples`; nothing here looks at them."""
        raise AssertionError("a search judges answers, not losses")

    @property
    def count(self) -> int:
        """How many samples."""
        return sum(len(inputs[0]) for inputs in self.batches)


class Trials:
    """The network of a recipe's model, and every change of it that a space allows.

    Attributes:
        decides: all that a divergence depends on beside the checkpoint, JSON-ready.

    Raises:
        ConfigError: the family cannot be searched, the recipe lacks the step that a choice belongs to, or a choice
            changes nothing.
        InputError: the checkpoint is damaged, or nothing of it can be pruned or quantized.
    """

    def __init__(self, recipe: Recipe, choices: Choices, family: Family, progress: Progress) -> None:
        self.family, self.folder = family, recipe.model
        if choices.layers:
            raise ConfigError("space.layers is for decoders; of a classifier or a graph give widths and bits")
        if choices.windows:
            raise ConfigError("space.windows is for decoders; of a classifier or a graph give widths and bits")
        if choices.bits[0] != FLOATING or not {*choices.bits} <= {FLOATING, STORED}:
            raise ConfigError(
                f"space.bits={list(choices.bits)}: layers of a classifier or a graph stay floating or have 8 bits; "
                "write [32, 8], or [32]"
            )
        self._as_graph = as_graph = family.need("as_graph", "searched")
        self._subject = subject = family.need("pruner", "pruned").open(recipe.model, (), (), progress)
        self.model = subject.network()
        self.traced: Network = as_graph(recipe.model, self.model)
        samples = family.samples(recipe.model, recipe.data, progress)
        self.refreshes = not isinstance(samples, ExampleData)
        self.seen, self.judged = _halves(samples, self.traced.config.inputs[0].shape)
        self._whole = {name: tensor.clone() for name, tensor in tensors_of(self.model).items()}
        progress.start("analysing the network", 1)
        widths = self._widths(subject, only_step(recipe, Prune), choices, samples)
        self.settings, bits = self._bits(only_step(recipe, Quantize), choices)
        if not widths and not bits:
            raise ConfigError(
                "space: there is nothing to choose; give widths such as [1.0, 0.75, 0.5], or bits [32, 8]"
            )
        self._variables = (*widths, *bits)
        self.space = Space(self._variables, self._layers())
        self.decides = {
            "data": recipe.data.model_dump(mode="json"),
            "widths": [(each.name, each.options, each.units) for each in widths],
            "bits": [(each.name, each.options) for each in bits],
            "quantize": None if self.settings is None else self.settings.model_dump(mode="json"),
        }
        self._answers = [self._answered(self.traced, inputs) for inputs in self.judged.inputs()]
        progress.advance()

    @property
    def unit(self) -> str:
        """Of a divergence."""
        return "nats" if self.traced.config.meaning == "classes" else "of the size, squared"

    @property
    def count(self) -> int:
        """How many samples are judged."""
        return self.judged.count

    def prepare(self, tasks: Tasks, progress: Progress) -> None:
        """See `Changes`; nothing is costly enough to be kept."""

    def clock(self, workload: Workload) -> GraphClock:
        """See `Changes`."""
        few = Batches(tuple(tuple(each[:FEW] for each in inputs) for inputs in self.seen.batches[:1]))
        as_graph = partial(self._as_graph, self.folder)
        return GraphClock(self._subject, as_graph, self.traced, self.space, self.settings, few, workload)

    def point(self, base: dict[str, Any], choice: Sequence[int]) -> list[dict[str, Any]]:
        """See `Changes`."""
        return graph_steps(base, self.space, choice)

    def divergence(self, choice: Sequence[int]) -> float:
        """How far the answers of a combination are from those of the network as it is; at most `LARGEST_LOSS`."""
        if not any(choice):
            return 0.0
        try:
            return self._from_whole(self._made(choice))
        finally:
            self._restore()

    def healed(self, folder: Path, choice: Sequence[int], tasks: Tasks, progress: Progress) -> float:
        """See `Changes`."""
        model = self.family.need("pruner", "pruned").open(folder, (), (), progress).network()
        return self._from_whole(self._rounded(self._as_graph(folder, model), choice))

    def _from_whole(self, network: Network) -> float:
        total = 0.0
        with torch.no_grad():
            for inputs, before in zip(self.judged.inputs(), self._answers, strict=True):
                total += float(self._apart(before, self._answered(network, inputs)).double().sum())
        mean = total / self.judged.count if self.traced.config.batched else total / len(self.judged.batches)
        return min(max(mean, 0.0), LARGEST_LOSS) if np.isfinite(mean) else LARGEST_LOSS

    def _made(self, choice: Sequence[int]) -> Network:
        """The network of a combination: it shares weights with the traced one until `_restore`."""
        selection = [
            (variable.group, list(variable.units[option]))
            for variable, option in zip(self._variables, choice, strict=True)
            if variable.group is not None and option
        ]
        if selection:
            mask(self.model, selection)
            if self.refreshes:
                reestimate_graph(self.traced.module, self.seen.inputs())
        return self._rounded(self.traced, choice)

    def _rounded(self, network: Network, choice: Sequence[int]) -> Network:
        """With the bits of a combination, calibrated."""
        floating = self.space.floating(choice)
        if self.settings is None or len(floating) == sum(each.kind == "bits" for each in self._variables):
            return network
        keep = (*self.settings.keep, *map(escape, floating))
        made, settings = ready(network, self.settings.model_copy(update={"keep": keep}), self.seen)
        rounded = place_quantizers(made.copy(), settings)
        prepare_graph(rounded, made, settings, self.seen)
        return rounded

    def _restore(self) -> None:
        with torch.no_grad():
            for name, tensor in tensors_of(self.model).items():
                tensor.copy_(self._whole[name])

    def _widths(self, subject: Subject, step: Prune | None, choices: Choices, samples: Samples) -> list[Variable]:
        if choices.widths == (WHOLE,):
            return []
        if step is None:
            raise ConfigError(
                "space.widths needs a step of kind 'prune' in base, whose method, protect and round_to are taken; add "
                "one, or set space.widths=[1.0]"
            )
        graph = dependency_graph(subject.model, subject.example, protect=step.protect)
        groups = [group for part in subject.parts(graph.groups).values() for group in part]
        if not groups:
            raise InputError(f"{self.folder}: nothing of this network can be pruned; set space.widths=[1.0]")
        scores = unit_scores(subject, groups, step.method, step.seed, samples, None, Silent())
        found = []
        for group, values in zip(groups, scores, strict=True):
            options = [WHOLE]
            units: list[tuple[int, ...]] = [()]
            for share in choices.widths[1:]:
                chosen = select([group], [values], round(WHOLE - share, 9), round_to=step.round_to)
                if chosen and len(chosen[0][1]) > len(units[-1]):  # rounding makes some shares equal
                    options.append(share)
                    units.append(tuple(chosen[0][1]))
            if len(options) > 1:
                found.append(Variable(short_name(group), "width", tuple(options), group, tuple(units)))
        if not found:
            raise ConfigError(
                f"space.widths: no group gets narrower by {list(choices.widths[1:])} with round_to={step.round_to}, "
                "which rounds up what stays; lower steps.N.round_to by [settings]"
            )
        return found

    def _bits(self, step: Quantize | None, choices: Choices) -> tuple[GraphSettings | None, list[Variable]]:
        if len(choices.bits) == 1:
            return None, []
        if step is None:
            raise ConfigError(
                "space.bits needs a step of kind 'quantize' in base, whose target is taken; add one, or set "
                "space.bits=[32]"
            )
        fields = set(GraphSettings.model_fields) & set(type(step).model_fields)
        settings = GraphSettings.model_validate(step.model_dump(include=fields) | {"effective_bits": None})
        placed = place_quantizers(prepared(self.traced), settings)
        names = dict.fromkeys(each.name for each in products(placed) if each.rounding is not None)
        options = tuple(map(float, choices.bits))
        return settings, [Variable(name, "bits", options) for name in names]

    def _layers(self) -> tuple[Weighted, ...]:
        """Every layer, with what leaves it at each option alone: what is zero where all else is one."""
        whole = prepared(self.traced)
        macs = count_macs(whole.module, whole.inputs())
        inputs = len(whole.inputs()[0]) if whole.config.batched else 1
        numbers = {each.name: number for number, each in enumerate(self._variables) if each.kind == "bits"}
        gone: dict[str, tuple[dict[int, list[float]], dict[int, list[float]]]] = {}
        for number, variable in enumerate(self._variables):
            for units in variable.units[1:]:
                assert variable.group is not None
                for name, shares in self._zeros([(variable.group, list(units))]).items():
                    for into, share in zip(gone.setdefault(name, ({}, {})), shares, strict=True):
                        into.setdefault(number, [0.0]).append(share)
        found: dict[str, Weighted] = {}
        for product in products(whole):
            rows, columns = (
                {number: np.array(values) for number, values in each.items() if any(values)}
                for each in gone.get(product.name, ({}, {}))
            )
            cost = macs.get(product.node.name, 0) / inputs
            if product.name in found:  # a layer that runs twice
                cost += found[product.name].macs
            weights = tensor_at(whole.module, str(product.weight.target)).numel()
            found[product.name] = Weighted(product.name, cost, weights, numbers.get(product.name), rows, columns)
        return tuple(found.values())

    def _zeros(self, selection: Selection) -> dict[str, tuple[float, float]]:
        """Layer → the shares of its weight's rows and columns that `selection` takes."""
        try:
            with torch.no_grad():
                for tensor in tensors_of(self.model).values():
                    if tensor.is_floating_point():
                        tensor.fill_(1.0)
                mask(self.model, selection)
            found = {}
            for product in products(made := prepared(self.traced)):
                weight = tensor_at(made.module, str(product.weight.target)) != 0
                rows, columns = (weight.transpose(0, axis).flatten(1).any(1).double().mean() for axis in (0, 1))
                found[product.name] = 1 - float(rows), 1 - float(columns)
            return found
        finally:
            self._restore()

    @torch.no_grad()
    def _answered(self, network: Network, inputs: tuple[Tensor, ...]) -> Tensor:
        outputs = network(*inputs)
        if self.traced.config.meaning == "classes":
            return logits_of(outputs[0]).log_softmax(1)
        samples = len(inputs[0]) if self.traced.config.batched else 1
        return torch.cat([each.reshape(samples, -1).double() for each in outputs if each.is_floating_point()], 1)

    def _apart(self, before: Tensor, after: Tensor) -> Tensor:
        """(samples,) divergences."""
        if self.traced.config.meaning == "classes":
            return F.kl_div(after.double(), before.double(), reduction="none", log_target=True).sum(1)
        scale = before.square().sum(1)
        return (after - before).square().sum(1) / torch.where(scale > 0, scale, 1.0)


def _halves(samples: Samples, shape: Sequence[int | str]) -> tuple[Batches, Batches]:
    """What is looked at, and what is judged, of inputs of `shape`; of a single batch of any size its two halves, where
    its size is fixed the same."""
    batches = list(samples.inputs())
    if not batches:
        raise InputError("a search needs calibration samples, and there are none; give some in [data] of base")
    if len(batches) == 1 and shape and isinstance(shape[0], str) and len(batches[0][0]) > 1:
        half = len(batches[0][0]) // 2
        batches = [tuple(each[:half] for each in batches[0]), tuple(each[half:] for each in batches[0])]
    return Batches(tuple(batches[::2])), Batches(tuple(batches[1::2] or batches))
