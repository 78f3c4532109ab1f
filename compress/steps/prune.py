"""The step `prune`: from a checkpoint to a smaller one.

    record = prune_checkpoint(source, partial, Prune(ratio=0.3), pruner, data, progress)

`partial` becomes a complete, smaller checkpoint that `train` resumes, `compress` goes on with and `serve` serves.
"""

from __future__ import annotations

import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from penjing.compress.families.base import DepthChoice, Pruner
from penjing.compress.prune.budget import (
    Budget,
    candidate,
    dense_sizes,
    latency,
    latency_met,
    shapes_after,
    share_for,
    sizes,
)
from penjing.compress.prune.graph import dependency_graph
from penjing.compress.prune.importance import Kind
from penjing.compress.prune.ranking import MAX_SHARE, Choice, Scope, select, select_by_group
from penjing.compress.prune.subject import Part, Subject, shapes_of
from penjing.compress.prune.surgery import cuts_of
from penjing.compress.samples.data import Samples
from penjing.compress.steps.base import Context, Step
from penjing.compress.steps.prune_checks import check_method, check_parts, check_protected, check_reconstruct
from penjing.compress.steps.prune_scores import unit_scores
from penjing.core.errors import ConfigError, InputError
from penjing.core.manifest import write_manifest
from penjing.core.progress import Progress
from penjing.core.work import Places

SAID_BELOW = 0.02  # of the units fewer than asked for: more is said
DecoderPart = Literal["ffn", "heads", "hidden", "layers", "vision_ffn", "vision_heads"]
DECODER_PARTS = get_args(DecoderPart)


