"""`penjing compress`: a checkpoint and a recipe → an INT8 artifact with its report and parity record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from penjing.compress.decoder.check import (
    check_finite,
    check_model,
    check_recipe,
    input_hashes,
    linear_modules,
    make_plan,
    preflight,
    transformed,
)
from penjing.compress.decoder.head import compress_embedding, compress_head, embed_for_calibration, unties
from penjing.compress.decoder.layer import SAMPLE_ROWS, Rotations, compress_layer
from penjing.compress.decoder.parity import PROMPTS
from penjing.compress.decoder.parity import measure as measure_parity
from penjing.compress.decoder.settings import Recipe, recipe_toml, run_key
from penjing.compress.decoder.stream import LayerStream
from penjing.compress.measure.perplexity import evaluation_windows, streamed_perplexity
from penjing.compress.quantize.bits import kept_by_budget
from penjing.compress.report.decoder_page import report_page
from penjing.compress.report.decoder_report import make_report, summary_line
from penjing.compress.work import StepRecord, WorkFolder, already_made, link_or_copy
from penjing.core.artifact.base import RECIPE_FILE, REPORT_FILE, REPORT_PAGE
from penjing.core.artifact.decoder import open_decoder_artifact, quantization_config
from penjing.core.artifact.parity import Parity, write_parity
from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.config import load_recipe
from penjing.core.files import atomic_write_text, publish_folder
from penjing.core.manifest import MANIFEST_NAME, write_manifest
from penjing.core.progress import Progress, Silent
from penjing.core.text.corpus import calibration_windows
from penjing.core.text.tokenizer import Tokenizer

SCHEMA = "2"  # raise when the artifact made from the same recipe and input changes


def compress(
    recipe_path: Path,
    overrides: list[str] | None = None,
    *,
    out: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Make the artifact that `recipe_path` describes; a killed run goes on at its last complete step.

    Args:
        recipe_path: TOML recipe (`compress.recipe.Recipe`).
        overrides: "section.key=value", as after `--set`.
        out: replaces the recipe's output folder.
        force: replace an artifact that another recipe or input made.

    Returns:
        The artifact folder; it appears only when it is complete. The same recipe and input give what is there.

    Raises:
        ConfigError: the recipe is wrong.
        InputError: the model is damaged, quantized already or of another kind; the output holds something else.
        SetupError: too little memory or disk, no permission, another process works on the same output.
    """
    progress = progress or Silent()
    recipe = load_recipe(Recipe, recipe_path, overrides)
    if out is not None:
        recipe = recipe.model_copy(update={"output": out})
    checkpoint = open_checkpoint(recipe.model)
    check_model(checkpoint)
    recipe = kept_by_budget(recipe)
    check_recipe(recipe, checkpoint.config)
    key = run_key(recipe, input_hashes(checkpoint), f"{version('penjing')}/{SCHEMA}")
    if already_made(recipe.output, key, force, open_decoder_artifact, progress):
        return recipe.output
    command = " ".join(["penjing compress", str(recipe_path), *(f"--set {text}" for text in overrides or [])])
    with WorkFolder(recipe.output, key) as work:
        plan = make_plan(recipe, checkpoint.config)
        preflight(recipe, plan, work.path, progress)
        if work.num_resumed:
            progress.note(f"going on after {work.last_step}: {work.num_resumed} steps were complete")
        _Run(recipe, LayerStream(checkpoint), work, progress).all_steps(command, force)
        work.remove()
    return recipe.output


def make_weights(recipe: Recipe, work: WorkFolder, progress: Progress) -> tuple[Path, list[StepRecord]]:
    """Transform and quantize without measuring anything: a checkpoint folder inside the work folder, and its steps.

    It is an artifact without its records; a floating checkpoint where the recipe keeps every layer. A killed run goes
    on at its last complete step.
    """
    stream = LayerStream(open_checkpoint(recipe.model))
    records = _Run(recipe, stream, work, progress).make()
    return work.path / "artifact", records


