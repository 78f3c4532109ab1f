"""A decoder becomes an artifact of integers, calibrated, and trained to answer as its original if it is told to.

Both ways begin with transforms, calibration and rounding, layer by layer. With steps > 0 the network then learns on
train's loop with every quantized layer rounded as the runtime rounds it, from the logits of the model that the run
begins with, or of another teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from penjing.compress.decoder.artifact import make_weights
from penjing.compress.decoder.check import check_settings, int8_needs, linear_modules, rotates
from penjing.compress.decoder.head import DTYPES
from penjing.compress.decoder.layer import quantized_tensors
from penjing.compress.decoder.parity import CONTINUATION, measure
from penjing.compress.decoder.qat import apply_rounding, begin_all, rounded_layers
from penjing.compress.decoder.settings import Int8Settings
from penjing.compress.decoder.stream import EMBEDDING, FINAL_NORM, HEAD
from penjing.compress.decoder.weights import QuantizedWeight
from penjing.compress.distill.decoder import TRAINING
from penjing.compress.distill.objective import DistillWeights
from penjing.compress.distill.task import WrappedTask
from penjing.compress.distill.training import (
    Training,
    TrainingSettings,
    run_recipe_of,
    taught,
    train_checkpoint,
    writer_of,
)
from penjing.compress.quantize.bits import FLOAT_BITS, STORED_BITS, kept_by_budget
from penjing.compress.samples.data import DataSettings, check_window, token_samples
from penjing.core.artifact.lora import MOVED, ORIGINALS, base_hash
from penjing.core.artifact.parity import write_parity
from penjing.core.artifact.transform import FILE
from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.errors import ConfigError
from penjing.core.manifest import MANIFEST_NAME, read_manifest, write_manifest
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.models.tensor_names import tensor_shapes
from penjing.core.progress import Progress
from penjing.core.runtime.embedding import CHANNEL, tied_name
from penjing.core.runtime.schemes import has_int8_embedding, quantized_modules
from penjing.core.work import Places, StepRecord, Tasks, link_or_copy
from penjing.kernels.quantize import ABOVE_INPUTS
from penjing.train.families.base import Task
from penjing.train.recipe.recipe import RunRecipe

MOST_NAMES = 4  # of layers in 8 bits that the summary names
TARGET = "penjing's INT8 runtime"
ACTIVATIONS = "int8, a scale a token"
HEAD_MODULE = HEAD.removesuffix(".weight")
SCALE_BITS = 16  # of a group of 4-bit weights, and as many of its offset


class DecoderQuantize(TrainingSettings, Int8Settings):
    """INT8 for a decoder, or 4-bit weights with activations in INT8 or bfloat16."""

    learns_from_model: ClassVar[bool] = True  # where no teacher is named

    steps: int = Field(default=0, ge=0, description="Updates of quantization-aware training; 0 calibrates only.")
    teacher: Path | None = Field(default=None, description="Whom it learns from; none given: the recipe's model.")
    temperature: float = Field(default=1.0, gt=0, description="Divides the logits of teacher and student.")
    distill: DistillWeights = Field(default=DistillWeights(), description="Weights of the parts of the loss.")


Learn = Callable[[Path, Path, Int8Settings], dict[str, Any]]
"""(transformed checkpoint, artifact that was calibrated, its settings) → the record of the training that has filled the
artifact to be."""


def check(source: Path, step: DecoderQuantize, data: DataSettings, training: Training = TRAINING) -> None:
    """Refuse settings that do not fit the model, before anything is done.

    Args:
        training: how its family learns.

    Raises:
        ConfigError: a `keep` pattern that matches nothing, a window longer than the context, a transform that does not
            fit, no text to train on, or training with offsets that are whole steps.
    """
    if step.steps and step.offsets == "whole":
        raise ConfigError(
            "training moves offsets of groups, which stay no whole steps: take offsets=true or false, or steps=0"
        )
    config = open_checkpoint(source).config
    check_settings(kept_by_budget(step, source), config)
    check_window(source, data)
    if step.steps:
        run_recipe_of(source, step, training, data, source)


def fitting(source: Path) -> dict[str, Any]:
    """Settings without which the network could not be quantized: no rotation where norms let none through."""
    return {} if rotates(open_checkpoint(source).config) else {"transform": {"rotate": False}}


def needed(source: Path, step: DecoderQuantize, data: DataSettings) -> tuple[int, int, int]:
    """Bytes of memory, of the artifact, and on disk until it is complete, without training."""
    found = int8_needs(step, open_checkpoint(source).config, data.tokens)
    return found.memory, found.artifact, found.scratch


def quantize(
    places: Places,
    step: DecoderQuantize,
    data: DataSettings,
    model: Path,
    progress: Progress,
    seen: tuple[Tensor, Tensor] | None = None,
    learn: Learn | None = None,
) -> dict[str, Any]:
    """Fill `places.partial`, not yet published, with the artifact of the decoder in `places.source`.

    After a kill, calibration and training go on from `places.scratch`.

    Args:
        model: what the run began with, which is learnt from unless the step names a teacher.
        seen: windows of tokens that calibrate beside the text, and the rows of images that tokens beyond the vocabulary
            point into; (windows, tokens) int64 and (rows, hidden) float32.
        learn: trains it rounded where the step says so; None: as text teaches a decoder.

    Returns:
        What it decided and measured, JSON-ready.

    Raises:
        ConfigError: a setting that does not fit the model.
        InputError: a damaged checkpoint, or the artifact fails its parity gate.
    """
    source, partial, scratch = places.source, places.partial, places.scratch
    settings = kept_by_budget(step, source)
    windows_WT = token_samples(source, data, progress).windows
    rows_RE = None
    if seen is not None:
        windows_WT, rows_RE = torch.cat([windows_WT, seen[0]]), seen[1]
    calibrated, records = make_weights(source, settings, windows_WT, _tasks(scratch / "int8"), progress, rows_RE)
    facts: dict[str, Any] = {}

    def text_teaches(floating: Path, calibrated: Path, settings: Int8Settings) -> dict[str, Any]:
        teacher = step.teacher or model

        def wrap(task: Task, run: RunRecipe) -> Task:
            learning = taught(task, run, TRAINING, floating, teacher, step, step.distill, step.temperature)
            return RoundedTask(learning, RoundedDecoder(floating, calibrated, settings))

        names = {"student": floating, "calibrated": calibrated, "teacher": teacher} | writer_of(step, teacher)
        return train_checkpoint(floating, partial, step, TRAINING, data, scratch, progress, wrap, names)

    if step.steps == 0:
        for path in sorted(calibrated.rglob("*")):
            if path.is_file() and path.name != MANIFEST_NAME:
                _take(path, partial / path.relative_to(calibrated))
        created_by = read_manifest(calibrated).created_by
    else:
        # What it rounds to chooses smoothing scales and signs.
        floats = settings.model_copy(
            update={
                "lm_head": "keep",
                "embedding_dtype": "float32",
                "keep": ("*",),
                "keep_dtype": "float32",
                "kv_cache": "none",
                "rounding": "nearest",
            }
        )
        floating, _ = make_weights(source, floats, windows_WT, _tasks(scratch / "floating"), progress, rows_RE)
        facts["training"] = (learn or text_teaches)(floating, calibrated, settings)
        if (calibrated / FILE).exists():  # what was learnt is in the same basis
            _take(calibrated / FILE, partial / FILE)
        created_by = read_manifest(partial).created_by
    progress.start("parity with the fake-quantized model", CONTINUATION)
    parity = measure(partial, progress)
    write_parity(partial, parity)
    originals = sorted({base_hash(folder) for folder in {source, model}})
    moved = read_manifest(source).listed(MOVED) if (source / MANIFEST_NAME).exists() else []
    write_manifest(partial, "artifact", created_by, {ORIGINALS: originals} | ({MOVED: moved} if moved else {}))
    config = open_checkpoint(source).config
    quantized = {
        "target": TARGET,
        "formats": _formats(settings) | {"embedding": step.embedding_dtype, "kv_cache": step.kv_cache},
        "effective_bits": mean_bits(settings, config),
        "training_steps": step.steps,
        "layers": recorded_errors(records, settings),
        "differences": [each.model_dump() for each in parity.differences],
        "bound": parity.bound.model_dump(),
    }
    return {"kind": "quantize", "quantized": quantized, **facts}


def _formats(settings: Int8Settings) -> dict[str, str]:
    weights = "int8, a scale a channel"
    if settings.weights_bits == 4:
        kept = f" and {', '.join(settings.keep_int8)}" if settings.keep_int8 else ""
        if len(settings.keep_int8) > MOST_NAMES:
            kept = f" and {len(settings.keep_int8)} layers (see the list)"
        each = "a scale and an offset" if settings.offsets else "a scale"
        if settings.scales == "whole":
            each = "a scale a channel, whole steps and offsets"
        weights = f"int4, {each} for each {settings.group} inputs; of lm_head{kept} int8, a scale a channel"
    activations = ACTIVATIONS
    if settings.zero_points:
        above = ", ".join(settings.zero_points)
        activations = f"{ACTIVATIONS}, of {above} a scale and a zero point for each {ABOVE_INPUTS} inputs"
    if settings.offsets:
        activations = f"int8, a scale for each {settings.group} inputs, where weights have 8 bits a scale a token"
    if settings.activations_bits == 16:
        activations = "bfloat16, where weights have 8 bits int8, a scale a token"
    return {"weights": weights, "activations": activations}


def mean_bits(settings: Int8Settings, config: DecoderConfig) -> float:
    """Mean bits of a weight of the linear layers, the LM head and the scales of 4-bit weights included."""
    shapes = tensor_shapes(config)
    sizes: dict[str, int] = {"lm_head": config.vocab_size * config.hidden_size}
    for name in linear_modules(config):
        if name != "lm_head":
            rows, columns = shapes[f"{name}.weight"]
            sizes[name] = rows * columns

    group_bits = SCALE_BITS * (2 if settings.offsets else 1)  # step and offset of whole scales have 8 each

    def bits(name: str) -> float:
        if settings.keeps(name):
            return FLOAT_BITS
        return STORED_BITS if settings.bits(name) == 8 else 4 + group_bits / settings.group

    return sum(size * bits(name) for name, size in sizes.items()) / sum(sizes.values())


def recorded_errors(records: list[StepRecord], settings: Int8Settings) -> list[dict[str, Any]]:
    """Rows of the report: of each quantized layer its full name, format, and errors of weight and output."""
    rows = []
    for record in records:
        prefix = f"model.layers.{int(record.name.removeprefix('layer_'))}." if record.name.startswith("layer_") else ""
        for name, error in record.result.get("errors", {}).items():
            rows.append({"name": f"{prefix}{name}", "format": f"int{settings.bits(f'{prefix}{name}')}", **error})
    return rows


def _take(path: Path, to: Path) -> None:
    to.parent.mkdir(exist_ok=True)
    link_or_copy(path, to)


def _tasks(path: Path) -> Tasks:
    path.mkdir(parents=True, exist_ok=True)
    return Tasks(path)


class RoundedTask(WrappedTask):
    """`task`, a decoder's, learnt with rounded weights and activations; its export is an artifact without records.

    train's own evaluation multiplies with the LM head in floating point; the pipeline's runs the artifact.

    Args:
        decoder: whose transformed and calibrated forms training begins with.
    """

    def __init__(self, task: Task, decoder: RoundedDecoder) -> None:
        super().__init__(task)
        self._decoder = decoder

    def build_model(self) -> nn.Module:
        """See `Task`."""
        model = super().build_model()
        assert isinstance(model, Decoder)
        self._decoder.part(model)
        apply_rounding(model, self._decoder.schemes, self._decoder.fixed)
        self._decoder.freeze(model)
        return model

    def initialize(self, model: nn.Module) -> None:
        """See `Task`: rounded, the network is the calibrated artifact."""
        assert isinstance(model, Decoder)
        plain = super().build_model()
        super().initialize(plain)
        begin_all(model, plain, self._decoder.stored, {HEAD_MODULE: self._decoder.head_smoothing()})
        self._decoder.begin_tables(model)

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """See `Task`."""
        assert isinstance(model, Decoder)
        self._decoder.save(folder, model)
        write_manifest(folder, "artifact", created_by)


class RoundedDecoder:
    """What training knows of a decoder that is rounded: where it begins, how its layers are rounded, and how it is
    written.

    Args:
        floating, calibrated, settings: see `Learn`.

    Attributes:
        schemes: the linear layers that are rounded → how.
        fixed: those that stay as they were calibrated: a head that is one table with the embedding, which is looked up
            row by row; and layers in 8 bits beside those in 4, whose rounding costs little and whose rates would be
            others.
    """

    def __init__(self, floating: Path, calibrated: Path, settings: Int8Settings) -> None:
        self.floating, self.calibrated, self._settings = floating, calibrated, settings
        artifact = open_checkpoint(calibrated)
        assert artifact.quantization is not None, "it was calibrated"
        self._quantization = artifact.quantization
        self.config = artifact.config
        self.schemes = quantized_modules(self._quantization, linear_modules(artifact.config))
        self._int8_table = has_int8_embedding(self._quantization)
        self._one_table = self._int8_table and artifact.config.tie_word_embeddings
        bits = {scheme.bits for scheme in self.schemes.values()}
        self.fixed = {name for name, scheme in self.schemes.items() if bits == {4, 8} and scheme.bits == 8}
        if self._one_table:
            self.fixed.add(HEAD_MODULE)

    def part(self, decoder: Decoder) -> None:
        """Give `decoder` a head of its own where it is rounded and was the embedding: these are other numbers."""
        if decoder.config.tie_word_embeddings and HEAD_MODULE in self.schemes:
            tokens, width = decoder.lm_head.weight.shape
            decoder.config = decoder.config.model_copy(update={"tie_word_embeddings": False})
            decoder.lm_head = nn.Linear(width, tokens, bias=False, device=decoder.lm_head.weight.device)

    def freeze(self, decoder: Decoder) -> None:
        """Take an embedding in INT8 out of training."""
        if self._int8_table:
            decoder.get_parameter(EMBEDDING).requires_grad_(False)

    def head_smoothing(self) -> Tensor:
        """(E,) what the columns of the artifact's head are multiplied with, because its last norm is divided by it."""
        floating_E, stored_E = open_checkpoint(self.floating).get(FINAL_NORM), self.stored(FINAL_NORM)
        return torch.where(stored_E == 0, 1.0, floating_E.float() / stored_E.float())

    @torch.no_grad()
    def begin_tables(self, decoder: Decoder) -> None:
        """Give `decoder` the last norm that was calibrated, and the embedding where that is in INT8."""
        decoder.get_parameter(FINAL_NORM).copy_(self.stored(FINAL_NORM))
        if self._int8_table:
            rows_VE = QuantizedWeight(self.stored(EMBEDDING), self.stored(f"{EMBEDDING}_scale")).dequantize()
            decoder.get_parameter(EMBEDDING).copy_(rows_VE * self.stored(CHANNEL) if self._one_table else rows_VE)

    def stored(self, name: str) -> Tensor:
        """The calibrated tensor `name`."""
        return open_checkpoint(self.calibrated).get(tied_name(name) if self._one_table else name)

    def save(self, folder: Path, model: Decoder) -> None:
        """Write the artifact of `model`, whose linear layers were replaced, without a manifest."""
        extra = {"quantization_config": self._quantization}
        save_checkpoint(folder, self.config, self._tensors(model), tokenizer_from=self.floating, extra_config=extra)

    def _tensors(self, model: Decoder) -> Iterator[tuple[str, Tensor]]:
        layers, parameters, settings = rounded_layers(model), dict(model.named_parameters()), self._settings
        for name in tensor_shapes(self.config):
            module = name.removesuffix(".weight")
            if name.endswith(".weight") and module in layers:
                for stored, tensor in quantized_tensors(module, layers[module].quantized()).items():
                    yield stored, tensor.cpu()
            elif name.endswith(".weight") and module in self.fixed:
                yield from ((each, self.stored(each)) for each in self.schemes[module].tensor_names(module))
            elif name == EMBEDDING and self._int8_table:
                channel = (CHANNEL,) if self._one_table else ()
                yield from ((each, self.stored(each)) for each in (name, f"{name}_scale", *channel))
            else:
                half = name in (EMBEDDING, HEAD)
                kept = settings.keep_dtype if settings.keeps(module) else "float32"
                dtype = DTYPES[settings.embedding_dtype if half else kept]
                yield name, parameters[name].detach().to("cpu", dtype)
        if settings.kv_cache == "int8":  # as calibrated: training moves keys and values little
            for layer in model.config.attention_layers:
                for scale in ("k_scale", "v_scale"):
                    name = f"model.layers.{layer}.self_attn.{scale}"
                    yield name, self.stored(name)
