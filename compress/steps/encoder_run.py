"""`penjing compress` of a text encoder: calibrate, write ONNX, check parity and quality, publish."""

from __future__ import annotations

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from penjing.compress.decoder.settings import recipe_toml
from penjing.compress.export.graph import OPSET
from penjing.compress.export.onnx_encoder import export_encoder
from penjing.compress.measure.retrieval import compare, embed_with
from penjing.compress.measure.texts import calibration_paragraphs, retrieval_set
from penjing.compress.quantize.artifact import X64_REASON
from penjing.compress.quantize.biases import absorb_biases
from penjing.compress.quantize.encoder_parity import measure as measure_parity
from penjing.compress.quantize.encoder_settings import EncoderRecipe
from penjing.compress.quantize.errors import layer_errors
from penjing.compress.quantize.place_bert import apply_quantization
from penjing.compress.quantize.place_resnet import calibrate
from penjing.compress.quantize.smooth import smooth
from penjing.compress.quantize.targets import resolve
from penjing.compress.report.encoder_page import encoder_page
from penjing.compress.work import already_made
from penjing.core.artifact.base import MODEL_FILE, QUANTIZATION_FILE, RECIPE_FILE, REPORT_FILE, REPORT_PAGE
from penjing.core.artifact.onnx import Quantization
from penjing.core.artifact.onnx_encoder import embed_texts, open_encoder_artifact, open_encoder_session
from penjing.core.artifact.parity import write_parity
from penjing.core.checkpoint.encoder import WEIGHTS, load_encoder, save_encoder_files
from penjing.core.config import key_of, load_recipe
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text, publish_folder, sha256_file
from penjing.core.info import processor, versions
from penjing.core.manifest import write_manifest
from penjing.core.progress import Progress
from penjing.core.text.text_tokenizer import TextTokenizer

SCHEMA = "2"  # raise when the artifact made from the same recipe and input changes
PARITY_TEXTS = 32
ERROR_TEXTS = 8  # on which each layer is compared with its floating self


def compress_encoder(
    recipe_path: Path, overrides: list[str], *, out: Path | None, force: bool, progress: Progress
) -> Path:
    """Make the artifact that `recipe_path` (`EncoderRecipe`) describes; it appears only when it is complete.

    Returns:
        The artifact folder. The same recipe and input give what is there.

    Raises:
        ConfigError: the recipe is wrong, or asks for what its target cannot express.
        InputError: the model is damaged, the output holds something else, or a bound is not kept.
        SetupError: disk full, no permission.
    """
    recipe = load_recipe(EncoderRecipe, recipe_path, overrides)
    if out is not None:
        recipe = recipe.model_copy(update={"output": out})
    resolve(recipe.quantize.target, recipe.quantize)
    model = load_encoder(recipe.model)
    inputs = {name: sha256_file(recipe.model / name) for name in ("config.json", WEIGHTS, "tokenizer.json")}
    key = key_of(recipe.settings(), inputs, version("penjing"), SCHEMA)
    if already_made(recipe.output, key, force, open_encoder_artifact, progress):
        return recipe.output
    command = " ".join(["penjing compress", str(recipe_path), *(f"--set {text}" for text in overrides)])
    tokenizer = TextTokenizer(recipe.model, model.config)
    with publish_folder(recipe.output, replace=force) as partial:
        save_encoder_files(partial, model.config, recipe.model, tokenizer.max_tokens)
        report = _Run(recipe, tokenizer, partial, progress).make(model, command)
        atomic_write_text(partial / RECIPE_FILE, recipe_toml(recipe))
        write_manifest(partial, "artifact", {"command": command, "versions": versions()}, {"key": key})
    quality = report["quality"]
    progress.note(
        f"{recipe.output}: {report['bytes_fp32'] / 1e6:.0f} → {report['bytes_int8'] / 1e6:.1f} MB, cosine to FP32 "
        f"{quality['cosine_mean']:.4f}, nearest document unchanged for {quality['top1_unchanged']:.1%} of "
        f"{quality['queries']} queries"
    )
    return recipe.output


