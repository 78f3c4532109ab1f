"""The pipeline's step `quantize` for a decoder: an INT8 artifact, calibrated, and trained to answer as its original.

Both ways begin with the recipe's transforms, calibration and rounding (`pipeline.py`). With steps > 0 the network then
learns on train's loop with every quantized layer rounded as the INT8 runtime rounds it, from the logits of the model
that the run begins with, or of another teacher.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import Tensor, nn

from penjing.compress.decoder.check import check_recipe, input_hashes, linear_modules
from penjing.compress.decoder.parity import measure as measure_parity
from penjing.compress.decoder.pipeline import SCHEMA, make_weights
from penjing.compress.decoder.qat import apply_fake_int8, begin_all, fake_int8_layers
from penjing.compress.decoder.settings import Calibration, Quantize, Recipe, Transform, run_key
from penjing.compress.decoder.stream import EMBEDDING
from penjing.compress.distill.networks import load_teacher
from penjing.compress.distill.objective import Distillation, DistillWeights, Teacher
from penjing.compress.distill.task import Distilled, WrappedTask
from penjing.compress.quantize.bits import kept_by_budget
from penjing.compress.steps.distill import TrainingStep, train_checkpoint
from penjing.compress.work import StepRecord, WorkFolder, link_or_copy
from penjing.core.artifact.decoder import quantization_config
from penjing.core.artifact.parity import write_parity
from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.checkpoint.dtypes import DTYPES
from penjing.core.config import Config
from penjing.core.manifest import MANIFEST_NAME, read_manifest, write_manifest
from penjing.core.models.decoder import Decoder
from penjing.core.models.tensor_names import tensor_shapes
from penjing.core.progress import Progress
from penjing.train.families.base import Task
from penjing.train.objective.objective import CrossEntropy
from penjing.train.processes.world import choose_device
from penjing.train.recipe.recipe import RunRecipe


class DecoderInt8(Config):
    """How a decoder becomes INT8 before it is trained: the sections of a recipe without steps."""

    transform: Transform = Transform()
    quantize: Quantize = Quantize()
    calibration: Calibration = Calibration()


class DecoderQuantizeStep(TrainingStep):
    """INT8 for a decoder; `steps` of training, 0 calibrates only; `temperature` and `distill` as of a distill step."""

    steps: int = Field(ge=0)
    int8: DecoderInt8 = DecoderInt8()
    temperature: float = Field(default=1.0, gt=0)
    distill: DistillWeights = DistillWeights()


def quantize_decoder(
    source: Path, teacher: Path, partial: Path, step: DecoderQuantizeStep, work: Path, progress: Progress
) -> dict[str, Any]:
    """Fill `partial`, not yet published, with the artifact of the decoder in `source`.

    Args:
        teacher: a checkpoint; not read without training.
        work: a folder for this step alone; after a kill, calibration and training go on from there.

    Returns:
        What it decided and measured, JSON-ready.

    Raises:
        ConfigError: a setting that does not fit the model.
        InputError: a damaged checkpoint, or the artifact fails its parity gate.
    """
    began = time.monotonic()
    recipe = _recipe(source, step, work / "int8")
    calibrated, records = _made(recipe, progress)
    errors = [{"name": record.name, **record.result["errors"]} for record in records if "errors" in record.result]
    facts: dict[str, Any] = {"training_steps": step.steps, "errors": errors}
    if step.steps == 0:
        for path in sorted(calibrated.iterdir()):
            if path.name != MANIFEST_NAME:
                link_or_copy(path, partial / path.name)
    else:
        floats = Quantize(lm_head="keep", embedding_dtype="float32", keep=("*",), rounding="nearest")
        floating, _ = _made(recipe.model_copy(update={"quantize": floats, "output": work / "floating"}), progress)

        def wrap(task: Task, run: RunRecipe) -> Task:
            return Int8Task(_taught(task, run, floating, teacher, step), floating, calibrated, recipe.quantize)

        names = {"student": floating, "calibrated": calibrated, "teacher": teacher}
        facts |= {"training": train_checkpoint(floating, partial, step, work, progress, wrap, names)}
    parity = measure_parity(partial, progress)
    write_parity(partial, parity)
    created_by = read_manifest(calibrated).created_by if step.steps == 0 else read_manifest(partial).created_by
    write_manifest(partial, "artifact", created_by)
    differences = [each.model_dump() for each in parity.differences]
    return facts | {"parity": differences, "seconds": time.monotonic() - began}


def check_decoder_step(model: Path, step: DecoderQuantizeStep) -> None:
    """Refuse settings that do not fit the model, before anything is done.

    Raises:
        ConfigError: as `preflight.check_recipe`.
    """
    check_recipe(_recipe(model, step, model), open_checkpoint(model).config)


def _recipe(source: Path, step: DecoderQuantizeStep, output: Path) -> Recipe:
    int8 = step.int8
    recipe = Recipe(
        model=source,
        output=output,
        transform=int8.transform,
        quantize=int8.quantize,
        calibration=int8.calibration,
    )
    return kept_by_budget(recipe)


def _made(recipe: Recipe, progress: Progress) -> tuple[Path, list[StepRecord]]:
    """The weights of `recipe` in the work folder beside its output."""
    key = run_key(recipe, input_hashes(open_checkpoint(recipe.model)), SCHEMA)
    with WorkFolder(recipe.output, key) as folder:
        return make_weights(recipe, folder, progress)


def _taught(task: Task, run: RunRecipe, student: Path, teacher: Path, step: DecoderQuantizeStep) -> Task:
    plain = task.objective.evaluation()
    assert isinstance(plain, CrossEntropy)
    answers = Teacher(load_teacher(student, teacher), plain.inputs, choose_device(run.device), run.precision.mode)
    return Distilled(task, Distillation(plain, answers, step.distill, step.temperature), run.seed)


class Int8Task(WrappedTask):
    """`task`, a decoder's, learnt with rounded weights and activations; its export is an artifact without records.

    train's own evaluation multiplies with the LM head in floating point; the pipeline's runs the artifact.

    Args:
        floating: the transformed checkpoint that the network begins with.
        calibrated: the artifact made of it, whose integers and scales training begins with.
    """

    def __init__(self, task: Task, floating: Path, calibrated: Path, quantize: Quantize) -> None:
        super().__init__(task)
        self._floating, self._calibrated, self._quantize = floating, calibrated, quantize
        config = open_checkpoint(floating).config
        self._kept = [name for name in linear_modules(config) if quantize.keeps(name)]
        self._names = [name for name in linear_modules(config) if not quantize.keeps(name)]

    def build_model(self) -> nn.Module:
        """See `Task`."""
        model = super().build_model()
        apply_fake_int8(model, self._names)
        return model

    def initialize(self, model: nn.Module) -> None:
        """See `Task`: rounded, the network is the calibrated artifact."""
        plain = super().build_model()
        super().initialize(plain)
        begin_all(model, plain, lambda name: open_checkpoint(self._calibrated).get(name))

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """See `Task`."""
        assert isinstance(model, Decoder)
        extra = {"quantization_config": quantization_config(self._kept, kv_scales=self._quantize.kv_cache == "int8")}
        tensors = self._tensors(model)
        save_checkpoint(folder, model.config, tensors, tokenizer_from=self._floating, extra_config=extra)
        write_manifest(folder, "artifact", created_by)

    def _tensors(self, model: Decoder) -> Iterator[tuple[str, Tensor]]:
        layers, parameters = fake_int8_layers(model), dict(model.named_parameters())
        for name in tensor_shapes(model.config):
            module = name.removesuffix(".weight")
            if name.endswith(".weight") and module in layers:
                quantized = layers[module].quantized()
                yield name, quantized.weight_NK.cpu()
                yield f"{name}_scale", quantized.scale_N1.cpu()
            else:
                half = name == EMBEDDING or name == "lm_head.weight"
                dtype = DTYPES[self._quantize.embedding_dtype if half else "float32"]
                yield name, parameters[name].detach().to("cpu", dtype)
        if self._quantize.kv_cache == "int8":  # as calibrated: training moves keys and values little
            calibrated = open_checkpoint(self._calibrated)
            for layer in range(model.config.num_hidden_layers):
                for scale in ("k_scale", "v_scale"):
                    name = f"model.layers.{layer}.self_attn.{scale}"
                    yield name, calibrated.get(name)
