"""Any graph becomes an INT8 artifact: quantizers placed, calibrated or trained, written as ONNX, gated by parity."""

from __future__ import annotations

import json
from glob import escape
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from penjing.compress.distill.graph import TRAINING, LossName, Taught, from_teacher
from penjing.compress.distill.objective import DistillWeights
from penjing.compress.distill.training import TrainingSettings, run_recipe_of, train_checkpoint
from penjing.compress.export.onnx_graph import export_network
from penjing.compress.graph.calibrate import prepare_graph
from penjing.compress.graph.place import place_quantizers, products
from penjing.compress.graph.ready import ready
from penjing.compress.graph.stored import stored
from penjing.compress.graph.task import QuantizedTask, trained_network
from penjing.compress.parity.graph import GraphParity, probe
from penjing.compress.quantize.targets import GraphSettings, resolve
from penjing.compress.quantizers.onnx import quantization_for, said_of_network, said_of_parity, write_records
from penjing.compress.samples.data import DataSettings, Samples
from penjing.compress.samples.graph import graph_samples
from penjing.core.artifact.base import MODEL_FILE
from penjing.core.artifact.parity import DriftError
from penjing.core.checkpoint.graph import load_network, save_skeleton, save_tokenizer
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text
from penjing.core.graph.network import Network
from penjing.core.progress import Progress
from penjing.core.work import Places
from penjing.train.families.base import Task
from penjing.train.families.graph import GraphTraining
from penjing.train.recipe.recipe import RunRecipe

_TRAINED = "quantized"


class GateSettings(GraphSettings):
    """INT8 for a graph that is calibrated, and how far ONNX Runtime may be from it."""

    parity_bound: float = Field(
        default=0.02,
        gt=0,
        description="Mean difference between an output of the fake-quantized network and of ONNX Runtime, in units of "
        "how much outputs vary from sample to sample.",
    )
    parity_share: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Beyond parity_bound ONNX Runtime may answer too, if it is at most by this share further from the "
        "network that does not round than the fake-quantized network is: numbers that fall the other way are enlarged "
        "by layers as all roundings are, and make answers other, not worse. 0: by parity_bound alone.",
    )
    parity_samples: int = Field(default=16, ge=2, description="Samples that are compared and kept for `verify`.")
    fall_back: float = Field(
        default=0.25,
        ge=0,
        lt=1,
        description="Where ONNX Runtime drifts beyond parity_bound, up to this share of the layers stay floating, from "
        "the network's input on, as few as are enough; they are named. 0 refuses the artifact at once, and so does a "
        "network that was trained in INT8.",
    )


class GraphQuantize(TrainingSettings, GateSettings):
    """INT8 for a graph."""

    learns_from_model: ClassVar[bool] = True  # where no teacher is named

    steps: int = Field(default=0, ge=0, description="Updates of quantization-aware training; 0 calibrates only.")
    teacher: Path | None = Field(default=None, description="Whom it learns from; none given: the recipe's model.")
    temperature: float = Field(default=1.0, gt=0, description="Divides the logits of teacher and student.")
    distill: DistillWeights = Field(default=DistillWeights(), description="Weights of the parts of the loss.")
    loss: LossName = Field(
        default="auto",
        description="What outputs are compared by (distill.logits): divergence (of classes), mse, cosine, or "
        "FILE.py:FUNCTION, as in a distill. By default the divergence where the first output has classes, else mse.",
    )


def check(source: Path, step: GraphQuantize, data: DataSettings) -> None:
    """Refuse settings that do not fit.

    Raises:
        ConfigError: the target cannot express them, or there is nothing to train on.
    """
    resolve(step.target, step)
    if step.steps:
        run_recipe_of(source, step, TRAINING, data, source)