class _Run:
    """The steps of one run, in order."""

    def __init__(self, recipe: Recipe, stream: LayerStream, work: WorkFolder, progress: Progress) -> None:
        self.recipe, self.stream, self.work, self.progress = recipe, stream, work, progress
        self.config = stream.config
        self.tokenizer = Tokenizer.from_folder(recipe.model)
        self.rotations = Rotations.of(recipe, self.config.hidden_size, self.config.head_dim)
        self._hidden_WTE: Tensor | None = None  # of the calibration text, after the last layer that this run did

    def all_steps(self, command: str, force: bool) -> None:
        check = self.work.run("check", self._check)
        before = self.work.run("fp32", self._fp32)
        made = self.make()
        after = [self.work.run(name, step) for name, step in (("int8", self._int8), ("parity", self._parity))]
        self._publish(command, [check, before, *made, *after], force)

    def make(self) -> list[StepRecord]:
        """The weights of the artifact, in the folder `artifact` of the work folder."""
        num_layers, records = self.config.num_hidden_layers, []
        self.progress.start("compressing layers", num_layers)
        for layer in range(num_layers):
            name = _layer_name(layer)
            records.append(self.work.run(name, lambda layer=layer: self._layer(layer)))
            if layer:
                self.work.discard(_hidden_name(layer - 1))
            self.progress.advance()
        records += [self.work.run(name, step) for name, step in (("head", self._head), ("assemble", self._assemble))]
        return records

    def _check(self) -> dict[str, Any]:
        check_finite(self.stream.checkpoint, self.progress)
        return {}

    def _fp32(self) -> dict[str, Any]:
        self.progress.start("perplexity of the model", self.config.num_hidden_layers)
        return streamed_perplexity(self.stream, self._evaluation(), self.progress)

    def _layer(self, layer: int) -> dict[str, Any]:
        hidden_WTE = self._hidden_after(layer - 1)
        compressed = compress_layer(self.stream, layer, self.recipe, self.rotations, hidden_WTE)
        self.work.save(_layer_name(layer), compressed.tensors)
        self.work.save(_hidden_name(layer), {"hidden": hidden_WTE})
        self._hidden_WTE = hidden_WTE
        return {"errors": {name: error.as_dict() for name, error in compressed.errors.items()}}

    def _hidden_after(self, layer: int) -> Tensor:
        if self._hidden_WTE is not None:
            return self._hidden_WTE
        if layer >= 0:
            return self.work.load(_hidden_name(layer))["hidden"]
        calibration = self.recipe.calibration
        windows = calibration_windows(self.tokenizer, calibration.num_tokens, calibration.window, calibration.code)
        return embed_for_calibration(self.stream, self.rotations, windows)

    def _head(self) -> dict[str, Any]:
        self.progress.start("compressing the head", 1)
        hidden_ME = self._hidden_after(self.config.num_hidden_layers - 1).flatten(0, 1)
        sample_ME = hidden_ME[:: max(1, hidden_ME.shape[0] // SAMPLE_ROWS)]
        compressed = compress_head(self.stream, self.recipe, self.rotations, sample_ME)
        self.work.save("head", compressed.tensors)
        self._hidden_WTE = None
        return {"errors": {} if compressed.error is None else {"lm_head": compressed.error.as_dict()}}

    def _assemble(self) -> dict[str, Any]:
        self.progress.start("writing the artifact", self.config.num_hidden_layers + 2)
        folder = self.work.path / "artifact"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        linears = linear_modules(self.config)
        keep = [name for name in linears if self.recipe.quantize.keeps(name)]
        kv_scales = self.recipe.quantize.kv_cache == "int8"
        quantized = {} if keep == linears else {"quantization_config": quantization_config(keep, kv_scales=kv_scales)}
        tied = self.config.tie_word_embeddings and not unties(self.recipe)
        total = save_checkpoint(
            folder,
            transformed(self.config, self.recipe.transform).model_copy(update={"tie_word_embeddings": tied}),
            self._tensors(),
            tokenizer_from=self.recipe.model,
            extra_config=quantized,
        )
        write_manifest(folder, "artifact" if quantized else "checkpoint", {"command": "penjing compress"})
        return {"bytes": total}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from compress_embedding(self.stream, self.recipe, self.rotations).items()
        self.progress.advance()
        for layer in range(self.config.num_hidden_layers):
            for name, tensor in self.work.load(_layer_name(layer)).items():
                yield f"model.layers.{layer}.{name}", tensor
            self.progress.advance()
        yield from self.work.load("head").items()
        self.progress.advance()

    def _int8(self) -> dict[str, Any]:
        self.progress.start("perplexity of the artifact", self.config.num_hidden_layers)
        made = LayerStream(open_checkpoint(self.work.path / "artifact"))
        return streamed_perplexity(made, self._evaluation(), self.progress)

    def _parity(self) -> dict[str, Any]:
        self.progress.start("parity with the fake-quantized model", len(PROMPTS))
        return measure_parity(self.work.path / "artifact", self.progress).model_dump(mode="json")

    def _publish(self, command: str, steps: list[StepRecord], force: bool) -> None:
        parity = next(step.result for step in steps if step.name == "parity")
        report = make_report(self.recipe, self.stream.checkpoint, steps, command, self.work.num_resumed)
        made = self.work.path / "artifact"
        with publish_folder(self.recipe.output, replace=force) as partial:
            for path in sorted(made.iterdir()):
                if path.name != MANIFEST_NAME:
                    link_or_copy(path, partial / path.name)
            atomic_write_text(partial / RECIPE_FILE, recipe_toml(self.recipe))
            write_parity(partial, Parity.model_validate(parity))
            atomic_write_text(partial / REPORT_FILE, json.dumps(report, indent=2) + "\n")
            atomic_write_text(partial / REPORT_PAGE, report_page(report))
            created_by = {"command": command, "penjing": version("penjing"), "model": report["model"]}
            write_manifest(partial, "artifact", created_by, {"key": self.work.key})
        self.progress.note(summary_line(report))

    def _evaluation(self) -> dict[str, Tensor]:
        evaluate = self.recipe.evaluate
        return evaluation_windows(self.tokenizer, evaluate.prose_tokens, evaluate.code_tokens, evaluate.window)


def _layer_name(layer: int) -> str:
    return f"layer_{layer:03d}"


def _hidden_name(layer: int) -> str:
    return f"hidden_{layer:03d}"
