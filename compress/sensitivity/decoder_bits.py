"""`penjing compress sensitivity --bits`: what each layer of a decoder costs in perplexity when it alone is rounded.

The network is transformed first as a recipe does (rotation, smoothing): outliers that it takes away make no layer
sensitive. Each decoder layer and the LM head are then rounded to each width, weights by row and activations by token,
and measured. Each linear layer also gets a score from one backward pass, ½ Σ_t (g_t · ΔY_t)²: half the empirical Fisher
information along the error of its outputs, about the rise of the loss in nats; see https://arxiv.org/abs/2001.00281.
`quantize/bits.py` spends a budget by that score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from penjing.compress.decoder.check import check_model, input_hashes, linear_modules
from penjing.compress.decoder.pipeline import make_weights
from penjing.compress.decoder.settings import Calibration, Quantize, Recipe, Transform
from penjing.compress.measure.data import is_classifier
from penjing.compress.measure.perplexity import LARGEST_LOSS, evaluation_windows
from penjing.compress.sensitivity.decoder_bits_page import decoder_bits_page
from penjing.compress.sensitivity.study import about, measure_cells, run_study
from penjing.compress.sensitivity.widths import Widths, round_rows
from penjing.compress.work import WorkFolder
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.config import key_of
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Progress, Silent
from penjing.core.text.corpus import calibration_windows
from penjing.core.text.tokenizer import Tokenizer

FLOATS = Quantize(lm_head="keep", embedding_dtype="float32", keep=("*",), rounding="nearest")


class DecoderBits(Widths):
    """The text that is measured on, and what is done to the network before a layer is rounded."""

    windows: int = Field(default=4, ge=2)  # half of the calibration data is code
    window: int = Field(default=256, ge=16)
    transform: Transform = Transform()
    calibration: Calibration = Calibration()


def sensitivity_to_bits(
    folder: Path,
    settings: DecoderBits | None = None,
    *,
    out: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure; each cell is kept beside `out` until all are there, so that a killed run goes on.

    Args:
        folder: a decoder's checkpoint, not quantized.
        out: the folder to make, with sensitivity.json and sensitivity.html; FOLDER-bits when left out.

    Returns:
        {baseline, layers: [{name, score, cells: [{bits, value, loss}]}], linears: [{name, parameters, scores}], …}.

    Raises:
        ConfigError: windows longer than the model's context.
        InputError: a damaged checkpoint, or a classifier; `out` holds something else.
        SetupError: no permission, no space, another process works on the same output.
    """
    settings, progress = settings or DecoderBits(), progress or Silent()
    if is_classifier(folder):
        raise InputError(f"{folder} is a classifier; take sensitivity.classifier_bits")
    checkpoint = open_checkpoint(folder)
    check_model(checkpoint)
    for name, window in (("window", settings.window), ("calibration.window", settings.calibration.window)):
        if window > checkpoint.config.max_position_embeddings:
            context = checkpoint.config.max_position_embeddings
            raise ConfigError(f"{name}={window} is longer than the context of {folder}, {context} tokens")
    out = out or folder.with_name(f"{folder.resolve().name}-bits")
    hashes = input_hashes(checkpoint)
    key = key_of(settings.model_dump(mode="json"), hashes, f"{version('penjing')}/bits/2")

    def measure(work: WorkFolder) -> dict[str, Any]:
        recipe = Recipe(
            model=folder, output=out, transform=settings.transform, quantize=FLOATS, calibration=settings.calibration
        )
        floating, _ = make_weights(recipe, work, progress)
        found = _measure(load_model(floating).model, _windows(folder, settings), settings, work, progress)
        return found | {"kind": "bits", "input": hashes} | about(folder, settings)

    return run_study(out, key, measure, decoder_bits_page, force=force, progress=progress)


def _windows(folder: Path, settings: DecoderBits) -> Tensor:
    tokens, tokenizer = settings.windows * settings.window, Tokenizer.from_folder(folder)
    if settings.data == "calibration":
        return calibration_windows(tokenizer, tokens, settings.window, 0.5)
    half = settings.windows // 2 * settings.window
    return torch.cat(list(evaluation_windows(tokenizer, tokens - half, half, settings.window).values()))