def quantize(
    places: Places, step: GraphQuantize, data: DataSettings, model: Path, progress: Progress
) -> dict[str, Any]:
    """Fill `places.partial`, not yet published, with the artifact of the graph in `places.source`.

    After a kill, training goes on from `places.scratch`.

    Args:
        model: what the run began with, which is learnt from unless the step names a teacher.

    Returns:
        What it decided and measured, JSON-ready.

    Raises:
        ConfigError: the target cannot express the settings.
        InputError: the checkpoint is damaged, the data do not fit, or the artifact fails its parity gate.
    """
    source = places.source
    floating = load_network(source)
    samples = graph_samples(source, data, progress)
    if step.steps == 0:
        progress.start("calibrating", 1)
        quantized = least_floating(places.partial, floating, step, samples, progress)
        progress.advance()
        return {"kind": "quantize", "quantized": quantized}
    teacher, trained = step.teacher or model, places.scratch / _TRAINED
    made, resolved = ready(floating, step, samples)

    def wrap(task: Task, run: RunRecipe) -> Task:
        assert isinstance(task, GraphTraining)
        objective = from_teacher(task, run, source, teacher, step.distill, step.temperature, step.loss)
        task.network = made
        return QuantizedTask(Taught(task, objective), made, resolved, samples)

    names = {"student": source, "teacher": teacher}
    training = train_checkpoint(source, trained, step, TRAINING, data, places.scratch, progress, wrap, names)
    network = trained_network(made, resolved, trained)
    quantized = write_graph_artifact(places.partial, network, floating, step, samples)
    return {"kind": "quantize", "quantized": quantized | {"training_steps": step.steps}, "training": training}


def least_floating(
    partial: Path, floating: Network, step: GateSettings, samples: Samples, progress: Progress
) -> dict[str, Any]:
    """Fill `partial` with the calibrated artifact, with as many layers floating as its parity gate asks for.

    Two correct programs round a few numbers apart, because they add floating numbers in another order, and a network
    may enlarge that from layer to layer. The earlier such a number lies, the more layers enlarge it, so the first
    layers are the ones that stay floating.

    Raises:
        InputError: the gate refuses the artifact all the same; the first try's message.
    """
    network = calibrated(floating, step, samples)
    layers = list(dict.fromkeys(each.name for each in products(network) if each.rounding is not None))
    try:
        return write_graph_artifact(partial, network, floating, step, samples)
    except DriftError as drift:
        refusal = drift
    for count in _counts(len(layers), step.fall_back):
        kept = layers[:count]
        progress.note(f"{refusal}; trying again with {', '.join(kept)} in floating point")
        milder = step.model_copy(update={"keep": (*step.keep, *map(escape, kept))})
        for path in partial.iterdir():
            path.unlink()
        try:
            said = write_graph_artifact(partial, calibrated(floating, milder, samples), floating, milder, samples)
        except InputError:
            continue
        except ConfigError:  # a budget of bits has no room for more floating layers
            break
        return said | {"kept_for_parity": kept}
    raise refusal


def _counts(layers: int, share: float) -> list[int]:
    """How many of the layers are tried in turn: an eighth, a quarter, half and all of the `share` of them."""
    most = int(round(layers * share, 6))  # 0.29 · 100 is 28.999999999999996 in floating point
    return sorted({-(-most // part) for part in (8, 4, 2, 1)}) if most else []


def calibrated(floating: Network, settings: GraphSettings, samples: Samples) -> Network:
    """A copy of `floating` that rounds as the target will, its ranges found on `samples`.

    Raises:
        ConfigError: the target cannot express the settings.
        InputError: a weight or an activation is not finite, or the data do not fit.
    """
    made, resolved = ready(floating, settings, samples)
    network = place_quantizers(made.copy(), resolved)
    prepare_graph(network, made, resolved, samples)
    return network


def write_graph_artifact(
    partial: Path, network: Network, floating: Network, settings: GateSettings, samples: Samples
) -> dict[str, Any]:
    """Fill `partial` with the artifact of `network`: quantized, and calibrated or trained.

    Returns:
        What a report says of a quantized network.

    Raises:
        InputError: the parity bound is exceeded: the artifact is refused.
    """
    network.module.eval()
    quantization = quantization_for(settings.target, settings)
    made = stored(network, settings.target)
    export_network(made, partial / MODEL_FILE, {}, settings.target)
    shown = probe(floating, next(iter(samples.inputs())), settings.parity_samples)
    comparison = GraphParity.with_inputs(shown, network.config)
    file, bound, share = partial / MODEL_FILE, settings.parity_bound, settings.parity_share or None
    parity, held = comparison.measure_network(network, made, file, quantization, bound, share)
    save_skeleton(partial, floating)
    save_tokenizer(partial, floating)
    atomic_write_text(partial / "config.json", json.dumps(network.config.model_dump(), indent=2) + "\n")
    write_records(partial, quantization, parity)
    said = said_of_network(network, quantization, islice(samples.inputs(), 1))
    return said | said_of_parity(parity, held) | {"training_steps": 0}