class _Run:
    """What fills the artifact folder."""

    def __init__(self, recipe: EncoderRecipe, tokenizer: TextTokenizer, partial: Path, progress: Progress) -> None:
        self.recipe, self.tokenizer, self.partial, self.progress = recipe, tokenizer, partial, progress

    def make(self, model: Any, command: str) -> dict[str, Any]:
        """Quantize `model`, in place, and write all but recipe and manifest; what `report.json` holds."""
        began, recipe, settings = time.monotonic(), self.recipe, self.recipe.quantize
        target, activations, weights = resolve(settings.target, settings)
        retrieval = retrieval_set(recipe.texts.evaluate)
        texts = retrieval.queries + retrieval.documents
        self.progress.start("embedding with the FP32 model", len(texts))
        before = embed_with(model, self.tokenizer, texts, self.progress)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        calibration = calibration_paragraphs(recipe.texts.calibrate)
        self.progress.start("calibrating", len(calibration) * (1 + settings.smooth))
        absorb_biases(model)
        factors = smooth(model, self._watched(calibration), settings) if settings.smooth else {}
        calibrate(apply_quantization(model, settings, factors), self._watched(calibration))
        quantization = Quantization(
            target=settings.target,
            activations=activations,
            weights=weights,
            opset=OPSET,
            session_options=target.session_options,
            session_options_reason=X64_REASON if target.session_options else "",
        )
        self.progress.start("checking the artifact", 3)
        file = self.partial / MODEL_FILE
        size = export_encoder(model, settings.target, file)
        self.progress.advance()
        checked = texts[:: max(1, len(texts) // PARITY_TEXTS)][:PARITY_TEXTS]
        bound = round(1 - recipe.bounds.parity, 12)  # of a distance; without the last digits of the subtraction
        parity = measure_parity(model, file, self.tokenizer, quantization, checked, bound)
        self.progress.advance()
        session = open_encoder_session(file, quantization.session_options)
        quality = compare(retrieval, before, lambda texts: embed_texts(session, self.tokenizer, texts))
        self.progress.advance()
        if not quality["cosine_mean"] >= recipe.bounds.cosine:
            raise InputError(
                f"the INT8 embeddings have a mean cosine of {quality['cosine_mean']:.4f} with the FP32 model's, "
                f'bounds.cosine is {recipe.bounds.cosine:g}; try quantize.observer="mse", keep layers in floating '
                "point (quantize.keep), or lower the bound"
            )
        report = {
            "schema_version": 1,
            "kind": "encoder",
            "model": recipe.model.name,
            "target": settings.target,
            "formats": {"activations": activations, "weights": weights, "embedding": settings.embedding},
            "parameters": parameters,
            "bytes_fp32": 4 * parameters,
            "bytes_int8": size,
            "quality": quality,
            "parity": {
                "smallest": {each.between[1]: 1 - each.largest for each in parity.differences},
                "mean": {each.between[1]: 1 - each.mean for each in parity.differences},
                "bound": recipe.bounds.parity,
            },
            "layers": layer_errors(model, self._batches(calibration[:ERROR_TEXTS])),
            "recipe": recipe.model_dump(mode="json"),
            "command": command,
            "versions": versions(),
            "processor": processor(),
            "seconds": time.monotonic() - began,
        }
        write_parity(self.partial, parity)
        for name, content in ((QUANTIZATION_FILE, quantization.model_dump()), (REPORT_FILE, report)):
            atomic_write_text(self.partial / name, json.dumps(content, indent=2) + "\n")
        atomic_write_text(self.partial / REPORT_PAGE, encoder_page(report))
        return report

    def _watched(self, texts: list[str]) -> Any:
        for batch in self._batches(texts):
            yield batch
            self.progress.advance()

    def _batches(self, texts: list[str]) -> Any:
        # one text at a time: what stands at padding would widen the ranges
        return (self.tokenizer([text]).tensors() for text in texts)