def _measure(
    model: Decoder, windows_WT: Tensor, settings: DecoderBits, work: WorkFolder, progress: Progress
) -> dict[str, Any]:
    names = linear_modules(model.config)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(".".join(name.split(".")[:3]), []).append(name)
    baseline = work.run("baseline", lambda: _judge(model, windows_WT)).result
    if not baseline["loss"] < LARGEST_LOSS:
        raise InputError(f"the model's loss is {baseline['loss']:.3g} a token: it is damaged, or its training diverged")
    progress.start("scores", len(windows_WT))
    scores = work.run("scores", lambda: fisher_scores(model, windows_WT, names, settings.widths, progress)).result

    def cell(members: list[str], bits: int) -> Callable[[], dict[str, Any]]:
        def measure() -> dict[str, Any]:
            with rounded(model, members, bits):
                return {"bits": bits, **_judge(model, windows_WT)}

        return measure

    cells = {
        f"cell_{group}_{bits}": cell(members, bits) for group, members in groups.items() for bits in settings.widths
    }
    results = iter(measure_cells(work, f"rounding {len(groups)} layers one by one", cells, progress))
    layers = []
    for group, members in groups.items():
        total = {str(bits): sum(scores[name][str(bits)] for name in members) for bits in settings.widths}
        layers.append({"name": group, "scores": total, "cells": [next(results) for _ in settings.widths]})
    linears = [
        {"name": name, "parameters": _linear(model, name).weight.numel(), "scores": scores[name]} for name in names
    ]
    return {"baseline": baseline, "layers": layers, "linears": linears}


@contextmanager
def rounded(model: nn.Module, names: list[str], bits: int) -> Iterator[None]:
    """Inside the block the linear layers `names` compute with `bits`; afterwards every bit is as before."""

    def compute(layer: nn.Linear) -> Callable[..., Tensor]:
        weight_NK = round_rows(layer.weight, bits)
        return lambda _, inputs, __: F.linear(round_rows(inputs[0], bits), weight_NK, layer.bias)

    handles = [layer.register_forward_hook(compute(layer)) for layer in (_linear(model, name) for name in names)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fisher_scores(
    model: nn.Module, windows_WT: Tensor, names: list[str], widths: tuple[int, ...], progress: Progress | None = None
) -> dict[str, dict[str, float]]:
    """½ Σ_t (g_t · ΔY_t)² a token of each linear layer and width (as a string), in nats; see the module.

    Args:
        windows_WT: (W, T) tokens; g is the gradient of the summed loss of a window's next tokens.
    """
    scores = {name: {str(bits): 0.0 for bits in widths} for name in names}

    def watch(name: str, layer: nn.Linear) -> Any:
        def forward(_: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
            x, kept = inputs[0].detach(), y.detach()

            def backward(gradient: Tensor) -> None:
                for bits in widths:
                    error = F.linear(round_rows(x, bits), round_rows(layer.weight, bits), layer.bias) - kept
                    scores[name][str(bits)] += float((gradient * error).sum(dim=-1).square().sum())

            y.register_hook(backward)

        return layer.register_forward_hook(forward)

    handles = [watch(name, _linear(model, name)) for name in names]
    handles.append(model.get_submodule("model.embed_tokens").register_forward_hook(lambda _, __, y: y.requires_grad_()))
    try:
        for tokens_T in windows_WT:
            with torch.enable_grad():
                logits_TV = model(tokens_T[None, :-1])[0]
                F.cross_entropy(logits_TV, tokens_T[1:], reduction="sum").backward()
            if progress is not None:
                progress.advance()
    finally:
        for handle in handles:
            handle.remove()
    counted = windows_WT[:, 1:].numel()
    return {name: {bits: value / 2 / counted for bits, value in found.items()} for name, found in scores.items()}


@torch.no_grad()
def _judge(model: nn.Module, windows_WT: Tensor) -> dict[str, Any]:
    """`value` (perplexity), `loss` (nats a token, cut where nothing is learnt from more), `samples` (windows)."""
    total = 0.0
    for tokens_T in windows_WT:
        logits_TV = model(tokens_T[None, :-1])[0]
        total += float(F.cross_entropy(logits_TV, tokens_T[1:], reduction="sum"))
    mean = total / windows_WT[:, 1:].numel()
    mean = mean if mean < LARGEST_LOSS else LARGEST_LOSS  # NaN too
    return {"value": math.exp(mean), "loss": mean, "samples": len(windows_WT)}


def _linear(model: nn.Module, name: str) -> nn.Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear), name
    return layer