class Prune(Step):
    """Removal of channels, heads or layers.

    A classifier loses channels everywhere. Of a decoder, `parts` says what: MLP channels ("ffn"), key-value heads with
    the queries that read them ("heads"), the residual width ("hidden"), whole layers ("layers"), and of the vision
    transformer before it MLP channels ("vision_ffn") and heads ("vision_heads").
    """

    remedy: ClassVar[str] = "prune less"

    kind: Literal["prune"] = Field(default="prune", description="Remove units of the network.")
    method: Kind = Field(
        default="l1",
        description="How the importance of a unit is found. Decoders alone have obs: the error that it leaves behind "
        "once those that stay are corrected for it by least squares, as reconstruct does then.",
    )
    ratio: float | None = Field(default=None, gt=0, lt=1, description="Share of the units that leaves.")
    ratios: dict[str, float] | None = Field(
        default=None,
        description="Shares that leave by group, instead of a ratio for all: names of `penjing compress inspect` or "
        "shell patterns, the first that fits counts; other groups stay whole.",
    )
    target: Budget | None = Field(default=None, description="What may stay, instead of a ratio.")
    rank: Scope = Field(
        default="local", description="Units are compared within their group, or with all (classifiers, MLPs)."
    )
    round_to: int = Field(default=8, ge=1, description="Widths that stay are multiples of it, as INT8 kernels like.")
    protect: tuple[str, ...] = Field(
        default=(), description='Shell patterns of parameters, such as "stem.*", whose units stay.'
    )
    parts: tuple[DecoderPart, ...] | None = Field(default=None, description='What a decoder loses; none given: "ffn".')
    layers: int | tuple[int, ...] | None = Field(
        default=None, description="Layers to drop: how many (those that change least), or which."
    )
    layers_by: DepthChoice = Field(
        default="influence",
        description="How a number of layers is found: all at once by how little they change, or by trials, in which "
        "each is left out in turn, and the one goes without which the calibration text is predicted best.",
    )
    reconstruct: bool = Field(
        default=False,
        description="Fit the weights of a decoder that read what left, and those before layers that left, to what the "
        "whole network computes on the calibration text, by least squares.",
    )
    reconstruct_to: Literal["network", "layer"] = Field(
        default="network",
        description="What reconstruct fits to: the whole network's, or what the whole layer itself made.",
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description='Of the method "random".')
    rounds: int = Field(
        default=1, ge=1, le=100, description="Equal shares, each followed by the steps up to the next that heals."
    )
    batch_norm: bool = Field(
        default=True, description="Estimate the statistics of a classifier's norms anew afterwards."
    )

    @field_validator("layers")
    @classmethod
    def _some_layers(cls, value: int | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
        if value is not None and (not value or (isinstance(value, int) and value < 0)):
            raise ValueError("a number of 1 or more, or a list of layer numbers")
        return value

    @field_validator("ratios")
    @classmethod
    def _shares_of_groups(cls, values: dict[str, float] | None) -> dict[str, float] | None:
        if values is not None and (not values or any(not 0 < value < 1 for value in values.values())):
            raise ValueError('name groups and shares above 0 and below 1, as { "stem.conv" = 0.25 }')
        return values

    @model_validator(mode="after")
    def _one_budget(self) -> Prune:
        if ("layers" in (self.parts or ())) != (self.layers is not None):
            raise ValueError('layers and the part "layers" belong together: parts = ["layers"] with layers = 3')
        if self.parts is not None and (not self.parts or len(set(self.parts)) != len(self.parts)):
            raise ValueError(f"parts={list(self.parts)}: one or more of {', '.join(DECODER_PARTS)}, each once")
        budgets = sum(given is not None for given in (self.ratio, self.ratios, self.target))
        if self.parts == ("layers",):
            if budgets:
                raise ValueError(
                    'ratio, ratios and target are for widths: with parts = ["layers"] alone, leave them out'
                )
        elif budgets != 1:
            raise ValueError(
                "give one of ratio (0.3 removes 30 % of the units), ratios (by group) and target (what may stay)"
            )
        if self.layers_by == "trials" and not isinstance(self.layers, int):
            raise ValueError("layers_by='trials' finds which layers leave: say how many, as layers = 3")
        if self.reconstruct and "hidden" in (self.parts or ()):
            raise ValueError(
                "reconstruct compares the residual stream with that of the whole network, and the part 'hidden' takes "
                "some of it away: leave out one of them"
            )
        return self

    def width_parts(self) -> tuple[str, ...]:
        """The parts of a decoder that get narrower."""
        return tuple(part for part in self.parts or ("ffn",) if part != "layers")

    def needs_data(self) -> bool:
        """See `Step`."""
        timed = self.target is not None and self.target.latency is not None
        looks = self.method in ("taylor", "activation", "obs") or self.reconstruct
        return looks or isinstance(self.layers, int) or timed

    def check_order(self, before: tuple[Step, ...], after: tuple[Step, ...]) -> None:
        """See `Step`."""
        if self.rounds > 1 and (self.ratio is None or self.layers is not None):
            raise ConfigError(f"rounds={self.rounds} divides a ratio of units: give ratio, no target and no layers")

    def check(self, context: Context) -> None:
        """See `Step`."""
        context.family.need("pruner", "pruned")
        check_parts(self.parts, self.layers, context)
        check_reconstruct(self.reconstruct, context)
        check_method(self.method, self.width_parts(), context)
        if self.protect:
            check_protected(self.protect, context.model, context.family.skeleton(context.model).model)

    def weakens(self) -> dict[str, Any]:
        """See `Step`."""
        return self.model_dump(mode="json", include={"ratio", "ratios", "target", "layers"}, exclude_defaults=True)

    def milder(self, factor: float, floor: float) -> Prune:
        """See `Step`; of layers that many, the first of a list; a target in absolute numbers stays."""
        changed: dict[str, Any] = {}
        if self.ratio is not None and self.ratio > floor:
            changed["ratio"] = max(floor, round(self.ratio * factor, 9))
        if self.ratios is not None:
            changed["ratios"] = {
                name: max(min(share, floor), round(share * factor, 9)) for name, share in self.ratios.items()
            }
        if self.target is not None:
            name, value = self.target.quantity()
            if 1 - value > floor:  # a part of what there is
                stays = 1 - max(floor, (1 - value) * factor)
                changed["target"] = self.target.model_copy(update={name: round(stays, 9)})
        if isinstance(self.layers, int) and self.layers > 1:
            changed["layers"] = max(1, int(self.layers * factor))
        if isinstance(self.layers, tuple) and len(self.layers) > 1:
            changed["layers"] = self.layers[: max(1, int(len(self.layers) * factor))]
        return self.model_copy(update=changed)

    def run(self, places: Places, context: Context) -> dict[str, Any]:
        """See `Step`."""
        pruner = context.family.need("pruner", "pruned")
        data = context.samples(places.source) if self.needs_data() else None
        record = prune_checkpoint(places.source, places.partial, self, pruner, data, context.progress)
        if self.batch_norm and pruner.finish is not None:
            record |= pruner.finish(places.partial, context.data, context.progress)
        return record


def prune_checkpoint(
    source: Path, partial: Path, step: Prune, pruner: Pruner, data: Samples | None, progress: Progress
) -> dict[str, Any]:
    """Write the pruned checkpoint of `source` into `partial`.

    Args:
        source: a checkpoint; it is left as it is.
        pruner: of its family.
        partial: an empty folder that the caller publishes.
        data: calibration batches; None where the step needs none (`Prune.needs_data`).

    Returns:
        JSON-ready: what left (`groups`, `layers_dropped`), tensors' shapes before and after (`widths`), `parameters`,
        `macs` and `bytes` before and after, `importance`, `seconds`.

    Raises:
        ConfigError: the step does not fit the network, or would remove nothing.
        InputError: the checkpoint is damaged, its network cannot be analysed, or the target cannot be reached.
    """
    began = time.perf_counter()
    subject, why = _open(source, step, pruner, data, progress)
    choice, found = _choose(subject, step, pruner, data, progress)
    dropped = subject.dropped
    if not choice and not dropped:
        raise ConfigError(
            f"nothing leaves {source} at a share of {found['share']:.3g} with round_to={step.round_to}: the widths "
            f"that stay are rounded up; raise the share, or lower round_to"
        )
    shapes = shapes_of(subject.model)
    after = shapes_after(subject, choice)
    config = subject.config_of(after, choice)
    pruned = candidate(subject, choice)
    _check_shapes(pruned, after)
    progress.start("writing the pruned checkpoint", 1)
    made = {"command": "penjing compress", "penjing": version("penjing"), "step": step.model_dump(mode="json")}
    cuts = cuts_of(choice, shapes)
    if step.reconstruct:
        assert data is not None
        assert pruner.reconstruct is not None
        with tempfile.TemporaryDirectory(dir=partial) as folder:
            subject.write(cut := Path(folder), config, cuts, made)
            own = step.reconstruct_to == "layer"
            found |= {"reconstructed": pruner.reconstruct(source, cut, partial, dropped, data, progress, own)}
        write_manifest(partial, "checkpoint", made)
    else:
        subject.write(partial, config, cuts, made)
    progress.advance()
    before, left = dense_sizes(subject), sizes(subject, pruned, after)
    record: dict[str, Any] = {
        **found,
        "layers_dropped": list(dropped),
        **why,
        "widths": [
            {"tensor": name, "before": list(shapes[name]), "after": list(shape)}
            for name, shape in after.items()
            if shape != shapes[name] and len(shape) > 1
        ],
        **{name: {"before": before[name], "after": left[name]} for name in before},
        "macs_per": subject.unit,
    }
    if step.target is not None and step.target.latency is not None and data is not None:
        record["latency"] = latency(subject.dense, pruned, _first(data))
        record["latency"] |= {"met": (met := latency_met(step.target, record["latency"]))}
        if not met:
            asked, reached = step.target.latency, record["latency"]
            progress.note(
                f"target.latency={asked:g} is missed: {reached['ratio']:.3f} of the time that the network took, "
                f"{1e3 * reached['pruned_s']:.3g} ms; run it on a machine that does nothing else, or aim lower"
            )
    return record | {"seconds": time.perf_counter() - began}


def _open(
    source: Path, step: Prune, pruner: Pruner, data: Samples | None, progress: Progress
) -> tuple[Subject, dict[str, Any]]:
    """The checkpoint, and the record of how the layers that leave were found."""
    if step.needs_data() and data is None:
        raise ConfigError(
            "this pruning step needs calibration data, for its method, its latency or its number of layers; give some"
        )
    if not pruner.parts:
        if step.parts is not None:
            raise ConfigError(f"parts={list(step.parts)}: decoders have parts, {source} has none; leave them out")
        return pruner.open(source, (), (), progress), {}
    dropped, why = step.layers or (), dict[str, Any]()
    if isinstance(dropped, int):
        assert data is not None
        assert pruner.depth is not None
        dropped, why = pruner.depth(source, dropped, step.layers_by, data, progress)
    return pruner.open(source, step.width_parts(), dropped, progress), why


def _choose(
    subject: Subject, step: Prune, pruner: Pruner, data: Samples | None, progress: Progress
) -> tuple[Choice, dict[str, Any]]:
    """The units that leave, and the record of how they were chosen."""
    found: dict[str, Any] = {"kind": "prune", "method": step.method, "rank": step.rank, "round_to": step.round_to}
    if step.parts == ("layers",):
        return [], found | {"share": 0.0, "share_removed": 0.0, "groups": [], "importance": []}
    check_protected(step.protect, subject.folder, subject.model)
    progress.start("analysing the network", 1)
    graph = dependency_graph(subject.model, subject.example, protect=step.protect)
    if graph.reasons:
        more = f", and {others} more" if (others := len(graph.reasons) - 1) else ""
        progress.note(f"what flows through {next(iter(graph.reasons))}{more} stays whole: there is no rule for it")
    if not graph.groups:
        less = f"protect less (protect={list(step.protect)})" if step.protect else "leave the prune step out"
        raise InputError(f"{subject.folder}: nothing is left to prune, since no width of it can leave; {less}")
    parts = subject.parts(graph.groups)
    if "ffn" in parts and step.method in ("l1", "l2"):
        progress.note(
            f"{step.method} looks at weights alone, and a language model may rest on a few small ones: 20 % of the MLP "
            "channels of SmolLM2-135M take its perplexity from 15 to above 1 000 000, by activation to 19; consider "
            'method = "activation"'
        )
    progress.start(f"importance by {step.method}", 1)
    scores = {
        part: unit_scores(subject, groups, step.method, step.seed, data, pruner.obs, progress)
        for part, groups in parts.items()
    }

    def choose(share: float) -> Choice:
        return [
            chosen
            for part, groups in parts.items()
            for chosen in select(
                *(groups, scores[part], share),
                scope=_scope(part, step),
                round_to=step.round_to,
                one_scale=step.method in ("taylor", "obs"),
            )
        ]

    share = step.ratio
    if step.target is not None:
        inputs = _first(data) if data is not None and step.target.latency is not None else None
        share = share_for(step.target, subject, choose, inputs, progress)
    if share is not None:
        choice = choose(share)
    else:
        assert step.ratios is not None
        own = [group for groups in parts.values() for group in groups]
        choice = select_by_group(own, [each for of in scores.values() for each in of], step.ratios, step.round_to)
    left_alone = [part for part, groups in parts.items() if not any(group in groups for group, _ in choice)]
    if choice and left_alone and share is not None:
        progress.note(f"nothing of {', '.join(left_alone)} leaves at a share of {share:.3g}: too few units to round")
    removed = sum(len(units) for _, units in choice) / sum(len(group) for groups in parts.values() for group in groups)
    share = removed if share is None else share
    if choice and removed < share - SAID_BELOW:
        progress.note(
            f"a share of {share:.3g} of the units was asked for, {removed:.3g} leaves: widths that stay are rounded up "
            f"to multiples of round_to={step.round_to}, and no group loses more than {MAX_SHARE:.0%}"
        )
    found |= {
        "share": share,
        "share_removed": removed,
        "groups": [],
        "importance": [],
        "no_rule": list(graph.reasons),
        "kept_whole": subject.kept_whole,
    }
    gone = {id(group): units for group, units in choice}
    for part, groups in parts.items():
        for group, values in zip(groups, scores[part], strict=True):
            units, kept = gone.get(id(group), []), len(group) - len(gone.get(id(group), []))
            found["importance"].append({"name": group.name, **_summary(values, units)})
            if units:
                row = {"part": part, "name": group.name, "before": len(group), "after": kept, "removed": list(units)}
                found["groups"].append(row)
    return choice, found


def _scope(part: Part, step: Prune) -> Scope:
    return step.rank if part in ("channels", "ffn", "vision_ffn") else "local"


def _summary(values: np.ndarray, removed: list[int]) -> dict[str, float]:
    """Least, mean and largest score of a group, and the part of the sum that left."""
    total = float(values.sum())
    return {
        "least": float(values.min()),
        "mean": float(values.mean()),
        "largest": float(values.max()),
        "removed": float(values[removed].sum()) / total if total else 0.0,
    }


def _first(data: Samples) -> tuple[Tensor, ...]:
    for inputs in data.inputs():
        return inputs
    raise InputError("there is no calibration data to time the network on; give some")


def _check_shapes(pruned: nn.Module, after: dict[str, tuple[int, ...]]) -> None:
    """The derived architecture has exactly the tensors that are written."""
    expected = shapes_of(pruned)
    odd = [name for name in expected.keys() | after.keys() if expected.get(name) != after.get(name)]
    assert not odd, f"{odd[0]} is left as {after.get(odd[0])}, its architecture has {expected.get(odd[0])}"
